"""Names of former settings, which an old start script, ``.env`` or ``miner.toml`` may contain.

Each is accepted with a warning: the public miner's guides name many of them, and none may stop a
miner. A value is refused only if the miner would now do something that its operator does not want.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

_GONE = """
axon.* blacklist.* clamp.* cost.* diagnostics.* no_prompt node_* preset profile.start rdzv_timeout
show_all_rank_logs strict train.pcgrad subtensor.fallback_endpoints
chain.*_interval chain.*_timeout chain.seconds_per_block data.*_age data.*_deadline data.cache_*
data.connections data.max_prefetch_blocks data.request_* data.rows_url dht.listen_ip
dht.start_timeout logging.info logging.logging_dir logging.record_log logging.trace
neuron.*_compression neuron.*_timeout neuron.*allreduce neuron.allow_failed_peers
neuron.begin_at_peak neuron.block_on_preview neuron.checkpoint_interval neuron.compile*
neuron.deregistered_wait neuron.deterministic neuron.dont_* neuron.epoch_* neuron.error_feedback
neuron.events_retention_size neuron.fsdp_wrap neuron.global_batch_size_train neuron.gradient_sync
neuron.influxdb_* neuron.initial_peers neuron.keep_* neuron.loss_kernel
neuron.max_average_norm_ratio neuron.min_* neuron.momentum_decay neuron.nan_*
neuron.offload_optimizer neuron.part_size_bytes
neuron.precision neuron.preview_sequences neuron.quantization_* neuron.repo_age_limit
neuron.run_number neuron.score_preview neuron.seed neuron.shard_across_nodes
neuron.show_all_rank_logs neuron.step_length neuron.target_chunk neuron.train_in_rounds
neuron.upload_slack neuron.use_dct neuron.wandb_entity neuron.wandb_project
r2.*_timeout r2.checksum_mode r2.concurrency r2.file_deadline r2.part_size r2.take_bucket
r2.uploader_nice r2.write_interval
validator.alive_* validator.blocks_per_allreduce_later validator.evaluation_*
validator.held_out_sequences validator.inner_optimizer_budget validator.keep_exports
validator.loss_tolerance validator.minimum_* validator.model_* validator.publication_budget
validator.score_* validator.seed validator.sweep_* validator.tick validator.top_candidates
"""
#: Patterns of names without effect. A current setting takes precedence over a pattern.
GONE = tuple(_GONE.split())

#: Flag -> the key in the network's file that sets the value for all members.
RULES: dict[str, str] = {
    "chain.max_uids": "limits.max_uids",
    "chain.registry_url": "chain.url",
    "netuid": "chain.netuid",
    "neuron.global_model_name": "store.global_bucket",
    "neuron.global_tokenizer_name": "tokenizer.name",
    "neuron.local_batch_size_train_effective": "training.effective_batch",
    "neuron.master_ss58_address": "chain.master_hotkey",
    "neuron.minimum_valid_inner_step": "round.minimum_valid_inner_step",
    "neuron.run_id": "run_id",
    "r2.region": "store.region",
    "subtensor.network": "chain.endpoint",
    "validator.sample": "round.sample",
    **{
        f"data.{name}": f"data.{name}"
        for name in (
            "dataset", "max_length", "pages_per_block", "revision", "rows", "rows_per_page",
            "text_column",
        )
    },
    **{
        f"neuron.{name}": f"training.{name}"
        for name in (
            "adam_beta1", "adam_beta2", "gradient_clip", "learning_rate", "outer_learning_rate",
            "outer_momentum", "sequence_length", "total_steps", "warmup_steps", "weight_decay",
        )
    },
}  # fmt: skip

#: Old flag -> new flag.
RENAMED = {
    "neuron.nproc_per_node": "nproc_per_node",
    "validator.weights": "validator.model",
}

_TORCHRUN = "torchrun starts several machines (docs/several-machines.md)"
#: Flag -> values that change nothing, and what an operator with another value should do.
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "data.mix": (("",), "name the sources in mix.toml of a folder (examples/mixture.py)"),
    "nnodes": (("", "1"), _TORCHRUN),
    "node_rank": (("", "0"), _TORCHRUN),
    "rdzv_endpoint": (("",), _TORCHRUN),
    "r2.jurisdiction": (("", "default"), "members read R2's default jurisdiction: move the bucket"),
}


def is_removed(name: str) -> bool:
    """Return whether ``name``, which is not a setting now, was one earlier."""
    return name in RULES or name in REFUSED or any(fnmatchcase(name, gone) for gone in GONE)
