"""Test networks that begin with weights from a folder that transformers wrote."""

from __future__ import annotations

import dataclasses
import hashlib
import http.server
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from distributed_training.chain.identity import load_wallet
from distributed_training.config import Config, ConfigError, load_config
from distributed_training.data.tokenizer import build_tokenizer
from distributed_training.founder import FounderPlan
from distributed_training.network import flatten
from distributed_training.network_command import main
from distributed_training.node.identity import Member
from distributed_training.scoring import export
from distributed_training.telemetry import read_events
from distributed_training.training.model import hf_config, parameter_schema
from distributed_training.training.pretrained import (
    INDEX,
    WeightsError,
    digest_weights,
    read_weights,
)
from distributed_training.validator import program
from tests.tools.chain_memory import MemoryChain
from tests.tools.store_world import StoreWorld
from tests.tools.validator_world import one_thread  # noqa: F401

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("own_logging")]
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    # None of these values is the default, and each of them changes the loss.
    "rope_theta": 500.0,
    "rms_norm_eps": 1e-3,
    "hidden_act": "gelu",
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"  # the commit of a base at the hub
WORDS = ("--name", "lab", "--host", "192.0.2.7", "--registry", "https://registry.example.org")
WORDS += ("--data-source", "stdlib", "--set", "training.sequence_length=64")
WORDS += ("--exchange", "store", "--store", "https://s3.example.org")


def saved(
    folder: Path,
    *,
    tied: bool,
    sharded: bool,
    dtype: torch.dtype,
    words: int = 264,
    factor: float = 3,
) -> Path:
    """Write a folder with ``save_pretrained``; its weights are far from a fresh model's."""
    torch.manual_seed(7)
    config = hf_config(MODEL | {"tie_word_embeddings": tied, "vocab_size": words})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + factor * torch.rand_like(parameter))
    model.to(dtype).save_pretrained(folder, max_shard_size="30KB" if sharded else "1GB")
    build_tokenizer("bytes", folder)
    assert (folder / INDEX).exists() == sharded
    return folder


def founded(folder: Path, source: Path, *more: str) -> int:
    return main(["init", str(folder), *WORDS, "--from", str(source), *more])


# --- refusals -----------------------------------------------------------------------------------

Draw = random.Random


def _edit(folder: Path, draw: Draw, change: Callable[[dict[str, torch.Tensor], str], None]) -> None:
    """Apply ``change`` to a random tensor of a random weight file."""
    path = draw.choice(sorted(folder.glob("*.safetensors")))
    tensors = load_file(path)
    change(tensors, draw.choice(sorted(tensors)))
    save_file(tensors, path, {"format": "pt"})


def _value(value: float) -> Callable[[Path, Draw], None]:
    def damage(folder: Path, draw: Draw) -> None:
        def change(tensors: dict[str, torch.Tensor], name: str) -> None:
            wide = tensors[name].double()
            wide.view(-1)[draw.randrange(wide.numel())] = value
            tensors[name] = wide

        _edit(folder, draw, change)

    return damage


def _missing(folder: Path, draw: Draw) -> None:
    _edit(folder, draw, lambda tensors, name: tensors.pop(name))


def _extra(folder: Path, draw: Draw) -> None:
    _edit(folder, draw, lambda t, name: t.update({f"{name}_scale": torch.ones(1)}))


def _shape(folder: Path, draw: Draw) -> None:
    _edit(folder, draw, lambda t, name: t.update({name: t[name][1:].clone()}))


def _integers(folder: Path, draw: Draw) -> None:
    _edit(folder, draw, lambda t, name: t.update({name: t[name].to(torch.int8)}))


def _cut(folder: Path, draw: Draw) -> None:
    path = draw.choice(sorted(folder.glob("*.safetensors")))
    data = path.read_bytes()
    path.write_bytes(data[: draw.randrange(len(data))])


def _lost_shard(folder: Path, draw: Draw) -> None:
    draw.choice(sorted(folder.glob("*.safetensors"))).unlink()


def _pickled(folder: Path, _: Draw) -> None:
    for path in (*folder.glob("*.safetensors"), folder / INDEX):
        path.unlink(missing_ok=True)
    (folder / "pytorch_model.bin").write_bytes(b"x")


def _other_head(folder: Path, draw: Draw) -> None:
    path = sorted(folder.glob("*.safetensors"))[0]
    head = torch.zeros(264, 32)
    save_file(load_file(path) | {"lm_head.weight": head}, path, {"format": "pt"})


def _untied(folder: Path, draw: Draw) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))


