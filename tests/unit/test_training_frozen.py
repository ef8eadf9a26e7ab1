"""Test networks that train only a part of their model and freeze the rest."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distributed_training.protocol import keys
from distributed_training.protocol.metadata import with_rules
from distributed_training.protocol.types import Base, Update
from distributed_training.scoring.evaluator import EvaluationModel
from distributed_training.training.frozen import FrozenTensorError, FrozenTensors
from distributed_training.training.model import (
    UnfitModelError,
    build_meta_model,
    initial_weights,
    parameter_schema,
    schema_of,
)
from tests.tools.member_world import batch
from tests.tools.member_world import script_model as built
from tests.tools.network import ALICE
from tests.tools.outer_steps import header
from tests.tools.store_leader import Leader
from tests.tools.training_world import (
    finished,
    frozen_file,
    joined,
    same,
    sequences,
    tiny,
    train,
    trainer,
)
from tests.toys.model_kind import Toy, ToyModel

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("process_group")]
LAYERS = ["model.layers.*", "model.norm.weight", "lm_head.weight"]
PART: dict[str, Any] = with_rules(tiny(), None, LAYERS)
EMBEDDINGS = "model.embed_tokens.weight"


# --- what a file may say ------------------------------------------------------------------------


def test_the_schema_has_what_is_trained() -> None:
    whole, part = parameter_schema(tiny()), parameter_schema(PART)
    assert [entry for entry in whole if entry not in part] == [(EMBEDDINGS, (67, 32))]
    assert schema_of(build_meta_model(PART), frozen=True) == [(EMBEDDINGS, (67, 32))]
    # All parameters are drawn together, so that freezing some of them does not change the model.
    first, *rest = initial_weights(tiny(), seed=4)
    assert same([first], initial_weights(PART, seed=4, frozen=True))
    assert same(rest, initial_weights(PART, seed=4))


@pytest.mark.parametrize(
    ("tied", "patterns", "line"),
    [
        (False, ["model.layers.*", "head"], "'head', which no parameter's name matches"),
        (True, ["model.layers.*", "lm_head.weight"], "are one tensor in this model"),
    ],
)
def test_a_rule_that_does_not_fit_the_model_is_refused(
    tied: bool, patterns: list[str], line: str
) -> None:
    model = with_rules({**tiny(), "tie_word_embeddings": tied}, None, patterns)
    with pytest.raises(UnfitModelError, match=line):
        build_meta_model(model)


# --- training -----------------------------------------------------------------------------------


def test_a_frozen_head_gets_no_gradient_and_the_rest_the_same_one(tmp_path: Path) -> None:
    model = with_rules(tiny(), None, ["model.*"])
    part = trainer(model=model, frozen=frozen_file(tmp_path, model), gradient_clip=0.0)
    plain: Any = built(tiny())
    with torch.no_grad():
        for shard in (*part.shards, *part.sharded.frozen):
            plain.get_parameter(shard.name).copy_(shard.local)
    (report,) = train(part, 0, 1)
    ids = sequences(0)
    logits = plain(input_ids=ids).logits[:, :-1]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    grads = [p.grad for n, p in plain.named_parameters() if n != "lm_head.weight"]
    norm = math.sqrt(sum(float(g.square().sum()) for g in grads if g is not None))
    assert report.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert report.grad_norm == pytest.approx(norm, rel=1e-4)


# --- a tensor that changed ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_a_checksum_notices_one_bit_an_exchange_and_a_scalar(dtype: torch.dtype) -> None:
    whole = torch.arange(600).view(20, 30).to(dtype)
    tensors = {"a": torch.zeros(3, dtype=dtype), "b": whole, "c": torch.ones((), dtype=dtype)}
    watch = FrozenTensors(tensors)
    assert watch.find_changed() == ""
    whole[3, 4], whole[3, 5] = whole[3, 5].clone(), whole[3, 4].clone()
    assert watch.find_changed() == "b"
    whole[3, 4], whole[3, 5] = whole[3, 5].clone(), whole[3, 4].clone()
    assert watch.find_changed() == ""
    tensors["c"] += 1
    assert watch.find_changed() == "c"


# --- scripts ------------------------------------------------------------------------------------


TOY = with_rules({"vocab_size": 67, "hidden_size": 8}, "toy", None)


def test_tied_shared_and_scalar_tensors_of_another_kind_of_model(tmp_path: Path) -> None:
    """Let a script with a plug-in's model upload and take an outer step that the judge measures."""
    schema = parameter_schema(TOY)
    assert [name for name, _ in schema] == ["scale", "table.weight", "inner.weight", "inner.bias"]
    assert dict(schema)["scale"] == ()
    leader = Leader(tmp_path / "bucket", TOY, run_id="run", members={1: ALICE.ss58_address})
    torch.manual_seed(5)
    model: Any = ToyModel()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.03)
    weights = joined(model, tmp_path, TOY, optimizer)
    weights.load_global(tmp_path / "bucket" / "outer/0" / keys.MODEL, 0)
    names = dict(model.named_parameters())
    assert same([names[name].data for name, _ in schema], leader.state.weights)
    assert same(
        [p.data for p in model.base.parameters()], initial_weights(TOY, seed=0, frozen=True)
    )
    judge = EvaluationModel(
        model_config=TOY, device=torch.device("cpu"), frozen=tmp_path / keys.FROZEN
    )
    judge.load(leader.state.weights)
    before = judge.loss(batch(7))
    for step in range(30):
        total, count = Toy().loss(model, batch(step))
        (total / count).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        weights.inner_step += 1
    leader.open_close()
    place = leader.bucket / keys.upload_key(1, 0, leader.serial)
    place.parent.mkdir(parents=True)
    head = header("upload", 0, hotkey=ALICE.ss58_address, serial=leader.serial, run_id="run")
    finished(weights.write_upload(place, head, sign=ALICE.sign))
    leader.take_outer_step(1)
    update = leader.bucket / keys.outer_key(1, keys.UPDATE)
    weights.prepare_update(Update(1, update, Base.MERGED, place, leader.chain[-1].weights))
    weights.commit_outer_step()
    merged = [weight.view(weight.shape or (1,)) for weight in leader.state.weights]
    assert same(weights.outer.epoch_start, merged)
    judge.load(leader.state.weights)
    assert judge.loss(batch(7)) < before


