"""Keep the members in SQLite, so that a SIGKILL at any moment loses no acknowledged write.

One folder holds one registry: ``registry.db`` (WAL mode, each write synced before it is answered)
and a lock file.

*Replays.* A caller signs each write with its clock's time as the nonce (``btauth/1``), and with
this registry's identity as the receiver. Nonces are stored with their writes, so no nonce is
accepted twice, whatever the clocks do. Each hotkey's nonces must increase. The exception is a last
nonce in the future: both clocks were ahead when it was accepted, and it must not lock its hotkey
out.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from pydantic import Field

from distributed_training.chain.base import ChainError, Neuron
from distributed_training.common.backoff import Throttle
from distributed_training.common.files import sync_folder
from distributed_training.config.types import ConfigError, Hotkey
from distributed_training.network import LAST_OF_SUBNET_38
from distributed_training.protocol.metadata import LONGEST
from distributed_training.protocol.network_report import NetworkReport

from .ledger import Address, LedgerMember, PeerId, Port, Snapshot, Uid

log = logging.getLogger(__name__)

FILE = "registry.db"
SCHEMA, _OLDEST = 5, 3
_GAP = 64  # uids above a restored backup's highest that may have been given out since the backup
#: Seconds that a caller's clock may be ahead of ours.
CLOCK_SKEW = 4.0
_OF_THE_DISK = ("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_CANTOPEN")
_HELD = ("SQLITE_BUSY", "SQLITE_LOCKED")
_APPLICATION = 0x64747267  # "dtrg", in the file's header
_MOST_NONCES = 1024  # nonces kept per hotkey; a validator uses this many in three days
# Seconds for which expired invitations are kept, so that a wrong clock does not delete valid ones.
_INVITATIONS_KEPT = 400 * 86400.0
ID_LENGTH = 12  # characters of an invitation's hash that identify it
_TAKEN_BACK = -1  # the ``uses`` of a revoked invitation
_MOST_GONE = 65536  # unregistered hotkeys whose nonces are kept
# ``used``: accepted nonces above their hotkey's floor. ``joined``: the hash of the invitation that
# a hotkey used.
TABLES = """
CREATE TABLE members (
    uid INTEGER PRIMARY KEY, hotkey TEXT NOT NULL UNIQUE, ip TEXT NOT NULL, port INTEGER,
    peer TEXT NOT NULL DEFAULT '', since REAL NOT NULL, commitment TEXT
);
CREATE UNIQUE INDEX members_peer ON members (peer) WHERE peer != '';
CREATE TABLE expelled (hotkey TEXT PRIMARY KEY);
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE nonces (
    hotkey TEXT PRIMARY KEY, nonce INTEGER NOT NULL, floor INTEGER NOT NULL DEFAULT -1
);
CREATE TABLE used (hotkey TEXT, nonce INTEGER, PRIMARY KEY (hotkey, nonce)) WITHOUT ROWID;
CREATE TABLE invitations (hash TEXT PRIMARY KEY, uses INTEGER NOT NULL, expires REAL NOT NULL);
CREATE TABLE allowed (hotkey TEXT PRIMARY KEY);
CREATE TABLE joined (hotkey TEXT PRIMARY KEY, hash TEXT NOT NULL);
"""

_Short = Annotated[str, Field(min_length=1, max_length=200)]
_Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_Uses = Annotated[int, Field(ge=1, le=4096)]
_Expires = Annotated[float, Field(ge=0, le=1e11)]
# An invitation's id: the first characters of its hash.
_Id = Annotated[str, Field(pattern="^[0-9a-f]{12,64}$")]
Admission = Literal["open", "invited", "listed"]


class StoreFault(RuntimeError):
    """The file cannot be used, though the flags are right. The message is for the operator."""


class CannotStore(ChainError):
    """This machine cannot write to the file now. A later request may succeed."""


class Replayed(ChainError):
    """The nonce was used before, or is not above its hotkey's last nonce."""


