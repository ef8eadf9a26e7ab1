"""An object store that speaks S3 over HTTP: OpenStack Swift with its S3 API, in one process.

    python -m distributed_training.store.server --folder DIR --port 9000 [--host ADDRESS]

reads its keys from ``DIR/credentials.json`` (:func:`store_keys`, mode 0600) and prints ``READY``
and its pid when it answers. There are two keys of one account: one that may do everything and one
that may only read. ``DIR/members.json`` adds members (:func:`write_members`): each has a key that
writes one bucket. A request without a signature of one of these keys is refused. Objects survive a
SIGKILL. Linux only: Swift keeps metadata in extended attributes.

It is made for a laboratory or a trial: one process, one copy of each object, and no service of
Swift's that looks for damaged objects or takes back what deleted ones leave (a file without content
each).
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import secrets
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from distributed_training.common.files import atomic_file
from distributed_training.common.ports import free_ports
from distributed_training.common.processes import limit_resources

CREDENTIALS, MEMBERS = "credentials.json", "members.json"
_MOST_CONNECTIONS = 512  # at each port
_IDLE = 60.0  # seconds without a byte after which a connection is closed, as Swift has it
_INSIDE = "X-Of-This-Process"  # header of a request from one of the four servers to another


def store_keys(folder: Path) -> dict[str, str]:
    """Return the R2 variables of the two keys of the store in ``folder``, made if there are none.

    Lengths are R2's (32, 32, 64 characters), since the commitment on the chain has no other.
    """
    path = folder / CREDENTIALS
    if path.exists():
        known: dict[str, str] = json.loads(path.read_text())
        return known
    # Swift's access key is "account:user"; both halves are plain letters and digits.
    account, keys = "dt" + secrets.token_hex(6), {"R2_ACCOUNT_ID": secrets.token_hex(16)}
    for kind in ("READ", "WRITE"):
        keys[f"R2_{kind}_ACCESS_KEY_ID"] = f"{account}:{kind[0].lower()}{secrets.token_hex(8)}"
        keys[f"R2_{kind}_SECRET_ACCESS_KEY"] = secrets.token_hex(32)
    with atomic_file(path, private=True) as file:
        file.write(json.dumps(keys).encode())
    return keys


def member_keys(folder: Path, hotkey: str, bucket: str) -> dict[str, str]:
    """Return the R2 variables of a member: the store's key that reads, and one for ``bucket``.

    It is good while :func:`write_members` names the two. ``R2_ACCOUNT_ID`` is none of them.
    """
    keys = store_keys(folder)
    account = keys["R2_WRITE_ACCESS_KEY_ID"].partition(":")[0]
    return {
        **{name: value for name, value in keys.items() if name.startswith("R2_READ")},
        "R2_WRITE_ACCESS_KEY_ID": f"{account}:{hotkey}",
        "R2_WRITE_SECRET_ACCESS_KEY": secret_of(keys["R2_WRITE_SECRET_ACCESS_KEY"], hotkey, bucket),
    }


def secret_of(root: str, hotkey: str, bucket: str) -> str:
    """Return a member's secret, which follows from the store's own ``root``."""
    return hmac.digest(root.encode(), f"{hotkey} {bucket}".encode(), "sha256").hex()


def write_members(folder: Path, members: Mapping[str, str]) -> None:
    """Tell the store, running or not, which hotkey may write which bucket, and no other."""
    with atomic_file(folder / MEMBERS, private=True) as file:
        file.write(json.dumps(members).encode())


# "copy" stands before "slo", or copying a multipart object copies its manifest.
_FILTERS = (
    *("catch_errors", "gatekeeper", "memcache", "listing_formats", "s3api"),
    *("copy", "slo", "dlo", "versioned_writes", "symlink"),
)
_SETTINGS = {  # of some filters
    "s3api": "auth_pipeline_check = false\nlocation = auto\nmax_upload_part_num = 10000\n"
    "max_bucket_listing = 1000\n",
    "slo": "allow_async_delete = false\n",  # else a delete never frees the space of its segments
    "versioned_writes": "allow_object_versioning = true\n",
}


def _write_configuration(folder: Path, port: int) -> dict[int, Path]:
    """Write swift.conf, a ring and a file per service. Return port -> file, the proxy last."""
    from swift.common.ring import RingBuilder

    (folder / "devices" / "disk").mkdir(parents=True, exist_ok=True)
    # Prefix and suffix decide where objects lie: they must never change for this folder.
    (folder / "swift.conf").write_text(
        "[swift-hash]\nswift_hash_path_prefix = localnet\nswift_hash_path_suffix = localnet\n"
        "[storage-policy:0]\nname = single\ndefault = yes\n"
    )
    common = f"swift_dir = {folder}\nlog_level = ERROR\n"
    files = {}
    services = ("account", "container", "object")
    # Of their own ports: Swift's four servers speak HTTP with each other, in one process too.
    for service, service_port in zip(services, free_ports(3), strict=True):
        # One device, no replicas: the smallest ring that Swift takes. Its port differs each time.
        builder = RingBuilder(part_power=4, replicas=1, min_part_hours=0)
        here = {"ip": "127.0.0.1", "port": service_port}
        replication = {"replication_ip": "127.0.0.1", "replication_port": service_port}
        place = {"id": 0, "region": 1, "zone": 1, "device": "disk", "weight": 1, "meta": ""}
        builder.add_dev({**place, **here, **replication})
        builder.rebalance()
        builder.get_ring().save(str(folder / f"{service}.ring.gz"))
        files[service_port] = folder / f"{service}.conf"
        files[service_port].write_text(
            f"[DEFAULT]\n{common}bind_port = {service_port}\ndevices = {folder / 'devices'}\n"
            f"mount_check = false\n[pipeline:main]\npipeline = {service}-server\n"
            f"[app:{service}-server]\nuse = egg:swift#{service}\n"
        )
    pipeline = " ".join([*_FILTERS, "proxy-server"]).replace("s3api", "s3api keys")
    text = f"[DEFAULT]\n{common}bind_port = {port}\n[pipeline:main]\npipeline = {pipeline}\n"
    # Buckets are containers of one account, which is made at the first request.
    text += "[app:proxy-server]\nuse = egg:swift#proxy\nallow_account_management = true\n"
    text += "account_autocreate = true\n"
    for name in _FILTERS:
        text += f"[filter:{name}]\nuse = egg:swift#{name}\n{_SETTINGS.get(name, '')}"
    keys = store_keys(folder)
    text += "[filter:keys]\npaste.filter_factory = distributed_training.store.server_keys:build\n"
    text += f"members = {folder / MEMBERS}\n"
    for kind, group in (("WRITE", ".admin"), ("READ", ".reseller_reader")):
        account, name = keys[f"R2_{kind}_ACCESS_KEY_ID"].split(":")
        text += f"user_{account}_{name} = {keys[f'R2_{kind}_SECRET_ACCESS_KEY']} {group}\n"
    files[port] = folder / "proxy.conf"
    with open(os.open(files[port], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as handle:
        handle.write(text)
    return files


def _only_inside(app: Any, token: str) -> Callable[[Mapping[str, str], Any], Iterable[bytes]]:
    """Return ``app`` for callers that know ``token``: Swift's servers ask each other for no key."""

    def answer(environ: Mapping[str, str], start_response: Any) -> Iterable[bytes]:
        given = environ.get(f"HTTP_{_INSIDE.upper().replace('-', '_')}", "")
        if not hmac.compare_digest(given.encode(), token.encode()):
            start_response("403 Forbidden", [])
            return [b""]
        answered: Iterable[bytes] = app(environ, start_response)
        return answered

    return answer


