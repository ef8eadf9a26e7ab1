"""Durable files: a file that must not be lost is written under a temporary name and renamed.

After a crash a reader finds the old content or the new, never half of it. The folder is synced too:
without that the rename itself may be lost with the power. This is the only place that does so.

A process keeps its state over a restart as a dataclass in a small JSON file: :func:`write_state`
writes it, :func:`read_state` checks it. All such files are treated alike when a bad disk damaged
them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import logging
import math
import os
import re
import shutil
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from .backoff import Repeats, Throttle

if TYPE_CHECKING:
    from pydantic import TypeAdapter

log = logging.getLogger(__name__)

State = TypeVar("State")

LARGEST_JSON = 16 * 1024 * 1024  # bytes of a file that one of our processes wrote
LARGEST_STATE = 4 * 1024 * 1024  # bytes; ours have at most a few hundred thousand
LONGEST_LINE = 1024 * 1024  # bytes

_not_written = Repeats(600.0)
_UNTOLD = Throttle(math.inf, most_keys=16)  # one line per file system

FSTAB = Path("/etc/fstab")
#: Errors of exFAT, SMB and FUSE, which have no hard links.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_OCTAL = re.compile(r"\\([0-7]{3})")


def sync_folder(folder: Path) -> None:
    """Make the folder's entries (a rename, a new file) survive a power loss.

    Does nothing if the file system has no such operation, as some network disks and vboxsf.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def free_bytes(folder: Path) -> int | None:
    """Return the bytes free where ``folder`` is, None if its file system does not tell.

    Some network disks (BlobFuse, quotas of clusters) say 0 of 0 and take writes all the same.
    Raises OSError.
    """
    usage = shutil.disk_usage(folder)
    if usage.total:
        return usage.free
    if _UNTOLD(os.stat(folder).st_dev):
        log.warning(
            "The disk of %s does not tell how much of it is free, so room is not checked before "
            "something is written there: keep enough free yourself",
            folder,
        )
    return None


@contextlib.contextmanager
def atomic_file(
    path: Path, *, durable: bool = True, private: bool = False, new: bool = False
) -> Iterator[IO[bytes]]:
    """Yield a file that appears under ``path`` whole when the block ends, or not at all.

    The folder is made if it is missing. ``durable=False`` leaves out the syncs: for what a power
    loss may take. ``private``: nobody else may read it. ``new``: FileExistsError if there is
    one. Raises OSError, its ``filename`` always set; nothing is left behind then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Threads and processes may write the same path at once: the last one wins, and no file is torn.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        mode = 0o600 if private else 0o666  # the umask takes bits away
        with open(temporary, "wb", opener=lambda path, flags: os.open(path, flags, mode)) as handle:
            yield handle
            handle.flush()
            if durable:
                # Sync before the rename, or a power loss may leave the new name on an empty file.
                os.fsync(handle.fileno())
        if new:
            name_new(temporary, path)
        else:
            os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        # torch.save hides the disk's error behind its own ("unexpected pos"), which callers that
        # handle a full disk would take for a defect.
        disk = error if isinstance(error, OSError) else error.__context__
        if not isinstance(disk, OSError):
            raise
        if disk.filename is None:
            disk.filename = str(path)  # errors of write and sync do not name the file
        raise disk from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)  # it no longer exists if all went well
    if durable:
        sync_folder(path.parent)


def name_new(temporary: Path, path: Path) -> None:
    """Give a file its name, and replace nothing, whoever else writes at this moment."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            if path.stat().st_size:  # otherwise a writer that was killed here had taken the name
                raise
        os.replace(temporary, path)


def write_at(handle: int, data: bytes | memoryview, position: int) -> None:
    """Write all of ``data`` into an open file. Raises OSError."""
    view = memoryview(data)
    while view:
        # Linux writes at most 2 GiB at once, and less when the disk becomes full.
        written = os.pwrite(handle, view[: 1 << 30], position)
        view, position = view[written:], position + written


