"""Send raw requests to the page through a socket, as anybody on the machine could."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import re
import signal
import socket
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from distributed_training.common.ports import free_ports, listen
from distributed_training.telemetry import EventLog
from distributed_training.telemetry.facts import Launch
from distributed_training.telemetry.neuron_state import NeuronState
from distributed_training.telemetry.page import PageProcess
from distributed_training.telemetry.page import __main__ as served_page
from distributed_training.telemetry.run_state import LAUNCHER_FILE
from tests.tools.page import TOKEN, Page, served
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(120)
HOTKEY = "5F-a-hotkey-that-only-this-machine-may-read"


def ask(page: Page, *head: bytes, path: bytes = b"/history", method: bytes = b"GET") -> bytes:
    """Return the whole answer to a request with these header lines."""
    with closing(socket.create_connection(("127.0.0.1", port(page)), timeout=30)) as caller:
        request = b"\r\n".join((method + b" " + path + b" HTTP/1.1", *head, b"connection: close"))
        answer = b""
        with contextlib.suppress(ConnectionError):  # it was refused before all of it was read
            caller.sendall(request + b"\r\n\r\n")
            while part := caller.recv(65536):
                answer += part
        return answer


def port(page: Page) -> int:
    return int(page.url.rstrip("/").rpartition(":")[2])


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("miner")
    with EventLog(folder / "events.jsonl") as events:
        events.write("problem", level="WARNING", text=f"{HOTKEY} \ud800")
    with served(folder) as page:
        yield page


def status(answer: bytes) -> int:
    found = re.match(rb"HTTP/1\.1 (\d{3}) ", answer)
    return int(found[1]) if found else 0


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "LocalHost", "[::1]"])
def test_the_page_answers_at_its_own_address(page: Page, name: str) -> None:
    answer = ask(page, f"host: {name}:{port(page)}".encode())
    assert status(answer) == 200 and HOTKEY.encode() in answer


# Names that URL parsers accept but that are not the page's own, and names that look like its own.
_HOSTS = st.one_of(
    st.binary(max_size=60),
    st.text(string.printable, max_size=40).map(str.encode),
    st.builds(
        lambda left, odd, right, port: left + odd + right + port,
        st.sampled_from([b"", b"a", b"127.0.0.1", b"localhost", b"[::1]"]),
        st.sampled_from([b"", *(bytes([code]) for code in range(1, 256)), b"\r\n ", b", "]),
        st.sampled_from([b"", b"b.example", b".localhost", b"127.0.0.1", b"localhost"]),
        st.sampled_from([b"", b":", b":80", b":0", b":8010", b":PORT", b":PORT:PORT", b":0PORT"]),
    ),
)


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(_HOSTS)
@example(b"a{b.example:PORT")
@example(b"a`b.example:PORT")
@example(b'a"b.example:PORT')
@example(b"attacker.example:PORT")
@example(b"")
@example(b"127.0.0.1.example:PORT")
@example(b"127.0.0.1:PORT@b.example")
@example(b"127.0.0.1")
def test_no_other_host_header_gets_anything(page: Page, host: bytes) -> None:
    """A web site whose name resolves to 127.0.0.1 chooses these bytes."""
    host = host.replace(b"PORT", str(port(page)).encode())
    own = rb"(127\.0\.0\.1|localhost|\[::1\]):0{0,3}%d" % port(page)
    answer = ask(page, b"host: " + host)
    if re.fullmatch(own, host.strip(b" \t"), re.IGNORECASE):
        assert status(answer) == 200
    else:
        assert status(answer) in (0, 400, 403, 411) and HOTKEY.encode() not in answer


@pytest.mark.parametrize("wrong", ["missing", "two", "two names", "HTTP/1.0 without"])
def test_one_host_header_is_needed(page: Page, wrong: str) -> None:
    own = f"host: 127.0.0.1:{port(page)}".encode()
    heads = {
        "missing": (),
        "two": (own, own),
        "two names": (b"host: attacker.example", own),
        "HTTP/1.0 without": (b"x: y",),
    }
    if wrong.startswith("HTTP/1.0"):
        with closing(socket.create_connection(("127.0.0.1", port(page)), timeout=30)) as caller:
            caller.sendall(b"GET /history HTTP/1.0\r\n\r\n")
            answer = caller.recv(65536)
    else:
        answer = ask(page, *heads[wrong])
    assert status(answer) in (400, 403) and HOTKEY.encode() not in answer


def test_a_websocket_is_not_a_way_past_the_checks(page: Page) -> None:
    upgrade = (b"upgrade: websocket", b"sec-websocket-version: 13")
    key = b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ=="
    answer = ask(page, b"host: attacker.example", *upgrade, key, b"connection: upgrade")
    assert status(answer) in (400, 403), answer[:100]


@pytest.mark.slow
def test_no_caller_fills_the_log(tmp_path: Path) -> None:
    """Send malformed requests and refused ones, and open more connections than are allowed."""
    with served(tmp_path, token=TOKEN) as page, contextlib.ExitStack() as held:
        address = ("127.0.0.1", port(page))
        junk = (b"\x00\xff\x00junk\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n")
        for number in range(300):
            with closing(socket.create_connection(address, timeout=30)) as one:
                one.sendall(junk[number % len(junk)])
                with contextlib.suppress(ConnectionError):
                    one.recv(100)
        upgrade = (b"connection: upgrade", b"upgrade: websocket")
        assert {status(ask(page, b"host: x", *upgrade)) for _ in range(50)} == {401}
        for _ in range(300):
            held.enter_context(closing(socket.create_connection(address, timeout=30)))
        assert status(ask(page, b"host: x")) == 401, "those that wait make room"
        held.close()
        bearer = b"authorization: Bearer " + TOKEN.encode()
        wait_for(lambda: status(ask(page, b"host: x", bearer)) == 200, "an answer afterwards")
    assert len(page.lines) == 1, page.lines[:5]


def test_a_token_opens_the_page_by_header_by_link_and_by_its_cookie(tmp_path: Path) -> None:
    token = TOKEN.encode()
    with served(tmp_path, token=TOKEN) as page:
        link = ask(page, b"host: miner.example", path=b"/?token=" + token)
        (cookie,) = re.findall(rb"set-cookie: (token=[^;]+); HttpOnly; SameSite=Strict", link)
        assert status(link) == 200 and token not in link.partition(b"\r\n\r\n")[2]
        for head in (b"cookie: " + cookie, b"authorization: Bearer " + token):
            assert status(ask(page, b"host: miner.example", head)) == 200
        assert status(ask(page, b"host: x", path=b"/?token=" + token[:-1])) == 401
        assert status(ask(page, b"host: x", b"cookie: " + cookie, method=b"POST")) == 405


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--host", "0.0.0.0"], "DT_PAGE_TOKEN"),
        (["--host", "miner.example"], "--host"),
        (["--port", "99999"], "--port"),
        ([__file__], "not a folder"),
        (["miner*"], "is not a folder, so nothing is served"),
    ],
)
def test_bad_page_arguments_are_one_line(
    tmp_path: Path, arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert served_page.main([str(tmp_path), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


@pytest.mark.parametrize("what", ["poll", "shown"])
def test_a_file_that_cannot_be_read_is_one_line_and_one_miner_less(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Each open page requests the data every two seconds, so one line must suffice."""
    neuron, other = NeuronState(tmp_path), NeuronState(tmp_path, name="other")
    monkeypatch.setattr(served_page, "_FRESH_SECONDS", 0.0)
    history = served_page.History([neuron, other])
    fault = OSError(errno.EIO, "Input/output error")
    faults: list[OSError | None] = [*[fault] * 5, None, fault]
    look = getattr(neuron, what)

    def fail() -> Any:
        if (found := faults.pop(0)) is not None:
            raise found
        return look()

    monkeypatch.setattr(neuron, what, fail)
    with caplog.at_level(logging.WARNING):
        shown = [len(json.loads(history.answer(""))["neurons"]) for _ in range(6)]
        assert len(caplog.records) == 1 and shown == [1, 1, 1, 1, 1, 2]
        history.answer("")
    assert len(caplog.records) == 2, "it was well in between"


