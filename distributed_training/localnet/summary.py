"""Summarize a run of the local subnet in tables and ``summary.json``."""

from __future__ import annotations

import dataclasses
import io
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from distributed_training.common.backoff import Throttle
from distributed_training.common.files import write_json
from distributed_training.protocol.lines import counted
from distributed_training.telemetry.neuron_state import JudgedUploads, NeuronState


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


def held_out(event: Mapping[str, Any]) -> str:
    """Return the held-out loss before and after an outer step as text, once if they are equal."""
    before, after = event.get("before"), event.get("after")
    if before is None or after is None:
        return ""
    return f"{after:.3f}" if before == after else f"{before:.3f} -> {after:.3f}"


def event_line(event: Mapping[str, Any], *, of_validator: bool) -> str:
    """Return the line to display for an event, or "" for an unimportant event.

    ``event``: an event in the form that :meth:`NeuronState.poll` returns.
    """
    match event:
        case {"kind": "publication", "ok": True, "revision": tag}:
            return f"published {tag} ({event.get('bytes_sent', 0) / 1e6:.1f} MB)"
        case {"kind": "publication", "revision": tag, "reason": reason}:
            return f"publication of {tag} failed: {reason}"
        case {"kind": "round", "ok": False, "fault": fault}:
            return f"ROUND FAILED: {fault} {event.get('detail') or ''}".rstrip()
        case {"kind": "round", "participants": uids, "seconds": seconds} if of_validator:
            return f"{counted(len(uids), 'upload')} merged, {seconds:.1f} s after the close"
        case {"kind": "outer_step", "outer_step": reached} if of_validator:
            return f"global state of outer step {reached} published"
        case {"kind": "outer_step", "outer_step": reached}:
            return f"outer step {reached} taken"
        case {"kind": "load", "outer_step": reached}:
            return f"loaded the global state of outer step {reached}"
        case {"kind": "held_out"}:
            return f"held-out loss {held_out(event) or 'not finite'}"
        case {"kind": "upload_scored", "ok": False, "uid": uid, "outer_step": judged}:
            why = event.get("reason") or "no reason given"
            return f"uid {uid}: its upload for outer step {judged} is refused: {why}"
    return ""


def neuron_line(state: NeuronState) -> str:
    """Return the status line of one neuron."""
    head = f"{state.name:<10} {state.phase[:15]:<15} outer {state.outer_step:>2}"
    if found := state.tables["held_out"]:  # only a validator reports it
        return f"{head}  held-out {held_out(found[-1])}"
    loss = f"{state.losses[-1].loss:6.3f}" if state.losses else "     -"
    return f"{head}  step {state.inner_step:>3}  loss {loss}  uploads {len(state.uploads):>2}"


class View:
    """Prints events, and the state of each neuron every 15 seconds."""

    def __init__(self) -> None:
        self._due = Throttle(15.0)
        self._started = time.monotonic()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # for an ASCII terminal

    def report(self, text: str) -> None:
        for line in text.splitlines() or [""]:
            print(f"{clock(time.monotonic() - self._started)}  {line}", flush=True)

    def update(self, states: Sequence[NeuronState]) -> None:
        """Print the lines of the neurons that are due. It is cheap, so it may be called often."""
        for state in states:
            if self._due(state.name):
                self.report(neuron_line(state))


@dataclass(frozen=True)
class OuterStepResult:
    """One outer step of the subnet. ``participants``: names of the neurons that applied it."""

    outer_step: int
    seconds_from_start: float
    round_seconds: float
    participants: tuple[str, ...]
    missed_by: tuple[str, ...]
    loss_before: float | None
    loss_after: float | None


@dataclass(frozen=True)
class MinerResult:
    """One miner of a run. Of its ``uploads_judged`` uploads, ``uploads_scored`` got a score."""

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
    uploads_scored: int
    uploads_judged: int
    last_cause: str  # name of a scoring Cause
    last_reset: str
    scores: dict[str, float]


