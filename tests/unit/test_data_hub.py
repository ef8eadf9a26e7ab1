"""A dataset's Parquet files read by ranges from a stand-in of the hub, fault by fault."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_training import founding, network_command
from distributed_training.config import load_config
from distributed_training.config.settings import DataSettings
from distributed_training.data import hub as hub_module
from distributed_training.data import patient_client
from distributed_training.data.block_builder import open_source, readable
from distributed_training.data.dataset_server import PageCache
from distributed_training.data.hub import HubSource
from distributed_training.data.page_source import Counts, NothingToRead, OtherData, PageUnavailable
from distributed_training.data.parquet import ParquetSource
from distributed_training.data.patient_client import Hold
from distributed_training.node.start import require_data
from distributed_training.protocol.pages import PageDraw
from tests.tools.hub_server import COMMIT, Hub
from tests.tools.support_data import DATASET, Fault

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patient_client, "_FIRST_WAIT", timedelta(seconds=0.02))


def write(path: Path, rows: list[Any], *, group: int = 50, column: str = "text") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    other = pa.array(range(len(rows)))
    table = pa.table({"id": other, column: rows, "late": other})
    pq.write_table(table, path, row_group_size=group, compression="zstd")


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two configs, of two files and of one, among files that are no data."""
    folder = tmp_path_factory.mktemp("hub")
    for name, count in (("a/0", 130), ("a/1", 90), ("b c/ü#1", 220)):
        write(folder / f"{name}.parquet", [f"{name} {row} " + "word " * 40 for row in range(count)])
    write(folder / "_notes/0.parquet", ["no data"] * 200)
    (folder / "README.md").write_text("about it")
    return folder


def source(hub: Hub, cache: Path | None = None, **changes: Any) -> HubSource:
    token = changes.pop("token", None)
    values: dict[str, Any] = {
        "source": "hub",
        "dataset": DATASET,
        "revision": COMMIT,
        "request_timeout": timedelta(seconds=5),
        "page_deadline": timedelta(seconds=20),
    }
    return HubSource(
        dataclasses.replace(DataSettings(), **(values | changes)),
        hub=hub.url,
        token=token,
        cache=None if cache is None else PageCache(cache, limit_bytes=10**8),
        shared=cache,
        counts=Counts(),
    )


def pages_of(made: Any, table: Mapping[str, int], *, uid: int = 3) -> list[list[str]]:
    draw = PageDraw("run", "lab", rows_per_page=10, held_out_pages=2)
    pages = draw(uid=uid, outer_step=7, first=0, count=27, num_rows=table)
    return [made.rows(name, row, split=split, limit=10) for name, row, split in pages]


def test_a_page_is_the_same_for_every_reader_and_from_a_local_copy(
    mirror: Path, tmp_path: Path
) -> None:
    local = ParquetSource(mirror, text_column="text", counts=Counts())
    with Hub(mirror, page=2) as hub:
        first, second = source(hub, tmp_path), source(hub)
        assert first.num_rows() == second.num_rows() == local.num_rows() == {"a": 220, "b c": 220}
        expected = pages_of(local, local.num_rows())
        for made in (first, second):
            assert pages_of(made, made.num_rows()) == expected
    assert len({text for page in expected for text in page}) == 270


def test_a_page_costs_one_request_and_an_end_is_fetched_once_on_a_machine(
    mirror: Path, tmp_path: Path
) -> None:
    with Hub(mirror) as hub:
        made = source(hub, tmp_path)
        made.num_rows()
        assert sorted(hub.ranges()) == ["a/0.parquet", "a/1.parquet", "b c/ü#1.parquet"]
        hub.requests.clear()
        again = source(hub, tmp_path)
        assert again.num_rows() == made.num_rows() and not hub.requests
        assert again.rows("a", 60, split="train", limit=10)[0].startswith("a/0 60 ")
        assert again.rows("a", 75, split="train", limit=10)[0].startswith("a/0 75 ")
        assert hub.ranges() == ["a/0.parquet"]  # a group of 50 rows, kept decoded
        assert len(again.rows("a", 125, split="train", limit=10)) == 10  # over the file's end
        assert hub.ranges() == ["a/0.parquet", "a/0.parquet", "a/1.parquet"]