def test_clients_and_their_time_are_bounded(tmp_path: Path) -> None:
    """Check only the limits; tests/faults/test_hostile_clients.py tests how they are kept."""
    connection: Any = served_page.server([NeuronState(tmp_path)]).config.http
    assert (connection.bounds.most, connection.bounds.patience) == (256, 10.0)


_BODIES = """
content-length: 5|content-length: 0|content-length: 05|content-length: +5|content-length: 5, 5|x: y
transfer-encoding: chunked|Transfer-Encoding: identity|TRANSFER-ENCODING:x|transfer-encoding : x
"""


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from([b"GET", b"HEAD", b"POST", b"PUT", b"OPTIONS", b"QUERY"]),
    st.lists(st.sampled_from(_BODIES.strip().replace("\n", "|").encode().split(b"|")), max_size=3),
)
@example(b"POST", [b"content-length: 5", b"transfer-encoding: chunked"])
def test_nothing_behind_a_request_with_a_body_is_answered(
    page: Page, method: bytes, more: list[bytes]
) -> None:
    """Otherwise, what one server takes for a body would be a request to another server."""
    own = b"host: 127.0.0.1:%d" % port(page)
    behind = b"0\r\n\r\nGET /metrics HTTP/1.1\r\n" + own + b"\r\nconnection: close\r\n\r\n"
    with closing(socket.create_connection(("127.0.0.1", port(page)), timeout=30)) as caller:
        answer = b""
        with contextlib.suppress(ConnectionError):
            head = [method + b" /history HTTP/1.1", own, *more]
            caller.sendall(b"\r\n".join([*head, b"", b""]) + behind)
            while part := caller.recv(65536):
                answer += part
    plain = method in (b"GET", b"HEAD") and all(
        line in (b"content-length: 0", b"x: y") for line in more
    )
    if not plain:
        assert answer.count(b"HTTP/1.1 ") <= 1 and status(answer) in (0, 400, 405, 411)


