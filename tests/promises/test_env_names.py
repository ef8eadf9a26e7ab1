"""Test that each name of the guides' ``.env`` is read, with and without ``export``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.network import network_file
from tests.tools.r2_keys import KEYS
from tests.tools.settings import load_config

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]
#: The names that the guides tell an operator to write.
NAMES = (
    "R2_ACCOUNT_ID",
    "R2_READ_ACCESS_KEY_ID",
    "R2_READ_SECRET_ACCESS_KEY",
    "R2_WRITE_ACCESS_KEY_ID",
    "R2_WRITE_SECRET_ACCESS_KEY",
    "R2_BUCKET_NAME",
)


@pytest.mark.parametrize("exchange", ["store", "hivemind"])
@pytest.mark.parametrize("word", ["", "export "])
@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_the_guides_is_read(name: str, word: str, exchange: str, tmp_path: Path) -> None:
    rules = {"exchange": exchange, "private": True, "chain.url": "http://127.0.0.1:8100"}
    dotenv = tmp_path / ".env"
    values = {**KEYS, "R2_BUCKET_NAME": "a-bucket"}
    dotenv.write_text(f"{word}{name}={values[name]}\n")
    dotenv.chmod(0o600)
    place = network_file(tmp_path, rules)
    config = load_config("miner", ["--network", place], environ={}, dotenv=dotenv, check=False)
    assert not [line for line in config.warnings if name in line]
    assert name in (ROOT / ".env.example").read_text()
