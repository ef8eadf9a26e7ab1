"""The state of each neuron of a subnet, built from the event files that the neurons write.

Each neuron appends JSON lines to ``events.jsonl`` in its folder (``telemetry.EventLog``). View,
summary and picture have no other source, so they show the neurons' own record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed_training.protocol.lines import judged_upload


@dataclass(frozen=True)
class LossPoint:
    """One inner step of a miner. ``time`` in seconds since the epoch."""

    time: float
    outer_step: int
    inner_step: int
    loss: float


@dataclass(frozen=True)
class RoundSeen:
    """A round as one neuron saw it; ``outer_step`` is the one the round was meant to end."""

    outer_step: int
    ok: bool
    fault: str
    peers: int
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    """The validator's loss on held-out text around one outer step, nats per token."""

    outer_step: int  # after the step
    before: float | None
    after: float | None


@dataclass
class Judged:
    """What the validator's scoring passes made of one miner's uploads."""

    scored: int = 0
    resets: int = 0  # refused, which counts as a score of zero
    last_cause: str = ""  # of the last reset: name of a scoring Cause
    last_reset: str = ""  # why, in words

    @property
    def passes(self) -> int:
        return self.scored + self.resets


@dataclass
class NeuronState:
    """Everything known of one neuron, from its events. Only :meth:`apply` changes it."""

    name: str
    kind: str  # "miner" | "validator"
    uid: int
    # of both
    phase: str = "starting"
    outer_step: int = 0
    outer_steps: list[tuple[int, float]] = field(default_factory=list)  # (reached, time)
    rounds: list[RoundSeen] = field(default_factory=list)
    starts: int = 0
    last_event: float = 0.0  # seconds since the epoch
    maddrs: tuple[str, ...] = ()  # addresses others join the swarm at
    # of a miner
    inner_step: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    losses: list[LossPoint] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)  # tags of revisions, oldest first
    failed_uploads: list[str] = field(default_factory=list)  # "tag: reason"
    # of the validator
    evaluations: list[Evaluation] = field(default_factory=list)
    scores: dict[int, dict[str, float]] = field(default_factory=dict)  # uid -> figures
    judged: dict[int, Judged] = field(default_factory=dict)  # uid -> its uploads
    not_alive: tuple[int, ...] = ()  # uids that did not answer the last sweep

    @property
    def rounds_ok(self) -> list[RoundSeen]:
        return [r for r in self.rounds if r.ok]

    def apply(self, event: Mapping[str, Any]) -> str:
        """Take one event in. Returns a line if it is worth one on the screen, else "".

        Unknown kinds and fields are left alone: neurons may say more.
        """
        self.last_event = _number(event.get("time")) or self.last_event
        handler = getattr(self, f"_on_{event.get('kind')}", None)
        return (handler(event) or "") if handler is not None else ""

    def _on_start(self, event: Mapping[str, Any]) -> None:
        self.starts += 1
        self.phase = "starting" if self.kind == "miner" else "waiting"
        self.maddrs = tuple(map(str, event.get("maddrs") or ()))
        if event.get("outer_step") is not None:
            self.outer_step = int(event["outer_step"])

    def _on_step(self, event: Mapping[str, Any]) -> None:
        self.phase = "training"
        self.outer_step = int(event["outer_step"])
        self.inner_step = int(event["inner_step"])
        self.loss = _number(event.get("loss"))
        tokens, seconds = _number(event.get("tokens")), _number(event.get("seconds"))
        if tokens and seconds:
            self.tokens_per_second = tokens / seconds
        if self.loss is not None and not event.get("skipped"):
            point = LossPoint(self.last_event, self.outer_step, self.inner_step, self.loss)
            self.losses.append(point)

    def _on_publication(self, event: Mapping[str, Any]) -> str:
        tag = str(event.get("revision"))
        if event.get("ok"):
            self.uploads.append(tag)
            return f"published {tag} ({(_number(event.get('bytes_sent')) or 0.0) / 1e6:.1f} MB)"
        reason = str(event.get("reason", ""))
        self.failed_uploads.append(f"{tag}: {reason}")
        return "" if reason == "superseded" else f"publication of {tag} failed: {reason}"

    def _on_round(self, event: Mapping[str, Any]) -> str:
        self.phase = "training" if self.kind == "miner" else "waiting"
        seen = RoundSeen(
            outer_step=int(event.get("outer_step", self.outer_step)),
            ok=bool(event.get("ok")),
            fault=str(event.get("fault") or ""),
            peers=len(event.get("peers") or ()),
            seconds=_number(event.get("seconds")) or 0.0,
        )
        self.rounds.append(seen)
        if not seen.ok:
            return f"ROUND FAILED: {seen.fault} {event.get('detail') or ''}".rstrip()
        if self.kind == "validator":
            return f"round worked, {seen.peers} peers, {seen.seconds:.1f} s"
        return ""

    def _on_outer_step(self, event: Mapping[str, Any]) -> str:
        self.outer_step = int(event["outer_step"])
        self.inner_step = 0
        self.outer_steps.append((self.outer_step, self.last_event))
        if self.kind == "validator":
            return f"global state of outer step {self.outer_step} published"
        return f"outer step {self.outer_step} taken"

    def _on_held_out(self, event: Mapping[str, Any]) -> str:
        before, after = _number(event.get("before")), _number(event.get("after"))
        self.evaluations.append(Evaluation(int(event["outer_step"]), before, after))
        if before is None or after is None:
            return ""
        if before == after:
            return f"held-out loss {after:.3f}"
        return f"held-out loss {before:.3f} -> {after:.3f}"

    def _on_sweep(self, event: Mapping[str, Any]) -> str:
        self.phase = "sweeping"  # who is alive; a round or a scoring pass follows
        before = self.not_alive
        self.not_alive = tuple(map(int, event.get("not_alive") or ()))
        if self.not_alive == before:  # a miner that restarts misses a sweep every second
            return ""
        if not self.not_alive:
            return "every miner is alive again"
        return f"not alive: uids {', '.join(map(str, self.not_alive))}"

    def _on_upload_scored(self, event: Mapping[str, Any]) -> str:
        self.phase = "scoring"
        uid = int(event["uid"])
        judged = self.judged.setdefault(uid, Judged())
        if event.get("ok"):
            judged.scored += 1
            return ""
        judged.resets += 1
        judged.last_cause = str(event.get("cause") or "")
        judged.last_reset = str(event.get("reason") or "no reason given")
        upload = judged_upload(str(event.get("revision") or ""), int(event["outer_step"]))
        return f"uid {uid}: {upload} not scored: {judged.last_reset}"

    def _on_scores(self, event: Mapping[str, Any]) -> None:
        self.phase = "waiting"
        for uid, figures in event["scores"].items():
            numbers = {name: _number(value) for name, value in figures.items()}
            self.scores[int(uid)] = {n: v for n, v in numbers.items() if v is not None}

    def _on_load(self, event: Mapping[str, Any]) -> str:
        self.phase = "loading"
        if event.get("outer_step") is not None:
            self.outer_step = int(event["outer_step"])
        return f"loaded the global state of outer step {self.outer_step}"

    def _on_state(self, event: Mapping[str, Any]) -> None:
        self.phase = str(event.get("after") or self.phase).replace("_", " ")

    def _on_stop(self, event: Mapping[str, Any]) -> None:
        self.phase = "stopped"


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and value == value else None
