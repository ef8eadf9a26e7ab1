"""Test the files for operators' monitoring: every name exists, every alert fires in time."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import yaml

from distributed_training.common.processes import SETTLE
from distributed_training.config.schema import schema
from distributed_training.miner.launcher import TERMINATE_GRACE
from distributed_training.network_command import build_parser as network_parser
from distributed_training.telemetry.metrics import METRICS
from tests.tools.pm2 import needs_node
from tests.tools.r2_keys import KEYS
from tests.tools.settings import load_config

pytestmark = pytest.mark.timeout(200)
OPS = Path(__file__).parents[2] / "ops"
RULES = OPS / "prometheus" / "miner.rules.yml"
UNITS = sorted((OPS / "systemd").glob("*.service"))
MINERS_UNIT = OPS / "systemd" / "distributed-training-miner.service"
units = pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
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


def test_shipped_files_keep_secrets_out_of_images_and_environments() -> None:
    """A miner reads .env by itself."""
    ignored = (OPS.parent / ".dockerignore").read_text().split()
    assert {".env*", "runs", "**/.venv", ".git", "app.config.override.js"} <= set(ignored)
    # Files that a machine makes for itself: an update's environments are gigabytes.
    assert {"versions", "build", "**/node_modules", "bench/results", "**/wallets", "lab"} <= set(
        ignored
    )
    for unit in UNITS:
        assert not re.search("^EnvironmentFile", unit.read_text(), re.M)
    docker = (OPS / "Dockerfile").read_text()
    assert "--env-file" not in docker and "--restart unless-stopped" in docker
    for text in (MINERS_UNIT.read_text(), docker):
        assert "--neuron.upload_steps 60" in text  # as app.config.js: the default is the network's


@pytest.mark.parametrize("path", sorted(OPS.glob("compose*.yml")), ids=lambda path: path.stem)
def test_no_container_keeps_every_line_for_ever(path: Path) -> None:
    for name, service in yaml.safe_load(path.read_text())["services"].items():
        assert {"max-size", "max-file"} <= set(service["logging"]["options"]), name


def commands() -> Iterator[tuple[str, str, list[str]]]:
    """Return file, program and flags of each start in a founder's units and containers."""
    for unit in UNITS:
        (line,) = re.findall("^ExecStart=(.*)$", unit.read_text(), re.M)
        first, *words = shlex.split(line)
        yield unit.name, *((first, words) if first.endswith("network") else (words[0], words[1:]))
    services = yaml.safe_load((OPS / "compose.network.yml").read_text())["services"]
    for service in services.values():
        program = service["environment"]["DT_MINER"].split()[-1]
        yield "compose.network.yml", program, service["command"]


@pytest.mark.parametrize(("file", "program", "words"), list(commands()))
def test_flags_of_units_and_containers_exist(file: str, program: str, words: list[str]) -> None:
    if program.endswith("dt-network"):
        assert network_parser().parse_args(words).command == "run", file
        return
    known = schema("miner")
    flags = [word.removeprefix("--") for word in words if word.startswith("--")]
    assert flags and all(known.get(flag) for flag in flags), file


