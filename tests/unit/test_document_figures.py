"""Figures and lines that the documents quote are the code's, and what comments cite exists."""

from __future__ import annotations

import importlib
import logging
import re
from pathlib import Path

import pytest

from bench.gpu import TOTAL_SECONDS
from distributed_training.common.memory import Arrangement, ModelShape, host_memory
from distributed_training.config.loader import load_config
from distributed_training.protocol import lines, schedule
from distributed_training.protocol.types import StepReport
from distributed_training.telemetry.logs import LineFormatter
from distributed_training.training.memory_plan import named_config
from tests.tools import r2_keys

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]
GUIDE, PROTOCOL, PERFORMANCE = "docs/operator-guide.md", "docs/protocol.md", "docs/performance.md"
PUBLIC = load_config("miner", [], environ=dict(r2_keys.KEYS), dotenv=None)
LATER, FIRST = PUBLIC.miner.blocks_per_allreduce_later, PUBLIC.miner.blocks_per_allreduce
MINUTES = schedule.SECONDS_PER_BLOCK / 60
LEAST = PUBLIC.get("neuron.minimum_valid_inner_step")
SHAPE = ModelShape.from_config(named_config("4b"))
HOST = host_memory(SHAPE, Arrangement(world_size=1, micro_batch=1, sequence_length=1024, cuda=True))
ROW = 4 * SHAPE.parameters  # of float32


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("document", "claim"),
    [
        (
            GUIDE,
            f"within {LATER * MINUTES:.0f} minutes of the one before "
            f"({FIRST * MINUTES:.0f} before the network's first successful round)",
        ),
        (GUIDE, f"the miner's own least is {LEAST}; validators refuse only 0"),
        (GUIDE, lines.upload_blocked(15, LEAST)),
        (GUIDE, f"upload for about {LATER * MINUTES * 60 / 2:.0f} seconds"),
        (GUIDE, f"{PUBLIC.chain.axon_port} and {PUBLIC.get('dht.port')}, TCP, open"),
        (GUIDE, lines.waiting_for_validator(PUBLIC.miner.round_reload_timeout)),
        (GUIDE, f"{lines.ALL_REDUCE_DONE}: outer step 57 with 32 peers"),
        (PROTOCOL, f"{FIRST} until the network's first successful round, {LATER} from then on"),
        (PROTOCOL, f"{schedule.UPLOAD_AGE_LIMIT.total_seconds():,.0f} seconds old or older"),
        (
            PERFORMANCE,
            f"while a snapshot is written {HOST.snapshot / ROW:.0f} more, while a checkpoint is "
            f"written {HOST.checkpoint / ROW:.0f} more",
        ),
    ],
)
def test_figures_are_the_codes(document: str, claim: str) -> None:
    assert " ".join(claim.split()) in " ".join(text_of(document).split())


def test_the_bench_of_a_gpu_ends_within_what_is_said() -> None:
    assert "at most nine minutes" in text_of(PERFORMANCE) and TOTAL_SECONDS <= 9 * 60


def test_the_two_lines_of_a_step_are_the_programs() -> None:
    report = StepReport(
        56, 84, 3.4, 2.1e-5, 1024 * 512, 512, 15.2, 0.0, 4, grad_norm=0.412, gpu_memory_gb=18.45,
        mfu=0.412,
    )  # fmt: skip
    guide = text_of(GUIDE).splitlines()
    assert lines.step_line(report) in guide
    assert f"{lines.throughput_line(report)} | Repo age: 812s of 4800s" in guide


def test_each_line_begins_as_the_guide_shows_it() -> None:
    record = logging.LogRecord("neurons", logging.INFO, "", 0, "text", (), None)
    shown = re.search(r"`(\d{4}-\d\d-\d\d [0-9:.]+ \| INFO \| )`", text_of(GUIDE))
    assert shown is not None

    def form(line: str) -> str:
        return re.sub(r"\d", "0", line)

    assert form(LineFormatter(rank=0).format(record)) == form(shown[1]) + "text"


def test_every_section_of_the_protocol_page_that_is_cited_is_there() -> None:
    sections = set(re.findall(r"^## (\d+)\. ", text_of(PROTOCOL), re.M))
    sources = [ROOT / "distributed_training", ROOT / "bench", ROOT / "tests", ROOT / "extras"]
    cited = {
        number: path
        for source in sources
        for path in source.rglob("*.py")
        for found in re.findall(
            r"protocol page,? *\n?[ #]*\(?sections? (\d+(?:(?:, | and )\d+)*)", path.read_text()
        )
        for number in re.findall(r"\d+", found)
    }
    assert len(cited) >= 5
    assert set(cited) <= sections, {n: p for n, p in cited.items() if n not in sections}


@pytest.mark.parametrize("package", ["validator", "scoring"])
def test_a_package_names_modules_that_it_has(package: str) -> None:
    module = importlib.import_module(f"distributed_training.{package}")
    folder = ROOT / "distributed_training" / package
    named = re.findall(r"``(\w+)``", module.__doc__ or "")
    assert len(named) > 3
    assert [name for name in named if not (folder / f"{name}.py").exists()] == []


def test_nobody_is_sent_to_register_on_a_network_that_is_another() -> None:
    """Netuid 38 was given to another network; a registration is paid for."""
    for document in ("README.md", GUIDE):
        page = text_of(document)
        notice = page.index("No public network of this protocol is known to run")
        advice = [found.start() for found in re.finditer(r"[Rr]egister (one|a hotkey)", page)]
        assert notice < min(advice)
        for place in advice:
            assert "`network`" in page[place - 150 : place + 150], page[place - 80 : place + 80]


def test_tools_are_installed_in_the_version_that_is_tested() -> None:
    for path in (ROOT / "docs").glob("*.md"):
        assert "npm install -g pm2" not in path.read_text().replace("pm2@7", ""), path
