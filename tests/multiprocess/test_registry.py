"""Test the registry over HTTP and as a program: who may write, and which state survives a kill."""

from __future__ import annotations

import itertools
import json
import logging
import math
import resource
import shutil
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from bittensor import http_auth
from pydantic import SecretStr

from distributed_training import network_command as program
from distributed_training.chain.base import ChainError, find
from distributed_training.chain.identity import Wallet, create_wallet
from distributed_training.chain.registry import RegistryChain
from distributed_training.common import files
from distributed_training.common.ports import free_ports
from distributed_training.protocol.network_report import NetworkReport
from distributed_training.registry import store
from distributed_training.registry.files import SECRET
from distributed_training.registry.page import draw_page
from distributed_training.registry.service import Limits
from distributed_training.registry.store import Registry, hash_of
from tests.tools.chain_program import chain_program
from tests.tools.chain_raw import trickle
from tests.tools.chain_server_thread import RegistryServer
from tests.tools.chain_world import MINER, PEER, STRANGER, VALIDATOR, registry_at
from tests.tools.network import network_file
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(240)
NETWORK = Path(__file__).parents[2] / "networks" / "local.toml"


@contextmanager
def chain_of(url: str, wallet: Wallet, **options: Any) -> Iterator[RegistryChain]:
    quick = timedelta(milliseconds=20)
    with closing(registry_at(url, wallet, poll_interval=quick, **options)) as chain:
        assert chain.wait_ready(timedelta(seconds=30))
        yield chain


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RegistryServer]:
    with RegistryServer(tmp_path / "registry") as made:
        yield made


def post(server: RegistryServer, path: str, body: bytes, headers: dict[str, str]) -> int:
    return httpx.post(
        server.url + path, content=body, headers=headers, trust_env=False, verify=False
    ).status_code


def sign(
    server: RegistryServer, wallet: Wallet, path: str, body: bytes, **changes: Any
) -> dict[str, str]:
    fields = {"receiver_ss58": server.charter.identity, **changes}
    return http_auth.sign(wallet.hotkey, method="POST", path=path, body=body, **fields)


def test_only_the_hotkey_writes_for_itself(server: RegistryServer, tmp_path: Path) -> None:
    body = json.dumps({"text": "x"}).encode()
    with chain_of(server.url, PEER) as chain, chain_of(server.url, STRANGER) as other:
        chain.register()
        with pytest.raises(ChainError, match="not registered"):
            other.commit("y")
        assert post(server, "/commit", body, {}) == 401
        assert post(server, "/commit", b"x" * (300 * 1024), {}) == 413
        forged = sign(server, VALIDATOR, "/commit", body)
        forged["X-Bittensor-Hotkey"] = PEER.ss58
        assert post(server, "/commit", body, forged) == 401
        good = sign(server, PEER, "/commit", body)
        assert post(server, "/commit", body.replace(b"x", b"z"), good) == 401
        assert post(server, "/commit", body, good) == 200
        assert post(server, "/commit", body, good) == 401  # replayed
        server.stop()
        server.start()
        assert post(server, "/commit", body, good) == 401  # another process refuses it too
        wait_for(lambda: chain.commitment(PEER.ss58) == "x")
        for apart in (-30, +30):
            nonce = time.time_ns() + apart * 10**9
            late = sign(server, PEER, "/commit", body, nonce_ns=nonce)
            assert post(server, "/commit", body, late) == 401
        with RegistryServer(tmp_path / "other") as twin:  # the same name, the same founder
            theirs = sign(twin, PEER, "/commit", body)
        assert post(server, "/commit", body, theirs) == 401
        assert post(server, "/commit", body, sign(server, PEER, "/commit", body)) == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/serve", b'{"ip": "1.2.3.4", "port": 0}'),
        ("/serve", b'{"ip": "1.2.3.4", "port": NaN}'),
        ("/commit", b'{"text": 5}'),
        ("/commit", b"[]"),
        ("/register", b'{"uid": -1}'),
        ("/register", b'{"uid": 4096}'),
        ("/allow", b'{"hotkey": "<script>", "allowed": true}'),
        *(("/serve", b'{"ip": "%s", "port": 1}' % ip) for ip in (b"a/b?", b"fe80::1%a/", b"::x")),
        ("/expel", b'{"hotkey": "' + VALIDATOR.ss58.encode() + b'"}'),
        ("/invite", b'{"hashed": "secret", "uses": 1, "expires": 1}'),
    ],
)
def test_nonsense_is_refused(server: RegistryServer, path: str, body: bytes) -> None:
    before = server.registry.view
    assert post(server, path, body, sign(server, VALIDATOR, path, body)) == 400
    assert server.registry.view is before


