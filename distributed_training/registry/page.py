"""Show a registry to people and Prometheus: one table without scripts, and the figures."""

from __future__ import annotations

import time
from collections.abc import Mapping
from html import escape

from distributed_training.chain.base import Neuron

from .ledger import Losses
from .store import Registry

TYPE = "text/html; charset=utf-8"
# Hotkeys and addresses come from others: no script runs, even where an escape were forgotten.
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em;color-scheme:light dark}"
    "table{border-collapse:collapse}td,th{padding:.25em .8em;text-align:left;"
    "border-bottom:1px solid #8884;white-space:nowrap}code{font-size:.9em;overflow-wrap:anywhere}"
    "div{overflow-x:auto}svg{width:100%;max-width:46em;height:9em}"
    "polyline{fill:none;stroke:currentColor;stroke-width:2;vector-effect:non-scaling-stroke}"
    "@media(max-width:50em){td:nth-child(2){max-width:7em;overflow:hidden;text-overflow:ellipsis}}"
)
_COLUMNS = (
    *("uid", "hotkey", "endpoint", "since (UTC)", "role", "incentive", "a day's mean"),
    "last update",
)


def html(registry: Registry) -> str:
    """Return the page: how the model gets better, who is there, and what each one earned."""
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
        '</title><meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
        f"<style>{_STYLE}</style><h1>{escape(charter.name)}</h1><p>{facts}</p>"
        f"{_losses(registry.view.losses)}"
        f'<div tabindex="0"><table><tr>{head}</tr>\n{rows}</table></div></html>'
    )


def _losses(losses: Losses) -> str:
    """Show how the held-out loss fell: the newest in words, all of them as a line."""
    if not losses:
        return ""
    first, last = min(losses), max(losses)
    told = (
        f"held-out loss {losses[last][0]:.4f} nats per token at outer step {last} "
        f"({_time(losses[last][1])} UTC); {losses[first][0]:.4f} at outer step {first}"
    )
    values = [loss for loss, _ in losses.values()]
    low, high = min(values), max(values)
    points = " ".join(
        f"{100 * (step - first) / max(1, last - first):.2f},"
        f"{100 * (high - loss) / (high - low or 1):.2f}"
        for step, (loss, _) in sorted(losses.items())
    )
    return (
        f'<p>{told}</p><svg viewBox="-1 -5 102 110" preserveAspectRatio="none" role="img" '
        f'aria-label="{told}"><polyline points="{points}"/></svg>'
    )


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))


def _row(registry: Registry, neuron: Neuron) -> str:
    since = registry.since.get(neuron.uid)
    ip = f"[{neuron.ip}]" if ":" in neuron.ip else neuron.ip
    cells = (
        str(neuron.uid),
        neuron.hotkey,
        f"{ip}:{neuron.port}" if neuron.port is not None else "-",
        _time(since.at) if since is not None else "-",
        f"validator, stake {neuron.stake:g}" if neuron.validator_permit else "miner",
        f"{neuron.incentive:.4f}",
        f"{registry.earned_by(neuron, time.time()):.4f}",
        f"block {neuron.last_update}",
    )
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def metrics(registry: Registry, counts: Mapping[str, int]) -> str:
    """Return the figures in Prometheus' text format.

    ``counts``: by ``kind.what`` or ``kind/what``.
    """
    neurons = registry.view.neurons
    gauges: dict[str, float] = {
        "block": registry.height,
        "version": registry.view.version,
        "neurons": len(neurons),
        "endpoints": sum(neuron.port is not None for neuron in neurons),
        "validators": sum(neuron.validator_permit for neuron in neurons),
    }
    if losses := registry.view.losses:
        gauges["outer_step"] = max(losses)
        gauges["held_out_loss"] = losses[max(losses)][0]
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