def pm2_reads(folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Return the apps of app.config.js in ``folder`` as JSON, or node's error."""
    code = "console.log(JSON.stringify(require(process.argv[1]).apps))"
    command = ["node", "-e", code, str(folder / "app.config.js")]
    environ = {"DT_NETWORK": "local", **environ}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


@needs_node
@pytest.mark.parametrize(
    ("rows", "toml", "seconds"),
    [
        ([], 'neuron.stop_timeout = "3m"', 180),
        ([["--Neuron.Stop-Timeout=.5h"]], "", 1800),
        ([["--neuron.stop-timeout", "2m", "--neuron.stop_timeout=1h", "--wallet.name", "a=b"]],
         "", 3600),
        ([["--neuron.checkpoint_steps", 50], ["--neuron.stop_timeout", 90]], "", 90),
    ],
)  # fmt: skip
def test_pm2_waits_for_as_long_as_the_miner_takes_to_stop(
    rows: list[list[str | int]], toml: str, seconds: int, tmp_path: Path
) -> None:
    """However the operator writes the flag, in the override or in miner.toml."""
    if rows:
        override = f"module.exports = {json.dumps(rows)};"
        (tmp_path / "app.config.override.js").write_text(override)
    file = tmp_path / "miner.toml"
    file.write_text(toml)
    flags = "--neuron.name  from-environment"
    done = pm2_reads(OPS.parent, DT_HOME=str(tmp_path), DT_FLAGS=flags, **KEYS)
    assert done.returncode == 0, done.stderr
    app, _page = json.loads(done.stdout)
    config = load_config("miner", app["args"], environ=KEYS, dotenv=None, file=file)
    assert config.miner.stop_timeout.seconds == seconds
    assert config.miner.name == "from-environment"
    assert config.miner.checkpoint_steps == 50 or len(rows) < 2
    assert app["kill_timeout"] == 1000 * (seconds + 25)
    assert timedelta(seconds=25) >= 3 * TERMINATE_GRACE + SETTLE
    assert app["treekill"] is False and (tmp_path / app["script"]).is_file()
    assert not [key for key in KEYS.values() if key in done.stdout]


@needs_node
def test_pm2_runs_torchrun_where_the_override_asks_for_it(tmp_path: Path) -> None:
    """The override has the guide's rows."""
    page = (OPS.parent / "docs" / "several-machines.md").read_text()
    rows = page.partition("```js\n")[2].partition("```")[0]
    (tmp_path / "app.config.override.js").write_text(rows)
    done = pm2_reads(OPS.parent, DT_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    (app,) = json.loads(done.stdout)
    assert app["script"].endswith("ops/torchrun.sh") and app["interpreter"] == "bash"
    words = app["args"]
    assert words[:4] == ["--nnodes", "2", "--node_rank", "0"]
    assert words[words.index("--") + 1 :] == [
        *("--network", "network.toml", "--wallet.name", "W", "--wallet.hotkey", "H")
    ]


@needs_node
def test_pm2_stops_at_once_if_no_network_is_named(tmp_path: Path) -> None:
    """The terminal shows it; the start's own words are in the log."""
    done = pm2_reads(OPS.parent, DT_HOME=str(tmp_path), DT_NETWORK="")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 0 and "no network is named" in line and "dt-join" in line
    (tmp_path / "miner.toml").write_text('network = "local"\n')
    assert not pm2_reads(OPS.parent, DT_HOME=str(tmp_path), DT_NETWORK="").stderr


@pytest.mark.parametrize("words", [["--node_rank", "1"], ["--node-rank=1"]])
def test_torchrun_follows_a_check_as_the_node_it_is(words: list[str], tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\n[ "$2" = check ] && echo 61.5\n'
        f'echo "$GROUP_RANK $TORCH_ELASTIC_SHUTDOWN_TIMEOUT $*" >>{tmp_path}/calls\n'
    )
    python.chmod(0o755)
    command = [str(OPS / "torchrun.sh"), "--nnodes", "2", *words, "--", "--data.workers", "4"]
    environment = os.environ | {"DT_PYTHON": str(python), "DT_PROGRAM": "miner"}
    subprocess.run(command, env=environment, check=True, timeout=60)
    check, run = (tmp_path / "calls").read_text().splitlines()
    assert check.split() == ["1", "miner", "check", "--data.workers", "4"]
    torchrun = ["-m", "torch.distributed.run", "--max_restarts", "0", "--nnodes", "2", *words]
    assert run.split() == ["1", "81", *torchrun, "miner", "--data.workers", "4"]


@needs_node
@pytest.mark.parametrize(
    ("app", "status"), [("validator", 0), ("registry", 0), ("network", 0), ("x", 1)]
)
def test_pm2_runs_the_programs_of_a_founder(app: str, status: int, tmp_path: Path) -> None:
    (tmp_path / f"{app}.override.js").write_text('module.exports = [["--network", "a.toml"]];')
    done = pm2_reads(OPS.parent, DT_HOME=str(tmp_path), DT_APP=app)
    assert done.returncode == status, done.stderr
    if status:
        assert "give miner, validator, registry or network" in done.stderr
        return
    (found,) = json.loads(done.stdout)
    assert found["name"] == f"distributed_training_{app}"
    assert found["args"][-2:] == ["--network", "a.toml"] and app in found["script"]


@needs_node
@pytest.mark.parametrize(
    ("name", "override", "refused"),
    [
        ("two", 'module.exports = [["--axon.port", "8092"]];', ""),
        ("", "module.exports = {port: 1};", "app.config.override.js exports no rows"),
        ("three", "", "three is not there"),
        ("a b", "", "is no name"),
    ],
)
def test_a_second_miner_has_a_name_and_settings_of_its_own(
    name: str, override: str, refused: str, tmp_path: Path
) -> None:
    shutil.copy(OPS.parent / "app.config.js", tmp_path)
    if override:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "app.config.override.js").write_text(override)
    done = pm2_reads(tmp_path, DT_NAME=name)
    assert (refused in done.stderr) and (done.returncode != 0) == bool(refused), done.stderr
    if not refused:
        app, page = json.loads(done.stdout)
        assert app["name"] == "distributed_training_miner_two" and app["cwd"].endswith("/two")
        assert app["args"][-2:] == ["--axon.port", "8092"]
        assert page["name"] == "distributed_training_page_two" and page["cwd"] == app["cwd"]
        assert page["args"] == ["page", *app["args"]] and Path(page["script"]).suffix == ".py"


def test_every_alert_names_its_remedy() -> None:
    for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]:
        assert set(rule["annotations"]) == {"summary", "action"}, rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")


