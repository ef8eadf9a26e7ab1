"""The removed flags, which a start script, ``.env`` or ``miner.toml`` may still name.

Neither ``--help`` nor a settings class knows them. What had no effect on this miner, or has the
value that holds now, is accepted, with one line for all of them. Anything else is refused, since a
run that relied on it would go wrong.
"""

from __future__ import annotations

from .types import parse_duration

_NO_EFFECT = """
axon.clock_skew axon.external_ip axon.external_port axon.ip
axon.legacy_timeout_cap axon.max_connections axon.max_connections_per_address axon.max_workers
axon.port axon.read_timeout axon.requests_per_address axon.requests_per_hotkey
blacklist.allow_non_registered blacklist.force_validator_permit blacklist.min_stake
chain.call_timeout chain.neurons_interval chain.poll_interval chain.seconds_per_block
chain.write_timeout
clamp.allreduce_timeout clamp.min_group_size clamp.min_matchmaking_time clamp.next_chunk_timeout
clamp.request_timeout clamp.timeout
data.cache_gb data.connections data.page_deadline data.request_attempts data.request_timeout
data.rows_url data.table_age
dht.start_timeout
diagnostics.expected_step_max diagnostics.expected_step_min diagnostics.low_gpu_memory_gb
diagnostics.slow_step
logging.info logging.logging_dir logging.record_log
neuron.all_reduce_compression neuron.allow_failed_peers neuron.allreduce_timeout
neuron.begin_at_peak neuron.block_on_preview neuron.blocks_per_allreduce
neuron.compile_mode neuron.deregistered_wait
neuron.dont_save_events
neuron.dont_wandb_log neuron.epoch_check_blocks neuron.epoch_length neuron.error_feedback
neuron.events_retention_size
neuron.fsdp_wrap neuron.global_batch_size_train neuron.gradient_sync neuron.influxdb_bucket
neuron.influxdb_org neuron.influxdb_token neuron.influxdb_url neuron.initial_peers
neuron.keep_epochs neuron.keep_unsharded neuron.loss_kernel neuron.max_average_norm_ratio
neuron.min_group_size neuron.min_matchmaking_time neuron.momentum_decay neuron.nan_limit
neuron.nan_slow_steps neuron.next_chunk_timeout neuron.part_size_bytes neuron.preview_sequences
neuron.quantization_bins neuron.quantization_range neuron.repo_age_limit neuron.request_timeout
neuron.round_reload_timeout neuron.round_timeout neuron.run_number neuron.score_preview
neuron.show_all_rank_logs neuron.snapshot_timeout neuron.step_length neuron.target_chunk
neuron.topk_compression neuron.train_in_rounds neuron.upload_slack neuron.use_dct
neuron.wandb_entity
no_prompt node_timeout node_wait
profile.start
r2.checksum_mode r2.concurrency r2.connect_timeout r2.file_deadline r2.part_size r2.read_timeout
r2.take_bucket r2.uploader_nice r2.write_interval
rdzv_timeout show_all_rank_logs strict
subtensor.fallback_endpoints
validator.alive_least validator.alive_timeout validator.alive_wanted
validator.blocks_per_allreduce_later validator.evaluation_pages validator.evaluation_ranks
validator.evaluation_sequences validator.held_out_sequences validator.inner_optimizer_budget
validator.loss_tolerance validator.minimum_peers validator.minimum_stake
validator.publication_budget validator.score_blocks validator.score_uids validator.seed
validator.sweep_interval validator.sweep_patience validator.tick validator.top_candidates
"""
#: Any value is accepted: flags of earlier miners that mean nothing here, and those by which no
#: result, no limit and no permission could change.
NO_EFFECT = frozenset(_NO_EFFECT.split())

#: Flag -> the value that holds now. Another one is refused.
FIXED: dict[str, str] = {
    "axon.auth": "btauth legacy",
    "axon.client_auth": "btauth",
    "neuron.shard_across_nodes": "false",  # each machine holds a copy of the model
    "train.pcgrad": "false",
    "nnodes": "1",
    "node_rank": "0",
}

_TORCHRUN = "several machines are started by torchrun (docs/several-machines.md)"
#: Flag -> what an operator does instead. Any value is refused but that in :data:`FIXED`.
MOVED: dict[str, str] = {
    "nnodes": _TORCHRUN,
    "node_rank": _TORCHRUN,
    "rdzv_endpoint": _TORCHRUN,
    "neuron.nproc_per_node": "give --nproc_per_node",
    "data.mix": "name the sources in mix.toml of a folder (examples/mixture.py)",
}

#: Flag -> key in the network's file, which gives the value. Another value is refused.
RULES: dict[str, str] = {
    "chain.max_uids": "limits.max_uids",
    "chain.registry_url": "chain.url",
    "data.dataset": "data.dataset",
    "data.max_length": "data.max_length",
    "data.pages_per_block": "data.pages_per_block",
    "data.revision": "data.revision",
    "data.rows": "data.rows",
    "data.rows_per_page": "data.rows_per_page",
    "data.text_column": "data.text_column",
    "neuron.adam_beta1": "training.adam_beta1",
    "neuron.adam_beta2": "training.adam_beta2",
    "neuron.global_model_name": "store.global_bucket",
    "neuron.global_tokenizer_name": "tokenizer.name",
    "neuron.gradient_clip": "training.gradient_clip",
    "neuron.learning_rate": "training.learning_rate",
    "neuron.master_ss58_address": "chain.master_hotkey",
    "neuron.minimum_valid_inner_step": "round.minimum_valid_inner_step",
    "neuron.outer_learning_rate": "training.outer_learning_rate",
    "neuron.outer_momentum": "training.outer_momentum",
    "neuron.run_id": "run_id",
    "neuron.sequence_length": "training.sequence_length",
    "neuron.total_steps": "training.total_steps",
    "neuron.warmup_steps": "training.warmup_steps",
    "neuron.weight_decay": "training.weight_decay",
    "subtensor.network": "chain.endpoint",
}

REMOVED = NO_EFFECT | FIXED.keys() | MOVED.keys() | RULES.keys()


def why_refused(name: str, text: str) -> str | None:
    """Return why ``text`` cannot be taken for a removed flag, with the remedy; None if it can."""
    if name in FIXED:
        if _value(text) == _value(FIXED[name]):
            return None
        remedy = f"it is always {FIXED[name]} now"
        remedy += f"; {MOVED[name]}" if name in MOVED else ""
        return f"is not offered any more, so nothing was started: {remedy}"
    if name in MOVED:
        return f"is no setting any more, so nothing was started: {MOVED[name]}"
    return None


def _value(text: str) -> object:
    """Return one form of a value, equal for ``1m`` and ``60s``, or for ``off`` and ``false``."""
    words = text.lower().replace(",", " ").split()
    text = words[0] if words else ""
    text = "1" if text in ("true", "yes", "on") else "0" if text in ("false", "no", "off") else text
    try:
        return parse_duration(text)
    except ValueError:
        return sorted(words)
