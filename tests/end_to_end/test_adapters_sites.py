"""Create a network that trains adapters by the commands of the page, and join it at three sites."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from distributed_training.common.llama import local_llama_config
from distributed_training.data.tokenizer import build_tokenizer
from distributed_training.telemetry import read_events
from distributed_training.training.model import hf_config
from tests.end_to_end.test_tutorial import Place, places
from tests.tools.founded import ROOT, RULES, outer_steps
from tests.tools.settings import LOCAL
from tests.tools.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]
PATIENCE = 1500.0  # seconds
PAGE = (ROOT / "docs" / "continue-a-model.md").read_text()
ADAPTERS = PAGE.partition("\n## Adapters (LoRA)\n")[2].partition("\n## ")[0]


def test_three_sites_train_adapters_by_the_commands_of_the_page(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```bash\n(dt-network init .*?)^```$", ADAPTERS, re.M | re.S)
    named = {"https://registry.example.org": "http://10.0.0.1:8100"}
    named |= {"https://s3.example.org": "embedded"}
    for word, ours in named.items():
        assert word in block
        block = block.replace(word, ours)
    more = ["--miners", "3", "--data-source", "stdlib", *RULES]
    more += ["--set", "round.period=2m", "--set", "round.grace=40s"]
    with places(tmp_path) as (founder, *partners):
        config = local_llama_config() | {"eos_token_id": 256, "pad_token_id": 256}
        base: Any = AutoModelForCausalLM.from_config(hf_config(config), dtype=torch.bfloat16)
        base.save_pretrained(founder.home / "model")
        build_tokenizer("bytes", founder.home / "model")
        words = " ".join(f"'{word}'" for word in more)
        assert founder.start(f"{block.strip()} {words}").wait(600) == 0, founder.said
        founder.running.append(founder.start("exec dt-network run lab"))
        letter = founder.home / "lab" / "invitation.txt"
        wait_for(lambda: founder.is_alive() and letter.exists(), "the invitation", 600, every=0.5)
        line = re.search(r"^\s*dt-join (\S+)$", letter.read_text(), re.M)
        assert line is not None
        # The founder's site trains as well.
        members = [Place(founder.machine, tmp_path / "third", tmp_path / "bin"), *partners]
        for member in members:
            member.invitation = line[1].strip("'")
            joined = member.start(f"dt-join 'INVITATION' {' '.join(LOCAL)}").wait(600)
            assert joined in (0, 1), (
                member.said
            )  # this is the doctor's status, since the network may not have begun
            member.running.append(member.start("exec dt-miner"))

        def steps(folder: Path) -> dict[int, dict[str, Any]]:
            assert all(place.is_alive() for place in (founder, *members))
            return outer_steps(folder)

        validator = founder.home / "lab" / "validator"
        wait_for(
            lambda: any(e["participants"] == [1, 2, 3] for e in steps(validator).values()),
            "an outer step with an upload of each site",
            PATIENCE,
            every=1.0,
        )
        newest = max(outer_steps(validator))
        for member in members:
            run = member.home / "runs" / "miner-default"
            wait_for(lambda run=run: newest in steps(run), "its outer step", 600, every=1.0)
            # Each fetches the base once, as the founder published it. Uploads hold only adapters.
            (frozen,) = (run / "published").glob("*/frozen.safetensors")
            (given,) = (validator / "published").glob("*/frozen.safetensors")
            assert frozen.read_bytes() == given.read_bytes()
            sent = [e["bytes_sent"] for e in read_events(run / "events.jsonl", "publication")]
            assert sent and max(sent) < given.stat().st_size / 4
