"""The pictures of docs/scale.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from bench.scale_calibration import CALIBRATED_ON, Calibration, replay
from bench.scale_designs import DESIGNS, RULES, WORLDS, Outcome
from bench.scale_peers import Seen

_COLORS = dict(zip(DESIGNS, ("#444444", "#c44e52", "#4c72b0", "#55a868"), strict=True))
_STYLES = dict(zip(DESIGNS, ("o-", "s-", "^-", "D--"), strict=True))
_FAR = 0.15  # of the goal: simulated and real rounds may differ by so much


def _axis(axes: Axes, sizes: Sequence[int], title: str, unit: str) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.tick_params(axis="x", labelrotation=45 if len(sizes) > 5 else 0, labelsize=8)
    axes.set_xlabel("peers")
    axes.set_ylabel(unit)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)


def _save(figure: plt.Figure, path: Path) -> None:
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def calibration(path: Path, made: Calibration, real: Sequence[Seen]) -> None:
    """Real rounds of this machine, and the simulated ones beside them."""
    kinds: list[tuple[str, str, float]] = [
        ("matchmaking", "seconds", 1),
        ("transfer", "seconds", 1),
        ("clock", "seconds", 1),
        ("bytes", "MB sent by a peer", 1e-6),
        ("messages", "DHT calls of a peer", 1),
    ]
    names = {"clock": "whole round", "bytes": "bytes on the line", "messages": "DHT messages"}
    figure, all_axes = plt.subplots(1, len(kinds), figsize=(15, 3.4))
    sizes = [one.peers for one in real]
    simulated = [replay(made, size) for size in sizes]
    for axes, (kind, unit, scale) in zip(all_axes, kinds, strict=True):
        values = [scale * getattr(one, kind) for one in simulated]
        axes.fill_between(
            sizes, [v * (1 - _FAR) for v in values], [v * (1 + _FAR) for v in values],
            alpha=0.15, color="#4c72b0", label="simulated ± 15 %",
        )  # fmt: skip
        axes.plot(sizes, values, "-", color="#4c72b0", label="simulated")
        for one in real:
            used = one.peers in CALIBRATED_ON
            name = "real, calibrated on" if used else "real, held out"
            axes.plot(
                one.peers, scale * getattr(one, kind), "o",
                color="#444444" if used else "#c44e52",
                label=name if one.peers in (sizes[0], sizes[-1]) else None,  # each name once
            )  # fmt: skip
        _axis(axes, sizes, names.get(kind, kind), unit)
        axes.set_ylim(bottom=0)
    all_axes[0].legend(fontsize=7, loc="lower right")
    _save(figure, path)


def _draw(
    axes: Axes, outcomes: Sequence[Outcome], world: str, value: Callable[[Outcome], float]
) -> list[int]:
    sizes: list[int] = []
    for design in DESIGNS:
        of = [o for o in outcomes if o.design == design and o.world == world]
        sizes = [o.peers for o in of]
        axes.plot(
            sizes, [value(o) for o in of], _STYLES[design], color=_COLORS[design],
            label=design, markersize=4, linewidth=1.3, alpha=0.85,
        )  # fmt: skip
    return sizes


def designs(path: Path, outcomes: Sequence[Outcome]) -> None:
    """All four figures against the size of a sound network with mixed lines."""
    kinds: list[tuple[str, str, Callable[[Outcome], float]]] = [
        ("length of a round", "seconds", lambda o: o.clock),
        ("share of all peers that took part", "%", lambda o: 100 * o.took_part),
        ("bytes sent by a peer that was called", "GB (model of 16 GB)", lambda o: o.bytes / 1e9),
        ("DHT messages of a peer that was called", "calls in a round", lambda o: o.messages),
    ]
    figure, all_axes = plt.subplots(2, 2, figsize=(11, 7.5))
    for axes, (title, unit, value) in zip(all_axes.flat, kinds, strict=True):
        sizes = _draw(axes, outcomes, WORLDS[0].name, value)
        _axis(axes, sizes, title, unit)
        axes.set_ylim(bottom=0)
    all_axes[0][0].set_ylim(top=1.1 * RULES.round_deadline)
    all_axes[0][0].axhline(RULES.round_deadline, color="gray", linestyle=":", linewidth=1)
    all_axes[0][0].text(16, RULES.round_deadline, " deadline", fontsize=8, va="bottom")
    all_axes[0][1].legend(fontsize=8)
    _save(figure, path)


def worlds(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Who takes part, and how long it takes, when peers vanish or are too slow."""
    figure, all_axes = plt.subplots(2, len(WORLDS), figsize=(14, 7), sharey="row")
    for column, world in enumerate(WORLDS):
        top, bottom = all_axes[0][column], all_axes[1][column]
        sizes = _draw(top, outcomes, world.name, lambda o: 100 * o.took_part)
        _axis(top, sizes, f"{world.name}: took part", "% of all peers")
        sizes = _draw(bottom, outcomes, world.name, lambda o: o.clock)
        _axis(bottom, sizes, f"{world.name}: length of a round", "seconds")
        bottom.axhline(RULES.round_deadline, color="gray", linestyle=":", linewidth=1)
        top.set_ylim(0, 105)
        bottom.set_ylim(bottom=0)
    all_axes[0][0].legend(fontsize=8)
    _save(figure, path)
