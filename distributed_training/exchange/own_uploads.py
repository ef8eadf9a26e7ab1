"""Send this member's upload for a close once, so that one close never gets two different files.

A note with the file's digest is written to the disk before the first byte of the file is sent. So a
restarted process knows which file was sent, or may have been sent, and sends that file or none.
Files and notes stay until no checkpoint needs them any more (:meth:`OwnUploads.forget`): a miner
that applies an update again needs its own upload that was merged into the update.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from distributed_training.common.backoff import Backoff
from distributed_training.common.files import read_state, sha256_of, write_state
from distributed_training.protocol import keys, lines
from distributed_training.protocol.manifest import Manifest
from distributed_training.protocol.types import Base
from distributed_training.store.base import ObjectStore, Uplink
from distributed_training.store.errors import DeadlineError, StoreError, TakenError
from distributed_training.store.transfer import STUCK_AGE, sweep_uploads, upload

from .base import Close, UploadEnded, upload_path

log = logging.getLogger(__name__)

#: Causes of a refusal after which the upload's training is dropped. After any other cause it is
#: carried over, even after "copy", since an honest member may be mistaken for the copier.
FOR_CONTENT = frozenset({"worse", "spoiler"})
CARRIED = "carried over into the next upload: it gained less than others, or nothing beyond chance"
_FIRST_WAIT, _LONGEST_WAIT = timedelta(seconds=5), timedelta(minutes=1)
_SENT = "sent"
_LONGEST = 300  # characters kept of a cause
_NAME = re.compile(r"(\d{1,15})\.(\d{1,15})\.json")


class _AnotherFile(StoreError):
    """The sending of another file has already begun for this close."""


@dataclass(frozen=True)
class _Note:
    digest: str  # SHA-256 of the file
    ended: str = ""  # "sent", or why sending was given up; empty: it may have been sent in part


class Fate(NamedTuple):
    """The fate of our upload at the outer step that it was for."""

    base: Base
    path: Path | None = None  # its file, if it was merged or refused and is still there
    cause: str = ""  # why it was not merged; empty if it was, or if there was none


class OwnUploads:
    """Sends our uploads, which are files in ``folder``, and keeps a note next to each of them."""

    def __init__(self, store: ObjectStore, folder: Path, uid: int) -> None:
        self._store = store
        self._folder = folder
        self._uid, self._prefix = uid, f"uploads/{uid}/"
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, close: Close) -> Path:
        """Return the path to which the upload for ``close`` must be written."""
        return upload_path(self._folder, close)

    def begun(self, close: Close) -> bool:
        """Return whether something was sent for ``close``, or may have been."""
        return self._note(close) is not None

    def unfinished(self, close: Close) -> bool:
        """Return whether sending was begun by a process that did not see it end."""
        note = self._note(close)
        return note is not None and not note.ended

    def is_lost(self, close: Close) -> bool:
        """Return whether the upload for ``close`` was sent but is missing. Raises StoreError."""
        note, key = self._note(close), self._key(close)
        return note is not None and note.ended == _SENT and self._store.head(key) is None

    def send_again(self, close: Close) -> None:
        """Let :meth:`send` send the same file once more, since the store has lost it."""
        if (note := self._note(close)) is not None:
            self._write_note(close, replace(note, ended=""))

    def send(self, close: Close, within: float, uplink: Uplink) -> UploadEnded:
        """Send the file of ``close`` and return the result. Raises StoppedError.

        ``within``: seconds that it may take. ``uplink``: ends the sending when it is stopped.
        """
        path, began = self.path(close), time.monotonic()
        until = began + within
        waits, note = Backoff(first=_FIRST_WAIT, longest=_LONGEST_WAIT), None
        while True:
            try:
                # Claim only once, since a claim reads the whole file, which may be gigabytes long.
                note = note or self._claim(path, close)
                if note.ended == _SENT:
                    return UploadEnded(close, size=path.stat().st_size)
                if note.ended:
                    return UploadEnded(close, note.ended)
                if time.monotonic() > until:
                    raise DeadlineError("late: it was written after the grace had ended")
                ended = self._upload(close, began, until, uplink)
                self._write_note(close, replace(note, ended=_SENT))
                return ended
            except (StoreError, OSError) as error:
                cause = str(error)
                if isinstance(error, TakenError):
                    cause += (
                        ". Another miner sends with this hotkey, and only one of the two counts: "
                        "stop it, or give it a hotkey of its own (dt-join --wallet.name)"
                    )
                for_good = isinstance(error, (TakenError, _AnotherFile, FileNotFoundError))
            wait = waits.failed().total_seconds()
            if for_good or time.monotonic() + wait > until:
                break
            if waits.failures == 1:
                # A key, a quota or a registry may be fixed within the grace.
                log.warning(
                    "The upload for outer step %d was not sent: %s; trying again soon",
                    close.outer_step,
                    cause,
                )
            uplink.sleep(wait)
        # If the file is refused because another one was begun, it has no note of its own.
        if note is not None:
            self._write_note(close, replace(note, ended=cause[:_LONGEST]))
        return UploadEnded(close, cause)

    def send_progress(self, close: Close, within: float, uplink: Uplink) -> UploadEnded:
        """Send a progress upload, which replaces the previous one. Raises StoppedError.

        It has no note, because nothing depends on it. A restarted process does not send it again.
        """
        began = time.monotonic()
        try:
            return self._upload(close, began, began + within, uplink)
        except (StoreError, OSError) as error:
            return UploadEnded(close, str(error))

    def _upload(self, close: Close, began: float, until: float, uplink: Uplink) -> UploadEnded:
        """Send the file of ``close``. Raises StoreError, OSError, StoppedError.

        ``began``: when the first attempt began.
        """
        path, key = self.path(close), self._key(close)
        upload(self._store, key, path, until=until, uplink=uplink, once=close.serial > 0)
        return UploadEnded(close, size=path.stat().st_size, seconds=time.monotonic() - began)

    def _key(self, close: Close) -> str:
        if not close.serial:
            return keys.progress_key(self._uid)
        return keys.upload_key(self._uid, close.outer_step, close.serial)

    def tidy(self, close: Close, uplink: Uplink) -> None:
        """Abort our abandoned multipart uploads, and delete our uploads of past closes.

        Call it after the sending for ``close`` has ended and its end was posted, because this takes
        a minute if the store does not answer. Raises StoppedError.
        """
        note = self._note(close)
        if note is None or not note.ended:
            return  # the sending may still be continued
        sweep_uploads(
            self._store,
            prefix=self._prefix,
            is_stuck=lambda one: bool(keys.parse_upload_key(one.key)) or one.age >= STUCK_AGE,
            uplink=uplink,
        )
        if note.ended != _SENT:
            return
        try:
            for info in self._store.list_objects(self._prefix):
                uplink.check_stopped()
                past = keys.parse_upload_key(info.key)
                if past is not None and past[1] < close.outer_step:
                    self._store.delete(info.key)
        except StoreError as error:
            log.debug("Past uploads stay until the next close: %s", error)

    def find_fate(self, manifest: Manifest) -> Fate:
        """Return what became of our upload at an outer step: merged, or refused with a cause."""
        if (score := manifest.scores.get(self._uid)) is not None:
            log.info(lines.SCORE, self._uid, manifest.outer_step, score)
        cause, outer_step = "", manifest.outer_step - 1
        names = [_NAME.fullmatch(path.name) for path in self._folder.glob(f"{outer_step}.*.json")]
        for serial in sorted(int(name[2]) for name in names if name):
            close = Close(outer_step, serial)
            if (note := self._note(close)) is None:
                continue
            found = self.path(close)
            # A miner that went back to an older checkpoint may have overwritten the upload.
            path = found if found.exists() and sha256_of(found) == note.digest else None
            averaging = manifest.averaging if manifest.averaged else None
            took_part = averaging is not None and self._uid in averaging.participants
            if took_part and serial == manifest.serial:
                return Fate(Base.MERGED, path)
            for one in manifest.merged:
                if one.digest == note.digest:
                    carried = Fate(Base.KEPT, None, CARRIED)
                    return Fate(Base.MERGED, path) if one.factor else carried
            for each in manifest.refused:
                # If a file was not read, only its uid is known.
                unread = not each.digest and each.uid == self._uid and serial == manifest.serial
                if unread or each.digest == note.digest:
                    cause = f"{each.cause}: {each.reason}"
                    if each.cause in FOR_CONTENT:
                        return Fate(Base.REFUSED, path, cause)
                    return Fate(Base.KEPT, None, cause)
            if note.ended != _SENT:
                cause = f"not sent: {note.ended or 'this miner was stopped'}"
            elif serial == manifest.serial and manifest.averaged:
                cause = "not averaged: the all-reduce did not have it"
            elif serial != manifest.serial:
                cause = f"void: the close moved after it was sent (serial {serial})"
            else:
                cause = "not judged: the validator did not have it in time"
        return Fate(Base.KEPT, None, cause)

    def forget(self, before: int) -> None:
        """Delete files and notes of the outer steps before ``before``."""
        forget_files(self._folder, before)

    def _claim(self, path: Path, close: Close) -> _Note:
        """Return the note of ``path``, made before anything is sent. Raises StoreError, OSError."""
        digest = sha256_of(path)
        note = self._note(close)
        if note is None:
            note = _Note(digest)
            write_state(self._note_path(close), note)
        elif note.digest != digest:
            raise _AnotherFile(
                f"{path} is not the file whose sending was begun for this close, so it is not "
                "sent: its training goes into the next upload"
            )
        return note

    def _note(self, close: Close) -> _Note | None:
        lost = "it is unknown whether the upload was merged"
        return read_state(self._note_path(close), _Note, lost=lost)

    def _write_note(self, close: Close, note: _Note) -> None:
        lost = "a start sends this upload again, which changes nothing"
        write_state(self._note_path(close), note, lost=lost)

    def _note_path(self, close: Close) -> Path:
        return self._folder / f"{close.tag}.json"


def forget_files(folder: Path, before: int) -> None:
    """Delete the files whose names begin with the number of an outer step before ``before``.

    It also deletes the files of abandoned downloads, whose names begin with a dot.
    """
    for path in folder.glob("*"):
        number = path.name.removeprefix(".").partition(".")[0]
        if number.isdigit() and int(number) < before and path.is_file():
            with contextlib.suppress(OSError):  # the next call tries again
                path.unlink()
