"""Test the exit statuses that pm2 acts on and the reference promises, and that of a refused start.

test_networks.py tests a stop with status 0, and test_pm2.py tests restarts by status.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distributed_training.miner.__main__ import main
from distributed_training.protocol.types import FINAL, ExitStatus
from tests.tools.network import network_file
from tests.tools.r2_keys import KEYS

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("own_logging")]
ROOT = Path(__file__).parents[2]


def test_the_statuses_of_the_reference_are_those_that_pm2_acts_on() -> None:
    table = re.findall(
        r"^\| (\d) \| .* \| (yes|no) \|$", (ROOT / "docs/reference.md").read_text(), re.M
    )
    assert {int(status) for status, _ in table} == set(ExitStatus) - {ExitStatus.INTERRUPTED}
    ended = {int(status) for status, again in table if again == "no"}
    assert ended == {ExitStatus.STOPPED, *FINAL}
    app = (ROOT / "app.config.js").read_text()
    _of_the_page, codes = re.findall(r"stop_exit_codes: \[([\d, ]+)\]", app)
    assert {int(code) for code in codes.split(",")} == set(FINAL)


@pytest.mark.parametrize("exchange", ["store", "hivemind"])
@pytest.mark.parametrize(
    ("flag", "value"), [("--neuron.stop_timeout", "soon"), ("--no.such_flag", "1")]
)
def test_a_refused_setting_is_status_2_and_one_line_with_its_remedy(
    flag: str,
    value: str,
    exchange: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    rules = {"exchange": exchange, "private": True, "chain.url": "http://127.0.0.1:8100"}
    place = network_file(tmp_path, rules)
    for name, key in KEYS.items():
        monkeypatch.setenv(name, key)
    monkeypatch.chdir(tmp_path)
    status = main(["--network", place, flag, value])
    assert status == ExitStatus.BAD_CONFIGURATION
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line]
    assert "error" in line and flag.removeprefix("--") in line and "nothing was started" in line
