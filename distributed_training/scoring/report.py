"""A preview for people (a table and one sentence for each miner) and for programs (JSON)."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from distributed_training.scoring.score_preview import Interval, Preview, Row


def table(preview: Preview) -> RenderableType:
    """Make the table, best first, those without a rank last; below it each one's cause."""
    # 80 columns hold it whole.
    grid = Table(title=_title(preview), title_justify="left", box=None, padding=(0, 1, 0, 0))
    for name in ("uid", "upload", "age", "random", "assigned", "a > r", "rank", "share"):
        grid.add_column(name, justify="left" if name == "upload" else "right", no_wrap=True)
    rows = sorted(preview.rows, key=lambda r: (r.standing.rank if r.standing else math.inf, r.uid))
    for row in rows:
        grid.add_row(*_cells(row, preview.compared), style=None if row.random else "dim")
    # As Text: rich obeys markup in a str, and a reason may quote what others wrote.
    notes = [Text(_sentence(row), style="" if row.cause is None else "yellow") for row in rows]
    return Group(grid, *notes)


def _title(preview: Preview) -> str:
    blocks = ", ".join(map(str, preview.random_blocks))
    return (
        f"block {preview.block}, outer step {preview.outer_step} is judged, random block {blocks}; "
        f"{preview.seconds:.1f} s"
    )


def _cells(row: Row, compared: int) -> list[str]:
    standing = row.standing
    return [
        f"{row.uid:03d}",
        row.revision or "-",
        _age(row.age, row.age_limit),
        _percent(row.random),
        _percent(row.assigned),
        "-" if row.assigned_wins is None else _chance(row.assigned_wins, row.chance),
        f"{standing.rank}/{compared}" if standing else "-",
        f"{100 * standing.share:.1f} %" if standing else "-",
    ]


def _age(age: timedelta | None, limit: timedelta) -> str:
    if age is None:
        return "-"
    return f"{age.total_seconds():.0f}/{limit.total_seconds():.0f} s"


def _percent(found: Interval | None) -> str:
    if found is None:
        return "-"
    reach = 100 * (found.high - found.value)
    return (
        f"{100 * found.value:+.2f} ± {reach:.2f} %"
        if math.isfinite(reach)
        else (f"{100 * found.value:+.2f} %")
    )


def _chance(wins: bool, chance: float | None) -> str:
    word = "yes" if wins else "no"
    return word if chance is None else f"{word} ({100 * chance:.0f} %)"


def _sentence(row: Row) -> str:
    """Word the cause of a miner's low score, and its one fix."""
    start = f"uid {row.uid:03d}: "
    if row.cause is None:
        return f"{start}nothing stands in its way"
    why = f" ({row.reason})" if row.reason else ""
    return f"{start}{row.cause.costs}{why}. Fix: {row.cause.remedy}"


def to_json(preview: Preview) -> dict[str, Any]:
    """Return the preview as JSON: losses in nats per token, relative improvements, ages in seconds.

    What is not known is null.
    """
    return {
        "block": preview.block,
        "global_outer_step": preview.global_outer_step,
        "outer_step": preview.outer_step,
        "random_blocks": list(preview.random_blocks),
        "compared": preview.compared,
        "seconds": round(preview.seconds, 3),
        "miners": [row_fields(row) for row in preview.rows],
    }


def row_fields(row: Row) -> dict[str, Any]:
    standing = row.standing
    fields: dict[str, Any] = {
        "uid": row.uid,
        "hotkey": row.hotkey,
        "revision": row.revision,
        "repo_valid": row.valid,
        "age_seconds": row.age.total_seconds() if row.age is not None else None,
        "age_limit_seconds": row.age_limit.total_seconds(),
        "cause": row.cause.name if row.cause else None,
        "reason": row.reason,
        "costs": row.cause.costs if row.cause else "",
        "remedy": row.cause.remedy if row.cause else "",
        "assigned_wins": row.assigned_wins,
        "assigned_wins_chance": row.chance,
        "rank": standing.rank if standing else None,
        "rating": standing.rating if standing else None,
        "assigned_score": standing.assigned if standing else None,
        "train_share": standing.share if standing else None,
    }
    judgement = row.judgement
    for name, found, interval in (
        ("random", judgement.random if judgement else None, row.random),
        ("assigned", judgement.assigned if judgement else None, row.assigned),
    ):
        fields[f"{name}_blocks"] = list(found.blocks) if found else []
        fields[f"{name}_before"], fields[f"{name}_after"] = found.losses if found else (None, None)
        fields[f"{name}_relative"] = interval.value if interval else None
        bounds = (interval.low, interval.high) if interval else (math.inf, math.inf)
        for bound, value in zip(("low", "high"), bounds, strict=True):
            fields[f"{name}_{bound}"] = value if math.isfinite(value) else None
    return fields
