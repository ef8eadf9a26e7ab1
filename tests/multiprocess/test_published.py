"""Test how a network's tokenizer and data are published, with real files and a real store."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import SecretStr

from distributed_training import network_command
from distributed_training.common.llama import local_llama_config
from distributed_training.config import Config, load_config
from distributed_training.config.settings import StoreSettings
from distributed_training.data.sources import Source
from distributed_training.data.tokenizer import TextTokenizer, build_tokenizer
from distributed_training.localnet.services import ObjectStoreServer
from distributed_training.node import published
from distributed_training.node.published import LIST, fetch_published, list_files, publish
from distributed_training.node.start import NetworkFailure, fetch_tokenizer, require_data
from distributed_training.store import transfer
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.store.s3 import S3ObjectStore

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a network over a folder of text with a tokenizer next to it."""
    folder = tmp_path_factory.mktemp("founder")
    (folder / "text" / "more").mkdir(parents=True)
    (folder / "text" / "_SUCCESS").touch()
    for name, word in (("a.parquet", "one"), (f"more/{'b' * 247}.parquet", "two")):
        rows = [f"{word} row {i}" for i in range(300)]
        pq.write_table(pa.table({"text": rows}), folder / "text" / name)
    build_tokenizer("bytes", folder / "words")
    (folder / "words" / "model.safetensors").write_text("not of the tokenizer")
    words = ("--name", "lab", "--host", "127.0.0.1", "--registry", "http://127.0.0.1:8100")
    more = ("--data-source", f"parquet:{folder / 'text'}", "--tokenizer", str(folder / "words"))
    model = folder / "config.json"
    model.write_text(json.dumps(local_llama_config(sequence_length=1024)))
    argv = ["init", str(folder / "lab"), *words, *more, "--model", str(model)]
    argv += ["--exchange", "hivemind"]
    assert network_command.main(argv) == 0
    for name in ("text", "words"):
        shutil.rmtree(folder / name)
    return folder / "lab"


@pytest.fixture
def store(server: ObjectStoreServer, request: pytest.FixtureRequest) -> Iterator[S3ObjectStore]:
    name = hashlib.sha256(request.node.name.encode()).hexdigest()[:20]
    settings = replace(
        StoreSettings(),
        endpoint_url=server.endpoint,
        write_access_key_id=SecretStr(server.keys["R2_WRITE_ACCESS_KEY_ID"]),
        write_secret_access_key=SecretStr(server.keys["R2_WRITE_SECRET_ACCESS_KEY"]),
    )
    with closing(S3ObjectStore.from_settings(settings, bucket=name, write=True)) as made:
        made.create_bucket()
        yield made


def config_of(lab: Path, run_folder: Path, *more: str, kind: str = "miner") -> Config:
    argv = ["--network", str(lab / "network.toml"), "--neuron.run_folder", str(run_folder), *more]
    return load_config(kind, argv, environ={}, dotenv=None, check=False)


@pytest.fixture
def member(lab: Path, tmp_path: Path, store: S3ObjectStore) -> Config:
    """Return the settings of a machine with the network's file only, after a publication."""
    ours = config_of(lab, lab / "validator", kind="validator")
    fetch_published(ours, lambda: BucketReader(store))
    publish(ours, store)
    return config_of(lab, tmp_path / "run")


def nobody() -> BucketReader:
    raise AssertionError("nothing is missing")


