"""Check that a bug of ours is not reported as an outage, and that errors keep their own words."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import httpx
import pytest

from distributed_training.chain.base import ChainError
from distributed_training.chain.registry import RegistryAnswer, RegistryChain
from tests.tools.chain_server_thread import RegistryServer
from tests.tools.chain_world import VALIDATOR, registry_at
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[RegistryChain]:
    with RegistryServer(tmp_path) as server:
        made = registry_at(server.url, VALIDATOR, poll_interval=timedelta(milliseconds=50))
        assert made.wait_ready(timedelta(seconds=20))
        yield made
        made.close()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        *((kind("a bug"), None) for kind in (RuntimeError, ValueError, TypeError, KeyError)),
        (RuntimeError("can't start new thread"), "no thread left to ask with"),
        (httpx.ConnectError("name or service not known"), "ConnectError: name or service not"),
        (httpx.ReadTimeout("nothing for 10 s"), "ReadTimeout: nothing for 10 s"),
        (httpx.RemoteProtocolError("peer closed\nsecond"), "RemoteProtocolError: peer closed at"),
        (httpx.ReadError(""), "ReadError at"),
        (UnicodeError("label too long"), "UnicodeError: label too long"),
    ],
    ids=repr,
)
def test_an_outage_keeps_its_words_and_an_error_of_our_own_code_is_raised_as_it_is(
    chain: RegistryChain, error: Exception, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(path: str, body: bytes | None) -> RegistryAnswer:
        raise error

    monkeypatch.setattr(chain, "_exchange", fails)
    for call in (chain.register, lambda: chain.file("health")):
        with pytest.raises(ChainError if words else type(error), match=words or "a bug") as caught:
            call()
        assert isinstance(caught.value, ChainError) == bool(words)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("status", [200, 400, 500])
@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"3", b"{}", b"\xff", b"[" * 100_000])
def test_a_foreign_answer_is_an_outage(
    chain: RegistryChain, body: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answers(path: str, content: bytes | None) -> RegistryAnswer:
        return RegistryAnswer(status, {}, body)

    monkeypatch.setattr(chain, "_exchange", answers)
    with pytest.raises(ChainError, match=rf"register: its answer \(status {status}\) is not"):
        chain.register()


def test_a_fault_of_this_program_does_not_end_the_thread_that_asks(
    chain: RegistryChain, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(path: str, body: bytes | None) -> RegistryAnswer:
        raise RuntimeError("a bug")

    monkeypatch.setattr(chain, "_exchange", fails)
    wait_for(lambda: chain.trouble == "RuntimeError: a bug")
    assert "could not be asked, by a fault of this program (RuntimeError: a bug)" in caplog.text
    monkeypatch.undo()
    wait_for(lambda: not chain.trouble)
