"""The picture of a run: every miner's loss over time, outer steps marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distributed_training.localnet.events import NeuronState
from distributed_training.localnet.summary import Summary

# Okabe and Ito's colours: told apart by colour-blind readers too. The validator is black.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")


def draw(
    folder: Path,
    *,
    started_at: float,
    summary: Summary,
    miners: Sequence[NeuronState],
) -> Path:
    """Write ``loss.png`` into ``folder``; its path.

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
    pyplot.close(figure)
    return png


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count != 1 else ''}"
