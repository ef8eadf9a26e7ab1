"""Recorded requests of both schemes against the server, over HTTP."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import httpx
import pytest

from tests.tools.chain_vectors import FILE
from tests.tools.chain_world import SETTINGS, World, world

pytestmark = pytest.mark.timeout(60)
REQUESTS = json.loads(FILE.read_text())


def send(made: World, recorded: dict) -> httpx.Response:
    made.offset = recorded["now"] - time.time_ns()
    # verify=False: no TLS here, and loading certificates takes longer than the call.
    return httpx.post(
        made.url + recorded["path"],
        content=recorded["body"].encode(),
        headers=recorded["headers"],
        trust_env=False,
        verify=False,
    )


@pytest.mark.parametrize("recorded", REQUESTS, ids=lambda r: f"{r['scheme']}: {r['name']}")
def test_recorded_requests(recorded) -> None:
    with world() as made:
        reply = send(made, recorded)
        assert reply.status_code == recorded["status"], reply.text
        calls = recorded["status"] == 200 and recorded["path"] == "/AllReduce"
        assert len(made.events) == calls
        if recorded["reason"]:
            assert reply.json().keys() - {"proof"} == {"message"}
            assert made.refused(recorded["reason"]) == 1
            return
        again = send(made, recorded)
        assert again.status_code == 401 and made.refused("replay") == 1
        assert len(made.events) == calls


@pytest.mark.parametrize("scheme", ["btauth", "legacy"])
def test_a_recorded_request_of_a_scheme_that_is_off(scheme: str) -> None:
    other = {"btauth": "legacy", "legacy": "btauth"}[scheme]
    recorded = next(r for r in REQUESTS if r["scheme"] == scheme)
    with world(replace(SETTINGS, auth_schemes=(other,))) as made:
        assert send(made, recorded).status_code == 401
        assert made.refused("unsigned") == 1 and made.events == []