def write_bytes(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace ``path`` by ``data``, whole or not at all. Raises OSError."""
    with atomic_file(path, durable=durable) as handle:
        handle.write(data)


def write_json(path: Path, content: Any, *, durable: bool = True) -> None:
    """Replace ``path`` by ``content`` as sorted, indented JSON. Raises OSError, TypeError."""
    # An error here must come before the file is opened.
    text = json.dumps(content, indent=4, sort_keys=True)
    write_bytes(path, text.encode(), durable=durable)


def read_json_object(path: Path) -> dict[str, Any] | None:
    """Read the JSON object in ``path``; None if missing, damaged or over ``LARGEST_JSON`` bytes.

    Damaged means: anything that is not one JSON object, however deep or oddly encoded.
    """
    try:
        with path.open("rb") as handle:
            # Bound the bytes that are read: the file may grow after we have asked for its size.
            data = handle.read(LARGEST_JSON + 1)
    except OSError:
        return None
    return json_line(data) if len(data) <= LARGEST_JSON else None


def read_state(path: Path, kind: type[State], *, lost: str) -> State | None:
    """Return what :func:`write_state` wrote: a dataclass of type ``kind``; None without a file.

    A file that holds no ``kind``, or more than ``LARGEST_STATE`` bytes, is damaged: it is renamed
    to ``NAME.damaged``, one WARNING names it and ends with ``lost``, the consequence, and None is
    returned. A file that cannot be read stays where it is, with such a line. Fields that ``kind``
    does not have are left out: another version may have written them.
    """
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_STATE + 1)
        if len(data) <= LARGEST_STATE:
            adapter = adapter_of(kind)  # type: ignore[arg-type]  # a class is hashable
            state: State = adapter.validate_json(data, strict=True)
            return state
    except FileNotFoundError:
        return None
    except OSError as error:  # it may be a whole file on a disk that is away, so do not rename it
        log.warning("%s cannot be read (%s): %s", path, error.strerror, lost)
        return None
    except ValueError:  # pydantic's ValidationError, whose text would show what the file holds
        pass
    aside = path.with_name(f"{path.name}.damaged")
    with contextlib.suppress(OSError):
        path.replace(aside)
    log.warning("%s is damaged and set aside as %s: %s", path, aside.name, lost)
    return None


@functools.cache
def adapter_of(kind: Any) -> TypeAdapter[Any]:
    """Return pydantic's reader of ``kind``, a class; it is made once, which takes milliseconds."""
    # Imported here, since programs that only write or follow files start without it.
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def write_state(path: Path, state: Any, *, durable: bool = True, lost: str = "") -> bool:
    """Replace ``path`` by the dataclass ``state`` as JSON, whole or not at all.

    Raises OSError, unless ``lost`` names the consequence: then one WARNING says so, at most every
    ten minutes for each path, and False is returned.
    """
    try:
        write_json(path, asdict(state), durable=durable)
    except OSError as error:
        if not lost:
            raise
        # Log this seldom: some files are written once a second, and the log is mostly on the same
        # disk.
        if (again := _not_written((path, error.errno))) is not None:
            log.warning("%s was not written (%s): %s%s", path, error.strerror, lost, again)
        return False
    return True


def json_line(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None for anything else: cut by a kill, or damaged."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text. Raises ValueError, which says why it is none."""
    try:
        return tomllib.loads(text)  # a number of 5000 digits raises a bare ValueError
    except RecursionError:
        raise ValueError("nested too deeply") from None


def rotated(path: Path) -> Path:
    """Return the path of the older lines of ``path``, which are moved there when it is too long."""
    return path.with_name(path.name + ".1")


def open_at_once(path: str | Path) -> IO[bytes]:
    """Open a file to read, without waiting for the writer of a pipe. Raises OSError."""
    # If the opener has opened a folder, open() closes it.
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def sha256_of(path: Path) -> str:
    """Return the file's SHA-256 as 64 hexadecimal digits. Raises OSError."""
    with path.open("rb", buffering=0) as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


#: The disk, or this user's part of it, is full.
FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: OSError) -> bool:
    """Return whether the disk, or this user's part of it, is full."""
    return error.errno in FULL


def late_mount(folder: Path, fstab: Path | None = None) -> str | None:
    """Return the mount point at or above ``folder`` that ``fstab`` names and is not mounted.

    Create nothing at this path: once the disk is mounted, it hides what was written there and shows
    its earlier content.
    """
    import psutil  # imported here, since programs that only read and write files start without it

    try:
        lines = [line.split() for line in (fstab or FSTAB).read_text().splitlines()]
    except (OSError, ValueError):
        return None
    # A path may end with a slash, go through a link, or hold octal escapes. Skip lines that begin
    # with "#": somebody took them out, and their disk never comes.
    named = (fields[1] for fields in lines if len(fields) >= 3 and not fields[0].startswith("#"))
    wanted = {os.path.normpath(_OCTAL.sub(lambda m: chr(int(m[1], 8)), path)) for path in named}
    # Without all=True psutil leaves out network disks and bind mounts. "/" is added, since in a
    # chroot no mount has that name.
    mounted = {"/", *(os.path.normpath(p.mountpoint) for p in psutil.disk_partitions(all=True))}
    # Resolve only paths that are not mounted: that of a network disk that does not answer takes for
    # ever.
    late = {os.path.realpath(path) for path in wanted - mounted} - mounted
    place = folder.absolute().resolve()
    return next((str(p) for p in (place, *place.parents) if str(p) in late), None)