def _words(folder: Path, draw: Draw) -> None:
    shutil.rmtree(folder)
    saved(folder, tied=True, sharded=False, dtype=torch.float32, words=draw.randrange(8, 257))


def _write(name: str, text: str) -> Callable[[Path, Draw], object]:
    return lambda folder, _: (folder / name).write_text(text)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, bool], Path]:
    place = tmp_path_factory.mktemp("saved")
    return {
        (tied, sharded): saved(
            place / f"{tied}-{sharded}",
            tied=tied,
            sharded=sharded,
            dtype=torch.bfloat16 if tied else torch.float32,
        )
        for tied in (False, True)
        for sharded in (False, True)
    }


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("damage", "words", "only"),
    [
        (_missing, "has no tensor", {}),
        (_extra, "and the model of its config.json has none", {}),
        (_shape, "has shape", {}),
        (_value(float("nan")), "is not finite", {}),
        (_value(float("-inf")), "is not finite", {}),
        (_value(1e300), "is not finite", {}),  # it overflows float32
        (_integers, "is not finite or not floating-point", {}),
        (_cut, "cannot be read", {}),
        (_lost_shard, "which is missing", {"sharded": True}),
        (_lost_shard, "has neither model.safetensors nor", {"sharded": False}),
        (_pickled, "has neither model.safetensors nor", {}),
        (_write(INDEX, "{}"), f"{INDEX} cannot be read", {"sharded": True}),
        (_write("config.json", "["), "there is no model to create a network with", {}),
        (_write("tokenizer.json", "{"), "the tokenizer", {}),
        (_words, "has 257 words, but the model's vocab_size is", {}),
        (_other_head, "differ in its files", {"tied": True}),
        (_untied, "has no tensor lm_head.weight", {"tied": True}),
    ],
)
def test_a_folder_that_is_not_the_model_founds_nothing(
    folders: dict[tuple[bool, bool], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path, Draw], object],
    words: str,
    only: dict[str, bool],
    seed: int,
) -> None:
    draw = Draw(seed)
    tied, sharded = (only.get(key, draw.choice([False, True])) for key in ("tied", "sharded"))
    source = tmp_path / "source"
    shutil.copytree(folders[tied, sharded], source)
    damage(source, draw)
    capsys.readouterr()
    assert founded(tmp_path / "lab", source) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("error: ") and words in line and not out
    assert line.count(": ") >= 2, "cause and consequence, and a remedy"
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# --- what the network begins with ---------------------------------------------------------------


class Founded:
    """A new network and its validator, with a chain and a store in memory."""

    def __init__(
        self, place: Path, source: Path, capsys: pytest.CaptureFixture[str], *more: str
    ) -> None:
        self.folder, self.source = place / "lab", source
        assert founded(self.folder, source, *more) == 0
        self.words = FounderPlan.of(self.folder).words["validator"]
        self.world = StoreWorld(place / "unused", begun=False)
        torch.manual_seed(1)
        self.text = torch.randint(256, (4, 64))

    def config(self, *more: str) -> Config:
        return load_config(
            "validator",
            [*self.words, "--neuron.device", "cpu", *more],
            environ={},
            dotenv=None,
            check=False,
        )

    def start(self, config: Config) -> tuple[program.GlobalState, float]:
        """Start the validator; return its state and its held-out loss."""
        wallet = load_wallet(config.chain)
        chain = MemoryChain(hotkey=wallet.ss58, ledger=self.world.ledger)
        parts = dataclasses.replace(
            self.world.parts(),
            member=Member(wallet, chain, 200),
            held_out={config.held_out_name: self.text},
        )
        run = self.folder / "validator"
        with ExitStack() as stack:
            validator = program.build(
                config, parts, folder=run, stop=threading.Event(), stack=stack
            )
            validator.start()
        *_, event = read_events(run / "events.jsonl", "held_out")
        return validator.state, event["before"]

    def plain_loss(self) -> float:
        """Return the loss of the folder's model, computed by transformers."""
        model = AutoModelForCausalLM.from_pretrained(self.source, dtype=torch.float32)
        with torch.no_grad():
            return float(model(input_ids=self.text, labels=self.text).loss)


