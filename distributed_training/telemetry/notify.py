"""Send messages about a miner's troubles to the operator's webhook.

If there is a webhook, the launcher has a :class:`Notifier`, because the launcher runs even while
nothing trains. A separate thread checks the run folder every 15 s (:func:`~.run_state.observe`),
gets the verdict from :func:`~.verdict.judge`, and sends the messages. Nothing waits for this
thread, except that an unexpected end of the miner waits a few seconds for its message.

A *trouble* is reported once when it has lasted long enough, and once more when it is over. If a
message cannot be sent, it is sent later. If the trouble is over by then, there is only one message
about it. ``notify.json`` in the run folder lists the reported troubles, so that a restart does not
report them again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import SecretStr

from distributed_training.common.backoff import Backoff, Repeats
from distributed_training.common.files import read_state, write_state
from distributed_training.common.webhook import NotSent, send, service_of
from distributed_training.protocol.network_report import span
from distributed_training.telemetry.facts import FINISHED, Crash, Facts
from distributed_training.telemetry.logs import mask, register_secret
from distributed_training.telemetry.run_state import LauncherFile, LauncherState, observe
from distributed_training.telemetry.verdict import Judgement, hides, judge

log = logging.getLogger(__name__)

NOTIFY_FILE = "notify.json"  # in the run folder

_LOOK_EVERY = 15.0  # seconds
_LAST_WORDS = 6.0  # seconds that an unexpected end of the miner waits for its message
_MOST_A_DAY, _DAY = 10, 86400.0  # messages; seconds
# Fractions of the disk that are free: a trouble begins below the first and ends above the second.
_LOW, _ENOUGH = 0.1, 0.12
# The wait before a message is sent again, which doubles. A service may get a message twice if it
# accepts the first one but does not confirm it.
_FIRST_WAIT, _LONGEST_WAIT = timedelta(seconds=30), timedelta(minutes=30)

#: The title of each trouble, and how many seconds it must last before it is reported. The rows of
#: :data:`~.verdict.TABLE` name the troubles.
TROUBLES = {
    "start": ("Cannot start", 60.0),
    "stop": ("Stopped, and nobody asked for it", 60.0),
    "stuck": ("Stuck", 60.0),
    "counts": ("Uploads have not counted for an hour", 3600.0),
    "disk": ("The disk is almost full", 0.0),
    "silent": ("No connection", 60.0),
    "finished": ("Finished", math.inf),  # reported only at its end
}


@dataclass
class Trouble:
    """A trouble of the miner. ``told``: whether it was reported. ``ended``: None while it lasts."""

    since: float
    text: str
    told: bool = False
    ended: float | None = None


@dataclass
class Book:
    """The content of ``notify.json``; times are Unix seconds.

    ``sent`` messages were sent on ``day``, which is the number of a UTC day. ``crash`` is the time
    of the last crash after which the miner trained again.
    """

    troubles: dict[str, Trouble] = field(default_factory=dict)
    day: int = 0
    sent: int = 0
    crash: float = 0.0


def deliver(url: SecretStr, title: str, text: str, *, bad: bool = False) -> None:
    """Send a message in which all secrets are masked. Raises NotSent.

    ``title`` names the miner. ``bad`` marks a message that the operator should look at.
    """
    parts = urlsplit(url.get_secret_value())
    # Mask the parts of the URL too, since a library may log the URL in another form. If the part
    # before the path is not the name of a host, it is a token.
    for part in (url, parts.path, parts.query, "" if "." in parts.netloc else parts.netloc):
        register_secret(part)
    send(url, title, mask(text), bad=bad)


class Notifier:
    """Reports the troubles of the miner ``name`` in ``folder`` to the webhook ``url``.

    ``file`` has the launcher's state, which is known even if the folder does not exist.
    """

    def __init__(self, folder: Path, name: str, url: SecretStr, file: LauncherFile) -> None:
        self._folder, self._title, self._url, self._file = folder, name, url, file
        self._name = name
        self._service = service_of(url)
        self._book = Book()
        self._loaded = False
        self._saved = ""
        self._backoff = Backoff(first=_FIRST_WAIT, longest=_LONGEST_WAIT)
        # Time of the last failed attempt, and the pause after it.
        self._failed_at, self._pause = 0.0, 0.0
        self._present: set[str] = set()  # troubles that the last check found
        self._crash_at = Crash(), 0.0  # the last crash, and its time if the clock was set back
        self._failures = Repeats(3600.0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notify", daemon=True)

    def __enter__(self) -> Notifier:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread, and wait for the last message unless a signal stopped the launcher."""
        self._over.set()
        if self._ended_by_itself():
            self._thread.join(_LAST_WORDS)

    def _run(self) -> None:
        while not self._over.wait(_LOOK_EVERY):
            self._look_once()
        if self._ended_by_itself():
            self._look_once()

    def _look_once(self) -> None:
        try:
            self.look(time.time())
        except Exception:  # a failed message must not end this thread
            if (again := self._failures("look")) is not None:
                log.warning(
                    "The state of this miner was not sent to the webhook%s", again, exc_info=True
                )

    def _ended_by_itself(self) -> bool:
        state = self._file.state
        return state.state == LauncherState.STOPPED and not state.stopped_by.startswith("signal")

    def look(self, now: float) -> None:
        """Check the run folder, and send the messages that are due at ``now`` (Unix seconds)."""
        # Another launcher in the same folder has its own notifier.
        ours = self._folder.is_dir() and not self._file.taken()
        if ours and not self._loaded:
            self._load(now)
        facts = observe(self._folder, now) if ours else Facts()
        facts = replace(facts, launch=facts.launch or self._file.state)
        if facts.uid is not None:
            self._title = f"{self._name}, uid {facts.uid}"
        judgement = judge(facts, now)
        found = dict(self._find(facts, judgement, now))
        self._note(found, now)
        self._send(now)
        if ours:
            self._save()

    # --- what is wrong ----------------------------------------------------------------------------

    def _find(
        self, facts: Facts, judgement: Judgement, now: float
    ) -> Iterator[tuple[str, str | None]]:
        """Yield each trouble with its text.

        The text is empty if the trouble is absent, and None if that is not known.
        """
        ended, state = self._ended_by_itself(), self._file.state
        finished = ended and state.stopped_by == FINISHED
        yield "finished", state.text or "the network has ended" if finished else ""
        how = ": ".join(filter(None, (state.stopped_by, state.text)))
        yield "stop", how if ended and not finished else self._crash(facts, now)
        for name in ("start", "stuck", "silent", "counts"):
            known, text = self._book.troubles.get(name), ""
            if judgement.alert == name:
                head = f"{judgement.verdict}: " if name == "counts" else ""
                text = f"{head}{judgement.words}"
            # A reported trouble ends only after its rows of the table were checked again. A trouble
            # that was not reported yet may outlast another trouble, but it does not outlast a
            # restart.
            runs = state.state == LauncherState.RUNNING
            unsure = known is not None and (known.told or runs) and hides(judgement, name)
            yield name, None if unsure and not text else text
        if facts.disk is not None:
            disk = facts.disk.value
            limit = _ENOUGH if "disk" in self._book.troubles else _LOW
            low = f"{disk.free / 1e9:.1f} of {disk.total / 1e9:.0f} GB are free in {self._folder}"
            full = judgement.alert == "disk" or disk.free < limit * disk.total
            yield "disk", low if full else ""

    def _crash(self, facts: Facts, now: float) -> str:
        """Return the cause of the last crash; empty if the miner has trained since then."""
        crash, troubles = self._file.state.last_crash, self._book.troubles
        if crash.at in (0.0, self._book.crash):
            return ""
        # If the clock was set back, the time of the crash is in the future, so that no step would
        # seem to come after it. Use the earliest time at which this process has seen the crash.
        seen, at = self._crash_at
        at = min(at if seen == crash else crash.at, now)
        self._crash_at = crash, at
        text = crash.text or "no cause given"
        known = troubles.setdefault("stop", Trouble(at, text))
        if facts.step is None or not at < facts.step.at <= now:
            return text
        self._book.crash = crash.at
        known.ended = facts.step.at  # the miner trains again
        return ""

    def _note(self, found: dict[str, str | None], now: float) -> None:
        """Update the book with the troubles that were found."""
        troubles = self._book.troubles
        self._present = {name for name, text in found.items() if text}
        for name, text in found.items():
            if text:
                troubles.setdefault(name, Trouble(now, text))
            if (known := troubles.get(name)) is None:
                continue
            known.since = min(known.since, now)  # in case the clock was set back
            if text:
                known.text, known.ended = text, None
            elif text == "":
                known.ended = max(known.ended or now, known.since)
                # If the miner recovers from a crash, the crash is still reported, in one message.
                lasted = name == "stop" or known.ended - known.since >= TROUBLES[name][1]
                if name == "finished" or not (known.told or lasted):
                    del troubles[name]

    # --- the messages -----------------------------------------------------------------------------

    def _due(self, now: float) -> Iterator[tuple[str, str]]:
        """Yield the texts of the messages that are due, by trouble."""
        for name, trouble in sorted(self._book.troubles.items(), key=lambda item: item[1].since):
            head, hold = TROUBLES[name]
            if trouble.ended is not None:
                lasted = span(trouble.ended - trouble.since)
                when = f"{_clock(trouble.since)} to {_clock(trouble.ended)}"
                yield name, f"Over after {lasted} ({when}): {head}: {trouble.text}"
            elif name not in self._present or trouble.told:
                continue
            elif now - trouble.since >= hold or self._over.is_set():
                yield name, f"{head}: {trouble.text}"

    def _send(self, now: float) -> None:
        book, day = self._book, int(now // _DAY)
        if day != book.day:
            book.day, book.sent = day, 0
        if 0 <= now - self._failed_at < self._pause:  # below 0 if the clock was set back
            return
        for name, text in [*self._due(now)]:
            over = book.troubles[name].ended is not None
            if book.sent >= _MOST_A_DAY:
                return
            if book.sent == _MOST_A_DAY - 1:
                text += " (the tenth message today: no more before 00:00 UTC; see dt-status)"
            try:
                deliver(self._url, self._title, text, bad=not over)
            except NotSent as error:
                self._failed_at, self._pause = now, self._backoff.failed().total_seconds()
                if (again := self._failures()) is not None:
                    log.warning(
                        "A message was not sent to the webhook (%s): %s; it is tried again, and "
                        "training continues%s",
                        self._service,
                        mask(str(error)),
                        again,
                    )
                return
            self._backoff.succeeded()
            book.sent += 1
            if over:
                del book.troubles[name]
            else:
                book.troubles[name].told = True

    # --- the file ---------------------------------------------------------------------------------

    def _load(self, now: float) -> None:
        lost = "messages may be sent to the webhook a second time"
        kept = read_state(self._folder / NOTIFY_FILE, Book, lost=lost)
        self._loaded, early = True, self._book.troubles
        if kept is None:
            # Do not report a crash that happened before the operator set a webhook.
            self._book.crash = self._file.state.last_crash.at
            return
        self._book = kept
        known = {name: each for name, each in kept.troubles.items() if name in TROUBLES}
        for name, trouble in known.items():
            # A trouble counts only while the miner runs, so begin again. A stop is different: it
            # lasts until the next inner step.
            if name != "stop" and not trouble.told and trouble.ended is None:
                trouble.since = now
        self._book.troubles = early | known

    def _save(self) -> None:
        content = repr(self._book)
        if content != self._saved:
            lost = "messages may be sent to the webhook a second time"
            path = self._folder / NOTIFY_FILE
            if write_state(path, self._book, durable=False, lost=lost):
                self._saved = content


def _clock(at: float) -> str:
    with contextlib.suppress(OverflowError, OSError, ValueError):
        return datetime.fromtimestamp(at).astimezone().strftime("%d %b %H:%M")
    return "?"
