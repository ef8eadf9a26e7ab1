"""Every metric that has a name of its own, with its unit and what it says.

Graphs, alerts and the page rely on these names (``dt_`` stands before each of them). Counts that a
room keeps by kind (``dt_server_refused_total{kind="replay"}``) are named in that room's document.
Moments are Unix timestamps, so that an age goes on growing when the miner stands still.
"""

from __future__ import annotations

from collections.abc import Mapping

METRICS: Mapping[str, str] = {
    # training; torchtitan's figures under this project's prefix
    "train_outer_step": "outer step",
    "train_inner_step": "inner steps done in this outer step",
    "train_loss": "mean cross-entropy of the last inner step, nats per token",
    "train_learning_rate": "learning rate of the last inner step",
    "train_step_seconds": "wall time of the last inner step",
    "train_data_wait_seconds": "of it, without data",
    "train_tokens_per_second": "tokens per second, all ranks",
    "train_samples_per_second": "sequences per second, all ranks",
    "train_grad_norm": "norm of the gradient before clipping",
    "train_mfu": "model FLOP utilization, 0 to 1",
    "train_tokens_total": "tokens trained on, all ranks",
    "train_steps_total": "inner steps",
    "train_steps_skipped_total": "inner steps with NaN or Inf, which were skipped",
    "gpu_memory_gb": "peak allocated on rank 0's GPU since the previous step, GB = 1e9 bytes",
    "gpu_utilization_percent": "utilization of rank 0's GPU by NVML",
    # publication
    "last_publication_timestamp_seconds": "when the newest gradient was published",
    "publication_age_seconds": "age of the newest published gradient, the repo age",
    "publication_age_limit_seconds": "age at which validators score it zero",
    "publication_seconds_left": "until then",
    "publications_total": "publications, successful or not",
    "publications_failed_total": "of them, failed",
    "uploaded_bytes_total": "bytes uploaded to the bucket",
    "preview_loss_change": "loss change by the last published gradient, nats per token",
    # what a validator would score the newest publication with (--neuron.score_preview)
    "score_random_relative": "its improvement on unseen text, relative to the loss",
    "score_assigned_relative": "its improvement on its own text, relative to the loss",
    "score_rank": "its rank among the uploads compared, from 1",
    "score_train_share": "its share of their train score, 0 to 1",
    "score_repo_valid": "1 if the bucket is valid, else the total score is zero",
    "block_list_newest_block": "newest chain block whose data was trained on",
    "block_list_age_blocks": "how far the newest published block is behind the chain",
    "block_list_limit_blocks": "blocks behind the chain at which validators reset an upload",
    "block_list_blocks_left": "blocks until then, for the newest publication",
    # rounds
    "rounds_total": "finished all-reduce rounds, successful or not",
    "rounds_failed_total": "of them, without an outer step",
    "rounds_failed_in_a_row": "failed or missed rounds since the last one that worked",
    "rounds_missed_total": "outer steps of the subnet that were loaded instead of averaged",
    "round_participation_ratio": "share of the last 20 rounds that ended with an outer step here",
    "round_seconds": "pause of the last round",
    "next_round_timestamp_seconds": "when the next round is expected; in the past when overdue",
    "dht_peers": "other peers that the DHT node knows",
    # chain and server
    "chain_block": "newest chain block known",
    "chain_age_seconds": "since the chain was last heard of",
    "registered": "1 while the hotkey has a uid",
    "server_connections": "open connections of the signed server",
    # programs
    "build_info": "1, with the version of this program as its label",
    "protocol_run": "run number of this program; peers of another one are not understood",
    "global_outer_step": "outer step of the global state in its bucket; ours should not be behind",
    "global_run": "run number of the global state in its bucket",
    # machine
    "disk_free_bytes": "free where the run folder is",
    "disk_needed_bytes": "that a snapshot and a checkpoint take",
    "memory_bytes": "resident memory of rank 0 and the processes it started",
    "memory_growth_bytes_per_hour": "slope of it over the last hours: a leak, if it stays",
    "memory_total_bytes": "of the machine",
    # of each rank, by number; its GPU has the same
    "rank_memory_bytes": "resident memory of the rank's process",
    "rank_gpu_memory_bytes": "used on its GPU, by all processes",
    "rank_gpu_utilization_percent": "share of the last moments in which its GPU ran a kernel",
    "rank_gpu_temperature_celsius": "temperature of its GPU",
    "rank_gpu_power_watts": "power its GPU draws",
    "metrics_written_timestamp_seconds": "when these figures were written",
}

#: What the chain's room counts since the process started; each is absent until the first.
CHAIN_COUNTS: Mapping[str, str] = {
    "chain_reads_total": (
        "times that neurons and commitments were read whole; if it stands still, the chain does "
        "not answer: dt_chain_age_seconds says for how long"
    ),
    "chain_failures_total": (
        "times that a node of the chain could not be reached or read, so the next is asked; if it "
        "keeps rising, name a better node with --subtensor.chain_endpoint"
    ),
    "chain_connections_total": (
        "connections made to nodes of the chain; if it keeps rising, they break: check the line, "
        "or name another node with --subtensor.chain_endpoint"
    ),
    "chain_went_back_total": (
        "looks that showed a lower block than before; a few are reorganizations, many a node that "
        "lags: name another with --subtensor.chain_endpoint"
    ),
    "chain_writes_total": (
        "transactions tried (commitment, endpoint, weights); if a miner's rises long after its "
        "start, what it wrote was lost: check that no second miner uses the hotkey"
    ),
    "chain_writes_failed_total": (
        "of them, those that did not go through and are tried again; if it keeps rising, others "
        "cannot find this node: grep -E 'not (written|set)' in the log for the reason"
    ),
}
