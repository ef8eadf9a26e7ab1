"""No member's own text leaves his machine: nothing that is sent, stored or logged has any of it."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from distributed_training.data.tokenizer import TextTokenizer, build_tokenizer
from distributed_training.localnet.services import SubnetOptions
from distributed_training.localnet.subnet import LocalSubnet
from distributed_training.telemetry import read_events
from tests.tools.subnet_tools import paced
from tests.tools.text_search import WINDOW, Text

pytestmark = pytest.mark.long
TOOLS = Path(__file__).parents[1] / "tools"
NAMES = ("miner-1", "miner-2")


def words(seed: int, count: int) -> str:
    """Text of words that no other seed has, with a canary in each hundred."""
    draw = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    known = ["".join(draw.choices(letters, k=draw.randint(3, 9))) for _ in range(800)]
    canary = f"canary-{draw.randbytes(24).hex()}"
    return "".join(
        f"{canary if number % 100 == 0 else draw.choice(known)}{' ' if number % 12 else chr(10)}"
        for number in range(count)
    )


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    path, eos_id = build_tokenizer("bytes", tmp_path_factory.mktemp("tokenizer"))
    return TextTokenizer(path, eos_id=eos_id)


def ids_of(encoder: TextTokenizer, text: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return encoder.encode_rows([text], max_length=10**9)[:-1].astype(np.int64)


@pytest.mark.timeout(900)
def test_own_text_is_in_nothing_that_leaves_a_miner(
    tmp_path: Path, encoder: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {name: words(number, 30_000) for number, name in enumerate(NAMES)}
    for name, text in own.items():
        (tmp_path / "own" / name).mkdir(parents=True)
        (tmp_path / "own" / name / "text.txt").write_text(text)
    held = tmp_path / "held.txt"
    held.write_text(words(99, 3000))
    sent = tmp_path / "sent"
    sent.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(TOOLS / "recorded"))
    monkeypatch.setenv("RECORD_SENT", str(sent))
    monkeypatch.setenv("OWN_TEXT", str(tmp_path / "own"))
    digest = hashlib.sha256(held.read_bytes()).hexdigest()
    options = SubnetOptions(
        folder=tmp_path / "subnet",
        ranks=(1, 1),
        outer_steps=1,
        period=104,
        rules={"data.own": True, "data.held_out": [f"words={held}#{digest}"]},
        miner_flags=("--neuron.wandb", "offline"),
    )
    options = paced(options, samples=4)
    options = SubnetOptions(
        **{**vars(options), "miner_script": TOOLS / "own_text_miner.py"},
    )
    with LocalSubnet(options=options, stop_grace=timedelta(seconds=60)) as subnet:
        subnet.wait_for_outer_steps(1, timedelta(seconds=500))
        subnet.wait_for_figures(timedelta(seconds=60))
        assert subnet.services is not None
        for miner in subnet.miners:
            doctor = subprocess.run(
                [sys.executable, "-m", "distributed_training", "doctor", "--json",
                 *subnet.services.flags(miner.plan),
                 "--data.own_text", str(tmp_path / "own" / miner.plan.name)],
                env=subnet.services.environment(miner.plan),
                capture_output=True,
                timeout=240,
            )  # fmt: skip
            (tmp_path / "subnet" / f"doctor-{miner.plan.name}").write_bytes(
                doctor.stdout + doctor.stderr
            )
            assert b"own text: 1 files" in doctor.stdout
        bytes_sent = sum(
            event["bytes_sent"]
            for miner in subnet.miners
            for event in read_events(miner.plan.folder / "events.jsonl", "publication")
        )
        scored = [*read_events(subnet.validator.plan.folder / "events.jsonl", "upload_scored")]
    assert any(event["ok"] and "assigned_before" not in event for event in scored)
    recorded = sum(path.stat().st_size for path in sent.iterdir())
    assert recorded > bytes_sent > 1e6, "the uploads are among what was written down"
    files = [path for path in [*sent.iterdir(), *(tmp_path / "subnet").rglob("*")]
             if path.is_file() and not path.is_symlink()]  # fmt: skip
    # What stays: prepared tokens, and checkpoints with the micro-batches of a step under way.
    kept = {
        path
        for name in NAMES
        for folder in ("data", "checkpoints")
        for path in (tmp_path / "subnet" / name / folder).rglob("*")
    }
    assert any("wandb" in path.parts for path in files), "W&B has written"
    assert any(b"uploads/" in path.read_bytes() for path in sent.iterdir())
    for name in NAMES:
        others = [text.encode() for other, text in own.items() if other != name]
        wanted = Text(own[name].encode(), ids_of(encoder, own[name]), [*others, held.read_bytes()])
        assert len(wanted) > 100_000
        found = {path: ways for path in files if path not in kept and (ways := wanted.ways(path))}
        assert not found
        # The search finds it where it is, and in a copy of what was sent.
        assert any(wanted.ways(path) for path in kept if path.suffix == ".tokens")
        (first, *_) = sorted(sent.iterdir())
        planted = tmp_path / "planted"
        planted.write_bytes(first.read_bytes() + own[name][5000 : 5000 + WINDOW].encode())
        assert wanted.ways(planted) == {"bytes"}
    total = sum(path.stat().st_size for path in files if path not in kept)
    print(
        f"{len(files) - len(kept)} files, {total / 1e6:.0f} MB, of which {recorded / 1e6:.0f} sent"
    )
