"""Settings of the loop and of the launcher."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from distributed_training.protocol import names

from .flags import DAY, SECOND, SETTINGS, flag
from .values import Duration, File, FileName, GlobalBucket, Hotkey


@dataclass(frozen=True, config=SETTINGS)
class MinerSettings:
    """What the loop and the launcher need and no room owns."""

    name: FileName = flag("neuron.name", "miner")
    """name of this neuron: names the default run folder and the log lines"""
    run_folder: File | None = flag("neuron.run_folder", None, env="DT_RUN_FOLDER")
    """everything this neuron must not lose: checkpoints, journals, logs; one per neuron (default
    ./runs/<neuron.name>-<wallet.hotkey>)"""
    nproc_per_node: int | None = flag(
        "nproc_per_node", None, ge=1, le=64, aliases=("neuron.nproc_per_node",)
    )
    """ranks to start, usually one per GPU (default: one per visible GPU, or 1 without a GPU)"""
    device: Literal["auto", "cuda", "cpu"] = flag("neuron.device", "auto")
    """what the ranks train on: auto takes the GPU if there is one"""
    stop_timeout: Duration = flag("neuron.stop_timeout", 60 * SECOND, ge=SECOND, le=DAY)
    """how long a stop may take (finish the micro-batch, checkpoint, close) before the ranks are
    ended by force; at least twice what the last checkpoint took. pm2's kill_timeout must be
    longer"""
    hang_timeout: Duration = flag("neuron.hang_timeout", 1200 * SECOND, ge=SECOND, le=DAY)
    """ranks that come to no micro-batch boundary for so long, or no further in their start, hang:
    the stacks of all processes are written to stacks.txt in the run folder, and the ranks start
    again from their last checkpoint. Waiting for data, a round or an upload does not count;
    compiling, loading weights and waiting until a checkpoint is written do"""
    epoch_length: int = flag("neuron.epoch_length", 160, ge=1, le=1_000_000)
    """read by the validator only: blocks between two times it writes its weights to the chain"""
    blocks_per_allreduce: int = flag("neuron.blocks_per_allreduce", 400, ge=1, le=1_000_000)
    """blocks between two all-reduce rounds, as the validator counts them (1 block = 12 s)"""
    global_model_name: GlobalBucket = flag("neuron.global_model_name", names.GLOBAL_MODEL_NAME)
    """bucket of the global model; a miner's own bucket is this name and its uid"""
    global_tokenizer_name: str = flag("neuron.global_tokenizer_name", names.TOKENIZER_NAME)
    """tokenizer, by its Hugging Face name or as a folder"""
    master_ss58_address: Hotkey = flag("neuron.master_ss58_address", names.MASTER_HOTKEY)
    """hotkey of the validator that owns the global bucket and calls the rounds"""
    round_reload_timeout: Duration = flag(
        "neuron.round_reload_timeout", 2640 * SECOND, ge=SECOND, le=DAY
    )
    """after the start of a round: how long to wait for the validator's new global state before this
    miner compares epochs and loads what the bucket holds"""
    epoch_check_blocks: int = flag("neuron.epoch_check_blocks", 25, ge=1, le=1_000_000)
    """blocks between two looks at the outer step of the global bucket while training"""
    score_preview: Literal["off", "own", "ranked"] = flag("neuron.score_preview", "off")
    """after each publication compute what a validator would score it with, at the lowest priority
    on one CPU thread: 'own' this miner alone, 'ranked' also among the best paid others (reads their
    uploads too); log line, event score_preview, metrics dt_score_*. For models of up to about 1
    billion parameters; none above 1.2: a look would not end within its hour"""
    checkpoint_steps: int = flag("neuron.checkpoint_steps", 25, ge=1, le=1_000_000)
    """inner steps between two local checkpoints; one is also written at each stop"""
    keep_checkpoints: int = flag("neuron.keep_checkpoints", 2, ge=1, le=1000)
    """local checkpoints to keep; older ones are deleted"""
