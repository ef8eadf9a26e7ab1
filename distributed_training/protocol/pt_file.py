"""A ``.pt`` file as data: what ``torch.save`` wrote, read without torch and without running it.

The format is torch's zip format (torch/serialization.py, ``_save``): members that are stored, not
compressed; ``<name>/data.pkl``, a pickle of protocol 2; ``<name>/data/<key>`` for each storage, of
which the pickle says type and number of elements. A pickle is a program for a small stack machine.
Here its instructions are carried out on plain values: a tensor becomes a :class:`TensorStub`, what
else it would call becomes an inert :class:`Made`. Only instructions that torch's own
``weights_only`` unpickler knows are accepted.

What is read comes from strangers. Table of contents and pickle are bounded before they are read,
the number of instructions before they are carried out, and no instruction's work grows with what
came before it. So time and memory are bounded whatever the bytes are.
"""

from __future__ import annotations

import io
import pickletools
import struct
import zipfile
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

MOST_TABLE = 4 * 1024 * 1024  # bytes of the table of contents: 60,000 members
MOST_PICKLE = 4 * 1024 * 1024  # bytes
MOST_INSTRUCTIONS = 500_000  # a tensor takes about 35
_MOST_DIMENSIONS = 16
_LARGEST = 2**53
_ITEM_BYTES = {
    **{"DoubleStorage": 8, "FloatStorage": 4, "HalfStorage": 2, "BFloat16Storage": 2},
    **{"LongStorage": 8, "IntStorage": 4, "ShortStorage": 2, "CharStorage": 1, "ByteStorage": 1},
    **{"BoolStorage": 1, "UntypedStorage": 1, "ComplexFloatStorage": 8, "ComplexDoubleStorage": 16},
}
#: What a file of plain values and tensors calls.
PLAIN_CALLS = frozenset(
    {
        "collections.OrderedDict",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_parameter",
        "torch.Size",
        "torch.device",
    }
)
# PKWARE's APPNOTE.TXT, 4.3.16, 4.3.15 and 4.3.14: end record, locator and record of Zip64.
_END, _LOCATOR64 = struct.Struct("<4s4H2IH"), struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")


class PtFileError(ValueError):
    """Not a file that ``torch.save`` wrote; the message, one short line, says why."""


@dataclass(frozen=True)
class Storage:
    """``kind``: e.g. FloatStorage; ``count``: elements; ``size``: bytes."""

    kind: str
    key: str
    count: int

    @property
    def size(self) -> int:
        return self.count * _ITEM_BYTES[self.kind]


@dataclass(frozen=True)
class TensorStub:
    """What the pickle says of a tensor. ``storage``: the kind, e.g. FloatStorage."""

    storage: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Name:
    """A class or function that the pickle names."""

    full: str


@dataclass(frozen=True)
class Made:
    """Stands for what a call would have made; takes whatever a pickle does to it."""

    by: str


@dataclass(frozen=True)
class PtContent:
    """``content``: the pickle's value. ``members``: name in the archive of each storage, by key.
    ``calls``: full names of all that it would call."""

    content: Any
    storages: dict[str, Storage]
    members: dict[str, zipfile.ZipInfo]
    calls: frozenset[str]


def read_pt(file: Path | IO[bytes]) -> PtContent:
    """Of the file only the table of contents and the pickle are read.

    That the storages lie whole and apart in the file is checked, their values are not. Raises
    PtFileError, and what reading ``file`` raises.
    """
    if isinstance(file, Path):
        with file.open("rb") as handle:
            return read_pt(handle)
    size = _check_table(file)
    try:
        with zipfile.ZipFile(file) as archive:
            members = {member.filename: member for member in archive.infolist()}
            _check_members(archive.infolist(), size)
            pickles = [name for name in members if name.endswith("/data.pkl")]
            if len(pickles) != 1 or members[pickles[0]].file_size > MOST_PICKLE:
                raise PtFileError("it holds no pickle of a sensible size")
            data = archive.read(pickles[0])
    except PtFileError:
        raise
    except (zipfile.BadZipFile, EOFError, ValueError, RuntimeError, struct.error) as error:
        # RuntimeError: encrypted, or of a kind that Python does not know
        raise PtFileError(f"it is not a whole archive ({_short(error)})") from None
    machine = _Machine()
    try:
        content = machine.run(data)
    except PtFileError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, struct.error) as error:
        raise PtFileError(f"its pickle is damaged ({_short(error)})") from None
    found = {}
    for key, storage in machine.storages.items():
        member = members.get(pickles[0].removesuffix("data.pkl") + f"data/{key}")
        if member is None or member.file_size != storage.size:
            raise PtFileError(f"storage {key[:40]!r} is missing or of another size")
        found[key] = member
    return PtContent(content, machine.storages, found, frozenset(machine.calls))


def refuse_calls(found: PtContent) -> None:
    """Raises PtFileError if loading the file would call anything else: what ``weights_only`` allows
    includes constructors that take any amount of memory."""
    for name in found.calls - PLAIN_CALLS:
        raise PtFileError(f"it holds more than plain values and tensors: {name[:80]!r}")


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


# --- the archive ----------------------------------------------------------------------------------


