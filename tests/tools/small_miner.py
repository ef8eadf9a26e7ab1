"""Flags and rules of a miner that trains a tiny model in real ranks, two rows at a time."""

from __future__ import annotations

FLAGS = {
    # as training_world.SETTINGS
    "neuron.device": "cpu",
    "neuron.local_batch_size_train": "2",
    "neuron.checkpoint_steps": "5",
    # one block ahead, so that blocks come in order at any pace of the ranks
    "data.source": "stdlib",
    "data.prefetch_blocks": "1",
}

#: By key of the network's file.
RULES = {
    # as training_world.SETTINGS
    "training.sequence_length": 32,
    "training.effective_batch": 16,
    "training.learning_rate": 0.002,
    "training.warmup_steps": 3,
    "training.total_steps": 100,
    # small blocks
    "data.pages_per_block": 1,
    "data.rows_per_page": 1,
}
