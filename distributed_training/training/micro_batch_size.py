"""``--neuron.local_batch_size_train auto``: the micro-batch is measured instead of guessed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from distributed_training.config.flags import ConfigError
from distributed_training.config.training import TrainingSettings

from .known_size import OUT_OF_MEMORY_ADVICE
from .micro_batches import MicroBatches

# Of the memory that is free; the rest is for what comes later: reductions over ranks, the codes of
# a snapshot, a preview.
_MARGIN = 0.85


class DeviceBudget:
    """Bytes of a CUDA device that micro-batches may fill; made once the model is there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        free, _ = torch.cuda.mem_get_info(device)
        self.limit = round((free + torch.cuda.memory_reserved(device)) * _MARGIN)

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


def measured_micro_batch(
    step: MicroBatches, settings: TrainingSettings, *, say: Callable[[str], None]
) -> int:
    """``auto``: what an earlier start found, or the result of trying. All ranks call this.

    Raises ConfigError if not even one sequence fits, RuntimeError if a size ran out of memory while
    other ranks went on (they start again then, and it is known).
    """
    known = step.known
    if known.fastest is not None:
        say(f"--neuron.local_batch_size_train auto: {known.fastest}, as found before")
        return known.fastest
    stream, device = step.stream, step.sharded.device

    def seconds(sequences: int) -> float:
        try:
            return step.seconds_per_sequence(sequences, settings.sequence_length)
        except torch.OutOfMemoryError as error:
            if stream.world_size > 1 and sequences > 1:
                fits = known.ran_out(sequences)
                raise RuntimeError(
                    f"{sequences} sequences at once ran out of memory on rank {stream.rank}: the "
                    f"ranks start again and try at most {fits}"
                ) from error
            raise

    largest = max(1, settings.local_batch_size_train_effective // stream.world_size)
    found = find_micro_batch(
        seconds,
        device=device,
        vote=stream.first_error,
        say=say,
        largest=min(largest, known.most or largest),
        budget=DeviceBudget(device) if device.type == "cuda" else None,
    )
    if stream.rank % stream.layout.local == 0:
        known.measured(found)
    return found


def find_micro_batch(
    seconds_per_sequence: Callable[[int], float],
    *,
    device: torch.device,
    vote: Callable[[str | None], str | None],
    say: Callable[[str], None],
    largest: int,
    budget: DeviceBudget | None = None,
) -> int:
    """The fastest micro-batch that fits, of 1, 2, 4, ... up to ``largest`` (on a CPU 16).

    ``seconds_per_sequence(n)`` runs one of ``n`` sequences. All ranks call this; all take the same
    size. Memory grows by the same amount for each sequence, so from the third size on it is known
    before it is tried whether it would fit ``budget``: a rank that ran out would leave the others
    in a collective. A doubling that gains less than 2 % is not worth its memory and ends the
    search. Raises ConfigError if not even one sequence fits.
    """
    found: dict[int, float] = {}
    peaks: dict[int, int] = {}
    limit = min(largest, 16) if device.type == "cpu" else largest
    size, ended = 1, "that is the effective batch" if limit == largest else "enough for a CPU"
    slower = False
    while size <= limit:
        problem = vote(_too_large(size, peaks, budget))
        if problem is None:
            problem, seconds = _try(seconds_per_sequence, size, peaks, budget)
            problem = vote(problem)
        if problem is not None:
            ended = problem
            break
        found[size] = seconds
        gain = 1.0 if size == 1 else 1.0 - seconds / found[size // 2]
        if vote("slower" if gain < 0.02 else None) is not None:
            ended, slower = f"{size} is not faster than {size // 2}", True
            break
        size *= 2
    if not found:
        raise ConfigError(
            f"--neuron.local_batch_size_train auto: not even one sequence fits: "
            f"{OUT_OF_MEMORY_ADVICE}"
        )
    best = max(1, max(found) // 2 if slower else max(found))
    rates = ", ".join(f"{n}: {1 / s:.2f}" for n, s in found.items())
    say(
        f"--neuron.local_batch_size_train auto: {best} (sequences/s by micro-batch: "
        f"{rates}; {ended})"
    )
    return best


def _too_large(size: int, peaks: Mapping[int, int], budget: DeviceBudget | None) -> str | None:
    """By the two sizes before, since the peak is a straight line."""
    if budget is None or size // 4 not in peaks:
        return None
    expected = 3 * peaks[size // 2] - 2 * peaks[size // 4]
    if expected <= budget.limit:
        return None
    return f"{size} would take {expected / 1e9:.1f} of {budget.limit / 1e9:.1f} GB"


def _try(
    seconds_per_sequence: Callable[[int], float],
    size: int,
    peaks: dict[int, int],
    budget: DeviceBudget | None,
) -> tuple[str | None, float]:
    if budget is not None:
        budget.forget_peak()
    try:
        seconds = seconds_per_sequence(size)
    except torch.OutOfMemoryError:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return f"{size} does not fit the GPU's memory", 0.0
    if budget is not None:
        peaks[size] = budget.peak()
        if peaks[size] > budget.limit:
            share = peaks[size] / budget.limit
            return f"{size} would fill {share:.0%} of what may be filled", 0.0
    return None, seconds