def test_an_optimizer_may_hold_what_is_frozen(tmp_path: Path) -> None:
    model: Any = ToyModel()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    weights = joined(model, tmp_path, TOY, optimizer)
    before = model.base.weight.detach().clone()
    weights.begin_epoch(0)
    model(batch(1)).sum().backward()
    optimizer.step()
    assert same([model.base.weight.detach()], [before])
    weights.write_upload(tmp_path / "upload", header("upload", 0), sign=ALICE.sign)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("trained", "is trained here, but in this network it is frozen"),
        ("missing", "has no parameter base.weight"),
        ("more", "extra is not a parameter of the network's model"),
        ("dtype", "is bfloat16, but the network's weights are float32"),
        ("untied", "head.weight is not a parameter of the network's model .table.weight, to which"),
    ],
)
def test_a_script_with_another_model_is_refused_by_the_first_tensor(
    change: str, line: str, tmp_path: Path
) -> None:
    model: Any = ToyModel()
    match change:
        case "trained":
            model.base.requires_grad_(True)
        case "missing":
            model.base = nn.Identity()
        case "more":
            model.extra = nn.Parameter(torch.zeros(2), requires_grad=False)
        case "dtype":
            model.scale.data = model.scale.data.bfloat16()
        case "untied":
            model.head.weight = nn.Parameter(torch.zeros(67, 8))
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=line) as refused:
        joined(model, tmp_path, TOY, torch.optim.SGD(trained, lr=0.1))
    assert "\n" not in str(refused.value) and "nothing was joined" in str(refused.value)
    assert same(before, [p.detach() for p in model.parameters()])


def test_a_buffer_that_training_changes_is_named_at_the_close(tmp_path: Path) -> None:
    model: Any = ToyModel()
    model.norm = nn.BatchNorm1d(8, affine=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    weights = joined(model, tmp_path, TOY, torch.optim.SGD(trained, lr=0.1))
    weights.begin_epoch(0)
    model.norm(torch.randn(4, 8))
    with pytest.raises(FrozenTensorError, match=r"^norm\.running_mean is not trained .* BatchNorm"):
        weights.write_upload(tmp_path / "upload", header("upload", 0), sign=ALICE.sign)
