"""Print docs/metrics.md: python docs/site/metrics.py >docs/metrics.md."""

from __future__ import annotations

from collections.abc import Mapping

from distributed_training.telemetry.metrics import CHAIN_COUNTS, METRICS

_HEAD = """# Metrics

Written by `python docs/site/metrics.py`; do not edit.

The dashboard serves them at `/metrics`; `metrics.prom` in the run folder holds the latest. A
counter only grows. A gauge that could not be measured is absent. Counts of bad data are in
[data](data.md#bad-input), those of calls in [chain and calls](chain-and-calls.md#refusals). A
member of a store network has no swarm, no server and no age limit of uploads, so theirs are absent.
"""


def page() -> str:
    catalogue = _table({name: METRICS[name].about for name in METRICS})
    chain = f"\n## The chain\n\nEach is absent until the first count.\n{_table(CHAIN_COUNTS)}"
    return _HEAD + catalogue + chain


def _table(metrics: Mapping[str, str]) -> str:
    rows = [f"| `dt_{name}` | {_kind(name)} | {text} |\n" for name, text in metrics.items()]
    return "\n| Name | Kind | Meaning |\n| --- | --- | --- |\n" + "".join(rows)


def _kind(name: str) -> str:
    return "counter" if name.endswith("_total") else "gauge"


if __name__ == "__main__":
    print(page(), end="")
