"""Test the canonical form and the signature of state and manifests, and which files are refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from bittensor.sp_core import Keypair
from bittensor_core import verify
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from distributed_training.protocol.manifest import Manifest, Master, Merged, Refused, State

pytestmark = pytest.mark.timeout(120)

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "chain.json").read_text())
MASTER, RUN = VECTORS["master"], VECTORS["run_id"]
GENESIS, MANIFEST, STATE = (file["text"].encode() for file in VECTORS["files"])
OTHER = Keypair.create_from_uri("//Bob").ss58_address
HOTKEY, DIGEST = "5" * 48, "a" * 64


def believe(message: bytes, signature: bytes, hotkey: str) -> bool:
    return True


def parse(kind: type[State] | type[Manifest], data: bytes, check: Any = believe) -> Any:
    return kind.parse(data, Master(RUN, MASTER, check))


def test_golden_files_are_read_and_have_the_digests_of_their_canonical_form() -> None:
    kinds = (Manifest, Manifest, State)
    parsed = [
        parse(kind, f["text"].encode(), verify)
        for kind, f in zip(kinds, VECTORS["files"], strict=True)
    ]
    assert [each.digest for each in parsed] == [file["digest"] for file in VECTORS["files"]]
    genesis, manifest, state = parsed
    manifest.check_after(genesis)
    assert state.head == manifest.digest
    assert manifest.merged[0] == Merged(
        2, MASTER, "8" * 64, norm=1.5e-5, factor=0.5, improvement=1e-3, inner_steps=30, tokens=61440
    )
    # Only the digest is signed, so writing the same content again changes only the signature.
    signature = bytes.fromhex(json.loads(MANIFEST)["signature"][2:])
    assert manifest.to_bytes(lambda message: signature) == MANIFEST


def test_a_digest_does_not_depend_on_the_signature() -> None:
    state = parse(State, STATE)
    again = state.to_bytes(lambda message: b"s" * 64)
    assert again != STATE and parse(State, again).digest == state.digest


@pytest.mark.parametrize("kind, data", [(Manifest, MANIFEST), (State, STATE)])
def test_each_flipped_byte_is_refused(kind: type[State] | type[Manifest], data: bytes) -> None:
    signed: list[tuple[bytes, bytes]] = []

    def record(message: bytes, signature: bytes, hotkey: str) -> bool:
        signed.append((message, signature))
        return True

    def signed_so(message: bytes, signature: bytes, hotkey: str) -> bool:
        # Answer like sr25519, without the time that it takes.
        return (message, signature) in signed

    parse(kind, data, record)
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1
        with pytest.raises(ValueError):
            parse(kind, bytes(flipped), signed_so)


#: Values that fields refuse: of another type, out of bounds, too long, or not finite.
WRONG: list[str] = [
    "null", "true", "-1", "1e999", "NaN", "[]", "{}", '"\\u0000"', f'"{"x" * 5000}"', "9" * 4000,
    "[" * 300, '{"a":{"b":1}}', "1e30", "[[]]", '"0x"', '"A"', '"caf\\u00e9"', "0.5", '[{"uid":1}]',
]  # fmt: skip
#: Values of that list that some fields accept.
RIGHT = {
    "finished": ("null", '"A"', '"0x"'),
    "rewound_to": ("null",),
    **dict.fromkeys(("grace", "closes_at", "written_at", "expires", "closed_at"), ("0.5",)),
    **dict.fromkeys(("learning_rate", "mu", "made_at"), ("0.5",)),
    **dict.fromkeys(("rule", "run_id", "rules_id"), ('"A"', '"0x"')),
    **dict.fromkeys(("weights_at", "merged", "refused"), ("[]",)),
    **dict.fromkeys(("files", "losses_before", "losses_after", "scores"), ("{}",)),
}


@pytest.mark.parametrize("kind, data", [(Manifest, MANIFEST), (State, STATE)])
def test_a_wrong_value_of_any_field_is_refused_in_one_line(
    kind: type[State] | type[Manifest], data: bytes
) -> None:
    content = json.loads(data)
    for name in (field.name for field in dataclasses.fields(kind) if field.name in content):
        value = json.dumps(content[name], separators=(",", ":"))
        for wrong in WRONG:
            if wrong in RIGHT.get(name, ()):
                continue
            altered = data.replace(f'"{name}":{value}'.encode(), f'"{name}":{wrong}'.encode())
            assert altered != data
            with pytest.raises(ValueError) as refusal:
                parse(kind, altered)
            assert len(str(refusal.value)) < 300 and "\n" not in str(refusal.value), (name, wrong)


@pytest.mark.parametrize("part", ["merged", "refused"])
def test_a_wrong_value_inside_a_list_is_refused(part: str) -> None:
    content = json.loads(MANIFEST)
    for name in content[part][0]:
        values: list[Any] = [None, True, -1e30, "\x00", [], "x" * 5000]
        for wrong in values:
            altered = json.loads(MANIFEST)
            altered[part][0][name] = wrong
            signature = altered.pop("signature")
            form = json.dumps(altered, sort_keys=True, separators=(",", ":"))
            with pytest.raises(ValueError):
                parse(Manifest, f'{form[:-1]},"signature":"{signature}"}}'.encode())


@pytest.mark.parametrize(
    "old, new, why",
    [
        (b'"grace":30.0', b'"grace":30', "canonical"),
        (b'"grace":30.0', b'"grace": 30.0', "canonical"),
        (b'"grace":30.0', b'"grace":30.0,"grace":30.0', "canonical"),
        (b'"grace":30.0', b'"gracf":30.0', "refused"),
        (b'"grace":30.0', b'"grace":30.0,"later":1', "canonical"),
        (b'"finished":null,', b"", "canonical"),
        (b'"run_id":"0', b'"run_id":"1', "another network"),
        (b'"}', b'"} ', "signature"),
        (b"0x", b"0X", "signature"),
        (b"{", b" {", "canonical"),
        (b'"weights_at":[0]', b'"weights_at":[1,0]', "ascend"),
        (b'"weights_at":[0]', b'"weights_at":[2]', "to come"),
    ],
)
def test_other_forms_are_refused(old: bytes, new: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse(State, STATE.replace(old, new, 1))


def test_a_file_beyond_its_bound_is_not_parsed() -> None:
    with pytest.raises(ValueError, match="above the bound"):
        parse(State, STATE.replace(b"{", b"{" + b" " * State.most_bytes, 1))


def test_another_signer_is_refused() -> None:
    with pytest.raises(ValueError, match="not signed by the network's master"):
        State.parse(STATE, Master(RUN, OTHER, verify))
    # A signature for a manifest is not valid for a state.
    state = parse(State, STATE)
    signed = state.to_bytes(lambda message: message.ljust(64)[:64])
    assert bytes.fromhex(json.loads(signed)["signature"][2:]).startswith(b"state.json 1 ")


def test_a_state_that_no_gate_refused_is_the_one_of_programs_without_a_gate() -> None:
    old = STATE.replace(b'"gate":2,', b"")
    state = parse(State, old)
    assert state.gate == 0
    assert state.to_bytes(lambda message: bytes.fromhex(json.loads(old)["signature"][2:])) == old
    with pytest.raises(ValueError, match="canonical"):
        parse(State, STATE.replace(b'"gate":2', b'"gate":0'))


def states(**changes: Any) -> State:
    return dataclasses.replace(parse(State, STATE), **changes)


def test_a_state_follows_another() -> None:
    state = states()
    state.check_after(state)
    states(serial=3, closes_at=state.closes_at + 60).check_after(state)
    states(serial=3, outer_step=2, head=DIGEST).check_after(state)
    states(written_at=state.written_at + 60).check_after(state)


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"serial": 1}, "older"),
        ({"serial": 9, "outer_step": 0, "weights_at": ()}, "older"),
        ({"serial": 9, "head": DIGEST}, "another history"),
        ({"head": DIGEST}, "another history"),
        ({"closes_at": 1.0}, "two closes"),
        ({"outer_step": 2, "head": DIGEST}, "two closes"),
    ],
)
def test_an_older_state_and_a_forked_head_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        states(**changes).check_after(states())


def manifests(**changes: Any) -> Manifest:
    return dataclasses.replace(parse(Manifest, MANIFEST), **changes)


@pytest.mark.parametrize(
    "changes, why",
    [({"outer_step": 2}, "instead of"), ({"previous": DIGEST}, "another history")],
)
def test_a_manifest_that_does_not_follow_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        manifests(**changes).check_after(parse(Manifest, GENESIS))


@pytest.mark.parametrize(
    "changes",
    [
        {"update": ""},
        {"previous": ""},
        {"merged": ()},
        {"rewound_to": 0},
        {"rewound_to": 1, "update": "", "merged": ()},
        {"merged": tuple(reversed(parse(Manifest, MANIFEST).merged))},
        {"losses_after": {"x": float("nan")}},
        {"recovered": 1},  # it names a previous manifest, which a chain's first outer step must not
        {"recovered": 1, "previous": ""},  # it does not name the outer step whose weights it has
        {"recovered": 2, "previous": "", "rewound_to": 0, "update": "", "merged": ()},
    ],
)
def test_the_master_cannot_write_a_contradiction(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        manifests(**changes)
    manifests(rewound_to=0, update="", merged=())
    recovery = manifests(recovered=1, previous="", rewound_to=0, update="", merged=())
    assert parse(Manifest, recovery.to_bytes(lambda message: b"s" * 64)) == recovery
    # No manifest of the abandoned chain follows a recovery, nor the other way round.
    with pytest.raises(ValueError, match="first outer step of the chain"):
        manifests(outer_step=2, previous=recovery.digest).check_after(recovery)


names = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=300)
uids = st.integers(0, 4095)
figures = st.floats(0, 1e18, allow_nan=False)
counts = st.integers(0, 10**18)


@settings(max_examples=40)
@given(
    losses=st.dictionaries(names.filter(bool).map(lambda n: n[:100]), figures, max_size=16),
    scores=st.dictionaries(uids, figures),
    refused=st.lists(
        st.builds(Refused, uids, st.just(HOTKEY), st.just(DIGEST), st.just("a"), names)
    ),
    merged=st.lists(
        st.builds(
            Merged,
            *(uids, st.just(HOTKEY), st.just(DIGEST), st.floats(1e-18, 1e18)),
            *(st.floats(2.0**-99, 1, width=32), st.floats(-1e18, 1e18), counts, counts),
        ),
        min_size=1,
        unique_by=lambda each: each.uid,
    ),
)
def test_written_manifest_is_read_again(
    losses: dict[str, float], scores: dict[int, float], refused: list[Refused], merged: list[Merged]
) -> None:
    manifest = manifests(
        losses_before=losses,
        scores=scores,
        refused=tuple(refused),
        merged=tuple(sorted(merged, key=lambda each: each.uid)),
    )
    data = manifest.to_bytes(lambda message: b"s" * 64)
    assert parse(Manifest, data) == manifest
    content = json.loads(data)
    assert bytes.fromhex(content.pop("signature")[2:]) == b"s" * 64
    # The canonical form as another program would make it.
    form = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    assert form == manifest.canonical