@dataclass(frozen=True)
class Charter:
    """The terms with which a registry is created. Only ``admission`` changes later."""

    name: str
    master: str
    most_uids: int
    admission: Admission
    # Random, so that no two registries have the same identity.
    genesis: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def identity(self) -> str:
        """The receiver that each signed write must name."""
        return f"{self.name}/{self.genesis}/{self.master}"


def found(folder: Path, charter: Charter) -> None:
    """Create a new registry. Its file appears complete or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{FILE}.new"
    temporary.unlink(missing_ok=True)
    db = sqlite3.connect(temporary, isolation_level=None)
    with contextlib.closing(db):
        db.executescript(
            f"PRAGMA application_id = {_APPLICATION}; PRAGMA user_version = {SCHEMA};" + TABLES
        )
        meta = {"charter": asdict(charter), "version": 0}
        rows = [(key, json.dumps(value)) for key, value in meta.items()]
        db.executemany("INSERT INTO meta VALUES (?, ?)", rows)
    _publish(temporary, folder / FILE)


def _publish(temporary: Path, path: Path) -> None:
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.chmod(temporary, 0o600)
    # These belong to the old database, and remain if its process was killed and its file was moved
    # away. SQLite would write their content into the new file.
    for ending in ("-wal", "-shm"):
        Path(f"{path}{ending}").unlink(missing_ok=True)
    os.replace(temporary, path)
    sync_folder(path.parent)


class Registry:
    """The registry in the tables of ``db``. Thread-safe. Close it after use.

    Each write is one transaction, and raises ChainError if it is not accepted. After each write,
    the tables are read once into an immutable :class:`Snapshot`, so readers never wait for a writer
    or for the disk. ``folder``: the file's folder, named in log lines.
    """

    def __init__(self, db: sqlite3.Connection, charter: Charter, folder: Path = Path()) -> None:
        self._db = db
        self.charter, self.folder = charter, folder
        self.most_uids = charter.most_uids
        self.start = secrets.token_hex(4)  # id of this process, within which versions only grow
        self.faults = 0  # writes that could not be stored
        #: Name -> content: the network's file and its earlier versions, for new members.
        self.files: Mapping[str, str] = {}
        self.file_version: int | None = None  # version of the network's file
        # Warn rarely, because anybody may send writes, and the log may be on the same full disk.
        self._may_warn = Throttle(60.0)
        self._lock = threading.RLock()
        self._lock_file: IO[bytes] | None = None
        self._opened = time.monotonic()
        self._heard: float | None = None  # when this process received its last report
        self.view = self._read_view()

    @classmethod
    def at(cls, folder: Path, charter: Charter | None = None) -> Registry:
        """Open the registry in ``folder``, or create it with ``charter``.

        The founder is registered first. Raises ConfigError if there is no registry, StoreFault if
        another process uses it or its file is damaged.
        """
        path = folder / FILE
        if charter is not None and not path.exists():
            found(folder, charter)
        with ExitStack() as failed:
            # Lock first, because two services on one file could give out the same uid twice. The
            # stack also releases the lock after Ctrl-C; otherwise it would block the next start.
            lock_file = failed.enter_context(_lock(folder))
            db = failed.enter_context(contextlib.closing(_open(path)))
            try:
                db.execute("PRAGMA journal_mode = WAL")
                # NORMAL would lose acknowledged writes in a power failure.
                db.execute("PRAGMA synchronous = FULL")
                (schema,) = db.execute("PRAGMA user_version").fetchone()
                if schema < SCHEMA:
                    # Keep a copy, since an operator may go back to the previous version.
                    backup(path, folder / f"schema-{schema}.db")
                    _upgrade(db)
                (terms,) = db.execute("SELECT value FROM meta WHERE key = 'charter'").fetchone()
                known = {field.name for field in fields(Charter)}
                # Earlier charters also had settings for a block clock.
                given = {key: v for key, v in json.loads(terms).items() if key in known}
                registry = cls(db, Charter(**given), folder)
                # Do not give out again the uids that were given out after a restored backup was
                # made. Write this only if necessary, so that a start on a full disk writes nothing.
                if registry._meta("restored"):
                    (last,) = registry._one("SELECT coalesce(max(uid), -1) FROM members")
                    registry._set_meta("floor", last + 1 + _GAP)
                    registry._set_meta("restored", False)
            except (sqlite3.Error, LookupError, TypeError, ValueError, AttributeError) as error:
                raise _unusable(path, error) from None
            registry._lock_file = lock_file
            failed.pop_all()
        if not registry.view.members:
            registry.register(registry.charter.master)
        return registry

    def close(self) -> None:
        """Close the database. Idempotent."""
        with self._lock:
            self._db.close()
            if self._lock_file is not None:
                self._lock_file.close()

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
        """Make one atomic write; a nested write becomes part of the outer one."""
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
            except BaseException as error:  # even Ctrl-C: no later write may join this one
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error):
                    self.faults += 1
                    if self._may_warn("write"):
                        remedy = _remedy(self.folder, error)
                        log.warning(
                            "A write was not stored (%s), so it was refused: %s", error, remedy
                        )
                    raise CannotStore(f"the registry cannot store writes now ({error})") from None
                raise
            self.view = view

    def change_charter(self, **changes: Any) -> None:
        self.charter = replace(self.charter, **changes)
        self._set_meta("charter", asdict(self.charter))

    def _read_view(self) -> Snapshot:
        found = self._db.execute(
            "SELECT uid, hotkey, ip, port, peer, since, commitment FROM members ORDER BY uid"
        )
        members = []
        for uid, hotkey, ip, port, peer, *rest in found:
            leads = hotkey == self.charter.master
            neuron = Neuron(uid, hotkey, ip, port, validator_permit=leads, peer=peer)
            members.append(LedgerMember(neuron, *rest))
        expelled = self._db.execute("SELECT hotkey FROM expelled ORDER BY hotkey")
        return Snapshot(
            self._meta("version") or 0,
            tuple(members),
            tuple(hotkey for (hotkey,) in expelled),
            (self._one("SELECT value FROM meta WHERE key = 'report'") or (None,))[0],
        )

    def uid_of(self, hotkey: str) -> int | None:
        """Return the uid of ``hotkey``, or None if it is not registered."""
        found = self._one("SELECT uid FROM members WHERE hotkey = ?", hotkey)
        return found[0] if found is not None else None

    def _own(self, kind: str, hotkey: str) -> int:
        """Return a caller's uid. Raises ChainError if it is not registered."""
        uid = self.uid_of(hotkey)
        if uid is None:
            self._refuse_expelled(kind, hotkey)
            raise ChainError(f"{kind}: hotkey {hotkey} is not registered")
        return uid

    # signed writes

    def write(self, hotkey: str, nonce: int, action: Callable[[], Any]) -> Any:
        """Run ``action`` once for an authenticated call. Raises Replayed, ChainError."""
        with self.change():
            find = "SELECT nonce, floor FROM nonces WHERE hotkey = ?"
            last, floor = self._one(find, hotkey) or (-1, -1)
            used = self._one("SELECT 1 FROM used WHERE hotkey = ? AND nonce = ?", hotkey, nonce)
            # A nonce in the future was accepted while both clocks were ahead. If it counted as a
            # floor, this hotkey would be locked out until that time.
            ahead = last > time.time_ns() + round(CLOCK_SKEW * 1e9)
            if used or nonce <= floor or (nonce <= last and not ahead):
                later = (max(last, floor) - nonce) / 1e9
                raise Replayed(
                    "nonce was used before"
                    if used
                    else f"this hotkey has signed a call {later:.1f} s later than this one, so a "
                    "clock was ahead: check that timedatectl says 'synchronized: yes' there"
                )
            result = action()
            # Store the nonce in the action's transaction: after a kill between two transactions,
            # the call could be replayed.
            self._db.execute(
                "INSERT INTO nonces (hotkey, nonce) VALUES (?, ?) "
                "ON CONFLICT (hotkey) DO UPDATE SET nonce = excluded.nonce",
                (hotkey, nonce),
            )
            self._db.execute("INSERT INTO used VALUES (?, ?)", (hotkey, nonce))
            newest = "SELECT nonce FROM used WHERE hotkey = ? ORDER BY nonce DESC LIMIT 1 OFFSET ?"
            if (forgotten := self._one(newest, hotkey, _MOST_NONCES)) is not None:
                values = (*forgotten, hotkey)
                self._db.execute("DELETE FROM used WHERE nonce <= ? AND hotkey = ?", values)
                self._db.execute("UPDATE nonces SET floor = ? WHERE hotkey = ?", values)
            return result

    def join(self, hotkey: str, invitation: _Short | None = None, uid: Uid | None = None) -> int:
        """Register ``hotkey`` if it is admitted; return its uid. A registered one keeps its uid.

        ``uid``: the uid that it had before an older backup was restored. It gets that uid again if
        it is free.
        """
        with self.change():
            known = self.uid_of(hotkey)
            if known is not None:
                return known
            self._admit(hotkey, invitation, again=uid is not None)
            # Give the member its old uid again, because its bucket and its pages depend on it.
            uid = self.register(hotkey, uid=uid)
            # With open admission, anybody can come and go, so limit how many hotkeys are kept. A
            # limit on their age would drop recent ones if the clock is wrong.
            gone = self._db.execute(
                "SELECT hotkey FROM nonces WHERE hotkey NOT IN (SELECT hotkey FROM members) "
                "ORDER BY nonce DESC LIMIT -1 OFFSET ?",
                (_MOST_GONE,),
            ).fetchall()
            for table in ("used", "nonces"):
                self._db.executemany(f"DELETE FROM {table} WHERE hotkey = ?", gone)
        log.info("Hotkey %s is registered as uid %d", hotkey, uid)
        return uid

    def _refuse_expelled(self, kind: str, hotkey: str) -> None:
        if self._one("SELECT 1 FROM expelled WHERE hotkey = ?", hotkey):
            raise ChainError(
                f"{kind}: the founder expelled hotkey {hotkey}, and can let it in again with "
                "`dt-network expel --again`"
            )

    def _admit(self, hotkey: str, invitation: str | None, *, again: bool = False) -> None:
        self._refuse_expelled("register", hotkey)
        admission = self.charter.admission
        if admission == "open" or self._one("SELECT 1 FROM allowed WHERE hotkey = ?", hotkey):
            return
        if admission == "listed":
            raise ChainError(
                f"register: hotkey {hotkey} is not on this network's list: ask its founder to run "
                "`dt-network allow`"
            )
        if not invitation:
            raise ChainError(
                "register: this network admits only invited neurons: ask its founder for an "
                "invitation and put DT_INVITATION=... into .env"
            )
        hashed = hash_of(invitation)
        found = self._one("SELECT uses, expires FROM invitations WHERE hash = ?", hashed)
        why = ""
        if found is None:
            why = "is not known here"
        elif found[0] < 1:
            why = "was taken back" if found[0] == _TAKEN_BACK else "is used up"
        elif found[1] < time.time():
            why = "has expired"
        if why:
            remedy = "ask the founder for another one"
            if again:
                remedy = (
                    "the registry was restored from a backup that does not know this member: ask "
                    f"the founder to run `dt-network allow {hotkey}`"
                )
            raise ChainError(f"register: the invitation {why}: {remedy}")
        self._db.execute("UPDATE invitations SET uses = uses - 1 WHERE hash = ?", (hashed,))
        self._db.execute("INSERT OR REPLACE INTO joined VALUES (?, ?)", (hotkey, hashed))

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
                # A uid below the floor may belong to a member that a restored backup does not know.
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
            # Other characters take up to six times as many bytes in JSON, which would bloat the
            # member list for everyone.
            if len(text) > LONGEST or not (text.isascii() and text.isprintable()):
                raise ChainError(f"commit: a commitment has at most {LONGEST} ASCII characters")
            self._db.execute("UPDATE members SET commitment = ? WHERE uid = ?", (text, uid))

    def serve(self, hotkey: str, ip: Address, port: Port, peer: PeerId = "") -> None:
        with self.change():
            uid = self._own("serve", hotkey)
            find = "SELECT hotkey FROM members WHERE peer = ? AND peer != '' AND hotkey != ?"
            if owner := self._one(find, peer, hotkey):
                # If two members had the same peer, an all-reduce's result for it would count for
                # both.
                raise ChainError(f"serve: DHT peer {peer} belongs to hotkey {owner[0]}")
            self._db.execute(
                "UPDATE members SET ip = ?, port = ?, peer = ? WHERE uid = ?", (ip, port, peer, uid)
            )

    def report(self, report: NetworkReport) -> None:
        """Store the validator's report in place of its last one."""
        with self.change():
            self._set_meta("report", [time.time(), asdict(report)])
        self._heard = time.monotonic()

    def ages(self) -> tuple[float, float]:
        """Return the seconds since the last report, and since this process could receive any."""
        now, report = time.monotonic(), self.view.report
        listened = now - self._opened
        if self._heard is not None:
            return now - self._heard, listened
        # No report has arrived since the start, so the age is at least that, whatever the wall
        # clock says.
        return max(time.time() - report[0] if report else 0.0, listened), listened

    # the founder's writes

    def expel(self, hotkey: Hotkey, again: bool = False) -> dict[str, Any]:
        """Take the uid of ``hotkey`` away for good, and revoke the invitation that it used.

        ``again``: let the hotkey register again, with another invitation. Returns ``uid``, which it
        had, and ``invitation``, the id of the revoked invitation, each None if there is none, and
        ``others``, the registered hotkeys that used the same invitation.
        """
        if hotkey == self.charter.master:
            raise ChainError("expel: the founder's hotkey stays registered")
        with self.change():
            if again:
                lifted = self._db.execute("DELETE FROM expelled WHERE hotkey = ?", (hotkey,))
                if not lifted.rowcount:
                    raise ChainError(f"expel: hotkey {hotkey} is not expelled")
                return {"uid": None, "invitation": None, "others": []}
            uid = self.uid_of(hotkey)
            self._remove(uid)
            self._db.execute("INSERT OR IGNORE INTO expelled VALUES (?)", (hotkey,))
            self._db.execute("DELETE FROM allowed WHERE hotkey = ?", (hotkey,))
            (hashed,) = self._one("SELECT hash FROM joined WHERE hotkey = ?", hotkey) or ("",)
            return {
                "uid": uid,
                "invitation": hashed[:ID_LENGTH] if self._end_invitation(hashed) else None,
                "others": self._came_by(hashed),
            }

    def _end_invitation(self, hashed: str) -> bool:
        """Revoke an invitation; return whether it could still be used."""
        ended = self._db.execute(
            "UPDATE invitations SET uses = ? WHERE hash = ? AND uses > 0", (_TAKEN_BACK, hashed)
        )
        return ended.rowcount > 0

    def _came_by(self, hashed: str) -> list[str]:
        """Return the registered hotkeys that used an invitation."""
        found = self._db.execute(
            "SELECT hotkey FROM joined JOIN members USING (hotkey) WHERE hash = ? ORDER BY 1",
            (hashed,),
        )
        return [hotkey for (hotkey,) in found]

    def invitations(self) -> list[dict[str, Any]]:
        """Return each invitation's id, remaining uses (-1: revoked), expiry and hotkeys."""
        found = self._db.execute("SELECT hash, uses, expires FROM invitations ORDER BY expires")
        return [
            {"id": h[:ID_LENGTH], "uses": uses, "expires": expires, "hotkeys": self._came_by(h)}
            for h, uses, expires in found.fetchall()
        ]

    def revoke(self, invitation: _Id) -> list[str]:
        """Revoke the invitation with this id; return the registered hotkeys that used it."""
        with self.change():
            # An id has no wildcards, so LIKE finds the hashes that begin with it.
            found = self._one("SELECT hash FROM invitations WHERE hash LIKE ?", f"{invitation}%")
            if found is None:
                raise ChainError(f"revoke: there is no invitation {invitation}: see --list")
            if not self._end_invitation(found[0]):
                raise ChainError(f"revoke: invitation {invitation} already admits nobody")
            return self._came_by(found[0])

    def invite(self, hashed: _Hash, uses: _Uses, expires: _Expires) -> None:
        """Store an invitation for ``uses`` hotkeys under ``hashed``, the hash of its token."""
        with self.change():
            oldest = time.time() - _INVITATIONS_KEPT
            self._db.execute("DELETE FROM invitations WHERE expires < ?", (oldest,))
            self._db.execute(
                "INSERT OR REPLACE INTO invitations VALUES (?, ?, ?)", (hashed, uses, expires)
            )

    def allow(self, hotkey: Hotkey, allowed: bool) -> None:
        """Put ``hotkey`` on the list of hotkeys that may register, or take it off."""
        with self.change():
            self._db.execute("DELETE FROM allowed WHERE hotkey = ?", (hotkey,))
            if allowed:
                self._refuse_expelled("allow", hotkey)
                self._db.execute("INSERT INTO allowed VALUES (?)", (hotkey,))


