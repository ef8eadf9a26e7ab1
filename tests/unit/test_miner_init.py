"""``dt-miner init``: the settings of a new miner, by asking or from flags."""

from __future__ import annotations

import getpass
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed_training import __version__
from distributed_training.__main__ import main as commands
from distributed_training.config import load_config
from distributed_training.config.model import KEY_VARIABLES
from distributed_training.miner.__main__ import main
from tests.tools.settings import usual_network

pytestmark = pytest.mark.timeout(30)
SECRETS = {name: "ab"[name.startswith("R2_READ")] * 32 for name in KEY_VARIABLES} | {
    name: "cd"[name.startswith("R2_READ")] * 64 for name in KEY_VARIABLES if "SECRET" in name
}
LOCAL = ("--network", "local")
FLAGS = ("--yes", *LOCAL, "--wallet.name", "mine", "--dht.external_port", "48009")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("R2_", "BT_", "DT_"))]:
        monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Answers by a word of the question, one after the other; an empty one where there is none."""

    def answer(**answers: tuple[str, ...]) -> list[str]:
        asked: list[str] = []
        left = {word: list(texts) for word, texts in answers.items()}

        def read(question: str = "") -> str:
            asked.append(question)
            texts = next((t for word, t in left.items() if word in question and t), [])
            return texts.pop(0) if texts else ""

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr(getpass, "getpass", read)
        return asked

    return answer


def test_answers_are_the_settings_of_the_next_start(
    folder: Path, answering: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {name: (text,) for name, text in SECRETS.items()}
    (folder / ".env").write_text("# mine\nWANDB_API_KEY=kept\nR2_READ_ACCESS_KEY_ID=\n")
    (folder / ".env").chmod(0o644)
    answers = {"Network": ("nowhere.toml", "local"), "Wallet": ("mine",),
               "Port for DHT": ("70000", "7001"),
               "Outside port": ("48009",), "GPUs": ("2",), **keys}  # fmt: skip
    asked = answering(**answers)
    assert main(["init", "--dht.ip", "8.8.4.4"]) == 0
    out = capsys.readouterr().out
    assert "70000 is more than" in out and asked
    config = load_config("miner", [], environ={}, file=Path("miner.toml"))  # nothing is refused
    assert (config.chain.wallet_name, config.swarm.dht_port) == ("mine", 7001)
    assert (config.swarm.dht_external_port, config.miner.nproc_per_node) == (48009, 2)
    assert stat.S_IMODE((folder / ".env").stat().st_mode) == 0o600
    kept = (folder / ".env").read_text()
    read_key = "R2_READ_ACCESS_KEY_ID"  # it stays in its line
    assert kept.startswith(f"# mine\nWANDB_API_KEY=kept\n{read_key}={SECRETS[read_key]}")
    toml = (folder / "miner.toml").read_text()
    assert not [name for name, text in SECRETS.items() if text in toml or text in out]
    assert "still to do" not in out and out.splitlines()[-2:] == [
        "  dt-doctor",
        "  dt-miner            # or: pm2 start app.config.js",
    ]


def test_a_key_that_a_start_refuses_is_asked_for_again_at_once(
    folder: Path, answering: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one that .env holds already; what is right there stays and is not asked for."""
    wrong = {"R2_READ_ACCESS_KEY_ID": "ab", "R2_ACCOUNT_ID": SECRETS["R2_ACCOUNT_ID"]}
    (folder / ".env").write_text("".join(f"export {n}={text}\n" for n, text in wrong.items()))
    equal = SECRETS["R2_READ_SECRET_ACCESS_KEY"]
    answers = {name: (text,) for name, text in SECRETS.items()}
    answers["R2_WRITE_SECRET_ACCESS_KEY"] = (equal, SECRETS["R2_WRITE_SECRET_ACCESS_KEY"])
    asked = answering(**answers)
    # A network at Cloudflare, whose keys have one length.
    assert main(["init", *FLAGS[3:], "--network", usual_network()]) == 0
    out = capsys.readouterr().out
    assert "R2_READ_ACCESS_KEY_ID has 2 characters instead of 32" in out
    assert "are equal, and the read key is published" in out and "still to do" not in out
    counts = {name: sum(name in question for question in asked) for name in SECRETS}
    assert counts == dict.fromkeys(SECRETS, 1) | {
        "R2_ACCOUNT_ID": 0, "R2_WRITE_SECRET_ACCESS_KEY": 2,
    }  # fmt: skip
    held = (folder / ".env").read_text()
    assert held.count("R2_READ_ACCESS_KEY_ID") == 1 and equal not in out
    config = load_config("miner", [], environ={}, file=Path("miner.toml"))  # nothing is refused
    assert not [line for line in config.warnings if "twice" in line]


