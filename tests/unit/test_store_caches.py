"""Check that a cached answer never counts as the present time, nor a cached state as new."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from botocore.awsrequest import AWSResponse
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr
from urllib3 import HTTPResponse

from distributed_training.common.http import answered_at
from distributed_training.config import load_config
from distributed_training.config.settings import StoreSettings
from distributed_training.exchange.base import Close
from distributed_training.health.machine import Examination
from distributed_training.health.outside import check_clock
from distributed_training.protocol import keys
from distributed_training.store.base import ObjectInfo
from distributed_training.store.presigned import AccessStore
from distributed_training.store.s3 import AccessKeys, S3ObjectStore
from tests.tools.memory_store import MemoryObjectStore
from tests.tools.store_network import FaultyStore, Leader, Miner, Time

ORIGIN = 1_790_000_000.0


def _date(at: float) -> str:
    return format_datetime(datetime.fromtimestamp(int(at), UTC), usegmt=True)


# --- Date + Age ---


AGES = st.integers(0, 10**9 - 1).map(str)
NO_AGES = st.text() | st.sampled_from(["-5", "1.5", "9" * 40, " 7", "٣", "1, 2", ""])


@given(AGES | NO_AGES, st.floats(0, 2**31), st.booleans())
def test_the_origins_time_does_not_stand_still_in_a_cache(
    age: str, at: float, as_httpx: bool
) -> None:
    headers: Any = {"date": _date(at), "age": age}
    plain = age.isascii() and age.isdigit() and len(age) < 10
    if as_httpx and plain:
        headers = httpx.Headers({"Date": headers["date"], "Age": age})
    assert answered_at(headers) == (int(at) + (int(age) if plain else 0), True)
    del headers["age"]
    assert answered_at(headers) == (int(at), False)


@given(st.text(max_size=60))
def test_a_date_that_is_none_raises_what_callers_expect(text: str) -> None:
    with contextlib.suppress(ValueError, OverflowError):
        answered_at({"date": text})
    with pytest.raises(KeyError):
        answered_at({"age": "5"})


# --- the store ---


def _requests(store: S3ObjectStore) -> list[Any]:
    """Return a list that receives each request instead of the network."""
    sent = list[Any]()

    def send(request: Any, **_: Any) -> Any:
        sent.append(request)

        headers = {
            "Date": _date(ORIGIN),
            "Age": "55",
            "Last-Modified": _date(ORIGIN - 10),
            "Content-Length": "0",
            "ETag": '"d41d8cd98f00b204e9800998ecf8427e"',
        }
        return AWSResponse(
            request.url, 200, headers, HTTPResponse(io.BytesIO(), preload_content=False)
        )

    store._client.meta.events.register("before-send.s3", send)
    return sent


def _settings(**more: Any) -> StoreSettings:
    return StoreSettings(endpoint_url="http://127.0.0.1:1", region="us-east-1", **more)


def test_the_age_of_an_object_counts_the_seconds_in_a_cache() -> None:
    store = AccessStore(
        lambda request: None, bucket="net", settings=_settings(public_url="http://127.0.0.1:1/net")
    )
    sent = _requests(store)
    info = store.head(keys.STATE)
    assert info is not None and info.cached and info.age_seconds == 65
    for key in (keys.STATE, keys.NETWORK, "outer/7/update.safetensors"):
        store.get(key, limit=10)
        store.get_range(key, 0, 1)
        store.head(key)
    asked = [(r.url.rpartition("/net/")[2], r.headers.get("cache-control")) for r in sent]
    assert {key for key, how in asked if how in ("no-cache", b"no-cache")} == {
        keys.STATE,
        keys.NETWORK,
    }
    assert {key for key, how in asked if how is None} == {"outer/7/update.safetensors"}


@pytest.mark.parametrize(
    ("key", "how"),
    [
        (keys.STATE, b"no-store"),
        ("outer/7/update.safetensors", b"public, max-age=86400, immutable"),
        (keys.upload_key(3, 7, 8), None),
        ("epoch-3/gradients.pt", None),
    ],
)
def test_objects_say_how_long_a_cache_may_keep_them(key: str, how: bytes | None) -> None:
    owner = S3ObjectStore(
        bucket="net",
        endpoint_url="http://127.0.0.1:1",
        keys=AccessKeys(SecretStr("id"), SecretStr("secret")),
        settings=_settings(),
    )
    sent = _requests(owner)
    owner.put(key, b"")
    (request,) = sent
    found = request.headers.get("Cache-Control")
    assert (found.encode() if isinstance(found, str) else found) == how


# --- who goes by it ---


@pytest.mark.parametrize("cached", [False, True])
def test_a_member_behind_a_cache_goes_by_the_right_time_without_a_line(
    tmp_path: Path, cached: bool, caplog: pytest.LogCaptureFixture
) -> None:
    time = Time()
    store = FaultyStore(MemoryObjectStore(clock=time.store), time)
    leader, miner = Leader(store, time), Miner(store, tmp_path, time)

    def some_seconds_late(info: ObjectInfo) -> ObjectInfo:
        assert info.age_seconds is not None
        return dataclasses.replace(info, age_seconds=info.age_seconds - 5, cached=cached)

    store.faults["head", keys.STATE] = some_seconds_late
    facts = miner.pass_time(leader.closes_at - time.store() + 30)
    assert [fact for fact in facts if isinstance(fact, Close)] == [leader.close]
    assert ("This machine's clock is" in caplog.text) == (not cached)


def test_the_doctor_measures_no_clock_by_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(
        "miner", ["--r2.endpoint_url", "http://127.0.0.1:9", "--network", "local"], check=False
    )
    headers = {"date": _date(ORIGIN), "age": "0"}
    monkeypatch.setattr(
        httpx.Client, "head", lambda self, url: httpx.Response(200, headers=headers)
    )
    (check,) = check_clock(Examination(config, ranks=1))
    assert check.status == "skip" and "a cache in front of the store" in check.finding
