"""Publish and fetch the network's frozen tensors, tokenizer and data through the global bucket.

``dt-network init`` writes a *list* of a folder's files, with the size and SHA-256 of each. The
network's file contains the SHA-256 of the list itself (``model.frozen``, ``tokenizer.files``,
``data.files``). The validator uploads the list and each file as ``files/SHA256``. Every start
verifies the copies in the run folder and fetches missing or damaged files, so a member reads only
files that the founder has signed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from distributed_training.chain.base import ChainError
from distributed_training.common.files import sha256_of, write_bytes
from distributed_training.config import Config, ConfigError
from distributed_training.config.versions import Versions
from distributed_training.network import VERSIONS, Network
from distributed_training.node.start import NetworkFailure
from distributed_training.store.base import ObjectStore
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.store.errors import IntegrityError, ObjectMissingError, StoreError
from distributed_training.store.transfer import Retry, deadline_in, require_room, upload_all

log = logging.getLogger(__name__)

LIST = ".files.json"  # file in the folder; text sources and transformers ignore such a name
LARGEST_LIST = 4 * 2**20  # bytes
_MOST_FILES, _LARGEST = 20_000, 2**40  # most files in a folder, and most bytes in a file
_LARGE = 20 * 10**9  # size of a folder, in bytes, from which verifying it is logged
_SMALL, _LONG = timedelta(seconds=30), timedelta(hours=24)
#: The files of a tokenizer that transformers reads.
TOKENIZER_FILES = {
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "config.json",
}  # fmt: skip


def _refuse_path(name: str) -> str:
    # The name becomes a path: it must not lead out of the folder, or clash with our hidden files.
    if not name.isprintable() or any(not p or p.startswith(".") for p in name.split("/")):
        raise ValueError("no name of a file")
    return name


@dataclass(frozen=True)
class Listed:
    """One entry in a list of files."""

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    size: Annotated[int, Field(ge=0, le=_LARGEST)]


_Name = Annotated[str, Field(min_length=1, max_length=400), AfterValidator(_refuse_path)]
_FILES = TypeAdapter(Annotated[dict[_Name, Listed], Field(min_length=1, max_length=_MOST_FILES)])


def list_files(source: Path, target: Path, *, names: set[str] | None = None) -> str:
    """Copy the files below ``source`` to ``target/DIGEST``; return DIGEST, that of their list.

    ``names``: the files to copy; None copies all except hidden ones, as data does. Raises
    ConfigError, OSError.
    """
    made = target / ".new"
    found: dict[str, Listed] = {}
    try:
        for path in sorted(source.rglob("*")):
            name = path.relative_to(source).as_posix()
            hidden = any(part.startswith((".", "_")) for part in Path(name).parts)
            if not path.is_file() or (hidden if names is None else name not in names):
                continue
            copy = made / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path.resolve(), copy)
            except OSError:  # another disk
                shutil.copyfile(path, copy)
            found[name] = Listed(sha256_of(copy), copy.stat().st_size)
        text = _FILES.dump_json(dict(sorted(found.items())))
        try:
            if len(text) > LARGEST_LIST:
                raise ValueError
            _FILES.validate_json(text)
        except ValueError:
            raise ConfigError(
                f"{source} has {len(found)} files, which cannot be published (allowed: 1 to "
                f"{_MOST_FILES}, printable names, 1 TB each), so no network was created: join "
                "them, or use --unpinned and distribute them yourself"
            ) from None
        digest = hashlib.sha256(text).hexdigest()
        write_bytes(made / LIST, text)
        made.rename(target / digest)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return digest


def fetch_published(
    config: Config,
    open_bucket: Callable[[], BucketReader],
    *,
    wanted: Collection[str] = ("model", "tokenizer", "data"),
) -> None:
    """Fetch the network's files that are missing or damaged in the run folder.

    All files are read and compared with their digests at each start. ``open_bucket`` opens the
    global bucket; it is called only if something is missing. Raises NetworkFailure.
    """
    for what, folder in config.published.items():
        if what not in wanted:
            continue
        try:
            _fetch(open_bucket, folder, what)
        except (StoreError, ChainError, OSError) as error:
            why = str(error)
            if isinstance(error, ObjectMissingError) and config.kind == "miner":
                why += ": the validator has not published it yet"
            elif isinstance(error, ObjectMissingError):
                why += ": restore the files that dt-network init copied"
            raise NetworkFailure(
                f"cannot fetch the network's {what} ({why}), so nothing was started: the next "
                f"start tries again; files that were fetched stay in {folder}"
            ) from None


def require_published(config: Config) -> None:
    """Raise ConfigError if a folder is missing, on a node other than node 0, which fetches it."""
    for what, folder in config.published.items():
        # Node 0 sends the rows of the model to the other nodes.
        if what != "model" and not (folder / LIST).is_file():
            raise ConfigError(
                f"the network's {what} is not in {folder} and only node 0 fetches it, so this node "
                "could not train on it: once node 0 has it, copy that folder from there"
            )


def _fetch(open_bucket: Callable[[], BucketReader], folder: Path, what: str) -> None:
    """Fetch the files that are missing in one folder. Raises StoreError, ChainError, OSError."""
    files = _read_list(open_bucket, folder)
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in files and not path.name.startswith("."):
            raise IntegrityError(f"{path} is none of its files: remove it")
    size = sum(listed.size for listed in files.values())
    if size > _LARGE:  # comparing takes minutes, at each start
        log.info("Comparing the network's %s with its digests: %.1f GB", what, size / 1e9)
    wanted = {name: listed for name, listed in files.items() if not _is(folder / name, listed)}
    if not wanted:
        return
    reader = open_bucket()
    size = sum(listed.size for listed in wanted.values())
    require_room(folder, size, what=f"the network's {what}")
    log.info("Fetching the network's %s: %d files, %.1f MB", what, len(wanted), size / 1e6)
    for name, listed in wanted.items():
        path = folder / name
        if path.exists():
            log.warning("%s is damaged and is fetched again", path)
        # Use the digest, since the file's own name may already have the maximum length.
        came = path.with_name(f".{listed.sha256}.came")
        path.parent.mkdir(parents=True, exist_ok=True)
        reader.download(_key(listed.sha256), came, limit=listed.size)
        try:
            if not _is(came, listed):
                raise IntegrityError(f"{reader.name}/{_key(listed.sha256)} is damaged ({name})")
            os.replace(came, path)  # the download has synced it
        finally:
            came.unlink(missing_ok=True)


def _read_list(open_bucket: Callable[[], BucketReader], folder: Path) -> dict[str, Listed]:
    """Return the files in the list whose digest is the name of ``folder``.

    Raises StoreError, ChainError, OSError.
    """
    digest, text = folder.name, b""
    with suppress(OSError):
        with (folder / LIST).open("rb") as file:
            text = file.read(LARGEST_LIST + 1)
    if hashlib.sha256(text).hexdigest() != digest:
        reader = open_bucket()
        found = reader.get(_key(digest), limit=LARGEST_LIST)
        if found is None:
            raise ObjectMissingError(f"{reader.name}/{_key(digest)} is missing")
        text = found
        if hashlib.sha256(text).hexdigest() != digest:
            raise IntegrityError(f"{reader.name}/{_key(digest)} is damaged")
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / LIST, text)
    try:
        return _FILES.validate_json(text)
    except ValidationError:  # the list is signed, but another version of the program wrote it
        raise IntegrityError(f"{_key(digest)} is no list of files: update the program") from None


def publish(config: Config, store: ObjectStore) -> None:
    """Upload the network's files that are missing in the global bucket, each list after its files.

    Call it after :func:`fetch_published`. Raises StoreError, OSError.
    """
    there = {each.key: each.size for each in Retry(each=_SMALL)(store.list_objects, _key(""))}
    for what, folder in config.published.items():
        files = _FILES.validate_json((folder / LIST).read_bytes())
        # Collect by key: files with identical bytes share one object, and two multipart uploads of
        # the same object must not run at once.
        missing = {
            _key(listed.sha256): folder / name
            for name, listed in files.items()
            if there.get(_key(listed.sha256)) != listed.size
        }
        if missing:  # log it, since uploading data may take hours
            log.info("Publishing the network's %s: %d files", what, len(missing))
        upload_all(store, missing.items(), until=deadline_in(_LONG))
        of_list = _key(folder.name), folder / LIST
        if missing or there.get(of_list[0]) != of_list[1].stat().st_size:
            upload_all(store, [of_list], until=deadline_in(_LONG))


def _is(path: Path, listed: Listed) -> bool:
    with suppress(OSError):
        return path.stat().st_size == listed.size and sha256_of(path) == listed.sha256
    return False


def _key(digest: str) -> str:
    return f"files/{digest}"


# --- versions of the network's file ---------------------------------------------------------------


def open_versions(
    network: Network, folder: Path, outer_step: int, read: Callable[[int], str | None]
) -> Versions:
    """Return the versions of the network's file, with the one for ``outer_step`` in force.

    Args:
        network: The file that the program was started with.
        folder: The run folder, where the versions are kept.
        outer_step: The outer step from which the program continues.
        read: Returns the text of a version in the network's bucket, or None if it has none.

    Raises:
        NetworkFailure: An earlier version of the file is in force, and no copy of it can be found.
    """
    versions = Versions(network, folder)
    for problem in (versions.look_beside(network.place), versions.look(read)):
        if problem:
            log.warning("%s", problem)
    if not versions.knows(outer_step):
        raise NetworkFailure(
            f"{network.place} is valid from outer step {network.head.from_outer_step}, the network "
            f"is at {outer_step}, and the earlier version is neither in the folder {VERSIONS} "
            "next to it nor in the network's bucket, so the rules are unknown and nothing was "
            "started: wait, put that folder there, or start with the earlier file"
        )
    versions.in_force = versions.at(outer_step)
    if versions.in_force is not network:
        number = versions.in_force.head.version
        log.info("Outer step %d is trained by version %d of the network's file", outer_step, number)
    return versions
