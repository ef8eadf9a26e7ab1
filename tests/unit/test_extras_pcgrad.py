"""Gradient surgery against the published algorithm written out, in one process and over ranks."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from distributed_training.common.ports import free_ports
from extras.pcgrad import pcgrad, products, surgery_weights
from tests.tools import forked

pytestmark = pytest.mark.timeout(240)

SHAPES = [(6, 4), (8,), (4, 2, 3)]


def gradients(domains: int, seed: int = 0) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(s, generator=generator) for s in SHAPES] for _ in range(domains)]


def reference(domains: list[list[Tensor]], *, seed: int) -> tuple[Tensor, int]:
    """Algorithm 1 of the paper over whole, flat gradients."""
    flat = [torch.cat([t.flatten() for t in domain]).double() for domain in domains]
    order = random.Random(seed)
    total = torch.zeros_like(flat[0])
    projections = 0
    for i, gradient in enumerate(flat):
        projected = gradient.clone()
        others = [j for j in range(len(flat)) if j != i]
        order.shuffle(others)
        for j in others:
            product = projected @ flat[j]
            if product < 0:
                projected -= product / (flat[j] @ flat[j]) * flat[j]
                projections += 1
        total += projected
    return total, projections


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors]).double()


@pytest.mark.parametrize("domains", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_published_algorithm(domains: int, seed: int) -> None:
    expected, projections = reference(gradients(domains, seed), seed=seed)
    result, made = pcgrad(gradients(domains, seed), seed=seed, reduce=False)
    assert made == projections
    torch.testing.assert_close(flat(result), expected, rtol=1e-5, atol=1e-6)


def test_gradients_that_agree_are_added() -> None:
    same = gradients(1)[0]
    result, made = pcgrad([[t.clone() for t in same], [t * 2 for t in same]], seed=0, reduce=False)
    assert made == 0
    torch.testing.assert_close(flat(result), 3 * flat(same))


def test_two_that_conflict_end_up_with_no_product_below_zero() -> None:
    first, second = [torch.tensor([1.0, 0.0])], [torch.tensor([-0.5, 1.0])]
    result, made = pcgrad([[first[0].clone()], second], seed=0, reduce=False)
    assert made == 2
    assert float(result[0] @ first[0]) >= -1e-6
    assert float(result[0] @ second[0]) >= -1e-6


def test_opposite_gradients_and_zeros_stay_finite() -> None:
    one = [torch.tensor([1.0, 2.0])]
    result, _ = pcgrad([[one[0].clone()], [-one[0]], [torch.zeros(2)]], seed=3, reduce=False)
    torch.testing.assert_close(result[0], torch.zeros(2), atol=1e-6, rtol=0)


def test_not_finite_gradients_are_left_for_the_norm_check() -> None:
    matrix = torch.tensor([[float("nan"), 1.0], [1.0, 2.0]])
    assert surgery_weights(matrix, seed=0) == ([1.0, 1.0], 0)


def test_domains_must_match() -> None:
    with pytest.raises(ValueError, match="same parameters"):
        pcgrad([[torch.ones(2)], []], seed=0, reduce=False)


def _rank(rank: int, world: int, port: int, results: mp.SimpleQueue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    # Rows as FSDP2 splits them: ceil(rows / world) each, the last rank fewer or none.
    mine = [[t.chunk(world)[rank].clone() if rank < len(t.chunk(world)) else t[:0].clone()
             for t in domain] for domain in gradients(3, 5)]  # fmt: skip
    matrix = products(mine, group=None, reduce=True)
    result, made = pcgrad(mine, seed=5)
    results.put((rank, matrix.tolist(), [t.tolist() for t in result], made))
    dist.destroy_process_group()


def test_split_over_ranks_it_is_the_same(free_port: int) -> None:
    forked.prepare()
    results = mp.get_context("forkserver").SimpleQueue()
    mp.start_processes(_rank, (3, free_port, results), nprocs=3, start_method="forkserver")
    ranks = sorted(results.get() for _ in range(3))
    expected, projections = reference(gradients(3, 5), seed=5)
    assert {r[3] for r in ranks} == {projections} and projections > 0
    assert ranks[0][1] == ranks[1][1] == ranks[2][1]
    whole = [
        torch.cat([torch.tensor(r[2][i]).reshape(-1, *shape[1:]) for r in ranks])
        for i, shape in enumerate(SHAPES)
    ]
    assert [tuple(t.shape) for t in whole] == SHAPES
    torch.testing.assert_close(flat(whole), expected, rtol=1e-5, atol=1e-6)


@pytest.fixture()
def free_port() -> int:
    (port,) = free_ports(1)
    return port
