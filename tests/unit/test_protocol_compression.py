"""A compression is one file: its encodings are uploaded, read and scored."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed_training.protocol.gradients import PayloadError, load_payload
from distributed_training.protocol.types import Progress
from distributed_training.scoring.evaluator import EvaluationModel, Evaluator
from distributed_training.scoring.upload import Judged, Upload
from tests.tools.training_world import sequences, take_snapshot, tiny, train, trainer
from tests.toys import compression as toy

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("process_group")]


def test_an_upload_of_a_plug_in_s_compression_is_scored(tmp_path: Path) -> None:
    """Also with error feedback, and with the direction and scale that a check has found."""
    made, sign = trainer(compression="sign", error_feedback="best"), toy.Sign()
    start = [rows.clone() for _, _, rows in made.outer.epoch_start_rows()]
    train(made, 1, 20)
    made.hold_back(sequences(99, count=4))
    handle = take_snapshot(made, tmp_path, Progress(0, 19, 19, [7]))
    assert made.check_gradient(handle) is not None
    raw = (tmp_path / "gradients.pt").read_bytes()
    payload = load_payload(raw, made.schema, sign)
    assert set(payload.codes) == {name for name, _ in made.schema}
    model = EvaluationModel(model_config=tiny(), device=torch.device("cpu"))
    evaluator = Evaluator(model=model, pages=lambda uid, block: sequences(block))
    judged = Judged(1, 60, 0, made.schema, start, 0.8, compression=sign)
    judgement = evaluator.judge(Upload(3, (7,), payload), judged, random_blocks=(500,))
    assert judgement.random is not None and judgement.random.relative > 0
    assert not load_payload(raw, made.schema).codes, "to a network of another it holds nothing"


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("signs", torch.zeros(3, dtype=torch.int8), "is none of a parameter"),
        ("scale", torch.tensor([float("nan")]), "scale hold NaN or Inf"),
        ("scale", None, "signs and scale are not all dense"),
    ],
)
def test_untrusted_upload_is_checked_for_every_compression(name: str, value: Any, why: str) -> None:
    schema, sign = [("w", (4, 6))], toy.Sign()
    content = dict(zip(("wsigns", "wscale"), sign.encode(torch.ones(4, 6)), strict=True))
    content["w" + name] = value
    metadata = {"block": 1, "inner_step": 1, "outer_step": 0, "loss": 1.0}
    file = io.BytesIO()
    torch.save({**content, "metadata": metadata}, file)
    with pytest.raises(PayloadError, match=why):
        load_payload(file.getvalue(), schema, sign)
