"""An object store that speaks S3 over HTTP: OpenStack Swift with its S3 API, in one process.

    python -m distributed_training.localnet.object_store --folder DIR --port 9000

reads the credentials from ``DIR/credentials.json`` (written by :class:`ObjectStoreServer`, mode
0600) and prints ``READY`` when it answers. There are two keys of one account: one that may do
everything and one that may only read. Objects survive a SIGKILL. Linux only: Swift keeps metadata
in extended attributes.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from distributed_training.common.ports import free_ports
from distributed_training.common.processes import die_with_parent

_REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class StoreCredentials:
    """Lengths are R2's (32, 32, 64 characters), since the commitment on the chain has no other."""

    account_id: str
    write_key: str
    write_secret: str
    read_key: str
    read_secret: str

    @classmethod
    def generate(cls) -> StoreCredentials:
        # Swift's access key is "account:user"; both halves are plain letters and digits.
        account = "dt" + secrets.token_hex(6)
        return cls(
            account_id=secrets.token_hex(16),
            write_key=f"{account}:w{secrets.token_hex(8)}",
            write_secret=secrets.token_hex(32),
            read_key=f"{account}:r{secrets.token_hex(8)}",
            read_secret=secrets.token_hex(32),
        )


class ObjectStoreServer:
    """Starts and stops the server; its data lies in ``folder`` and is there at the next start.

    ``start_timeout`` covers imports and the first answer. Raises RuntimeError with the log's last
    lines if it does not come up.
    """

    def __init__(
        self, *, folder: Path, port: int = 0, start_timeout: timedelta = timedelta(seconds=60)
    ) -> None:
        self.folder = folder
        self.port = port or free_ports(1)[0]
        self._start_timeout = start_timeout
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "credentials.json"
        if path.exists():
            self.credentials = StoreCredentials(**json.loads(path.read_text()))
        else:
            self.credentials = StoreCredentials.generate()
            with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
                json.dump(asdict(self.credentials), file)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        log_path = self.folder / "log.txt"
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", __name__),
                    *("--folder", str(self.folder), "--port", str(self.port)),
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=_REPOSITORY,
                start_new_session=True,
            )
        ready = threading.Event()
        stdout = self._process.stdout
        assert stdout is not None

        def follow() -> None:
            with stdout:
                for line in stdout:
                    if line.startswith(b"READY"):
                        ready.set()

        threading.Thread(target=follow, name="object-store-output", daemon=True).start()
        deadline = time.monotonic() + self._start_timeout.total_seconds()
        while not ready.wait(0.05):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                tail = log_path.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"the object store did not start on port {self.port}:\n{tail}")

    def stop(self) -> None:
        """Idempotent."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def kill(self) -> None:
        """SIGKILL, for tests of what survives it."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> ObjectStoreServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


# --- the server process --------------------------------------------------------------------------

_FILTERS = {
    "catch_errors": "",
    "gatekeeper": "",
    "memcache": "",
    "listing_formats": "",
    "bulk": "",
    "s3api": "auth_pipeline_check = false\nlocation = auto\nmax_upload_part_num = 10000\n"
    "max_bucket_listing = 1000\n",
    "tempauth": None,  # filled in: the keys
    "copy": "",
    "slo": "allow_async_delete = false\n",  # else a delete never frees the space of its segments
    "dlo": "",
    "versioned_writes": "allow_object_versioning = true\n",
    "symlink": "",
}
# "copy" stands before "slo", or copying a multipart object copies its manifest.
_PIPELINE = (
    "catch_errors gatekeeper memcache listing_formats bulk s3api tempauth copy slo dlo "
    "versioned_writes symlink proxy-server"
)