@pytest.mark.parametrize(
    ("tied", "sharded", "dtype"),
    [
        (False, False, torch.float32),
        (False, True, torch.bfloat16),
        (True, True, torch.float16),
        (True, False, torch.float64),
    ],
)
def test_its_first_held_out_loss_is_that_of_the_folder(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    tied: bool,
    sharded: bool,
    dtype: torch.dtype,
) -> None:
    source = saved(tmp_path / "source", tied=tied, sharded=sharded, dtype=dtype)
    network = Founded(tmp_path, source, capsys)
    state, loss = network.start(network.config())
    assert loss == pytest.approx(network.plain_loss(), abs=1e-4) and loss > 5.7
    assert state.outer_step == 0 and all(w.dtype == torch.float32 for w in state.weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_later_start_and_an_export_change_no_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: torch.dtype
) -> None:
    source = saved(tmp_path / "source", tied=True, sharded=True, dtype=dtype)
    network = Founded(tmp_path, source, capsys)
    config = network.config()
    first, loss = network.start(config)
    shutil.rmtree(source)  # the validator must not read it again
    assert network.start(config)[1] == loss
    made = tmp_path / "made"
    words = ["--from", str(network.folder / "validator"), *network.words]
    assert export.main([str(made), *words]) == 0
    assert "exported the model of outer step 0" in capsys.readouterr().out
    digest = digest_weights(first.weights)
    assert config.network.head.weights == digest
    content = json.loads((made / "config.json").read_text())
    again = list(read_weights(made, content))
    assert digest_weights(again) == digest
    for (name, _), old, new in zip(parameter_schema(content), first.weights, again, strict=True):
        assert torch.equal(old, new), name
    assert AutoModelForCausalLM.from_pretrained(made).dtype == torch.float32
    assert founded(tmp_path / "next", made) == 0
    text = (tmp_path / "next" / "network.toml").read_text()
    assert digest in text and 'name = "bytes"' in text