def test_a_defect_is_a_500_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    neuron = NeuronState(tmp_path)
    monkeypatch.setattr(neuron, "shown", lambda: {}["a key not there"])  # type: ignore[index]
    application: Any = served_page.application([neuron])

    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(application, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport) as client:
            return await client.get("http://127.0.0.1:8010/history")

    assert asyncio.run(answer()).status_code == 500
    (line,) = [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ]
    assert line.startswith("The page failed to answer '/history' (KeyError")


def test_a_second_page_of_a_folder_waits_for_the_end_of_the_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A separate page waits in the same way while the launcher serves its own."""
    lines: list[str] = []
    taken = listen("127.0.0.1", 0)
    address = taken.getsockname()[1]
    monkeypatch.setattr(served_page.time, "sleep", lambda _: taken.close())
    monkeypatch.setattr(
        served_page, "server", lambda *_, **__: SimpleNamespace(run=lambda **_: None)
    )
    monkeypatch.setattr(served_page.os, "nice", print)
    served_page.serve(
        [tmp_path], host="127.0.0.1", port=address, send_line=lambda text, level: lines.append(text)
    )
    waits, serves = lines
    assert serves == f"page: http://127.0.0.1:{address}/"
    assert "is in use (Address already in use)" in waits and "give another --neuron.page_" in waits


def test_the_page_of_a_miner_holds_no_secret_but_its_token(tmp_path: Path) -> None:
    own = {"DT_PAGE_TOKEN": TOKEN, "R2_WRITE_SECRET_ACCESS_KEY": "5ecret" * 8}
    (port,) = free_ports(1)
    words = [sys.executable, "-m", "distributed_training", "page", "--network", "local"]
    words += ["--neuron.page_port", str(port), "--neuron.run_folder", str(tmp_path / "later")]
    with subprocess.Popen(
        words, cwd=tmp_path, env={**os.environ, **own}, stdout=subprocess.PIPE, text=True
    ) as page:
        try:
            assert page.stdout is not None
            assert page.stdout.readline() == f"page: http://127.0.0.1:{port}/\n"
            held = Path(f"/proc/{page.pid}/environ").read_text()
            assert TOKEN in held and "5ecret" not in held
            url = f"http://127.0.0.1:{port}/history"
            assert httpx.get(url, timeout=60).status_code == 401
            told = httpx.get(url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=60)
            assert [one["name"] for one in told.json()["neurons"]] == ["later"]
        finally:
            page.terminate()


def test_a_stop_by_pm2_or_ctrl_c_leaves_no_traceback(tmp_path: Path) -> None:
    words = [sys.executable, "-m", served_page.__name__.removesuffix(".__main__"), "--port", "0"]
    pipe = subprocess.PIPE
    with subprocess.Popen([*words, str(tmp_path)], stdout=pipe, stderr=pipe, text=True) as page:
        assert page.stdout is not None
        url = page.stdout.readline().removeprefix("page: ").strip()
        assert httpx.get(url, timeout=60).status_code == 200, "uvicorn handles signals from here on"
        page.send_signal(signal.SIGINT)
        assert page.communicate(timeout=60) == ("", "") and page.returncode == 0


def test_a_disk_that_fails_at_its_start_is_a_line_and_another_try(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    lines: list[str] = []
    with PageProcess([tmp_path], told=lines.append):
        wait_for(lambda: len(lines) >= 2, "what it says")
    assert lines[0].startswith("the page cannot start ([Errno 21] Is a directory")
    assert "The page ended (it ended with status 1): starting it again in 1 s" in lines[1]


def test_the_metrics_come_from_the_ranks_and_their_launcher(tmp_path: Path) -> None:
    """While starts are refused, no rank writes metrics, but an alert needs the launcher's."""
    with served(tmp_path) as page:
        own = f"host: 127.0.0.1:{port(page)}".encode()
        (tmp_path / "launcher.prom").write_text("dt_starts_refused_in_a_row 7.0\n")
        answer = ask(page, own, path=b"/metrics")
        assert status(answer) == 200 and answer.endswith(b"dt_starts_refused_in_a_row 7.0\n")
        (tmp_path / "metrics.prom").write_text("dt_dht_peers 3.0\n")
        stopped = Launch(state="stopped", at=time.time())
        (tmp_path / LAUNCHER_FILE).write_text(json.dumps(asdict(stopped)))
        answer = ask(page, own, path=b"/metrics")
        assert b"dt_launcher_running 0.0\n" in answer
        assert b"dt_dht_peers 3.0\ndt_starts_refused_in_a_row 7.0\n" in answer
