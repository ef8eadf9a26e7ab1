"""Presets: named sets of flag values between a flag's default and what the operator gives.

``public`` holds nothing: the network's file says it all. ``public-24gb`` and its like are what fits
GPUs of so much memory. ``local`` is a subnet on one machine without a GPU; the local network's
launcher gives addresses, ports and keys as flags and environment variables on top of it.
"""

from __future__ import annotations

from collections.abc import Mapping

# Memory of one GPU in GB -> activation checkpointing, sequences per micro-batch, and how many such
# GPUs the public network's model of 4 billion parameters takes then. Estimates of common.memory,
# not yet measured. Where the optimizer's state lies and when gradients are reduced stays 'auto':
# that depends on the number of GPUs, and the start works it out from the memory there is.
CARDS: Mapping[int, tuple[str, int, int]] = {
    12: ("full", 4, 8),
    16: ("full", 4, 4),
    24: ("full", 4, 2),
    40: ("budget", 4, 2),
    48: ("budget", 4, 1),
    80: ("none", 4, 1),
    141: ("none", 8, 1),
}

PRESETS: Mapping[str, Mapping[str, str]] = {
    "public": {},
    **{
        f"public-{size}gb": {
            "neuron.activation_checkpointing": checkpointing,
            "neuron.local_batch_size_train": str(micro_batch),
        }
        for size, (checkpointing, micro_batch, _) in CARDS.items()
    },
    "local": {
        "neuron.device": "cpu",
        "chain.seconds_per_block": "1",
        "neuron.page_port": "off",  # the whole subnet has one
        "neuron.global_tokenizer_name": "bytes",
        "data.source": "stdlib",
        # A block lasts seconds, as it lasts minutes on the public network: validators refuse an
        # upload whose newest block is older than half the blocks between two rounds.
        "data.pages_per_block": "1",
        "data.rows_per_page": "2",
        "neuron.sequence_length": "256",
        "neuron.local_batch_size_train": "2",
        "neuron.preview_sequences": "4",  # a local block has few
        "neuron.local_batch_size_train_effective": "16",
        # A public warm-up of 1000 steps would be longer than the whole local run.
        "neuron.learning_rate": "0.001",
        "neuron.warmup_steps": "20",
        "neuron.total_steps": "2000",
        "neuron.upload_steps": "10",
        "neuron.upload_slack": "2",
        "neuron.minimum_valid_inner_step": "5",
        "neuron.min_group_size": "2",
        "neuron.blocks_per_allreduce": "60",
        "neuron.epoch_length": "10",
        "neuron.epoch_check_blocks": "2",
        "neuron.checkpoint_steps": "10",
        "neuron.checkpoint_interval": "0",
        "neuron.stop_timeout": "30",
        "neuron.round_reload_timeout": "60",
        # The public bootstrap peer has no place here; the local network hands its own over.
        "neuron.initial_peers": "none",
        "neuron.min_matchmaking_time": "3",
        "neuron.request_timeout": "2",
        "neuron.next_chunk_timeout": "10",
        "neuron.allreduce_timeout": "25",
        "neuron.round_timeout": "40",
        "dht.ip": "127.0.0.1",
        "dht.listen_ip": "127.0.0.1",
        "axon.ip": "127.0.0.1",
        "axon.external_ip": "127.0.0.1",
        "diagnostics.minimum_disk_gb": "0.5",
        "validator.blocks_per_allreduce_later": "0",
        "validator.sweep_interval": "1",
        "validator.minimum_peers": "2",
        "validator.score_blocks": "10",
        "validator.evaluation_pages": "1",
        "validator.evaluation_sequences": "8",
    },
}
