"""``--neuron.local_batch_size_train auto``: the micro-batch is measured instead of guessed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from distributed_training.config.flags import ConfigError

OUT_OF_MEMORY_ADVICE = (
    "lower --neuron.local_batch_size_train (or give auto), add --neuron.activation_checkpointing "
    "full or --neuron.offload_optimizer on; --neuron.local_batch_size_train_effective does not "
    "change memory"
)
_MARGIN = 0.92  # a micro-batch that fills more of the GPU than this is not taken


def find_micro_batch(
    seconds_per_sequence: Callable[[int], float],
    *,
    device: torch.device,
    vote: Callable[[str | None], str | None],
    say: Callable[[str], None],
    largest: int,
) -> int:
    """The fastest micro-batch that fits, of 1, 2, 4, ... up to ``largest`` (on a CPU 16).

    ``seconds_per_sequence(n)`` runs one of ``n`` sequences without any collective in it that a
    failed rank would leave others in. All ranks call this; all take the same size, rank 0's.
    A doubling that gains less than 2 % is not worth its memory and ends the search.
    """
    found: dict[int, float] = {}
    limit = largest if device.type == "cuda" else min(largest, 16)
    size, ended = 1, "that is the effective batch" if limit == largest else "enough for a CPU"
    while size <= limit:
        problem: str | None = None
        seconds = 0.0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        try:
            seconds = seconds_per_sequence(size)
            if device.type == "cuda":
                total = torch.cuda.get_device_properties(device).total_memory
                peak = torch.cuda.max_memory_reserved(device)
                if peak > total * _MARGIN:
                    problem = f"{size} would fill {peak / total:.0%} of the GPU's memory"
        except torch.OutOfMemoryError:
            problem = f"{size} does not fit the GPU's memory"
            torch.cuda.empty_cache()
        problem = vote(problem)
        if problem is not None:
            ended = problem
            break
        found[size] = seconds
        gain = 1.0 if size == 1 else 1.0 - seconds / found[size // 2]
        if vote("slower" if gain < 0.02 else None) is not None:
            ended = f"{size} is not faster than {size // 2}"
            break
        size *= 2
    if not found:
        raise ConfigError(
            f"--neuron.local_batch_size_train auto: not even one sequence fits: "
            f"{OUT_OF_MEMORY_ADVICE}"
        )
    best = max(found) if "not faster" not in ended else max(found) // 2
    rates = ", ".join(f"{n}: {1 / s:.2f}" for n, s in found.items())
    say(
        f"--neuron.local_batch_size_train auto: {max(1, best)} (sequences/s by micro-batch: "
        f"{rates}; {ended})"
    )
    return max(1, best)