def test_a_member_needs_no_path(
    lab: Path, member: Config, store: S3ObjectStore, tmp_path: Path
) -> None:
    text = (lab / "network.toml").read_text()
    assert str(lab.parent) not in text and 'source = "parquet:data"' in text
    fetch_published(member, lambda: BucketReader(store))
    require_data(member)
    path, end = fetch_tokenizer(member, tmp_path / "scratch")
    assert TextTokenizer(path, eos_id=end).encode_rows(["ab"], max_length=9).tolist()[-1] == 256
    source = Source(member.data)
    assert source.num_rows() == {"root": 300, "more": 300}
    assert source.rows("more", 7, split="train", limit=2) == ["two row 7", "two row 8"]
    names = {p.name for p in member.published["tokenizer"].iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json", LIST}
    before = store.list_objects("files/")
    publish(config_of(lab, lab / "validator", kind="validator"), store)
    assert [o.modified for o in store.list_objects("files/")] == [o.modified for o in before]
    fetch_published(member, nobody)  # again, with the bucket away
    own = config_of(lab, tmp_path / "run", "--data.source", "parquet:/mine")
    assert own.published.keys() == {"tokenizer"} and own.data.source == "parquet:/mine"


def test_damaged_file_on_disk_is_fetched_again(
    member: Config, store: S3ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    fetch_published(member, lambda: BucketReader(store))
    for folder in member.published.values():
        for path in [p for p in folder.rglob("*") if p.is_file()]:
            good = path.read_bytes()
            for bad in (good[:-1], good + b"x", bytes([good[0] ^ 1]) + good[1:], b""):
                path.write_bytes(bad)
                fetch_published(member, lambda: BucketReader(store))
                assert path.read_bytes() == good
    (member.published["data"] / "c.parquet").write_text("rows of nobody")
    with pytest.raises(NetworkFailure, match=r"c\.parquet is none of its files"):
        fetch_published(member, nobody)


WRONG = {
    "damaged": "is damaged",
    "longer": "more than the",
    "shorter": "is damaged",
    "missing": "has not published it yet",
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("what", ["list", "data", "tokenizer"])
def test_damaged_object_in_the_bucket_is_one_line_and_never_read(
    lab: Path, member: Config, store: S3ObjectStore, what: str, wrong: str
) -> None:
    folder = config_of(lab, lab / "validator").published[
        "tokenizer" if what == "tokenizer" else "data"
    ]
    name = folder.name
    if what != "list":
        listed = json.loads((folder / LIST).read_bytes())
        name = listed[sorted(listed)[0]]["sha256"]
    key = f"files/{name}"
    good = store.get(key, limit=10**7)
    assert good is not None
    if wrong == "missing":
        store.delete(key)
    else:
        bad = {"damaged": good[:-1] + bytes([good[-1] ^ 1]), "shorter": good[:-1]}
        store.put(key, bad.get(wrong, good + b"x" * 5 * 2**20))
    with pytest.raises(NetworkFailure) as refused:
        fetch_published(member, lambda: BucketReader(store))
    line = str(refused.value)
    assert "\n" not in line and WRONG[wrong] in line and "nothing was started" in line
    # The damaged bytes must not be in any file that a reader of the folder would use.
    held = [p for p in member.run_folder.rglob("*") if p.is_file() and p.name[0] != "."]
    assert name not in {hashlib.sha256(p.read_bytes()).hexdigest() for p in held}
    store.put(key, good)
    fetch_published(member, lambda: BucketReader(store))


HOSTILE = {
    "above": {"../x": {"sha256": "0" * 64, "size": 1}},
    "absolute": {"/etc/x": {"sha256": "0" * 64, "size": 1}},
    "hidden": {".files.json": {"sha256": "0" * 64, "size": 1}},
    "inside": {"a/../../x": {"sha256": "0" * 64, "size": 1}},
    "no digest": {"x": {"sha256": "../x", "size": 1}},
    "negative": {"x": {"sha256": "0" * 64, "size": -1}},
    "too large": {"x": {"sha256": "0" * 64, "size": 2**50}},
    "many": {str(i): {"sha256": "0" * 64, "size": 1} for i in range(20_001)},
    "none": {},
    "list": [],
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_list_that_is_none_makes_no_path(member: Config, store: S3ObjectStore, kind: str) -> None:
    text = json.dumps(HOSTILE[kind]).encode()
    digest = hashlib.sha256(text).hexdigest()
    store.put(f"files/{digest}", text)
    folder = member.published["data"].with_name(digest)
    with pytest.raises(published.StoreError, match="is no list of files"):
        published._fetch(lambda: BucketReader(store), folder, "data")
    assert [p.name for p in member.run_folder.rglob("*") if p.is_file()] == [LIST]


def test_a_folder_of_nothing_founds_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(published.ConfigError, match="cannot be published"):
        list_files(tmp_path / "empty", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["empty"]


def test_equal_files_in_parts_are_sent_once_and_nothing_is_asked_for_singly(
    tmp_path: Path, store: S3ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    for name in ("a", "b"):
        (tmp_path / "data" / name).write_bytes(b"x" * (17 * 2**20))
    monkeypatch.setattr(transfer, "PART", 16 * 2**20)
    digest = list_files(tmp_path / "data", tmp_path)
    folders = SimpleNamespace(published={"data": tmp_path / digest})
    publish(cast(Config, folders), store)
    assert {each.size for each in store.list_objects("files/") if each.size > 2**20} == {17 * 2**20}
    monkeypatch.setattr(store, "head", None)
    publish(cast(Config, folders), store)
