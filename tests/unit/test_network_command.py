"""Test the creation of a network: its file, its keys, and the mistakes of a founder."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open

import distributed_training
from distributed_training.chain.identity import load_wallet
from distributed_training.common.llama import local_llama_config, named_config
from distributed_training.common.memory import Arrangement, ModelShape, host_memory
from distributed_training.config import ConfigError, load_config, rules_at
from distributed_training.config.settings import ChainSettings
from distributed_training.data.held_out import held_out_batches
from distributed_training.data.tokenizer import build_tokenizer, byte_tokenizer
from distributed_training.founder import MASTER
from distributed_training.health import machine
from distributed_training.network import signed
from distributed_training.network_command import main
from distributed_training.node.buckets import commitment_text
from distributed_training.node.start import fetch_tokenizer
from distributed_training.plan_command import main as plan_main
from distributed_training.training.model import parameter_schema
from tests.tools.model_families import FAMILIES, init
from tests.tools.network import network_file

pytestmark = pytest.mark.timeout(60)


def found(folder: Path, *more: str) -> int:
    words = ("--exchange", "hivemind", "--name", "lab", "--host", "192.0.2.7", "--data-source",
             "stdlib", "--registry", "https://registry.example.org")  # fmt: skip
    return main(["init", str(folder), *words, *more])


def read(folder: Path):
    config = rules_at(folder / "network.toml")
    return config


def test_a_miner_joins_a_network_that_the_command_created(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "lab"
    assert found(folder, "--set", "round.period=60", "--set", "data.source=stdlib") == 0
    config = read(folder)
    values = config.network.values
    assert values["chain.url"] == "https://registry.example.org"
    assert values["round.period"] == 60
    assert (config.store.global_model_name, config.data.source) == ("lab", "stdlib")
    assert config.averages and config.has_bucket
    # The grace is twice the time for uploads, plus 3 s for meeting and the time of a transfer.
    assert (config.rounds.grace - 2 * config.rounds.average_after).total_seconds() >= 4
    assert config.network.model["num_hidden_layers"] == 4
    assert (folder / "wallets/master/hotkeys/default").stat().st_mode & 0o077 == 0
    assert folder.stat().st_mode & 0o077 == 0
    out = capsys.readouterr().out
    assert values["run_id"] in out and f"dt-network run {folder}" in out
    assert config.chain.private, "192.0.2.7 is no address of the internet"
    assert found(tmp_path / "other", "--host", "gpu-1") == 0
    other = read(tmp_path / "other")
    assert not other.chain.private and other.network.head.format == 3
    assert other.network.values["run_id"] != values["run_id"]
    assert found(folder) == 2 and "exists already" in capsys.readouterr().err


def test_the_data_are_pinned_as_their_source_serves_them(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    data = tmp_path / "snapshots" / commit
    data.mkdir(parents=True)
    pq.write_table(pa.table({"text": ["a row"] * 300}), data / "0.parquet")
    assert found(tmp_path / "lab", "--data-source", f"parquet:{data}") == 0
    values = read(tmp_path / "lab").network.values
    assert (values["data.rows"], values["data.revision"]) == (300, commit)
    assert (values["data.selection"], values["data.held_out_pages"]) == (
        2,
        1,
    )  # there are three pages
    same = ("--data-source", f"parquet:{data}", "--set", "data.selection=1")
    assert found(tmp_path / "shared", *same) == 0
    assert read(tmp_path / "shared").data.selection == 1
    monkeypatch.setattr("distributed_training.data.sources.HUB", "http://127.0.0.1:1")
    away = ("--data-source", "hub")
    assert found(tmp_path / "other", *away) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "the data cannot be pinned" in line and not (tmp_path / "other").exists()
    assert found(tmp_path / "other", *away, "--unpinned") == 0
    assert not {"data.rows", "data.selection"} & {*read(tmp_path / "other").network.values}
    free = ("--set", "data.selection=2", "--unpinned")
    assert found(tmp_path / "free", *away, *free) == 2
    assert "data.selection is 2 without data.rows" in capsys.readouterr().err


def test_a_file_of_held_out_text_is_pinned_and_read_before_anything_is_signed(
    tmp_path: Path, capsys
) -> None:
    text = tmp_path / "held.txt"
    text.write_text("ACGT" * 99)
    digest = hashlib.sha256(text.read_bytes()).hexdigest()
    named = ("--set", f"data.held_out={text}")
    assert found(tmp_path / "lab", *named) == 0
    assert read(tmp_path / "lab").data.held_out == f"held.txt#{digest}"
    assert (tmp_path / "lab" / "held-out" / "held.txt").read_bytes() == text.read_bytes()
    assert str(tmp_path) not in (tmp_path / "lab" / "network.toml").read_text()
    assert found(tmp_path / "same", "--set", f"data.held_out={text}#{digest}") == 0
    assert found(tmp_path / "other", "--set", f"data.held_out={text}#{'0' * 64}") == 2
    assert "has the SHA-256" in capsys.readouterr().err
    several = ("--set", f'data.held_out=["a*2={text}", "b={text}#{digest}"]')
    assert found(tmp_path / "several", *several) == 0
    assert read(tmp_path / "several").held_out_name == "a 0.67, b 0.33"
    assert read(tmp_path / "several").data.held_out == f"a*2=held.txt#{digest} b=held.txt#{digest}"
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "held.txt").write_text("TGCA" * 9)
    two = ("--set", f'data.held_out=["a={text}", "b={tmp_path / "two" / "held.txt"}"]')
    assert found(tmp_path / "both", *two) == 0
    kept = {p.read_text()[:4] for p in (tmp_path / "both" / "held-out").iterdir()}
    assert kept == {"ACGT", "TGCA"} and len({*read(tmp_path / "both").data.held_out.split()}) == 2
    text.write_bytes(b"\xff")
    assert found(tmp_path / "other", *several) == 2
    assert "give UTF-8 text" in capsys.readouterr().err
    assert found(tmp_path / "other", *named) == 2
    assert "give UTF-8 text" in capsys.readouterr().err
    assert found(tmp_path / "other", "--set", f"data.held_out={tmp_path / 'away.txt'}") == 2
    assert "cannot be read" in capsys.readouterr().err
    os.mkfifo(tmp_path / "pipe.txt")  # opening it must not wait for a writer
    assert found(tmp_path / "other", "--set", f"data.held_out={tmp_path / 'pipe.txt'}") == 2
    assert "is empty" in capsys.readouterr().err
    away = ("--set", "data.held_out=https://127.0.0.1:1/held.txt")
    assert found(tmp_path / "other", *away) == 1 and not (tmp_path / "other").exists()


def test_held_out_text_goes_where_the_founders_folder_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tokenizer: tuple[Path, int]
) -> None:
    """The text is found after a move of the folder, and in the run folder's copy."""
    text = tmp_path / "held.txt"
    text.write_text("ACGT" * 999)
    assert found(tmp_path / "lab", "--set", f"data.held_out={text}") == 0
    text.unlink()
    (tmp_path / "lab").rename(tmp_path / "moved")
    run = tmp_path / "moved" / "validator"

    def judged(folder: Path, *more: str) -> int:
        argv = ["--network", str(folder / "network.toml"), *more]
        config = load_config("validator", argv, environ={}, dotenv=None, check=False)
        (batches,) = held_out_batches(config, *tokenizer, sequences=2).values()
        return len(batches)

    assert judged(tmp_path / "moved", "--neuron.run_folder", str(run)) == 2
    (copy,) = (run / "held-out").iterdir()  # the run folder has a copy
    (tmp_path / "moved" / "held-out" / "held.txt").unlink()
    assert judged(tmp_path / "moved", "--neuron.run_folder", str(run)) == 2
    copy.unlink()
    with pytest.raises(ConfigError, match=r"held\.txt is neither .* copy it there"):
        judged(tmp_path / "moved", "--neuron.run_folder", str(run))


