"""The folder of a run: locked while it is used, emptied only if a local subnet wrote it."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path
from typing import IO, Any

from distributed_training.common.files import write_json
from distributed_training.config.flags import ConfigError

STATE_FILE = "localnet.json"  # also tells that a folder is ours
LOCK_FILE = ".lock"


class RunFolder:
    """``path`` is absolute. The lock goes when the process does, however it ends."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock: IO[bytes] | None = None

    def take(self) -> None:
        """Lock it and empty it. Raises ConfigError; nothing has changed then."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / LOCK_FILE).open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise ConfigError(
                f"a local subnet is running in {self.path}, so another cannot start there: "
                "stop it, or give --folder another folder"
            ) from None
        contents = [p for p in self.path.iterdir() if p.name != LOCK_FILE]
        if contents and not (self.path / STATE_FILE).exists():
            self.release()
            (self.path / LOCK_FILE).unlink()
            raise ConfigError(
                f"{self.path} holds files that no local subnet wrote, so it is left alone: "
                "give --folder a new or empty folder"
            )
        for path in contents:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        self.write_state({})

    def write_state(self, state: dict[str, Any]) -> None:
        write_json(self.path / STATE_FILE, state, durable=False)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None
