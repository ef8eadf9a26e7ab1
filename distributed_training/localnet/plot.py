"""The picture of a run: every miner's loss over time, outer steps marked; as PNG and HTML."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distributed_training.localnet.events import NeuronState
from distributed_training.localnet.summary import Summary

# Okabe and Ito's colours: told apart by colour-blind readers too. The validator is black.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")


def draw(
    folder: Path,
    *,
    started_at: float,
    summary: Summary,
    validator: NeuronState,
    miners: Sequence[NeuronState],
) -> list[Path]:
    """Write ``loss.png`` and ``report.html`` (self-contained) into ``folder``; return their paths.

    Raises ImportError if matplotlib is not installed (extra ``local``).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for i, miner in enumerate(miners):
        times = [point.time - started_at for point in miner.losses]
        axes.plot(
            times,
            [point.loss for point in miner.losses],
            color=COLORS[i % len(COLORS)],
            marker=".",
            markersize=4,
            linewidth=1.2,
            label=f"{miner.name}, {_ranks(summary.miners[i].world_size)}, training loss",
        )
    for i, step in enumerate(summary.outer_steps):
        at = step.seconds_from_start
        axes.axvline(at, color="0.55", linestyle="--", linewidth=1, zorder=0)
        axes.annotate(
            f"outer step {step.outer_step}\n{len(step.participants)} took part",
            xy=(at, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-4, -4),  # left of the line: right of the last one there is no room
            textcoords="offset points",
            va="top",
            ha="right",
            fontsize=8,
            color="0.35",
        )
        if step.loss_before is not None and step.loss_after is not None:
            axes.annotate(
                "",
                xy=(at, step.loss_after),
                xytext=(at, step.loss_before),
                arrowprops={"arrowstyle": "-|>", "color": "black", "shrinkA": 0, "shrinkB": 0},
            )
            axes.plot(
                [at, at],
                [step.loss_before, step.loss_after],
                linestyle="none",
                marker="_",
                color="black",
                label="global model, held-out loss before and after" if i == 0 else None,
            )
    axes.set_xlabel("seconds since the start of the run")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title("A local subnet: loss of every miner, outer steps marked", fontsize=11)
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(fontsize=8, loc="outside lower center", ncols=3)
    png = folder / "loss.png"
    figure.savefig(png, dpi=110)
    report = folder / "report.html"
    report.write_text(_page(_svg(figure), summary), encoding="utf-8")
    pyplot.close(figure)
    return [png, report]


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count != 1 else ''}"


def _svg(figure: Any) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg")
    svg = text.getvalue()
    return svg[svg.index("<svg") :]  # without the XML declaration, which HTML does not know


def _page(svg: str, summary: Summary) -> str:
    verdict = summary.verdict.capitalize() + "."
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Local subnet</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto }}
svg {{ width: 100%; height: auto }}
pre {{ overflow-x: auto; background: #f5f5f5; padding: 1rem }}
</style></head><body>
<h1>Local subnet</h1>
<p>{verdict}</p>
{svg}
<pre>{html.escape(summary.text())}</pre>
</body></html>
"""