def test_git_never_picks_up_what_only_the_founder_may_have(tmp_path: Path) -> None:
    assert found(tmp_path / "lab") == 0
    (tmp_path / "lab" / "invitation.txt").write_text("secret")
    shutil.copytree(tmp_path / "lab" / "wallets", tmp_path / "backup")
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, timeout=20)
    listed = subprocess.check_output(["git", "ls-files"], cwd=tmp_path, timeout=20, text=True)
    names = ("lab/.gitignore", "lab/network.toml", "lab/run.toml", "lab/versions/1.toml")
    assert listed.split() == [*names]


def test_the_table_of_the_guide_is_what_init_writes_and_dt_plan_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "found-a-network.md").read_text()
    rows = dict(re.findall(r"^\| (.+?) \|(.+)\|$", page, re.M))
    columns = {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows.items()}
    for at, (model, gpu) in enumerate((("125m", "4090"), ("1b", "h100"), ("4b", "h100x8"))):
        cells = {name: found[at] for name, found in columns.items() if len(found) == 3}
        folder, link = tmp_path / model, cells["`--slowest-link`"]
        words = ["--name", "lab", "--registry", "https://r.example.org", "--store"]
        words += ["https://s3.example.org", "--data-source", "stdlib", "--model", model]
        assert not main(["init", str(folder), *words, "--slowest-link", link, "--miners", "4"])
        said, values = capsys.readouterr().out, read(folder).network.values
        for key in ("learning_rate", "warmup_steps", "total_steps"):
            cell = cells[f"`training.{key}`"]
            assert values[f"training.{key}"] == float(cell)
            assert re.search(rf" {float(cell):g}[,; ]", said)
        period = next(cell for name, cell in cells.items() if name.endswith(": the period"))
        assert values["round.period"] == period
        assert values["round.grace"] == cells["grace that `init` writes"].replace(" ", "")
        down_up = cells["its link, Mbit/s down/up"]
        given = ["--model", model, "--gpu", gpu, "--link", down_up, "--peers", "4"]
        assert plan_main(given) == 0
        said = capsys.readouterr().out
        dollars = cells["GPUs of all members, prices of May 2026"].removesuffix(" dollars")
        hours = cells["time of the whole training"]
        assert f"  {hours}, {dollars} $ of all members" in said


