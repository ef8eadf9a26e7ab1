"""The rules of a chain on SQL tables: uids, stake, commitments, endpoints, weights, a block clock.

Limits are the public chain's. Its staking and its consensus are not: the founder gives stake and
permits, and a neuron's incentive is the mean of the validators' weights.

Each write is one transaction. After it the tables are read once to an immutable
:class:`Snapshot`, so readers wait for no writer and no disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import math
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter

from distributed_training.chain.base import ChainError, Neuron
from distributed_training.protocol.metadata import LONGEST
from distributed_training.protocol.network_report import NetworkReport

MAX_UIDS = 256
FIRST_BLOCK = 1000
#: Blocks after its registration during which nobody takes a neuron's uid, as on the public chain.
IMMUNITY = 4096
MOST_LOSSES = 1000  # outer steps whose held-out loss is kept
_DAY = 86400.0

TABLES = """
CREATE TABLE neurons (
    uid INTEGER PRIMARY KEY, hotkey TEXT NOT NULL UNIQUE, ip TEXT NOT NULL, port INTEGER,
    stake REAL NOT NULL, permit INTEGER NOT NULL, incentive REAL NOT NULL DEFAULT 0,
    last_update INTEGER NOT NULL, since_block INTEGER NOT NULL, since REAL NOT NULL,
    commitment TEXT, earned REAL NOT NULL DEFAULT 0, counted REAL
);
CREATE TABLE weights (
    voter INTEGER, uid INTEGER, weight REAL NOT NULL, PRIMARY KEY (voter, uid)
) WITHOUT ROWID;
CREATE TABLE losses (outer_step INTEGER PRIMARY KEY, loss REAL NOT NULL, at REAL NOT NULL);
CREATE TABLE expelled (hotkey TEXT PRIMARY KEY);
CREATE TABLE peers (hotkey TEXT PRIMARY KEY, peer TEXT NOT NULL UNIQUE);
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


def _plain_ip(text: str) -> str:
    """Raise ValueError unless ``text`` is an IP address without a zone.

    Validators make a URL of the address, and programs print it.
    """
    try:
        ipaddress.ip_address("" if "%" in text else text)
    except ValueError:
        raise ValueError("this is no IP address") from None  # the text is not repeated
    return text


Uid = Annotated[int, Field(ge=0, lt=4096)]
Port = Annotated[int, Field(ge=1, le=65535)]
Address = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_plain_ip)]
PeerId = Annotated[str, Field(pattern=r"^(|[1-9A-HJ-NP-Za-km-z]{40,53})$")]
Amount = Annotated[float, Field(ge=0.0, le=1e12)]  # NaN neither
Losses = dict[int, tuple[float, float]]  # by outer step: nats per token, and when it was reported
_REPORT: TypeAdapter[tuple[float, NetworkReport]] = TypeAdapter(tuple[float, NetworkReport])


@dataclass(frozen=True)
class LedgerMember:
    """A neuron, with the fields that only the network's page shows.

    ``since``: when its uid was given away, in seconds since the epoch. ``earned``: its mean
    incentive of a day, as of ``counted``; see :meth:`earned_by`.
    """

    neuron: Neuron
    since: float
    commitment: str | None
    earned: float
    counted: float | None

    def earned_by(self, now: float) -> float:
        """Return the mean of the neuron's incentive over about a day, until ``now``.

        It decays exponentially.
        """
        if self.counted is None:
            return 0.0
        kept = math.exp(-max(0.0, now - self.counted) / _DAY)
        return self.earned * kept + self.neuron.incentive * (1 - kept)


