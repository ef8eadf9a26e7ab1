"""Test how anybody reads the verdicts and the whole weights of a store network."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from distributed_training.chain.registry import RegistryChain
from distributed_training.config import Config
from distributed_training.protocol import keys
from distributed_training.protocol.manifest import Averaging
from distributed_training.scoring import command, export, verdicts
from distributed_training.scoring.verdicts import SignedChain
from distributed_training.store.bucket_reader import BucketReader, StateUnavailable
from distributed_training.store.errors import AccessDeniedError
from distributed_training.store.opening import open_store
from tests.tools import store_network
from tests.tools.network import ALICE, network_file
from tests.tools.settings import load_config
from tests.tools.store_network import MEMBER, UID, Leader, Time, merged, refused

pytestmark = pytest.mark.timeout(60)
KEYS = {"R2_WRITE_ACCESS_KEY_ID": "k", "R2_WRITE_SECRET_ACCESS_KEY": "s"}


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Return the file of a network whose bucket is a folder."""
    (tmp_path / "local").mkdir()
    rules = {"exchange": "store", "store.endpoint": f"folder://{tmp_path}"}
    return network_file(tmp_path / "network", rules, signer=ALICE)


@pytest.fixture
def config(file: str, monkeypatch: pytest.MonkeyPatch) -> Config:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    return load_config("validator", ["--network", file], check=False)


@pytest.fixture
def leader(config: Config, monkeypatch: pytest.MonkeyPatch) -> Leader:
    monkeypatch.setattr(store_network, "RUN_ID", config.swarm.run_id)
    store = open_store(config.store, "local", write=True)
    leader = Leader(store, Time(), ALICE)
    leader.take_outer_step(whole=True, merged=(merged(3, "a" * 64),), scores={3: 0.5})
    leader.take_outer_step(
        merged=(merged(3, "b" * 64),), refused=(refused("worse", "c" * 64),), scores={3: 0.25}
    )
    return leader


def test_the_verdicts_that_were_signed_are_shown(
    file: str, leader: Leader, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--network", file, "--all"]) == 0
    first, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith("outer step 2: 1 uploads merged, 1 refused; the next close is at 2027")
    assert rows == [
        "uid 003: merged: +0.0100 nats per token, score 0.250",
        "uid 007: refused (worse): a reason",
    ]
    assert command.main(["--network", file, "--uid", "7", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    (row,) = shown["uploads"]
    assert (row["uid"], row["hotkey"], row["verdict"]) == (UID, MEMBER, "refused")
    assert command.main(["--network", file, "--uid", "5"]) == 0
    assert "none of the requested members" in capsys.readouterr().out


def test_each_participant_in_an_average_counts_as_merged(leader: Leader) -> None:
    """The validator keeps the factor 0 of an upload that helps too little; members ignore it."""
    accepted = (merged(3, "d" * 64), replace(merged(5, "e" * 64), factor=0.0))
    for source, verdict in (("average", "merged"), ("merge", "carried")):
        averaging = Averaging(source, "", participants=(3, 5))  # type: ignore[arg-type]
        manifest = leader.build_manifest(b"update", {}, merged=accepted, averaging=averaging)
        rows = list(verdicts.verdicts(manifest))
        assert [row["verdict"] for row in rows] == ["merged", verdict]
        first, *shown = verdicts.lines_of(manifest, 0.0, rows)
        assert ("2 uploads merged, 0 refused" in first) == manifest.averaged
        assert ("merged: +0.0100 nats per token" in shown[1]) == manifest.averaged
        assert "clipped" not in shown[1]


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        (keys.STATE, b'"serial":3', b'"serial":4'),
        (keys.outer_key(2, keys.MANIFEST), b'"factor":1.0', b'"factor":0.5'),
    ],
)
def test_nothing_is_shown_that_was_altered(
    file: str, leader: Leader, key: str, old: bytes, new: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    data = leader.store.get(key, limit=10**6)
    assert old in data
    leader.store.put(key, data.replace(old, new))
    assert command.main(["--network", file, "--all"]) == 1
    captured = capsys.readouterr()
    (error,) = captured.err.splitlines()
    assert not captured.out and error.startswith("error: ")


def test_the_newest_whole_weights_are_fetched_and_compared(
    config: Config, leader: Leader, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "made").mkdir()
    export.fetch_weights(config, tmp_path / "made", None)
    newest, place = export.find_weights(tmp_path / "made", None)
    assert newest == 1 and (place / keys.MODEL).read_bytes()
    assert "the network is at outer step 2; whole weights: 1" in capsys.readouterr().out
    bucket = BucketReader(open_store(config.store, "local", write=True))
    with pytest.raises(StateUnavailable, match="whole weights of outer steps 0, 1, but none of 2"):
        SignedChain(config, bucket, tmp_path / "a").fetch_weights(tmp_path, 2)
    leader.store.put(keys.outer_key(1, keys.MODEL), b"other weights")
    with pytest.raises(StateUnavailable, match="has the digest"):
        SignedChain(config, bucket, tmp_path / "b").fetch_weights(tmp_path, None)


def test_a_member_with_the_key_of_another_network_asks_the_registry(
    file: str, leader: Leader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chain = Mock(spec=RegistryChain)
    denied = Mock(head=Mock(side_effect=AccessDeniedError("read local: the key is refused")))
    monkeypatch.setattr(verdicts, "open_own", lambda settings, name: denied)
    monkeypatch.setattr(verdicts, "load_wallet", lambda settings: ALICE)
    monkeypatch.setattr(verdicts, "answering", lambda *_: nullcontext(chain))
    monkeypatch.setattr(verdicts, "open_by_registry", lambda settings, chain, private: leader.store)
    assert command.main(["--network", file, "--all"]) == 0
    captured = capsys.readouterr()
    assert "the key is refused: so the bucket is opened as by a member" in captured.err
    assert "uid 003: merged" in captured.out and denied.close.called