def test_the_example_of_three_sites_has_the_values_that_init_and_dt_plan_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new model of the same size replaces given weights, so its rate is not divided by 10."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "own-text.md").read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```", page.replace("\\\n", " "), re.M | re.S)
    commands = {words[:2][-1]: words for words in map(shlex.split, blocks)}
    for name in ("letters.txt", "reports.txt"):
        Path(name).write_text("some text of a site " * 200)
    words = commands["init"][1:]
    at = words.index("--from")
    words[at : at + 2] = ["--model", "1b", "--tokenizer", "bytes"]
    assert main(words) == 0
    values = read(Path("lab")).network.values
    assert f"takes {values['training.total_steps']:,.0f} inner steps" in page
    assert f"gets {values['round.grace'].removesuffix('s')} s at 50 Mbit/s" in page
    cells = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", page, re.M)
    rows = {name: found for name, *found in cells}
    for column, gpu in enumerate(("h100", "4090x4")):
        capsys.readouterr()
        asked = commands["--network"][1:]
        asked[asked.index("--gpu") + 1] = gpu
        assert plan_main(asked) == 0
        said = capsys.readouterr().out
        step, steps = (
            rows[name][column]
            for name in ("an inner step of 131,072 tokens", "inner steps in a round of 12 minutes")
        )
        assert f"  {step} (" in said and f"  {steps} inner steps" in said
        memory = rows["host memory; disk"][column].partition(" GB")[0]
        assert re.search(f"host memory, disk +{memory} GB", said)
        hours, dollars = rows["the whole training"][column].split(", ")
        assert f"  {hours}, {dollars.removesuffix(' dollars')} $ of all members" in said
    three = {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28}
    three |= {"num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128}
    three |= {"vocab_size": 128256, "tie_word_embeddings": True}
    Path("three.json").write_text(json.dumps(named_config("1b") | three))
    words[1], words[words.index("1b")] = "three", "three.json"
    assert main(words) == 2 and "--set round.period=1617s" in capsys.readouterr().err
    at = words.index("round.period=12m")
    assert main(words[: at - 1] + words[at + 1 :]) == 0
    values = read(Path("three")).network.values
    assert (values["round.period"], values["round.grace"]) == ("30m", "539s")


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ((), (1e-3, 33, 1000, 0.134)),  # the model of 2 million parameters on bytes
        (("--tokens", "1e9", "--miners", "8"), (1e-3, 7, 239, 0.134)),
        (("--set", "training.total_steps=300"), (1e-3, 10, 300, 0.134)),
        (("--set", "training.warmup_steps=500"), (1e-3, 500, 5000, 0.134)),
        (("--set", "training.learning_rate=2e-4"), (2e-4, 33, 1000, 0.134)),
        (("--set", "round.held_out_rise=0.5"), (1e-3, 33, 1000, 0.5)),
        (("--model", "125m"), (6e-4, 85, 2560, 0.25)),
    ],
)
def test_rules_fit_the_model_and_the_tokens_unless_they_are_given(
    tmp_path: Path, more: tuple[str, ...], wanted: tuple[float, ...]
) -> None:
    assert found(tmp_path / "lab", *more) == 0
    config = read(tmp_path / "lab")
    training = config.training
    made = (training.learning_rate, training.warmup_steps, training.total_steps)
    assert (*made, config.rounds.held_out_rise) == wanted


