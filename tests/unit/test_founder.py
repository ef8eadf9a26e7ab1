"""Test ``dt-network run``: the programs that it starts, missing files, and its command."""

from __future__ import annotations

import os
import queue
import re
import shlex
import shutil
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import yaml

from distributed_training import founder
from distributed_training.common.ports import free_ports
from distributed_training.common.processes import ChildLog, Program
from distributed_training.config import load_config
from distributed_training.network_command import build_parser, main
from distributed_training.node.start import StopSignals

pytestmark = pytest.mark.timeout(120)
HIVEMIND = ("--exchange", "hivemind")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Return a network with an embedded store, and the free ports that it uses."""
    place = tmp_path_factory.mktemp("founder")
    ports = free_ports(2)
    words = ("--name", "lab", "--host", "127.0.0.1", "--dht-port", str(ports[0]), "--miners", "1",
             "--registry", f"http://127.0.0.1:{ports[1]}", "--data-source", "stdlib")  # fmt: skip
    store = ("--store", "embedded")
    assert main(["init", str(place / "lab"), *HIVEMIND, *words, *store]) == 0
    with (place / "lab" / "run.toml").open("a") as file:
        file.write('"neuron.page_port" = "off"\n')
    return place / "lab", ports


@pytest.fixture
def lab(template: tuple[Path, list[int]], tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("R2_", "DT_", "BT_"))]:
        monkeypatch.delenv(name)
    shutil.copytree(template[0], tmp_path / "lab")
    return Path("lab")


def test_every_program_takes_the_words_that_it_is_started_with(lab: Path, capsys) -> None:
    plan = founder.FounderPlan.of(lab)
    assert list(plan.words) == ["registry", "validator"]
    assert build_parser().parse_args(["serve", *plan.words["registry"]]).store == lab / "store"
    config = load_config("validator", plan.words["validator"], environ=plan.environ, dotenv=None)
    assert config.in_folder and config.averages and config.swarm.dht_ip == "127.0.0.1"
    assert founder.check(plan).network.head.name == "lab"
    assert main(["run", "lab", "--print"]) == 0
    *lines, invite = capsys.readouterr().out.splitlines()
    assert [shlex.split(line)[0] for line in lines] == ["dt-network", "dt-validator"]
    assert build_parser().parse_args(shlex.split(invite)[1:]).uses == 5


@pytest.mark.parametrize(
    ("url", "serve"),
    [
        ("https://registry.example.org", "--proxy 127.0.0.1 --host 127.0.0.1 --port 8100 "
         "--host-name registry.example.org"),
        ("http://10.0.0.5:8101", "--host 10.0.0.5 --port 8101"),
        ("http://gpu-1:8101", "--host 0.0.0.0 --port 8101 --host-name gpu-1"),
    ],
)  # fmt: skip
def test_a_registry_listens_where_its_members_ask_it(url: str, serve: str, tmp_path: Path) -> None:
    words = ("--name", "lab", "--host", "10.0.0.5", "--data-source", "stdlib", "--registry", url)
    assert main(["init", str(tmp_path / "lab"), *HIVEMIND, *words]) == 0
    words = founder.FounderPlan.of(tmp_path / "lab").words["registry"]
    assert shlex.join(words).endswith(f"{tmp_path / 'lab' / 'registry'} {serve}")


def rewrite(path: Path, old: str, new: str) -> None:
    path.write_text(re.sub(old, new, path.read_text(), count=1))


#: What a founder may have done to the folder, and words of the error.
MISSING = {
    "no file": (lambda lab: (lab / "network.toml").unlink(), "there is no network.toml in lab"),
    "another format": (lambda lab: rewrite(lab / "network.toml", "format = 3", "format = 9"),
                       "its format is 9"),
    "altered": (lambda lab: rewrite(lab / "network.toml", 'name = "lab"', 'name = "lob"'),
                "it was altered after it was signed"),
    "no wallet": (lambda lab: shutil.rmtree(lab / "wallets"), "wallets"),
    "no bucket": (lambda lab: shutil.rmtree(lab / "store"), "mount its disk"),
    "no TOML": (lambda lab: (lab / "run.toml").write_text("[valid"), "run.toml cannot be read"),
    "no such program": (lambda lab: (lab / "run.toml").write_text("[miner]"),
                        "'miner' is not a table of it"),
    "no port": (lambda lab: (lab / "run.toml").write_text('[registry]\nport = "x"'),
                "--port"),
    "no flag of the registry": (lambda lab: (lab / "run.toml").write_text("[registry]\nprt = 1"),
                                "--prt"),
    "no such flag": (lambda lab: (lab / "run.toml").write_text('[validator]\n"dht.prot" = 1'),
                     "dht.prot"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISSING)
def test_missing_file_or_key_is_one_line_before_anything_starts(
    case: str, lab: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(founder, "Program", None)  # so that starting any program fails
    break_it, words = MISSING[case]
    break_it(lab)
    try:
        status = main(["run", "lab"])
    except SystemExit as end:  # raised by argparse
        status = end.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line and ", so " in line, line


def test_flags_stand_in_run_toml_as_in_miner_toml(lab: Path) -> None:
    (lab / "run.toml").write_text("[validator]\nneuron.page_port = 8123\n")
    with (lab / "run.toml").open("a") as file:
        file.write('"logging.debug" = true\nplugins = ["json", "queue"]\n')
    words = founder.FounderPlan.of(lab).words["validator"]
    config = load_config("validator", words, environ={}, dotenv=None, check=False)
    assert config.telemetry.page_port == 8123 and config.get("logging.debug") is True
    assert config.general.plugins == ("json", "queue")


@pytest.mark.parametrize("which", ["swarm", "registry"])
def test_a_port_that_is_taken_is_named(
    which: str, lab: Path, template, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(founder, "Program", None)
    port = template[1][["swarm", "registry"].index(which)]
    with socket.create_server(("127.0.0.1", port)):
        assert main(["run", "lab"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"the {which} cannot listen on 127.0.0.1:{port}" in line


def test_an_address_that_is_not_there_yet_is_tried_again_by_pm2(lab: Path, monkeypatch) -> None:
    monkeypatch.setattr(founder, "Program", None)
    with (lab / "run.toml").open("a") as file:
        file.write('[registry]\nhost = "192.0.2.1"\n')
    assert main(["run", "lab"]) == 1


def test_two_runs_of_one_folder_are_refused(lab: Path, capsys, monkeypatch) -> None:
    from distributed_training.node.start import sole_user

    monkeypatch.setattr(founder, "Program", None)
    with sole_user(lab, "run.lock", "dt-network run"):
        assert main(["run", "lab"]) == 2
    assert "a dt-network run (pid ?) is running in lab" in capsys.readouterr().err


def test_a_second_ctrl_c_ends_a_program_that_does_not_stop(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)"
    lines: queue.SimpleQueue[ChildLog] = queue.SimpleQueue()
    program = Program(
        "The validator",
        [sys.executable, "-c", f"{code}; time.sleep(100)"],
        environment=os.environ,
        effect="",
        log_line=lines.put,
        final=(),
    )
    program.start()
    assert lines.get(timeout=60).text == "1"
    signals = StopSignals()
    signals.hurry = True
    running = founder.Running(None, signals, timedelta(seconds=99))
    running.programs["validator"] = program
    began = time.monotonic()
    running.end()
    assert time.monotonic() - began < 50 and not psutil.pid_exists(program.pid)


@pytest.mark.parametrize("exchange", ["store", "hivemind"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--registry", "https://r.example.org"), ""),
        (("--registry", "http://8.8.8.8:8100"), "http"),
        (("--netuid", "5"), "without --registry"),
        (("--registry", "https://r.example.org", "--set", "store.access=own"), "many buckets"),
    ],
)
def test_an_embedded_store_is_the_registrys(
    exchange: str, words: tuple[str, ...], said: str, tmp_path: Path, capsys
) -> None:
    lab = tmp_path / "lab"
    more = ["--name", "lab", "--data-source", "stdlib", "--store", "embedded"]
    more += ["--exchange", exchange, *(("--host", "8.8.8.8") if exchange == "hivemind" else ())]
    assert main(["init", str(lab), *more, *words]) == (2 if said else 0)
    captured = capsys.readouterr()
    assert said in captured.err and lab.exists() == (not said)
    if said:
        assert captured.err.count("\n") == 1
        return
    plan = founder.FounderPlan.of(lab)
    assert plan.places == {"registry": ("127.0.0.1", 8100)} and not plan.signs
    config = load_config("validator", plan.words["validator"], environ=plan.environ, dotenv=None)
    assert config.in_folder and (lab / "store" / "lab").is_dir()
    member = load_config("miner", ["--network", str(lab / "network.toml")], check=False)
    assert member.store.endpoint_url == "https://r.example.org" and not member.has_bucket


def test_documents_and_services_show_the_command_that_init_prints(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("--name", "lab", "--host", "203.0.113.7", "--registry", "https://registry.example.org")
    assert main(["init", "lab", *HIVEMIND, *words, "--data-source", "stdlib"]) == 0
    (command,) = re.findall(r"^  (dt-network run .*)$", capsys.readouterr().out, re.M)
    program, *words = command.split()
    (page,) = [p for p in (ROOT / "docs").glob("*.md") if p.stem == "found-a-network"]
    assert command in page.read_text().splitlines()
    unit = ROOT / "ops" / "systemd" / "distributed-training-network.service"
    (line,) = re.findall(r"^ExecStart=\S+/bin/(.*)$", unit.read_text(), re.M)
    assert line == command
    compose = yaml.safe_load((ROOT / "ops" / "compose.network.yml").read_text())
    (service,) = compose["services"].values()
    assert service["command"] == words
    assert service["environment"]["DT_MINER"].endswith(f"bin/{program}")


@pytest.mark.parametrize("status", [2, 3, 4])
def test_a_validator_that_ends_for_good_ends_nothing_else(
    status: int, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(founder, "_FIRST_PAUSE", timedelta(seconds=0.01))
    ended, signals, starts = status, StopSignals(), list[tuple[str, ...]]()

    class Fake:
        refused: int | None = None

        def __init__(self, name: str, command: list[str], **_: object) -> None:
            starts.append(tuple(command[3:]))
            if len(starts) < 3:
                self.refused = ended
            else:
                signals.stop.set()

        def start(self) -> None:
            pass

    monkeypatch.setattr(founder, "Program", Fake)
    plan = founder.FounderPlan(tmp_path, tmp_path, {"validator": ["--network", "x"]}, {}, {})
    running = founder.Running(plan, signals)
    running.once = ("--take-over",)
    assert running.start("validator")
    assert running.follow() == 0
    said = capsys.readouterr().out
    assert said.count(f"the validator ended with status {status}, for the reason above") == 2
    # If two machines took over at every start, neither would ever lead for long.
    assert starts == [("--network", "x", "--take-over"), ("--network", "x"), ("--network", "x")]


def test_a_service_that_no_start_helps_ends_all(tmp_path: Path) -> None:
    class Fake:
        refused = 2

    running = founder.Running(None, StopSignals())
    running.programs["registry"] = Fake()
    assert running.follow() == 2
