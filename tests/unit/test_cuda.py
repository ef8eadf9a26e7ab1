"""Run the checks of code for a GPU, on the CPU and, if there is one, on the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.tools.cuda_checks import CHECKS, Check

pytestmark = pytest.mark.timeout(300)

GPU = pytest.param(
    torch.device("cuda", 0),
    marks=[
        pytest.mark.cuda,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
    id="cuda",
)


@pytest.fixture(autouse=True, scope="module")
def process_group() -> Iterator[None]:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("device", [pytest.param(torch.device("cpu"), id="cpu"), GPU])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test(check: Check, device: torch.device, tmp_path: Path) -> None:
    check(device, tmp_path)