def test_only_the_founder_admits_and_expels(server: RegistryServer) -> None:
    with chain_of(server.url, PEER) as chain, chain_of(server.url, VALIDATOR) as founder:
        assert chain.register() == 1
        for write in (
            lambda: chain.administer("expel", hotkey=VALIDATOR.ss58),
            lambda: chain.administer("allow", hotkey=PEER.ss58, allowed=True),
            lambda: chain.administer(
                "invite", hashed=hash_of("x"), uses=9, expires=time.time() + 60
            ),
            lambda: chain.administer("revoke", invitation="0" * 12),
            lambda: chain.report(report_of(0, 1.0)),
            lambda: chain.administer("invitations"),
        ):
            with pytest.raises(ChainError, match="founder"):
                write()
        leads = [n.validator_permit for n in chain.neurons()]
        assert leads == [True, False], "the founder, and nobody else"
        founder.administer("expel", hotkey=PEER.ss58)
        wait_for(lambda: chain.uid(PEER.ss58) is None)


def test_when_all_uids_are_taken_nobody_loses_one(tmp_path: Path) -> None:
    charter = store.Charter("full", VALIDATOR.ss58, most_uids=4, admission="open")
    with closing(Registry.at(tmp_path, charter)) as registry:
        uids = [registry.register(f"hotkey-{i}") for i in range(3)]
        with pytest.raises(ChainError, match="all 4 uids are taken: ask the founder"):
            registry.join(PEER.ss58)
        registry.expel("hotkey-1")
        assert registry.join(PEER.ss58) == uids[1]


@pytest.mark.parametrize(("most", "first"), [(256, 66), (32, 31)])
def test_a_restored_backup_gives_no_uid_out_twice(tmp_path: Path, most: int, first: int) -> None:
    """Members that joined since then get their uids back; a newcomer gets a much higher one."""
    charter = store.Charter("lab", VALIDATOR.ss58, most_uids=most, admission="invited")
    folder, copy = tmp_path / "registry", tmp_path / "copy.db"
    with closing(Registry.at(folder, charter)) as registry:
        registry.invite(hash_of("ends"), uses=9, expires=time.time() + 3600)
        assert registry.join(PEER.ss58, "ends") == 1 and registry.join("since", "ends") == 2
        with registry.change():
            registry._remove(2)  # this uid is free in the backup, and was given out afterwards
        store.backup(folder / store.FILE, copy)
        assert registry.join(MINER.ss58, "ends") == 2
        assert registry.join("later", "ends") == 3
    store.restore(copy, folder)
    with closing(Registry.at(folder)) as registry:
        assert registry.join(STRANGER.ss58, "ends") == first
        assert registry.join(MINER.ss58, "ends", 2) == 2, "its own"
        registry.invite(hash_of("ends"), uses=9, expires=1.0)
        with pytest.raises(ChainError, match="does not know this member: ask the founder"):
            registry.join("later", "ends", 3)
        registry.allow("later", True)
        assert registry.join("later", None, 3) == 3