def hash_of(invitation: str) -> str:
    """Return the hash of an invitation, the only form in which a registry keeps it."""
    return hashlib.sha256(invitation.strip().encode()).hexdigest()


def _lock(folder: Path) -> IO[bytes]:
    if not (folder / FILE).is_file():
        raise ConfigError(
            f"there is no registry in {folder}, so nothing was started: correct --folder, or "
            "create one with `dt-network serve --network FILE`"
        )
    file = (folder / "registry.lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise StoreFault(
            f"another process serves the registry in {folder}, so nothing was started: stop it, or "
            "choose another --folder"
        ) from None
    return file


def _unusable(path: Path, error: Exception) -> StoreFault:
    remedy = "restore a backup with `dt-network restore`"
    # Do not ask for a backup here: the file is intact, and a backup would undo everybody's latest
    # writes.
    if getattr(error, "sqlite_errorname", "").startswith((*_OF_THE_DISK, *_HELD)):
        remedy = _remedy(path.parent, error)
    return StoreFault(f"{path} cannot be used ({error}), so the registry does not start: {remedy}")


def _remedy(folder: Path, error: Exception) -> str:
    """Return what to do about an intact file that cannot be used."""
    if getattr(error, "sqlite_errorname", "").startswith(_HELD):
        return (
            f"another program holds {folder / FILE}: stop it (`fuser` names it); `dt-network "
            "backup` copies a registry that is in use"
        )
    return f"free some space on the disk of {folder}, repair it, or correct its permissions"