@pytest.mark.slow
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
        done = subprocess.run([PROMTOOL, *command], capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stdout + done.stderr
    config = RULES.with_name("prometheus.yml")
    done = subprocess.run([PROMTOOL, "check", "config", config], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


ENTRYPOINT = OPS / "entrypoint.sh"


def start_entrypoint(miner: str) -> subprocess.Popen[str]:
    """Start the image's entrypoint with a shell's line in the miner's place."""
    return subprocess.Popen(
        [str(ENTRYPOINT), "-c", miner],
        env={"PATH": os.environ["PATH"], "DT_MINER": "bash"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("status", [2, 3])
def test_a_container_does_not_loop_where_a_start_cannot_help(status: int) -> None:
    """Docker's restart policies know no such statuses: it waits, and `docker stop` still works."""
    entry = start_entrypoint(f"exit {status}")
    assert entry.stderr is not None
    assert f"ended with status {status}, and a start cannot help" in entry.stderr.readline()
    with pytest.raises(subprocess.TimeoutExpired):
        entry.wait(1)
    entry.terminate()
    assert entry.wait(30) == status


@pytest.mark.parametrize(("end", "status"), [("exit 0", 0), ("exit 1", 1), ("kill -9 $$", 137)])
def test_a_container_ends_for_docker_to_start_it_again(end: str, status: int) -> None:
    assert start_entrypoint(end).wait(30) == status


def test_a_container_that_is_stopped_lets_the_miner_finish() -> None:
    lines = "trap 'stop=yes' TERM; echo ready; while [ -z $stop ]; do sleep 0.1; done; echo saved"
    entry = start_entrypoint(lines)
    assert entry.stdout is not None and entry.stdout.readline() == "ready\n"
    entry.terminate()
    assert entry.wait(30) == 0 and entry.stdout.read() == "saved\n"


@pytest.mark.parametrize(
    ("file", "service", "wallet"),
    [
        ("compose.miner.yml", "miner", ["hotkeys"]),
        ("compose.network.yml", "network", ["wallets"]),  # dt-network init makes no coldkey
    ],
)
def test_a_container_gets_no_coldkey_no_root_and_nothing_for_developers(
    file: str, service: str, wallet: list[str]
) -> None:
    compose = yaml.safe_load((OPS / file).read_text())["services"][service]
    wallets = [volume for volume in compose["volumes"] if "wallets" in volume]
    assert [Path(v.split(":")[1]).name for v in wallets] == wallet
    assert all(volume.endswith(":ro") for volume in wallets)
    assert compose["restart"] == "unless-stopped" and compose["cap_drop"] == ["ALL"]
    assert compose["security_opt"] == ["no-new-privileges"] and compose["network_mode"] == "host"
    assert compose["ulimits"]["core"] == 0 and "stop_grace_period" in compose
    text = (OPS / "Dockerfile").read_text()
    steps = [line for line in text.splitlines() if not line.startswith("#")]
    users = [line.split()[1] for line in steps if line.startswith("USER")]
    assert users == ["miner"]
    assert steps.index("USER miner") < steps.index("RUN DT_TORCH=cuda scripts/setup.sh")
    assert 'ENTRYPOINT ["ops/entrypoint.sh"]' in steps
    assert not re.search(r"/\.bittensor:", text), "the whole folder holds the coldkey"


SYSTEMD = shutil.which("systemd-analyze")


@units
def test_a_unit_survives_the_death_of_a_worker_and_leaves_no_core(path: Path) -> None:
    unit = set(path.read_text().splitlines())
    # Again after an orderly end that nobody asked for, too, which a SIGTERM to rank 0 is.
    final = [line for line in unit if line.startswith("RestartPreventExitStatus=2 3")]
    assert "Restart=always" in unit and len(final) == 1
    # A miner's fourth: its network is finished, which is no failure.
    is_miner = path.name == "distributed-training-miner.service"
    assert ("SuccessExitStatus=4" in unit) == final[0].endswith("3 4") == is_miner
    assert {"OOMPolicy=continue", "LimitCORE=0", "UMask=0077", "NoNewPrivileges=yes"} <= unit
    assert any(line.startswith("RequiresMountsFor=/") for line in unit)
    assert any(line.startswith("TimeoutStopSec=") for line in unit) and "User=miner" in unit
    # Each of these takes the GPUs away.
    closed = "^(PrivateDevices|ProtectClock|DeviceAllow|DevicePolicy)="
    assert not re.search(closed, "\n".join(unit), re.M)


@units
@pytest.mark.skipif(SYSTEMD is None, reason="needs systemd-analyze")
def test_a_unit_is_valid_and_confined(path: Path, tmp_path: Path) -> None:
    here = path.read_text().replace("User=miner", f"User={os.getuid()}")
    here = re.sub(r"(ExecStart(?:Pre)?=[-+]*)\S+", rf"\1{shutil.which('true')}", here)
    unit = tmp_path / path.name
    unit.write_text(here)
    done = subprocess.run([str(SYSTEMD), "verify", str(unit)], capture_output=True, text=True)
    complaints = [line for line in done.stderr.splitlines() if path.name in line]
    assert not complaints, complaints
    command = [str(SYSTEMD), "security", "--offline=true", "--threshold=50", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-600:] + done.stderr
