"""The object store that comes with the program: the rights to write, and its durability."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import httpx
import psutil
import pytest
from pydantic import SecretStr

from distributed_training.common.ports import free_ports
from distributed_training.config.settings import StoreSettings
from distributed_training.localnet.services import ObjectStoreServer
from distributed_training.store.errors import StoreError
from distributed_training.store.s3 import S3ObjectStore
from distributed_training.store.server import member_keys, write_members

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStoreServer]:
    with ObjectStoreServer(folder=tmp_path_factory.mktemp("store")) as running:
        yield running


def opened(server: ObjectStoreServer, keys: dict[str, str], bucket: str, kind: str = "WRITE"):
    values = {"endpoint_url": server.endpoint, "part_size": 5 * MIB}
    for name, value in keys.items():
        values[name.removeprefix("R2_").lower()] = SecretStr(value) if "ACCESS" in name else value
    settings = StoreSettings(**values)
    return closing(S3ObjectStore.from_settings(settings, bucket=bucket, write=kind == "WRITE"))


def may(action) -> bool:
    with suppress(StoreError):
        action()
        return True
    return False


def test_a_member_writes_its_own_bucket_and_no_other(server: ObjectStoreServer) -> None:
    one, two = (member_keys(server.folder, f"hotkey{i}", f"lab-00{i}") for i in (1, 2))
    with opened(server, one, "lab-001") as own:
        assert not may(own.create_bucket), "nobody was let in yet"
        write_members(server.folder, {"hotkey1": "lab-001", "hotkey2": "lab-002"})
        own.create_bucket()
        own.put("a", b"1")
        parts = own.multipart()
        upload = parts.create_multipart("large")
        sent = [parts.upload_part("large", upload, n, b"x" * 5 * MIB) for n in (1, 2)]
        parts.complete_multipart("large", upload, sent)
        assert own.head("large").size == 10 * MIB
        assert {o.key for o in own.list_objects("")} == {"a", "large"}
    with opened(server, one, "lab-001", "READ") as public:
        assert public.get("a", limit=9) == b"1" and not may(lambda: public.put("b", b"2"))
    with opened(server, two, "lab-002") as other:
        other.create_bucket()
        other.put("a", b"2")
    with opened(server, two, "lab-001") as theirs:
        assert not may(lambda: theirs.put("a", b"3")) and not may(lambda: theirs.delete("a"))
        assert not may(lambda: theirs.get("a", limit=9))
    with opened(server, two, "lab-003") as new:
        assert not may(new.create_bucket)
    with opened(server, {**two, "R2_WRITE_SECRET_ACCESS_KEY": "0" * 64}, "lab-002") as forged:
        assert not may(lambda: forged.put("a", b"4"))
    # Expelled: the key that it has is good for nothing any more.
    write_members(server.folder, {"hotkey1": "lab-001"})
    with opened(server, two, "lab-002") as gone:
        assert not may(lambda: gone.put("a", b"5"))
    with opened(server, server.keys, "lab-002") as founder:
        assert founder.get("a", limit=9) == b"2"


def test_no_request_without_a_signature_is_answered(server: ObjectStoreServer) -> None:
    """The servers behind it answer none either, though Swift itself asks them without a key."""
    account = server.keys["R2_WRITE_ACCESS_KEY_ID"].partition(":")[0]
    (process,) = [server.child.pid]
    ports = {
        c.laddr.port for c in psutil.Process(process).net_connections() if c.status == "LISTEN"
    }
    assert server.port in ports and len(ports) == 4
    for port in ports:
        for method, path in (
            ("PUT", f"/disk/0/AUTH_{account}"),
            ("PUT", f"/v1/AUTH_{account}/stranger"),
            ("PUT", "/stranger"),
            ("DELETE", f"/disk/0/AUTH_{account}/lab-001/a"),
            ("GET", "/auth/v1.0"),
            ("POST", f"/v1/AUTH_{account}?bulk-delete"),
            ("PUT", f"/v1/AUTH_{account}/stranger?extract-archive=tar"),
        ):
            headers = {"X-Timestamp": "9999999999.0", "X-Auth-User": "a:b", "X-Auth-Key": "c"}
            url = f"http://127.0.0.1:{port}{path}"
            assert httpx.request(method, url, headers=headers).status_code in (401, 403), url


def test_a_silent_connection_is_closed(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    program = "from distributed_training.store import server; server._IDLE = 1.0; server.main()"
    words = ["--folder", str(tmp_path), "--port", str(port)]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline().startswith("READY ")
        with socket.create_connection(("127.0.0.1", port), timeout=60) as silent:
            assert silent.recv(1) == b""
    finally:
        process.kill()
        process.communicate()


def test_objects_and_members_are_there_after_a_kill(tmp_path: Path) -> None:
    keys = member_keys(tmp_path, "hotkey", "lab-001")
    write_members(tmp_path, {"hotkey": "lab-001"})
    with ObjectStoreServer(folder=tmp_path) as server, opened(server, keys, "lab-001") as bucket:
        bucket.create_bucket()
        bucket.put("a", b"1")
        server.child.kill_tree()
    with ObjectStoreServer(folder=tmp_path) as server, opened(server, keys, "lab-001") as bucket:
        assert bucket.get("a", limit=9) == b"1"