def _open(path: Path) -> sqlite3.Connection:
    """Open a connection to a registry's file. Raises ConfigError, StoreFault."""
    try:
        # Use no implicit transactions, so that each write's transaction begins and ends in one
        # place. The timeout is shorter than the clients' 10 s, so that they learn that another
        # program holds the file.
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5)
        application, schema = (
            db.execute(f"PRAGMA {pragma}").fetchone()[0]
            for pragma in ("application_id", "user_version")
        )
    except sqlite3.Error as error:
        raise _unusable(path, error) from None
    if application != _APPLICATION or not _OLDEST <= schema <= SCHEMA:
        db.close()
        raise ConfigError(
            f"{path} is not a registry of this version (schema {schema}, not {SCHEMA}), so nothing "
            "was done: correct the path, or use the version that wrote it; to upgrade one of "
            f"0.2.0, start it once with commit {LAST_OF_SUBNET_38} first"
        )
    return db


#: The statements that upgrade a file of the previous edition, whose schema is 3 or 4, to this one.
#: They drop the stake, weights and shares, which a chain had.
_UPGRADE = (
    "CREATE TABLE IF NOT EXISTS peers (hotkey TEXT PRIMARY KEY, peer TEXT NOT NULL UNIQUE);"
    + TABLES.partition("CREATE TABLE expelled")[0]
    + """
    INSERT INTO members SELECT uid, hotkey, ip, port, coalesce(peer, ''), since, commitment
        FROM neurons LEFT JOIN peers USING (hotkey);
    DROP TABLE neurons;
    DROP TABLE weights;
    DROP TABLE peers;
    """
)


