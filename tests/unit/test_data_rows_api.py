"""The rows API's client against a stand-in on loopback, fault by fault."""

from __future__ import annotations

import dataclasses
import email.utils
import errno
import json
import logging
import random
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from distributed_training.config.settings import DataSettings
from distributed_training.data.block_builder import open_source
from distributed_training.data.dataset_server import PageCache, RowsApiSource
from distributed_training.data.page_source import Counts, NothingToRead, OtherData, PageUnavailable
from distributed_training.data.patient_client import retry_after
from tests.tools.support_data import DATASET, Fault, RowsServer, tables

pytestmark = pytest.mark.timeout(60)

TABLES = tables()


def source(
    server: RowsServer, *, cache: PageCache | None = None, **changes: Any
) -> tuple[RowsApiSource, Counts]:
    counts = Counts()
    values: dict[str, Any] = {
        "rows_url": server.url,
        "dataset": DATASET,
        "request_timeout": timedelta(seconds=5),
        "request_attempts": 5,
        "page_deadline": timedelta(seconds=20),
        "table_age": timedelta(hours=1),
    }
    settings = dataclasses.replace(DataSettings(), **(values | changes))
    return RowsApiSource(settings=settings, token=None, cache=cache, counts=counts), counts


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    short = timedelta(seconds=0.05)
    monkeypatch.setattr("distributed_training.data.patient_client._FIRST_WAIT", short)


@pytest.mark.parametrize(
    "faults",
    [
        [Fault(status=500)],
        [Fault(status=503), Fault(status=502), Fault(status=504)],
        [Fault(cut=True)],
        [Fault(body=b'{"rows": [')],
        [Fault(body=b"<html>busy</html>")],
        [Fault(hang_up=True), Fault(cut=True)],
        [Fault(status=429, retry_after="0")],
        [Fault(status=408), Fault(status=429)],
    ],
    ids=lambda faults: "+".join(
        str(f.status) if f.status != 200 else "cut" if f.cut else "hang" if f.hang_up else "body"
        for f in faults
    ),
)
def test_faults_that_pass(faults: list[Fault | None]) -> None:
    with RowsServer(TABLES, script=list(faults)) as server:
        made, _ = source(server)
        assert made.rows("CC-MAIN-0", 3, split="train", limit=10) == TABLES["CC-MAIN-0"][3:13]
        assert len(server.row_requests()) == len(faults) + 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_answers_that_asking_again_does_not_change(status: int) -> None:
    with RowsServer(TABLES, script=[Fault(status=status)]) as server:
        made, counts = source(server)
        with pytest.raises(PageUnavailable, match=f"CC-MAIN-0, 3: HTTP {status}"):
            made.rows("CC-MAIN-0", 3, split="train", limit=10)
        assert len(server.row_requests()) == 1
        assert counts.drain()[f"http_{status}"] == 1


def test_the_server_s_own_sentence_is_shown_in_one_line() -> None:
    """It may answer with a reason, none, a proxy's page, or text that would forge lines."""
    draw = random.Random(5)
    letters = "abc {}\n\r\x1b[31m\x00\u2028\u202e\ud800é€"
    sentences = ["Rows are too big: 564.00 MiB (max=286.10 MiB)"]
    sentences += ["".join(draw.choices(letters, k=draw.choice((1, 30, 900)))) for _ in range(60)]
    bodies = [json.dumps({"error": sentence}).encode() for sentence in sentences]
    bodies += [
        b"",
        b"[]",
        b'{"error": 7}',
        b"<html>",
        b"[" * 9000,
        b"\xff{",
        b'{"error": "a' + b"b" * 99999,
    ]
    script: list[Fault | None] = [
        Fault(status=draw.choice((400, 403, 404, 422, 501)), body=body) for body in bodies
    ]
    with RowsServer(TABLES, script=list(script)) as server:
        made, _ = source(server)
        for fault in script:
            assert fault is not None
            with pytest.raises(NothingToRead, match=f"HTTP {fault.status}") as caught:
                made.rows("CC-MAIN-0", 3, split="train", limit=10)
            line = str(caught.value)
            assert len(line) < 300 and line.isprintable(), line
            if b"564.00" in (fault.body or b""):
                assert line == f"/rows CC-MAIN-0, 3: HTTP {fault.status} ({sentences[0]})"


