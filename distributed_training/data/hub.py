"""Read byte ranges of a dataset's Parquet files directly from Hugging Face.

The files of one commit below ``data.folder`` form the same table as a local copy of them. Each
folder is a config, whose rows are those of its files, in the order of the file names. So a page is
the same whether it is read here or with ``--data.source parquet:DIR``.

``huggingface_hub`` sends the requests, waits if the hub asks it to, and sends its token only to the
hub. The end of a Parquet file says where its row groups are. The ends and the row counts of all
files are kept on the disk, so that one process on a machine fetches them while the others wait.
After that, a page takes one request.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import HfApi, HfFileSystem
from huggingface_hub.hf_file_system import HfFileSystemFile

from distributed_training.common.files import atomic_file, write_json
from distributed_training.config.settings import DataSettings

from .page_source import Counts, NothingToRead, PageUnavailable
from .parquet import ParquetSource, is_no_data

#: The most bytes that are read at once: one column of a row group, as stored in the file.
LARGEST_READ = 64 * 2**20
_READ_AHEAD = 2**16  # bytes of a file's end that pyarrow reads first
_MOST_FILES = 50_000
_MOST_KEPT = 2 * 10**9  # bytes of file ends that are kept on the disk
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_PASSING = frozenset({408, 425, 429})  # statuses below 500 for which a retry may succeed


class HubSource(ParquetSource):
    """The rows of ``data.dataset`` at the pinned commit, or at the newest if none is pinned.

    ``hub`` is the URL of the hub, and ``cache`` a folder for the ends of the files, or None. Raises
    PageUnavailable.
    """

    def __init__(
        self, settings: DataSettings, *, hub: str, cache: Path | None, counts: Counts
    ) -> None:
        name = settings.dataset
        if not _NAME.fullmatch(name):
            raise NothingToRead(f"data.dataset {name!r:.100} is not the OWNER/NAME of a dataset")
        self._hub = HfFileSystem(endpoint=hub, skip_instance_cache=True)
        with _asking(f"{name} at {hub}"):
            self.revision = settings.revision or str(HfApi(endpoint=hub).dataset_info(name).sha)
        if not _COMMIT.fullmatch(self.revision):
            raise PageUnavailable(f"the hub named no commit of {name}: {self.revision!r:.50}")
        folder = Path(f"datasets/{name}@{self.revision}") / settings.folder
        key = hashlib.sha256(f"{hub} {folder} {settings.text_column}".encode()).hexdigest()[:16]
        self._kept = cache and cache / f"hub-{key}"
        self._room = _MOST_KEPT
        self._sizes: dict[Path, int] = {}
        super().__init__(folder, text_column=settings.text_column, counts=counts)

    def all_rows(self) -> dict[str, int]:
        with contextlib.ExitStack() as stack:
            if not self._ends and self._kept is not None:
                # Let one process on this machine ask the hub, while the others wait. If the disk is
                # full or does not support locks, each process asks the hub itself.
                with contextlib.suppress(OSError):
                    self._kept.mkdir(parents=True, exist_ok=True)
                    file = stack.enter_context((self._kept / "lock").open("ab"))
                    fcntl.flock(file, fcntl.LOCK_EX)
                self._load(self._kept)
                super().all_rows()
                self._store(self._kept)
            return super().all_rows()

    def _files(self) -> list[Path]:
        if self._kept is not None:
            self._load(self._kept)
        if not self._sizes:
            found: Any  # file names, each with the hub's details about the file
            with _asking(str(self._folder)):
                found = self._hub.find(str(self._folder), detail=True)
            for name, entry in found.items():
                path = Path(name)
                below = path.relative_to(self._folder).parts
                # The names appear in log lines, so they must be printable.
                is_data = name.isprintable() and not any(map(is_no_data, below))
                if is_data and path.suffix.lower() == ".parquet":
                    self._sizes[path] = int(entry["size"])
        if not self._sizes:
            raise NothingToRead(f"{self._folder} at {self._hub.endpoint} has no Parquet files")
        if len(self._sizes) > _MOST_FILES:
            raise NothingToRead(
                f"{self._folder} has more than {_MOST_FILES} Parquet files: set data.folder in "
                "the network's file to one of its subfolders"
            )
        return list(self._sizes)

    def _load(self, kept: Path) -> None:
        """Load the row counts that another process has stored."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            found = json.loads((kept / "rows.json").read_text())
            for name, (size, ends) in found.items():
                path = self._folder / name
                self._sizes[path], self._group_ends[path] = size, ends
                self._scanned[path] = ends[-1] if ends else 0

    def _store(self, kept: Path) -> None:
        """Store the row counts for the other processes."""
        found = {
            path.relative_to(self._folder).as_posix(): (self._sizes[path], ends)
            for path, ends in self._group_ends.items()
            if path in self._scanned
        }
        with contextlib.suppress(OSError):
            write_json(kept / "rows.json", found, durable=False)

    def _metadata(self, path: Path) -> Any:
        name = hashlib.sha256(str(path).encode()).hexdigest()[:16]
        kept = self._kept and self._kept / f"{name}.end"
        if kept is not None:
            with contextlib.suppress(OSError, ValueError):
                return pq.read_metadata(kept)
        meta = super()._metadata(path)
        self._room -= meta.serialized_size
        if kept is not None and self._room > 0:
            with contextlib.suppress(OSError), atomic_file(kept, durable=False) as file:
                meta.write_metadata_file(file)
        return meta

    def _open(self, path: Path) -> Any:
        size = self._sizes[path]
        with _asking(str(path)):
            file = _HubFile(self._hub, str(path), size=size, block_size=_READ_AHEAD)
        return pa.PythonFile(file, mode="r")

    def _parquet(self, path: Path) -> Any:
        # With pre_buffer, one request reads the whole column of a row group.
        return pq.ParquetFile(self._open(path), metadata=self._metadata(path), pre_buffer=True)


class _HubFile(HfFileSystemFile):
    """A file at the hub, of which at most ``LARGEST_READ`` bytes are read at once."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        size = end - start
        if size > LARGEST_READ + _READ_AHEAD:
            raise NothingToRead(
                f"{self.path} has a row group with {size / 1e6:.0f} MB of text, and at most "
                f"{LARGEST_READ / 1e6:.0f} MB are read at once: download the data, and use "
                "--data.source parquet:DIR"
            )
        with _asking(f"{self.path}, bytes {start} to {end}"):
            data: bytes = super()._fetch_range(start, end)
        if len(data) != size:
            raise NothingToRead(
                f"{self.path}: {len(data)} bytes came instead of a range of {size}: download the "
                "data, and use --data.source parquet:DIR"
            )
        return data


@contextlib.contextmanager
def _asking(what: str) -> Iterator[None]:
    """Raise PageUnavailable for any error that occurs while ``what`` is requested."""
    try:
        yield
    except PageUnavailable:
        raise
    except FileNotFoundError:
        raise NothingToRead(
            f"{what}: the hub has no such dataset or commit, or HF_TOKEN may not read it"
        ) from None
    except Exception as error:  # noqa: BLE001 - a server's answer can raise anything in a library
        # Do not show the text of the error. It may contain the token, or a signed URL to which the
        # hub has redirected the request.
        status = getattr(getattr(error, "response", None), "status_code", 0)
        why = f"HTTP {status}" if status else type(error).__name__
        if status == 429:
            why += ", too many requests from this machine: set HF_TOKEN, or read local files"
        if 400 <= status < 500 and status not in _PASSING:
            raise NothingToRead(f"{what}: {why}") from None
        raise PageUnavailable(f"{what}: {why}") from None
