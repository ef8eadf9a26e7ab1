"""A miner compares its network's file with the global bucket's statement."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from distributed_training.miner import events as ev
from distributed_training.miner.network_watch import (
    GlobalBucket,
    GlobalUnavailableError,
    NetworkWatch,
)
from distributed_training.network import Shown, other_version
from distributed_training.protocol import keys
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.telemetry.facts import Fact
from distributed_training.telemetry.verdict import judge
from tests.tools.memory_store import MemoryObjectStore
from tests.unit.test_verdict import NOW, WELL

pytestmark = pytest.mark.timeout(30)


def network(version: int = 1, run_id: str = "aa", place: str = "lab/network.toml") -> Any:
    return SimpleNamespace(
        place=place,
        head=SimpleNamespace(name="lab", version=version, format=1),
        values={"chain.master_hotkey": "5Master", "run_id": run_id},
        rules_id=run_id,
    )


def shown(version: int, run_id: str | None) -> Shown:
    return Shown("lab", version, "5Master", run_id)


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        (shown(1, "aa"), network(), ""),
        (shown(1, None), network(), ""),  # a validator before this version
        (shown(2, "bb"), network(), "at version 2 of its file, this miner has 1"),
        (shown(2, None), network(), "from its founder again, in place of lab/network.toml"),
        (shown(2, "bb"), network(place="https://lab/n.toml"), "restart, which fetches https://lab"),
        (shown(1, "bb"), network(), "of version 1 has other rules than this miner's"),
        (shown(1, "bb"), network(2, "aa"), "before the validator has started with it too"),
    ],
)
def test_another_version_of_the_networks_file_is_named(
    theirs: Shown, ours: Any, words: str
) -> None:
    found = other_version(theirs, ours)
    assert (words in found) and bool(found) == bool(words)
    judged = judge(replace(WELL, other_version=Fact(found, NOW)), NOW)
    assert (judged.verdict == "other version") == judged.bad == bool(words)
    assert words in judged.words


class Bucket:
    """A global bucket whose ``network.json`` is ``content``."""

    content: bytes | None = b""

    def network(self) -> Shown | None:
        try:
            return None if self.content is None else Shown.parse(self.content)
        except ValueError as error:
            raise GlobalUnavailableError(str(error)) from None


GOOD = b'{"name": "lab", "version": 1, "master": "5M", "run_id": "aa"}'


def test_statement_about_the_network_is_logged_when_it_changes() -> None:
    """Any other content of that object ends nothing, and makes no file count as old."""
    bucket, events = Bucket(), list[ev.Event]()
    watch = NetworkWatch(cast("GlobalBucket", bucket), network(), None, events.append)

    def look(content: bytes | None) -> list[str]:
        events.clear()
        bucket.content = content
        assert watch.look() == ""
        return [event.problem for event in events if isinstance(event, ev.NetworkCompared)]

    damaged = [
        b"", b"[" * 4096, b"null", b"{}", b'{"name": "lab"}', GOOD[:-9], b"\xff" + GOOD,
        GOOD.replace(b"1", b"true"), GOOD.replace(b"1", b"1e400"), GOOD.replace(b"1", b"-1"),
        GOOD.replace(b'"lab"', b"[" * 999 + b"]" * 999), GOOD.replace(b'"aa"', b'"\\n aa"'),
        GOOD.replace(b'"5M"', b'"' + b"5" * 999 + b'"'), GOOD.replace(b"1", b"9" * 999),
    ]  # fmt: skip
    for content in (None, GOOD, *damaged):
        assert look(content) == [], content
    newer = GOOD.replace(b"1", b"2")
    assert "at version 2" in look(newer)[0] and look(newer) == []
    assert look(damaged[1]) == [], "it is not known to have been corrected"
    assert look(GOOD) == [""]


def test_a_look_at_the_network_of_a_real_bucket() -> None:
    store = MemoryObjectStore("lab")
    bucket = GlobalBucket(BucketReader(store))
    assert bucket.network() is None
    store.put(keys.NETWORK, GOOD)
    assert bucket.network() == Shown("lab", 1, "5M", "aa")
    for content in (b"[" * 4000, b" " * 5000 + GOOD):
        store.put(keys.NETWORK, content)
        with pytest.raises(GlobalUnavailableError):
            bucket.network()
