"""A very short arena: every part of it runs, and the uploads are scored."""

from __future__ import annotations

from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from bench.arena import one_seed
from bench.arena_field import OURS, PUBLIC

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


def test_an_arena_of_two_miners_and_two_short_outer_steps() -> None:
    options = Namespace(topk=32, blocks=100, miners=2, outer_steps=2)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        found = pool.submit(one_seed, 5, options).result()
    assert list(found) == [PUBLIC, OURS]
    counts = {name: {len(looks) for looks in by_uid.values()} for name, by_uid in found.items()}
    assert len(set.union(*counts.values())) == 1, "each is looked at as often as the others"
    for by_uid in found.values():
        assert len(by_uid) == 2
        assert any(look.scored for looks in by_uid.values() for look in looks)
    ours = [look for looks in found[OURS].values() for look in looks if look.scored]
    assert any(" x1.00" not in look.said for look in ours), "a length was searched"
    public = [look for looks in found[PUBLIC].values() for look in looks if look.scored]
    assert {look.said for look in public} == {"upload x1.00"}
