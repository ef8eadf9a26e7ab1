"""The model that comes out: a folder that transformers loads, all or nothing."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from distributed_training.chain.registry import RegistryChain
from distributed_training.config import load_config
from distributed_training.data.tokenizer import build_tokenizer
from distributed_training.node import identity
from distributed_training.protocol.metadata import ConfigExtras
from distributed_training.scoring import export
from distributed_training.training.model import parameter_schema
from distributed_training.validator.global_state import initial_weights, small_llama
from tests.tools.chain_server_thread import RegistryServer
from tests.tools.chain_world import VALIDATOR
from tests.tools.network import network_file

pytestmark = pytest.mark.timeout(120)
CONFIG = load_config("validator", ["--preset", "local"], environ={}, dotenv=None, check=False)
NAME = "model.norm.weight"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A validator's run folder after outer step 3."""
    _, eos = build_tokenizer("bytes", tmp_path / "tokenizer")
    content = small_llama(vocabulary=264, sequence_length=128, eos_token=eos)
    for step in (2, 3):
        folder = tmp_path / "validator" / "global" / f"epoch-{step}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_bytes(ConfigExtras((1,), 5).merge_into(content))
        weights = initial_weights(content, seed=step)
        named = {n: w for (n, _), w in zip(parameter_schema(content), weights, strict=True)}
        save_file(named, folder / "model.safetensors", {"format": "pt"})
    return tmp_path / "validator"


def test_transformers_loads_the_newest_state(state: Path, tmp_path: Path, capsys) -> None:
    made = tmp_path / "model"
    words = [str(made), "--from", str(state), "--preset", "local"]
    assert export.main([*words, "--sample", "def ", "--tokens", "4", "--eval", "2"]) == 0
    out = capsys.readouterr().out
    assert "of outer step 3" in out and "\ndef " in out and "on text of random blocks" in out
    assert float(out.partition("held-out loss ")[2].split(",")[0]) == pytest.approx(
        math.log(264), abs=0.4
    )
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(made).state_dict()
    content = json.loads((made / "config.json").read_text())
    assert "block_list" not in content
    wanted = initial_weights(content, seed=3)
    for (name, _), weight in zip(parameter_schema(content), wanted, strict=True):
        assert torch.equal(loaded[name], weight)
    assert export.main(words) == 2  # the folder is there already
    assert "exists already" in capsys.readouterr().err


def test_a_model_is_measured_on_the_networks_own_text(state: Path, tmp_path: Path, capsys) -> None:
    text = tmp_path / "held.txt"
    text.write_text("ACGT" * 400)
    digest = hashlib.sha256(text.read_bytes()).hexdigest()
    rules = {"format": 2, "exchange": "hivemind", "data.held_out": f"{text}#{digest}"}
    file = network_file(tmp_path, rules)
    words = ["--from", str(state), "--network", file, "--eval", "4"]
    assert export.main([str(tmp_path / "model"), *words]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].endswith(", on held.txt")
    assert float(out.partition("held-out loss ")[2].split(",")[0]) == pytest.approx(
        math.log(264), abs=0.4
    )
    again = f"code*3={text}#{digest}"
    rules["data.held_out"] = [again, again.replace("code*3", "prose")]
    of_two = ["--network", network_file(tmp_path / "two", rules)]
    assert export.main([str(tmp_path / "of-two"), *words[:2], *of_two, *words[4:]]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    loss = out.partition("held-out loss ")[2].split(",")[0]
    assert last.startswith(f"held-out loss {loss}, ")
    assert last.endswith(f", on code 0.75, prose 0.25 (code {loss}, prose {loss})")
    text.write_text("ACGT")
    assert export.main([str(tmp_path / "other"), *words]) == 2
    assert "the network's file pins" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("nan", "not finite"),
        ("beyond float32", "not finite"),
        ("shape", "has shape"),
        ("missing", "lacks"),
        ("config", "cannot be exported"),
        ("no model", "so nothing was exported: where upload.content is scored"),
        ("none", "epoch-9/config.json is missing, so nothing was exported: leave"),
    ],
)
def test_a_damaged_state_leaves_no_folder(
    state: Path, tmp_path: Path, damage: str, words: str
) -> None:
    from safetensors.torch import load_file

    folder = state / "global" / "epoch-3"
    tensors = load_file(folder / "model.safetensors")
    if damage == "nan":
        tensors[NAME][0] = float("nan")
    elif damage == "beyond float32":
        tensors[NAME] = tensors[NAME].double().fill_(1e300)
    elif damage == "shape":
        tensors[NAME] = tensors[NAME][1:].clone()
    elif damage == "missing":
        del tensors[NAME]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if damage == "config":
        (folder / "config.json").write_text("{}")
    before = set(tmp_path.iterdir())
    reader, newest = export.open_folder(state)
    assert newest == 3
    if damage == "no model":
        (folder / "model.safetensors").unlink()
    step = 9 if damage == "none" else newest
    with pytest.raises(export.ExportError, match=words):
        export.export_model(CONFIG, reader, tmp_path / "model", outer_step=step)
    assert set(tmp_path.iterdir()) == before


class TestReadKey:
    """Test an export by a key that was named once."""

    @pytest.fixture
    def network(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[tuple[RegistryServer, list[str]]]:
        """Serve a registry with the founder's read key; also the flags that name it."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(export, "_PATIENCE", timedelta(seconds=0.5))
        monkeypatch.setattr(identity, "SOON", timedelta(seconds=0.5))
        server = RegistryServer(tmp_path / "registry").start()
        rules = {"chain.url": server.url, "store.endpoint": "http://127.0.0.1:9"}
        flags = ["--network", network_file(tmp_path, rules, signer=VALIDATOR.hotkey)]
        flags += ["--preset", "local", "--neuron.run_folder", str(tmp_path / "runs" / "mine")]
        yield server, flags
        server.stop()

    def open(self, flags: list[str]) -> str:
        config = load_config("validator", flags, environ={}, dotenv=None, check=False)
        options = export.build_parser().parse_args(["model"])
        with ExitStack() as stack:
            return export._global_bucket(config, options, stack).name

    def test_without_the_registry_the_last_known_one_is_used(
        self, network: tuple[RegistryServer, list[str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server, flags = network
        with closing(RegistryChain(url=server.url, wallet=VALIDATOR)) as founder:
            founder.commit("a" * 32 + "b" * 32 + "c" * 64)
        name = self.open(flags)
        server.stop()
        now = time.time()
        for days in (400, -400):  # of any age: also of a clock that was ahead
            monkeypatch.setattr(time, "time", lambda days=days: now + 86400 * days)
            assert self.open(flags) == name

    def test_a_miners_kept_state_serves_too(
        self, network: tuple[RegistryServer, list[str]], tmp_path: Path
    ) -> None:
        server, flags = network
        folder = tmp_path / "runs" / "another"
        folder.mkdir(parents=True)
        with closing(RegistryChain(url=server.url, wallet=VALIDATOR)) as founder:
            founder.commit("a" * 32 + "b" * 32 + "c" * 64)
            config = load_config("validator", flags, environ={}, dotenv=None, check=False)
            identity.keep_state(founder, config.chain, folder)
        server.stop()
        assert self.open(flags)

    def test_export_of_a_silent_network_says_why_and_when_it_ends(
        self,
        network: tuple[RegistryServer, list[str]],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        server, flags = network
        server.stop()
        began = time.monotonic()
        assert export.main([str(tmp_path / "model"), *flags]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "did not answer within" in error
        assert time.monotonic() - began < 20
