"""Sign and check the chain of a store network: its state and its manifests (section 5).

``state.json`` says which outer step all members train from, when the uploads for it are taken, and
which manifest is the head. ``outer/N/manifest.json`` says how the epoch-start weights of outer step
N were computed, and names the previous manifest by its digest. A reader that remembers the head
notices if the history was replaced. Outer step 0 has a manifest too, without a previous one. To
return to the weights of an earlier outer step, a network takes one more outer step, whose manifest
has ``rewound_to`` and no update: outer steps and serials only grow. After a store has lost objects,
or was restored from a backup, a recovery begins a new chain, without a previous manifest, at an
outer step above all that any peer can have seen. So an old recovery means nothing to a reader that
knows a later state.

Each file is one JSON object, signed by the network's master. What is signed is the digest of its
canonical form without the signature; other files name it by this digest. Such a file comes from a
store that may contain anything, so its size, form, values and signature are checked, in this order.
An object with values out of bounds cannot be created either: the constructor raises ValueError. All
texts are printable ASCII (:func:`~.network_report.printable`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as checked

from distributed_training.common.files import adapter_of

from . import keys
from .network_report import MOST_DOMAINS, printable
from .types import Sign, Verify

_FORMAT = 1
_SIGNATURE = re.compile(rb',"signature":"0x([0-9a-f]{128})"}')
_SIGNATURE_BYTES = 146
_LONGEST_SHOWN = 200  # characters of an error's text that are shown

Uid = Annotated[int, Field(ge=0, lt=4096)]
Whole = Annotated[int, Field(ge=0, le=10**18)]
OuterStep = Annotated[int, Field(ge=0, lt=10**9)]
Number = Annotated[float, Field(ge=-1e18, le=1e18)]  # refuses NaN too
Figure = Annotated[float, Field(ge=0.0, le=1e18)]
Seconds = Annotated[float, Field(ge=0.0, le=1e12)]  # a time since 1970, or a duration
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # SHA-256
# A digest, or empty if there is nothing.
SomeDigest = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
RunId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,64}$")]
Hotkey = Annotated[str, Field(pattern=r"^[1-9A-HJ-NP-Za-km-z]{32,64}$")]
Word = Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,40}$")]
Text = Annotated[str, Field(pattern=r"^[ -~]{0,300}$")]
Losses = Annotated[
    Mapping[Annotated[str, Field(pattern=r"^[ -~]{1,100}$")], Figure],
    Field(max_length=MOST_DOMAINS),
]


@dataclass(frozen=True)
class Master:
    """The hotkey (ss58) that signs a network's files; ``run_id`` is the network's run."""

    run_id: str
    hotkey: str
    verify: Verify


def _message(name: str, form: bytes) -> bytes:
    return f"{name} {_FORMAT} {hashlib.sha256(form).hexdigest()}".encode()


def sign_form(name: str, form: bytes, sign: Sign) -> bytes:
    """Return the JSON object ``form``, signed under ``name``, with the signature as last key."""
    return form[:-1] + f',"signature":"0x{sign(_message(name, form)).hex()}"}}'.encode()


def split_form(name: str, data: bytes) -> tuple[bytes, bytes]:
    """Return the form that :func:`sign_form` signed, and the signature. Raises ValueError."""
    signature = _SIGNATURE.fullmatch(data[-_SIGNATURE_BYTES:])
    if signature is None:
        raise ValueError(f"{name} does not end with a signature")
    return data[:-_SIGNATURE_BYTES] + b"}", bytes.fromhex(signature[1].decode())


def is_signed(name: str, data: bytes, master: Master) -> bool:
    """Return whether ``data`` is an object that the master has signed under ``name``."""
    try:
        form, signature = split_form(name, data)
        return master.verify(_message(name, form), signature, master.hotkey)
    except ValueError:
        return False


class _Signed:
    """The canonical form and the signature, which state and manifest have in common."""

    name: ClassVar[str]
    most_bytes: ClassVar[int]
    run_id: str

    @property
    def canonical(self) -> bytes:
        """JSON with sorted keys, without white space, in ASCII, like a network's file."""
        # The round trip through JSON turns numeric keys into text; otherwise they would be sorted
        # as numbers.
        content = json.loads(json.dumps(asdict(self), allow_nan=False))  # type: ignore[call-overload]
        # Leave out keys that were added later while they have their default value, so that older
        # programs accept the file.
        for later in ("gate", "recovered", "averaging", "libraries"):
            if content.get(later) in (0, None):
                content.pop(later, None)
        for each in content.get("merged", ()):
            if each["chance"] is None:  # an older manifest would have another digest with this key
                del each["chance"]
            if each["share"] == 1.0:
                del each["share"]
        return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical form, in hex."""
        return hashlib.sha256(self.canonical).hexdigest()

    def to_bytes(self, sign: Sign) -> bytes:
        """Return the file: the canonical form, and the master's signature as its last key."""
        return sign_form(self.name, self.canonical, sign)

    @classmethod
    def parse(cls, data: bytes, master: Master) -> Self:
        """Read a file that ``master`` has signed.

        Raises ValueError, one line with the cause, for anything else.
        """
        if len(data) > cls.most_bytes:
            raise ValueError(f"{cls.name} has {len(data)} bytes, above the bound {cls.most_bytes}")
        form, signed = split_form(cls.name, data)
        try:
            content: Self = adapter_of(cls).validate_json(form, strict=True)  # type: ignore[arg-type]
        except ValidationError as refusal:
            wrong = refusal.errors(include_url=False, include_input=False)[0]
            why = wrong["msg"].removeprefix("Value error, ")
            what = f"{'.'.join(map(str, wrong['loc']))}: {why}".removeprefix(": ")
            raise ValueError(f"{cls.name} is refused: {printable(what, _LONGEST_SHOWN)}") from None
        # A missing or repeated key, another order, or 1 instead of 1.0 would change the digest.
        if content.canonical != form:
            raise ValueError(f"{cls.name} is not in canonical form, or has keys of another version")
        if content.run_id != master.run_id:
            raise ValueError(f"{cls.name} is of another network")
        if not master.verify(_message(cls.name, form), signed, master.hotkey):
            raise ValueError(f"{cls.name} is not signed by the network's master {master.hotkey}")
        return content


