"""Create a store network by two commands and join it by two: no port, no key, no account."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from distributed_training.common.files import read_json_object
from distributed_training.common.llama import local_llama_config
from distributed_training.common.ports import free_ports
from distributed_training.data.tokenizer import build_tokenizer
from distributed_training.telemetry import read_events
from distributed_training.training.model import hf_config
from tests.tools.founded import PATIENCE, RULES, TREE, call, start
from tests.tools.settings import LOCAL
from tests.tools.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]
#: A part of the model that is trained: all but its embeddings.
PART = 'model.trainable=["model.layers.*", "model.norm.weight", "lm_head.weight"]'


#: Adapters on a base, of which only B is trained.
LORA = ("--from", "base", "--lora", "r=8,train=B")


@pytest.mark.parametrize(
    "part", [(), ("--set", PART), LORA], ids=["all", "frozen embeddings", "adapters"]
)
def test_from_nothing_to_an_upload_that_is_merged(tmp_path: Path, part: tuple[str, ...]) -> None:
    founder, member = tmp_path / "founder", tmp_path / "member"
    founder.mkdir()
    member.mkdir()
    if part == LORA:
        config = local_llama_config() | {"eos_token_id": 256, "pad_token_id": 256}
        base: Any = AutoModelForCausalLM.from_config(hf_config(config), dtype=torch.bfloat16)
        base.save_pretrained(founder / "base")
        build_tokenizer("bytes", founder / "base")
    (registry,) = free_ports(1)
    words = ("--name", "lab", "--exchange", "store", "--registry", f"http://127.0.0.1:{registry}")
    more = ("--miners", "1", "--data-source", "stdlib", "--store", "embedded", *RULES)
    printed = call(founder, "dt-network", "init", "lab", *words, *more, *part)
    (line,) = re.findall(r"^  dt-network (run lab)$", printed, re.M)
    with (founder / "lab" / "run.toml").open("a") as file:
        file.write('"neuron.page_port" = "off"\n')
    running, log = start(founder, "dt-network", *line.split())
    miner = None

    def ready() -> bool:
        assert running.poll() is None, log.read_text()[-3000:]
        return "Outer step 0, held-out loss" in log.read_text()

    try:
        wait_for(ready, "a model", PATIENCE)
        invitation = founder / "lab" / "invitation.txt"
        token = re.search(r"^dt-join (\S+)$", invitation.read_text(), re.M)
        assert token is not None
        call(member, "dt-join", token[1], *LOCAL, status=(0, 1))
        assert "R2_" not in (member / ".env").read_text()
        ports = re.findall(r"^\S*port\b.*", (member / "miner.toml").read_text(), re.M)
        assert ports == ['page_port = "off"'], "no other port is of any use to it"
        miner, miners_log = start(member, "dt-miner")
        listening: set[str] = set()

        def merged() -> bool:
            assert running.poll() is None, log.read_text()[-3000:]
            assert miner.poll() is None, miners_log.read_text()[-3000:]
            for process in [psutil.Process(miner.pid), *psutil.Process(miner.pid).children(True)]:
                try:
                    found = process.net_connections("tcp")
                except psutil.Error:
                    continue
                listening.update(c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN)
            events = read_events(founder / "lab" / "validator" / "events.jsonl")
            return any(e["kind"] == "outer_step" and e["participants"] == [1] for e in events)

        wait_for(merged, "an outer step with the member's upload", PATIENCE, every=1.0)
        assert listening <= {"127.0.0.1", "::1"}, "nobody else can reach this machine"
        took = member / "runs" / "miner-default" / "events.jsonl"
        wait_for(
            lambda: any(e["kind"] == "outer_step" for e in read_events(took)),
            "the member's outer step",
            PATIENCE,
            every=1.0,
        )
        published = member / "runs" / "miner-default" / "published"
        assert len([*published.glob("*/frozen.safetensors")]) == bool(part)
        assert re.search(r"merged: [+-]\d", call(member, "dt-score", "--all"))
        audited = call(founder, "dt-network", "audit", "lab")
        assert "merge, momentum and residual were computed again" in audited
        miner.send_signal(signal.SIGTERM)
        assert miner.wait(120) == 0
        running.send_signal(signal.SIGTERM)
        assert running.wait(120) == 0, log.read_text()[-3000:]
        assert not TREE.processes()
        if part == LORA:
            kept = str(founder / "lab" / "validator")
            for words in (("export",), ("export-whole", "--merge")):
                given = ("--network", "lab/network.toml", "--from", kept)
                call(founder, "dt-export", *words, *given)
            part_of: Any = PeftModel.from_pretrained(base.float(), founder / "export")
            whole: Any = AutoModelForCausalLM.from_pretrained(founder / "export-whole")
            ids = torch.arange(40).view(2, 20)
            logits = (model.eval()(input_ids=ids).logits for model in (part_of, whole))
            torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-4)
            manifest = read_json_object(max((founder / "lab").rglob("manifest.json"))) or {}
            assert manifest["libraries"].keys() == {"peft", "transformers"}
        # Back to the beginning, while nothing runs, and on from there.
        printed = call(founder, "dt-network", "rewind", "lab", "--to", "0")
        (back,) = re.findall(
            r"^outer step (\d+) has the weights of outer step 0 again", printed, re.M
        )
        assert not TREE.processes()
        running, log = start(founder, "dt-network", *line.split())
        miner, miners_log = start(member, "dt-miner")
        wait_for(
            lambda: any(
                e["kind"] == "outer_step" and e["outer_step"] > int(back) and merged()
                for e in read_events(took)
            ),
            "an outer step of the member after the one that went back",
            PATIENCE,
            every=1.0,
        )
        assert "went back to outer step 0" in miners_log.read_text()
    except BaseException:
        for path in tmp_path.glob("*/*.log"):
            print(f"===== {path}\n{path.read_text()[-4000:]}")
        raise
    finally:
        TREE.end()