def _check_table(file: IO[bytes]) -> int:
    """The file's size, once its table of contents is known to be small.

    ``zipfile`` reads that table whole, as long as the last records of the file say it is.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - _END.size - _LOCATOR64.size - _END64.size))
    tail = file.read()
    if len(tail) < _END.size:
        raise PtFileError("it is too short for an archive")
    magic, *_, table, _, comment = _END.unpack(tail[-_END.size :])
    if magic != b"PK\5\6" or comment:
        raise PtFileError("it does not end as an archive does")
    locator = tail[-_END.size - _LOCATOR64.size : -_END.size]
    if locator.startswith(b"PK\6\7"):
        if len(tail) < size and _LOCATOR64.unpack(locator)[2] != size - len(tail):
            raise PtFileError("the end of its table of contents is somewhere else")
        large = _END64.unpack(tail[: _END64.size])[8] if len(tail) >= _END64.size else 0
        table = large if table == 0xFFFFFFFF else max(table, large)
    if table > MOST_TABLE:
        raise PtFileError(f"its table of contents has {table} bytes, more than {MOST_TABLE}")
    file.seek(0)
    return size


def _check_members(members: Collection[zipfile.ZipInfo], size: int) -> None:
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise PtFileError("it is compressed, so it unpacks to more than it looks like")
    if len({member.filename for member in members}) != len(members):
        raise PtFileError("two of its members have one name")
    end = 0
    for member in sorted(members, key=lambda member: member.header_offset):
        # Many names for the same bytes would make a small file a large one.
        if member.header_offset < end or member.file_size != member.compress_size:
            raise PtFileError(f"{member.filename[:80]!r} does not lie apart from the others")
        end = member.header_offset + member.file_size
    if end > size:
        raise PtFileError("it is shorter than its members")


# --- the pickle -----------------------------------------------------------------------------------

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass
class _Machine:
    """``below``: what lay on the stack when each mark was set that is open."""

    storages: dict[str, Storage] = field(default_factory=dict)
    calls: set[str] = field(default_factory=set)
    stack: list[Any] = field(default_factory=list)
    below: list[list[Any]] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def run(self, data: bytes) -> Any:
        """Raises PtFileError, and IndexError, KeyError, TypeError, ValueError for damage."""
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if count > MOST_INSTRUCTIONS:
                raise PtFileError(f"its pickle has more than {MOST_INSTRUCTIONS} instructions")
            if opcode.name == "STOP":
                return self.stack.pop()
            self.step(opcode.name, argument)
        raise PtFileError("its pickle has no end")

    def step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _VALUES:
            stack.append(argument)
        elif name in _TUPLES:
            stack.append(tuple([stack.pop() for _ in range(_TUPLES[name])][::-1]))
        else:
            self.act(name, argument)

    def act(self, name: str, argument: Any) -> None:
        stack = self.stack
        match name:
            case "PROTO":
                pass
            case "MARK":
                self.below.append(stack)
                self.stack = []
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "TUPLE":
                items = tuple(self.since_mark())
                self.stack.append(items)
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "GLOBAL":
                stack.append(Name(argument.replace(" ", ".")))
            case "APPEND":
                self.append([stack.pop()])
            case "APPENDS":
                self.append(self.since_mark())
            case "SETITEM":
                self.set_items([stack.pop(), stack.pop()][::-1])
            case "SETITEMS":
                self.set_items(self.since_mark())
            case "BINPERSID":
                stack.append(self.storage(stack.pop()))
            case "REDUCE" | "NEWOBJ":
                arguments = stack.pop()
                stack.append(self.call(stack.pop(), arguments))
            case "BUILD":  # sets attributes, which nobody asks for
                stack.pop()
                stack.append(stack.pop())
            case _:
                raise PtFileError(f"its pickle holds {name}, which torch.save does not write")

    def since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Made):
            raise PtFileError("its pickle appends to what is no list")

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if len(items) % 2 or not isinstance(target, (dict, Made)):
            raise PtFileError("its pickle sets items of what is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Other keys may be chosen such that each takes as long as all before it together.
            if type(key) is not str and not (type(key) is int and abs(key) < 2**63):
                raise PtFileError("a key of a dictionary is neither text nor a number")
            if isinstance(target, dict):
                target[key] = value

    def storage(self, identity: Any) -> Storage:
        """Of ``("storage", type, key, location, elements)``."""
        match identity:
            case ("storage", Name(full), str(key), str(), int(count)) if _is_size(count):
                found = Storage(full.rpartition(".")[2], key, count)
                if found.kind not in _ITEM_BYTES:
                    raise PtFileError(f"storage of an unknown type {found.kind[:40]!r}")
                if self.storages.setdefault(key, found) != found:
                    raise PtFileError(f"storage {key[:40]!r} is described in two ways")
                return found
        raise PtFileError("its pickle refers to something that is no storage")

    def call(self, what: Any, arguments: Any) -> Any:
        if not isinstance(what, Name) or not isinstance(arguments, tuple):
            raise PtFileError("its pickle calls what is no function")
        self.calls.add(what.full)
        match what.full, arguments:
            case "collections.OrderedDict", ():
                return {}
            case "torch._utils._rebuild_tensor_v2", (Storage() as storage, *place) if (
                len(place) >= 3
            ):
                return _tensor(storage, *place[:3])
            case "torch._utils._rebuild_parameter", (TensorStub() as tensor, *_):
                return tensor
        return Made(what.full)


def _tensor(storage: Storage, offset: Any, shape: Any, stride: Any) -> TensorStub:
    sizes_only = (
        isinstance(shape, tuple)
        and isinstance(stride, tuple)
        and len(shape) == len(stride) <= _MOST_DIMENSIONS
        and all(map(_is_size, (offset, *shape, *stride)))
    )
    if not sizes_only:
        raise PtFileError("a tensor has an impossible shape")
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if 0 not in shape and last >= storage.count:
        raise PtFileError("a tensor reaches beyond its storage")
    return TensorStub(storage.kind, shape)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST
