"""Draw the network's page, which a registry serves at ``/``, and write figures for Prometheus.

The verdict and the members' states come only from the founder's report. All text on the page is
escaped. The page runs no script, loads no other files, and reloads itself every minute.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path

from distributed_training.protocol.network_report import (
    MemberReport,
    NetworkReport,
    describe_fault,
    judge_network,
    moment,
    span,
)
from distributed_training.telemetry import page as dashboard

from .ledger import LedgerMember
from .store import Registry

_STYLE = (Path(dashboard.__file__).parent / "static" / "page.css").read_text(encoding="utf-8")
_ANSWERS = {"alive": "at work", "silent": "silent", "new": "not asked yet"}


def draw_page(registry: Registry) -> str:
    """Return the page: verdict, figures, members, rounds and held-out loss."""
    charter, view = registry.charter, registry.view
    received, report = view.report or (0.0, None)
    age, listened = registry.ages()
    found = judge_network(report, received, age=age, listened=listened)
    told = {} if report is None else {member.uid: member for member in report.members}
    heads = ("uid", "member", "state", "uploaded (UTC)", "score", "joined (UTC)", "endpoint")
    rows = (_member(member, told.get(member.neuron.uid), received) for member in view.members)
    parts = [_table("Members", heads, rows)]
    if report is not None:
        parts.insert(0, _table("Now", ("figure", "value"), _now(report, age)))
        rounds = (_round(report, n, received) for n in reversed(range(len(report.rounds))))
        titles = ("ended (UTC)", "outer step", "result", "participants", "length")
        parts.append(_table("Rounds", titles, rounds))
        losses = ((name, f"{loss:.4f}") for name, loss in report.losses.items())
        parts.append(_table("Held-out loss by text", ("text", "nats per token"), losses))
    facts = f"{len(view.members)} of {registry.most_uids} uids; registration: {charter.admission}"
    if registry.file_version is not None:
        facts += f"; version {registry.file_version} of the network's file"
    word, title = escape(found.word), escape(charter.name)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta http-equiv="refresh" content="60">'
        f"<title>{title}: {word}</title><style>{_STYLE}</style><header><h1>{title}</h1></header>"
        f'<main><section id="verdict" class="{found.kind}"><h2>{word}</h2>'
        f'<p>{escape(found.words)}</p></section><section class="tables">{"".join(parts)}</section>'
        f"<footer><p>{facts}; created by <code>{escape(charter.master)}</code>; page of "
        f"{moment(time.time())}</p></footer></main></html>"
    )


def _now(report: NetworkReport, age: float) -> Iterator[tuple[str, str]]:
    yield "members at work", f"{report.alive} of {len(report.members)}"
    yield "outer step", str(report.outer_step)
    if report.phase == "waiting" and report.next_round is not None:
        left = report.next_round - age
        yield "next round", f"in {span(left)}" if left > 0 else "due"
    yield "held-out loss", f"{report.loss:.4f} nats per token on {', '.join(report.losses)}"
    yield "tokens, according to uploads", f"{report.tokens:,}"
    if report.tokens_per_second is not None:
        yield "tokens per second", f"{report.tokens_per_second:,.0f}"


def _round(report: NetworkReport, number: int, received: float) -> tuple[str, ...]:
    one = report.rounds[number]
    result = "outer step"
    if one.fault:
        result = ": ".join(filter(None, (describe_fault(one.fault), one.detail)))
    who = ", ".join(map(str, one.participants[:8])) + (" ..." if one.participants[8:] else "")
    who = f"{len(one.participants)}{f' (uid {who})' if who else ''}"
    ended = moment(received - one.ended)[5:16]
    return ended, str(one.outer_step + 1), result, who, span(one.seconds)


def _member(member: LedgerMember, told: MemberReport | None, received: float) -> tuple[str, ...]:
    """Return the table cells for a member; ``told`` is its entry in the last report."""
    neuron, uploaded, score = member.neuron, "-", "-"
    state = "the validator" if neuron.validator_permit else "not asked yet"
    if told is not None and not neuron.validator_permit:
        state, score = _ANSWERS[told.answer], f"{told.score:.4f}"
        if not told.score and told.cause:
            state += f"; score 0: {told.cause}"
        if told.uploaded is not None:
            uploaded = moment(received - told.uploaded)[5:16]
    ip = f"[{neuron.ip}]" if ":" in neuron.ip else neuron.ip
    endpoint = f"{ip}:{neuron.port}" if neuron.port is not None else "-"
    since = moment(member.since)[:16]
    return str(neuron.uid), neuron.hotkey, state, uploaded, score, since, endpoint


def _table(title: str, heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return an HTML table; its cells are escaped here."""
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f'<div tabindex="0"><h2>{title}</h2><table><thead><tr>{head}</tr></thead>'
        f"<tbody>\n{body}</tbody></table></div>"
    )


def figures(registry: Registry, counts: Mapping[str, int]) -> str:
    """Return the figures in the Prometheus text format.

    ``counts``: the counters, keyed by ``kind.what`` or ``kind/what``.
    """
    view = registry.view
    gauges: dict[str, float] = {"version": view.version, "neurons": len(view.members)}
    lines = []
    if view.report is not None:
        report = view.report[1]
        age, listened = registry.ages()
        gauges |= {"outer_step": report.outer_step, "held_out_loss": report.loss}
        gauges["report_age_seconds"] = age
        found = judge_network(report, 0.0, age=age, listened=listened)
        gauges["training"] = found.kind in ("good", "idle")
        lines += ["# TYPE dt_registry_domain_loss gauge"]
        for name, loss in report.losses.items():
            lines += [f"dt_registry_domain_loss{{domain={json.dumps(name)}}} {loss}"]
    for name, value in gauges.items():
        lines += [f"# TYPE dt_registry_{name} gauge", f"dt_registry_{name} {float(value)}"]
    lines += ["# TYPE dt_registry_store_faults_total counter"]
    lines += [f"dt_registry_store_faults_total {registry.faults}"]
    lines += ["# TYPE dt_registry_calls_total counter"]
    for key, count in sorted(counts.items()):
        kind, what = key.replace("/", ".", 1).split(".", 1)
        label = f'outcome="{kind}",what="{what or "page"}"'
        lines.append(f"dt_registry_calls_total{{{label}}} {count}")
    return "\n".join(lines) + "\n"
