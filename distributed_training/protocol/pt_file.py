"""Read ``.pt`` files and safetensors headers of untrusted owners, without torch.

A ``.pt`` file has torch's zip format (torch/serialization.py, ``_save``): members that are stored,
not compressed; ``<name>/data.pkl``, a pickle of protocol 2; ``<name>/data/<key>`` for each storage,
of which the pickle names type and number of elements. A safetensors file (huggingface/safetensors,
README, "Format") begins with eight bytes, little-endian, the length N of its header; N bytes of
JSON follow, from names to ``dtype``, ``shape`` and ``data_offsets``, which count from the header's
end; then the tensors, without gap or overlap.

Nothing in a file can run: a tensor becomes a stub, and a call an inert object. Table of contents,
pickle and header are bounded before they are read, and no instruction's work grows with what came
before it. So time and memory are bounded whatever the bytes are.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import reprlib
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

LENGTH_BYTES = 8
#: Bytes. Of 35,000 tensors; hostile JSON takes up to 25 times as much memory.
MOST_HEADER = 4 * 1024 * 1024
_MOST_DIMENSIONS = 16
_LARGEST = 2**53  # of a size or a place: what any JSON reader keeps exact
_BYTES_OF_DTYPE = {
    **{"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2},
    **{"I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1},
    **{"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1},
}


@dataclass(frozen=True)
class Entry:
    """A tensor of a safetensors file; ``start`` from the file's beginning and ``size`` in bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def safetensors_table(read: Callable[[int, int], bytes], size: int) -> dict[str, Entry]:
    """Name -> entry, in the order of the data, after checking that table and file size agree.

    ``read``: (first byte, bytes) -> content of a file of ``size`` bytes. Raises ValueError, in one
    short line, and what ``read`` raises.
    """
    length = int.from_bytes(read(0, LENGTH_BYTES), "little")
    if not 2 <= length <= min(MOST_HEADER, size - LENGTH_BYTES):
        raise ValueError("the header's length is impossible")
    text = read(LENGTH_BYTES, length)
    try:
        table = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header is not JSON: {error}") from None
    if not isinstance(table, dict):
        raise ValueError("its header is not a JSON object")
    table.pop("__metadata__", None)
    begin = LENGTH_BYTES + length
    entries = {name: _entry(name, raw, begin) for name, raw in table.items()}
    # By size too: an empty tensor begins where its neighbour does.
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].size)))
    for name, entry in ordered.items():
        if entry.start != begin:
            raise ValueError(f"{reprlib.repr(name)} does not lie where the one before it ends")
        begin += entry.size
    if begin != size:
        raise ValueError("the file is longer or shorter than its tensors")
    return ordered


