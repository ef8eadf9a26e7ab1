"""Durable files: a file that must not be lost is written under a temporary name and renamed.

After a crash, a reader finds either the old content or the new content, never half of it. The
folder is synced too: otherwise a power loss may undo the rename. No other module does this.

A process keeps its state across a restart as a dataclass in a small JSON file:
:func:`write_state` writes it, :func:`read_state` reads and checks it. A file that a bad disk has
damaged is always treated in the same way.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from .backoff import Repeats

if TYPE_CHECKING:
    from pydantic import TypeAdapter

log = logging.getLogger(__name__)

State = TypeVar("State")

LARGEST_JSON = 16 * 1024 * 1024  # the most bytes in a file that one of our processes wrote
LARGEST_STATE = 4 * 1024 * 1024  # bytes; our files have at most a few hundred thousand
LONGEST_LINE = 1024 * 1024  # bytes

_not_written = Repeats(600.0)

FSTAB = Path("/etc/fstab")
#: Errors of file systems without hard links: exFAT, SMB and FUSE.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_OCTAL = re.compile(r"\\([0-7]{3})")


def sync_folder(folder: Path) -> None:
    """Make the folder's entries (a rename, a new file) survive a power loss.

    Do nothing if the file system does not support this, such as vboxsf and some network disks.
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
    """Return the free bytes on the disk of ``folder``, or None if they are not known.

    Some network disks (BlobFuse, clusters with quotas) report 0 of 0 bytes but still accept writes.
    Raises OSError.
    """
    usage = shutil.disk_usage(folder)
    return usage.free if usage.total else None


@contextlib.contextmanager
def atomic_file(
    path: Path, *, durable: bool = True, private: bool = False, new: bool = False
) -> Iterator[IO[bytes]]:
    """Yield a file that appears at ``path``, complete, when the block ends, or not at all.

    The folder is created if it is missing. ``durable=False`` skips the syncs, for files that a
    power loss may destroy. ``private``: only this user may read the file. ``new``: raise
    FileExistsError if the file exists. Raises OSError, always with its ``filename`` set, and leaves
    nothing behind in that case.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Threads and processes may write to the same path at once: the last one wins, without mixing.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        mode = 0o600 if private else 0o666  # the umask removes bits
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
        # handle a full disk would mistake for a defect.
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
    """Rename a file without replacing another, even if somebody writes at the same moment."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            if path.stat().st_size:  # an empty file was left by a writer that was killed here
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
    """Replace the content of ``path`` by ``data``, completely or not at all. Raises OSError."""
    with atomic_file(path, durable=durable) as handle:
        handle.write(data)


def write_json(path: Path, content: Any, *, durable: bool = True) -> None:
    """Write ``content`` to ``path`` as sorted, indented JSON. Raises OSError, TypeError."""
    # Serialize first, so that an error comes before the file is opened.
    text = json.dumps(content, indent=4, sort_keys=True)
    write_bytes(path, text.encode(), durable=durable)


def read_json_object(path: Path) -> dict[str, Any] | None:
    """Read the JSON object in ``path``; None if missing, damaged or over ``LARGEST_JSON`` bytes.

    Anything that is not a single JSON object counts as damaged, even if it is nested too deeply or
    oddly encoded.
    """
    try:
        with path.open("rb") as handle:
            # Limit the bytes that are read: the file may grow after a check of its size.
            data = handle.read(LARGEST_JSON + 1)
    except OSError:
        return None
    return json_line(data) if len(data) <= LARGEST_JSON else None