def _write_configuration(folder: Path, port: int, credentials: StoreCredentials) -> dict[str, Path]:
    """swift.conf, one ring and one file per service. Returns the services' files, proxy last."""
    import pwd

    from swift.common.ring import RingBuilder

    (folder / "devices" / "disk").mkdir(parents=True, exist_ok=True)
    # Prefix and suffix take part in where objects lie: they must never change for this folder.
    (folder / "swift.conf").write_text(
        "[swift-hash]\nswift_hash_path_prefix = localnet\nswift_hash_path_suffix = localnet\n"
        "[storage-policy:0]\nname = single\ndefault = yes\n"
    )
    user = pwd.getpwuid(os.getuid()).pw_name
    common = f"swift_dir = {folder}\nlog_level = ERROR\nuser = {user}\nbind_ip = 127.0.0.1\n"
    files = {}
    services = ("account", "container", "object")
    for service, service_port in zip(services, free_ports(3), strict=True):
        # Ports differ from start to start; with one device the ring holds nothing else.
        builder = RingBuilder(part_power=4, replicas=1, min_part_hours=0)
        builder.add_dev(
            {
                "id": 0,
                "region": 1,
                "zone": 1,
                "ip": "127.0.0.1",
                "port": service_port,
                "replication_ip": "127.0.0.1",
                "replication_port": service_port,
                "device": "disk",
                "weight": 1,
                "meta": "",
            }
        )
        builder.rebalance()
        builder.get_ring().save(str(folder / f"{service}.ring.gz"))
        files[service] = folder / f"{service}.conf"
        files[service].write_text(
            f"[DEFAULT]\n{common}bind_port = {service_port}\ndevices = {folder / 'devices'}\n"
            f"mount_check = false\n[pipeline:main]\npipeline = {service}-server\n"
            f"[app:{service}-server]\nuse = egg:swift#{service}\n"
        )
    keys = ""
    for key, secret, group in (
        (credentials.write_key, credentials.write_secret, ".admin"),
        (credentials.read_key, credentials.read_secret, ".reseller_reader"),
    ):
        account, name = key.split(":")
        keys += f"user_{account}_{name} = {secret} {group}\n"
    text = f"[DEFAULT]\n{common}bind_port = {port}\n[pipeline:main]\npipeline = {_PIPELINE}\n"
    text += "[app:proxy-server]\nuse = egg:swift#proxy\nallow_account_management = true\n"
    text += "account_autocreate = true\n"
    for name, settings in _FILTERS.items():
        body = keys if settings is None else settings
        text += f"[filter:{name}]\nuse = egg:swift#{name}\n{body}"
    files["proxy"] = folder / "proxy.conf"
    with open(os.open(files["proxy"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as handle:
        handle.write(text)
    return files


def serve(folder: Path, port: int) -> None:
    """Runs until SIGTERM or SIGINT."""
    import eventlet

    eventlet.monkey_patch(os=True, select=True, socket=True, thread=True, time=True)
    credentials = StoreCredentials(**json.loads((folder / "credentials.json").read_text()))
    os.environ["SWIFT_CONF"] = str(folder / "swift.conf")
    import swift.common.utils as swift_utils

    swift_utils.SWIFT_CONF_FILE = str(folder / "swift.conf")
    if hasattr(swift_utils, "config"):
        swift_utils.config.SWIFT_CONF_FILE = str(folder / "swift.conf")
    files = _write_configuration(folder, port, credentials)
    import swift.common.storage_policy as storage_policy
    from eventlet import wsgi as eventlet_wsgi
    from swift.common import wsgi

    storage_policy.reload_storage_policies()
    for service, path in files.items():
        app: Any = wsgi.loadapp(str(path), global_conf={"log_name": service})
        bind_port = next(
            int(line.split("=")[1])
            for line in path.read_text().splitlines()
            if line.startswith("bind_port")
        )
        listener = eventlet.listen(("127.0.0.1", bind_port), backlog=512)
        eventlet.spawn(
            eventlet_wsgi.server,
            listener,
            app,
            custom_pool=eventlet.GreenPool(512),
            protocol=wsgi.SwiftHttpProtocol,
            log_output=False,
            debug=False,
            capitalize_response_headers=False,
            url_length_limit=8192,
        )
    stopped = eventlet.Event()

    def stop(*_: object) -> None:
        os._exit(0)  # whatever was acknowledged is on disk

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the orchestrator's to handle
    print("READY", flush=True)
    stopped.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description="S3-speaking object store of the local subnet")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(signal.SIGTERM)
    try:
        serve(arguments.folder.resolve(), arguments.port)
    except OSError as error:
        print(
            f"error: port {arguments.port} cannot be used ({error}): give another --port",
            file=sys.stderr,
        )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