def _without_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object of JSON, refusing a name that is there twice.

    A reader that takes the first of two equal names sees another file than one that takes the last.
    """
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{reprlib.repr(name)} is there twice")
        found[name] = value
    return found


def _entry(name: str, raw: Any, begin: int) -> Entry:
    try:
        dtype, shape, (first, last) = raw["dtype"], raw["shape"], raw["data_offsets"]
        item = _BYTES_OF_DTYPE[dtype]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{reprlib.repr(name)} is not described as a tensor") from None
    numbers_only = isinstance(shape, list) and len(shape) <= _MOST_DIMENSIONS
    if not numbers_only or not all(map(_is_size, (first, last, *shape))):
        raise ValueError(f"{reprlib.repr(name)} has an impossible shape or place")
    if last - first != math.prod(shape) * item:
        raise ValueError(f"{reprlib.repr(name)} does not take the bytes of its shape")
    return Entry(dtype, tuple(shape), begin + first, last - first)


def _is_size(value: Any) -> bool:
    # No isinstance: true is an int to it.
    return type(value) is int and 0 <= value < _LARGEST


MOST_TABLE = 4 * 1024 * 1024  # bytes of the table of contents: 60,000 members
MOST_PICKLE = 1024 * 1024  # bytes; a tensor takes about 200


_ITEM_BYTES = {
    **{"DoubleStorage": 8, "FloatStorage": 4, "HalfStorage": 2, "BFloat16Storage": 2},
    **{"LongStorage": 8, "IntStorage": 4, "ShortStorage": 2, "CharStorage": 1, "ByteStorage": 1},
    **{"BoolStorage": 1, "UntypedStorage": 1, "ComplexFloatStorage": 8, "ComplexDoubleStorage": 16},
}
_ORDERED, _TENSOR = "collections.OrderedDict", "torch._utils._rebuild_tensor_v2"
_PARAMETER, _SUBCLASS = "torch._utils._rebuild_parameter", "torch._tensor._rebuild_from_type_v2"
#: The calls in a file of plain values and tensors; their arguments: :func:`_as_torch_writes`.
PLAIN_CALLS = frozenset({_ORDERED, _TENSOR, _PARAMETER, "torch.Size", "torch.device"})
_ENCRYPTED = 1  # bit of a member's flags
_FOLDER = 0x10  # in the attributes that MS-DOS has
# PKWARE's APPNOTE.TXT, 4.3.16, 4.3.15 and 4.3.14: end record, locator and record of Zip64.
_END, _LOCATOR64 = struct.Struct("<4s4H2IH"), struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")


class PtFileError(ValueError):
    """A file that ``torch.save`` did not write; the message, one short line, gives the reason."""


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
class Name:
    """A class or function that the pickle names."""

    full: str


@dataclass(frozen=True)
class Made:
    """Stands for the result of a call; accepts anything that a pickle does to it.

    ``arguments``: of the call. They may hold one another many times over, so nothing prints them.
    """

    by: str
    arguments: tuple[Any, ...] = field(default=(), repr=False, compare=False)


@dataclass(frozen=True)
class PtContent:
    """The pickle's value and the storages it refers to.

    ``members``: name in the archive of each storage, by key. ``calls``: full names of everything
    that loading would call.
    """

    content: Any
    storages: dict[str, Storage]
    members: dict[str, zipfile.ZipInfo]
    calls: frozenset[str]


def read_pt(file: Path | IO[bytes]) -> PtContent:
    """Read the table of contents and the pickle of ``file``, and no tensor.

    Checks that the storages lie whole and apart in the file, but not their values. Raises
    PtFileError, and the errors of reading ``file``.
    """
    if isinstance(file, Path):
        with file.open("rb") as handle:
            return read_pt(handle)
    size = _check_table(file)
    try:
        with zipfile.ZipFile(file) as archive:
            members = {member.filename: member for member in archive.infolist()}
            _check_members(archive.infolist(), size)
            # torch.load heeds neither the case of a name nor the other name in its extra field.
            pickles = [m for m in members.values() if m.orig_filename.lower().endswith("/data.pkl")]
            if len(pickles) != 1 or pickles[0].file_size > MOST_PICKLE:
                raise PtFileError("it holds no pickle of a sensible size, or several")
            data = archive.read(pickles[0])
    except (PtFileError, OSError):
        raise
    except Exception as error:
        # Of a store that does not answer while the file is read from it: its owner's file is whole.
        if isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError):
            raise
        raise PtFileError(f"it is not a whole archive ({_short(error)})") from None
    reader = _Reader(data)
    try:
        content = reader.load()
    except PtFileError:
        raise
    except KeyError as error:  # of the memo, or of the instructions
        raise PtFileError(f"its pickle holds {error}, which torch.save does not write") from None
    except Exception as error:  # noqa: BLE001 - nor does the unpickler
        raise PtFileError(f"its pickle is damaged ({_short(error)})") from None
    found = {}
    for key, storage in reader.storages.items():
        member = members.get(pickles[0].filename.removesuffix("data.pkl") + f"data/{key}")
        if member is None or member.file_size != storage.size:
            raise PtFileError(f"storage {key[:40]!r} is missing or of another size")
        found[key] = member
    return PtContent(content, reader.storages, found, frozenset(reader.calls))


def refuse_calls(found: PtContent) -> None:
    """Raise PtFileError if loading the file would call anything but plain values and tensors.

    ``weights_only`` also allows constructors that take any amount of memory.
    """
    for name in found.calls - PLAIN_CALLS:
        raise PtFileError(f"it holds more than plain values and tensors: {name[:80]!r}")


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


# --- the archive ----------------------------------------------------------------------------------


def _check_table(file: IO[bytes]) -> int:
    """Return the file's size, once its table of contents is known to be small and in its place.

    ``zipfile`` reads that table whole, whatever length the last records of the file give.
    """
    size = file.seek(0, io.SEEK_END)
    end = size - _END.size - _LOCATOR64.size - _END64.size
    if end < 0:
        raise PtFileError("it is too short for an archive")
    file.seek(end)
    tail = file.read()
    magic, *_, table, place, comment = _END.unpack(tail[-_END.size :])
    if magic != b"PK\5\6" or comment:
        raise PtFileError("it does not end as an archive does")
    locator = tail[_END64.size : -_END.size]
    if locator.startswith(b"PK\6\7"):
        if not tail.startswith(b"PK\6\6") or _LOCATOR64.unpack(locator)[2] != end:
            raise PtFileError("the end of its table of contents is somewhere else")
        *_, table, place = _END64.unpack(tail[: _END64.size])
    else:
        end = size - _END.size
    if table > MOST_TABLE:
        raise PtFileError(f"its table of contents has {table} bytes, more than {MOST_TABLE}")
    # zipfile looks right before the end, torch.load at the place: there may be a table at each.
    if place + table != end:
        raise PtFileError("its table of contents is not at the place that its end gives")
    file.seek(0)
    if file.read(4) != b"PK\3\4":
        # torch.load takes it for its older format, in which it would find another pickle.
        raise PtFileError("it does not begin as an archive does")
    return size


def _check_members(members: Collection[zipfile.ZipInfo], size: int) -> None:
    # Encrypted ones before they are opened: zipfile's RuntimeError is also that of a store which
    # does not answer while the file is read from it.
    if any(member.flag_bits & _ENCRYPTED for member in members):
        raise PtFileError("it is encrypted")
    # Of a folder torch reads no byte, and the tensor is what lay in that memory before.
    if any(member.external_attr & _FOLDER or member.is_dir() for member in members):
        raise PtFileError("one of its members is a folder")
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

_PROTOCOL = b"\2"
_OPCODES = (
    pickle.PROTO + pickle.STOP + pickle.MARK + pickle.GLOBAL + pickle.REDUCE + pickle.NEWOBJ
    + pickle.BUILD + pickle.BINPERSID + pickle.EMPTY_DICT + pickle.EMPTY_LIST + pickle.EMPTY_TUPLE
    + pickle.TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3 + pickle.APPEND + pickle.APPENDS
    + pickle.SETITEM + pickle.SETITEMS + pickle.BINPUT + pickle.LONG_BINPUT + pickle.BINGET
    + pickle.LONG_BINGET + pickle.NONE + pickle.NEWTRUE + pickle.NEWFALSE + pickle.BININT
    + pickle.BININT1 + pickle.BININT2 + pickle.LONG1 + pickle.BINFLOAT + pickle.BINUNICODE
    + pickle.SHORT_BINSTRING
)  # fmt: skip


def _as_torch_writes(call: str, arguments: tuple[Any, ...]) -> bool:
    """Return whether ``torch.save`` writes that call of ``PLAIN_CALLS`` with such arguments.

    For a tensor they are storage, first element, size, stride, ``requires_grad`` and hooks, of
    which there are none (torch/_tensor.py, ``_reduce_ex_internal``).
    """
    match arguments:
        case ():
            return call == _ORDERED
        case (Storage(count=count), first, tuple(size), tuple(stride), bool(), OrderedDict() as h):
            if call != _TENSOR or h or len(size) != len(stride):
                return False
            if not all(map(_is_size, (first, *size, *stride))):
                return False
            last = first + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
            return last < count or 0 in size
        case (Made(by=by), bool(), OrderedDict() as h):
            return call == _PARAMETER and by in (_TENSOR, _SUBCLASS) and not h
        case (tuple(size),):
            return call == "torch.Size" and all(map(_is_size, size))
        case (str(),):
            return call == "torch.device"
        case (str(), index):
            return call == "torch.device" and _is_size(index) and index < 128
    return False


def _is_other(value: Any) -> bool:
    """Return whether a call made ``value`` that is none of ``PLAIN_CALLS``."""
    return isinstance(value, Made) and value.by not in PLAIN_CALLS


# The one in Python: the one in C takes no other instructions.
_Unpickler: Any = pickle._Unpickler


class _Reader(_Unpickler):
    """The standard library's unpickler, in which nothing is imported and nothing is called."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.storages: dict[str, Storage] = {}
        self.calls: set[str] = set()

    def find_class(self, module: str, name: str) -> Name:
        return Name(f"{module}.{name}")

    def persistent_load(self, identity: Any) -> Storage:
        """Return the storage of ``("storage", type, key, location, elements)``.

        Raises PtFileError.
        """
        match identity:
            case ("storage", Name(full), str(key), str(), int(count)) if 0 <= count < _LARGEST:
                found = Storage(full.rpartition(".")[2], key, count)
                if found.kind not in _ITEM_BYTES:
                    raise PtFileError(f"storage of an unknown type {found.kind[:40]!r}")
                if self.storages.setdefault(key, found) != found:
                    raise PtFileError(f"storage {key[:40]!r} is described in two ways")
                return found
        raise PtFileError("its pickle refers to something that is no storage")

    def _protocol(self) -> None:
        if self.read(1) != _PROTOCOL:  # torch.load takes others too, with a warning for each file
            raise PtFileError("its pickle is not of protocol 2")

    def _call(self) -> None:
        arguments, what = self.stack.pop(), self.stack.pop()
        if not isinstance(what, Name) or not isinstance(arguments, tuple):
            raise PtFileError("its pickle calls an object that is no function")
        self.calls.add(what.full)
        # All arguments are looked at below, and one tuple can be passed to every call.
        if len(arguments) > _MOST_DIMENSIONS:
            raise PtFileError(f"a call has more than {_MOST_DIMENSIONS} arguments")
        if any(isinstance(a, tuple) and len(a) > _MOST_DIMENSIONS for a in arguments):
            raise PtFileError(f"a tensor has more than {_MOST_DIMENSIONS} dimensions")
        # torch answers each other form with an error, or a feature, of its own choice.
        if what.full in PLAIN_CALLS and not _as_torch_writes(what.full, arguments):
            raise PtFileError(f"it calls {what.full} with arguments that torch.save does not write")
        self.stack.append(OrderedDict() if what.full == _ORDERED else Made(what.full, arguments))

    def _new_object(self) -> None:
        if isinstance(what := self.stack[-2], Name) and what.full in PLAIN_CALLS:
            raise PtFileError(f"it makes {what.full} in a way in which torch.save does not")
        self._call()

    def _build(self) -> None:  # sets attributes, which nobody asks for
        state, target = self.stack.pop(), self.stack[-1]
        ordered = isinstance(target, OrderedDict) and isinstance(state, dict)
        if not ordered and not _is_other(target):
            raise PtFileError("it sets attributes of what torch.save gives none")

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif not _is_other(target):
            raise PtFileError("its pickle appends to an object that is no list")

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if len(items) % 2 or not (isinstance(target, dict) or _is_other(target)):
            raise PtFileError("its pickle sets items of an object that is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Other keys may be chosen such that each takes as long as all before it together.
            if type(key) is not str and not (type(key) is int and abs(key) < 2**63):
                raise PtFileError("a key of a dictionary is neither text nor a number")
            if isinstance(target, dict):
                target[key] = value

    # Only what torch.save writes: others run code, or take time that grows with what came.
    dispatch = {code: _Unpickler.dispatch[code] for code in _OPCODES} | {
        pickle.PROTO[0]: _protocol,
        pickle.REDUCE[0]: _call,
        pickle.NEWOBJ[0]: _new_object,
        pickle.BUILD[0]: _build,
        pickle.APPEND[0]: lambda self: self._extend([self.stack.pop()]),
        pickle.APPENDS[0]: lambda self: self._extend(self.pop_mark()),
        pickle.SETITEM[0]: lambda self: self._set([self.stack.pop(), self.stack.pop()][::-1]),
        pickle.SETITEMS[0]: lambda self: self._set(self.pop_mark()),
    }
