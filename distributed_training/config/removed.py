"""Names of former settings that guides for the public miner tell operators to give.

Each is accepted with a warning, because none of them may stop a miner.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

_GONE = """
axon.* blacklist.* no_prompt preset show_all_rank_logs strict logging.info logging.logging_dir
logging.record_log logging.trace neuron.dont_* neuron.global_batch_size_train neuron.influxdb_*
neuron.quantization_* neuron.run_number neuron.use_dct neuron.wandb_entity neuron.wandb_project
"""
#: Patterns of names without effect. A current setting takes precedence over a pattern.
GONE = tuple(_GONE.split())

#: Flag -> the key in the network's file that sets the value for all members.
RULES: dict[str, str] = {
    "netuid": "chain.netuid",
    "neuron.global_model_name": "store.global_bucket",
    "neuron.global_tokenizer_name": "tokenizer.name",
    "neuron.learning_rate": "training.learning_rate",
    "neuron.local_batch_size_train_effective": "training.effective_batch",
    "neuron.master_ss58_address": "chain.master_hotkey",
    "neuron.run_id": "run_id",
    "neuron.total_steps": "training.total_steps",
    "neuron.warmup_steps": "training.warmup_steps",
    "neuron.weight_decay": "training.weight_decay",
    "subtensor.network": "chain.endpoint",
}


def is_removed(name: str) -> bool:
    """Return whether ``name``, which is not a setting now, was one earlier."""
    return name in RULES or any(fnmatchcase(name, gone) for gone in GONE)
