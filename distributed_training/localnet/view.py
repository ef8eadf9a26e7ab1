"""The live view: one line per neuron, redrawn in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TextIO

from distributed_training.localnet.events import NeuronState

BARS = "▁▂▃▄▅▆▇█"
CLEAR_LINE = "\x1b[2K"
CLEAR_BELOW = "\x1b[J"
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
BOLD, RED, PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[0m"


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of ``values`` in ``width`` characters; each shows the mean of its share."""
    if width <= 0 or len(values) < 2:
        return ""
    width = min(width, len(values))
    means = []
    for i in range(width):
        share = values[i * len(values) // width : (i + 1) * len(values) // width]
        means.append(sum(share) / len(share))
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[int((m - low) / span * (len(BARS) - 1))] for m in means)


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


def neuron_line(state: NeuronState, width: int) -> str:
    """One neuron in at most ``width`` columns; what matters least comes last and is cut first."""
    head = f"{state.name:<10} {state.phase[:15]:<15} outer {state.outer_step:>2}"
    if state.kind == "miner":
        loss = f"{state.loss:6.3f}" if state.loss is not None else "     -"
        rate = f"{state.tokens_per_second:6.0f}" if state.tokens_per_second else "     -"
        rounds = f"{len(state.rounds_ok)}/{len(state.rounds)}"
        line = (
            f"{head}  step {state.inner_step:>3}  loss {loss}  {rate} tok/s"
            f"  uploads {len(state.uploads):>2}  rounds {rounds}"
        )
        room = width - len(line) - 2
        line += "  " + sparkline([p.loss for p in state.losses], min(room, 24))
    else:
        line = head
        known = [e for e in state.evaluations if e.before is not None and e.after is not None]
        if known:
            line += f"  held-out {known[-1].before:.3f} -> {known[-1].after:.3f}"
        scores = [
            f"{uid}: {figures['total']:.2f}"
            for uid, figures in sorted(state.scores.items())
            if "total" in figures
        ]
        if scores:
            line += f"  scores {', '.join(scores)}"
    return line.rstrip()[:width]


class LiveView:
    """Shows the subnet while it runs. ``say`` is for what should stay on the screen."""

    def __init__(
        self,
        *,
        stream: TextIO | None = None,
        plain_interval: timedelta = timedelta(seconds=15),
        redraw_interval: timedelta = timedelta(milliseconds=250),
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self.in_place = self._stream.isatty() and environ.get("TERM", "dumb") != "dumb"
        self._color = self.in_place and "NO_COLOR" not in environ
        self._plain_interval = plain_interval.total_seconds()
        self._redraw_interval = redraw_interval.total_seconds()
        self._drawn = 0  # lines of the block now on the screen
        self._block: list[str] = []
        self._last_draw = 0.0
        self._last_plain: dict[str, float] = {}
        self._last_text: dict[str, str] = {}
        self._started = time.monotonic()
        if self.in_place:
            self._write(HIDE_CURSOR)

    def say(self, text: str, *, color: str = "") -> None:
        """A line that stays, with the time since the start in front."""
        stamp = clock(time.monotonic() - self._started)
        for line in text.splitlines() or [""]:
            body = f"{color}{line}{PLAIN}" if color and self._color else line
            self._erase()
            self._write(f"{stamp}  {body}\n")
        self._draw()

    def update(self, headline: str, states: Sequence[NeuronState]) -> None:
        """Show the present. Cheap to call often: it redraws at most four times a second."""
        now = time.monotonic()
        if self.in_place:
            if now - self._last_draw < self._redraw_interval:
                return
            size = shutil.get_terminal_size((100, 24))
            width = max(20, size.columns - 1)  # a full last column would wrap on some terminals
            block = [f"{clock(now - self._started)}  {headline}"[:width]]
            block += [neuron_line(state, width) for state in states]
            if len(block) > size.lines - 1:
                hidden = len(block) - (size.lines - 2)
                block = [*block[: size.lines - 2], f"({hidden} more neurons)"]
            self._erase()
            self._block = block
            self._draw()
            return
        for state in states:
            text = neuron_line(state, 160)
            due = now - self._last_plain.get(state.name, -1e9) >= self._plain_interval
            if due and text != self._last_text.get(state.name):
                self._last_plain[state.name] = now
                self._last_text[state.name] = text
                self._write(f"{clock(now - self._started)}  {text}\n")

    def close(self) -> None:
        """Take the block off the screen (the summary says more) and give the cursor back."""
        if self.in_place:
            self._erase()
            self._write(SHOW_CURSOR)
        self._block = []

    def _erase(self) -> None:
        if self.in_place and self._drawn:
            self._write(f"\x1b[{self._drawn}A\r{CLEAR_BELOW}")
            self._drawn = 0

    def _draw(self) -> None:
        if not self.in_place or not self._block or self._drawn:
            return
        head, *rest = self._block
        self._write(f"{BOLD}{head}{PLAIN}\n" if self._color else head + "\n")
        self._write("".join(f"{CLEAR_LINE}{line}\n" for line in rest))
        self._drawn = len(self._block)
        self._last_draw = time.monotonic()

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding or "ascii"
            self._stream.write(text.encode(encoding, errors="replace").decode(encoding))
        self._stream.flush()
