"""Simulate power losses at each sync and rename, in which a disk loses what was not synced.

The page cache survives ``kill -9``, so only such a disk reveals a missing sync.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

Tree = dict[str, "Tree | bytes"]  # a folder: its entries


@dataclass
class ForgetfulDisk:
    """Track what POSIX guarantees to be on the disk: only files and folders that were synced.

    ``losses``: the states in which the disk may come back after a power loss at any moment.
    ``at_end``: those after the last operation, which are equal to what was written if all of it is
    safe by then.
    """

    root: Path
    losses: list[Tree] = field(default_factory=list)
    at_end: list[Tree] = field(default_factory=list)
    _files: dict[int, bytes] = field(default_factory=dict)  # by inode
    _folders: dict[int, dict[str, int]] = field(default_factory=dict)
    _held: list[int] = field(default_factory=list)  # descriptors: no inode's number is used again
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        for path in (self.root, *self.root.rglob("*")):  # what is there is safe
            handle = os.open(path, os.O_RDONLY)
            self._keep(handle)
            os.close(handle)

    def sync(self, handle: int) -> None:
        with self._lock:
            self._keep(handle)
            self.lose_power()

    def lose_power(self, renamed: Path | None = None) -> list[Tree]:
        """Record the states in which the disk may come back if the power fails now.

        They have only what was synced; or also the file that was just ``renamed``; or also all
        deletions; or all entries, even those of files whose bytes are lost.
        """

        def synced_and_renamed(folder: Path, inode: int) -> dict[str, int]:
            known = self._synced(folder, inode)
            if renamed is None or folder != renamed.parent:
                return known
            return known | {renamed.name: os.stat(renamed).st_ino}

        with self._lock:
            root = os.stat(self.root).st_ino
            ways = (
                self._synced,
                synced_and_renamed,
                self._synced_and_still_there,
                self._seen,
            )
            trees = [self._tree(self.root, root, known) for known in ways]
            self.losses += [tree for tree in trees if tree not in self.losses]
            return trees

    def _keep(self, handle: int) -> None:
        status = os.fstat(handle)
        self._held.append(os.dup(handle))
        if stat.S_ISDIR(status.st_mode):
            self._folders[status.st_ino] = self._entries(Path(f"/proc/self/fd/{handle}"))
        else:
            self._files[status.st_ino] = Path(f"/proc/self/fd/{handle}").read_bytes()

    @staticmethod
    def _entries(folder: Path) -> dict[str, int]:
        with os.scandir(folder) as found:
            return {entry.name: entry.inode() for entry in found}

    def _synced(self, folder: Path, inode: int) -> dict[str, int]:
        return self._folders.get(inode, {})

    def _synced_and_still_there(self, folder: Path, inode: int) -> dict[str, int]:
        there = self._seen(folder, inode)
        return {name: ino for name, ino in self._synced(folder, inode).items() if name in there}

    def _seen(self, folder: Path, inode: int) -> dict[str, int]:
        if not folder.is_dir() or os.stat(folder).st_ino != inode:
            return self._synced(folder, inode)  # replaced or renamed since
        return self._entries(folder)

    def _tree(self, folder: Path, inode: int, known: Callable[[Path, int], dict[str, int]]) -> Tree:
        tree: Tree = {}
        for name, ino in known(folder, inode).items():
            path = folder / name
            if ino in self._folders or path.is_dir():
                tree[name] = self._tree(path, ino, known)
            else:
                tree[name] = self._files.get(ino, b"")
        return tree

    def close(self) -> None:
        for handle in self._held:
            os.close(handle)


@contextmanager
def forgetful_disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForgetfulDisk]:
    """Put ``root`` on such a disk, which loses power after each sync, rename and deletion."""
    disk = ForgetfulDisk(root)

    def noting(name: str, note: Callable[..., object]) -> None:
        real = getattr(os, name)

        def call(*given: object, **options: object) -> object:
            done = real(*given, **options)
            note(*given)
            return done

        monkeypatch.setattr(os, name, call)

    with monkeypatch.context() as monkeypatch:
        for name in ("fsync", "fdatasync"):
            noting(name, disk.sync)
        for name in ("replace", "rename"):
            noting(name, lambda _, to: disk.lose_power(renamed=Path(to)))
        for name in ("unlink", "rmdir"):
            noting(name, lambda *_: disk.lose_power())
        try:
            yield disk
        finally:
            disk.at_end = disk.lose_power()
            disk.close()


def come_back(tree: Tree, folder: Path) -> Path:
    """Create ``folder`` with the files that a power loss has left."""
    folder.mkdir(parents=True)
    for name, content in tree.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            come_back(content, folder / name)
    return folder
