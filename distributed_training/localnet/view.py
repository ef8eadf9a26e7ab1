"""Lines about a subnet while it runs, each with the time since the start; the page shows more."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from distributed_training.common.backoff import Throttle
from distributed_training.protocol.lines import judged_upload
from distributed_training.telemetry.neuron_state import NeuronState


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


def plain_text(renderable: RenderableType, width: int = 160) -> str:
    """As it looks without colours on a terminal of ``width`` columns."""
    text = io.StringIO()
    Console(file=text, width=width, color_system=None, highlight=False).print(renderable)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def held_out(event: Mapping[str, Any]) -> str:
    """The validator's loss before and after an outer step, once where they are the same."""
    before, after = event.get("before"), event.get("after")
    if before is None or after is None:
        return ""
    return f"{after:.3f}" if before == after else f"{before:.3f} -> {after:.3f}"


def event_line(event: Mapping[str, Any], *, of_validator: bool) -> str:
    """Return a line for an event that is worth one on the screen, else "". ``event``: as
    :meth:`NeuronState.apply` returns it."""
    match event:
        case {"kind": "publication", "ok": True, "revision": tag}:
            return f"published {tag} ({event.get('bytes_sent', 0) / 1e6:.1f} MB)"
        case {"kind": "publication", "revision": tag, "reason": reason}:
            superseded = str(reason).startswith("superseded")
            return "" if superseded else f"publication of {tag} failed: {reason}"
        case {"kind": "round", "ok": False, "fault": fault}:
            return f"ROUND FAILED: {fault} {event.get('detail') or ''}".rstrip()
        case {"kind": "round", "peers": peers, "seconds": seconds} if of_validator:
            return f"round worked, {len(peers)} peers, {seconds:.1f} s"
        case {"kind": "outer_step", "outer_step": reached} if of_validator:
            return f"global state of outer step {reached} published"
        case {"kind": "outer_step", "outer_step": reached}:
            return f"outer step {reached} taken"
        case {"kind": "load", "outer_step": reached}:
            return f"loaded the global state of outer step {reached}"
        case {"kind": "held_out"}:
            return f"held-out loss {held_out(event) or 'not finite'}"
        case {"kind": "sweep", "changed": True, "not_alive": uids}:
            missing = f"not alive: uids {', '.join(map(str, uids))}"
            return missing if uids else "every miner is alive again"
        case {"kind": "upload_scored", "ok": False, "uid": uid, "outer_step": judged}:
            upload = judged_upload(event.get("revision") or "", judged)
            return f"uid {uid}: {upload} not scored: {event.get('reason') or 'no reason given'}"
    return ""


def neuron_line(state: NeuronState) -> str:
    """One neuron; what matters least comes last, where a narrow terminal cuts it off."""
    head = f"{state.name:<10} {state.phase[:15]:<15} outer {state.outer_step:>2}"
    if told := state.tables["held_out"]:  # by a validator alone
        totals = [
            f"{uid}: {scores['total']:.2f}"
            for uid, scores in sorted(state.scores.items())
            if "total" in scores and uid in state.judged
        ]
        head += f"  held-out {held_out(told[-1])}"
        return f"{head}  scores {', '.join(totals)}" if totals else head
    last, rounds = state.steps[-1] if state.steps else None, state.tables["round"]
    loss = f"{last.loss:6.3f}" if last and last.loss is not None else "     -"
    rate = f"{last.tokens_per_second:6.0f}" if last and last.tokens_per_second else "     -"
    return (
        f"{head}  step {state.inner_step:>3}  loss {loss}  {rate} tok/s"
        f"  uploads {len(state.uploads):>2}  rounds {sum(r['ok'] for r in rounds)}/{len(rounds)}"
    )


class View:
    """Says what happens, and every ``interval`` how each neuron stands."""

    def __init__(
        self, console: Console | None = None, *, interval: timedelta = timedelta(seconds=15)
    ) -> None:
        self._console = console or Console(highlight=False)
        self._due = Throttle(interval.total_seconds())
        self._started = time.monotonic()
        if isinstance(self._console.file, io.TextIOWrapper):
            self._console.file.reconfigure(errors="replace")  # a terminal of ASCII

    def say(self, text: str, *, style: str = "") -> None:
        for line in text.splitlines() or [""]:
            line = f"{clock(time.monotonic() - self._started)}  {line}"
            self._console.print(Text(line, style=style), soft_wrap=True)

    def update(self, states: Sequence[NeuronState]) -> None:
        """Cheap to call often."""
        for state in states:
            if self._due(state.name):
                self.say(neuron_line(state))
