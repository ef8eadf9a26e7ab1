"""A registry follows its network's file, and an invitation the versions that come after it."""

from __future__ import annotations

import os
import re
import subprocess
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


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    folder = tmp_path / "lab"
    words = ["--name", "lab", "--registry", URL, "--store", "https://s3.example.org"]
    assert not network_command.main(["init", str(folder), *words, "--data-source", "stdlib"])
    return folder


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
    assert len([line for line in caplog.messages if "stays served" in line]) == 1
    second = change(lab, 2e-4)
    followed.look()
    assert made.files["network.toml"] == second and made.file_version == 2
    assert made.files["versions/1.toml"] == first and "versions/2.toml" in made.files
    other = lab.with_name("other")
    words = ["--name", "other", "--registry", URL, "--store", "https://s3.example.org"]
    assert not network_command.main(["init", str(other), *words, "--data-source", "stdlib"])
    os.replace(other / "network.toml", lab / "network.toml")
    followed.look()
    (lab / "network.toml").unlink()
    followed.look()
    assert made.files["network.toml"] == second
    assert any("another network's now" in line for line in caplog.messages)


def test_a_registry_does_not_start_with_a_file_that_nobody_signed(lab: Path) -> None:
    change(lab, 2e-4, sign=False)
    with pytest.raises(ConfigError, match="altered after it was signed"):
        made: Any = SimpleNamespace(files={}, file_version=None)
        registry._Followed(str(lab / "network.toml"), made).look()


FAULTS = ["none", "direct", "gap", "damaged", "other founder", "other network", "unknown", "cut"]


@pytest.mark.parametrize("fault", FAULTS)
def test_an_invitation_is_good_for_each_version_that_descends_from_its_own(
    lab: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [(lab / "network.toml").read_text(), *(change(lab, rate) for rate in (2e-4, 3e-4))]
    first = pinned = digest_of(flatten(tree_of(texts[0])))
    files = {f"/versions/{n}.toml": text for n, text in enumerate(texts, start=1)}
    newest = texts[-1]
    if fault == "direct":
        pinned = digest_of(flatten(tree_of(texts[1])))
    elif fault == "gap":
        del files["/versions/2.toml"]
    elif fault == "damaged":
        files["/versions/2.toml"] = texts[1].replace("1024", "1023")
    elif fault == "unknown":
        pinned = "0" * 64
    elif fault == "cut":
        files["/versions/2.toml"] = texts[1][:200]
    elif fault == "other founder":  # who writes that his file comes after the one of the invitation
        mine = re.sub(
            r"(?m)^master_hotkey = .*$", f'master_hotkey = "{ALICE.ss58_address}"', newest
        )
        head = {"version": 2, "previous": f"sha256:{first}", "from_outer_step": 5}
        newest = signed(mine, ALICE, head=head)
    elif fault == "other network":
        other = lab.with_name("other")
        words = ["--name", "other", "--registry", URL, "--store", "https://s3.example.org"]
        assert not network_command.main(["init", str(other), *words, "--data-source", "stdlib"])
        newest = change(other, 2e-4)
        files["/versions/1.toml"] = texts[0]
    files["/network.toml"] = newest

    def fetch(url: str) -> str:
        try:
            return files[urlsplit(url).path]
        except KeyError:
            raise network.NetworkAway("HTTP 404") from None

    monkeypatch.setattr(network_place, "_fetch", fetch)
    words = ["--network", f"{URL}/network.toml#{pinned}", "--neuron.run_folder", str(lab / "run")]
    if fault in ("none", "direct"):
        found = load_config("miner", words, environ={}, dotenv=None, check=False)
        assert found.network.head.version == 3
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
