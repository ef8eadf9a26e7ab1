"""Test networks that train adapters on a frozen base: rules, training and scripts that join."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard

import distributed_training
from distributed_training.common.memory import (
    Arrangement,
    ModelShape,
    device_memory,
    disk_space,
    host_memory,
)
from distributed_training.config.types import ConfigError
from distributed_training.node.published import list_files
from distributed_training.protocol import keys
from distributed_training.protocol.growth import file_bytes, largest_upload
from distributed_training.protocol.metadata import with_rules
from distributed_training.protocol.types import Progress
from distributed_training.protocol.update_file import largest_file
from distributed_training.scoring.evaluator import EvaluationModel
from distributed_training.training.checkpoint import Checkpointer
from distributed_training.training.lora import peft_config, read_rules
from distributed_training.training.model import (
    UnfitModelError,
    build_meta_model,
    initial_weights,
    parameter_schema,
    schema_of,
)
from distributed_training.training.pretrained import WeightsError, write_frozen
from distributed_training.training.script_weights import ScriptWeights
from tests.tools.member_world import MemberWorld, batch, played, script_model
from tests.tools.network import ALICE
from tests.tools.outer_steps import header
from tests.tools.training_world import (
    finished,
    frozen_file,
    joined,
    same,
    save_checkpoint,
    tiny,
    train,
    trainer,
)
from tests.tools.waiting import wait_for

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("process_group")]
BASE = tiny(vocab=67)


def lora(**changes: Any) -> dict[str, Any]:
    rules = {"r": 8, "alpha": 16, "targets": ["q_proj", "v_proj", "down_proj"], **changes}
    return with_rules(BASE, "lora", None, rules)


def peft_model(*, seed: int = 3, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a model with adapters as a script gets it from PEFT."""
    known: dict[str, Any] = {
        "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"],
    }  # fmt: skip
    return get_peft_model(script_model(BASE, seed).to(dtype), LoraConfig(**known | changes))  # type: ignore[arg-type]


# --- rules --------------------------------------------------------------------------------------


def test_rules_are_read_from_words_and_from_a_folder_of_peft(tmp_path: Path) -> None:
    every = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    found = read_rules("r=4,train=B", {**BASE, "dtype": "bfloat16"}, "lab/base@" + "0" * 40)
    assert found == {
        "r": 4, "alpha": 8, "targets": every, "train": "B", "dtype": "bfloat16",
        "base": "lab/base@" + "0" * 40,
    }  # fmt: skip
    peft_model(r=4, lora_alpha=32).save_pretrained(tmp_path)
    targets = ["down_proj", "q_proj", "v_proj"]
    rules = {"r": 4, "alpha": 32, "targets": targets, "dtype": "float32"}
    assert read_rules(str(tmp_path), BASE) == rules
    assert read_rules(f"{tmp_path},train=B", BASE) == rules | {"train": "B"}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("r=0", "model.settings has no valid rules for adapters .r: Input should be greater"),
        (
            "r=8,rank=4",
            "'rank=4' is neither a folder with adapter_config.json nor a rule for one of",
        ),
        ("r=8,train=A", "train: Input should be 'both' or 'B'"),
        ("r=8,dtype=int8", "dtype: Input should be 'float32', 'bfloat16' or 'float16'"),
        ("nowhere", "is neither a folder with adapter_config.json"),
    ],
)
def test_other_rules_are_refused_in_one_line(words: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line) as refused:
        read_rules(words, BASE)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("targets", "line"),
    [(["q_proj", "query"], "the model has no layer query"), (["lm_head"], "is not a layer of")],
)
def test_a_target_that_cannot_have_adapters_is_refused(targets: list[str], line: str) -> None:
    with pytest.raises(UnfitModelError, match=line):
        build_meta_model(lora(targets=targets))


# --- training -----------------------------------------------------------------------------------