def _upgrade(db: sqlite3.Connection) -> None:
    """Upgrade an older file to the tables of this version; leave a current file as it is."""
    if db.execute("PRAGMA user_version").fetchone()[0] < SCHEMA:
        db.executescript(f"BEGIN IMMEDIATE; {_UPGRADE} PRAGMA user_version = {SCHEMA}; COMMIT;")


def backup(source: Path, target: Path, *, to_restore: bool = False) -> int:
    """Copy the registry's file ``source`` to ``target`` while it is in use. Returns its version.

    ``to_restore``: the next start with the copy skips the uids that may have been given out since.
    Raises ConfigError, StoreFault.
    """
    temporary = target.with_name(f".{target.name}.new")
    if not source.is_file():
        raise ConfigError(f"{source} does not exist, so nothing was copied: correct the path")
    # If ``target`` were the registry itself, a program that serves it would keep writing to the old
    # file after the copy has replaced it.
    if target.exists() and target.samefile(source):
        raise ConfigError(f"{target} is the registry itself: choose another file for the copy")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        with (
            contextlib.closing(_open(source)) as db,
            contextlib.closing(sqlite3.connect(temporary)) as copy,
        ):
            db.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")  # one file that can be copied anywhere
            # Check the copy, so that damage is reported now and not when the backup is needed.
            (state,) = copy.execute("PRAGMA integrity_check").fetchone()
            if state != "ok":
                raise sqlite3.DatabaseError(state)
            if to_restore:
                with copy:
                    copy.execute("INSERT OR REPLACE INTO meta VALUES ('restored', 'true')")
            (version,) = copy.execute("SELECT value FROM meta WHERE key = 'version'").fetchone()
        _publish(temporary, target)
    except (sqlite3.Error, OSError) as error:
        temporary.unlink(missing_ok=True)
        raise StoreFault(
            f"{source} was not copied to {target} ({error}), so {target} is unchanged: correct "
            "the path or its permissions, or repair the disk"
        ) from None
    return int(version)


