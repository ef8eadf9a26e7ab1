"""Take part in the members' all-reduce, and make the update from its average if it is sound.

The validator's peer sends zeros with almost no weight and reduces nothing, but it receives the
average of all other peers. The update is made from that average if the average passes all checks.
Otherwise the update is the merge of the accepted uploads, as in a store network. The manifest says
which of the two was used and why, who took part, and by how much the two differ.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from distributed_training.chain.base import Neuron
from distributed_training.common.files import sha256_of
from distributed_training.common.processes import ChildProcess
from distributed_training.config import Config
from distributed_training.exchange.hivemind import (
    HANGS,
    NO_FAULT,
    Answer,
    Membership,
    NoAllReduce,
    Order,
)
from distributed_training.exchange.opening import open_peer
from distributed_training.protocol import keys, lines
from distributed_training.protocol.average_file import Average
from distributed_training.protocol.manifest import Averaging, Manifest
from distributed_training.protocol.network_report import printable
from distributed_training.protocol.update_file import row_chunks, rows_and_columns
from distributed_training.training.weights import GlobalState
from distributed_training.validator.closes import Intake, MergedSome
from distributed_training.validator.merge import OuterState, Values, clip_factor
from distributed_training.validator.store_rounds import StoreValidator

log = logging.getLogger(__name__)

_ALIKE = 0.01  # largest norm of the difference from the merge, as a fraction of the merge's norm


def kind_of_validator(config: Config) -> type[StoreValidator]:
    """Return the class of this network's validator."""
    return AveragingValidator if config.averages else StoreValidator


