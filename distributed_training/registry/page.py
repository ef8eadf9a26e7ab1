"""What people and Prometheus see of a registry: one table without scripts, and the figures."""

from __future__ import annotations

import time
from collections.abc import Mapping
from html import escape

from distributed_training.chain.base import Neuron

from .store import Registry

TYPE = "text/html; charset=utf-8"
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em;color-scheme:light dark}"
    "table{border-collapse:collapse}td,th{padding:.25em .8em;text-align:left;"
    "border-bottom:1px solid #8884}code{font-size:.9em}"
)
_COLUMNS = (
    *(
        "uid",
        "hotkey",
        "endpoint",
        "since (UTC)",
        "role",
        "incentive",
        "a day's mean",
        "last update",
    ),
)


def html(registry: Registry) -> str:
    """Return the page: who is there, since when, where, and what each one earned."""
    charter = registry.charter
    neurons = registry.view.neurons
    facts = (
        f"block {registry.height}, one every {charter.seconds_per_block:g} s; "
        f"{len(neurons)} of {registry.most_uids} uids; registration: {charter.admission}; founded "
        f"by <code>{escape(charter.master)}</code>; version {registry.view.version}"
    )
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    rows = "\n".join(_row(registry, neuron) for neuron in neurons)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(charter.name)}'
        f"</title><style>{_STYLE}</style><h1>{escape(charter.name)}</h1><p>{facts}</p>"
        f"<table><tr>{head}</tr>\n{rows}</table></html>"
    )


def _row(registry: Registry, neuron: Neuron) -> str:
    since = registry.since.get(neuron.uid)
    ip = f"[{neuron.ip}]" if ":" in neuron.ip else neuron.ip
    cells = (
        str(neuron.uid),
        neuron.hotkey,
        f"{ip}:{neuron.port}" if neuron.port is not None else "-",
        time.strftime("%Y-%m-%d %H:%M", time.gmtime(since.at)) if since is not None else "-",
        f"validator, stake {neuron.stake:g}" if neuron.validator_permit else "miner",
        f"{neuron.incentive:.4f}",
        f"{registry.earned_by(neuron, time.time()):.4f}",
        f"block {neuron.last_update}",
    )
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def metrics(registry: Registry, counts: Mapping[str, int]) -> str:
    """Return the figures in Prometheus' text format. ``counts``: by ``kind.what`` or
    ``kind/what``."""
    neurons = registry.view.neurons
    gauges = {
        "block": registry.height,
        "version": registry.view.version,
        "neurons": len(neurons),
        "endpoints": sum(neuron.port is not None for neuron in neurons),
        "validators": sum(neuron.validator_permit for neuron in neurons),
    }
    lines = []
    for name, value in gauges.items():
        lines += [f"# TYPE dt_registry_{name} gauge", f"dt_registry_{name} {value}"]
    totals = {"store_faults_total": registry.faults}
    lines += [f"# TYPE dt_registry_{n} counter\ndt_registry_{n} {v}" for n, v in totals.items()]
    lines.append("# TYPE dt_registry_calls_total counter")
    for key, count in sorted(counts.items()):
        kind, what = key.replace("/", ".", 1).split(".", 1)
        label = f'outcome="{kind}",what="{what or "page"}"'
        lines.append(f"dt_registry_calls_total{{{label}}} {count}")
    return "\n".join(lines) + "\n"
