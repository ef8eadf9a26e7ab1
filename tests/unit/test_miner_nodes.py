"""The launchers of several nodes: who is taken in, what they tell each other, and bad input."""

from __future__ import annotations

import dataclasses
import errno
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from distributed_training.common.ports import free_ports
from distributed_training.config import ConfigError, load_config
from distributed_training.config.settings import NodesSettings, parse_endpoint
from distributed_training.health.machine import check_nodes
from distributed_training.miner import several_nodes
from distributed_training.miner.ranks import join_ranks
from distributed_training.miner.several_nodes import (
    PATIENCE,
    Guest,
    Host,
    WrongNode,
    difference,
    facts_of,
)
from distributed_training.node.start import NetworkFailure
from distributed_training.protocol.types import ExitStatus
from tests.tools.miner_parts import config_of
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.slow
GO = threading.Event()  # never set

PINNED = "--neuron.learning_rate of the network's file"
FACTS = {"version": "1", "--nproc_per_node": "2", "--neuron.seed": "7", PINNED: "3"}


class World:
    """Node 0 and others, in this process; :meth:`meet` answers in a thread."""

    def __init__(self, nnodes: str, **settings: Any) -> None:
        self.settings = NodesSettings(
            nnodes=nnodes,
            rdzv_endpoint=f"127.0.0.1:{free_ports(1)[0]}",
            **{
                "node_timeout": timedelta(seconds=3),
                "node_wait": timedelta(0),
                "rdzv_timeout": timedelta(seconds=2),
            }
            | settings,
        )
        self.pool = ThreadPoolExecutor(8)
        self.stop = threading.Event()
        self.host = Host(self.settings, FACTS, ranks=2)
        self.guests: list[Guest] = []

    def guest(self, node: int, facts: dict[str, str] = FACTS) -> Guest:
        settings = dataclasses.replace(self.settings, node_rank=node)
        self.guests.append(Guest(settings, facts, ranks=2))
        return self.guests[-1]

    def meet(self, side: Host | Guest) -> Future[Any]:
        return self.pool.submit(side.meet, self.stop)

    def close(self) -> None:
        self.stop.set()
        self.host.close(0)
        for guest in self.guests:
            guest.close(0)
        self.pool.shutdown()


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(*arguments: Any, **settings: Any) -> World:
        made.append(World(*arguments, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_all_nodes_get_one_plan_and_numbers_of_their_own(world: Callable[..., World]) -> None:
    here = world("3")
    sides = [here.host, here.guest(2), here.guest(1)]
    plans = [f.result(50) for f in [here.meet(side) for side in sides]]
    assert [p.first_rank for p in plans] == [0, 4, 2]
    assert {(p.nodes, p.port, p.world_size) for p in plans} == {((0, 1, 2), plans[0].port, 6)}
    ranks = [p.variables(n) for p in plans for n in range(2)]
    assert sorted(int(r["RANK"]) for r in ranks) == list(range(6))
    assert {r["GLOO_SOCKET_IFNAME"] for r in ranks} == {"lo"}


def test_the_end_of_the_miner_is_that_of_all_nodes(world: Callable[..., World]) -> None:
    here = world("2")
    guest = here.guest(1)
    for future in [here.meet(here.host), here.meet(guest)]:
        future.result(50)
    assert not here.host.ended(ExitStatus.DEREGISTERED)
    guest.ended(ExitStatus.STOPPED)
    waiting = here.meet(guest)
    here.host.close(ExitStatus.DEREGISTERED)
    assert waiting.result(50) is ExitStatus.DEREGISTERED
    # A launcher whose disk was away for a moment tries again in the same process.
    Host(here.settings, FACTS, ranks=2).close(ExitStatus.STOPPED)


def test_a_moment_without_descriptors_locks_no_node_out(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors, real = [OSError(errno.EMFILE, "Too many open files")], socket.socket.accept

    def accept(listener: socket.socket) -> Any:
        if errors:
            raise errors.pop()
        return real(listener)

    monkeypatch.setattr(socket.socket, "accept", accept)
    here = world("2")
    host = here.meet(here.host)
    assert here.meet(here.guest(1)).result(20).nodes == host.result(20).nodes == (0, 1)
    assert not errors


def test_a_lost_node_ends_the_ranks_and_the_rest_goes_on(world: Callable[..., World]) -> None:
    here = world("1:2", node_wait=timedelta(seconds=1))
    guest = here.guest(1)
    met = here.meet(guest)
    # Else node 0, which waits 1 s, may begin without it.
    wait_for(lambda: [g for g in here.host._guests.values() if g.says.get("ready")], "it is ready")
    for future in [here.meet(here.host), met]:
        future.result(50)
    assert here.host.trouble is None and not here.host.joining
    guest.close(0)
    wait_for(lambda: here.host.trouble, "node 0 hears of it")
    assert here.host.ended(ExitStatus.FAULT), "no fault of node 0"
    assert here.meet(here.host).result(50).world_size == 2
    back = here.guest(1)
    joining = here.meet(back)
    wait_for(lambda: here.host.joining, "it is back")
    here.host.ended(ExitStatus.STOPPED)
    assert here.meet(here.host).result(50).world_size == joining.result(20).world_size == 4
    back.leave()
    wait_for(lambda: here.host.leaving, "it was asked to stop")


def test_ranks_that_failed_elsewhere_are_a_fault_that_counts(world: Callable[..., World]) -> None:
    here = world("2")
    guest = here.guest(1)
    for future in [here.meet(here.host), here.meet(guest)]:
        future.result(50)
    guest.ended(ExitStatus.FAULT)
    again = here.meet(guest)
    wait_for(lambda: here.host.trouble, "node 0 hears of it")
    assert not here.host.ended(ExitStatus.FAULT)
    assert here.meet(here.host).result(50).port == again.result(20).port


def test_a_silent_node_is_gone_after_the_named_time(world: Callable[..., World]) -> None:
    here = world("1:2", node_wait=timedelta(minutes=1))
    with _silent_node(here):
        meeting = here.meet(here.host)
        assert meeting.result(50).nodes == (0, 1)
        began = time.monotonic()
        why = wait_for(lambda: here.host.trouble, "silence is noticed")
        assert "nothing was heard of it for 3 s" in why
        assert time.monotonic() - began < 30


def _silent_node(here: World) -> socket.socket:
    """Node 1, which is ready and then says no more."""
    dead = socket.create_connection(("127.0.0.1", here.host._port))
    hello = {"node": 1, "facts": FACTS, "time": time.time()}
    dead.sendall("".join(json.dumps(m) + "\n" for m in (hello, {"ready": True})).encode())
    return dead


def test_a_launcher_that_is_back_at_once_starts_no_ranks_of_the_plan_that_ends(
    world: Callable[..., World],
) -> None:
    here = world("2", node_timeout=timedelta(minutes=1))
    with _silent_node(here):
        ending = here.meet(here.host).result(50)
        again = here.meet(here.guest(1))
        assert "its launcher started again" in wait_for(lambda: here.host.trouble, "it is seen")
        wait_for(lambda: here.host._guests[1].says.get("ready"), "it has heard node 0")
        assert here.host.ended(ExitStatus.FAULT), "no fault of node 0"
        assert here.meet(here.host).result(50).port == again.result(20).port != ending.port


@pytest.mark.parametrize(
    ("changes", "line", "kind"),
    [
        ({"version": "2", "--neuron.seed": "8"}, "version is 2 on node 1 and 1 on", "version"),
        ({"--neuron.seed": "8"}, "--neuron.seed is 8 on node 1 and 7 on node 0", "flags"),
        ({"--neuron.new": "4"}, "--neuron.new is 4 on node 1 and None on node 0", "version"),
        ({"--nproc_per_node": "4"}, "--nproc_per_node is 4 on node 1 and 2 on", "machine"),
        ({PINNED: "4"}, f"{PINNED} is 4 on node 1 and 3 on node 0", "machine"),
    ],
)
def test_the_first_difference_is_named_and_its_kind_says_how_long_it_may_last(
    changes: dict[str, str], line: str, kind: str
) -> None:
    refusal = difference(FACTS, FACTS | changes, 1)
    assert refusal is not None and refusal.line.startswith(line) and "\n" not in refusal.line
    assert getattr(refusal.error, "patience", None) == PATIENCE.get(kind)


def test_a_node_that_is_wrong_is_told_what_and_for_how_long(world: Callable[..., World]) -> None:
    here = world("2")
    waiting = here.meet(here.host)
    for node, changes, line in (
        (1, {"--neuron.seed": "8"}, "--neuron.seed is 8 on node 1 and 7 on node 0"),
        (2, {}, "--node_rank 2 is node 0's or beyond --nnodes 2"),
    ):
        with pytest.raises(WrongNode, match=line) as error:
            here.meet(here.guest(node, FACTS | changes)).result(50)
        assert error.value.patience == PATIENCE["flags"]
    here.meet(here.guest(1)).result(50)
    assert waiting.result(50).nodes == (0, 1), "the others go on"


def test_a_node_that_was_refused_may_ask_again(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock was wrong for a while: a launcher whose ranks ran before does not end then."""
    here = world("2")
    waiting = here.meet(here.host)
    right = several_nodes.CLOCKS_APART
    for _ in range(2):
        monkeypatch.setattr(several_nodes, "CLOCKS_APART", timedelta(seconds=-1))
        with pytest.raises(ConfigError, match="the clock of this node"):
            here.meet(here.guest(1)).result(20)
    monkeypatch.setattr(several_nodes, "CLOCKS_APART", right)
    assert here.meet(here.guest(1)).result(20).nodes == waiting.result(20).nodes == (0, 1)


def test_an_endpoint_nobody_answers_at_is_one_line() -> None:
    port = free_ports(1)[0]
    settings = NodesSettings(
        nnodes="2",
        node_rank=1,
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_timeout=timedelta(seconds=1),
    )
    with pytest.raises(ConfigError, match="was not reached within --rdzv_timeout"):
        Guest(settings, FACTS, ranks=1).meet(GO)
    away = dataclasses.replace(settings, rdzv_endpoint="192.0.2.1:29400", node_rank=0)
    with pytest.raises(ConfigError, match="no network interface of this machine"):
        Host(away, FACTS, ranks=1)


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("[fe80::1]", r"link-local .* give another address of node 0"),
        ("[fe80::1%lo]", r"link-local .* give another address of node 0"),
        ("nowhere.invalid", "the host cannot be resolved"),
    ],
)
def test_an_endpoint_that_none_can_reach_is_refused_on_every_node(host: str, why: str) -> None:
    endpoint = parse_endpoint(f"{host}:29400")
    for node, side in ((0, Host), (1, Guest)):
        settings = NodesSettings(nnodes="2", node_rank=node, rdzv_endpoint=endpoint)
        with pytest.raises(ConfigError, match=why):
            side(settings, FACTS, ranks=1)


def test_ranks_that_do_not_meet_name_the_firewall_and_the_doctor() -> None:
    environ = {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0]),
    }  # fmt: skip
    with pytest.raises(NetworkFailure, match=r"did not meet at 127\.0\.0\.1") as error:
        join_ranks(environ=environ, timeout=timedelta(seconds=1), backend="gloo")
    assert "\n" not in str(error.value) and "the doctor tries them" in str(error.value)
    with pytest.raises(RuntimeError):  # on one machine there is nothing to open
        join_ranks(
            environ=environ | {"LOCAL_WORLD_SIZE": "2"},
            timeout=timedelta(seconds=1),
            backend="gloo",
        )


def test_what_is_no_launcher_is_left_alone(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    here = world("2")
    waiting = here.meet(here.host)
    for hostile in (
        b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 70_000, b"[]\n", b"{}\n", b'{"node": 1}\n',
        b'{"node": {}, "facts": 3, "time": 1}\n', b'{"node": 1, "facts": {}, "time": "x"}\n', b"",
        b"[" * 60_000 + b"\n",
    ):  # fmt: skip
        with socket.create_connection(("127.0.0.1", here.host._port), timeout=10) as one:
            try:
                one.sendall(hostile)
                one.shutdown(socket.SHUT_WR)
                assert one.recv(1) == b""
            except OSError as error:  # closed before all was sent
                assert not isinstance(error, TimeoutError)
    here.meet(here.guest(1)).result(50)
    assert waiting.result(50).nodes == (0, 1) and not raised


@given(some.text(min_size=1, max_size=40))
def test_any_text_is_an_endpoint_or_refused(text: str) -> None:
    try:
        host, _, port = parse_endpoint(text).rpartition(":")
    except ValueError:
        return
    assert host and 0 <= int(port) <= 65535 and "," not in host


@pytest.mark.parametrize(
    ("listed", "first"),
    [("gpu[03-07,12]", "gpu03"), ("a1,b[1-2]", "a1"), ("b[1,4],c", "b1"), ("n1,n2", "n1")],
)
def test_slurms_variables_are_read_by_themselves(listed: str, first: str) -> None:
    environ = {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": listed}
    config = load_config("miner", ["--preset", "local"], environ=environ, dotenv=None)
    settings = config.nodes
    assert (settings.most, settings.node_rank, settings.leads) == (2, 1, False)
    assert settings.rdzv_endpoint == f"{first}:29400"


def test_what_must_be_equal_is_what_decides_the_training() -> None:
    def facts(*argv: str) -> dict[str, str]:
        config = config_of(*argv)
        return facts_of(config, ranks=2)

    assert difference(facts(), facts("--data.workers", "7", "--neuron.run_folder", "x"), 1) is None
    unequal = {"data.source": "stdlib", "nnodes": "3"}
    for flag, value in unequal.items():
        refusal = difference(facts(), facts(f"--{flag}", value), 1)
        assert refusal is not None and refusal.kind == "flags"
        assert refusal.line.startswith(f"--{flag} is {value} on node 1")


def test_a_node_whose_gpu_is_not_found_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks would talk gloo, those of the others NCCL."""
    config = config_of()
    found = []
    for gpus in (1, 0):
        monkeypatch.setattr(several_nodes, "visible_gpu_count", lambda gpus=gpus: gpus)
        found.append(facts_of(config, ranks=1))
    assert "--neuron.device is cpu on node 1 and cuda on node 0" in str(
        difference(found[0], found[1], 1)
    )
    late = facts_of(config, ranks=1, remembered=1)  # just after a reboot
    assert difference(found[0], late, 1) is None


def test_the_doctor_says_whether_nodes_can_meet(
    world: Callable[..., World],
) -> None:
    here = world("2")

    def findings(*flags: str) -> dict[str, tuple[str, str]]:
        config = config_of("--nnodes", "2", *flags)
        return {c.name: (c.status, c.finding) for c in check_nodes(config, offline=False)}

    endpoint = here.settings.rdzv_endpoint
    assert endpoint is not None
    for node in ("0", "1"):
        found = findings("--node_rank", node, "--rdzv_endpoint", endpoint)
        assert found["nodes"][0] == found["nodes' firewall"][0] == "ok"
        assert "interface lo" in found["nodes"][1]
    away = f"127.0.0.1:{free_ports(1)[0]}"
    assert findings("--node_rank", "1", "--rdzv_endpoint", away)["nodes"][0] == "warn"
    assert findings("--rdzv_endpoint", "192.0.2.1:1")["nodes"][0] == "fail"
    assert findings() == {}