def read_state(path: Path, kind: type[State], *, lost: str) -> State | None:
    """Return what :func:`write_state` wrote: a dataclass of type ``kind``; None if no file exists.

    A file that is not a valid ``kind``, or has more than ``LARGEST_STATE`` bytes, is damaged: it is
    renamed to ``NAME.damaged``, one WARNING names it and ends with ``lost``, the consequence, and
    None is returned. A file that cannot be read stays where it is, with a similar WARNING. Fields
    that ``kind`` does not have are ignored: another version may have written them.
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
    except OSError as error:  # the file may be intact and its disk unavailable: do not rename it
        log.warning("%s cannot be read (%s): %s", path, error.strerror, lost)
        return None
    except ValueError:  # pydantic's ValidationError, whose text would quote the file's content
        pass
    aside = path.with_name(f"{path.name}.damaged")
    with contextlib.suppress(OSError):
        path.replace(aside)
    log.warning("%s is damaged and set aside as %s: %s", path, aside.name, lost)
    return None


@functools.cache
def adapter_of(kind: Any) -> TypeAdapter[Any]:
    """Return pydantic's validator of the class ``kind``; creating it takes milliseconds, once."""
    # Imported here, so that programs that only write or follow files start without pydantic.
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def write_state(path: Path, state: Any, *, durable: bool = True, lost: str = "") -> bool:
    """Write the dataclass ``state`` to ``path`` as JSON, completely or not at all.

    Raises OSError, unless ``lost`` names the consequence of an error: in that case a WARNING is
    logged, at most every ten minutes for each path, and False is returned.
    """
    try:
        write_json(path, asdict(state), durable=durable)
    except OSError as error:
        if not lost:
            raise
        # Log this rarely: some files are written once a second, and the log is usually on the same
        # disk.
        if (again := _not_written((path, error.errno))) is not None:
            log.warning("%s was not written (%s): %s%s", path, error.strerror, lost, again)
        return False
    return True


def json_line(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line; None for anything else, such as a truncated line."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text. Raises ValueError, which says why it is not valid."""
    try:
        return tomllib.loads(text)  # a number of 5000 digits raises a bare ValueError
    except RecursionError:
        raise ValueError("nested too deeply") from None


def rotated(path: Path) -> Path:
    """Return the path to which the lines of ``path`` are moved when the file becomes too long."""
    return path.with_name(path.name + ".1")


def open_at_once(path: str | Path) -> IO[bytes]:
    """Open a file for reading; if it is a pipe, do not wait for a writer. Raises OSError."""
    # If the opener has opened a folder, open() closes it.
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def sha256_of(path: Path) -> str:
    """Return the file's SHA-256 as 64 hexadecimal digits. Raises OSError."""
    with path.open("rb", buffering=0) as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


#: Errors which mean that the disk, or this user's quota, is full.
FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: OSError) -> bool:
    """Return whether the error means that the disk, or this user's quota, is full."""
    return error.errno in FULL


def late_mount(folder: Path, fstab: Path | None = None) -> str | None:
    """Return a mount point at or above ``folder`` that is in ``fstab`` but not mounted, if any.

    Create nothing at this path: once the disk is mounted, it hides what was written there and shows
    its earlier content.
    """
    import psutil  # imported here, so that programs that only use files start without it

    try:
        lines = [line.split() for line in (fstab or FSTAB).read_text().splitlines()]
    except (OSError, ValueError):
        return None
    # A path may end with a slash, go through a link, or contain octal escapes. Skip lines that
    # begin with "#": they are commented out, so their disks will never be mounted.
    named = (fields[1] for fields in lines if len(fields) >= 3 and not fields[0].startswith("#"))
    wanted = {os.path.normpath(_OCTAL.sub(lambda m: chr(int(m[1], 8)), path)) for path in named}
    # Without all=True, psutil leaves out network disks and bind mounts. "/" is added, since in a
    # chroot no mount has that name.
    mounted = {"/", *(os.path.normpath(p.mountpoint) for p in psutil.disk_partitions(all=True))}
    # Resolve only paths that are not mounted: resolving the path of a network disk that does not
    # answer would hang.
    late = {os.path.realpath(path) for path in wanted - mounted} - mounted
    place = folder.absolute().resolve()
    return next((str(p) for p in (place, *place.parents) if str(p) in late), None)
