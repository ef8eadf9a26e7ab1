"""Test the hosts of docs/join-a-script.md as members of one network. Each is killed once.

One trial serves all tests of this file. Its members adapt one base on text of their own, and an
outer step needs an upload from each member.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from distributed_training.common.llama import llama_config
from distributed_training.data.page_source import StdlibSource
from distributed_training.data.tokenizer import build_tokenizer
from distributed_training.telemetry import read_events
from distributed_training.training.model import hf_config
from tests.end_to_end.test_try import ends, start
from tests.tools import host_member

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
SIZES = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 2, "intermediate": 128}
ROUNDS = 2  # one before the kill and one after it
MEMBERS = [*host_member.HOSTS, "member-4"]


@dataclass
class Trial:
    printed: str
    folder: Path

    def log(self, member: str) -> str:
        return (self.folder / member / "log.txt").read_text()


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    folder = tmp_path_factory.mktemp("hosts")
    config = llama_config(vocab=264, max_positions=512, **SIZES)
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(
        hf_config(config | {"eos_token_id": 256, "pad_token_id": 256})
    )
    base.save_pretrained(folder / "base")
    build_tokenizer("bytes", folder / "base")
    text = "\n".join(StdlibSource().held_out())
    held = folder / "held.txt"
    held.write_text(text[:100_000])
    (folder / "own.txt").write_text(text[100_000:])
    digest = hashlib.sha256(held.read_bytes()).hexdigest()
    process = start(
        folder,
        Path(host_member.__file__),
        *("--members", str(len(MEMBERS)), "--rounds", str(ROUNDS)),
        *("--from", "base", "--lora", "r=8", "--args", "NETWORK base own.txt"),
        *("--set", "data.own=true", "--set", f'data.held_out=["python={held}#{digest}"]'),
    )
    status, printed, error = ends(process, 800)
    made = Trial(printed, folder / "runs" / "try")
    if status:
        for path in made.folder.glob("*/log.txt"):
            print(f"===== {path}\n{path.read_text()[-3000:]}")
    assert status == 0, error
    return made


def test_all_hosts_count_in_each_outer_step(trial: Trial) -> None:
    """An upload that helps less than the others may be carried over."""
    merged = re.findall(r"^outer step (\d) after \d+ s: merged (.*); held", trial.printed, re.M)
    assert [int(step) for step, _ in merged] == [*range(1, ROUNDS + 1)]
    for _, names in merged:
        assert sorted(re.split(", |; carried over ", names)) == MEMBERS


@pytest.mark.parametrize("member", MEMBERS)
def test_a_host_applies_each_update_and_is_ended_once(trial: Trial, member: str) -> None:
    events = trial.folder / member / "run" / "events.jsonl"
    # The first step may be taken again, if the kill came before its checkpoint.
    taken = {event["outer_step"] for event in read_events(events, "outer_step")}
    assert taken == {*range(1, ROUNDS + 1)}
    log = trial.log(member)
    if member in host_member.HOSTS:
        (status,) = re.findall(r"^killed; status (-?\d+)$", log, re.M)
        # For a killed process, accelerate's own process ends with status 1.
        assert int(status) == (1 if "accelerate" in " ".join(host_member.HOSTS[member]) else -9)
    else:
        assert log.count("\nKeyboardInterrupt\n") == 1
        assert "join() was called again: the previous membership" in log
