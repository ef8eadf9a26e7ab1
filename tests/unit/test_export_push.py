"""``dt-export --push``: a model, its tokenizer and a card go to a stand-in of the Hub's API."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.hub import TOKEN, Hub, hub
from tests.tools.network import network_file
from tests.unit.test_scoring_export import state

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]
__all__ = ["state"]  # a fixture


@pytest.fixture
def server() -> Iterator[Hub]:
    with hub() as made:
        yield made


def export(
    server: Hub | None, folder: Path, *words: str, token: str | None = TOKEN
) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    place = server.url if server is not None else "http://127.0.0.1:9"
    ours = {"HF_ENDPOINT": place, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder / "hub")}
    ours |= {"HF_TOKEN": token} if token else {}
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "distributed_training.scoring.export",
            str(folder / "model"),
            *words,
        ],
        cwd=ROOT,
        env={**kept, **ours},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_model_tokenizer_and_card_are_on_the_hub(state: Path, tmp_path: Path, server: Hub) -> None:
    file = network_file(tmp_path, {})
    words = ["--from", str(state), "--network", file, "--push", "lab/first-model", "--eval", "2"]
    done = export(server, tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"pushed to {server.url}/lab/first-model"
    made = server.repositories["lab/first-model"]
    assert made.get("private") is True or made.get("visibility") == "private", made
    assert server.messages == ["Outer step 3"]
    folder = tmp_path / "model"
    files = [path for path in folder.iterdir() if path.is_file()]
    local = {("lab/first-model", path.name): path.read_bytes() for path in files}
    assert server.files == local and len(local) >= 5
    card = local["lab/first-model", "README.md"].decode()
    assert card.startswith("---\nlibrary_name: transformers\n") and "| Outer step | 3 |" in card
    assert 'from_pretrained("lab/first-model")' in card
    assert re.search(r"\| Measured \| held-out loss \d\.\d{4}, perplexity .*, on .* \|", card)
    assert "| Network | local, version 1 of its file |" in card and TOKEN not in done.stdout + card

    (tmp_path / "again").mkdir()
    server.full = True
    full = export(server, tmp_path / "again", *words[:-2])
    (line,) = full.stderr.splitlines()
    assert full.returncode == 1 and "over the quota" in line and "hf upload lab/first-model" in line
    assert (tmp_path / "again" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "token", "status", "words"),
    [
        ("no/such/name", TOKEN, 2, "is no repository's name"),
        ("a..b", TOKEN, 2, "is no repository's name"),
        ("lab/model", None, 2, "there is no token of the Hugging Face Hub"),
        ("lab/model", "hf_wrong", 1, "nothing was exported; see that the token may write there"),
    ],
)
def test_refused_push_is_one_line_before_anything_is_read(
    tmp_path: Path, server: Hub, state: Path, name: str, token: str | None, status: int, words: str
) -> None:
    flags = ["--from", str(state), "--network", network_file(tmp_path, {}), "--push", name]
    done = export(server, tmp_path, *flags, token=token)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, words in line) == (status, True), line
    assert not (tmp_path / "model").exists() and not server.files
