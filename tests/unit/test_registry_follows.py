"""Check that a registry serves new versions of its file, and that invitations stay good."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from distributed_training import founder, network, network_command, network_place
from distributed_training.config import ConfigError, load_config, rules_at
from distributed_training.network import digest_of, flatten, signed, tree_of
from distributed_training.registry import command as registry
from tests.tools.network import ALICE

pytestmark = pytest.mark.timeout(60)
URL = "https://registry.example.org"


def found(folder: Path) -> Path:
    words = ["--name", folder.name, "--registry", URL, "--store", "https://s3.example.org"]
    assert not network_command.main(["init", str(folder), *words, "--data-source", "stdlib"])
    return folder


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    return found(tmp_path / "lab")


def change(lab: Path, rate: float, *, sign: bool = True) -> str:
    file = lab / "network.toml"
    text = re.sub(r"(?m)^learning_rate = .*$", f"learning_rate = {rate}", file.read_text())
    file.write_text(text)
    if sign:
        at = str(int(1e7 * rate))
        assert not network_command.main(["sign", str(file), "--at", at])
    return file.read_text()


def test_a_registry_serves_the_newest_signed_version_and_all_before_it(
    lab: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    made: Any = SimpleNamespace(files={}, file_version=None)
    followed = registry._Followed(str(lab / "network.toml"), made)
    followed.look()
    first = (lab / "network.toml").read_text()
    assert made.files["network.toml"] == first == made.files["versions/1.toml"]
    change(lab, 2e-4, sign=False)
    for _ in range(3):
        followed.look()
    assert made.files["network.toml"] == first and made.file_version == 1
    assert len([line for line in caplog.messages if "still serving" in line]) == 1
    second = change(lab, 2e-4)
    followed.look()
    assert made.files["network.toml"] == second and made.file_version == 2
    assert made.files["versions/1.toml"] == first and "versions/2.toml" in made.files
    os.replace(found(lab.with_name("other")) / "network.toml", lab / "network.toml")
    followed.look()
    (lab / "network.toml").unlink()
    followed.look()
    assert made.files["network.toml"] == second
    assert any("now belongs to another network" in line for line in caplog.messages)


def test_a_registry_does_not_start_with_a_file_that_nobody_signed(lab: Path) -> None:
    change(lab, 2e-4, sign=False)
    with pytest.raises(ConfigError, match="altered after it was signed"):
        made: Any = SimpleNamespace(files={}, file_version=None)
        registry._Followed(str(lab / "network.toml"), made).look()


def by_another(text: str, first: str) -> str:
    """Return another founder's file, which claims to follow the one with digest ``first``."""
    mine = re.sub(r"(?m)^master_hotkey = .*$", f'master_hotkey = "{ALICE.ss58_address}"', text)
    head = {"version": 2, "previous": f"sha256:{first}", "from_outer_step": 5}
    return signed(mine, ALICE, head=head)


#: Name of a fault -> function that changes the registry's versions, which it gets by number.
FAULTS: dict[str, Callable[[Path, dict[int, str], str], object]] = {
    "none": lambda lab, texts, first: None,
    "gap": lambda lab, texts, first: texts.pop(2),
    "damaged": lambda lab, texts, first: texts.update({2: texts[2].replace("1024", "1023")}),
    "cut": lambda lab, texts, first: texts.update({2: texts[2][:200]}),
    "other founder": lambda lab, texts, first: texts.update({3: by_another(texts[3], first)}),
    "other network": lambda lab, texts, first: texts.update(
        {3: change(found(lab.with_name("other")), 2e-4)}
    ),
}


@pytest.mark.parametrize(
    ("fault", "pinned"), [*((fault, 1) for fault in FAULTS), ("none", 2), ("none", None)]
)
def test_an_invitation_is_good_for_each_version_that_descends_from_its_own(
    lab: Path, fault: str, pinned: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = [(lab / "network.toml").read_text(), *(change(lab, rate) for rate in (2e-4, 3e-4))]
    digests = [digest_of(flatten(tree_of(text))) for text in versions]
    digest = digests[pinned - 1] if pinned else "0" * 64
    texts = dict(enumerate(versions, start=1))
    FAULTS[fault](lab, texts, digests[0])
    files = {f"/versions/{n}.toml": text for n, text in texts.items()}
    files["/network.toml"] = texts[3]

    def fetch(url: str) -> str:
        try:
            return files[urlsplit(url).path]
        except KeyError:
            raise network.NetworkAway("HTTP 404") from None

    monkeypatch.setattr(network_place, "_fetch", fetch)
    words = ["--network", f"{URL}/network.toml#{digest}", "--neuron.run_folder", str(lab / "run")]
    if fault == "none" and pinned:
        config = load_config("miner", words, environ={}, dotenv=None, check=False)
        assert config.network.head.version == 3
        return
    with pytest.raises(ConfigError, match=r"ask the founder for a new|404") as refused:
        load_config("miner", words, environ={}, dotenv=None, check=False)
    assert "\n" not in str(refused.value)


def test_a_run_keeps_its_invitation_and_revokes_one_that_it_replaces(
    lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    place = lab / "invitation.txt"

    def run(command: list[str], **how: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        config = load_config("miner", ["--network", str(lab / "network.toml")], environ={},
                             dotenv=None, check=False)  # fmt: skip
        line = f"dt-join {URL}/network.toml#{config.network.digest}.secret{len(asked)}"
        said = f"invitation id{len(asked)}, good for 5 until then; a secret\n\n{line}\n"
        return subprocess.CompletedProcess(command, 0, said, "")

    monkeypatch.setattr(founder.subprocess, "run", run)

    def start() -> str:
        config = rules_at(lab / "network.toml", "validator")
        founder._invite(founder.FounderPlan.of(lab, {}), config.network)
        return place.read_text()

    first = start()
    change(lab, 2e-4)
    assert start() == first and len(asked) == 1, "what was sent stays good"
    place.write_text(first.replace(URL, "https://elsewhere.example.org"))
    second = start()
    assert second != first and place.stat().st_mode & 0o077 == 0
    revoked = [command[-1] for command in asked if "--revoke" in command]
    assert revoked == ["id1"]
