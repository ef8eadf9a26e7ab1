"""What operators' monitoring is given: every name exists, every alert fires when it should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from distributed_training.telemetry.catalogue import METRICS

pytestmark = pytest.mark.timeout(60)
OPS = Path(__file__).parents[2] / "ops"
RULES = OPS / "prometheus" / "miner.rules.yml"
PROMTOOL = shutil.which("promtool")
#: Kept by rooms, by kind; see the catalogue's docstring.
BY_KIND = re.compile(r"(server|chain|data)_[a-z_]+_total")


def queries() -> Iterator[tuple[str, str]]:
    for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]:
        yield f"alert {rule['alert']}", rule["expr"]
    board = json.loads((OPS / "grafana" / "dashboards" / "miner.json").read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield f"panel {panel['title']}", target["expr"]
    for annotation in board["annotations"]["list"]:
        yield "annotation", annotation["expr"]


@pytest.mark.parametrize(("where", "query"), list(queries()), ids=lambda value: value[:40])
def test_every_query_asks_for_metrics_that_exist(where: str, query: str) -> None:
    names = re.findall(r"\bdt_([a-z_]+)", query)
    assert names or query.startswith("up{"), where  # Prometheus's own: was there an answer
    for name in names:
        assert name in METRICS or BY_KIND.fullmatch(name), f"{where}: dt_{name}"


def test_what_is_shipped_keeps_secrets_out_of_images_and_environments() -> None:
    """A miner reads .env by itself."""
    ignored = (OPS.parent / ".dockerignore").read_text().split()
    assert {".env*", "runs", ".venv", ".git", "app.config.override.js"} <= set(ignored)
    unit = (OPS / "systemd" / "distributed-training-miner.service").read_text()
    assert not re.search("^EnvironmentFile", unit, re.M)
    assert "--env-file" not in (OPS / "Dockerfile").read_text()
    for text in (unit, (OPS / "Dockerfile").read_text()):
        assert "--neuron.upload_steps 60" in text  # as app.config.js: the default is the network's


def test_what_starts_a_miner_starts_it_again_after_an_orderly_end_that_nobody_asked_for() -> None:
    """As pm2 does with app.config.js: status 0 is what a SIGTERM to rank 0 ends in."""
    unit = (OPS / "systemd" / "distributed-training-miner.service").read_text().splitlines()
    assert {"Restart=always", "RestartPreventExitStatus=2 3"} <= set(unit)
    assert "--restart unless-stopped" in (OPS / "Dockerfile").read_text()


def test_every_alert_says_what_to_do() -> None:
    for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]:
        assert set(rule["annotations"]) == {"summary", "action"}, rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (Debian's package prometheus)")
def test_every_alert_fires_and_keeps_silent() -> None:
    assert PROMTOOL is not None
    tests = RULES.with_name("miner.rules.test.yml")
    named = {
        t["alert_rule_test"][0]["alertname"] for t in yaml.safe_load(tests.read_text())["tests"]
    }
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    assert named == {rule["alert"] for rule in rules}
    for command in (["check", "rules", RULES], ["test", "rules", tests]):
        done = subprocess.run([PROMTOOL, *command], capture_output=True, text=True, timeout=50)
        assert done.returncode == 0, done.stdout + done.stderr
    config = RULES.with_name("prometheus.yml")
    done = subprocess.run([PROMTOOL, "check", "config", config], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
