"""Digest, sign and verify a network's file: the rules that all its peers share.

``network.toml``, which the master hotkey signs, names the chain, the model, the tokenizer, the
data, the training constants, the period and the store (docs/network-file.md). Comments and layout
do not matter, because the digest is that of the canonical form (protocol page, section 2). The
run's id is the digest of only those keys that :func:`is_identity` accepts, which no version
changes. Each version names the digest of the previous version and the outer step from which it is
in force.

:mod:`.network_place` finds the file. The values become settings, so
:mod:`distributed_training.config` checks their types and ranges.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as checked

from distributed_training.common.files import json_line, open_at_once, parse_toml
from distributed_training.common.memory import ModelShape
from distributed_training.protocol.keys import NETWORK
from distributed_training.protocol.manifest import Master, is_signed, sign_form
from distributed_training.protocol.metadata import with_rules
from distributed_training.protocol.pages import HELD_OUT_PAGES
from distributed_training.protocol.types import OWN_CODECS, Sign

#: In format 2, the exchange is always ``store``. A file with format 1, or with format 2 and
#: ``hivemind``, is for subnet 38's protocol, which commit :data:`LAST_OF_SUBNET_38` was the last to
#: read.
FORMATS = (2, 3)
LAST_OF_SUBNET_38 = "10170bb9"
_BITS = "round.bits"  # earlier files have this key (4, 3 or 2) instead of round.codec
#: Instead of round.period, earlier files have the seconds of a block, the number of blocks, and a
#: key that has no effect any more.
_BLOCKS = ("round.seconds_per_block", "round.blocks_per_allreduce", "round.epoch_length")
_ROWS_API = "data.rows_url"  # in earlier files; it has no effect, since the rows API is gone
_EARLIER = {_BITS, *_BLOCKS, _ROWS_API}
#: Keys that only the exchange ``hivemind`` has.
_OF_AVERAGE = frozenset({"round.average_after", "round.sample"})
#: The files that come with the program, by their name for ``--network``.
BUILT_IN = {"local": Path(__file__).parent / "networks" / "local.toml"}
#: The rules that a network has unless its founder sets others; also the defaults of the settings.
USUAL: Mapping[str, Any] = {
    "data.source": "hub",
    "data.dataset": "HuggingFaceFW/fineweb-edu",
    "data.text_column": "text",
    "data.pages_per_block": 5,
    "data.rows_per_page": 100,
    "data.max_length": 1024,
    "training.sequence_length": 1024,
    "training.effective_batch": 512,
    "training.learning_rate": 2.5e-4,
    "training.warmup_steps": 1000,
    "training.total_steps": 88000,
    "training.weight_decay": 0.1,
    "training.adam_beta1": 0.9,
    "training.adam_beta2": 0.95,
    "training.gradient_clip": 1.0,
    "training.outer_learning_rate": 0.8,
    "training.outer_momentum": 0.9,
    "round.period": "80m",
    "round.minimum_valid_inner_step": 50,
    "limits.max_uids": 256,
}
LARGEST_FILE = 1 << 20  # bytes
LARGEST_SHOWN = 4096  # bytes of ``network.json``, which says whose network a global bucket holds
KEPT = "network"  # folder in the run folder, for the last good copy of the file
FILE = "network.toml"
HELD_OUT = "held-out"  # folder of held-out text, next to the founder's file and in run folders
VERSIONS = "versions"  # folder of all signed versions, next to the founder's file

_RUN_ID_DIGITS = 12
_CHAIN_KEYS = {"bittensor": {"chain.endpoint", "chain.netuid"}, "registry": {"chain.url"}}
#: All other keys have defaults. The digest covers only the keys that are in the file.
_REQUIRED = {
    *USUAL, "format", "name", "version", "exchange", "chain.kind", "chain.master_hotkey",
    "model.parameters", "tokenizer.name", "round.grace", "store.global_bucket",
}  # fmt: skip
_FIRST_TABLE = re.compile(r"^\s*\[", re.M)
# Matches a comment or a string in TOML. Only the opening quote is required: otherwise, the search
# for the end of an unterminated string would start again at each character.
_NO_KEY = re.compile(
    r'''\#[^\n]*+
    | """ (?:[^"\\] | \\. | "{1,2}+(?!"))*+ "{0,5}+  |  "(?:[^"\\\n] | \\.)*+"?+
    | \'{3} (?:[^'] | '{1,2}+(?!'))*+ '{0,5}+          |  '[^'\n]*+'?+''',
    re.DOTALL | re.VERBOSE,
)
_DEEPEST_KEY = 64
_DEEP_KEY = re.compile(rf"(?<![\w.-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{_DEEPEST_KEY}}}")
_MOST_SHOWN = 300  # most characters of a cause or a remedy


class NetworkFileError(ValueError):
    """A network's file is refused. The text is the cause; ``remedy`` says what to do."""

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(f"{cause:.{_MOST_SHOWN}}")  # cut, because it may quote much of the file
        self.remedy = f"{remedy:.{_MOST_SHOWN}}"


class NetworkAway(RuntimeError):
    """The URL of a network's file does not answer with the file. A later try may succeed."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"{cause:.{_MOST_SHOWN}}")


_Word = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
_Count = Annotated[int, Field(ge=1, le=10**13)]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Patterns = Annotated[list[str], Field(min_length=1, max_length=1000)]
# The first character must not be a dash, because pip would take the word for an option.
_Software = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._~:/@+=%#,\[\]-]{0,299}$")]


@checked(frozen=True, config=ConfigDict(strict=True))
class Head:
    """Hold the keys of a network's file that are not settings. A field's alias is its key."""

    format: Literal[2, 3]
    name: _Word
    version: Annotated[int, Field(ge=1, le=1_000_000)]
    chain: _Word = Field(alias="chain.kind")
    parameters: _Count = Field(alias="model.parameters")
    model: dict[str, Any] | None = Field(None, alias="model.config")
    weights: _Digest | None = Field(None, alias="model.weights")
    kind: _Word | None = Field(None, alias="model.kind")
    settings: dict[str, Any] | None = Field(None, alias="model.settings")
    trainable: _Patterns | None = Field(None, alias="model.trainable")
    trained: _Count | None = Field(None, alias="model.trainable_parameters")
    frozen: _Digest | None = Field(None, alias="model.frozen")
    tokenizer_revision: str | None = Field(
        None, alias="tokenizer.revision", pattern=r"^[0-9a-f]{40}$"
    )
    tokenizer_files: _Digest | None = Field(None, alias="tokenizer.files")
    data_files: _Digest | None = Field(None, alias="data.files")
    exchange: Literal["hivemind", "store"] = "store"
    #: The package that members install with pip.
    software: _Software | None = None
    previous: Annotated[str | None, Field(pattern=r"^sha256:[0-9a-f]{64}$")] = None
    from_outer_step: Annotated[int, Field(ge=0, lt=10**9)] = 0
    signature: Annotated[str | None, Field(pattern=r"^0x[0-9a-f]{128}$")] = None

    def of_model(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``config`` with the file's other rules about the model."""
        return with_rules(config, self.kind, self.trainable, self.settings)

    @property
    def exchanged(self) -> int:
        """The number of parameters that are trained, and therefore sent."""
        return self.trained or self.parameters

    @property
    def frozen_itemsize(self) -> int:
        """Bytes per frozen parameter in a member's memory."""
        return 4 if (self.settings or {}).get("dtype", "float32") == "float32" else 2

    @property
    def averages(self) -> bool:
        """True if members also average over hivemind at each close."""
        return self.exchange == "hivemind"


_HEAD = {of.alias or name for name, of in vars(Head)["__pydantic_fields__"].items()}
#: The keys that link each version of a file to the previous one.
VERSION_KEYS = ("version", "previous", "from_outer_step")


@dataclass(frozen=True)
class Network:
    """Hold one network's rules. ``values`` has keys like ``training.sequence_length``."""

    place: str  # path or URL
    head: Head
    digest: str
    built_in: bool  # True if the file came with the program
    values: Mapping[str, Any]
    text: str = field(repr=False)  # the content of the file

    @property
    def model(self) -> Mapping[str, Any] | None:
        """The model's ``config.json``; None if only the global bucket has it."""
        return None if self.head.model is None else self.head.of_model(self.head.model)

    @property
    def shape(self) -> ModelShape:
        """The model's sizes, with the number of parameters in the file. Raises ValueError."""
        head = self.head
        return ModelShape.from_config(
            self.model or {}, head.parameters, part=head.trained, itemsize=head.frozen_itemsize
        )

    @property
    def rules_id(self) -> str:
        """The id by which two peers find out whether they have the same rules."""
        return self.digest[:_RUN_ID_DIGITS]

    @property
    def line(self) -> str:
        """The name, version, run and master of the network, for the log."""
        return (
            f"network {self.head.name} version {self.head.version}, run {self.values['run_id']}, "
            f"by {self.values['chain.master_hotkey']}"
        )


@checked(frozen=True, config=ConfigDict(strict=True))
class Shown:
    """Hold the content of ``network.json``, which says to whose network a global bucket belongs.

    ``run_id``: the network's ``rules_id``; None if an earlier version of the program wrote it.
    ``network``: the id of its run if the master has signed the file; None if nobody has, in which
    case members ignore the file.
    """

    name: Annotated[str, Field(max_length=63)]
    version: Annotated[int, Field(ge=1, le=1_000_000)]
    master: Annotated[str, Field(max_length=64)]
    run_id: Annotated[str | None, Field(pattern=r"^\w{1,64}$")] = None
    network: Annotated[str | None, Field(pattern=r"^\w{1,64}$")] = None

    @classmethod
    def of(cls, network: Network) -> Shown:
        head, values = network.head, network.values
        return cls(head.name, head.version, values["chain.master_hotkey"], network.rules_id)

    def to_bytes(self, sign: Sign | None) -> bytes:
        """Return the file, signed by ``sign`` unless that is None."""
        content = {name: value for name, value in asdict(self).items() if value is not None}
        form = json.dumps(content).encode()
        return form if sign is None else sign_form(NETWORK, form, sign)

    def counts_for(self, network: Network) -> bool:
        """Return whether this file is about ``network`` and comes from its master."""
        run, master = network.values["run_id"], network.values["chain.master_hotkey"]
        return (self.network, self.master) == (run, master)

    @classmethod
    def parse(cls, data: bytes) -> Shown:
        """Read the file. Raises ValueError for anything else; the message quotes none of it.

        A file that names its ``network`` must be signed by the master that it names.
        """
        content = json_line(data) or {}
        try:
            known: Any = {name: content.get(name) for name in cls.__dataclass_fields__}
            shown = cls(**known)
        except ValidationError:
            raise ValueError("it does not name a network") from None
        if shown.network is not None:
            from bittensor_core import verify  # importing the chain's client would take a second

            if not is_signed(NETWORK, data, Master(shown.network, shown.master, verify)):
                raise ValueError("it is not signed by the master that it names")
        return shown


def other_version(shown: Shown, ours: Network) -> str:
    """Say how the network's file in the global bucket differs from ``ours``; empty if it agrees."""
    version, run_id = ours.head.version, ours.rules_id
    if shown.version == version and shown.run_id in (None, run_id):
        return ""
    differs = f"this network is at version {shown.version} of its file, but this miner at {version}"
    if shown.version < version:
        return f"{differs}: nothing counts until the validator has started with it too"
    if shown.version == version:
        differs = f"version {version} of this network's file has different rules from this miner's"
    remedy = f"get the file from its founder again, put it in {ours.place}, and restart"
    if "://" in ours.place:
        remedy = f"restart, which fetches {ours.place}"
    return f"{differs}, so neither the miner's uploads nor its rounds count: {remedy}"


def tree_of(text: str) -> dict[str, Any]:
    """Return the tables of a file's ``text``. Raises NetworkFileError if it is not TOML."""
    try:
        # tomllib's memory grows with the square of a dotted key's length. Since 32 kB of "a.a.a"
        # take 1 GB, anybody who can write to the founder's web site could make every start fail.
        # Quoted parts of a key count as well; values and comments do not.
        if _DEEP_KEY.search(_NO_KEY.sub("q", text)):
            raise ValueError("nested too deeply")
        return parse_toml(text)
    except ValueError as error:
        raise NetworkFileError(f"it is not TOML ({error})", "fix that line") from None


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of all tables as ``section.key``. Deeper tables stay as they are."""
    flat: dict[str, Any] = {}
    for section, value in tree.items():
        if isinstance(value, dict):
            flat |= {f"{section}.{key}": inner for key, inner in value.items()}
        else:
            flat[section] = value
    return flat


def built_in_rules(name: str = "local") -> dict[str, Any]:
    """Return the tables of a file that comes with the program."""
    return tomllib.loads(BUILT_IN[name].read_text(encoding="utf-8"))


def needless_keys(exchange: str) -> frozenset[str]:
    """Return the keys that a file with this ``exchange`` must not have."""
    return frozenset() if exchange == "hivemind" else _OF_AVERAGE


def of_exchange(rules: Mapping[str, Any], exchange: str) -> dict[str, Any]:
    """Return the tables of a file with ``exchange`` set, without the keys that do not fit it."""
    kept = copy.deepcopy({**rules, "exchange": exchange})
    for key in needless_keys(exchange):
        table, _, name = key.partition(".")
        kept.get(table, {}).pop(name, None)
    return kept


def parse(text: str, *, place: str, keys: Collection[str]) -> Network:
    """Return the network that a file's ``text`` describes, with its signature verified.

    Args:
        text: The content of the file.
        place: The path or URL that errors name.
        keys: The keys whose values become settings; those of :class:`Head` are allowed too.

    Raises:
        NetworkFileError: The text is not TOML, has an unknown or missing key or another format, is
            unsigned, or was altered.
    """
    flat = flatten(tree_of(text))
    refuse_format(flat)
    known = {*keys, *_HEAD, *_EARLIER}
    for key in sorted(flat.keys() - known):
        # A program that ignored an unknown key would train by other rules than its peers.
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else "docs/network-file.md lists all keys"
        raise NetworkFileError(f"{key!r} is not a key of it", hint)
    in_other_words = _codec_of(flat) | _period_of(flat)
    if missing := sorted(_REQUIRED - flat.keys() - in_other_words.keys()):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise NetworkFileError(
            f"{missing[0]}{more} is missing", "every peer needs each value: add it"
        )
    digest = digest_of(flat)
    head = _head({key: flat[key] for key in _HEAD & flat.keys()})
    _refuse_exchange(flat)
    _refuse_data(flat)
    # [chain] may have only the keys of its kind, but the kind of a plug-in may have any keys.
    for kind, of_kind in _CHAIN_KEYS.items() if head.chain in _CHAIN_KEYS else ():
        for key in sorted(of_kind):
            if (key in flat) != (kind == head.chain):
                wrong = "is missing for" if kind == head.chain else "does not fit"
                raise NetworkFileError(
                    f"{key} {wrong} chain.kind {head.chain!r}",
                    "add it" if kind == head.chain else "remove it",
                )
    if (head.version > 1) != (head.previous is not None):
        raise NetworkFileError(
            f"version {head.version} "
            + ("names no previous one" if head.version > 1 else "cannot have a previous one"),
            "let dt-network sign write version, previous and from_outer_step",
        )
    if (head.frozen is None) != (head.trained is None) or head.exchanged > head.parameters:
        raise NetworkFileError(
            "model.frozen and model.trainable_parameters do not say which tensors stay unchanged",
            "let dt-network init write both",
        )
    # Built-in files need no signature, because they are part of the program.
    built_in = "signature" not in flat and any(
        digest == digest_of(flatten(built_in_rules(name))) for name in BUILT_IN
    )
    if "run_id" in flat and not built_in:
        raise NetworkFileError(
            "it names a run_id, which only the program's own files may set",
            "remove the line",
        )
    if not built_in:
        from bittensor_core import verify  # importing the chain's client would take a second

        hotkey = str(flat.get("chain.master_hotkey"))
        if head.signature is None:
            raise NetworkFileError("it is not signed", "ask the founder for the signed file")
        try:
            valid = verify(_message(head.format, digest), bytes.fromhex(head.signature[2:]), hotkey)
        except ValueError:  # chain.master_hotkey is not a hotkey
            valid = False
        if not valid:
            raise NetworkFileError(
                f"its signature does not match chain.master_hotkey {hotkey} and these values: it "
                "was altered after it was signed",
                "get it from the founder again",
            )
    values = {key: value for key, value in flat.items() if key in keys}
    values |= in_other_words
    # Peers of different runs cannot meet, since the run's id is part of their DHT keys.
    identity = {key: value for key, value in flat.items() if is_identity(key)}
    values.setdefault("run_id", digest_of(identity)[:_RUN_ID_DIGITS])
    values.setdefault("chain.netuid", 0)  # a registry is one network
    if head.averages:
        values.setdefault("store.access", "own")
    return Network(place, head, digest, built_in, values, text)


def refuse_format(flat: Mapping[str, Any]) -> None:
    """Raise NetworkFileError for a file in a format that this program does not read."""
    format_ = flat.get("format")
    if format_ is not True and (
        format_ == 1 or (format_ == 2 and flat.get("exchange") == "hivemind")
    ):
        over = "" if format_ == 1 else " with exchange 'hivemind'"
        raise NetworkFileError(
            f"its format is {format_}{over}, for the protocol of subnet 38, which the program has "
            f"not spoken since commit {LAST_OF_SUBNET_38}",
            "use that commit, or join another network with dt-join",
        )
    if type(format_) is not int or format_ not in FORMATS:
        raise NetworkFileError(
            f"its format is {format_!r}, but this program reads {' and '.join(map(str, FORMATS))}",
            "update the miner, or ask the founder for a file of such a format",
        )


def _codec_of(flat: Mapping[str, Any]) -> dict[str, str]:
    """Return the codec of an earlier file, which only gives its bits. Raises NetworkFileError."""
    if _BITS not in flat:
        return {}
    codec = f"{flat[_BITS]}-bit"
    if codec not in OWN_CODECS or "round.codec" in flat:
        raise NetworkFileError(
            f"{_BITS} is {flat[_BITS]!r:.100}, but round.codec has replaced that key",
            f"remove {_BITS}, and set round.codec to one of {', '.join(OWN_CODECS)}",
        )
    return {"round.codec": codec}


def _period_of(flat: Mapping[str, Any]) -> dict[str, str]:
    """Return the period of an earlier file, which counts it in blocks. Raises NetworkFileError."""
    if not flat.keys() & set(_BLOCKS):
        return {}
    seconds, blocks = (flat.get(key) for key in _BLOCKS[:2])
    numbers = isinstance(seconds, int | float) and isinstance(blocks, int)
    if "round.period" in flat or not numbers or min(seconds or 0, blocks or 0) <= 0:
        raise NetworkFileError(
            f"{_BLOCKS[0]} is {seconds!r:.50} and {_BLOCKS[1]} {blocks!r:.50}, but round.period "
            "has replaced these keys",
            f'remove {", ".join(_BLOCKS)}, and set round.period to a duration such as "30m"',
        )
    return {"round.period": f"{(seconds or 0) * (blocks or 0):g}s"}


def without_blocks(text: str) -> str:
    """Return a file's text with ``round.period`` instead of a period that is counted in blocks."""
    period = _period_of(flatten(tree_of(text))).get("round.period")
    if period is None:
        return text
    names = "|".join(key.removeprefix("round.") for key in _BLOCKS)
    lines = re.compile(rf"(?m)^[ \t]*(round\.)?({names})[ \t]*=.*\n?")
    first = lines.search(text)
    if first is not None:
        line = f'{first[1] or ""}period = "{period}"\n'
        changed = text[: first.start()] + line + lines.sub("", text[first.end() :])
        if flatten(tree_of(changed)).get("round.period") == period:
            return changed
    return text  # the keys are in an inline table; parse() reads them there too


def _refuse_data(flat: Mapping[str, Any]) -> None:
    """Refuse keys in [data] that contradict each other. Raises NetworkFileError."""
    if flat.get("data.own") is True and (
        flat.get("data.selection", 1) != 1
        or flat.get("data.held_out", "python") in ("pages", "python")
    ):
        raise NetworkFileError(
            "data.own is true, so nobody else has the members' text to judge them on",
            'name other texts with data.held_out = ["NAME=FILE"], and leave data.selection out',
        )
    if flat.get("data.selection") != 2:
        if flat.get("data.held_out") == "pages":
            raise NetworkFileError(
                "data.held_out is pages, but only data.selection 2 holds pages out",
                "set data.selection = 2, or name a file",
            )
        return
    rows, of_a_page = flat.get("data.rows"), flat["data.rows_per_page"]
    held_out = flat.get("data.held_out_pages", HELD_OUT_PAGES)
    if rows is None:
        raise NetworkFileError(
            "data.selection is 2 without data.rows, so a change in the data would move all pages",
            "add data.rows",
        )
    if not all(type(number) is int and number > 0 for number in (rows, of_a_page, held_out)):
        return  # parse() refuses the value itself
    if (pages := rows // of_a_page) <= held_out:
        raise NetworkFileError(
            f"data.rows makes {pages} pages of {of_a_page} rows and data.held_out_pages is "
            f"{held_out}, so no page is left to train on",
            "lower data.held_out_pages or data.rows_per_page",
        )


def _refuse_exchange(flat: Mapping[str, Any]) -> None:
    """Refuse keys that do not fit this file's exchange. Raises NetworkFileError."""
    exchange = str(flat["exchange"])
    for key in sorted(needless_keys(exchange) & flat.keys()):
        raise NetworkFileError(f"{key} does not fit exchange {exchange!r}", "remove it")
    if flat.get("store.access", "own" if exchange == "hivemind" else "registry") == "own":
        return
    if flat["chain.kind"] != "registry":
        raise NetworkFileError(
            f"exchange is {exchange} and chain.kind {flat['chain.kind']!r:.100}, so nobody "
            "would hand out access to the store",
            'create it with a registry, or with store.access = "own"',
        )
    if "store.endpoint" not in flat:
        raise NetworkFileError(
            "store.endpoint is missing, so no member would know to which store the registry may "
            "send it",
            "add it",
        )


def is_identity(key: str) -> bool:
    """Return whether another value of ``key`` makes it another network."""
    return key in ("name", "chain.master_hotkey") or key.startswith(("model.", "tokenizer."))


def digest_of(flat: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the canonical form, in hex (protocol page, section 2)."""
    # A signature cannot cover itself.
    rules = {key: value for key, value in flat.items() if key != "signature"}
    try:
        form = json.dumps(rules, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError):
        raise NetworkFileError(
            "it holds a date, nan or inf, which no key takes", "use a number or a text"
        ) from None
    return hashlib.sha256(form.encode()).hexdigest()


def signed(text: str, signer: Any, *, head: Mapping[str, Any] | None = None) -> str:
    """Return ``text`` with the signature of ``signer``, a key pair of bittensor.

    ``head``: values that replace those in the first lines, if any.
    """
    first = _FIRST_TABLE.search(text)
    # Look only above the first table, since below its head "signature = " is a key of the table.
    end = first.start() if first else len(text)
    top, rest = text[:end], text[end:].lstrip("\n")
    for key in (*(head or ()), "signature"):
        top = re.sub(rf"(?m)^[ \t]*{key}[ \t]*=.*\n?", "", top)
    top = top.rstrip() + "\n"
    for key, value in (head or {}).items():
        top += "" if value is None else f"{key} = {toml_value(value)}\n"
    flat = flatten(tree_of(top + rest))
    signature = bytes(signer.sign(_message(flat.get("format"), digest_of(flat)))).hex()
    return f'{top}signature = "0x{signature}"\n\n{rest}'


def to_toml(rules: Mapping[str, Any]) -> str:
    """Return a network's rules as TOML: keys first, then all tables, such as ``[model.config]``."""

    def table(title: str, content: Mapping[str, Any]) -> str:
        below = {key: value for key, value in content.items() if isinstance(value, dict)}
        # Write the keys first, since in TOML a key below a table's head belongs to that table.
        lines = [f"{k} = {toml_value(v)}" for k, v in content.items() if k not in below]
        head = f"\n[{title}]\n" if title and lines else ""
        inner = [table(f"{title}.{key}".strip("."), value) for key, value in below.items()]
        return head + "".join(f"{line}\n" for line in lines) + "".join(inner)

    return table("", rules)


def toml_value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    try:
        return json.dumps(value, ensure_ascii=False)  # texts, numbers and booleans are TOML too
    except TypeError:
        raise NetworkFileError(
            "it holds a date or a time, which no key takes", "use a text"
        ) from None


def _message(format_: Any, digest: str) -> bytes:
    return f"network.toml {format_} {digest}".encode()


def _head(found: Mapping[str, Any]) -> Head:
    try:
        return Head(**found)
    except ValidationError as refusal:
        error = refusal.errors(include_url=False)[0]
        key, shown = ".".join(map(str, error["loc"][:1])), repr(error["input"])[:100]
        raise NetworkFileError(f"{key} {shown}: {error['msg']}", "correct it") from None


# --- its text on disk ---------------------------------------------------------------------------


def read_text(path: Path) -> str:
    """Return the text of a file that belongs to a network. Raises NetworkFileError."""
    try:
        with open_at_once(path) as file:
            # This returns None for a pipe that nobody writes to.
            data = file.read(LARGEST_FILE + 1) or b""
    except OSError as error:
        raise NetworkFileError(
            f"{path.name} cannot be read ({error.strerror})", "correct the path or its permissions"
        ) from None
    return decode_text(data)


def decode_text(data: bytes) -> str:
    if len(data) > LARGEST_FILE:
        raise NetworkFileError(f"it has more than {LARGEST_FILE} bytes", "correct the path")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise NetworkFileError("it is not UTF-8 text", "save it as UTF-8") from None
