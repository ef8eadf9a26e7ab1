"""Test how often a peer without a group asks the DHT for others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from distributed_training.swarm import averager_process

pytestmark = pytest.mark.timeout(60)


def test_a_peer_asks_less_and_less_often_until_it_declares_itself_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += max(0.0, seconds)

    class Node:
        peer_id = "12D"
        asked: list[float] = []

        async def get(self, key: str, *, latest: bool) -> None:
            self.asked.append(now)

        async def store(self, *about: Any, **more: Any) -> bool:
            return True

    monkeypatch.setattr(averager_process, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(averager_process, "asyncio", SimpleNamespace(sleep=sleep))
    node: Any = Node()
    dht = averager_process._Dht(node)

    async def search(lookups: int) -> list[float]:
        """Seconds between the lookups that follow a declaration."""
        await dht.store(
            key="k", subkey=b"p", value=True, expiration_time=now + 9, return_future=True
        )
        node.asked.clear()
        for _ in range(lookups):
            await dht.get("k", latest=True, return_future=True)
        return [b - a for a, b in zip(node.asked, node.asked[1:], strict=False)]

    first = asyncio.run(search(8))
    assert node.asked[0] == 100.0, "the first search begins at once"
    waits = [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    for found, longest in zip([*first, *asyncio.run(search(4))], [*waits, *waits[:3]], strict=True):
        assert longest / 2 <= found + 1e-9 and found <= longest + 1e-9
