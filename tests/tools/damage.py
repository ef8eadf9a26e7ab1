"""Strategies for files as a crash, a bad disk or an outsider leaves them."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["/", "../..", "x" * 5000, "x\x00", 2**53, -1, 10**400, "9" * 400]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@st.composite
def damage(draw: st.DrawFn, honest: bytes) -> bytes:
    """An honest file cut, with bytes changed, or with a stretch of it somewhere else."""
    data = bytearray(honest)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["cut", "change", "insert", "copy"])):
            case "cut":
                del data[at : at + draw(st.integers(1, len(data) + 1))]
            case "change":
                new = draw(st.binary(min_size=1, max_size=8))
                data[at : at + len(new)] = new
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=8))
            case "copy":
                first = draw(st.integers(0, len(data)))
                data[at:at] = data[first : first + draw(st.integers(1, 200))]
    return bytes(data)


@st.composite
def other_values(draw: st.DrawFn, honest: bytes) -> bytes:
    """An honest JSON file in which some fields, however deep, hold other values."""
    content = json.loads(honest)
    for _ in range(draw(st.integers(1, 3))):
        place: Any = content
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(place[key], (dict, list)) and draw(st.booleans()):
                place = place[key]
                continue
            place[key] = draw(values)
            break
    return json.dumps(content).encode()
