"""Settings of the loop and of the launcher."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from .flags import flag

MASTER_HOTKEY = "5EnC86fRRRoaXUZvkrDFYpAihuyEAp3wGkY5r3Gak1kPTDVP"


@dataclass(frozen=True)
class MinerSettings:
    """What the loop and the launcher need and no room owns."""

    name: str = flag(
        "neuron.name",
        "miner",
        "name of this neuron: names the default run folder and the log lines",
    )
    run_folder: Path | None = flag(
        "neuron.run_folder",
        None,
        "everything this neuron must not lose: checkpoints, journals, logs; one per neuron "
        "(default ./runs/<neuron.name>-<wallet.hotkey>)",
        env="DT_RUN_FOLDER",
    )
    nproc_per_node: int | None = flag(
        "nproc_per_node",
        None,
        "ranks to start, usually one per GPU (default: one per visible GPU, or 1 without a GPU)",
        aliases=("neuron.nproc_per_node",),
    )
    device: str = flag(
        "neuron.device",
        "auto",
        "what the ranks train on: auto takes the GPU if there is one",
        choices=("auto", "cuda", "cpu"),
    )
    stop_timeout: timedelta = flag(
        "neuron.stop_timeout",
        timedelta(seconds=60),
        "how long a stop may take (finish the micro-batch, checkpoint, close) before the ranks are "
        "ended by force; pm2's kill_timeout must be longer",
    )
    epoch_length: int = flag(
        "neuron.epoch_length", 160, "blocks between two synchronizations with the metagraph"
    )
    blocks_per_allreduce: int = flag(
        "neuron.blocks_per_allreduce",
        400,
        "blocks between two all-reduce rounds, as the validator counts them (1 block = 12 s)",
    )
    global_model_name: str = flag(
        "neuron.global_model_name",
        "llama-4b-ws-4",
        "bucket of the global model; a miner's own bucket is this name and its uid",
    )
    global_tokenizer_name: str = flag(
        "neuron.global_tokenizer_name",
        "dstrbtd/llama-1b",
        "tokenizer, by its Hugging Face name or as a folder",
    )
    master_ss58_address: str = flag(
        "neuron.master_ss58_address",
        MASTER_HOTKEY,
        "hotkey of the validator that owns the global bucket and calls the rounds",
    )
    round_reload_timeout: timedelta = flag(
        "neuron.round_reload_timeout",
        timedelta(seconds=2640),
        "after the start of a round: how long to wait for the validator's new global state before "
        "this miner compares epochs and loads what the bucket holds",
    )
    epoch_check_blocks: int = flag(
        "neuron.epoch_check_blocks",
        25,
        "blocks between two looks at the outer step of the global bucket while training",
    )
    checkpoint_steps: int = flag(
        "neuron.checkpoint_steps",
        25,
        "inner steps between two local checkpoints; one is also written at each stop",
    )
    keep_checkpoints: int = flag(
        "neuron.keep_checkpoints", 2, "local checkpoints to keep; older ones are deleted"
    )