@pytest.mark.parametrize("more", [(), ("--unpinned",), ("--set", "data.rows=300")])
@pytest.mark.parametrize("only", ["genome.fa", "0.parquet"])
def test_no_network_is_founded_on_text_that_no_miner_can_read(
    tmp_path: Path, capsys, only: str, more: tuple[str, ...]
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    words = "contains no .parquet files, only others such as *.fa"
    (data / only).write_text(">1\nACGT\n" * 99)
    if only == "0.parquet":
        rows, words = pa.schema([("text", pa.string())]), "no text in the column 'text'"
        pq.write_table(pa.table({"text": [None] * 300}, rows), data / only)
    assert found(tmp_path / "lab", "--data-source", f"parquet:{data}", *more) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "lab").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0, "mscale": None}}, ""),
        ({"layer_types": [None, None]}, "a list that contains a null"),
        # Without the null, the window would be 4096.
        ({"model_type": "mistral", "sliding_window": None}, ""),
        ({"model_type": "mistral", "rms_norm_eps": None}, ""),  # transformers refuses a null there
        ({"rms_norm_eps": "small"}, "no model can be built from config.json"),
        ({"initializer_range": 0.5, "attention_bias": None}, ""),
        ({"model_type": "no-such-model"}, "does not know model_type"),
    ],
)
def test_a_network_is_founded_on_the_model_that_peers_build(
    tmp_path: Path, capsys, change: dict[str, object], words: str
) -> None:
    """The number of parameters is exact, nulls are left out, and unfit models are refused."""
    model = tmp_path / "config.json"
    small = local_llama_config(sequence_length=64)
    del small["tie_word_embeddings"]
    model.write_text(json.dumps(small | change))
    length = ("--set", "training.sequence_length=64", "--set", "name=lab")
    if words:
        assert found(tmp_path / "lab", "--model", str(model), *length) == 2
        assert words in capsys.readouterr().err and not (tmp_path / "lab").exists()
        return
    assert found(tmp_path / "lab", "--model", str(model), *length) == 0
    network = read(tmp_path / "lab").network
    count = sum(math.prod(shape) for _, shape in parameter_schema(network.model))
    assert network.head.parameters == count
    assert "mscale" not in str(network.model)
    if change.get("sliding_window", 0) is None:
        assert network.model["sliding_window"] == small["max_position_embeddings"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "vit", "hidden_size": 64}, "'vit' is not a decoder that predicts the"),
        ({"model_type": "t5", "d_model": 64}, "'t5' is not a decoder that predicts the next"),
        ({"model_type": "gpt2", "n_embd": 10**9}, "hidden_size is 1000000000 instead of"),
    ],
)
def test_what_cannot_found_a_network_is_refused_by_the_real_reason(
    tmp_path: Path, config: dict[str, object], words: str
) -> None:
    status, said = init(tmp_path, config)
    assert status == 2 and words in said and "None" not in said and said.count("\n") == 1
    assert not (tmp_path / "lab").exists()


def test_a_network_that_trains_a_part_publishes_the_rest(tmp_path: Path, capsys) -> None:
    rule = 'model.trainable=["model.layers.*", "model.norm.weight", "lm_head.weight"]'
    for wrong, words in (
        ('model.trainable=["layer"]', "'layer', which no parameter's name matches"),
        ("model.trainable_parameters=5", "trainable_parameters"),
    ):
        more = ("--set", rule) if wrong.endswith("=5") else ()
        assert found(tmp_path / "lab", *more, "--set", wrong) == 2
        assert words in capsys.readouterr().err and not (tmp_path / "lab").exists()
    assert found(tmp_path / "lab", "--set", rule) == 0
    network = read(tmp_path / "lab").network
    head = network.head
    assert head.exchanged == sum(math.prod(s) for _, s in parameter_schema(network.model))
    file = str(tmp_path / "lab" / "network.toml")
    assert {**network.model} == distributed_training.model_config(file) | {
        "distributed_training": {"trainable": head.trainable}
    }
    assert f"sends {0.52 * head.exchanged / 1e6:.1f} MB" in capsys.readouterr().out
    path = tmp_path / "lab" / "validator" / "published" / head.frozen / "frozen.safetensors"
    with safe_open(path, "pt") as frozen:
        (name,) = frozen.keys()
        assert name == "model.embed_tokens.weight"
        count = math.prod(frozen.get_slice(name).get_shape())
    assert head.exchanged + count == head.parameters
    # After it is signed again, it is still the same network.
    assert main(["sign", file]) == 0
    assert read(tmp_path / "lab").network.head.frozen == head.frozen


