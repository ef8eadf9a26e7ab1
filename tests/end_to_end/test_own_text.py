"""Test that a member's own text never leaves the machine: nothing sent, stored or logged has it.

The network goes through the store, and each member has a bucket of its own there.
"""

from __future__ import annotations

import hashlib
import random
import string
import subprocess
import sys
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from distributed_training.data.tokenizer import byte_tokenizer
from distributed_training.localnet.services import SubnetOptions
from distributed_training.localnet.subnet import LocalSubnet
from distributed_training.telemetry import read_events
from tests.tools.subnet_tools import paced

pytestmark = pytest.mark.long
TOOLS = Path(__file__).parents[1] / "tools"
NAMES = ("miner-1", "miner-2")


def canary_of(name: str) -> str:
    """Return a word that occurs in no other text."""
    return f"canary-{hashlib.sha256(name.encode()).hexdigest()[:48]}"


def words(name: str, count: int) -> str:
    """Return text of random words. Each hundred contains the canary of ``name``."""
    draw = random.Random(name)
    known = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(3, 9))) for _ in range(99)]
    return "\n".join(
        canary_of(name) if number % 100 == 0 else draw.choice(known) for number in range(count)
    )


def forms_of(canary: str) -> dict[str, bytes]:
    """Return the canary as bytes, and its tokens as binary and as decimal numbers."""
    ids = np.array(byte_tokenizer().encode(canary).ids)
    forms = {f"int{8 * width}": ids.astype(f"<u{width}").tobytes() for width in (2, 4, 8)}
    forms |= {f"after {between!r}": between.join(map(str, ids)).encode() for between in (",", ", ")}
    return {"bytes": canary.encode(), **forms}


def ways(path: Path, forms: dict[str, bytes]) -> set[str]:
    """Return the forms in which a file contains the canary."""
    data = path.read_bytes()
    return {way for way, form in forms.items() if form in data}


@pytest.mark.timeout(900)
def test_own_text_is_in_nothing_that_leaves_a_miner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        (tmp_path / "own" / name).mkdir(parents=True)
        (tmp_path / "own" / name / "text.txt").write_text(words(name, 30_000))
    held = tmp_path / "held.txt"
    held.write_text(words("held", 3000))
    sent = tmp_path / "sent"
    sent.mkdir()
    monkeypatch.syspath_prepend(str(TOOLS / "recorded"))  # of the programs that this one starts
    monkeypatch.setenv("RECORD_SENT", str(sent))
    monkeypatch.setenv("OWN_TEXT", str(tmp_path / "own"))
    digest = hashlib.sha256(held.read_bytes()).hexdigest()
    options = SubnetOptions(
        folder=tmp_path / "subnet",
        ranks=(1, 1),
        outer_steps=1,
        period=104,
        rules={
            "data.own": True,
            "data.held_out": [f"words={held}#{digest}"],
            "store.access": "own",
            # A model cannot learn anything from words of random letters.
            "round.held_out_rise": 10.0,
        },
        miner_flags=("--neuron.wandb", "offline"),
    )
    with LocalSubnet(options=paced(options, samples=4), stop_grace=timedelta(seconds=60)) as subnet:
        subnet.wait_for_outer_steps(1, timedelta(seconds=500))
        subnet.wait_for_figures(timedelta(seconds=60))
        for miner in subnet.miners:
            doctor = subprocess.run(
                [sys.executable, "-m", "distributed_training", "doctor", "--json",
                 *miner.flags, *subnet.options.miner_flags,
                 "--data.own_text", str(tmp_path / "own" / miner.name)],
                env=miner.environment,
                capture_output=True,
                timeout=240,
            )  # fmt: skip
            (tmp_path / "subnet" / f"doctor-{miner.name}").write_bytes(
                doctor.stdout + doctor.stderr
            )
            assert b"own text: 1 files" in doctor.stdout
        bytes_sent = sum(
            event["bytes_sent"]
            for miner in subnet.miners
            for event in read_events(miner.folder / "events.jsonl", "publication")
        )
        for miner in subnet.miners:
            with closing(subnet.open_bucket(miner)) as bucket:
                assert bucket.list_objects(f"uploads/{miner.uid}/")
        scored = [*read_events(subnet.validator.folder / "events.jsonl", "upload_scored")]
    assert any(event["ok"] and "assigned_before" not in event for event in scored)
    recorded = sum(path.stat().st_size for path in sent.iterdir())
    assert recorded > bytes_sent > 1e6, "the uploads are among what was written down"
    files = [path for path in [*sent.iterdir(), *(tmp_path / "subnet").rglob("*")]
             if path.is_file() and not path.is_symlink()]  # fmt: skip
    # These remain: prepared tokens, and checkpoints with micro-batches of an unfinished step.
    kept = {
        path
        for name in NAMES
        for folder in ("data", "checkpoints")
        for path in (tmp_path / "subnet" / name / folder).rglob("*")
    }
    assert any("wandb" in path.parts for path in files), "W&B has written"
    assert any(b"uploads/" in path.read_bytes() for path in sent.iterdir())
    for name in NAMES:
        forms = forms_of(canary_of(name))
        assert not {
            path: found for path in files if path not in kept and (found := ways(path, forms))
        }
        # The search itself works: it finds the text in its file and in a changed copy of an upload.
        assert any(ways(path, forms) for path in kept if path.suffix == ".tokens")
        planted = tmp_path / "planted"
        planted.write_bytes(min(sent.iterdir()).read_bytes() + forms["bytes"])
        assert ways(planted, forms) == {"bytes"}