class AveragingValidator(StoreValidator):
    """A validator that leads the rounds of a network over hivemind."""

    def __post_init__(self) -> None:
        super().__post_init__()
        own, after = self.member.hotkey, self.config.rounds.average_after.total_seconds()
        self._membership = Membership(self.member.chain.neurons, own, own, after)
        self.peer: ChildProcess  # set by start()
        self._ordered: Intake | None = None  # the close that the last order was for
        self._order: Order | None = None
        self._answer: Answer | None = None
        self._averaging = Averaging("merge", "")  # the averaging at the current close
        self._sampled: Set[str] = set()  # hotkeys of the members whose uploads are judged

    def start(self) -> None:
        """Start the peer process too. It may also raise OSError."""
        super().start()
        self.peer = open_peer(
            self.config, self.member, self.folder, self.state.schema, self._on_answer
        )

    def run(self) -> None:
        with self.peer:
            super().run()

    # --- the all-reduce ---------------------------------------------------------------------------

    def _choose_awaited(self, serial: int, miners: Sequence[Neuron]) -> frozenset[str]:
        members = self.standings.present()
        hotkeys = [miner.hotkey for miner in miners if miner.uid in members]
        most = self.config.rounds.sample or len(hotkeys)
        drawn = self._draw(serial).sample(hotkeys, min(most, len(hotkeys)))
        # Draw no other validators, but always look for their uploads, because a validator becomes a
        # member with its first upload.
        self._sampled = {*drawn} | {m.hotkey for m in miners if m.uid not in members}
        return super()._choose_awaited(serial, miners) & self._sampled

    def _judge_new(self, close: Intake, miners: Sequence[Neuron], now: float) -> None:
        if self._ordered is not close:
            path = self.steps.place(close.state.outer_step + 1) / keys.AVERAGE
            self._ordered, self._order, self._answer = close, None, None
            try:
                self._order = self._membership.build_order(
                    close.state, now, self.steps.head, average=str(path.absolute())
                )
            except NoAllReduce as error:
                self._answer = Answer(close.state.serial, failed=str(error))
            else:
                path.unlink(missing_ok=True)
                log.info("%s", lines.ALL_REDUCE_START)
                self.peer.send(self._order)
        super()._judge_new(close, [m for m in miners if m.hotkey in self._sampled], now)

    def _on_answer(self, answer: Answer) -> None:
        if self._order is not None and answer.serial == self._order.serial:
            self._answer = answer

    def _missing(self, close: Intake, miners: Sequence[Neuron], now: float) -> bool:
        unanswered = self._answer is None and now < close.ends + HANGS
        return super()._missing(close, miners, now) or unanswered

    # --- average or merge -------------------------------------------------------------------------

    def _merge_all(self, close: Intake) -> MergedSome:
        self._averaging = Averaging("average", "")
        try:
            return self._merge_average(close, sorted(close.accepted))
        except NoAllReduce as error:
            why = printable(str(error), 300)
            self._averaging = replace(self._averaging, source="merge", why=why)
            # At the first close nobody averages, so this is not a failure.
            text = lines.all_reduce_failed(2) if self._order else "No average"
            level = logging.WARNING if self._order else logging.INFO
            log.log(level, "%s: %s. The outer step is the merge of the uploads", text, error)
            return super()._merge_all(close)

    def _merge_average(self, close: Intake, uids: Sequence[int]) -> MergedSome:
        """Merge the members' average instead of the uploads of ``uids``, and return the result.

        Raises NoAllReduce if the average cannot be used.
        """
        order, answer = self._order, self._answer
        if order is None or answer is None or answer.failed:
            raise NoAllReduce(answer.failed if answer else "the DHT peer did not answer")
        by_peer = {peer: uid for peer, _, uid in order.members}
        owners = [(by_peer.get(peer, -1), size) for peer, size in answer.shares]
        took_part = tuple(sorted(uid for uid, _ in owners if uid >= 0))
        self._averaging = replace(self._averaging, participants=took_part)
        for uid in took_part:
            refused = close.refused.get(uid)
            if refused is not None and refused.cause not in NO_FAULT:
                why = f"uid {uid} took part, but its upload was refused ({refused.cause})"
                raise NoAllReduce(why)
        mine = [uid for uid in uids if uid in took_part]
        if not mine:
            raise NoAllReduce("no member whose upload was accepted took part")
        if any(close.accepted[uid].share < 1 for uid in mine):
            raise NoAllReduce("uploads of several members are alike, and would count several times")
        try:
            average = Average(Path(order.average), self.state.schema)
        except (ValueError, OSError) as error:
            raise NoAllReduce(str(error)) from None
        # If a participant's upload was not fetched, there is nothing to compare the average with.
        found = [close.accepted[uid] for uid in uids] if {*took_part} <= {*uids} else []
        chosen = [(one.file, clip_factor(one.norm, order.longest)) for one in found]
        norm = self._compare(chosen, average, owners)
        difference, suspects = self._averaging.difference, self._averaging.suspects
        if not norm <= order.longest:  # NaN is refused too
            raise NoAllReduce(
                f"its norm is {norm:.3g}, but the usual norm of an upload is {order.usual:.3g}"
            )
        if difference is not None and difference > _ALIKE:
            blamed = ", ".join(map(str, suspects))
            where = f"; it differs in what uid {blamed} reduced" if blamed else ""
            raise NoAllReduce(
                f"it differs by {difference:.1%} from the merge of the uploads{where}"
            )
        merged = self._merge(close, mine, average)
        after = self.mean(merged.losses)
        limit = self.config.loss_limit(self.mean(self._losses))
        if not after <= limit:
            raise NoAllReduce(f"with it the held-out loss is {after:.4f}, above {limit:.4f}")
        log.info("%s: %d members took part", lines.ALL_REDUCE_FINISH, len(took_part))
        return merged

    def _compare(
        self, chosen: Sequence[tuple[Values, float]], average: Average, owners: Sequence[Any]
    ) -> float:
        """Return the norm of the average, and note where it differs from the mean of ``chosen``.

        ``chosen``: the uploads and the factors that clip them; if empty, nothing is compared.
        ``owners``: for each range of values, in their order: the uid of the member that reduced
        the range (-1: not a member) and its number of values.
        """
        ends = torch.tensor([size for _, size in owners]).cumsum(0)
        # For each owner, sum the squares of the average, of its difference from the mean, and of
        # the mean.
        squares, place = torch.zeros(3, len(owners), dtype=torch.float64), 0
        for index, (_, shape) in enumerate(self.state.schema):
            for first, stop in row_chunks(*rows_and_columns(shape)):
                rows = average.rows(index, first, stop)
                mean = torch.zeros_like(rows)
                for file, factor in chosen:
                    mean.add_(file.rows(index, first, stop), alpha=factor / len(chosen))
                places = torch.arange(place, place := place + rows.numel())
                by_owner = torch.bucketize(places, ends, right=True)
                for values, sums in zip((rows, rows - mean, mean), squares, strict=True):
                    sums.index_add_(0, by_owner, values.view(-1).double().square())
        norm, difference, length = squares.sum(1).sqrt().tolist()
        if chosen:
            differ = ~(squares[1] <= _ALIKE**2 * squares[2])  # true for NaN too
            suspects = [uid for (uid, _), each in zip(owners, differ, strict=True) if each]
            if len(suspects) == sum(size > 0 for _, size in owners):
                suspects = []  # if all ranges differ, a member did not average what it uploaded
            finite = min(difference / max(length, 1e-18), 1e18) if math.isfinite(norm) else None
            self._averaging = replace(
                self._averaging, difference=finite, suspects=tuple(sorted(suspects))
            )
        return norm

    # --- what is published ------------------------------------------------------------------------

    def _manifest(self, state: GlobalState, values: OuterState, **of_close: Any) -> Manifest:
        averaging = self._averaging if of_close.get("update") else None
        if averaging is not None and averaging.source == "average":
            digest = sha256_of(self.steps.place(state.outer_step) / keys.AVERAGE)
            of_close["files"] = {**of_close["files"], keys.AVERAGE: digest}
        return super()._manifest(state, values, averaging=averaging, **of_close)

    def _contributors(self, judged: int) -> int:
        averaging = self._averaging
        return len(averaging.participants) if averaging.source == "average" else judged

    def _participants(self, close: Intake) -> frozenset[int]:
        if self._averaging.source == "merge":
            return super()._participants(close)
        # Participants whose uploads were not fetched count as having uploaded too.
        for uid in self._averaging.participants:
            if uid not in close.came and uid in self.standings.entries:
                at = close.state.closes_at
                close.came[uid] = self.standings.entries[uid].uploaded = at
        return frozenset(self._averaging.participants)
