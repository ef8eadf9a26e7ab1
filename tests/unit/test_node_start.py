"""The first steps of a node."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from distributed_training.config import ConfigError, load_config
from distributed_training.node.failures import NetworkFailure
from distributed_training.node.start import fetch_tokenizer

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("cause", "end"),
    [
        (LocalEntryNotFoundError("the hub does not answer"), NetworkFailure),
        (HFValidationError("Repo id must use alphanumeric chars"), ConfigError),
    ],
)
def test_a_hub_that_is_away_is_no_fault_of_the_configuration(
    cause: Exception, end: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 2 would leave the miner down after the hub is back."""

    def refused(name: str, **options: object) -> None:
        raise OSError("as transformers says it") from cause

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", refused)
    config = load_config("miner", [], environ={}, dotenv=None, check=False)
    with pytest.raises(end, match=r"--neuron\.global_tokenizer_name"):
        fetch_tokenizer(config, tmp_path)
