"""Draw the network's page, which a registry serves at ``/``, and its figures for Prometheus.

The verdict and the members' states come only from the founder's report. Everything on the page
is text that is escaped; it runs no script, loads nothing, and asks for itself again each minute.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

from distributed_training.protocol.lines import counted
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
_OWN_STYLE = """
#verdict p { overflow-wrap: anywhere; }
.plot { display: flex; gap: .5rem; }
.plot p { display: flex; flex-direction: column; justify-content: space-between; margin: 0; }
.plot svg { height: 9rem; }
.plot polyline { vector-effect: non-scaling-stroke; }
.plot small, figure > small, footer, .why { color: var(--quiet); font-size: .8rem; }
figure > small { display: flex; justify-content: space-between; }
.tables { align-items: start; margin-top: .7rem; }
.all { grid-column: 1 / -1; }
.why { white-space: normal; overflow-wrap: anywhere; }
footer { padding: 0 1.2rem 2rem; max-width: 1500px; margin: 0 auto; overflow-wrap: anywhere; }
@media (max-width: 480px) {
footer { padding: 0 .6rem 1rem; }
.tables thead { display: none; }
.tables table, .tables tbody, .tables tr, .tables td { display: block; width: auto; }
.tables tr { padding: .4rem 0; border-bottom: 1px solid var(--line); }
.tables td { display: flex; justify-content: space-between; gap: 1rem; padding: .1rem 0; border: 0;
white-space: normal; text-align: right; overflow-wrap: anywhere; }
.tables td::before { content: attr(data-name); color: var(--quiet); text-align: left; }
}
"""
_ANSWERS = {
    "alive": "at work",
    "silent": "silent",
    "new": "not asked yet",
}


def draw_page(registry: Registry) -> str:
    """Return the page: verdict, figures, rounds, and each member with its score."""
    charter, view = registry.charter, registry.view
    received, report = view.report or (0.0, None)
    age, listened = registry.ages()
    found = judge_network(report, received, age=age, listened=listened)
    word, words, title = (escape(text) for text in (found.word, found.words, charter.name))
    parts = [_curve(registry)]
    told: dict[int, MemberReport] = {}
    if report is not None:
        told = {member.uid: member for member in report.members}
    heads = ("uid", "member", "state", "uploaded (UTC)", "score")
    rows = (_member(member, told.get(member.neuron.uid), received) for member in view.members)
    members = _table("Members", (*heads, "joined (UTC)", "endpoint"), rows)
    parts.append(members.replace("<div", '<div class="all"', 1))
    if report is not None:
        parts.append(_rounds(report, received))
        losses = [(escape(name), f"{loss:.4f}") for name, loss in report.losses.items()]
        parts.append(_table("Held-out loss by domain", ("text", "nats per token"), losses))
    facts = (
        f"{len(view.members)} of {registry.most_uids} uids; registration: {charter.admission}; "
        f"created by <code>{escape(charter.master)}</code>"
    )
    if registry.file_version is not None:
        facts += f"; version {registry.file_version} of the network's file"
    at = f"last report {moment(received)}" if report is not None else "no report yet"
    cards = "".join(_cards(report, age)) if report is not None else ""
    old = " old" if report is not None and age > report.next_report else ""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>'
        f"{'⚠ ' if found.kind == 'bad' else ''}{title}: {word}</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta http-equiv="refresh" content="60">'
        f'<link rel="icon" href="data:,"><style>{_STYLE}{_OWN_STYLE}</style>'
        f'<header><h1>{title}</h1><p id="connection">{at}</p></header><main>'
        f'<section id="verdict" class="{found.kind}" aria-label="Verdict"><h2>{word}</h2>'
        f'<p>{words}</p></section><section id="now" class="cards{old}" aria-label="Now">{cards}'
        f'</section><section class="tables" aria-label="Lists">'
        f"{''.join(parts)}</section></main><footer>{facts}; page of {moment(time.time())}"
        "</footer></html>"
    )


def _cards(report: NetworkReport, age: float) -> Iterable[str]:
    """Yield the cards at the head of the page: tokens, held-out loss and the like."""
    members = f"{report.alive} of {len(report.members)}"
    yield _card("Members at work", members, f"a round takes {counted(report.least, 'miner')}")
    yield _card("Outer step", str(report.outer_step), counted(report.good_rounds, "good round"))
    if report.phase == "waiting" and report.next_round is not None:
        left = report.next_round - age
        yield _card("Next round", f"in {span(left)}" if left > 0 else "due", "")
    if report.rounds:
        last = report.rounds[-1]
        result = "failed" if last.fault else counted(len(last.participants), "participant")
        took = f"{span(last.seconds)} long, {span(last.ended + age)} ago"
        yield _card("Last round", result, took, "bad" if last.fault else "good")
    names = ", ".join(report.losses)
    names = names if len(report.losses) < 2 else counted(len(report.losses), "text")
    yield _card("Held-out loss", f"{report.loss:.4f}", f"nats per token on {names}")
    tokens = f"{_short(report.tokens)} in all, as uploads say"
    if report.tokens_per_second is None:
        yield _card("Tokens", _short(report.tokens), "as uploads say")
    else:
        yield _card("Tokens a second", f"{report.tokens_per_second:,.0f}", tokens)


def _card(title: str, value: str, small: str, kind: str = "") -> str:
    title, value, small = escape(title), escape(value), escape(small)
    return f'<div class="card {kind}"><h2>{title}</h2><p>{value}</p><small>{small}</small></div>'


def _short(count: int) -> str:
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return str(count)


def _curve(registry: Registry) -> str:
    """Return the curve of the held-out loss, with the newest value in words."""
    losses = registry.view.losses
    if not losses:
        return ""
    first, last = min(losses), max(losses)
    names = ", ".join(registry.view.report[1].losses) if registry.view.report else ""
    described = escape(
        f"{losses[last][0]:.4f} nats per token at outer step {last}{names and f' on {names}'}; "
        f"{losses[first][0]:.4f} at outer step {first}"
    )
    values = [loss for loss, _ in losses.values()]
    low, high = min(values), max(values)
    points = " ".join(
        f"{100 * (step - first) / max(1, last - first):.2f},"
        f"{100 * (high - loss) / (high - low or 1):.2f}"
        for step, (loss, _) in sorted(losses.items())
    )
    return (
        f'<figure class="all"><figcaption><b>Held-out loss</b><span>{described}</span></figcaption>'
        f'<div class="plot"><p><small>{high:.3f}</small><small>{low:.3f}</small></p>'
        f'<svg viewBox="-1 -5 102 110" preserveAspectRatio="none" role="img" '
        f'aria-label="Held-out loss {described}"><polyline class="a" points="{points}"/></svg>'
        f"</div><small><span>outer step {first}</span><span>{last}</span></small></figure>"
    )


def _rounds(report: NetworkReport, received: float) -> str:
    rows = []
    for one in reversed(report.rounds):
        result = '<span class="ok">outer step</span>'
        if one.fault:
            detail = f'<span class="why">{escape(one.detail)}</span>' if one.detail else ""
            result = f'<span class="not">{escape(describe_fault(one.fault))}</span> {detail}'
        who = ", ".join(map(str, one.participants[:8])) + (" ..." if one.participants[8:] else "")
        rows.append(
            (
                moment(received - one.ended)[5:16],
                str(one.outer_step + 1),
                result,
                f"{len(one.participants)}{f' (uid {who})' if who else ''}",
                span(one.seconds),
            )
        )
    return _table("Rounds", ("ended (UTC)", "outer step", "result", "participants", "length"), rows)


def _member(member: LedgerMember, told: MemberReport | None, received: float) -> tuple[str, ...]:
    """Return the table cells of a neuron. ``told`` is its part of the last report."""
    neuron = member.neuron
    ip = f"[{neuron.ip}]" if ":" in neuron.ip else neuron.ip
    name = f"{neuron.hotkey[:6]}…{neuron.hotkey[-4:]}"
    state, uploaded, score = "not asked yet", "-", "-"
    if neuron.port is None:
        state = "not started yet"
    if neuron.validator_permit:
        state = "the validator"
    elif told is not None:
        state = f'<span class="{"ok" if told.answer == "alive" else "not"}">'
        state += f"{_ANSWERS[told.answer]}</span>"
        if not told.score and told.cause:
            state += f'<br><span class="why">score 0: {escape(told.cause)}</span>'
        if told.uploaded is not None:
            uploaded = moment(received - told.uploaded)[5:16]
        score = f"{told.score:.4f}"
    return (
        str(neuron.uid),
        f'<code title="{escape(neuron.hotkey)}">{escape(name)}</code>',
        state,
        uploaded,
        score,
        moment(member.since)[:16],
        escape(f"{ip}:{neuron.port}") if neuron.port is not None else "-",
    )


def _table(title: str, heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table; ``rows`` are HTML already. A narrow page shows each row as a card."""
    names = list(heads)
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = "\n".join(
        "<tr>"
        + "".join(
            f'<td data-name="{name}"><span>{cell}</span></td>'
            for name, cell in zip(names, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div tabindex="0"><h2>{title}</h2><table><thead><tr>{head}</tr></thead>'
        f"<tbody>\n{body}</tbody></table></div>"
    )


def figures(registry: Registry, counts: Mapping[str, int]) -> str:
    """Return the figures in Prometheus' text format.

    ``counts``: by ``kind.what`` or ``kind/what``.
    """
    view = registry.view
    neurons = view.neurons
    gauges: dict[str, float] = {
        "version": view.version,
        "neurons": len(neurons),
        "endpoints": sum(neuron.port is not None for neuron in neurons),
        "validators": sum(neuron.validator_permit for neuron in neurons),
    }
    if view.losses:
        gauges["outer_step"] = max(view.losses)
        gauges["held_out_loss"] = view.losses[max(view.losses)][0]
    names = ""
    if view.report is not None:
        age, listened = registry.ages()
        gauges["report_age_seconds"] = age
        found = judge_network(view.report[1], 0.0, age=age, listened=listened)
        if found.kind != "idle":
            gauges["training"] = found.kind == "good"
        names = " ".join(", ".join(view.report[1].losses).split())
    lines = []
    if view.report is not None and len(view.report[1].losses) > 1:
        lines += ["# TYPE dt_registry_domain_loss gauge"]
        for name, loss in view.report[1].losses.items():
            lines += [f"dt_registry_domain_loss{{domain={json.dumps(name)}}} {loss}"]
    for name, value in gauges.items():
        if name == "held_out_loss" and names:
            lines += [f"# HELP dt_registry_{name} nats per token on {names}"]
        lines += [f"# TYPE dt_registry_{name} gauge", f"dt_registry_{name} {float(value)}"]
    lines += [
        "# TYPE dt_registry_store_faults_total counter",
        f"dt_registry_store_faults_total {registry.faults}",
        "# TYPE dt_registry_calls_total counter",
    ]
    for key, count in sorted(counts.items()):
        kind, what = key.replace("/", ".", 1).split(".", 1)
        label = f'outcome="{kind}",what="{what or "page"}"'
        lines.append(f"dt_registry_calls_total{{{label}}} {count}")
    return "\n".join(lines) + "\n"