def test_every_setting_is_shown_with_its_origin_and_no_secret(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / ".env").write_text("".join(f"{n}={text}\n" for n, text in SECRETS.items()))
    (folder / ".env").chmod(0o600)
    (folder / "miner.toml").write_text('network = "local"\n[dht]\nport = 7001\n')
    monkeypatch.setenv("BT_WALLET_NAME", "mine")
    assert main(["config", "--neuron.checkpoint_steps", "40"]) == 0
    shown = capsys.readouterr()
    lines = {line.split()[0]: line for line in shown.out.splitlines() if line.startswith("  ")}
    for name, origin in (
        ("--dht.port", "7001   (dht.port in miner.toml)"),
        ("--wallet.name", "mine   (BT_WALLET_NAME)"),
        ("--neuron.checkpoint_steps", "40   (command line)"),
        ("training.sequence_length", "(training.sequence_length in local)"),
        ("R2_WRITE_SECRET_ACCESS_KEY", "********   (R2_WRITE_SECRET_ACCESS_KEY)"),
    ):
        assert lines[name].endswith(origin), lines[name]
    assert all(line.endswith(")") for line in lines.values())
    secrets = {text for name, text in SECRETS.items() if "SECRET" in name}
    assert len(secrets) == 2 and not [text for text in secrets if text in shown.out + shown.err]


def test_a_shell_completes_commands_flags_and_choices(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["completion", "zsh"]) == 0 and main(["completion"]) == 2
    capsys.readouterr()
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    for words, found in (
        ("dt-miner in", "init"),
        ("dt-miner --neuron.upload_s", "--neuron.upload_steps"),
        ("dt-miner --preset loc", "local"),
        ("dt-miner --r2.write_sec", ""),  # refused there
    ):
        count = len(words.split()) - 1
        typed = f"COMP_WORDS=({words}); COMP_CWORD={count}; _dt_miner; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", script + typed], capture_output=True, text=True)
        assert done.stdout.strip() == found, (words, done.stderr)


def test_the_help_names_the_program_and_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: dt-miner ") and "dt-miner init" in text
    assert "--help-all" in text and "--help_all" not in text
    for words, said in ((["--help"], "doctor"), (["--version"], __version__)):
        assert commands(words) == 0 and said in capsys.readouterr().out


def test_flags_write_the_file_without_a_question_and_never_replace_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("R2_ACCOUNT_ID", SECRETS["R2_ACCOUNT_ID"])
    assert main(["init", *FLAGS]) == 0
    assert "still to do: R2_READ_ACCESS_KEY_ID, " in capsys.readouterr().out
    assert f"R2_ACCOUNT_ID={SECRETS['R2_ACCOUNT_ID']}\n" in (folder / ".env").read_text()
    before = (folder / "miner.toml").read_text()
    assert 'name = "mine"' in before and "external_port = 48009\n" in before
    assert main(["init", *FLAGS, "--dht.port", "7001"]) == 2
    assert "miner.toml is there already, so nothing was written" in capsys.readouterr().err
    assert (folder / "miner.toml").read_text() == before
    assert main(["init", *FLAGS, "--dht.port", "7001", "--force"]) == 0
    (old,) = folder.glob("miner.toml.*")
    assert old.read_text() == before and old.name in capsys.readouterr().out
    assert "port = 7001" in (folder / "miner.toml").read_text()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--dht.ip", "10.0.0.4"), "--dht.ip 10.0.0.4 cannot be reached"),
        (("--dht.prot", "7001"), "did you mean --dht.port?"),
        (("--r2.write_secret_access_key", "x"), "put R2_WRITE_SECRET_ACCESS_KEY=... into .env"),
        (("--network", "nowhere.toml"), "--network nowhere.toml"),
    ],
)
def test_a_flag_that_the_miner_would_refuse_writes_nothing(
    folder: Path, flags: tuple[str, str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--yes", *LOCAL, *flags]) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1
    assert not list(folder.iterdir())


def test_without_a_terminal_it_names_the_flag(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def closed(*_: object) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", closed)
    assert main(["init"]) == 2
    assert "give flags and --yes" in capsys.readouterr().err and not list(folder.iterdir())


def test_a_key_that_no_line_holds_writes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("R2_ACCOUNT_ID", "two\nlines")
    assert main(["init", "--yes", *LOCAL]) == 2
    error = capsys.readouterr().err
    assert "R2_ACCOUNT_ID holds characters" in error and "two" not in error
    assert not list(folder.iterdir())


def test_the_network_is_asked_for_until_its_file_is_read(
    folder: Path, answering: Callable[..., list[str]]
) -> None:
    place = str(Path(__file__).parents[2] / "networks" / "local.toml")
    answering(Network=("nowhere.toml", place))
    assert main(["init"]) == 0
    assert f'network = "{place}"\n' in (folder / "miner.toml").read_text()


def test_without_a_network_nothing_else_is_asked_or_written(
    folder: Path, answering: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = answering()
    for words in ((), ("--yes",)):
        assert main(["init", *words]) == 2
        error = capsys.readouterr().err
        assert "no network is named" in error and error.count("\n") == 1
    # A wrong flag costs this one answer and no other.
    answering(Network=("local",))
    assert main(["init", "--dht.ip", "10.0.0.4"]) == 2
    assert "cannot be reached" in capsys.readouterr().err
    assert ["Network" in question for question in asked] == [True]
    assert not list(folder.iterdir())