class TestAdmission:
    def join(self, server: RegistryServer, wallet: Wallet, token: str | None = None) -> int:
        invitation = SecretStr(token) if token is not None else None
        with chain_of(server.url, wallet, invitation=invitation) as chain:
            return chain.register()

    def test_by_invitation(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG)
        with (
            RegistryServer(tmp_path, admission="invited") as server,
            chain_of(server.url, VALIDATOR) as founder,
        ):
            token = "an-invitation-for-one"
            with pytest.raises(ChainError, match="DT_INVITATION"):
                self.join(server, PEER)
            with pytest.raises(ChainError, match="is not known here"):
                self.join(server, PEER, token)
            founder.administer("invite", hashed=hash_of(token), uses=1, expires=time.time() + 60)
            assert self.join(server, PEER, token) == 1
            assert self.join(server, PEER, token) == 1, "asked again, it is no second use"
            with pytest.raises(ChainError, match="is used up:"):
                self.join(server, STRANGER, token)
            founder.administer("invite", hashed=hash_of("late"), uses=5, expires=time.time() - 1)
            with pytest.raises(ChainError, match="has expired:"):
                self.join(server, STRANGER, "late")
            founder.administer("allow", hotkey=STRANGER.ss58, allowed=True)
            assert self.join(server, STRANGER) == 2
            shown = {
                row["id"]: (row["uses"], row["hotkeys"])
                for row in founder.administer("invitations")
            }
            ids = hash_of(token)[:12], hash_of("late")[:12]
            assert shown == {ids[0]: (0, [PEER.ss58]), ids[1]: (5, [])}
            for wrong, why in (("0" * 12, "there is no"), ("%" * 12, "pattern"), ("1", "pattern")):
                with pytest.raises(ChainError, match=why):
                    founder.administer("revoke", invitation=wrong)
            founder.administer("invite", hashed=hash_of("two"), uses=2, expires=time.time() + 60)
            assert founder.administer("revoke", invitation=hash_of("two")[:12]) == []
            with pytest.raises(ChainError, match="was taken back"):
                self.join(server, MINER, "two")
        assert token not in caplog.text
        assert not any(token.encode() in file.read_bytes() for file in tmp_path.iterdir())

    def test_by_list(self, tmp_path: Path) -> None:
        with (
            RegistryServer(tmp_path, admission="listed") as server,
            chain_of(server.url, VALIDATOR) as founder,
        ):
            founder.administer("invite", hashed=hash_of("token"), uses=1, expires=time.time() + 60)
            with pytest.raises(ChainError, match="is not on this network's list"):
                self.join(server, PEER, "token")
            founder.administer("allow", hotkey=PEER.ss58, allowed=True)
            founder.administer("allow", hotkey=STRANGER.ss58, allowed=True)
            founder.administer("allow", hotkey=STRANGER.ss58, allowed=False)
            assert self.join(server, PEER) == 1
            with pytest.raises(ChainError, match="is not on this network's list"):
                self.join(server, STRANGER)

    def test_expelled_member_cannot_come_back_by_any_way(self, tmp_path: Path) -> None:
        """Neither its own invitation, nor another one, the list or a backup lets it in."""
        copy = tmp_path / "copy.db"
        with (
            RegistryServer(tmp_path / "registry", admission="invited") as server,
            chain_of(server.url, VALIDATOR) as founder,
        ):
            for token, uses in (("first", 5), ("second", 5)):
                founder.administer(
                    "invite", hashed=hash_of(token), uses=uses, expires=time.time() + 60
                )
            assert self.join(server, PEER, "first") == 1 and self.join(server, MINER, "first") == 2
            store.backup(server.folder / store.FILE, copy)
            with chain_of(server.url, PEER) as running:
                done = founder.administer("expel", hotkey=PEER.ss58)
                assert done == {
                    "uid": 1,
                    "invitation": hash_of("first")[:12],
                    "others": [MINER.ss58],
                }
                wait_for(lambda: running.expelled(PEER.ss58), "it learns it")
                assert running.uid(PEER.ss58) is None and not running.expelled(MINER.ss58)
                with pytest.raises(ChainError, match="commit: the founder expelled hotkey"):
                    running.commit("x")
            refused = pytest.raises(ChainError, match=r"expelled hotkey .* expel --again")
            for token in ("first", "second", None):
                with refused:
                    self.join(server, PEER, token)
            with pytest.raises(ChainError, match="was taken back"):
                self.join(server, STRANGER, "first")
            with refused:
                founder.administer("allow", hotkey=PEER.ss58, allowed=True)
            founder.administer("expel", hotkey=STRANGER.ss58)  # although it never joined
            with refused:
                self.join(server, STRANGER, "second")
            with pytest.raises(ChainError, match="the founder's hotkey stays"):
                founder.administer("expel", hotkey=VALIDATOR.ss58)
            for admission in ("open", "listed", "invited"):
                server.registry.change_charter(admission=admission)
                with refused:
                    self.join(server, PEER, "second")
            server.stop()
            store.restore(copy, server.folder)  # from a time when it was a member
            server.start()
            assert find(server.registry.view.neurons, PEER.ss58) is None
            with refused:
                self.join(server, PEER, "second")
            founder.administer("expel", hotkey=PEER.ss58, again=True)
            with pytest.raises(ChainError, match="is not expelled"):
                founder.administer("expel", hotkey=PEER.ss58, again=True)
            assert self.join(server, PEER, "second") == 2 + 1 + 64, "the backup's uids are left"
            with chain_of(server.url, PEER) as back:
                assert not back.expelled(PEER.ss58) and back.expelled(STRANGER.ss58)

    def test_an_invitation_travels_encrypted_only(self) -> None:
        chain = registry_at("http://203.0.113.9:1", PEER, invitation=SecretStr("token"))
        with closing(chain), pytest.raises(ChainError, match="is not https"):
            chain.register()


