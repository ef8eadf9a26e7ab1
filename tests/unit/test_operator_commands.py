"""Test that operators' commands refuse impossible settings at once and in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from distributed_training import doctor
from distributed_training.common.ports import listen
from distributed_training.config import load_config
from distributed_training.health.machine import Examination, check_webhook
from distributed_training.scoring import command as score
from distributed_training.telemetry.page.__main__ import main as page
from tests.tools.webhooks import webhooks

TEST = "this is a test by dt-doctor --notify: this miner's messages will arrive here"
pytestmark = pytest.mark.timeout(60)


def test_a_doctor_that_is_interrupted_says_so_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", interrupted)
    assert doctor.main(["--network", "local", "--offline"]) == 130
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("interrupted, so there is no result")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(("manner", "status"), [("", 0), (404, 1)])
def test_a_message_is_sent_to_the_webhook_on_request(
    manner: str | int,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with webhooks() as world:
        world.manner = manner
        monkeypatch.setenv("DT_NOTIFY_URL", world.url)
        assert doctor.main(["--network", "local", "--notify"]) == status
        assert world.taken == ["miner: " + TEST] * (not manner)
        said = capsys.readouterr()
        assert "JSON " in said.out and "secretsecret" not in said.out + said.err
        config = load_config("miner", ["--network", "local"], check=False)
        (row,) = check_webhook(Examination(config, ranks=1))
        assert "messages go to JSON" in row.finding
    monkeypatch.delenv("DT_NOTIFY_URL")
    assert doctor.main(["--network", "local", "--notify"]) == 1
    assert "put DT_NOTIFY_URL=... into .env" in capsys.readouterr().out


def test_the_score_of_a_local_subnet_that_has_ended_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    state = {"chain": "http://127.0.0.1:9", "store": "http://127.0.0.1:9", "pid": gone.pid}
    (tmp_path / "localnet.json").write_text(json.dumps(state))
    assert score.main(["--subnet", str(tmp_path), "--all"]) == 2
    assert "is not the run folder of a running local subnet" in capsys.readouterr().err


def test_a_miner_without_a_hotkey_has_no_score_and_no_chain_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--network", "local", "--wallet.path", str(tmp_path)]
    flags += ["--subtensor.chain_endpoint", "ws://127.0.0.1:9"]
    assert score.main(flags) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: no hotkey at ")


def test_the_page_at_a_port_that_is_taken_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert page([str(tmp_path), "--port", str(port)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the page cannot be served at ") and line.count(str(port)) == 1
    assert "(Address already in use)" in line and "give another --port" in line
