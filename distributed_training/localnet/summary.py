"""What a run of the local subnet came to, and whether that is what it should have been."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distributed_training.localnet.events import Evaluation, NeuronState, RoundSeen
from distributed_training.localnet.view import clock


@dataclass(frozen=True)
class OuterStepResult:
    """One outer step of the subnet. ``participants``: the neurons that applied it, by name."""

    outer_step: int
    seconds_from_start: float
    round_seconds: float
    participants: tuple[str, ...]
    missed_by: tuple[str, ...]
    loss_before: float | None
    loss_after: float | None


@dataclass(frozen=True)
class MinerResult:
    name: str
    uid: int
    world_size: int
    inner_steps: int
    first_loss: float | None
    last_loss: float | None
    uploads: int
    failed_uploads: tuple[str, ...]
    rounds_ok: int
    rounds: int
    scores: dict[str, float]


@dataclass(frozen=True)
class Summary:
    wanted_outer_steps: int
    seconds: float
    outer_steps: tuple[OuterStepResult, ...]
    miners: tuple[MinerResult, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def text(self) -> str:
        """For a terminal and for ``summary.txt``."""
        lines = [
            "",
            f"{len(self.outer_steps)} of {self.wanted_outer_steps} outer steps"
            f" in {self.seconds:.0f} s",
            "",
            "outer step   at     round   held-out loss        took part",
        ]
        for step in self.outer_steps:
            missed = f"   MISSED BY {', '.join(step.missed_by)}" if step.missed_by else ""
            lines.append(
                f"{step.outer_step:>10}   {clock(step.seconds_from_start)}"
                f"  {step.round_seconds:5.1f} s"
                f"  {_loss(step.loss_before)} -> {_loss(step.loss_after)}"
                f"     {', '.join(step.participants)}{missed}"
            )
        lines += [
            "",
            "miner      ranks  inner steps  loss first -> last  uploads  rounds"
            "   random  assigned    total",
        ]
        for miner in self.miners:
            lines.append(
                f"{miner.name:<10} {miner.world_size:>5}  {miner.inner_steps:>11}"
                f"    {_loss(miner.first_loss)} -> {_loss(miner.last_loss)}"
                f"  {miner.uploads:>7}  {miner.rounds_ok:>3}/{miner.rounds:<2}"
                + "".join(
                    f"  {miner.scores[name]:7.3f}" if name in miner.scores else "        -"
                    for name in ("random", "assigned", "total")
                )
            )
            lines += [f"           upload failed: {reason}" for reason in miner.failed_uploads]
        lines += ["", *(f"PROBLEM: {problem}" for problem in self.problems)]
        return "\n".join(lines).rstrip() + "\n"

    def write(self, folder: Path) -> None:
        (folder / "summary.txt").write_text(self.text(), encoding="utf-8")
        (folder / "summary.json").write_text(
            json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8"
        )


def summarize(
    *,
    wanted_outer_steps: int,
    first_outer_step: int,
    started_at: float,
    seconds: float,
    validator: NeuronState,
    miners: Sequence[NeuronState],
    world_sizes: Sequence[int],
    problems: Sequence[str] = (),
) -> Summary:
    """Put the neurons' events together and judge them.

    ``first_outer_step``: where the global state stood when the run began; ``started_at`` in seconds
    since the epoch; ``problems``: what the orchestrator itself saw (a neuron that died, processes
    left behind, a deadline passed).
    """
    found = list(problems)
    steps = []
    for reached, at in validator.outer_steps:
        if reached <= first_outer_step:
            continue
        took_part = [m.name for m in miners if any(step == reached for step, _ in m.outer_steps)]
        missed = [m.name for m in miners if m.name not in took_part]
        own_round = _round_to(validator, reached)
        told = [e for e in validator.evaluations if e.outer_step == reached]
        losses = told[-1] if told else Evaluation(reached, None, None)  # refused ones come before
        steps.append(
            OuterStepResult(
                outer_step=reached,
                seconds_from_start=max(0.0, at - started_at),
                round_seconds=own_round.seconds if own_round else 0.0,
                participants=(validator.name, *took_part),
                missed_by=tuple(missed),
                loss_before=losses.before,
                loss_after=losses.after,
            )
        )
        if missed:
            found.append(f"outer step {reached}: {', '.join(missed)} took no part in it")
    if len(steps) < wanted_outer_steps:
        found.append(f"{len(steps)} outer steps succeeded; {wanted_outer_steps} were wanted")
    for neuron in (validator, *miners):
        for seen in neuron.rounds:
            if not seen.ok:
                found.append(f"{neuron.name}: a round failed ({seen.fault or 'no reason given'})")
    for miner in miners:
        if not miner.uploads:
            found.append(f"{miner.name} published nothing")
    return Summary(
        wanted_outer_steps=wanted_outer_steps,
        seconds=seconds,
        outer_steps=tuple(steps),
        miners=tuple(
            MinerResult(
                name=m.name,
                uid=m.uid,
                world_size=world_size,
                inner_steps=len(m.losses),
                first_loss=m.losses[0].loss if m.losses else None,
                last_loss=m.losses[-1].loss if m.losses else None,
                uploads=len(m.uploads),
                failed_uploads=tuple(m.failed_uploads),
                rounds_ok=len(m.rounds_ok),
                rounds=len(m.rounds),
                scores=validator.scores.get(m.uid, {}),
            )
            for m, world_size in zip(miners, world_sizes, strict=True)
        ),
        problems=tuple(found),
    )


def _round_to(neuron: NeuronState, reached: int) -> RoundSeen | None:
    """The round that led to outer step ``reached``."""
    good = [r for r in neuron.rounds_ok if r.outer_step in (reached - 1, reached)]
    return next((r for r in good if r.outer_step == reached - 1), good[-1] if good else None)


def _loss(value: float | None) -> str:
    return f"{value:6.3f}" if value is not None else "     -"
