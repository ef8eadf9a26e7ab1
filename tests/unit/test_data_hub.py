"""Read a dataset's Parquet files in ranges from a stand-in of the hub that has faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.utils._http as hub_client
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distributed_training import founding, network_command
from distributed_training.config import load_config
from distributed_training.config.settings import DataSettings
from distributed_training.data import hub as hub_module
from distributed_training.data import parquet
from distributed_training.data.hub import HubSource
from distributed_training.data.page_source import Counts, NothingToRead, PageUnavailable
from distributed_training.data.parquet import ParquetSource
from distributed_training.data.sources import Source, readable
from distributed_training.node.start import require_data
from distributed_training.protocol.pages import PageDraw
from testbed.hub_server import COMMIT, DATASET, Fault, Hub

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the seconds for which the hub's client has waited, without really waiting."""
    told: list[float] = []
    monkeypatch.setattr(hub_client, "time", SimpleNamespace(sleep=told.append))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return told


def write(path: Path, rows: list[Any], *, group: int = 50, column: str = "text") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    other = pa.array(range(len(rows)))
    table = pa.table({"id": other, column: rows, "late": other})
    pq.write_table(table, path, row_group_size=group, compression="zstd")


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a config of two files, one of a single file, and other files that are not data."""
    folder = tmp_path_factory.mktemp("hub")
    for name, count in (("a/0", 130), ("a/1", 90), ("b c/ü#1", 220)):
        write(folder / f"{name}.parquet", [f"{name} {row} " + "word " * 40 for row in range(count)])
    write(folder / "_notes/0.parquet", ["no data"] * 200)
    (folder / "README.md").write_text("about it")
    return folder


def source(hub: Hub, cache: Path | None = None, **changes: Any) -> HubSource:
    values: dict[str, Any] = {"source": "hub", "dataset": DATASET, "revision": COMMIT}
    given = dataclasses.replace(DataSettings(), **(values | changes))
    return HubSource(given, hub=hub.url, cache=cache, counts=Counts())


def pages_of(made: Any, table: Mapping[str, int]) -> list[list[str]]:
    draw = PageDraw("run", "lab", rows_per_page=10, held_out_pages=2)
    pages = draw(uid=3, outer_step=7, first=0, count=27, num_rows=table)
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
        assert hub.ranges() == ["a/0.parquet"]  # a group of 50 rows, which is kept decoded
        assert len(again.rows("a", 125, split="train", limit=10)) == 10  # beyond the file's end
        assert hub.ranges() == ["a/0.parquet", "a/0.parquet", "a/1.parquet"]


def test_of_a_file_only_the_row_groups_and_the_column_of_a_page_are_read(tmp_path: Path) -> None:
    rows = [f"{row} " + "".join(map(chr, range(33, 120))) * 30 for row in range(2000)]
    table = pa.table({"before": rows[::-1], "text": rows, "behind": rows[::-1]})
    (tmp_path / "files").mkdir()
    how: dict[str, Any] = {"compression": "none", "use_dictionary": False}
    pq.write_table(table, tmp_path / "files" / "0.parquet", row_group_size=100, **how)
    with Hub(tmp_path / "files") as hub:
        made = source(hub, tmp_path / "kept")
        made.num_rows()
        hub.requests.clear()
        assert made.rows("root", 1310, split="train", limit=20) == rows[1310:1330]
        (span,) = [wanted for at, _, wanted, _ in hub.requests if at == "files"]
    begin, end = map(int, span.removeprefix("bytes=").split("-"))
    column = 100 * len(rows[0])
    assert column < end + 1 - begin < 1.1 * column + hub_module._READ_AHEAD


def test_only_the_named_folder_of_a_dataset_is_read(mirror: Path) -> None:
    with Hub(mirror) as hub:
        assert source(hub, folder="a").num_rows() == {"root": 220}
        with pytest.raises(NothingToRead, match="has no Parquet files"):
            source(hub, folder="nowhere")
        for name in ("../../secret/x", "alone"):
            with pytest.raises(NothingToRead, match="is not the OWNER/NAME of a dataset"):
                source(hub, dataset=name)
        with pytest.raises(NothingToRead, match="the hub has no such dataset"):
            source(hub, dataset="some/other")


@pytest.mark.parametrize(
    ("fault", "waited"),
    [
        (Fault(status=500), 1),
        (Fault(status=503), 1),
        (Fault(status=429, retry_after="17"), 18),
        (Fault(cut=True), 1),
        (Fault(hang_up=True), 1),
    ],
    ids=["500", "503", "429", "cut", "hang up"],
)
def test_faults_that_pass_are_waited_for(
    fault: Fault, waited: float, mirror: Path, waits: list[float]
) -> None:
    with Hub(mirror) as hub:
        made = source(hub)
        made.num_rows()
        hub.script[:] = [fault]
        assert made.rows("a", 0, split="train", limit=5)[4].startswith("a/0 4 ")
    assert waits == [waited]


@pytest.mark.parametrize("status", [401, 403, 404])
def test_an_answer_that_stays_is_not_asked_for_again(
    status: int, mirror: Path, waits: list[float]
) -> None:
    with Hub(mirror) as hub:
        made = source(hub)
        made.num_rows()
        hub.script[:] = [Fault(status=status)]
        with pytest.raises(NothingToRead, match=f"a/0.parquet.*HTTP {status}") as caught:
            made.rows("a", 0, split="train", limit=5)
    assert not waits and "Signature" not in str(caught.value)


def test_a_hub_that_is_away_leaves_no_file_out(mirror: Path) -> None:
    with Hub(mirror) as hub:
        hub.decide = lambda name: Fault(status=500) if name == "a/1.parquet" else None
        made = source(hub)
        with pytest.raises(PageUnavailable, match=r"a/1.parquet.*HTTP 500"):
            made.num_rows()
        hub.decide = None
        assert made.num_rows() == {"a": 220, "b c": 220}
    hub.url = "http://127.0.0.1:1"
    with pytest.raises(PageUnavailable, match="ConnectError"):
        source(hub)


def test_a_commit_that_the_hub_does_not_have_is_refused(mirror: Path) -> None:
    with Hub(mirror) as hub:
        assert source(hub, revision=None).revision == COMMIT
        with pytest.raises(NothingToRead, match="no such dataset or commit"):
            source(hub, revision="0" * 40)


def test_the_token_goes_to_the_hub_and_to_no_other_host(mirror: Path) -> None:
    with Hub(mirror) as hub:
        source(hub).rows("a", 0, split="train", limit=5)
    assert {(at, token) for at, _, _, token in hub.requests} == {("hub", True), ("files", False)}


def test_a_token_that_no_header_holds_is_in_no_error(
    mirror: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_s\u20accret")
    with Hub(mirror) as hub, pytest.raises(PageUnavailable) as caught:
        source(hub)
    assert "hf_s" not in f"{caught.value}{caplog.text}"


def test_a_server_without_ranges_and_groups_too_large_for_them_are_named(
    mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Hub(mirror) as hub:
        made = source(hub)
        made.num_rows()
        hub.whole = True
        with pytest.raises(NothingToRead, match="instead of a range"):
            made.rows("a", 0, split="train", limit=5)
    with Hub(mirror) as hub:
        made = source(hub)
        made.num_rows()
        monkeypatch.setattr(hub_module, "LARGEST_READ", 300 - hub_module._READ_AHEAD)
        with pytest.raises(NothingToRead, match=r"row group with 0 MB of text.*parquet:DIR"):
            made.rows("a", 0, split="train", limit=5)


def test_a_damaged_file_is_left_out_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A local copy leaves out the same file, so that its rows have the same numbers."""
    write(tmp_path / "a/0.parquet", [f"row {n}" for n in range(150)])
    write(tmp_path / "a/1.parquet", ["x"] * 150, column="other")
    (tmp_path / "a/2.parquet").write_bytes(b"PAR1" + b"\xff" * 90 + b"PAR1")
    (tmp_path / "a/3.parquet").write_bytes(b"")
    for folder in ("hub", "disk"):
        with Hub(tmp_path) as hub:
            if folder == "hub":
                assert source(hub).num_rows() == {"a": 150}
            else:
                local = ParquetSource(tmp_path, text_column="text", counts=Counts())
                assert local.num_rows() == {"a": 150}
        lines = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
        assert len(lines) == 3 and all(f"a/{n}.parquet" in "".join(lines) for n in (1, 2, 3))
        caplog.clear()


