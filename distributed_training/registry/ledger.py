"""The members of a network on SQL tables: uids, read keys of buckets, addresses.

Each write is one transaction. After it the tables are read once to an immutable
:class:`Snapshot`, so readers wait for no writer and no disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter

from distributed_training.chain.base import ChainError, Neuron
from distributed_training.protocol.metadata import LONGEST
from distributed_training.protocol.network_report import NetworkReport

MAX_UIDS = 256
MOST_LOSSES = 1000  # outer steps whose held-out loss is kept

TABLES = """
CREATE TABLE members (
    uid INTEGER PRIMARY KEY, hotkey TEXT NOT NULL UNIQUE, ip TEXT NOT NULL, port INTEGER,
    peer TEXT NOT NULL DEFAULT '', since REAL NOT NULL, commitment TEXT
);
CREATE UNIQUE INDEX members_peer ON members (peer) WHERE peer != '';
CREATE TABLE losses (outer_step INTEGER PRIMARY KEY, loss REAL NOT NULL, at REAL NOT NULL);
CREATE TABLE expelled (hotkey TEXT PRIMARY KEY);
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
Losses = dict[int, tuple[float, float]]  # outer step -> nats per token, and when it was reported
_REPORT: TypeAdapter[tuple[float, NetworkReport]] = TypeAdapter(tuple[float, NetworkReport])


@dataclass(frozen=True)
class LedgerMember:
    """A member, and ``since``: when its uid was given away, in seconds since the epoch."""

    neuron: Neuron
    since: float
    commitment: str | None  # the read key of its own bucket


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
        except ValueError:  # written by another version of this program
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
    """The members on the tables of ``db``. Thread-safe.

    Writes raise ChainError when they are not accepted.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        *,
        most_uids: int = MAX_UIDS,
        master: str = "",
    ) -> None:
        self._db, self._master = db, master
        self.most_uids = most_uids
        self._lock = threading.RLock()
        self._opened = time.monotonic()
        self._heard: float | None = None  # when the last report came, if it came to this process
        self.view = self._read_view()

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
                self._set_meta("version", self.view.version + 1)
                view = self._read_view()
                self._db.execute("COMMIT")
            except BaseException:  # also for Ctrl-C, since no later write may join this transaction
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise
            self.view = view

    def _read_view(self) -> Snapshot:
        found = self._db.execute(
            "SELECT uid, hotkey, ip, port, peer, since, commitment FROM members ORDER BY uid"
        )
        members = []
        for uid, hotkey, ip, port, peer, *rest in found:
            leads = hotkey == self._master
            neuron = Neuron(uid, hotkey, ip, port, validator_permit=leads, peer=peer)
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
        found = self._one("SELECT uid FROM members WHERE hotkey = ?", hotkey)
        return found[0] if found is not None else None

    def _own(self, kind: str, hotkey: str) -> int:
        """Return the uid of a caller. Raises ChainError."""
        uid = self.uid_of(hotkey)
        if uid is None:
            raise ChainError(f"{kind}: hotkey {hotkey} is not registered")
        return uid

    # writes

    def register(self, hotkey: str, *, uid: int | None = None) -> int:
        """Give ``hotkey`` a uid: the one it has, ``uid`` if it is free, or the lowest free one."""
        with self.change():
            known = self.uid_of(hotkey)
            if known is not None:
                return known
            taken = {uid for (uid,) in self._db.execute("SELECT uid FROM members")}
            free = [each for each in range(self.most_uids) if each not in taken]
            if not free:
                raise ChainError(
                    f"register: all {self.most_uids} uids are taken: ask the founder, who can "
                    "expel a member that is gone"
                )
            if uid not in free:
                # Below the floor a member may have a uid that a restored backup does not know.
                floor = self._meta("floor") or 0
                uid = next((each for each in free if each >= floor), free[-1])
            self._db.execute(
                "INSERT INTO members (uid, hotkey, ip, since) VALUES (?, ?, ?, ?)",
                (uid, hotkey, Neuron.ip, time.time()),
            )
            return uid

    def _remove(self, uid: int | None) -> None:
        self._db.execute("DELETE FROM members WHERE uid = ?", (uid,))

    def commit(self, hotkey: str, text: str) -> None:
        with self.change():
            uid = self._own("commit", hotkey)
            # Other characters are up to six times as long in JSON, which would fill the list for
            # all.
            if len(text) > LONGEST or not (text.isascii() and text.isprintable()):
                raise ChainError(f"commit: a commitment has at most {LONGEST} characters of ASCII")
            self._db.execute("UPDATE members SET commitment = ? WHERE uid = ?", (text, uid))

    def serve(self, hotkey: str, ip: Address, port: Port, peer: PeerId = "") -> None:
        with self.change():
            uid = self._own("serve", hotkey)
            find = "SELECT hotkey FROM members WHERE peer = ? AND peer != '' AND hotkey != ?"
            if owner := self._one(find, peer, hotkey):
                # Two members with one peer would share what an all-reduce counts for one of them.
                raise ChainError(f"serve: DHT peer {peer} is that of hotkey {owner[0]}")
            self._db.execute(
                "UPDATE members SET ip = ?, port = ?, peer = ? WHERE uid = ?", (ip, port, peer, uid)
            )

    def report(self, report: NetworkReport) -> None:
        """Keep the validator's report, and drop losses of outer steps above the report's."""
        with self.change():
            step, now = report.outer_step, time.time()
            # Bound their number, since each page has all of them.
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
        # No report came since, whatever the wall clock says.
        return max(time.time() - report[0] if report else 0.0, listened), listened