def test_a_folder_that_is_no_bucket_s_starts_nothing(tmp_path: Path, capsys) -> None:
    """The registry refuses it before it creates anything."""
    url = "http://127.0.0.1:8100"
    file = network_file(
        tmp_path, {"exchange": "store", "store.endpoint": url, "chain.url": url, "private": True}
    )
    words = ["serve", "--folder", str(tmp_path / "registry"), "--network", file]
    assert program.main([*words, "--store", str(tmp_path / "store")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "mount its disk" in line and "so nothing was started: " in line
    assert not (tmp_path / "registry" / SECRET).exists()


def test_a_write_after_the_end_is_a_refused_write(server: RegistryServer) -> None:
    """At a stop, a thread that retries to write the endpoint may outlive the chain."""
    with chain_of(server.url, PEER) as chain:
        chain.register()
    with pytest.raises(ChainError, match="closed"):
        chain.serve("1.2.3.4", 80)


def test_an_answer_whose_head_never_ends_is_given_up() -> None:
    timeout = timedelta(seconds=0.5)  # of each read
    with trickle() as port:
        url = f"http://127.0.0.1:{port}"
        with closing(registry_at(url, MINER, timeout=timeout)) as chain:
            with pytest.raises(ChainError, match="its answer does not end"):
                chain.commit("x" * 128)
            wait_for(lambda: chain.trouble == "its answer does not end")


def test_another_registry_is_not_believed(
    server: RegistryServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with chain_of(server.url, PEER) as chain:
        chain.register()
        server.stop()
        other = RegistryServer(tmp_path / "other", master=STRANGER.ss58)
        other.port = server.port
        with other:
            wait_for(lambda: "no longer test/" in caplog.text)
            assert chain.uid(PEER.ss58) == 1 and chain.uid(STRANGER.ss58) is None
            with pytest.raises(ChainError, match="another receiver"):
                chain.commit("x")
        strict = registry_at(server.url, PEER, STRANGER.ss58)
        server.start()
        with closing(strict):
            said = f"created by {VALIDATOR.ss58}, not by {STRANGER.ss58}"
            wait_for(lambda: said in caplog.text, "the refusal")
            assert not strict.wait_ready(timedelta(0))


class TestKept:
    """Test that a kill, a restart, a backup or a clock loses no state."""

    @pytest.mark.slow
    def test_a_kill_loses_no_acknowledged_write(self, tmp_path: Path) -> None:
        folder = tmp_path / "registry"
        acknowledged = 0
        flags = ("--port", str(free_ports(1)[0]))
        for kill in range(3):
            with chain_program(*flags, folder=folder) as (url, p):
                with chain_of(url, PEER) as chain:
                    chain.register()
                    assert chain.commitment(PEER.ss58) in (
                        (str(acknowledged), str(acknowledged + 1)) if kill else (None,)
                    )
                    killer = threading.Timer(0.01 * kill, p.send_signal, [signal.SIGKILL])
                    with suppress(ChainError):
                        for number in itertools.count(acknowledged + 1):
                            chain.commit(str(number))
                            acknowledged = number
                            if number % 5 == 0 and not killer.ident:
                                killer.start()
        assert acknowledged >= 15

    def test_a_backup_that_is_put_back_is_noticed(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        server = RegistryServer(tmp_path / "registry").start()
        copy = tmp_path / "copies" / "registry.db"
        with (
            chain_of(server.url, PEER) as chain,
            chain_of(server.url, STRANGER) as late,
            chain_of(server.url, MINER) as later,
        ):
            chain.register()
            chain.serve("1.2.3.4", 1)
            assert store.backup(server.folder / store.FILE, copy) == server.registry.view.version
            chain.serve("5.6.7.8", 2)
            chain.commit("newer")
            assert late.register() == 2 and later.register() == 3
            assert program.main(["restore", "--folder", str(server.folder), str(copy)]) == 1
            server.stop()
            kept = store.restore(copy, server.folder)
            assert kept is not None and kept.stat().st_size > 0
            with late._lock:  # the member that had joined first comes back last
                server.start()
                wait_for(lambda: caplog.text.count("went back") >= 2)  # each client asks by itself
                wait_for(lambda: find(server.registry.view.neurons, MINER.ss58) is not None)
            for one in (chain, late, later):
                wait_for(lambda one=one: one.commitment(PEER.ss58) == "newer")
                wait_for(lambda one=one: one.uid(STRANGER.ss58) == 2)
                # It has its old uid, and so its old bucket.
                wait_for(lambda one=one: one.uid(MINER.ss58) == 3, "it is there as it was")
                me = find(one.neurons(), PEER.ss58)
                assert me is not None and (me.ip, me.port) == ("5.6.7.8", 2)
            wait_for(lambda: caplog.text.count("went back") == 3, "one line for each client")
        server.stop()

    def test_a_start_is_no_backup_for_a_client_whose_list_stayed_the_same(
        self, server: RegistryServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It gets 304 from the new process, and then another miner writes with the same hotkey."""
        with chain_of(server.url, PEER) as chain:
            chain.register()
            chain.serve("127.0.0.1", 8091)
            server.stop()
            server.start()
            before = chain.counters()["reads"]
            wait_for(lambda: chain.counters()["reads"] > before + 1)
            with chain_of(server.url, PEER) as second:
                second.serve("127.0.0.1", 8092)
            wait_for(lambda: find(chain.neurons(), PEER.ss58).port == 8092)
            before = chain.counters()["reads"]
            wait_for(lambda: chain.counters()["reads"] > before + 1)
        assert server.registry.view.neurons[1].port == 8092
        assert "went back" not in caplog.text

    def test_leftovers_of_a_killed_registry_are_not_in_a_backup(
        self, server: RegistryServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        registry, folder, copy = server.registry, tmp_path / "killed", tmp_path / "copy.db"
        store.backup(server.folder / store.FILE, copy)
        registry.register(PEER.ss58)
        shutil.copytree(server.folder, folder)  # with its write-ahead log
        (folder / store.FILE).rename(tmp_path / "damaged.db")  # as an operator does
        assert store.restore(copy, folder) is None
        with closing(Registry.at(folder)) as restored:
            assert find(restored.view.neurons, PEER.ss58) is None
        live = server.folder / store.FILE
        assert program.main(["backup", "--folder", str(server.folder), str(live)]) == 2
        assert "is the registry itself" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("content", "status", "words"),
        [
            (b"", 2, "is not a registry"),
            (b"junk" * 4096, 1, "dt-network restore"),
            (None, 2, "exist"),
        ],
    )
    def test_a_wrong_backup_changes_nothing(
        self,
        server: RegistryServer,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        content: bytes | None,
        status: int,
        words: str,
    ) -> None:
        server.stop()
        before = (server.folder / store.FILE).read_bytes()
        wrong = tmp_path / "wrong.db"
        if content is not None:
            wrong.write_bytes(content)
        assert program.main(["restore", "--folder", str(server.folder), str(wrong)]) == status
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
        assert (server.folder / store.FILE).read_bytes() == before

    def test_a_full_disk_refuses_writes_keeps_reads_and_does_not_fill_the_log(
        self, server: RegistryServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        registry = server.registry
        registry.register(PEER.ss58)
        size = (server.folder / f"{store.FILE}-wal").stat().st_size
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, old[1]))
        try:
            for _ in range(3):  # each write is cut off in the middle
                with pytest.raises(ChainError, match="cannot store"):
                    registry.commit(PEER.ss58, "x")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
        assert registry.view.members[1].commitment is None
        assert caplog.text.count("was not stored") == 1 and registry.faults == 3
        registry.commit(PEER.ss58, "y")
        server.stop()
        with closing(Registry.at(server.folder)) as again:
            assert again.view.members[1].commitment == "y"

    @pytest.mark.parametrize("how", ["IMMEDIATE", "EXCLUSIVE"])
    def test_a_file_that_another_program_holds_passes_and_asks_for_no_backup(
        self, server: RegistryServer, how: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        path, registry = server.folder / store.FILE, server.registry
        registry._db.execute("PRAGMA busy_timeout = 50")
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute(f"BEGIN {how}")
            other.execute("UPDATE meta SET value = value")
            with pytest.raises(store.CannotStore, match=r"cannot store writes now .*locked"):
                registry.register(PEER.ss58)
            assert registry.view.members, "reads continue"
            answer = server._service._answer("/register", lambda: registry.register(PEER.ss58))
            assert answer.status_code == 503 and registry.faults == 2
            assert caplog.text.count("another program holds") == 1
            assert "`dt-network backup` copies a registry that is in use" in caplog.text
            assert "free" not in caplog.text
            other.execute("ROLLBACK")
        registry.register(PEER.ss58)
        error = sqlite3.OperationalError("database is locked")
        error.sqlite_errorname = "SQLITE_BUSY"
        assert "restore" not in str(store._unusable(path, error)), "a backup would take back writes"

    def test_a_start_on_a_full_disk_asks_for_room_and_no_backup(
        self, server: RegistryServer
    ) -> None:
        server.stop()
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, old[1]))
        try:
            with pytest.raises(store.StoreFault, match="free some space on the disk of") as error:
                Registry.at(server.folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
        assert "restore" not in str(error.value)
        Registry.at(server.folder).close()

    @pytest.mark.parametrize("bytes_at", [(100, 600), (0, 16), None])
    def test_a_damaged_file_is_one_line_and_status_1(
        self,
        server: RegistryServer,
        capsys: pytest.CaptureFixture[str],
        bytes_at: tuple[int, int] | None,
    ) -> None:
        server.stop()
        path = server.folder / store.FILE
        if bytes_at is None:  # the file is intact, but a table of ours is missing
            with closing(sqlite3.connect(path)) as db, db:
                db.execute("DROP TABLE members")
        else:
            first, count = bytes_at
            data = path.read_bytes()
            path.write_bytes(data[:first] + b"\xff" * count + data[first + count :])
        assert program.main(["serve", "--folder", str(server.folder), "--port", "0"]) == 1
        error = capsys.readouterr().err
        assert "dt-network restore" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--network", str(NETWORK)), "name local in "),
        (("--folder", "{empty}"), "give --network FILE"),
        (("--port", "70000"), "--port"),
        (("--host", "nowhere"), "--host"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(
    server: RegistryServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    words: str,
) -> None:
    server.stop()
    more = [flag.format(empty=tmp_path / "empty") for flag in flags]
    try:
        status = program.main(["serve", "--folder", str(server.folder), *more])
    except SystemExit as end:
        status = end.code
    error = capsys.readouterr().err
    assert status == 2 and words in error and error.count("\n") == 1


def test_refusal_from_outside_is_status_1_and_pm2_tries_again(
    server: RegistryServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve = ["serve", "--folder", str(server.folder), "--port", str(server.port)]
    assert program.main(serve) == 1  # the folder is already served
    server.stop()
    with socket.create_server(("127.0.0.1", server.port)):
        assert program.main(serve) == 1
    disk, fstab = tmp_path / "disk", tmp_path / "fstab"
    disk.mkdir()
    fstab.write_text(f"UUID=ab {disk} ext4 nofail 0 2\n")
    monkeypatch.setattr(files, "FSTAB", fstab)
    founding = ["--folder", str(disk / "registry"), "--network", str(NETWORK)]
    assert program.main(["serve", *founding]) == 1
    assert not list(disk.iterdir()), "no second registry is created in a disk's place"
    lines = capsys.readouterr().err.splitlines()
    words = ("another process serves", "cannot listen on", f"lose their uids: mount {disk}")
    assert len(lines) == 3 and all(w in line for w, line in zip(words, lines, strict=True)), lines


def test_members_come_and_go_by_commands(tmp_path: Path, capsys) -> None:
    wallets = tmp_path / "wallets"
    founder, miner = (create_wallet(wallets, name) for name in ("founder", "miner"))
    with RegistryServer(tmp_path / "lab", master=founder.ss58, admission="invited") as served:

        def run(command: str, *words: str) -> str:
            names = ("--wallet.path", str(wallets), "--wallet.name", "founder")
            where = ("--url", served.url, *(names if command != "members" else ()))
            assert program.main([command, *where, *words]) == 0
            return str(capsys.readouterr().out)

        def register(token: str) -> int:
            with chain_of(served.url, miner, invitation=SecretStr(token)) as chain:
                return chain.register()

        token = run("invite", "--uses", "1").split("DT_INVITATION=")[1].strip()
        assert register(token) == 1
        shown = run("invite", "--list")
        assert shown.startswith(hash_of(token)[:12]) and f"used up; {miner.ss58}" in shown
        assert "it had uid 1" in run("expel", miner.ss58)
        assert f"- {miner.ss58}  expelled" in run("members")
        assert "may register again" in run("expel", miner.ss58, "--again")
        another = run("invite", "--uses", "2")
        token, known = another.split("DT_INVITATION=")[1].strip(), run("invite", "--list")
        assert hash_of(token)[:12] in another and "good for 2 until" in known
        assert register(token) == 1
        assert f"stay: {miner.ss58}" in run("invite", "--revoke", hash_of(token)[:12])
        assert "taken back" in run("invite", "--list")
        shown = run("members")
        assert f"1 {miner.ss58}  member, no endpoint" in shown
        assert f"0 {founder.ss58}  validator" in shown


class TestReading:
    def get(self, server: RegistryServer, path: str, **headers: str) -> httpx.Response:
        return httpx.get(server.url + path, headers=headers, trust_env=False)

    def test_a_poller_gets_the_list_when_it_changed(self, server: RegistryServer) -> None:
        with chain_of(server.url, PEER) as chain:
            chain.register()
            first = self.get(server, "/state")
            assert [row[0] for row in first.json()["rows"]] == [0, 1]
            etag = first.headers["etag"]
            again = self.get(server, "/state", **{"if-none-match": etag})
            assert (again.status_code, again.content) == (304, b"")
            chain.commit("x")
            second = self.get(server, "/state", **{"if-none-match": etag})
            assert [row[::2] for row in second.json()["rows"]] == [[0, None], [1, "x"]]
            chain.commit("x")
            assert self.get(server, "/state").headers["etag"] == second.headers["etag"]
            server.registry.expel(PEER.ss58)
            assert [row[0] for row in self.get(server, "/state").json()["rows"]] == [0]
            for odd in ("?since=-1", "?since=9" + "9" * 40, "?start=%ff&since=x", "?&&&&&&"):
                assert self.get(server, "/state" + odd).json()["rows"]

    def test_the_page_shows_the_present_members(self, server: RegistryServer) -> None:
        server.registry.register(PEER.ss58)
        server.registry.serve(PEER.ss58, "<script>alert(1)</script>", 8091)
        page = self.get(server, "/")
        assert page.status_code == 200 and PEER.ss58 in page.text
        assert "<script" not in page.text and "&lt;script&gt;" in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "registration: open" in page.text
        for path in ("/", "/metrics"):
            assert self.get(server, path, host="evil.example").status_code == 403
        for number in range(3):
            assert self.get(server, f"/nothing{number}").status_code == 404
        assert "nothing" not in self.get(server, "/metrics").text

    def test_the_founder_reports_the_held_out_loss(self, server: RegistryServer) -> None:
        with chain_of(server.url, VALIDATOR) as founder:
            for wrong in ((-1, 1.0), (1, math.nan), (1, -1.0)):
                with pytest.raises(ChainError):
                    founder.report(report_of(*wrong))
            etag = self.get(server, "/state").headers["etag"]
            for step, loss in ((8, 9.0), (7, 2.5)):
                founder.report(report_of(step, loss))
            assert self.get(server, "/state").headers["etag"] == etag, "no poller reads it"
            server.stop()
            server.start()
            assert "dt_registry_held_out_loss 2.5" in self.get(server, "/metrics").text
            assert "2.5000 nats per token" in self.get(server, "/").text
            domains = {"code": 2.0, "prose": 3.0}
            wrong_names = ({"a": math.nan}, {"x" * 101: 1.0}, {f"d{i}": 1.0 for i in range(17)})
            for losses in wrong_names:
                with pytest.raises(ChainError):
                    founder.report(replace(report_of(8, 2.25), losses=losses))
            founder.report(replace(report_of(8, 2.25), losses=domains))
            assert "2.2500 nats per token on code, prose" in draw_page(server.registry)
            assert (
                'dt_registry_domain_loss{domain="prose"} 3.0' in self.get(server, "/metrics").text
            )

    def test_metrics(self, server: RegistryServer) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        with chain_of(server.url, PEER) as chain:
            chain.register()
        text = self.get(server, "/metrics").text
        families = {f.name: f for f in text_string_to_metric_families(text)}
        assert families["dt_registry_neurons"].samples[0].value == 2
        calls = {tuple(s.labels.values()): s.value for s in families["dt_registry_calls"].samples}
        assert calls["written", "register"] == 1 and calls["read", "state"] > 0
        assert self.get(server, "/health").json()["registry"] == server.charter.identity


def report_of(outer_step: int, loss: float) -> NetworkReport:
    return NetworkReport(
        phase="waiting",
        outer_step=outer_step,
        loss=loss,
        losses={"8 pages of the data": loss},
        next_report=900.0,
    )


class TestLimits:
    @pytest.mark.parametrize("proxy", [None, "127.0.0.1"])
    def test_addresses_and_hotkeys_have_a_rate(self, tmp_path: Path, proxy: str | None) -> None:
        # One request passes, and the next only ten seconds later, however slow the machine is.
        limits = Limits(requests_per_address=0.1, requests_per_hotkey=0.5, proxy=proxy)
        with RegistryServer(tmp_path, limits=limits) as server:

            def ask(address: str) -> int | None:
                headers = {"x-forwarded-for": f"6.6.6.6, {address}"}
                try:
                    got = httpx.get(server.url + "/health", headers=headers, trust_env=False)
                except httpx.HTTPError:
                    return None  # closed unread
                return got.status_code

            assert ask("1.1.1.1") == 200
            assert ask("1.1.1.1") in (429, None)
            assert (ask("2.2.2.2") == 200) == (proxy is not None), "only a proxy is believed"
