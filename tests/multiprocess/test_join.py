"""Test ``dt-join`` with a real store, and a real registry that serves the network's file."""

from __future__ import annotations

import getpass
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from distributed_training import doctor, join_command, network_command
from distributed_training.chain.base import ChainError
from distributed_training.chain.identity import create_wallet
from distributed_training.chain.registry import RegistryChain
from distributed_training.common.ports import free_ports
from distributed_training.config import load_config
from distributed_training.config.loader import read_dotenv
from distributed_training.localnet.services import ObjectStoreServer
from tests.tools.chain_program import serve_command, url_of

pytestmark = pytest.mark.timeout(120)


@dataclass
class Lab:
    folder: Path
    url: str
    keys: dict[str, str]
    served: subprocess.Popen[str] | None = None

    def serve(self, *more: str) -> None:
        where = ("--network", str(self.file), "--port", self.url.rpartition(":")[2])
        self.served = subprocess.Popen(
            serve_command(self.folder / "registry", *where, *more),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert url_of(self.served) == self.url

    def stop(self) -> None:
        assert self.served is not None and self.served.stdout is not None
        self.served.terminate()
        assert self.served.wait(60) == 0
        self.served.stdout.close()

    @property
    def file(self) -> Path:
        return self.folder / "lab" / "network.toml"

    def founder(self, *words: str) -> int:
        wallet = ("--wallet.path", str(self.folder / "lab" / "wallets"))
        return network_command.main([*words, *wallet, "--wallet.name", "master"])


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("founder")
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with ObjectStoreServer(folder / "store") as store:
        words = ("--name", "lab", "--host", "127.0.0.1", "--registry", url)
        more = ("--data-source", "stdlib", "--store", store.endpoint, "--exchange", "hivemind")
        assert network_command.main(["init", str(folder / "lab"), *words, *more]) == 0
        made = Lab(folder, url, {k: v for k, v in store.keys.items() if k != "R2_ENDPOINT_URL"})
        made.serve()
        try:
            yield made
        finally:
            made.stop()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty home with an empty folder, in which the program runs."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith(("R2_", "BT_", "DT_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(doctor, "main", lambda argv: 0)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


@pytest.fixture
def invitation(lab: Lab, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    return invite(lab, capsys)


def invite(lab: Lab, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert lab.founder("invite", "--network", str(lab.file), *more) == 0
    found = re.search(r"^dt-join (\S+)$", capsys.readouterr().out, re.M)
    assert found is not None
    return found[1]


def write_keys(lab: Lab, folder: Path) -> str:
    text = "# mine\n" + "".join(f"{name}={value}\n" for name, value in lab.keys.items())
    (folder / ".env").write_text(text)
    return text


def uid_in(text: str) -> int:
    found = re.search(r" with uid (\d+), ", text)
    assert found is not None, text
    return int(found[1])


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_one_line_makes_a_miner_and_again_takes_it_over(
    lab: Lab, home: Path, invitation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    here, token = home / "here", invitation.rpartition(".")[2]
    write_keys(lab, here)
    assert join_command.main([invitation, "--dht.port", "7001"]) == 0
    out = capsys.readouterr().out
    uid = uid_in(out)
    bucket = f"lab-{uid:03d}"
    assert f"bucket {bucket} made" in out and out.endswith("\nstart the miner with: dt-miner\n")
    config = load_config("miner", [], environ={}, file=here / "miner.toml")  # it refuses no setting
    assert config.general.network == f"{lab.url}/network.toml"
    assert (config.swarm.dht_port, config.chain.wallet_name) == (7001, "lab")
    assert (home / ".bittensor/wallets/lab/hotkeys/default").exists()
    kept = (here / ".env").read_text()
    assert (here / ".env").stat().st_mode & 0o777 == 0o600
    assert kept.startswith("# mine\n")
    assert read_dotenv(here / ".env")["DT_INVITATION"] == token
    assert token not in (here / "miner.toml").read_text() + out
    before = everything(home)
    for words in ([invitation], [f"{lab.url}/network.toml"]):
        assert join_command.main(words) == 0  # the invitation was good for one
        assert f" with uid {uid}, " in capsys.readouterr().out
    assert everything(home) == before
    assert join_command.main([invitation, "--dht.port", "7002"]) == 2
    assert "dht.port in" in capsys.readouterr().err and everything(home) == before


def test_another_folder_is_made_and_named(
    lab: Lab, home: Path, invitation: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    for name, value in lab.keys.items():
        monkeypatch.setenv(name, value)  # a service will not have the variables of this shell
    monkeypatch.setattr(getpass, "getpass", lambda prompt: invitation)
    assert join_command.main(["--folder", "two words"]) == 0
    folder = home / "here" / "two words"
    assert capsys.readouterr().out.endswith(f"cd '{folder}' && dt-miner\n")
    monkeypatch.chdir(home)
    for name in lab.keys:
        monkeypatch.delenv(name)
    monkeypatch.chdir(folder)
    assert load_config("miner", [], environ={}, file=Path("miner.toml"))


#: For each fault: the words for ``dt-join``, given an invitation and a folder, and the error.
WRONG: dict[str, tuple[Callable[[str, Path], list[str]], str]] = {
    # test_registry.py has the other refusals of the registry.
    "unknown": (lambda line, here: [line[:-8] + line[:-9:-1]], "the invitation is not known here"),
    "digest": (
        lambda line, here: [re.sub(r"\w{4}(?=\.[^.]+$)", "0123", line)],
        "its rules are not those of the invitation",
    ),
    "cut": (lambda line, here: [line[:-30]], "the invitation (URL#DIGEST.SECRET) is inc"),
    "no digest": (lambda line, here: [line.partition("#")[0]], "whose part after # is missing"),
    "away": (
        lambda line, here: [re.sub(r":\d+/", f":{free_ports(1)[0]}/", line)],
        "does not answer",
    ),
    "wallet": (
        lambda line, here: [line] * bool(create_wallet(here.parent / ".bittensor/wallets", "lab")),
        "exists already and is no member of this network",
    ),
    "wallet folder": (
        lambda line, here: [line, "--wallet.path", str(here / ".env" / "wallets")],
        "use --wallet.path",
    ),
    "no folder": (lambda line, here: [line, "--folder", ".env"], "--folder .env cannot be used"),
    "no keys": (
        lambda line, here: (here / ".env").unlink() or [line],
        "R2_READ_ACCESS_KEY_ID, R2_READ_SECRET_ACCESS_KEY, R2_WRITE_ACCESS_KEY_ID, "
        "R2_WRITE_SECRET_ACCESS_KEY not set",
    ),
    "other miner": (
        lambda line, here: [line] * bool((here / "miner.toml").write_text('network = "other"\n')),
        "network in ",
    ),
    "flag": (lambda line, here: [line, "--dht.prot", "7001"], "did you mean --dht.port"),
    "words": (lambda line, here: [line, "more"], "2 words where one is expected"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_bad_invitation_is_one_line_and_nothing_is_written(
    lab: Lab, home: Path, wrong: str, invitation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_keys(lab, home / "here")
    make, words = WRONG[wrong]
    given = make(invitation, home / "here")
    before, folders = everything(home), sorted(p for p in home.rglob("*") if p.is_dir())
    assert join_command.main(given) in (1, 2)
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: ") and words in said, said
    assert invitation.rpartition(".")[2] not in said
    assert everything(home) == before
    assert sorted(p for p in home.rglob("*") if p.is_dir()) == folders


def test_a_second_folder_never_silently_takes_a_hotkey_that_has_a_uid(
    lab: Lab, home: Path, invitation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does not write a secret that nobody has checked either, and its remedy works."""
    first, two = home / "here", home / "two"
    two.mkdir()
    write_keys(lab, first)
    write_keys(lab, two)
    assert join_command.main([invitation]) == 0
    capsys.readouterr()
    os.chdir(two)
    before = everything(home)
    second = invite(lab, capsys)
    for line in (second, second[:-8] + "WrongEnd"):
        assert join_command.main([line]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert "uid" in said and "--wallet.name two" in said and f"({first})" in said
        assert everything(home) == before
    assert join_command.main([second, "--wallet.name", "two"]) == 0
    uid = uid_in(capsys.readouterr().out)
    token = second.rpartition(".")[2]
    assert read_dotenv(two / ".env")["DT_INVITATION"] == token
    third = home / "third"
    third.mkdir()
    write_keys(lab, third)
    os.chdir(third)
    wrong = second[:-8] + "WrongEnd"
    assert join_command.main([wrong, "--wallet.name", "two"]) == 0, "it was named"
    out = capsys.readouterr().out
    assert uid_in(out) == uid and "neither used nor kept" in out
    assert "DT_INVITATION" not in read_dotenv(third / ".env")


def test_a_wallet_that_is_named_is_taken_over(lab: Lab, home: Path, invitation: str) -> None:
    hotkey = create_wallet(home / ".bittensor" / "wallets", "lab").ss58
    write_keys(lab, home / "here")
    assert join_command.main([invitation, "--wallet.name", "lab"]) == 0
    assert create_wallet(home / ".bittensor" / "wallets", "lab").ss58 == hotkey


def test_a_hotkey_that_may_have_a_uid_is_kept(
    lab: Lab, home: Path, invitation: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    write_keys(lab, home / "here")
    register = RegistryChain.register

    def lose_the_answer(chain: RegistryChain) -> int:
        register(chain)
        raise ChainError("register: ReadTimeout")

    with monkeypatch.context() as patch:
        patch.setattr(RegistryChain, "register", lose_the_answer)
        assert join_command.main([invitation]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "may have a uid" in line and "run the same command again" in line
    assert join_command.main([invitation]) == 0, "the invitation was good for one"


def test_no_invitation_is_made_to_a_file_that_the_registry_does_not_serve(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "network.toml"
    other.write_text(lab.file.read_text() + "# changed\n")
    assert lab.founder("invite", "--network", str(other)) == 2
    assert "does not serve" in capsys.readouterr().err
    assert lab.founder("invite") == 2 and "no registry was named" in capsys.readouterr().err


def test_an_invitation_is_three_lines_where_the_file_names_the_software(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    def lines() -> list[str]:
        assert lab.founder("invite", "--network", str(lab.file)) == 0
        return capsys.readouterr().out.split("\n\n")[1].splitlines()

    capsys.readouterr()
    join, start = lines()
    assert re.fullmatch(r"dt-join \S+#\S+", join) and start == "dt-miner"
    software = "https://example.org/miner-0.3.0.whl[lora]"
    text = lab.file.read_text()
    lab.file.write_text(f'software = "{software}"\n{text}')
    assert network_command.main(["sign", str(lab.file), "--at", "40"]) == 0
    capsys.readouterr()
    install, join, start = lines()
    assert install.endswith(f"pip install '{software}'") and start == "dt-miner"
    assert re.fullmatch(r"dt-join \S+#\S+", join)


def test_one_who_was_expelled_is_told_so_once(
    lab: Lab, home: Path, invitation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_keys(lab, home / "here")
    assert join_command.main([invitation]) == 0
    hotkey = re.search(r"^hotkey (\w+) with uid", capsys.readouterr().out, re.M)
    assert hotkey is not None
    assert lab.founder("expel", "--url", lab.url, hotkey[1]) == 0
    (home / "here" / "miner.toml").unlink()
    capsys.readouterr()
    assert join_command.main([invite(lab, capsys), "--wallet.name", "lab"]) == 1
    said = capsys.readouterr().err
    assert f"register: the founder expelled hotkey {hotkey[1]}" in said
    assert (
        said.count("register: ") == 1
        and lab.founder("expel", "--url", lab.url, hotkey[1], "--again") == 0
    )