@checked(frozen=True, config=ConfigDict(strict=True))
class State(_Signed):
    """Where a network stands; see the module. Times are in seconds since 1970."""

    name: ClassVar[str] = keys.STATE
    most_bytes: ClassVar[int] = 16 * 1024

    run_id: RunId
    outer_step: OuterStep  # the outer step from whose weights all members train
    serial: Whole  # number of the close; it grows whenever ``outer_step`` or ``closes_at`` changes
    # When the uploads for ``outer_step`` are taken; they may be finished ``grace`` s later
    closes_at: Seconds
    grace: Seconds
    head: Digest  # digest of the manifest of ``outer_step``
    # Outer steps whose whole weights are in the store, ascending
    weights_at: Annotated[tuple[OuterStep, ...], Field(max_length=64)]
    written_at: Seconds
    expires: Seconds  # when a reader may conclude that nobody leads the network
    # Which [stop] of the network's file is reached
    finished: Annotated[str, Field(pattern=r"^[ -~]{1,200}$")] | None = None
    # Number of consecutive closes at which fewer than half of the uploads passed the held-out test
    gate: Whole = 0

    def __post_init__(self) -> None:
        if list(self.weights_at) != sorted({*self.weights_at}):
            raise ValueError("weights_at is not in ascending order")
        if self.weights_at and self.weights_at[-1] > self.outer_step:
            raise ValueError("weights_at names an outer step that is still to come")

    def check_after(self, before: State) -> None:
        """Raise ValueError unless this state may follow ``before``, which a reader has seen."""
        if self.serial < before.serial or self.outer_step < before.outer_step:
            raise ValueError(
                f"state.json is older than one seen before: serial {self.serial} of outer step "
                f"{self.outer_step} after serial {before.serial} of outer step {before.outer_step}"
            )
        if self.outer_step == before.outer_step and self.head != before.head:
            raise ValueError(
                f"state.json has another history: the manifest of outer step {self.outer_step} "
                f"was {before.head} and is {self.head}"
            )
        if self.serial == before.serial and (self.outer_step, self.closes_at) != (
            before.outer_step,
            before.closes_at,
        ):
            raise ValueError(f"state.json has two closes of serial {self.serial}")


@checked(frozen=True, config=ConfigDict(strict=True))
class Merged:
    """An upload that was merged, or that its member carries over to the next close."""

    uid: Uid
    hotkey: Hotkey
    digest: Digest  # digest of the upload's file
    norm: Annotated[float, Field(gt=0.0, le=1e18)]  # norm of the upload before it was clipped
    # The float32 by which the upload was multiplied. If it is 0, the upload is not merged, and its
    # member carries it over.
    factor: Annotated[float, Field(ge=0.0, le=1.0)]
    improvement: Number  # nats per token by which the upload lowers the loss on random text
    inner_steps: Whole
    tokens: Whole
    chance: Figure | None = None  # the part of it that chance may explain, in nats per token
    # Similar uploads together have the weight of one upload; this is this upload's share.
    share: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0


@checked(frozen=True, config=ConfigDict(strict=True))
class Refused:
    """An upload that was not merged."""

    uid: Uid
    hotkey: Hotkey
    digest: SomeDigest  # digest of the file, or empty if it could not be read
    cause: Word  # one word, for programs
    reason: Text  # a sentence, for people


@checked(frozen=True, config=ConfigDict(strict=True))
class Averaging:
    """The result of a close's all-reduce, in a network over hivemind."""

    # What the update was computed from: the average, or the merge of the uploads
    source: Literal["average", "merge"]
    why: Text  # why the average was not used; empty if it was
    # Uids that took part, ascending; with ``average``, their uploads count as merged
    participants: Annotated[tuple[Uid, ...], Field(max_length=4096)] = ()
    # Norm of (average - merge) divided by the norm of the merge, or None if it was not measured
    difference: Figure | None = None
    # Uids of members whose parts of the average were found to differ
    suspects: Annotated[tuple[Uid, ...], Field(max_length=4096)] = ()