def test_an_end_that_is_too_large_is_not_read(
    mirror: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parquet, "LARGEST_END", 20)
    with Hub(mirror) as hub, pytest.raises(PageUnavailable, match="the largest config has 0 rows"):
        source(hub).num_rows()
    assert "its end, which says where rows are, has 0 MB" in caplog.text


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
        require_data(config)  # it writes nothing while there is no run folder
        (tmp_path / "run").mkdir()
        require_data(config)
        hub.requests.clear()
        require_data(config)
        assert not hub.requests
        hub.commit = "1" * 40
        assert Source(data, cache=config.data_cache).num_rows() == {"a": 220, "b c": 220}
        with pytest.raises(PageUnavailable):  # the commit no longer exists
            readable(data)


def test_the_built_in_dataset_is_read_from_one_folder() -> None:
    """The whole dataset contains its texts several times."""
    init = ["init", "lab", "--name", "lab", "--registry", "https://registry.example"]
    init += ["--store", "https://store.example"]
    for more, folder in (
        ([], "sample/100BT"),
        (["--set", "data.folder=data"], "data"),
        (["--set", "data.dataset=a/b"], None),
    ):
        options = network_command.build_parser().parse_args([*init, *more])
        options.exchange, options.tokenizer = "store", "bytes"
        assert founding.rules_of(options)["data"].get("folder") == folder