def test_only_the_named_folder_of_a_dataset_is_read(mirror: Path) -> None:
    with Hub(mirror) as hub:
        assert source(hub, folder="a").num_rows() == {"root": 220}
        with pytest.raises(NothingToRead, match="HTTP 404"):
            source(hub, folder="nowhere")
        with pytest.raises(NothingToRead, match="no name of a dataset"):
            source(hub, dataset="../../secret/x")
        with pytest.raises(PageUnavailable, match=r"some/dataset/_notes/x|HTTP 404"):
            source(hub, folder="_notes/x")


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=500),
        Fault(status=503),
        Fault(status=429, retry_after="0"),
        Fault(cut=True),
        Fault(hang_up=True),
        Fault(body=b"short"),
        Fault(drip=60.0),
    ],
    ids=["500", "503", "429", "cut", "hang up", "short", "slow"],
)
def test_faults_that_pass(fault: Fault, mirror: Path) -> None:
    with Hub(mirror) as hub:
        made = source(hub, request_timeout=timedelta(seconds=0.5))
        made.num_rows()
        hub.script[:] = [fault]
        assert made.rows("a", 0, split="train", limit=5)[4].startswith("a/0 4 ")


def test_a_file_that_is_another_one_is_refused(mirror: Path, tmp_path: Path) -> None:
    with Hub(mirror) as hub:
        made = source(hub, tmp_path)
        made.num_rows()
        hub.tag = "two"
        with pytest.raises(OtherData, match="is not the file any more"):
            made.rows("a", 0, split="train", limit=5)
        again = source(hub, tmp_path)  # after a restart, too
        again.num_rows()
        with pytest.raises(OtherData, match="is not the file any more"):
            again.rows("a", 0, split="train", limit=5)


@pytest.mark.parametrize(("pin", "said"), [({"rows": 7}, "row count 440"), ({}, None)])
def test_data_that_the_network_s_file_does_not_pin_are_refused(
    pin: dict[str, int], said: str | None, mirror: Path
) -> None:
    with Hub(mirror) as hub:
        if said is None:
            assert source(hub, revision=None).revision == COMMIT
            with pytest.raises(NothingToRead, match="404"):
                source(hub, revision="0" * 40)
            return
        with pytest.raises(OtherData, match=said):
            source(hub, **pin).num_rows()


def test_the_token_goes_to_the_hub_and_to_no_other_host(mirror: Path) -> None:
    with Hub(mirror) as hub:
        made = source(hub, token="hf_secret")
        made.rows("a", 0, split="train", limit=5)
    assert {(at, token) for at, _, _, token in hub.requests} == {("hub", True), ("files", False)}


@pytest.mark.parametrize(
    ("hub_url", "place", "said"),
    [
        ("https://hub.example", "http://files.example/x?sig=1", "anybody on the way writes"),
        ("https://hub.example", "https://169.254.169.254/keys?sig=1", "an internal address"),
        ("https://hub.example", "https://127.0.0.1:8100/", "an internal address"),
        ("https://hub.example", "https://hub.example/x", None),
        ("http://127.0.0.1:1", "http://127.0.0.1:2/x", None),
    ],
)
def test_where_a_redirect_may_lead(hub_url: str, place: str, said: str | None) -> None:
    client = patient_client.PatientClient(
        hub_url, settings=DataSettings(), token=None, counts=Counts(), shared=None
    )
    request = httpx.Request("GET", place)
    if said is None:
        client._refuse_place(request)
        return
    with pytest.raises(NothingToRead, match=said) as caught:
        client._refuse_place(request)
    assert "sig" not in str(caught.value)


def test_what_a_redirect_has_for_a_body_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lead to the next one, with a body that does not end."""
    monkeypatch.setattr(patient_client, "_LONGEST_ERROR", 1000)
    sent: list[bytes] = []
    held: list[httpx.SyncByteStream] = []

    class Endless(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            while True:
                sent.append(bytes(600))
                yield sent[-1]

        def close(self) -> None:
            held.remove(self)

    def answer(request: httpx.Request) -> httpx.Response:
        assert not held, "a connection is given back before the next is asked for"
        held.append(Endless())
        return httpx.Response(302, headers={"Location": "/on"}, stream=held[0])

    client = patient_client.PatientClient(
        "http://127.0.0.1:1", settings=DataSettings(), token=None, counts=Counts(), shared=None
    )
    client._client._transport = httpx.MockTransport(answer)
    with pytest.raises(NothingToRead, match="HTTP 302"):
        client.get("a", lambda reply, body: body(), what="a")
    assert len(sent) == 2 * 6 and not held


@pytest.mark.parametrize("token", ["hf_secret\n", "hf_sec\nret", "hf_s\u20accret"])
def test_a_token_that_no_header_holds_is_in_no_error(
    token: str, mirror: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The errors of h11 show the header."""
    with Hub(mirror) as hub:
        made = source(hub, token=token)
        made.rows("a", 0, split="train", limit=5)
        whole = token.strip() == "hf_secret"
        assert ("hub", whole) in {(at, sent) for at, _, _, sent in hub.requests}
        assert ("HF_TOKEN has characters" in caplog.text) is not whole
    assert "hf_s" not in caplog.text