@dataclass(frozen=True)
class Snapshot:
    """The state that readers see after one write. ``version`` counts the writes."""

    version: int
    members: tuple[LedgerMember, ...]  # by uid
    losses: Losses
    expelled: tuple[str, ...]  # hotkeys
    reported: str | None = None  # the validator's last report and when it came, as JSON

    @property
    def neurons(self) -> tuple[Neuron, ...]:
        """All neurons by uid."""
        return tuple(member.neuron for member in self.members)

    @cached_property
    def report(self) -> tuple[float, NetworkReport] | None:
        """Arrival of the validator's last report (seconds since the epoch), and the report."""
        if self.reported is None:
            return None
        try:
            return _REPORT.validate_json(self.reported)
        except ValueError:  # of another version of this program
            return None

    @cached_property
    def content(self) -> bytes:
        """The fields of JSON that pollers get: uid, neuron and commitment of each; the expelled."""
        rows = [[m.neuron.uid, vars(m.neuron), m.commitment] for m in self.members]
        return f'"rows": {json.dumps(rows)}, "expelled": {json.dumps(self.expelled)}'.encode()

    @cached_property
    def etag(self) -> str:
        """The name of :attr:`content` in HTTP: equal content, equal name.

        A weak one, which proxies that compress leave as it is.
        """
        return f'W/"{hashlib.sha256(self.content).hexdigest()[:32]}"'


