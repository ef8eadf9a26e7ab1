"""Test which averages are refused by their norm, and the norms that the swarm keeps on disk."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest

from distributed_training.exchange.sn38.supervisor import address_of, bound_log
from distributed_training.exchange.sn38.swarm import Judge
from distributed_training.protocol.types import AllReduceError, AllReduceFault

pytestmark = pytest.mark.timeout(10)


def made(path: Path, *, run_id: str = "a") -> Judge:
    return Judge(path, run_id=run_id)


def fault(local: float, average: float, *previous: float) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        judging = made(Path(folder, "norms.json"))
        judging.norms.extend(previous)
        try:
            judging.check(local_norm=local, average_norm=average)
        except AllReduceError as error:
            return error.fault.name
    return None


@pytest.mark.parametrize(
    ("local", "average", "previous", "refused"),
    [
        (1.0, 19.0, (), False),  # our own is the measure until three rounds are known
        (1.0, 21.0, (), True),
        (1.0, 21.0, (10.0, 10.0), True),
        (0.1, 10.0, (10.0, 11.0, 9.0), False),  # a peer that joined late accepts what is usual
        (1000.0, 800.0, (10.0, 11.0, 9.0), True),  # one that diverged with another does not vouch
        (10.0, 500.0, (10.0, 9000.0, 11.0), True),  # one bad round does not move the measure
    ],
)
def test_contribution_out_of_proportion_to_the_usual_is_refused(
    local: float, average: float, previous: tuple[float, ...], refused: bool
) -> None:
    expected = AllReduceFault.OUT_OF_BOUNDS.name if refused else None
    assert fault(local, average, *previous) == expected


@pytest.mark.parametrize(
    ("others", "average", "refused"),
    [
        (5.0, 4.365, False),  # its own one step has a norm of 0.0567
        (5.0, 101.0, True),
        (None, 4.365, False),  # it averages nothing for others: nothing is known
        (0.001, 4.365, True),
    ],
)
def test_the_first_round_of_a_newcomer_is_compared_with_the_others_contributions(
    tmp_path: Path, others: float | None, average: float, refused: bool
) -> None:
    judging = made(tmp_path / "norms.json")
    with pytest.raises(AllReduceError, match="norm") if refused else nullcontext():
        judging.check(local_norm=0.0567, average_norm=average, others_norm=others)


def test_rounds_of_nonsense_do_not_make_nonsense_usual(tmp_path: Path) -> None:
    """But a run that changes for good is followed, at most twice as far with each round."""
    judging = made(tmp_path / "norms.json")
    for _ in range(3):
        judging.check(local_norm=10.0, average_norm=10.0)
    for _ in range(5):
        with pytest.raises(AllReduceError, match="the rounds before"):
            judging.check(local_norm=10.0, average_norm=9e9)
    judging.check(local_norm=10.0, average_norm=300.0)


def test_where_all_were_zeros_any_norm_but_nan_is_accepted() -> None:
    assert fault(0.0, 1e6) is None
    for value in (float("nan"), float("inf")):
        assert fault(1.0, value, 1.0, 1.0, 1.0) == AllReduceFault.NOT_FINITE.name


def test_the_norms_of_past_rounds_outlive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "norms.json"
    judging = made(path)
    for norm in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0):
        judging.check(local_norm=1.0, average_norm=norm)
    with pytest.raises(AllReduceError):
        judging.check(local_norm=1.0, average_norm=float("nan"))
    assert list(judging.norms) == list(made(path).norms) == [2.0, 3.0, 4.0, 5.0, 6.0]
    assert not made(path, run_id="another swarm").norms
    path.write_text('{"run_id": "a"}')  # damaged
    assert not made(path).norms


def test_hiveminds_log_is_bounded_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "hivemind.log"
    bound_log(path)  # not there yet
    with path.open("ab", buffering=0) as held:
        held.write(b"a" * 90)
        bound_log(path, most=100)
        held.write(b"b" * 20)
        bound_log(path, most=100)
        held.write(b"c")
    assert path.read_bytes() == b"c"
    assert (tmp_path / "hivemind.log.1").read_bytes() == b"a" * 90 + b"b" * 20


@pytest.mark.parametrize(
    ("maddr", "address"),
    [
        ("/ip4/1.2.3.4/tcp/8009/p2p/Qm", ("1.2.3.4", 8009)),
        ("/dns4/boot.example.org/tcp/9/p2p/Qm", ("boot.example.org", 9)),
        ("/ip6/::1/tcp/9", ("::1", 9)),
        ("/ip4/1.2.3.4/udp/8009/quic/p2p/Qm", None),
        ("/ip4/1.2.3.4/tcp/many", None),
        ("1.2.3.4:8009", None),
        ("", None),
    ],
)
def test_addresses_that_can_be_probed(maddr: str, address: tuple[str, int] | None) -> None:
    assert address_of(maddr) == address