@pytest.mark.parametrize(("public", "asked"), [(True, 3), (False, 4)])
def test_a_refused_token_is_named_and_left_out_where_the_data_need_none(
    public: bool, asked: int, caplog: pytest.LogCaptureFixture
) -> None:
    no = Fault(status=401, body=b'{"error": "Invalid credentials"}')
    with RowsServer(TABLES, script=[no, None, None] if public else [no] * 4) as server:
        counts = Counts()
        settings = dataclasses.replace(DataSettings(), rows_url=server.url, dataset=DATASET)
        made = RowsApiSource(settings=settings, token="hf_old", cache=None, counts=counts)
        for _ in range(2):
            try:
                assert (
                    made.rows("CC-MAIN-0", 3, split="train", limit=9) == TABLES["CC-MAIN-0"][3:12]
                )
            except NothingToRead as error:
                assert not public and "HF_TOKEN" in str(error) and "Invalid cred" in str(error)
        assert len(server.row_requests()) == asked
    lines = [record.getMessage() for record in caplog.records if "HF_TOKEN" in record.getMessage()]
    assert len(lines) == public and "hf_old" not in caplog.text


@pytest.mark.parametrize(
    ("url", "hub", "sent"),
    [
        ("https://datasets-server.huggingface.co", "https://huggingface.co", True),
        ("https://Huggingface.co/api", "https://huggingface.co", True),
        ("http://datasets-server.huggingface.co", "https://huggingface.co", False),
        ("https://nothuggingface.co", "https://huggingface.co", False),
        ("https://huggingface.co.example.org", "https://huggingface.co", False),
        ("https://example.org/huggingface.co", "https://huggingface.co", False),
        ("https://data.mirror.example", "https://mirror.example", True),
        ("https://datasets-server.huggingface.co", "https://mirror.example", True),
        ("https://mirror.example", "https://huggingface.co", False),
    ],
)
def test_the_token_is_sent_only_to_the_hub(
    url: str, hub: str, sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("distributed_training.data.sources.HUB", hub)
    opened = open_source(dataclasses.replace(DataSettings(), rows_url=url))
    assert isinstance(opened, RowsApiSource)
    assert opened._client._token == ("hf_secret" if sent else None)


@pytest.mark.slow
def test_retry_after_is_waited_for_by_all_connections() -> None:
    with RowsServer(TABLES, script=[Fault(status=429, retry_after="1")]) as server:
        made, _ = source(server)
        made.rows("CC-MAIN-0", 3, split="train", limit=10)
        made.rows("CC-MAIN-0", 50, split="train", limit=10)
        first, second, _ = (at for at, path, _ in server.requests if path == "/rows")
        assert second - first >= 1.0
        made._client._hold.extend(0.6)  # as another connection's 429 does
        began = time.monotonic()
        made.rows("CC-MAIN-0", 99, split="train", limit=10)
        assert time.monotonic() - began >= 0.6


@pytest.mark.slow
def test_a_body_that_trickles_in_ends_with_the_timeout() -> None:
    with RowsServer(TABLES, script=[Fault(drip=80.0)]) as server:
        made, counts = source(server, request_timeout=timedelta(seconds=2))
        began = time.monotonic()
        assert made.rows("CC-MAIN-0", 3, split="train", limit=100)
        assert time.monotonic() - began < 40
        assert counts.drain()["http_failures"] == 1


def test_retry_after() -> None:
    past = {"120": 120.0, "Wed, 21 Oct 2015 07:28:00 GMT": 0.0}
    none = ("soon", "", None, "inf", "-3", "Wed, 21 Oct 99999 07:28:00 GMT")
    for value, seconds in (past | dict.fromkeys(none)).items():
        assert retry_after(value) == seconds, value
    soon = email.utils.formatdate(time.time() + 60, usegmt=True)
    assert retry_after(soon) == pytest.approx(60, abs=2)


def test_no_server_switches_a_source_off_for_good() -> None:
    with RowsServer(TABLES, script=[Fault(status=429, retry_after="1000000000000")]) as server:
        made, _ = source(server, page_deadline=timedelta(seconds=60))
        with pytest.raises(PageUnavailable):
            made.rows("CC-MAIN-0", 3, split="train", limit=10)
        assert 890 < made._client._hold.seconds() <= 900
        with pytest.raises(PageUnavailable, match="asked for a pause of"):
            made.rows("CC-MAIN-0", 3, split="train", limit=10)


# --- what is wrong with rows --------------------------------------------------------------------


def test_rows_that_are_no_text_are_counted_and_the_others_used() -> None:
    mixed = ["one", None, "", 7, "two", "\ud800 lone", {"a": 1}, "three"]
    with RowsServer({"c": mixed + ["x"] * 200}) as server:
        made, counts = source(server)
        assert made.rows("c", 0, split="train", limit=8) == ["one", "two", "three"]
        found = counts.drain()
        assert (found["rows_without_text"], found["rows_empty"], found["rows_not_utf8"]) == (
            3,
            1,
            1,
        )


def test_a_page_beyond_the_end_is_named() -> None:
    with RowsServer(TABLES) as server:
        made, _ = source(server)
        with pytest.raises(PageUnavailable, match="CC-MAIN-0 has no rows from 400 on"):
            made.rows("CC-MAIN-0", 400, split="train", limit=100)
        assert len(made.rows("CC-MAIN-0", 350, split="train", limit=100)) == 50


OTHER_ROWS = json.dumps({"rows": [{"row_idx": i, "row": {"text": "x"}} for i in range(9)]}).encode()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        *((body, "not a page") for body in (b"[]", b'{"rows": 3}', b'{"rows": [{}]}', b'"rows"')),
        (b"null", "not a page"),
        (b"[" * 100_000, "RecursionError"),
        (OTHER_ROWS, "CC-MAIN-0, 5: the server answered with other rows"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_replies_that_are_no_page(body: bytes, words: str) -> None:
    with RowsServer(TABLES, script=[Fault(body=body)]) as server:
        made, _ = source(server, request_attempts=1)
        with pytest.raises(PageUnavailable, match=words):
            made.rows("CC-MAIN-0", 5, split="train", limit=3)


def test_no_more_rows_than_a_page_has_are_taken() -> None:
    with RowsServer(TABLES, script=[Fault(body=OTHER_ROWS)]) as server:
        made, _ = source(server)
        assert made.rows("CC-MAIN-0", 0, split="train", limit=3) == ["x"] * 3


@pytest.mark.parametrize(
    "entry",
    [
        '"num_rows": -5',
        '"num_rows": 1e999',
        '"num_rows": 9999999999999999999',
        '"num_rows": null',
        '"num_rows": 200, "config": "\\ud800"',
        '"num_rows": 200, "split": "test"',
    ],
)
def test_replies_that_are_no_table(entry: str) -> None:
    body = '{"size": {"splits": [{"config": "CC-MAIN-0", ' + entry + "}]}}"
    with RowsServer(TABLES, size_script=[Fault(body=body.encode())]) as server:
        with pytest.raises(PageUnavailable, match=r"not a table|names no config"):
            source(server)[0].num_rows()


def size(*entries: str, pending: Sequence[str | None] = ()) -> Fault:
    """A reply of /size: of each entry "config/split/rows"."""
    named = (entry.split("/") for entry in entries)
    splits = [{"config": c, "split": s, "num_rows": int(n) if n else None} for c, s, n in named]
    waiting = [{"config": config} if config else {} for config in pending]
    return Fault(body=json.dumps({"size": {"splits": splits}, "pending": waiting}).encode())


@pytest.mark.parametrize(
    ("reply", "table"),
    [
        (size("default/train/500"), {"default": 500}),
        (size("default/test/9", "default/train/500"), {"default": 500}),
        (size("default/train/500", "en/train/300"), {"en": 300}),
        (size("default/train/", "en/train/300"), {"en": 300}),  # what is not drawn may be anything
        (size("default/train/500", "en/test/300"), {"default": 500}),
        (size("default/train/500", pending=["en"]), "1 config to go"),
        (size("default/train/500", pending=[None]), "1 config to go"),
        (size(pending=["default"]), "1 config to go"),
        (size("default/train/500", pending=["default"]), {"default": 500}),
        (size("default/test/500"), "names no config"),
        (size("default/train/"), "not a table"),
    ],
)
def test_the_config_default_is_drawn_from_where_it_is_the_only_one(
    reply: Fault, table: dict[str, int] | str
) -> None:
    with RowsServer(TABLES, size_script=[reply]) as server:
        made, _ = source(server)
        if isinstance(table, dict):
            assert made.num_rows() == table
            return
        with pytest.raises(PageUnavailable, match=table):
            made.num_rows()


# --- the table's age ----------------------------------------------------------------------------


def test_a_change_of_the_table_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    growing: dict[str, list[str]] = dict(TABLES)
    with RowsServer(growing) as server:
        made, counts = source(server, table_age=timedelta(0))
        made.num_rows()
        assert made.num_rows() and "changed" not in caplog.text
        growing["CC-MAIN-9"] = ["new"] * 200
        with caplog.at_level(logging.WARNING):
            assert made.num_rows()["CC-MAIN-9"] == 200
        assert "4 configs (before: 3), 1 of them new" in caplog.text
        assert counts.drain()["table_changes"] == 1


@pytest.mark.parametrize(
    ("pinned", "words"),
    [
        ({"rows": 1200, "revision": "a" * 40}, ""),
        ({"rows": 1201}, "some/dataset at .* has row count 1200 and the network's file pins 1201"),
        ({"revision": "b" * 40}, "has revision a{40} and the network's file pins b{40}"),
    ],
)
def test_other_data_than_the_pinned_are_refused(
    pinned: dict[str, Any], words: str, tmp_path: Path
) -> None:
    cache = PageCache(tmp_path, limit_bytes=10**6)
    with RowsServer(TABLES, revision="a" * 40) as server:
        source(server, cache=cache)[0].num_rows()  # of a network that pins nothing
        made, _ = source(server, cache=cache, table_age=timedelta(0), **pinned)
        if not words:
            assert made.num_rows() and made.rows("CC-MAIN-1", 250, split="train", limit=100)
            return
        with pytest.raises(OtherData, match=words):
            made.num_rows()
        if "revision" in pinned:
            with pytest.raises(OtherData, match=words):
                made.rows("CC-MAIN-1", 250, split="train", limit=100)


def test_pinned_data_that_grow_are_drawn_from_as_they_were(
    caplog: pytest.LogCaptureFixture,
) -> None:
    growing: dict[str, list[str]] = dict(TABLES)
    with RowsServer(growing) as server:
        made, _ = source(server, rows=1200, table_age=timedelta(0))
        before = dict(made.num_rows())
        growing["CC-MAIN-9"] = ["new"] * 200
        with caplog.at_level(logging.WARNING):
            assert made.num_rows() == before
        assert "has row count 1400 and the network's file pins 1200" in caplog.text


def test_an_old_table_is_better_than_none(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    cache = PageCache(tmp_path, limit_bytes=10**6)
    with RowsServer(TABLES) as server:
        made, _ = source(server, cache=cache)
        table = dict(made.num_rows())
        server.size_script = [Fault(status=500)] * 20
        # A new process, a table that is too old, and a server that is down.
        again, _ = source(server, cache=cache, request_attempts=2, table_age=timedelta(0))
        with caplog.at_level(logging.WARNING):
            assert again.num_rows() == table
        assert "cannot be refreshed (/size some/dataset: HTTP 500 (status 500))" in caplog.text
        asked = len(server.requests)
        kept, _ = source(server, cache=cache)
        assert kept.num_rows() == table and len(server.requests) == asked


@pytest.mark.parametrize("why", ["pending", "failed"])
def test_a_table_that_leaves_out_configs_does_not_replace_a_whole_one(
    why: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    cache = PageCache(tmp_path, limit_bytes=10**6)
    shown: dict[str, list[str]] = dict(TABLES)
    with RowsServer(shown) as server:
        made, _ = source(server, cache=cache)
        whole = dict(made.num_rows())
        made._table_at -= 7200
        del shown["CC-MAIN-1"]
        server.size_left_out = {why: [{"kind": "config-size", "config": "CC-MAIN-1"}]}
        with caplog.at_level(logging.WARNING):
            assert made.num_rows() == whole
        assert "cannot be refreshed (the reply of /size leaves out 1 config)" in caplog.text
        asked = len(server.requests)
        assert made.num_rows() == whole and len(server.requests) == asked
        restarted, _ = source(server, cache=cache)
        assert restarted.num_rows() == whole


def test_a_table_that_leaves_out_configs_is_used_where_there_is_no_other_and_asked_for_again(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    cache = PageCache(tmp_path, limit_bytes=10**6)
    shown = {"CC-MAIN-0": TABLES["CC-MAIN-0"]}
    with RowsServer(shown) as server:
        made, _ = source(server, cache=cache)
        server.size_left_out = {"pending": [], "failed": [{}, {}]}
        with caplog.at_level(logging.WARNING):
            for _ in range(2):  # nothing better comes: the same again, and no second line
                assert made.num_rows() == {"CC-MAIN-0": 400}
                asked = len(server.requests)
                assert made.num_rows() and len(server.requests) == asked
                made._ask_table_at = 0.0  # five minutes later
        assert caplog.text.count("leaves out 2 configs") == 1
        assert cache.get(made._table_key) is None
        shown.update(TABLES)
        server.size_left_out = {"pending": [], "failed": []}
        assert made.num_rows() == dict.fromkeys(TABLES, 400)
        assert cache.get(made._table_key) is not None


def test_a_table_kept_while_the_clock_was_ahead_is_asked_for_again(tmp_path: Path) -> None:
    """Else pages are drawn from it until then, and they are others than the validators'."""
    cache = PageCache(tmp_path, limit_bytes=10**6)
    with RowsServer(TABLES) as server:
        made, _ = source(server, cache=cache)
        ahead = {"at": time.time() + 90 * 86400, "rows": {"CC-MAIN-0": 300}}
        cache.put(made._table_key, ahead)
        assert made.num_rows() == dict.fromkeys(TABLES, 400)
        asked = len(server.requests)
        assert made.num_rows() and len(server.requests) == asked


# --- the cache ----------------------------------------------------------------------------------


def test_pages_are_fetched_once(tmp_path: Path) -> None:
    with RowsServer(TABLES) as server:
        for _ in range(2):
            made, counts = source(server, cache=PageCache(tmp_path, limit_bytes=10**6))
            page = made.rows("CC-MAIN-2", 7, split="train", limit=100)
            assert page == TABLES["CC-MAIN-2"][7:107]
        assert len(server.row_requests()) == 1
        assert counts.drain() == {"pages_from_cache": 1}


def test_a_short_page_is_asked_for_again(tmp_path: Path) -> None:
    rows = {"c": TABLES["CC-MAIN-0"][:150]}
    with RowsServer(rows) as server:
        made, _ = source(server, cache=PageCache(tmp_path, limit_bytes=10**6))
        assert len(made.rows("c", 100, split="train", limit=100)) == 50
        rows["c"] = TABLES["CC-MAIN-0"]
        assert len(made.rows("c", 100, split="train", limit=100)) == 100


def test_the_cache_keeps_its_size_and_the_last_used_pages(tmp_path: Path) -> None:
    cache = PageCache(tmp_path, limit_bytes=30_000)
    noise = [bytes(range(256)).hex() + str(i) * 50 for i in range(300)]
    for i in range(100):
        cache.put(f"page {i}", [noise[i], str(i) * 9000, *noise[i : i + 8]])
        assert cache.get("page 0") is not None  # in use all the time
        time.sleep(0.002)  # the order is that of modification times
    cache.sweep()
    sizes = [p.stat().st_size for p in tmp_path.glob("??/*")]
    assert 10 < len(sizes) < 100 and sum(sizes) <= cache._limit
    assert cache.get("page 0") is not None


def test_a_damaged_page_is_fetched_again(tmp_path: Path) -> None:
    cache = PageCache(tmp_path, limit_bytes=10**6)
    cache.put("k", ["text"])
    (path,) = tmp_path.glob("??/*")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert cache.get("k") is None and not path.exists()


@pytest.mark.parametrize("at_its_limits", ["pathlib.Path.read_bytes", "os.utime"])
def test_a_whole_page_is_not_deleted_by_a_process_at_its_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_its_limits: str
) -> None:
    cache = PageCache(tmp_path, limit_bytes=10**6)
    cache.put("k", ["text"])
    with monkeypatch.context() as short:
        short.setattr(at_its_limits, Mock(side_effect=OSError(errno.EMFILE, "no descriptor")))
        assert cache.get("k") == (["text"] if at_its_limits == "os.utime" else None)
    assert cache.get("k") == ["text"]


def test_a_cache_that_cannot_be_written_costs_one_line_and_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    cache = PageCache(blocked / "pages", limit_bytes=10**6)
    with caplog.at_level(logging.WARNING):
        cache.put("a", [1])
        blocked.unlink()
        cache.put("b", [1])
    assert caplog.text.count("cannot be written") == 1
    assert cache.get("a") is None and cache.get("b") is None
    cache._write_at = 0.0  # ten minutes later
    cache.put("c", [1])
    assert cache.get("c") == [1]