def test_a_network_whose_key_is_lost_continues_as_another_by_one_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The new network has the same weights, tokenizer and rules, except for what options change."""
    source = saved(tmp_path / "source", tied=True, sharded=False, dtype=torch.float32)
    network = Founded(tmp_path, source, capsys, "--set", "stop.loss=3.5")
    state, _ = network.start(network.config())
    file = network.folder / "network.toml"
    shutil.rmtree(network.folder / "wallets")
    words = ["--of", str(file), *WORDS[:6], *WORDS[-2:], "--set", "training.warmup_steps=7"]
    assert main(["succeed", str(tmp_path / "next"), *words]) == 0
    old, new = (
        flatten(tomllib.loads(path.read_text()))
        for path in (file, tmp_path / "next" / "network.toml")
    )
    assert new["model.weights"] == digest_weights(state.weights)
    assert new["tokenizer.name"] == "bytes" and new["version"] == 1
    own = ("chain.", "model.", "store.", "swarm.", "name", "version", "signature", "tokenizer.")
    differ = {key for key in old | new if not key.startswith(own) and old.get(key) != new.get(key)}
    assert differ == {"training.warmup_steps", "stop.loss"} and "stop.loss" not in new
    assert new["training.warmup_steps"] == 7
    assert new["training.sequence_length"] == 64 and new["data.source"] == "stdlib"
    assert new["chain.master_hotkey"] != old["chain.master_hotkey"]
    assert (tmp_path / "next-weights" / "model.safetensors").exists()
    lost = ["--of", str(tmp_path / "no.toml")]
    assert main(["succeed", str(tmp_path / "third"), *words, *lost]) == 2
    assert not (tmp_path / "third").exists()


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers like the hub about one model at one commit, whose files are in ``folder``."""

    folder: Path
    asked: list[str]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        self.asked.append(path := self.path.partition("?")[0])
        of_model, at = "/api/models/lab/base", f"/lab/base/resolve/{COMMIT}/"
        file = self.folder / path.removeprefix(at)
        found = sorted(each for each in self.folder.iterdir() if each.is_file())
        if path in (of_model, f"{of_model}/revision/{COMMIT}"):
            siblings = [{"rfilename": each.name} for each in found]
            data = json.dumps({"id": "lab/base", "sha": COMMIT, "siblings": siblings}).encode()
        elif path == f"{of_model}/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": each.name, "size": each.stat().st_size, "oid": "0" * 40}
                for each in found
            ]
            data = json.dumps(tree).encode()
        elif path.startswith(at) and file.is_file():
            data = file.read_bytes()
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@pytest.mark.timeout(300)
def test_a_base_at_the_hub_is_fetched_at_its_commit(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    Hub.folder, Hub.asked = tmp_path / "hub", []
    source = saved(tmp_path / "hub", tied=True, sharded=True, dtype=torch.bfloat16)
    (source / "pytorch_model.bin").write_bytes(b"of no use")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environ["HF_HOME"] = str(tmp_path / "cache")
    words = [str(tmp_path / "lab"), *WORDS, "--from", "lab/base", "--lora", "r=4"]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        # Use another process, because the hub's client reads its address only once.
        environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
        made = subprocess.run(
            [sys.executable, "-m", "distributed_training.network_command", "init", *words],
            env=environ, capture_output=True, text=True, check=False, timeout=280,
        )  # fmt: skip
        server.shutdown()
    assert made.returncode == 0, made.stderr
    model = tomllib.loads((tmp_path / "lab" / "network.toml").read_text())["model"]
    assert model["settings"]["base"] == f"lab/base@{COMMIT}"
    assert model["settings"]["dtype"] == "bfloat16"
    (frozen,) = (tmp_path / "lab").rglob("frozen.safetensors")
    held, given_as = load_file(frozen), dict[str, torch.Tensor]()
    for path in source.glob("*.safetensors"):
        given_as |= load_file(path)
    assert {name.replace(".base_layer", "") for name in held} == given_as.keys()
    for name, values in held.items():
        assert torch.equal(values, given_as[name.replace(".base_layer", "")]), name
    assert not [path for path in Hub.asked if path.endswith(".bin")]
    # Members save the commit with their adapters, so that PEFT finds the same base.
    config = json.loads((tmp_path / "lab" / "adapters" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("lab/base", COMMIT)


def test_adapters_continue_in_another_network_on_the_base_that_they_began_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(tmp_path / "source", tied=True, sharded=False, dtype=torch.bfloat16)
    network = Founded(tmp_path, source, capsys, "--lora", "r=4,alpha=4,targets=q_proj,train=B")
    state, loss = network.start(network.config())
    assert loss == pytest.approx(network.plain_loss(), abs=0.02)  # B is zero; the base is bf16
    file = network.folder / "network.toml"
    # Signing another rule keeps the same adapters on the same base.
    file.write_text(file.read_text().replace("warmup_steps = ", "warmup_steps = 1"))
    assert main(["sign", str(file)]) == 0
    first, second = (tomllib.loads(path.read_text())["model"] for path in (
        network.folder / "versions" / "1.toml", file,
    ))  # fmt: skip
    assert first == second
    _, again = network.start(network.config())
    assert again == loss
    words = ["--of", str(file), *WORDS[:6], *WORDS[-2:]]
    assert main(["succeed", str(tmp_path / "next"), *words]) == 2
    assert "--from to the base that it started with" in capsys.readouterr().err
    other = saved(tmp_path / "other", tied=True, sharded=False, dtype=torch.bfloat16, factor=4)
    assert main(["succeed", str(tmp_path / "next"), *words, "--from", str(other)]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert f"{other} is not the base of {file}" in line
    assert not (tmp_path / "next").exists()
    assert main(["succeed", str(tmp_path / "next"), *words, "--from", str(source)]) == 0
    third = tomllib.loads((tmp_path / "next" / "network.toml").read_text())["model"]
    assert third == second | {"weights": digest_weights(state.weights)}


def test_experts_under_other_names_are_refused_as_such(tmp_path: Path) -> None:
    config = hf_config(MODEL | {"model_type": "mixtral", "num_local_experts": 2})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match="experts") as refusal:
        list(read_weights(tmp_path, config.to_dict()))
    assert "saved under other names" in refusal.value.remedy


def test_untrained_buffer_of_a_model_must_equal_its_default(tmp_path: Path) -> None:
    more = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
    more |= {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    more |= {"v_head_dim": 8, "moe_intermediate_size": 8, "num_key_value_heads": 4}
    config = hf_config(MODEL | {"model_type": "deepseek_v3", "first_k_dense_replace": 1} | more)
    state = AutoModelForCausalLM.from_config(config).state_dict()
    bias = next(name for name in state if name.endswith("e_score_correction_bias"))
    save_file(state, tmp_path / "model.safetensors")
    assert list(read_weights(tmp_path, config.to_dict()))
    save_file(state | {bias: state[bias] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="e_score_correction_bias, which is not trained"):
        list(read_weights(tmp_path, config.to_dict()))


def test_a_founder_without_the_pretrained_weights_publishes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(tmp_path / "source", tied=True, sharded=False, dtype=torch.float32)
    network = Founded(tmp_path, source, capsys)
    at = network.words.index("--validator.model")
    del network.words[at : at + 2]
    with pytest.raises(ConfigError, match="nothing was published: name their folder with"):
        network.start(network.config())
    other = saved(tmp_path / "other", tied=True, sharded=False, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="has other weights than the network's file names"):
        network.start(network.config("--validator.model", str(other)))
    with pytest.raises(ConfigError, match=r"config\.json has none, so nothing was published"):
        _extra(other, Draw(0))
        network.start(network.config("--validator.model", str(other)))
    assert not network.world.bucket.objects