@dataclass(frozen=True)
class Summary:
    """The result of a run of the local subnet."""

    wanted_outer_steps: int
    seconds: float
    outer_steps: tuple[OuterStepResult, ...]
    miners: tuple[MinerResult, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def verdict(self) -> str:
        """The last line of a run."""
        if not self.ok:
            return "not everything worked: see the problems above"
        scored = sum(m.uploads_scored for m in self.miners)
        judged = sum(m.uploads_judged for m in self.miners)
        losses = [step.loss_after for step in self.outer_steps]
        first = self.outer_steps[0].loss_before if self.outer_steps else None
        return (
            f"all rounds worked: the loss on held-out text went from "
            f"{_number(first)} to {_number(losses[-1] if losses else None)}, and {scored} of "
            f"{judged} judged uploads were scored"
        )

    def text(self) -> str:
        """Return the summary as text for the terminal."""
        took = f"{len(self.outer_steps)} of {self.wanted_outer_steps} outer steps"
        outer_steps = [
            (
                step.outer_step,
                clock(step.seconds_from_start),
                f"{step.round_seconds:.1f} s",
                f"{_number(step.loss_before)} -> {_number(step.loss_after)}",
                ", ".join(step.participants)
                + (f"   MISSED BY {', '.join(step.missed_by)}" if step.missed_by else ""),
            )
            for step in self.outer_steps
        ]
        kinds = ("random", "assigned", "total")
        figures = ("ranks", "inner steps", "loss first -> last", "uploads", "rounds", "scored")
        miners = [
            (
                miner.name,
                miner.world_size,
                miner.inner_steps,
                f"{_number(miner.first_loss)} -> {_number(miner.last_loss)}",
                miner.uploads,
                f"{miner.rounds_ok} of {miner.rounds}",
                f"{miner.uploads_scored} of {miner.uploads_judged}",
                *(_number(miner.scores.get(kind)) for kind in kinds),
            )
            for miner in self.miners
        ]
        parts = [
            f"{took} in {self.seconds:.0f} s",
            _table(("outer step", "at", "round", "held-out loss", "took part"), outer_steps),
            _table(("miner", *figures, *kinds), miners),
            "\n".join(f"PROBLEM: {problem}" for problem in self.problems),
        ]
        return "\n" + "\n\n".join(part for part in parts if part) + "\n"

    def write(self, folder: Path) -> None:
        write_json(folder / "summary.json", dataclasses.asdict(self))


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Render a table without colours: names are left-aligned, numbers right-aligned."""
    table = Table(box=None, pad_edge=False)
    for name in head:
        table.add_column(name, justify="left" if name in ("miner", "took part") else "right")
    for row in rows:
        table.add_row(*map(str, row))
    text = io.StringIO()
    Console(file=text, width=160, color_system=None, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def summarize(
    *,
    wanted_outer_steps: int,
    started_at: float,
    seconds: float,
    validator: NeuronState,
    miners: Sequence[NeuronState],
    world_sizes: Sequence[int],
    problems: Sequence[str] = (),
) -> Summary:
    """Combine the neurons' events into a summary, and find the problems in them.

    ``started_at``: seconds since the epoch. ``problems``: problems that the orchestrator noticed,
    such as a neuron that died, processes left behind, or a deadline that passed.
    """
    steps = [
        _outer_step(reached, max(0.0, at - started_at), validator, miners)
        for reached, at in validator.outer_steps
    ]
    results = [
        _miner(miner, world_size, validator)
        for miner, world_size in zip(miners, world_sizes, strict=True)
    ]
    found = list(problems)
    for step in steps:
        if step.missed_by:
            names = ", ".join(step.missed_by)
            found.append(f"outer step {step.outer_step}: {names} did not take part")
    if len(steps) < wanted_outer_steps:
        reached = counted(len(steps), "outer step")
        found.append(f"{reached} succeeded; {wanted_outer_steps} were wanted")
    for neuron in (validator, *miners):
        for seen in neuron.tables["round"]:
            if not seen["ok"]:
                fault = seen.get("fault") or "no reason given"
                found.append(f"{neuron.name}: a round failed ({fault})")
    for miner in results:
        # Report one line per miner with the first cause, since the other problems follow from it.
        if not miner.uploads:
            found.append(f"{miner.name} published nothing")
        elif not miner.uploads_judged:
            found.append(f"{miner.name}: the validator judged none of its uploads")
        elif not miner.uploads_scored:
            found.append(
                f"{miner.name}: none of its {miner.uploads_judged} judged uploads was scored; the "
                f"last was reset: {miner.last_reset}"
            )
    return Summary(
        wanted_outer_steps=wanted_outer_steps,
        seconds=seconds,
        outer_steps=tuple(steps),
        miners=tuple(results),
        problems=tuple(found),
    )


def _outer_step(
    reached: int, seconds: float, validator: NeuronState, miners: Sequence[NeuronState]
) -> OuterStepResult:
    took_part = [m.name for m in miners if any(step == reached for step, _ in m.outer_steps)]
    # The last evaluation of an outer step counts; earlier ones belong to refused averages.
    losses = _newest(validator, "held_out", outer_step=reached)
    led = _newest(validator, "round", outer_step=reached - 1, ok=True)
    return OuterStepResult(
        outer_step=reached,
        seconds_from_start=seconds,
        round_seconds=led.get("seconds", 0.0),
        participants=(validator.name, *took_part),
        missed_by=tuple(m.name for m in miners if m.name not in took_part),
        loss_before=losses.get("before"),
        loss_after=losses.get("after"),
    )


def _newest(neuron: NeuronState, kind: str, **wanted: Any) -> dict[str, Any]:
    """Return the last event of a kind with these fields, or {} if there is none."""
    rows = reversed(neuron.tables[kind])
    return next((row for row in rows if wanted.items() <= row.items()), {})


def _miner(miner: NeuronState, world_size: int, validator: NeuronState) -> MinerResult:
    judged = validator.judged.get(miner.uid, JudgedUploads())
    losses, rounds = [step.loss for step in miner.losses], miner.tables["round"]
    return MinerResult(
        name=miner.name,
        uid=miner.uid,
        world_size=world_size,
        inner_steps=len(losses),
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        uploads=len(miner.uploads),
        failed_uploads=tuple(
            f"{upload['revision']}: {upload['reason']}"
            for upload in miner.tables["publication"]
            if not upload["ok"]
        ),
        rounds_ok=sum(seen["ok"] for seen in rounds),
        rounds=len(rounds),
        uploads_scored=judged.scored,
        uploads_judged=judged.passes,
        last_cause=judged.last_cause,
        last_reset=judged.last_reset,
        scores=validator.scores.get(miner.uid, {}),
    )


def _number(value: float | None) -> str:
    return f"{value:.3f}" if value is not None else "-"
