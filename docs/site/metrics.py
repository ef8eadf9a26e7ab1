"""Print docs/metrics.md: python docs/site/metrics.py >docs/metrics.md."""

from __future__ import annotations

from collections.abc import Mapping

from distributed_training.telemetry.metrics import CHAIN_COUNTS, METRICS

_HEAD = """# Metrics

Written by `python docs/site/metrics.py`; do not edit.

The dashboard serves these metrics at `/metrics`; the file `metrics.prom` in the run folder has the
latest. A name with `_total` is a counter, any other a gauge; timestamps are Unix seconds. A value
that could not be measured is absent. Counts of bad data are in [data](data.md#bad-input).
"""
_CHAIN = "If a count of failures keeps rising, set `--subtensor.chain_endpoint`.\n"
#: Title of each section, and the beginnings of its metrics' names; the first that fits counts.
_SECTIONS = {
    "Does it run?": ("start", "launcher", "last_step", "build", "metrics"),
    "Training": ("train_",),
    "Uploads": ("last_pub", "publication", "upload"),
    "Does it count?": ("counts", "registered"),
    "Rounds": ("round", "next_round", "global", "clock"),
    "Machine and GPUs": ("gpu", "rank", "disk", "memory"),
    "A validator's network": ("network_",),
}


def page() -> str:
    """Return the page: a table for each task, then the chain's."""
    left = {name: METRICS[name].about for name in METRICS}
    text = _HEAD
    for title, beginnings in _SECTIONS.items():
        found = {name: about for name, about in left.items() if name.startswith(beginnings)}
        text += f"\n## {title}\n{_table(found)}"
        left = {name: about for name, about in left.items() if name not in found}
    return f"{text}\n## The chain\n\n{_CHAIN}{_table({**left, **CHAIN_COUNTS})}"


def _table(metrics: Mapping[str, str]) -> str:
    rows = [f"| `dt_{name}` | {text} |\n" for name, text in metrics.items()]
    return "\n| Name | Meaning |\n| --- | --- |\n" + "".join(rows)


if __name__ == "__main__":
    print(page(), end="")