def serve(folder: Path, host: str, port: int) -> None:
    """Serve until SIGTERM. Raises OSError where ``host`` and ``port`` cannot be used."""
    limit_resources()  # each connection opens others behind, and files
    with warnings.catch_warnings():  # it warns of itself, in ten lines at each start
        warnings.simplefilter("ignore")
        import eventlet

    # Before Swift is imported: its four servers share this process and would block each other.
    eventlet.monkey_patch(os=True, select=True, socket=True, thread=True, time=True)
    os.environ["SWIFT_CONF"] = str(folder / "swift.conf")
    import swift.common.utils as swift_utils

    swift_utils.SWIFT_CONF_FILE = str(folder / "swift.conf")
    files = _write_configuration(folder, port)
    import swift.common.storage_policy as storage_policy
    from eventlet import wsgi as eventlet_wsgi
    from swift.common import bufferedhttp, wsgi

    token = secrets.token_hex(16)

    class Connection(bufferedhttp.BufferedHTTPConnection):  # type: ignore[misc]
        def endheaders(self, *given: Any, **more: Any) -> None:
            self.putheader(_INSIDE, token)
            super().endheaders(*given, **more)

    bufferedhttp.BufferedHTTPConnection = Connection
    storage_policy.reload_storage_policies()
    for bind_port, path in files.items():
        app = wsgi.loadapp(str(path), global_conf={"log_name": path.stem})
        outside = bind_port == port
        family = socket.AF_INET6 if outside and ":" in host else socket.AF_INET
        address = (host if outside else "127.0.0.1", bind_port)
        eventlet.spawn(
            eventlet_wsgi.server,
            eventlet.listen(address, family=family, backlog=512),
            app if outside else _only_inside(app, token),
            custom_pool=eventlet.GreenPool(_MOST_CONNECTIONS),
            # Or as many connections that say nothing, from anywhere, shut everybody out for good.
            socket_timeout=_IDLE,
            protocol=wsgi.SwiftHttpProtocol,
            log_output=False,
            debug=False,
            capitalize_response_headers=False,
            url_length_limit=8192,
        )
    # Whatever was acknowledged is on disk.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the orchestrator's to handle
    print(f"READY {os.getpid()}", flush=True)
    eventlet.Event().wait()


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve objects over S3, for a trial")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1", help="[127.0.0.1]")
    arguments = parser.parse_args()
    try:
        serve(arguments.folder.resolve(), arguments.host, arguments.port)
    except OSError as error:
        where = f"{arguments.host}:{arguments.port}"
        print(f"error: {where} cannot be used ({error}): give another --port", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