@pytest.mark.parametrize("only_b", [False, True])
def test_a_miner_trains_and_uploads_only_adapters(only_b: bool, tmp_path: Path) -> None:
    config = lora(dtype="bfloat16", train="B" if only_b else "both", r=16)
    file = frozen_file(tmp_path, config)
    made = trainer(model=config, frozen=file, wrap="block")
    names = [name for name, _ in made.schema]
    assert names and all(".lora_B." in n or (".lora_A." in n and not only_b) for n in names)
    held = {shard.name: shard.local.clone() for shard in made.sharded.frozen}
    assert {t.dtype for n, t in held.items() if ".lora_" not in n} == {torch.bfloat16}
    train(made, 0, 2)
    save_checkpoint(Checkpointer(trainer=made, folder=tmp_path / "kept"), Progress(0, 2, 2))
    reports = train(made, 2, 4)
    assert all(torch.equal(held[shard.name], shard.local) for shard in made.sharded.frozen)
    again = trainer(model=config, frozen=file, wrap="block", seed=9)
    assert Checkpointer(trainer=again, folder=tmp_path / "kept").restore() is not None
    assert [r.loss for r in train(again, 2, 4)] == [r.loss for r in reports]
    path = tmp_path / "upload.safetensors"
    finished(made.write_upload(path, header("upload", 0), sign=ALICE.sign))
    count = sum(math.prod(shape) for _, shape in made.schema)
    body = path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little")
    assert body <= 0.6 * count


def test_judge_trainer_and_peft_compute_one_loss(tmp_path: Path) -> None:
    config, ids = lora(), batch(1, length=32)
    file = frozen_file(tmp_path, config)
    model: Any = peft_model(lora_dropout=0.5)
    weights = joined(model, tmp_path, config)
    train_on(model, weights, 5)
    values = [shard.local.clone() for shard in weights.shards]
    judge = EvaluationModel(model_config=config, device=torch.device("cpu"), frozen=file)
    judge.load(values)
    model.eval()
    logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    loss = float(nn.functional.cross_entropy(logits, ids[:, 1:].flatten()).detach())
    assert judge.loss(ids) == pytest.approx(loss, rel=1e-5)
    made = trainer(model=config, frozen=file)
    for shard, rows in zip(made.shards, values, strict=True):
        shard.local.copy_(rows)
    found, count = made.sharded.root(ids)
    assert float(found.detach()) / count == pytest.approx(loss, rel=1e-5)


def train_on(model: Any, weights: ScriptWeights, steps: int) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-2)
    for step in range(steps):
        ids = batch(step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights.inner_step += steps


# --- scripts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"r": 4}, r"lora_A.default.weight has the shape \(4, 32\), not the network's \(8, 32\)"),
        ({"lora_alpha": 8}, r"q_proj has alpha / r = 1.0, but the network's is 2"),
        ({"use_rslora": True}, r"has alpha / r = 5.6"),
        ({"target_modules": ["q_proj"]}, "no .*v_proj.base_layer.weight, .* with get_peft_model"),
        ({"target_modules": ["q_proj", "v_proj", "down_proj", "o_proj"]}, "o_proj.weight"),
        ({"dtype": torch.bfloat16}, "embed_tokens.weight is bfloat16, but .* file names float32"),
        ({"base": "int8"}, "gate_proj.weight is quantized, .* without FSDP"),
        ({"base": "int8 of FSDP"}, "is quantized and is sharded by FSDP, .* without FSDP"),
        ({"base": "plain"}, "base_layer.weight, which the network's has, .* with get_peft_model"),
        ({"base": "A"}, "is frozen, but this network trains it"),
    ],
)
def test_a_script_with_other_adapters_is_refused(
    change: dict[str, Any], line: str, tmp_path: Path
) -> None:
    base = change.get("base")
    changes = {key: value for key, value in change.items() if key != "base"}
    model = script_model(BASE) if base == "plain" else peft_model(**changes)
    for name, module in model.named_modules():
        if str(base).startswith("int8") and name.endswith("gate_proj"):
            codes = module.weight.detach().to(torch.int8)
            module.weight = nn.Parameter(codes, requires_grad=False)
        if base == "A" and name.endswith("lora_A"):
            module.requires_grad_(False)
    if base == "int8 of FSDP":
        fully_shard(model)
    with pytest.raises(ValueError, match=line) as refused:
        joined(model, tmp_path, lora())
    assert "\n" not in str(refused.value) and "nothing was joined" in str(refused.value)


