"""The live view: one line per neuron, redrawn in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from datetime import timedelta

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from distributed_training.common.backoff import Throttle
from distributed_training.localnet.neuron_state import NeuronState

_REDRAW_SECONDS = 0.25


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


def plain_text(renderable: RenderableType, width: int = 160) -> str:
    """As it looks without colours on a terminal of ``width`` columns."""
    text = io.StringIO()
    Console(file=text, width=width, color_system=None, highlight=False).print(renderable)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def neuron_line(state: NeuronState) -> str:
    """One neuron; what matters least comes last, where a narrow terminal cuts it off."""
    head = f"{state.name:<10} {state.phase[:15]:<15} outer {state.outer_step:>2}"
    if state.kind == "miner":
        loss = f"{state.loss:6.3f}" if state.loss is not None else "     -"
        rate = f"{state.tokens_per_second:6.0f}" if state.tokens_per_second else "     -"
        return (
            f"{head}  step {state.inner_step:>3}  loss {loss}  {rate} tok/s"
            f"  uploads {len(state.uploads):>2}  rounds {len(state.rounds_ok)}/{len(state.rounds)}"
        )
    known = [e for e in state.evaluations if e.before is not None and e.after is not None]
    if known:
        before, after = known[-1].before, known[-1].after
        head += (
            f"  held-out {after:.3f}"
            if before == after
            else f"  held-out {before:.3f} -> {after:.3f}"
        )
    totals = {
        uid: scores["total"]
        for uid, scores in sorted(state.scores.items())
        if "total" in scores and uid in state.judged
    }
    if totals:
        head += "  scores " + ", ".join(f"{uid}: {total:.2f}" for uid, total in totals.items())
    return head


class LiveView:
    """Shows the subnet while it runs. ``say`` is for what should stay on the screen.

    ``plain_interval``: where nothing can be redrawn, a neuron's line is repeated so often.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        plain_interval: timedelta = timedelta(seconds=15),
    ) -> None:
        self._console = console or Console(highlight=False)
        self._plain_line = Throttle(plain_interval.total_seconds())
        self._started = time.monotonic()
        self._redraw = Throttle(_REDRAW_SECONDS)
        self._live: Live | None = None
        if isinstance(self._console.file, io.TextIOWrapper):
            self._console.file.reconfigure(errors="replace")  # a terminal of ASCII
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, transient=True, auto_refresh=False)
            self._live.start()

    def say(self, text: str, *, style: str = "") -> None:
        """Lines that stay, each with the time since the start in front."""
        for line in text.splitlines() or [""]:
            self._console.print(Text(f"{self._clock}  {line}", style=style), soft_wrap=True)

    def update(self, headline: str, states: Sequence[NeuronState]) -> None:
        """Show the present. Cheap to call often."""
        lines = {state.name: neuron_line(state) for state in states}
        if self._live is not None:
            if not self._redraw():
                return
            head = Text(f"{self._clock}  {headline}", style="bold", no_wrap=True, overflow="crop")
            rows = [Text(line, no_wrap=True, overflow="crop") for line in lines.values()]
            self._live.update(Group(head, *rows), refresh=True)
            return
        for name, line in lines.items():
            if self._plain_line(name):
                self.say(line)

    def close(self) -> None:
        """Take the live lines off the screen: the summary says more."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    @property
    def _clock(self) -> str:
        return clock(time.monotonic() - self._started)
