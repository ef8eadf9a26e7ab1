"""Take part in the members' all-reduce, and let the update follow from its average if it is sound.

The validator's peer sends zeros with nearly no weight and reduces nothing, but it gets the average
of all others. That average is used only where nothing speaks against it; else the update is the
merge of the accepted uploads, as in a store network. The manifest says which of them it was, why,
who took part, and by how much the two differ.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from distributed_training.chain.base import Neuron
from distributed_training.common.files import sha256_of
from distributed_training.config import Config
from distributed_training.exchange.hivemind import (
    NO_FAULT,
    Answer,
    Membership,
    PeerProcess,
    Ready,
    Settings,
)
from distributed_training.exchange.peer import announcer, peer_settings
from distributed_training.node.identity import Member
from distributed_training.protocol import keys, lines
from distributed_training.protocol.average_file import Average
from distributed_training.protocol.manifest import Averaging, Manifest
from distributed_training.protocol.network_report import printable
from distributed_training.protocol.types import Schema
from distributed_training.protocol.update_file import row_chunks, rows_and_columns
from distributed_training.training.outer_rule import OUTER_RULES
from distributed_training.training.weights import GlobalState
from distributed_training.validator.fetch_close import Intake
from distributed_training.validator.judge_close import MergedSome
from distributed_training.validator.judging import Accepted
from distributed_training.validator.merge import OuterState, clip_factor, longest_norm
from distributed_training.validator.store_rounds import StoreValidator

log = logging.getLogger(__name__)

_LONGEST = 2.0  # times the usual norm of an upload
_ALIKE = 0.01  # norm of the difference from the merge, as a part of the merge's


def kind_of_validator(
    config: Config, member: Member, schema: Schema, folder: Path, stack: ExitStack
) -> Callable[..., StoreValidator]:
    """Return what builds the validator of this network, and opens what it needs."""
    if not config.averages:
        return StoreValidator

    def open_averaging(**given: Any) -> AveragingValidator:
        settings = peer_settings(config, schema, folder, witness=True)
        validator = AveragingValidator(settings=settings, ready=announcer(config, member), **given)
        validator.peer.start()
        stack.callback(validator.peer.close)
        return validator

    return open_averaging


class _NoAverage(Exception):
    """Says why the update does not follow from the average."""


class _Round:
    """An all-reduce of one close. ``uids``: of the members, by peer id."""

    def __init__(self, serial: int, uids: dict[str, int], usual: float, path: Path) -> None:
        self.serial, self.uids, self.usual, self.path = serial, uids, usual, path
        self.answer: Answer | None = None

    @property
    def participants(self) -> tuple[int, ...]:
        shares = self.answer.shares if self.answer else ()
        return tuple(sorted(self.uids[peer] for peer, _ in shares if peer in self.uids))


class AveragingValidator(StoreValidator):
    """Leads rounds of a network over hivemind. ``settings``: of its peer process."""

    def __init__(self, *, settings: Settings, ready: Callable[[Ready], None], **given: Any) -> None:
        super().__init__(**given)
        self.peer = PeerProcess(settings, ready=ready, answered=self._on_answer)
        self._round: _Round | None = None
        self._averaging: Averaging | None = None
        self._sampled: frozenset[str] | None = None  # hotkeys; None: all

    # --- the all-reduce ---------------------------------------------------------------------------

    def _judge_new(self, close: Intake, miners: Sequence[Neuron], now: float) -> None:
        if self._round is None or self._round.serial != close.state.serial:
            self._order(close, now)
        judged = [m for m in miners if self._sampled is None or m.hotkey in self._sampled]
        super()._judge_new(close, judged, now)

    def _order(self, close: Intake, now: float) -> None:
        state, own = close.state, self._member.hotkey
        after = self._rules.settings.average_after.total_seconds()
        path = self._steps.place(state.outer_step + 1) / keys.AVERAGE
        membership = Membership(self._chain.neurons, own, own, after)
        order = membership.build_order(state, now, self._steps.head, average=str(path.absolute()))
        neurons = self._chain.neurons()
        uids = {one.peer: one.uid for one in neurons if one.peer and one.hotkey != own}
        self._round = _Round(state.serial, uids, order.usual if order else 0.0, path)
        if order is None:
            self._round.answer = Answer(state.serial, failed="nothing was merged before")
            return
        path.unlink(missing_ok=True)
        log.info("%s", lines.ALL_REDUCE_START)
        self.peer.order(order)

    def _on_answer(self, answer: Answer) -> None:
        found = self._round
        if found is not None and found.serial == answer.serial:
            found.answer = answer

    def _missing(self, close: Intake, miners: Sequence[Neuron], now: float) -> bool:
        # The peer process answers each order, at the latest when it hangs.
        unanswered = self._round is not None and self._round.answer is None
        return super()._missing(close, miners, now) or unanswered

    def _choose_awaited(self, serial: int, miners: Sequence[Neuron]) -> frozenset[str]:
        hotkeys, most = [miner.hotkey for miner in miners], self._rules.settings.sample
        draw = most and len(hotkeys) > most
        self._sampled = frozenset(self._draw(serial).sample(hotkeys, most)) if draw else None
        awaited = super()._choose_awaited(serial, miners)
        return awaited if self._sampled is None else awaited & self._sampled

    # --- average or merge -------------------------------------------------------------------------

    def _merge_all(self, close: Intake, uids: Sequence[int]) -> MergedSome:
        found = self._round
        assert found is not None
        self._averaging = Averaging("average", "", found.participants)
        try:
            merged = self._merge_average(close, uids, found)
        except _NoAverage as error:
            why = printable(str(error), 300)
            self._averaging = replace(self._averaging, source="merge", why=why)
            first = not found.usual  # nothing of a first close has failed
            text = "No average" if first else lines.all_reduce_failed(2)
            level = logging.INFO if first else logging.WARNING
            log.log(level, "%s: %s. The outer step is the merge of the uploads", text, error)
            return super()._merge_all(close, uids)
        log.info("%s: %d members took part", lines.ALL_REDUCE_FINISH, len(found.participants))
        return merged

    def _merge_average(self, close: Intake, uids: Sequence[int], found: _Round) -> MergedSome:
        """Return what the average leads to. Raises _NoAverage."""
        if found.answer is None or found.answer.failed:
            raise _NoAverage(found.answer.failed if found.answer else "the DHT peer did not answer")
        for uid in found.participants:
            refused = close.refused.get(uid)
            if refused is not None and refused.cause not in NO_FAULT:
                raise _NoAverage(
                    f"uid {uid} took part, and its upload was refused ({refused.cause})"
                )
        if OUTER_RULES[self._outer_rule.name].merge is not None:
            raise _NoAverage(f"the outer rule {self._outer_rule.name} merges the uploads itself")
        mine = [uid for uid in sorted(uids) if uid in found.participants]
        if not mine:
            raise _NoAverage("no member took part whose upload was accepted")
        if any(close.accepted[uid].share < 1 for uid in mine):
            raise _NoAverage("uploads of several members are alike, and would count several times")
        try:
            average = Average(found.path, self.state.schema)
        except (ValueError, OSError) as error:
            raise _NoAverage(str(error)) from None
        whole = {*found.participants} <= close.accepted.keys()
        chosen = [close.accepted[uid] for uid in sorted(uids)] if whole else []
        norm, difference, suspects = self._compare(average, chosen, found.answer.shares, found.uids)
        assert self._averaging is not None
        self._averaging = replace(self._averaging, difference=difference, suspects=suspects)
        if not math.isfinite(norm):
            raise _NoAverage("not all of its values are finite")
        if norm > _LONGEST * found.usual:
            raise _NoAverage(f"its norm is {norm:.3g}, that of an upload usually {found.usual:.3g}")
        if difference is not None and not difference <= _ALIKE:
            blamed = ", ".join(map(str, suspects))
            where = f"; it differs where uid {blamed} reduced it" if blamed else ""
            raise _NoAverage(f"it differs by {difference:.1%} from the merge of the uploads{where}")
        limit = self._rules.config.loss_limit(self._rules.mean(self._losses))
        merged = self._merge(close, mine, average)
        # "Not below", for NaN.
        if not (after := self._rules.mean(merged.losses)) <= limit:
            raise _NoAverage(f"with it the held-out loss is {after:.4f}, limit {limit:.4f}")
        return merged

    def _compare(
        self,
        average: Average,
        chosen: Sequence[Accepted],
        shares: Sequence[tuple[str, int]],
        uids: Mapping[str, int],
    ) -> tuple[float, float | None, tuple[int, ...]]:
        """Return the norm of the average, how it differs from the mean of ``chosen``, and where.

        Each peer reduces a range of the values: the uids are those whose range differs. Without
        ``chosen`` there is nothing to compare with.
        """
        # What is too short to tell has a part in it, too.
        longest = longest_norm([one.measured for one in chosen], self._steps.history)
        factors = [clip_factor(one.norm, longest) for one in chosen]
        ends = torch.tensor([size for _, size in shares]).cumsum(0)
        differs, lengths = torch.zeros(len(ends)).double(), torch.zeros(len(ends)).double()
        square, place = 0.0, 0
        for index, (_, shape) in enumerate(self.state.schema):
            for first, stop in row_chunks(*rows_and_columns(shape)):
                rows = average.rows(index, first, stop)
                square += float(rows.double().square().sum())
                mean = torch.zeros_like(rows)
                for one, factor in zip(chosen, factors, strict=True):
                    mean.add_(one.file.rows(index, first, stop).mul_(factor))
                mean.div_(max(1, len(chosen)))
                places = torch.arange(place, place := place + rows.numel())
                owners = torch.bucketize(places, ends, right=True).clamp_(max=len(ends) - 1)
                for values, sums in ((rows - mean, differs), (mean, lengths)):
                    sums.index_add_(0, owners, values.view(-1).double().square())
        if not chosen:
            return math.sqrt(square), None, ()
        total = float(differs.sum() / lengths.sum()) ** 0.5
        # Of each peer that reduces something.
        bad = {
            peer: differed > _ALIKE**2 * length
            for (peer, size), differed, length in zip(shares, differs, lengths, strict=True)
            if size
        }
        # Where all ranges differ it is what somebody sent.
        blamed = [
            uids[peer] for peer in bad if bad[peer] and peer in uids and not all(bad.values())
        ]
        return math.sqrt(square), total if math.isfinite(total) else 1e18, tuple(sorted(blamed))

    # --- what is published ------------------------------------------------------------------------

    def _manifest(self, state: GlobalState, values: OuterState, **of_close: Any) -> Manifest:
        averaging = self._averaging if of_close["update"] else None
        if averaging is not None and averaging.source == "average":
            digest = sha256_of(self._steps.place(state.outer_step) / keys.AVERAGE)
            of_close["files"] = {**of_close["files"], keys.AVERAGE: digest}
        return super()._manifest(state, values, averaging=averaging, **of_close)

    def _contributors(self, judged: int) -> int:
        averaging = self._averaging
        return (
            len(averaging.participants) if averaging and averaging.source == "average" else judged
        )

    def _participants(self, close: Intake) -> frozenset[int]:
        if self._averaging is None or self._averaging.source == "merge":
            return super()._participants(close)
        # Also of those whose uploads nobody looked at.
        for uid in self._averaging.participants:
            close.came.setdefault(uid, close.state.closes_at)
        return frozenset(self._averaging.participants)