def test_a_mixtures_file_holds_the_true_count_and_machines_are_judged_by_it(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert init(tmp_path, FAMILIES["mixtral"][1])[0] == 0
    file = tmp_path / "lab" / "network.toml"
    network, config = (found := read(tmp_path / "lab")).network, found
    count = sum(math.prod(shape) for _, shape in parameter_schema(network.model))
    dense = ModelShape.from_config({**network.model, "model_type": "llama"}).parameters
    assert network.head.parameters == count > 2 * dense
    how = Arrangement(1, 1, config.training.sequence_length, checkpointing="full", cuda=False)
    most = host_memory(ModelShape.from_config({**network.model, "model_type": "llama"}), how)
    monkeypatch.setattr(machine, "host_bytes", lambda: 2 * most)
    with pytest.raises(ConfigError, match="host memory: at least"):
        machine.refuse_model(config, ranks=1)
    text = file.read_text()
    file.write_text(text.replace(f"parameters = {count}", f"parameters = {dense}"))
    assert main(["sign", str(file)]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"is {dense}, but the model has {count}" in line and "nothing was signed" in line
    file.write_text(text.replace('"mixtral"', '"gpt_oss"'))
    assert main(["sign", str(file)]) == 2 and "sinks" in capsys.readouterr().err


@pytest.mark.parametrize("told", [True, False])
def test_the_tokenizer_is_pinned_where_the_hub_tells_its_commit(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    commit, model = "0123456789abcdef0123456789abcdef01234567", tmp_path / "config.json"
    model.write_text(json.dumps(local_llama_config(sequence_length=64)))

    def info(self: HfApi, name: str, **_: object) -> SimpleNamespace:
        if told:
            return SimpleNamespace(sha=commit)
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(HfApi, "model_info", info)
    of = ("--model", str(model), "--tokenizer", "some/name", "--set", "training.sequence_length=64")
    looked_at = byte_tokenizer()
    small = SimpleNamespace(backend_tokenizer=looked_at, eos_token_id=256)
    monkeypatch.setattr(
        "distributed_training.data.tokenizer.load_pretrained", lambda *_, **__: small
    )
    assert found(tmp_path / "lab", *of) == 0
    config = read(tmp_path / "lab")
    assert config.tokenizer_revision == (commit if told else None)
    assert ("tokenizer.revision" in capsys.readouterr().err) is not told
    monkeypatch.undo()
    monkeypatch.setattr(HfApi, "model_info", info)
    asked: dict[str, object] = {}

    def load(name: str, **how: object) -> None:
        asked.update(how)
        raise OSError("far enough")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", load)
    with pytest.raises(ConfigError, match="some/name"):
        fetch_tokenizer(config, tmp_path)
    assert asked.get("revision") == (commit if told else None)
    assert found(tmp_path / "other", *of, "--set", "tokenizer.revision=main") == 2
    assert "tokenizer.revision 'main'" in capsys.readouterr().err


def test_a_tokenizer_with_more_words_than_the_model_founds_nothing(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = tmp_path / "config.json", tmp_path / "tokenizer"
    build_tokenizer("bytes", tokenizer)
    for words in (256, 257):
        shape = local_llama_config(vocab_size=words, sequence_length=1024)
        model.write_text(json.dumps(shape))
        for name in ("bytes", str(tokenizer)):
            folder = tmp_path / f"{words}-{Path(name).name}"
            status = found(folder, "--model", str(model), "--tokenizer", name)
            err = capsys.readouterr().err
            assert (status, folder.exists()) == ((2, False) if words < 257 else (0, True))
            assert words > 256 or f"has 257 words, but the model's vocab_size is {words}" in err
    (tokenizer / "tokenizer.json").write_text("{")
    assert found(tmp_path / "lab", "--model", str(model), "--tokenizer", str(tokenizer)) == 2
    assert "no network was created" in capsys.readouterr().err
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "away"))
    assert found(tmp_path / "lab") == 2 and not (tmp_path / "lab").exists()
    assert "no network was created: [Errno 2] No such file" in capsys.readouterr().err


def test_a_change_is_the_next_version_of_the_same_run_once_it_is_signed(
    tmp_path: Path, capsys
) -> None:
    folder = tmp_path / "lab"
    assert found(folder) == 0
    file, first = folder / "network.toml", read(folder).network
    change = file.read_text().replace("outer_momentum = 0.9", "outer_momentum = 0.8")
    file.write_text(change)
    capsys.readouterr()
    assert main(["show", str(file)]) == 2 and "altered" in capsys.readouterr().err
    assert main(["sign", str(file)]) == 0
    assert main(["show", str(file)]) == 0
    second, out = read(folder).network, capsys.readouterr().out
    assert "version 2" in out and first.values["run_id"] in out
    restarts = "from outer step 0: it changes training.outer_momentum; programs then restart"
    assert restarts in out
    assert (second.head.previous, second.head.from_outer_step) == (f"sha256:{first.digest}", 0)
    assert second.rules_id != first.rules_id
    assert main(["sign", str(file)]) == 0, "nothing was changed"
    assert read(folder).network.digest == second.digest
    kept = [(folder / "versions" / f"{n}.toml").read_text() for n in (1, 2)]
    assert kept[1] == file.read_text() and "version = 1" in kept[0]
    other = tmp_path / "other"
    assert found(other) == 0
    (folder / "wallets").rename(folder / "own")
    (other / "wallets").rename(folder / "wallets")
    assert main(["sign", str(file)]) == 2
    assert "put the master's wallet there" in capsys.readouterr().err


def test_a_version_holds_from_an_outer_step_that_is_still_to_come(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "lab"
    assert found(folder) == 0
    file = folder / "network.toml"
    (folder / "validator" / "global" / "epoch-7").mkdir(parents=True)

    def change(momentum: float, *more: str) -> int:
        text = file.read_text()
        file.write_text(re.sub("outer_momentum = .*", f"outer_momentum = {momentum}", text))
        return main(["sign", str(file), *more])

    assert change(0.8) == 0
    assert read(folder).network.head.from_outer_step == 9
    assert change(0.7, "--at", "7") == 2
    assert "--at 7 is past" in capsys.readouterr().err
    assert change(0.7, "--at", "30") == 0
    assert main(["sign", str(file), "--at", "31"]) == 2, "version 3 holds at 30 all the same"
    assert "would not delay them" in capsys.readouterr().err
    assert main(["sign", str(file), "--at", "29"]) == 0, "the same rules, earlier"
    assert change(0.9) == 0, "what is to change at 29 does not change at 9"
    head = read(folder).network.head
    assert (head.version, head.from_outer_step) == (5, 29)
    (folder / "validator").rename(tmp_path / "elsewhere")
    assert change(0.6) == 2
    assert "set --at" in capsys.readouterr().err
    (folder / "versions").rename(tmp_path / "versions")
    assert change(0.6, "--at", "40") == 2
    assert "restore that folder" in capsys.readouterr().err


OLD_PERIOD = (
    "seconds_per_block = 12.0  # of the chain\nblocks_per_allreduce = 150\nepoch_length = 160"
)


def test_a_file_of_before_is_signed_as_the_next_version_in_words_of_today(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A store network of format 2, with its period in blocks, stays the network that it was."""
    folder = tmp_path / "lab"
    assert found(folder) == 0
    wallet = load_wallet(ChainSettings(wallet_path=str(folder / "wallets"), wallet_name=MASTER))
    rules = {"format": 2, "exchange": "store", "chain.url": "https://registry.example.org"}
    file = Path(network_file(folder, rules, signer=wallet.hotkey))
    text = re.sub(r"(?m)^period = .*$", OLD_PERIOD, file.read_text())
    file.write_text(signed(text, wallet.hotkey))
    (folder / "versions" / "1.toml").write_text(file.read_text())
    config = read(folder)
    first = config.network
    assert first.head.format == 2 and config.rounds.period == timedelta(minutes=30)
    capsys.readouterr()
    assert main(["sign", str(file)]) == 0, capsys.readouterr().err
    written = tomllib.loads(file.read_text())["round"]
    assert written["period"] == "1800s" and "epoch_length" not in written
    assert not {"seconds_per_block", "blocks_per_allreduce"} & written.keys()
    second = read(folder).network
    assert (second.head.format, second.head.version) == (3, 2)
    assert second.head.previous == f"sha256:{first.digest}"
    assert second.values["run_id"] == first.values["run_id"], "the same network"
    assert second.values == first.values, "no rule has changed"
    # With hivemind, format 2 is for subnet 38's protocol, so nothing is written.
    text = file.read_text()
    over = text.replace('exchange = "store"', 'exchange = "hivemind"')
    over = over.replace("format = 3", "format = 2")
    file.write_text(over)
    assert main(["sign", str(file)]) == 2
    assert "the protocol of subnet 38" in capsys.readouterr().err and file.read_text() == over


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a network whose file each test leaves unchanged."""
    folder = tmp_path_factory.mktemp("founder") / "lab"
    assert found(folder, "--set", "round.grace=30s", "--set", "round.average_after=5s") == 0
    return folder


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "lab"', 'name = "lab2"', "name differs from .*dt-network init"),
        (
            r"\[tokenizer\]",
            f'[tokenizer]\nrevision = "{"0" * 40}"',
            "tokenizer.revision differs from",
        ),
        ("rope_theta = 10000.0", "rope_theta = 20000.0", "model.config differs from"),
        (r"\[model\]", f'[model]\nweights = "{"0" * 64}"', "model.weights differs from"),
        ("exchange = .*", 'exchange = "store"', "exchange is not the one .*dt-network succeed"),
        ("max_uids = .*", "max_uids = 9", "limits.max_uids differs from"),
        ("outer_momentum = .*", "outer_momentum = 9.0", "9.0 is more than 1"),
        *(
            ("period = .*", *more)
            for more in (
                ('period = "89s"', r"third of the period \(89s\), .*raise round.period to 90s or"),
                ('period = "8d"', "8d is more than 7d"),
                (
                    "seconds_per_block = 1.0",
                    "round.blocks_per_allreduce None, but round.period has",
                ),
                (f'period = "90s"\n{OLD_PERIOD}', "but round.period has replaced these"),
            )
        ),
    ],
)
def test_a_change_that_is_refused_is_one_line_and_no_version(
    lab: Path, old: str, new: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = lab / "network.toml"
    good = file.read_text()
    bad = re.sub(rf"(?m)^{old}$", lambda _: new, good, count=1)
    assert bad != good
    file.write_text(bad)
    try:
        assert main(["sign", str(file)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and re.search(words, line), line
        assert file.read_text() == bad
        assert [version.name for version in (lab / "versions").iterdir()] == ["1.toml"]
    finally:
        file.write_text(good)


@pytest.mark.parametrize("other", ['"stdlib"', f'"parquet:data"\nfiles = "{"1" * 64}"'])
def test_no_version_has_data_that_nobody_would_publish(tmp_path: Path, capsys, other: str) -> None:
    text = tmp_path / "text"
    text.mkdir()
    pq.write_table(pa.table({"text": ["row"] * 300}), text / "a.parquet")
    assert found(tmp_path / "lab", "--data-source", f"parquet:{text}") == 0
    file = tmp_path / "lab" / "network.toml"
    good = file.read_text()
    if "files" in other:
        good = re.sub(r'(?m)^files = "\w+"\n', "", good)
    file.write_text(wrong := good.replace('source = "parquet:data"', f"source = {other}"))
    assert main(["sign", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the data differs" in line and "nothing was signed" in line
    assert file.read_text() == wrong and not (tmp_path / "lab" / "versions" / "2.toml").exists()


SLOW = ("--slowest-link", "0.1", "--set", "round.period=240")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--tokenizer", "gpt2"), "set --model"),
        (("--model", "/no/such/config.json"), "set --model"),
        (("--set", "round.periodd=60"), "did you mean round.period"),
        (("--set", "model.parameters=5"), "model.parameters"),
        (("--set", "training.learning_rate=0.11"), "learning_rate 0.11 is above 0.1"),
        (("--set", "training.sequence_length=1025"), "more than the model's 1024 positions"),
        (
            ("--set", "training.warmup_steps=9", "--set", "training.total_steps=9"),
            "not below training.total_steps 9",
        ),
        *(
            (("--set", change), words)
            for change, words in (
                ("name.x=1", "no such key"),
                ("store=1", "no such key"),
                ("data.rows=2026-01-01", "a date or a time"),
            )
        ),
        *(
            (("--name", name), "--name: ")
            for name in ("No Name", "rr", "-lab", "lab-", "a" * 60, "lab.a", "")
        ),
        (("--host", "127.0.0.1"), "--host 127.0.0.1 cannot be reached from other machines"),
        (("--host", "0.0.0.0"), "--host 0.0.0.0 cannot be reached from other machines"),
        (("--set", "store.endpoint=https://s3.example.org/lab"), "leave out '/lab'"),
        (("--exchange", "store"), "--store is missing"),
        *(
            (("--exchange", "store", "--store", "https://s3.example.org", *more), words)
            for more, words in (
                (
                    SLOW,
                    "third of the period of 240 s, so no network was created: use --set round.per",
                ),
                (("--set", "round.grace=2000s"), "is above a third of the period (720s)"),
                (("--set", "round.codec=x"), "round.codec"),
            )
        ),
    ],
)
def test_a_wrong_option_leaves_nothing(tmp_path: Path, capsys, more, words: str) -> None:
    try:
        assert found(tmp_path / "lab", *more) == 2
    except SystemExit as refused:
        assert refused.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and words in line and not [*tmp_path.iterdir()]


def test_a_decay_begins_where_the_network_is(tmp_path: Path, capsys) -> None:
    """The decay is part of a new signed version of the same run."""
    folder = tmp_path / "lab"
    assert found(folder, "--set", "training.schedule=constant") == 0
    file, before = folder / "network.toml", read(folder).network
    assert main(["decay", str(file), "--steps", "500"]) == 2
    assert "set --from" in capsys.readouterr().err
    for outer_step, place in ((9, 4000), (10, 4400)):
        state = folder / "validator" / "global" / f"epoch-{outer_step}"
        state.mkdir(parents=True)
        signed = state.parent / "signed" / f"{outer_step}.json"
        signed.parent.mkdir(exist_ok=True)
        signed.write_text(json.dumps({"total_inner_steps": place}))
    text = file.read_text().replace("[training]", "[training]  # rates")
    file.write_text(text)
    for again, (steps, more) in enumerate(((500, ()), (70, ("--from", "5000"))), 1):
        assert main(["decay", str(file), "--steps", str(steps), *more]) == 0
        after = read(folder)
        training = after.training
        begins = int(more[1]) if more else 5280  # estimated for outer step 12 from the pace so far
        assert (training.decay_from, training.decay_steps) == (begins, steps)
        assert (after.network.head.version, after.network.head.from_outer_step) == (1 + again, 12)
        rest = {"training.decay_from", "training.decay_steps"}
        kept = {k: v for k, v in after.network.values.items() if k not in rest}
        assert kept == {k: v for k, v in before.values.items() if k not in rest}
        assert "# rates" in file.read_text()
        assert f"to inner step {begins + steps}" in capsys.readouterr().out


def dotted(text: str) -> str:
    """Return the same rules in another layout."""
    return text.replace("[training]\n", "[ training ]\n")


@pytest.mark.parametrize(
    ("schedule", "change", "more", "words"),
    [
        ("cosine", None, ("--from", "4000"), "the schedule is cosine"),
        ("constant", None, ("--from", "9"), "below training.warmup_steps 33"),
        ("constant", dotted, ("--from", "4000"), "is not laid out as dt-network init writes it"),
        ("constant", lambda text: text + "[", ("--from", "4000"), "is not TOML"),
        ("constant", None, (), "set --from"),
    ],
)
def test_a_decay_that_cannot_begin_changes_nothing(
    tmp_path: Path, capsys, schedule: str, change, more: tuple[str, ...], words: str
) -> None:
    assert found(tmp_path / "lab", "--set", f"training.schedule={schedule}") == 0
    file = tmp_path / "lab" / "network.toml"
    if change is not None:
        file.write_text(change(file.read_text()))
    before = file.read_text()
    capsys.readouterr()
    assert main(["decay", str(file), "--steps", "9", *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and words in line and file.read_text() == before


AWS = {
    "R2_READ_ACCESS_KEY_ID": "AKIA" + "R" * 16,
    "R2_READ_SECRET_ACCESS_KEY": "r/" + "r" * 38,
    "R2_WRITE_ACCESS_KEY_ID": "AKIA" + "W" * 16,
    "R2_WRITE_SECRET_ACCESS_KEY": "w+" + "w" * 38,
}


def test_keys_of_any_store_are_right_where_the_file_names_it(tmp_path: Path, capsys) -> None:
    """With another store than R2, no account is needed. A public chain requires R2's lengths."""
    store = ("--store", "https://s3.example.org", "--set", "store.region=eu-central-1")
    assert found(tmp_path / "lab", *store, "--set", "store.addressing=virtual") == 0
    assert "Keys of https://s3.example.org: of up to 512 characters" in capsys.readouterr().out
    argv = ["--network", str(tmp_path / "lab" / "network.toml")]
    config = load_config("miner", argv, environ=AWS, dotenv=None)
    assert (config.store.region, config.store.addressing) == ("eu-central-1", "virtual")
    assert commitment_text(config.store) == " ".join([*AWS.values()][:2])
    with pytest.raises(ConfigError, match=r"R2_READ_ACCESS_KEY_ID not set.*one key of the store"):
        load_config("miner", argv, environ=AWS | {"R2_READ_ACCESS_KEY_ID": ""}, dotenv=None)

    words = ("--name", "lab", "--host", "192.0.2.7", "--netuid", "7", "--data-source", "stdlib")
    own = ("--exchange", "store", "--set", "store.access=own")
    assert main(["init", str(tmp_path / "sub"), *own[:2], *words]) == 2
    assert "--set store.access=own" in capsys.readouterr().err
    assert main(["init", str(tmp_path / "sub"), *own, *words, *store[:2]]) == 0
    said = capsys.readouterr().out
    assert "as long as R2's (account 32" in said and "two keys of the global bucket lab" in said
    argv = ["--network", str(tmp_path / "sub" / "network.toml")]
    with pytest.raises(ConfigError, match=r"READ_ACCESS_KEY_ID has 20.*instead of 32.*public"):
        load_config("miner", argv, environ=AWS | {"R2_ACCOUNT_ID": "a" * 32}, dotenv=None)