def test_a_server_without_ranges_and_groups_too_large_for_them_are_named(
    mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Hub(mirror, whole=True) as hub, pytest.raises(NothingToRead, match="whole files"):
        source(hub)
    with Hub(mirror) as hub:
        made = source(hub)
        monkeypatch.setattr(hub_module, "LARGEST_GROUP", 300)
        with pytest.raises(NothingToRead, match=r"row group with 0 MB of text.*parquet:DIR"):
            made.rows("a", 0, split="train", limit=5)


def test_a_damaged_file_is_left_out_by_name(
    mirror: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A local copy's damaged file is left out too, so rows have the same numbers in both."""
    write(tmp_path / "a/0.parquet", [f"row {n}" for n in range(150)])
    write(tmp_path / "a/1.parquet", ["x"] * 150, column="other")
    (tmp_path / "a/2.parquet").write_bytes(b"PAR1" + b"\xff" * 90 + b"PAR1")
    (tmp_path / "a/3.parquet").write_bytes(b"")
    with Hub(tmp_path) as hub:
        assert source(hub).num_rows() == {"a": 150}
    lines = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert len(lines) == 3 and all(f"a/{n}.parquet" in "".join(lines) for n in (1, 2, 3))


def test_a_description_of_too_many_columns_is_left_out(
    mirror: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file of 2 MB may describe as many as take 600 MB."""
    monkeypatch.setattr(hub_module, "_MOST_COLUMNS", 9)
    with Hub(mirror) as hub:
        assert source(hub).num_rows() == {"a": 220}
    assert "it describes 15 columns of row groups" in caplog.text
    monkeypatch.setattr(hub_module, "_LARGEST_END", 20)
    with Hub(mirror) as hub, pytest.raises(PageUnavailable, match="the largest config has 0 rows"):
        source(hub).num_rows()
    assert "has 0 MB" in caplog.text


END = b"PAR1"


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=400), st.integers(0, 2**32 - 1), st.data())
def test_any_bytes_at_a_files_end_cost_only_that_file(
    noise: bytes, length: int, data: st.DataObject
) -> None:
    good = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": ["a row"] * 120}), good)
    body = bytearray(good.getvalue().to_pybytes())
    for _ in range(data.draw(st.integers(0, 6))):
        body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    contents = data.draw(
        st.sampled_from([bytes(body), noise, noise + length.to_bytes(4, "little") + END])
    )
    made = _without_server({"a/0.parquet": contents, "a/1.parquet": good.getvalue().to_pybytes()})
    try:
        table = made.num_rows()
        for config, rows in table.items():
            for row in range(0, rows, 60):
                made.rows(config, row, split="train", limit=40)
    except PageUnavailable:
        pass


def _without_server(files: Mapping[str, bytes]) -> HubSource:
    class Local(HubSource):
        def _list(self) -> None:
            self._sizes |= {self._root / name: len(files[name]) for name in files}

        def _fetch(self, path: Path, begin: int, end: int) -> bytes:
            return files[path.relative_to(self._root).as_posix()][begin:end]

    values = dataclasses.replace(DataSettings(), dataset=DATASET, revision=COMMIT)
    how: dict[str, Any] = {"token": None, "cache": None, "shared": None, "counts": Counts()}
    return Local(values, hub="http://127.0.0.1:1", **how)


@pytest.mark.parametrize(
    "body",
    [b"[]x", b"{}", b"[1]", b'[{"path": 3}]', b'[{"path": "a", "size": "x"}]', b"null",
     b'[{"path": "../a.parquet", "size": 1, "type": "file"}]',
     b'[{"path": "/a.parquet", "size": 1, "type": "file"}]',
     b'[{"path": "a.parquet", "size": -1, "type": "file"}]',
     b'[{"path": "a\\nERROR.parquet", "size": 1, "type": "file"}]',
     b'[{"path": "\\ud800.parquet", "size": 1, "type": "file"}]'],
)  # fmt: skip
def test_a_list_of_another_form_is_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError, match=r".+") as caught:
        hub_module._read_list(httpx.Response(200), lambda: body)
    assert len(str(caught.value)) < 300


# --- the limit ------------------------------------------------------------------------------------


def test_a_refusal_for_asking_too_often_pauses_every_process_of_the_machine(
    mirror: Path, tmp_path: Path
) -> None:
    one, other = Hold(tmp_path / "p" / "pause"), Hold(tmp_path / "p" / "pause")
    assert one.seconds() == other.seconds() == 0.0
    assert other.extend(30.0) and 29.0 < one.seconds() <= 30.0
    assert not one.extend(5.0) and one.seconds() > 29.0, "the longest counts"
    assert one.extend(10**12) is False and 899.0 < other.seconds() <= 900.0
    os.utime(tmp_path / "p" / "pause", (time.time() + 86400,) * 2)
    assert Hold(tmp_path / "p" / "pause").seconds() == 0.0, "a clock that was ahead"
    assert one.seconds() > 800.0, "a process keeps to its own"
    with Hub(mirror) as hub:
        first, second = source(hub, tmp_path), source(hub, tmp_path)
        first.num_rows()
        second.num_rows()
        hub.limit = 0
        first._client._settings = dataclasses.replace(DataSettings(), request_attempts=1)
        with pytest.raises(PageUnavailable, match="429"):
            first.rows("a", 0, split="train", limit=5)
        asked = len(hub.requests)
        second._client._settings = dataclasses.replace(
            DataSettings(), longest_pause=timedelta(seconds=0.3)
        )
        with pytest.raises(PageUnavailable, match=r"asked for a pause of .* so it is left out"):
            second.rows("a", 100, split="train", limit=5)
        assert len(hub.requests) == asked, "nobody knocks while another one waits"
        hub.limit = 10**9
        # The pause does not count: it may be longer than what a page has for its attempts.
        second._client._settings = dataclasses.replace(
            DataSettings(), page_deadline=timedelta(seconds=0.3)
        )
        began = time.monotonic()
        assert second.rows("a", 100, split="train", limit=5)
        assert time.monotonic() - began > 0.5, "one waits, all wait"


def test_the_cause_is_named_with_its_remedy(
    mirror: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for token, remedy in ((None, "give HF_TOKEN"), ("hf_x", "a plan with more requests")):
        caplog.clear()
        with Hub(mirror) as hub:
            made = source(hub, token=token)
            made.num_rows()
            hub.script[:] = [Fault(status=429, retry_after="0.2")] * 2
            made.rows("a", 0, split="train", limit=5)
        (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert "answers 429" in line and "all its ranks wait" in line and remedy in line
        assert "hf_x" not in line


# --- a network's file -----------------------------------------------------------------------------


def test_a_founders_dataset_is_pinned_and_all_readers_share_its_listing(
    mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    words = ["init", str(tmp_path / "lab"), "--exchange", "hivemind", "--name", "lab"]
    words += ["--host", "192.0.2.7", "--registry", "https://registry.example"]
    words += ["--set", f"data.dataset={DATASET}", "--set", "data.rows_per_page=10"]
    with Hub(mirror) as hub:
        monkeypatch.setattr("distributed_training.data.sources.HUB", hub.url)
        assert network_command.main(words) == 0, capsys.readouterr().err
        file = str(tmp_path / "lab" / "network.toml")
        words = ["--network", file, "--neuron.run_folder", str(tmp_path / "run")]
        config = load_config("validator", words, environ={}, dotenv=None, check=False)
        data = config.data
        assert (data.source, data.dataset, data.folder) == ("hub", DATASET, "")
        assert (data.revision, data.rows, data.selection) == (COMMIT, 440, 2)
        require_data(config)  # nothing is written before there is a run folder
        (tmp_path / "run").mkdir()
        require_data(config)
        hub.requests.clear()
        require_data(config)
        assert not hub.requests
        hub.tag, hub.commit = "two", "1" * 40
        assert open_source(data, cache=config.data_cache).num_rows() == {"a": 220, "b c": 220}
        with pytest.raises(PageUnavailable):  # the commit is gone
            readable(data)


def test_the_built_in_dataset_is_read_from_one_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of it has its texts several times."""
    init = ["init", "lab", "--name", "lab", "--registry", "https://registry.example"]
    init += ["--store", "https://store.example"]
    for more, folder in (
        ([], "sample/100BT"),
        (["--set", "data.folder=data"], "data"),
        (["--set", "data.dataset=a/b"], None),
        (["--data-source", "hf"], None),
    ):
        options = network_command.build_parser().parse_args([*init, *more])
        options.exchange, options.tokenizer = "store", "bytes"
        assert founding.rules_of(options)["data"].get("folder") == folder
