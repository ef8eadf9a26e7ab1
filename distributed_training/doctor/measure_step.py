"""One rank of the doctor's measurement: trains random tokens on random weights, prints the speed.

Started by :mod:`.command`, one process a rank; DT_MEASURE holds model and seconds as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta

from distributed_training.common.processes import die_with_parent
from distributed_training.config import ConfigError, exit_with, load_config
from distributed_training.miner.run_folder import rank_environment

WARM_UP_STEPS = 2  # micro-batches: the first ones compile kernels and fill caches


def main(argv: list[str]) -> int:
    die_with_parent(signal.SIGKILL)
    if "DT_MEASURE" not in os.environ:
        raise ConfigError("DT_MEASURE is not set, so nothing is measured: run the doctor")
    order = json.loads(os.environ["DT_MEASURE"])
    config = load_config("miner", argv, check=False)
    me = rank_environment()

    import torch
    import torch.distributed as dist

    from distributed_training.training.collectives import Layout
    from distributed_training.training.trainer import Trainer

    cuda = config.miner.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", me.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    trainer = Trainer(
        settings=config.training,
        model_config=order["model"],
        device=device,
        layout=Layout(me.rank, me.world_size),
    )
    trainer.load_weights(None)
    trainer.begin_epoch(0)
    shape = (trainer.micro_batch_size, config.training.sequence_length)
    batch = torch.randint(0, int(order["model"]["vocab_size"]), shape, dtype=torch.int64)

    def run() -> None:
        trainer.add_micro_batch(batch, data_wait_seconds=0.0)
        if cuda:
            torch.cuda.synchronize()

    for _ in range(WARM_UP_STEPS):
        run()
    done, start, ours = 0, time.perf_counter(), torch.zeros(1)
    while not ours.item():
        run()
        done += 1
        ours[0] = float(time.perf_counter() - start > order["seconds"])
        dist.broadcast(ours, 0, group=dist.group.WORLD)  # all ranks stop at the same micro-batch
    seconds = (time.perf_counter() - start) / done
    if me.rank == 0:
        found = {"micro_batch_seconds": seconds, "micro_batches": trainer.micro_batches_per_step}
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except ConfigError as error:
        status = exit_with(error)
    sys.exit(status)
