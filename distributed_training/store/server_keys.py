"""The keys of :mod:`.server`, as a filter of Swift's: the store's own two, and one for each member.

Swift imports it, once its servers may share a process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from swift.common.middleware.tempauth import TempAuth
from swift.common.swob import HTTPForbidden

from .server import secret_of

_PARTS = "+segments"  # ending of the bucket in which Swift keeps the parts of uploads


class Keys(TempAuth):  # type: ignore[misc]
    """A member's key does everything in its own bucket, and nothing anywhere else."""

    def __init__(self, app: Any, conf: Mapping[str, str]) -> None:
        super().__init__(app, conf)
        self._file = Path(conf["members"])
        self.users: dict[str, dict[str, Any]]  # by key id; as TempAuth has them
        self._own = dict(self.users)
        self._read: tuple[int, int] | None = None  # the file that was read last

    def __call__(self, env: dict[str, Any], start_response: Any) -> Any:
        # Nothing but S3: Swift's own way gives tokens, which would outlive a membership.
        if "s3api.auth_details" not in env:
            return HTTPForbidden()(env, start_response)
        self._read_members()
        return super().__call__(env, start_response)

    def authorize(self, req: Any) -> Any:
        groups = (req.remote_user or "").split(",")
        bucket = self.users.get(":".join(groups[1:2]), {}).get("bucket")
        if bucket is None:
            return super().authorize(req)
        _, _, container, _ = req.split_path(1, 4, True)
        return None if container in (bucket, bucket + _PARTS) else self.denied_response(req)

    def _read_members(self) -> None:
        """Take over the file if it is another than at the last request."""
        try:
            found = os.stat(self._file)
            known = (found.st_ino, found.st_mtime_ns)
            if known == self._read:
                return
            members: dict[str, str] = json.loads(self._file.read_bytes())
        except FileNotFoundError:
            known, members = (0, 0), {}
        key, user = next((k, u) for k, u in self._own.items() if ".admin" in u["groups"])
        account = key.partition(":")[0]
        self.users = self._own | {
            f"{account}:{hotkey}": {
                **user,
                "key": secret_of(user["key"], hotkey, bucket),
                "groups": [],
                "bucket": bucket,
            }
            for hotkey, bucket in members.items()
        }
        self._read = known


def build(defaults: Mapping[str, str], **conf: str) -> Callable[[Any], Keys]:
    """Return what puts the filter before an application."""
    return lambda app: Keys(app, {**defaults, **conf})