def restore(source: Path, folder: Path) -> Path | None:
    """Replace the registry in ``folder``, which must not be served, with the backup ``source``.

    Returns the path of the copy of the replaced registry, or None if there is none. Raises
    ConfigError, StoreFault.
    """
    path = folder / FILE
    if not path.exists():
        backup(source, path, to_restore=True)
        return None
    kept = folder / time.strftime("replaced-%Y%m%d-%H%M%S.db", time.gmtime())
    with contextlib.closing(_lock(folder)):
        temporary = folder / f".{FILE}.restored"
        # Copy first, so that a source that is not a registry changes nothing.
        backup(source, temporary, to_restore=True)
        # The replaced file may be damaged.
        with contextlib.suppress(ConfigError, StoreFault):
            backup(path, kept)
            with contextlib.closing(_open(kept)) as db, contextlib.closing(_open(temporary)) as new:
                _upgrade(new)
                # Hotkeys that were expelled since the backup stay expelled.
                found = db.execute("SELECT hotkey FROM expelled").fetchall()
                new.executemany("INSERT OR IGNORE INTO expelled VALUES (?)", found)
                new.execute("DELETE FROM members WHERE hotkey IN (SELECT hotkey FROM expelled)")
        _publish(temporary, path)
    return kept if kept.exists() else None
