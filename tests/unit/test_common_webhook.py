from __future__ import annotations

import json
import string
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from distributed_training.common import webhook
from distributed_training.common.webhook import Message, NotSent, build_request, check_url, send
from distributed_training.config import ConfigError
from tests.tools.settings import load_config
from tests.tools.webhooks import PATHS, Webhooks, judge, webhooks

pytestmark = pytest.mark.timeout(60)

REAL = {
    "ntfy": ["https://ntfy.sh/topic", "https://ntfy.example.org/topic"],
    "Slack": ["https://hooks.slack.com/services/T0/B0/x"],
    "Discord": ["https://discord.com/api/webhooks/1/x", "https://discordapp.com/api/v10/webhooks/1/x",
                "https://ptb.discord.com/api/webhooks/1/x"],
    "Telegram": ["https://api.telegram.org/bot1:x/sendMessage?chat_id=-5"],
    "JSON": ["https://example.org/hook", "https://hooks.slack.com.example.org/services/x",
             "https://notdiscord.com/api/webhooks/1/x"],
}  # fmt: skip


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Webhooks]:
    with webhooks(monkeypatch) as served:
        yield served


@pytest.mark.parametrize("service", REAL)
def test_a_service_is_known_by_its_url(service: str) -> None:
    for url in REAL[service]:
        check_url(url)
        assert webhook.service_of(url) == service


@pytest.mark.parametrize(
    "url",
    ["http://ntfy.sh/topic", "nonsense", "https://", "https://u:p@ntfy.sh/x", "ftp://127.0.0.1/x",
     "http://127.0.0.1:nonsense/", "https://ntfy.sh/", "http://169.254.169.254/x",
     "https://api.telegram.org/bot1:sesame/sendMessage", "https://[::1"],
)  # fmt: skip
def test_a_url_that_cannot_be_used_is_one_line_without_it(url: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config("miner", [], environ={"DT_NOTIFY_URL": url}, dotenv=None, check=False)
    line = str(refusal.value)
    assert "DT_NOTIFY_URL: its value is not" in line and "\n" not in line
    assert "sesame" not in line and "nonsense" not in line


@settings(max_examples=50, deadline=None)
@given(
    service=st.sampled_from(list(PATHS)),
    text=st.text(min_size=1, max_size=9).filter(str.strip),
    times=st.sampled_from([1, 300]),
    title=st.text(max_size=9),
)
def test_each_service_takes_any_text(service: str, text: str, times: int, title: str) -> None:
    url = REAL[service][0].replace("-5", "-100123").replace("/topic", "/my-topic")
    place, body, headers = build_request(url, Message(title, text * times))
    shown = headers.get("title", "")
    assert shown.isprintable()
    path = "/my-topic" if service == "ntfy" else "/x"
    status, _, seen = judge(service, path, headers.get("content-type", ""), body, shown)
    assert 200 <= status < 300 and seen, (status, body)
    assert "?" not in place


@pytest.mark.parametrize("service", PATHS)
def test_a_message_comes_to_each_service(service: str, world: Webhooks) -> None:
    send(SecretStr(world.url(service)), Message("miner-ä", "Stopped: <b> & @everyone", bad=True))
    ((found, text),) = world.taken
    assert found == service and "Stopped" in text


@pytest.mark.parametrize(
    ("manner", "words"),
    [("hang", "has not answered within"), ("drip", "has not answered within"),
     ("elsewhere", "leads elsewhere (status 302), which is not followed"), (500, "status 500"),
     (404, "status 404"), ("nonsense", "is not reached (RemoteProtocolError)")],
)  # fmt: skip
def test_a_service_that_takes_none_is_one_line_in_time(
    manner: str | int, words: str, world: Webhooks
) -> None:
    world.manner = manner
    began = time.monotonic()
    with pytest.raises(NotSent) as refusal:
        send(SecretStr(world.url("JSON")), Message("a", "b"), seconds=1.0)
    assert time.monotonic() - began < 5
    assert words in str(refusal.value) and "secretsecret" not in repr(refusal.value)
    assert world.asked == 1 and refusal.value.wait is None
    assert refusal.value.__cause__ is None
    assert refusal.value.silent == (manner in ("hang", "drip"))


def test_a_silent_name_server_holds_neither_a_message_nor_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over, before = threading.Event(), {*threading.enumerate()}
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **named: over.wait(20) and [])
    began = time.monotonic()
    with pytest.raises(NotSent, match="is not reached") as refusal:
        send(SecretStr("https://example.org/hook"), Message("a", "b"), seconds=0.5)
    assert time.monotonic() - began < 5 and not refusal.value.silent
    (left,) = {*threading.enumerate()} - before
    assert left.daemon  # others are waited for when a program ends
    over.set()
    left.join()


def test_answer_after_a_taken_message_is_not_waited_for(world: Webhooks) -> None:
    world.manner, world.body = 200, bytes(2**20)
    send(SecretStr(world.url("JSON")), Message("a", "b"))
    world.manner = 500
    with pytest.raises(NotSent, match="status 500"):
        send(SecretStr(world.url("JSON")), Message("a", "b"))


def test_a_forums_topic_goes_to_telegram_too() -> None:
    url = f"{REAL['Telegram'][0]}&message_thread_id=7"
    place, body, _ = build_request(url, Message("a", "b"))
    content = json.loads(body)
    assert (content["chat_id"], content["message_thread_id"]) == ("-5", "7") and "?" not in place


@pytest.mark.parametrize(
    ("extra", "body", "wait"),
    [({"retry-after": "7"}, b"", 7.0), ({}, b'{"retry_after": 0.5}', 0.5),
     ({}, b'{"ok":false,"parameters":{"retry_after":30}}', 30.0),
     ({"retry-after": "1e9"}, b"", 86400.0),
     ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, b"", None), ({}, b"[1]", None),
     ({}, b'{"retry_after": 1' + b"0" * 400 + b"}", None),
     ({"retry-after": "nan"}, b"", None), ({}, b'{"parameters": 3}', None)],
)  # fmt: skip
def test_the_wait_that_a_service_asks_for_is_read(
    extra: dict[str, str], body: bytes, wait: float | None, world: Webhooks
) -> None:
    world.manner, world.extra, world.body = 429, extra, body
    with pytest.raises(NotSent) as refusal:
        send(SecretStr(world.url("Slack")), Message("a", "b"))
    assert refusal.value.wait == wait


_ANSWERS = st.recursive(
    st.none() | st.floats() | st.just(10**400) | st.text(max_size=5),
    lambda part: st.dictionaries(st.sampled_from(["retry_after", "parameters"]), part),
    max_leaves=3,
)


@settings(max_examples=100, deadline=None)
@given(
    content=st.binary(max_size=9) | _ANSWERS.map(lambda value: json.dumps(value).encode()),
    header=st.none() | st.text(string.printable, max_size=9),
)
def test_no_answer_of_a_service_raises(content: bytes, header: str | None) -> None:
    wait = webhook._wait(header, content)
    assert wait is None or 0 <= wait <= 86400