@checked(frozen=True, config=ConfigDict(strict=True))
class Manifest(_Signed):
    """The record of how the epoch-start weights of ``outer_step`` were computed; see the module."""

    name: ClassVar[str] = keys.MANIFEST
    most_bytes: ClassVar[int] = 4 * 1024 * 1024

    run_id: RunId
    rules_id: RunId  # id of the version of the network's file that was in force
    outer_step: OuterStep
    previous: SomeDigest  # digest of the previous manifest; empty at the chain's first outer step
    # Digest of ``update.safetensors``, which all members subtract from the epoch-start weights. It
    # is empty at outer step 0 and after a rewind, for which whole weights are in the store.
    update: SomeDigest
    weights: Digest  # digest of the epoch-start weights (section 4)
    momentum: SomeDigest  # digest computed like ``weights``, or empty if all values are zero
    residual: SomeDigest  # as ``momentum``
    # ``learning_rate``, ``mu`` and ``rule`` of the outer step come from the network's file.
    learning_rate: Figure
    mu: Figure
    rule: Annotated[str, Field(pattern=r"^[!-~]{1,100}$")]
    # Ascending by uid, which is the order of summation
    merged: Annotated[tuple[Merged, ...], Field(max_length=4096)]
    refused: Annotated[tuple[Refused, ...], Field(max_length=4096)]
    losses_before: Losses  # name of a held-out text -> loss on it, in nats per token
    losses_after: Losses
    scores: Annotated[Mapping[Uid, Number], Field(max_length=4096)]  # uid -> the member's score
    closed_at: Seconds  # ``closed_at`` and ``serial`` identify the close
    serial: Whole
    # ``total_inner_steps`` and ``total_tokens`` are the network's totals so far.
    total_inner_steps: Whole
    total_tokens: Whole
    made_at: Seconds
    # Digests of the other files next to the manifest, by name
    files: Annotated[
        Mapping[Annotated[str, Field(pattern=r"^[a-z0-9_.-]{1,64}$")], Digest], Field(max_length=16)
    ] = field(default_factory=dict)
    # The outer step whose weights, momentum and residual are in use again
    rewound_to: OuterStep | None = None
    # The outer step at which the chain begins: the outer step of the last recovery, or 0
    recovered: OuterStep = 0
    averaging: Averaging | None = None  # how the all-reduce went, in a network over hivemind
    # The validator's versions of the packages that compute the model, if its kind names them
    libraries: Annotated[Mapping[Word, Text], Field(max_length=16)] | None = None

    @property
    def averaged(self) -> bool:
        """True if the update was computed from the members' all-reduce."""
        return self.averaging is not None and self.averaging.source == "average"

    @property
    def carried_over(self) -> frozenset[int]:
        """Uids of the accepted uploads that the update leaves out: their members carry them over.

        After an average there are none: an upload with the factor 0 is in the average as well.
        """
        left_out = (each.uid for each in self.merged if not each.factor)
        return frozenset() if self.averaged else frozenset(left_out)

    def __post_init__(self) -> None:
        uids = [each.uid for each in self.merged]
        if uids != sorted({*uids}):
            raise ValueError("merged is not in ascending order of uids")
        if self.recovered > self.outer_step:
            raise ValueError("recovered names an outer step that is still to come")
        if (self.outer_step == self.recovered) != (not self.previous):
            raise ValueError("only the chain's first outer step has no previous manifest")
        if self.outer_step == self.recovered > 0 and self.rewound_to is None:
            raise ValueError("a recovery must name the outer step of its weights in rewound_to")
        if self.rewound_to is not None and self.rewound_to >= self.outer_step:
            raise ValueError("rewound_to names an outer step that is still to come")
        if bool(self.update) != (self.outer_step > 0 and self.rewound_to is None):
            raise ValueError("only outer step 0 and rewinds have no update")
        if bool(self.update) != any(each.factor for each in self.merged):
            raise ValueError("update must be empty if no upload was merged, and only then")

    def check_after(self, before: Manifest) -> None:
        """Raise ValueError unless this is the manifest that follows ``before``."""
        if self.outer_step != before.outer_step + 1:
            raise ValueError(
                f"manifest.json is of outer step {self.outer_step} instead of "
                f"{before.outer_step + 1}"
            )
        if self.previous != before.digest:
            raise ValueError(
                f"manifest.json of outer step {self.outer_step} follows {self.previous}, and the "
                f"one of outer step {before.outer_step} is {before.digest}: another history"
            )
        if self.recovered != before.recovered:
            raise ValueError(
                f"manifest.json of outer step {self.outer_step} names {self.recovered} as the "
                f"first outer step of the chain, and the one before it {before.recovered}"
            )
