from __future__ import annotations

import itertools
import json
import logging
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from distributed_training.common.webhook import NotSent
from distributed_training.config.schema import all_settings
from distributed_training.telemetry import notify
from distributed_training.telemetry.facts import FACTS_FILE, Disk, Fact, Facts, KnownUpload, Launch
from distributed_training.telemetry.notify import Notifier, Trouble
from distributed_training.telemetry.run_state import (
    LauncherFile,
    LauncherState,
)
from tests.tools.settings import load_config
from tests.tools.webhooks import Webhooks, webhooks

pytestmark = pytest.mark.timeout(60)

DAY = 86400.0
BEGIN = 1_800_000_000.0 - 1_800_000_000.0 % DAY  # midnight
HOOK = SecretStr("json://127.0.0.1:9/secretsecret")


class Miner:
    """A miner with its files, the facts about it, and the messages that its operator gets."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.now = folder, BEGIN
        self.heal()
        self.reached = True
        self.came: list[str] = []
        self.tries = 0
        monkeypatch.setattr("time.time", lambda: self.now)
        self.file = LauncherFile(folder)
        self.restart()
        monkeypatch.setattr(notify, "observe", self._observe)
        monkeypatch.setattr(notify, "deliver", self._deliver)

    def _observe(self, folder: Path, now: float) -> Facts:
        return Facts(
            looked=now,
            mode="training",
            step=self.step,
            step_seconds=1.0 if self.stuck else 1e9,
            uploads=(KnownUpload(8, now, fate=self.fate, fate_at=now, cause=self.cause),),
            chain_at=self.chain_at or now,
            store_silent_since=self.store_silent_since,
            disk=Fact(self.disk, now),
            launch=self.launch,
        )

    def heal(self) -> None:
        self.disk, self.stuck = Disk(50e9, 100e9), False
        self.launch: Launch | None = None
        self.fate, self.cause = "merged", ""
        self.chain_at = self.store_silent_since = None

    def _deliver(self, url: SecretStr, title: str, text: str, *, bad: bool = False) -> None:
        self.tries += 1
        if not self.reached:
            raise NotSent("it is not reached (ConnectError)")
        self.came.append(text)

    def restart(self) -> None:
        """Stop the launcher as an operator would, and start it again."""
        self.file.stopped("signal SIGTERM")
        self.file = LauncherFile(self.folder)
        self.file.owned = True
        self.file.enter(LauncherState.RUNNING)
        self.step = Fact(1, self.now)
        self.notifier = Notifier(self.folder, "guest", HOOK, self.file)

    def crash(self, text: str) -> None:
        self.file.crashed(text)
        self.file.enter(LauncherState.STARTING)

    def train(self) -> None:
        self.file.enter(LauncherState.RUNNING)
        self.step = Fact(1, self.now)

    def passes(self, seconds: float, every: float = 15.0) -> list[str]:
        """Let time pass, check every few seconds, and return the new messages."""
        before = len(self.came)
        for _ in range(int(seconds / every)):
            self.now += every
            self.notifier.look(self.now)
        return self.came[before:]


@pytest.fixture
def miner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Miner:
    return Miner(tmp_path, monkeypatch)


def refuse(miner: Miner) -> None:
    miner.file.refused("no answer from the registry", attempt=1, wait=5.0)


def lose(miner: Miner) -> None:
    miner.fate, miner.cause = "refused", "worse: by 0.3"


def stick(miner: Miner) -> None:
    miner.step, miner.stuck = Fact(1, miner.now - 540), True


def fill(miner: Miner) -> None:
    miner.disk = Disk(9e9, 100e9)


def cut(miner: Miner) -> None:
    miner.chain_at = miner.store_silent_since = miner.now - 90


def silence(miner: Miner) -> None:
    miner.chain_at = miner.now - 180


def heal(miner: Miner) -> None:
    miner.heal()
    miner.train()


@pytest.mark.parametrize(
    ("begin", "hold", "words"),
    [(refuse, 60, "Cannot start: no answer from the registry (attempt 1"),
     (lambda miner: miner.crash("rank 1 was ended by SIGKILL"), 60,
      "Stopped, and nobody asked for it: rank 1 was ended by SIGKILL"),
     (stick, 60, "Stuck: no inner step for 10 min; the end of its log"),
     (lose, 3600, "Uploads have not counted for an hour: refused: the validator refused the"),
     (fill, 0, "The disk is almost full: 9.0 of 100 GB are free"),
     (silence, 60, "No connection: the registry has not answered for 4 min; no close was"),
     (cut, 60, "No connection: registry and store have not answered for 2 min: this machine's")],
)  # fmt: skip
def test_each_trouble_is_reported_once_and_once_when_it_is_over(
    begin: Callable[[Miner], None], hold: float, words: str, miner: Miner
) -> None:
    assert miner.passes(60) == []
    begin(miner)
    assert miner.passes(max(0, hold - 15)) == []
    (told,) = miner.passes(60)
    assert told.startswith(words)
    assert miner.passes(7200, every=600) == []
    miner.restart()  # which sends no message
    begin(miner)
    assert miner.passes(300) == []
    heal(miner)
    (over,) = miner.passes(60)
    assert re.match(r"Over after [23] h \d+ min \(", over) and words.partition(":")[0] in over
    assert miner.passes(7200, every=600) == []


def test_passing_trouble_is_a_message_only_where_the_miner_stopped(miner: Miner) -> None:
    for begin in (refuse, stick, lose, cut):
        begin(miner)
        assert miner.passes(30) == []
        heal(miner)
        assert miner.passes(60) == []
    miner.crash("rank 0 was ended by SIGKILL")
    miner.passes(15)
    miner.now += 11
    heal(miner)
    (only,) = miner.passes(60)
    assert only.startswith("Over after 26 s") and only.endswith("rank 0 was ended by SIGKILL")


def test_ten_messages_a_day_and_the_tenth_says_so(miner: Miner) -> None:
    for _ in range(20):
        fill(miner)
        miner.passes(15)
        heal(miner)
        miner.passes(15)
    assert len(miner.came) == 10 and "the tenth message today" in miner.came[-1]
    assert not any("the tenth" in text for text in miner.came[:9])
    assert not miner.passes(BEGIN + DAY - miner.now - 60, every=60)
    fill(miner)
    assert len(miner.passes(120)) == 1


@pytest.mark.parametrize("begin", [refuse, lose, stick, cut])
@pytest.mark.parametrize("stopped", [0.0, DAY / 2])
def test_trouble_before_a_restart_has_not_lasted_through_it(
    begin: Callable[[Miner], None], stopped: float, miner: Miner
) -> None:
    begin(miner)
    assert miner.passes(30) == []
    if stopped:
        miner.file.stopped("signal SIGTERM")
        miner.now += stopped
        miner.restart()
    miner.file.enter(LauncherState.STARTING)
    assert miner.passes(2400) == []
    heal(miner)
    assert miner.passes(300) == []


def test_an_error_of_a_look_is_one_line_an_hour(
    miner: Miner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notify, "observe", lambda *_: 1 / 0)
    for _ in range(5):
        miner.notifier._look_once()
    assert len(caplog.records) == 1


def test_a_second_launcher_of_the_folder_touches_nothing_of_it(miner: Miner) -> None:
    miner.passes(30)
    before = (miner.folder / "notify.json").read_bytes()
    other = LauncherFile(miner.folder)
    other.taken = lambda: True  # type: ignore[method-assign]
    other.refused("a miner (pid 7) is running there", attempt=1, wait=5.0)
    second = Notifier(miner.folder, "guest", HOOK, other)
    for n in range(6):
        second.look(miner.now + 15 * n)
    assert [text for text in miner.came if "(pid 7)" in text] == [miner.came[-1]]
    assert (miner.folder / "notify.json").read_bytes() == before


def test_a_damaged_book_or_a_full_disk_ends_nothing(
    miner: Miner, monkeypatch: pytest.MonkeyPatch
) -> None:
    for damage in (b"{", b"[1]", b'{"troubles": {"disk": 3}}', b'{"troubles": {"x": {}}}'):
        (miner.folder / "notify.json").write_bytes(damage)
        miner.restart()
        miner.passes(30)
    fill(miner)
    monkeypatch.setattr(notify, "write_state", lambda *_, **named: False)
    assert len(miner.passes(300)) == 1


WAYS = {"refuse": refuse, "lose": lose, "fill": fill, "cut": cut, "heal": heal}


@settings(max_examples=25, deadline=None)
@given(
    walk=st.lists(
        st.tuples(
            st.sampled_from([*WAYS, "crash", "reach", "restart", "set back"]),
            st.sampled_from([15, 60, 120, 600, 7200]),
        ),
        max_size=12,
    )
)
def test_each_trouble_is_reported_and_taken_back_in_turn(
    walk: list[tuple[str, int]],
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        miner = Miner(Path(folder), monkeypatch)
        for what, seconds in walk:
            if what == "crash":
                miner.crash("rank 0 failed")
            elif what == "reach":
                miner.reached = not miner.reached
            elif what == "restart":
                miner.restart()
            elif what == "set back":  # the clock, which must neither lose nor repeat a message
                miner.now -= 7200
            else:
                WAYS[what](miner)
            miner.passes(seconds, every=min(seconds, 600))
        miner.reached = True
        heal(miner)
        miner.passes(DAY + 7200, every=1800)
    for head, _ in notify.TROUBLES.values():
        told = [text.startswith("Over") for text in miner.came if head in text]
        # At the end each trouble is over, and none began again before it was over.
        assert not told or told[-1]
        assert not any(not one and not two for one, two in itertools.pairwise(told))
    assert len(miner.came) <= 10 * (2 + (miner.now - BEGIN) // DAY)


# --- with a service that answers ------------------------------------------------------------------


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Webhooks]:
    monkeypatch.setattr(notify, "_LOOK_EVERY", 0.02)
    room = SimpleNamespace(free=5e11, total=1e12)  # the disk of this machine may be full
    monkeypatch.setattr("shutil.disk_usage", lambda _: room)
    with webhooks() as served:
        yield served


def launcher_of(folder: Path) -> LauncherFile:
    (folder / FACTS_FILE).write_text(json.dumps({"looked": time.time()}))
    file = LauncherFile(folder)
    file.owned = True
    file.enter(LauncherState.RUNNING)
    return file


def test_an_end_that_nobody_asked_for_is_reported_before_the_launcher_ends(
    world: Webhooks, tmp_path: Path
) -> None:
    file = launcher_of(tmp_path)
    with Notifier(tmp_path, "guest", SecretStr(world.url), file):
        file.stopped("failures", "the ranks failed 6 times in a row")
    assert "failures: the ranks failed 6 times in a row" in world.taken[0]


@pytest.mark.parametrize("manner", ["hang", "drip"])
def test_a_stop_that_was_asked_for_waits_for_no_message(
    manner: str, world: Webhooks, tmp_path: Path
) -> None:
    world.manner = manner
    file = launcher_of(tmp_path)
    with Notifier(tmp_path, "guest", SecretStr(world.url), file) as notifier:
        notifier._book.troubles["stop"] = Trouble(0.0, "Day 1", ended=1.0)
        while not world.asked:
            time.sleep(0.01)
        file.stopped("signal SIGTERM")
        began = time.monotonic()
    assert time.monotonic() - began < 1.0 and world.taken == []
    world.over.set()
    notifier._thread.join()


@pytest.mark.parametrize("manner", [500, "elsewhere"])
def test_a_service_that_takes_none_is_asked_seldom_and_named_once(
    manner: str | int,
    world: Webhooks,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(notify, "observe", lambda *_: Facts())
    world.manner = manner
    file = launcher_of(tmp_path)
    notifier = Notifier(tmp_path, "guest", SecretStr(world.url), file)
    notifier._book.troubles["stop"] = Trouble(0.0, "rank 0 failed", told=True, ended=1.0)
    for n in range(241):  # the checks of an hour
        notifier.look(BEGIN + 15 * n)
    assert 3 < world.asked <= 16
    lines = [r.getMessage() for r in caplog.records if "was not sent" in r.getMessage()]
    assert len(lines) == 1 and "(JSON)" in lines[0]
    kept = (tmp_path / "notify.json").read_text()
    assert "secretsecret" not in kept + " ".join(lines) and "rank 0 failed" in kept
    world.manner = ""
    notifier.look(BEGIN + 2 * 3600)
    (taken,) = world.taken
    assert taken.startswith("guest: Over after 1 s") and taken.endswith("rank 0 failed")


def test_the_webhook_is_in_no_settings_line_event_or_file(
    world: Webhooks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    given = {"DT_NOTIFY_URL": world.url}
    config = load_config("miner", ["--network", "local"], environ=given, check=False)
    assert config.telemetry.notify_url is not None
    assert "secretsecret" not in all_settings(config) + repr(config)
    file = launcher_of(tmp_path)
    with Notifier(tmp_path, "guest", config.telemetry.notify_url, file) as notifier:
        notifier._book.troubles["disk"] = Trouble(0.0, f"full, at {world.url}", ended=1.0)
        file.stopped("failures", "x")
    assert "full, at" in str(world.taken) and "secretsecret" not in str(world.taken)
    for path in tmp_path.iterdir():
        assert b"secretsecret" not in path.read_bytes()
    # The lines of the client itself are masked when they are written.
    assert "secretsecret" not in "\n".join(notify.mask(r.getMessage()) for r in caplog.records)