class Ledger:
    """A chain on the tables of ``db``. Thread-safe.

    Writes raise ChainError when the chain does not accept them. Blocks pass by the clock, one every
    ``seconds_per_block`` (``math.inf``: only by :meth:`advance`). A wall clock that is set changes
    nothing.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        *,
        seconds_per_block: float = math.inf,
        first_block: int = FIRST_BLOCK,
        most_uids: int = MAX_UIDS,
    ) -> None:
        self._db = db
        self.seconds_per_block = seconds_per_block
        self.most_uids = most_uids
        self._lock = threading.RLock()
        self._origin = (first_block, time.monotonic())
        self._opened = time.monotonic()
        self._heard: float | None = None  # when the last report came, if it came to this process
        self.view = self._read_view()

    # blocks

    @property
    def height(self) -> int:
        """Number of the current block."""
        block, since = self._origin
        return block + math.floor((time.monotonic() - since) / self.seconds_per_block)

    def advance(self, blocks: int = 1) -> None:
        """Advance the block number at once; a negative count is a reorganization."""
        block, since = self._origin
        self._origin = (block + blocks, since)

    # the tables

    def _one(self, query: str, *values: Any) -> Any:
        return self._db.execute(query, values).fetchone()

    def _meta(self, key: str) -> Any:
        """Read a value; None if it was never set."""
        found = self._one("SELECT value FROM meta WHERE key = ?", key)
        return json.loads(found[0]) if found is not None else None

    def _set_meta(self, key: str, value: Any) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    @contextmanager
    def change(self) -> Iterator[None]:
        """Make one atomic write; a write inside a write is part of the outer one."""
        with self._lock:
            if self._db.in_transaction:
                yield
                return
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield
                self._score()
                self._set_meta("version", self.view.version + 1)
                view = self._read_view()
                self._db.execute("COMMIT")
            except BaseException:  # Ctrl-C too: no later write may join this transaction
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise
            self.view = view

    def _read_view(self) -> Snapshot:
        found = self._db.execute(
            "SELECT uid, hotkey, ip, port, stake, permit, incentive, last_update, since, "
            "commitment, earned, counted FROM neurons ORDER BY uid"
        )
        peers = dict(self._db.execute("SELECT hotkey, peer FROM peers").fetchall())
        members = []
        for uid, hotkey, ip, port, stake, permit, incentive, updated, *rest in found:
            neuron = Neuron(
                uid=uid,
                hotkey=hotkey,
                ip=ip,
                port=port,
                stake=stake,
                validator_permit=bool(permit),
                incentive=incentive,
                last_update=updated,
                peer=peers.get(hotkey, ""),
            )
            members.append(LedgerMember(neuron, *rest))
        losses = self._db.execute("SELECT outer_step, loss, at FROM losses ORDER BY outer_step")
        expelled = self._db.execute("SELECT hotkey FROM expelled ORDER BY hotkey")
        return Snapshot(
            self._meta("version") or 0,
            tuple(members),
            {step: (loss, at) for step, loss, at in losses},
            tuple(hotkey for (hotkey,) in expelled),
            (self._one("SELECT value FROM meta WHERE key = 'report'") or (None,))[0],
        )

    def uid_of(self, hotkey: str) -> int | None:
        """Return the uid of ``hotkey``; None: it is not registered."""
        found = self._one("SELECT uid FROM neurons WHERE hotkey = ?", hotkey)
        return found[0] if found is not None else None

    def _own(self, kind: str, hotkey: str) -> int:
        """Return the uid of a caller. Raises ChainError."""
        uid = self.uid_of(hotkey)
        if uid is None:
            raise ChainError(f"{kind}: hotkey {hotkey} is not registered")
        return uid

    # writes

    def register(
        self,
        hotkey: str,
        *,
        uid: Uid | None = None,
        stake: Amount = 0.0,
        validator_permit: bool = False,
    ) -> int:
        """Give ``hotkey`` a uid: the one it has, the lowest free one, or the least earning one's.

        Returns it.

        A hotkey that is registered keeps its endpoint. A uid that is taken goes to the new hotkey,
        whose owner is thereby deregistered, as on the public chain.
        """
        with self.change():
            old = self.uid_of(hotkey)
            if uid is None:
                uid = old
            if uid is None:
                taken = {uid for (uid,) in self._db.execute("SELECT uid FROM neurons")}
                uid = next((i for i in range(self.most_uids) if i not in taken), None)
            if uid is None:
                # Of those that earn equally little the one that was there longest goes.
                least = self._one(
                    "SELECT uid FROM neurons WHERE NOT permit AND since_block <= ? "
                    "ORDER BY incentive, since_block, uid LIMIT 1",
                    self.height - IMMUNITY,
                )
                if least is None:
                    raise ChainError(
                        f"register: all {self.most_uids} uids are taken by validators or by "
                        f"neurons registered within {IMMUNITY} blocks: try again later"
                    )
                uid = int(least[0])
            if uid >= self.most_uids:
                raise ChainError(f"register: uids are 0 to {self.most_uids - 1} here")
            if old == uid:
                # A change of stake or permit is no new registration: the immunity continues.
                self._db.execute(
                    "UPDATE neurons SET stake = ?, permit = ?, last_update = ? WHERE uid = ?",
                    (stake, validator_permit, self.height, uid),
                )
                return uid
            # Endpoint and commitment are the hotkey's and stay: others read its bucket by it.
            find = "SELECT ip, port, commitment FROM neurons WHERE hotkey = ?"
            ip, port, commitment = self._one(find, hotkey) or (Neuron.ip, None, None)
            for left in (old, uid):
                self._remove(left)
            self._db.execute(
                "INSERT INTO neurons (uid, hotkey, ip, port, stake, permit, commitment, "
                "last_update, since_block, since) VALUES (?, ?, ?, ?, ?, ?, ?, ?8, ?8, ?9)",
                (
                    uid,
                    hotkey,
                    ip,
                    port,
                    stake,
                    validator_permit,
                    commitment,
                    self.height,
                    time.time(),
                ),
            )
            return uid

    def _remove(self, uid: int | None) -> None:
        self._db.execute("DELETE FROM neurons WHERE uid = ?", (uid,))
        # Also the others' weights of this uid: its next holder has earned none of them.
        self._db.execute("DELETE FROM weights WHERE ? IN (voter, uid)", (uid,))

    def deregister(self, hotkey: str) -> None:
        with self.change():
            self._remove(self._own("deregister", hotkey))

    def commit(self, hotkey: str, text: str) -> None:
        with self.change():
            uid = self._own("commit", hotkey)
            # Others are up to six times as long in JSON, which would fill the list for all.
            if len(text) > LONGEST or not (text.isascii() and text.isprintable()):
                raise ChainError(f"commit: a commitment has at most {LONGEST} characters of ASCII")
            self._db.execute("UPDATE neurons SET commitment = ? WHERE uid = ?", (text, uid))

    def serve(self, hotkey: str, ip: Address, port: Port, peer: PeerId = "") -> None:
        with self.change():
            uid = self._own("serve", hotkey)
            if owner := self._one(
                "SELECT hotkey FROM peers WHERE peer = ? AND hotkey != ?", peer, hotkey
            ):
                # Two members with one peer would share what an all-reduce counts for one of them.
                raise ChainError(f"serve: DHT peer {peer} is that of hotkey {owner[0]}")
            self._db.execute("DELETE FROM peers WHERE hotkey = ?", (hotkey,))
            if peer:
                self._db.execute("INSERT INTO peers VALUES (?, ?)", (hotkey, peer))
            self._db.execute("UPDATE neurons SET ip = ?, port = ? WHERE uid = ?", (ip, port, uid))

    def set_weights(self, hotkey: str, weights: Mapping[Uid, Amount]) -> None:
        with self.change():
            voter = self._own("weights", hotkey)
            if not self._one("SELECT permit FROM neurons WHERE uid = ?", voter)[0]:
                raise ChainError("weights: only a validator with a permit sets weights")
            # Otherwise the next holder of that uid would begin with weights that it has not earned.
            known = {uid for (uid,) in self._db.execute("SELECT uid FROM neurons")}
            if unknown := sorted(set(weights) - known):
                raise ChainError(f"weights: no such uids: {unknown[:10]}")
            self._db.execute("DELETE FROM weights WHERE voter = ?", (voter,))
            rows = [(voter, uid, weight) for uid, weight in weights.items()]
            self._db.executemany("INSERT INTO weights VALUES (?, ?, ?)", rows)
            update = "UPDATE neurons SET last_update = ? WHERE uid = ?"
            self._db.execute(update, (self.height, voter))

    def report(self, report: NetworkReport) -> None:
        """Keep the validator's report, and drop losses of outer steps above the report's."""
        with self.change():
            step, now = report.outer_step, time.time()
            # Bounded: all of them go into each page.
            self._db.execute(
                "DELETE FROM losses WHERE outer_step > ? OR outer_step <= ?",
                (step, step - MOST_LOSSES),
            )
            self._db.execute(
                "INSERT INTO losses VALUES (?, ?, ?) ON CONFLICT (outer_step) DO UPDATE "
                "SET loss = excluded.loss, at = excluded.at WHERE loss != excluded.loss",
                (step, report.loss, now),
            )
            self._set_meta("report", [now, asdict(report)])
        self._heard = time.monotonic()

    def ages(self) -> tuple[float, float]:
        """Return the seconds since the last report, and since this process could receive one."""
        now, report = time.monotonic(), self.view.report
        listened = now - self._opened
        if self._heard is not None:
            return now - self._heard, listened
        # Whatever the wall clock says meanwhile, none came since.
        return max(time.time() - report[0] if report else 0.0, listened), listened

    def _score(self) -> None:
        """Set incentive = mean of the validators' normalized weights, weighted by stake.

        Simpler than Yuma consensus (no clipping, no bonds), enough to rank the members.
        """
        found = self._db.execute(
            "SELECT weights.uid, sum(neurons.stake * weights.weight / total) FROM weights "
            "JOIN (SELECT voter, sum(weight) AS total FROM weights GROUP BY voter) AS totals "
            "ON totals.voter = weights.voter AND total > 0 "
            "JOIN neurons ON neurons.uid = weights.voter GROUP BY weights.uid"
        )
        given = dict(found.fetchall())
        everything, now = sum(given.values()), time.time()
        shares = {uid: weight / everything for uid, weight in given.items() if everything > 0}
        for member in self._read_view().members:
            uid = member.neuron.uid
            if (share := shares.get(uid, 0.0)) != member.neuron.incentive:
                # The mean up to now is of the old incentive; the new one counts from here.
                self._db.execute(
                    "UPDATE neurons SET incentive = ?, earned = ?, counted = ? WHERE uid = ?",
                    (share, member.earned_by(now), now, uid),
                )