def test_a_base_of_four_bits_gets_the_values_of_the_network(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import bitsandbytes

    config = lora()
    fixed = [name for name, _ in schema_of(build_meta_model(config), frozen=True)]
    values = dict(zip(fixed, initial_weights(config, seed=0, frozen=True), strict=True))

    def coded(factor: float) -> Any:
        """Return a PEFT model with the network's base, multiplied by ``factor``, in four bits."""
        model: Any = script_model(BASE)
        for name, _ in [*model.named_modules()]:
            if name.endswith("_proj"):
                plain, adapted = f"{name}.weight", f"{name}.base_layer.weight"
                weight = values[adapted if adapted in values else plain] * factor
                out, width = weight.shape
                four = bitsandbytes.nn.Linear4bit(width, out, bias=False, quant_type="nf4")
                four.load_state_dict({"weight": weight})
                parent, _, last = name.rpartition(".")
                setattr(model.get_submodule(parent), last, four.to("cpu"))
        targets = ["q_proj", "v_proj", "down_proj"]
        return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=targets))

    right, other = coded(1.0), coded(1.5)
    joined(right, tmp_path, config)
    with caplog.at_level(logging.INFO):
        weights = joined(other, tmp_path, config)
    assert "differed from the network's: it and the other frozen tensors now have" in caplog.text
    up_proj = "base_model.model.model.layers.0.mlp.up_proj.weight"
    assert torch.equal(other.get_parameter(up_proj), right.get_parameter(up_proj))
    assert same(*[[model(input_ids=batch(1)).logits.detach()] for model in (right, other)])
    embeddings = other.get_input_embeddings().weight
    assert torch.equal(embeddings, values["model.embed_tokens.weight"])
    assert weights.frozen.find_changed() == ""
    other.get_parameter(up_proj).data[3] += 1
    assert weights.frozen.find_changed() == "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[MemberWorld]:
    (source := tmp_path / "base").mkdir()
    config = lora()
    frozen_file(source, config)
    published = tmp_path / "run" / "published"
    published.mkdir(parents=True)
    trained = sum(math.prod(s) for _, s in parameter_schema(config))
    rules = {
        "format": 3,
        "model.kind": "lora",
        "model.settings": config["distributed_training"]["settings"],
        "model.trainable_parameters": trained,
        "model.frozen": list_files(source, published),
    }
    made = MemberWorld(tmp_path, config, rules=rules)
    with played(made.bucket):
        yield made


def test_a_script_whose_base_changes_uploads_nothing_and_trains_on(
    world: MemberWorld, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = peft_model()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-2)
    net = distributed_training.join(world.network, model, optimizer, **world.settings())
    with torch.no_grad():
        model.get_input_embeddings().weight[3] += 0.5
    world.leader.open_close()

    def is_named() -> bool:
        ids = batch(1)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        net.step(tokens=64)
        return "model.embed_tokens.weight is not trained in this network" in caplog.text

    with caplog.at_level(logging.WARNING):
        wait_for(is_named, "a line", 60)
    assert "Traceback" not in caplog.text
    assert not (world.bucket / keys.upload_key(7, 0, world.leader.serial)).exists()
    net.close()


# --- founding and sizes ---------------------------------------------------------------------------


def test_a_base_of_another_model_is_refused(tmp_path: Path) -> None:
    script_model(tiny(vocab=67, layers=1)).save_pretrained(tmp_path / "base")  # type: ignore[operator]
    config = lora()
    with pytest.raises(WeightsError, match=r"has no tensor model\.layers\.1"):
        write_frozen(tmp_path / "frozen", config, tmp_path / "base")


def test_disk_and_host_memory_are_those_of_the_adapters() -> None:
    trained = sum(math.prod(size) for _, size in parameter_schema(lora()))
    shape = ModelShape.from_config(BASE, part=trained)
    assert trained == shape.trained < 0.5 * shape.parameters
    assert disk_space(shape, keep_checkpoints=2) - shape.frozen_bytes < 130 * trained
    way = Arrangement(1, 1, 32, offload_optimizer=True)
    assert host_memory(shape, way) < 60 * trained and device_memory(shape, way) > 0


@pytest.mark.parametrize("r", [33, 64, 255])
def test_a_registry_takes_the_uploads_of_any_rank(r: int) -> None:
    schema = [("a", (r, 4096)), ("b", (4096, r))]
    body = largest_file(schema, "4-bit") - largest_file([("a", (1,)), ("b", (1,))], "4-bit")
    assert file_bytes(8192 * r) < body < largest_upload(8192 * r, "4-bit")


def test_the_rules_reach_a_script(world: MemberWorld) -> None:
    adapters = distributed_training.lora_config(world.network)
    assert (adapters.r, adapters.lora_alpha) == (8, 16)
    assert peft_config(lora()).target_modules == adapters.target_modules
