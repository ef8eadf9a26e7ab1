"""Compare adapters that three members train on their own text with single ones, and one on all.

    python -m bench.lora                        3 million parameters, three seeds: an hour of a core
    python -m bench.lora --hidden 512 --layers 6 --steps 50    about 20 million
    python -m bench.lora --seeds 1 --ranks 8 --ways B          a quick look

Texts: the Python library, the C headers of /usr/include, the English manuals of /usr/share/man. One
file in ten is held out, of each text. A member's text and batches are read and cut as a miner does.
First a base learns from all three; it is saved as a founder gives it to ``--from``. Then members
train adapters of rank 8 or 16, both matrices or only B, on the base in bf16. Uploads and update are
the product's own files of 4 bits, merged by the validator's code. The outer rule is the mean of the
members' adapters. Members and single workers take equal steps; the one worker takes as many, each
on a batch of every text.
"""

from __future__ import annotations

import gzip
import itertools
import statistics
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.common import alone, parser, some_of, table
from distributed_training.common.files import write_bytes
from distributed_training.common.llama import llama_config
from distributed_training.config.settings import DataSettings, TrainingSettings
from distributed_training.data.block_builder import WorkerSpec
from distributed_training.data.own_text import OwnTokens
from distributed_training.data.page_source import Counts
from distributed_training.data.tokenizer import BYTE_VOCABULARY, TextTokenizer, build_tokenizer
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import with_rules
from distributed_training.protocol.pages import PageDraw
from distributed_training.protocol.types import UPDATE_CODEC, Base, Update
from distributed_training.protocol.update_file import (
    Header,
    UpdateFile,
    UpdateLayout,
    digest_rows,
    digest_weights,
    rows_and_columns,
)
from distributed_training.scoring.evaluator import EvaluationModel
from distributed_training.training.lora import begin, read_rules
from distributed_training.training.model import write_config
from distributed_training.training.pretrained import read_weights, write_frozen
from distributed_training.training.trainer import Trainer
from distributed_training.validator.merge import NESTEROV, OuterState, Rule, merge
from testbed import first_weights

CONTEXT, BATCH = 128, 8
BYTES, HELD_OUT_BYTES, HELD_OUT = 3_000_000, 120_000, 96  # of a text; sequences
GOAL = 0.01  # above the worker on all texts

TEXTS = {
    "python": (Path(sysconfig.get_paths()["stdlib"]), "*.py"),
    "headers": (Path("/usr/include"), "*.h"),
    "manuals": (Path("/usr/share/man"), "man?/*.gz"),
}


def write_texts(folder: Path) -> None:
    """Write each text as files to train on, and one of what is held out. Raises SystemExit."""
    for name, (place, pattern) in TEXTS.items():
        files = [f for f in sorted(place.rglob(pattern)) if "site-packages" not in f.parts]
        # By a fixed draw: neighbours in the alphabet are alike.
        files = [files[at] for at in np.random.default_rng(1).permutation(len(files))]
        sizes = {False: 0, True: 0}
        (folder / name).mkdir()
        with (folder / f"{name}.held").open("wb") as held_out:
            for number, file in enumerate(files):
                held = number % 10 == 0
                if sizes[held] >= (HELD_OUT_BYTES if held else BYTES):
                    continue
                data = file.read_bytes()
                data = gzip.decompress(data) if file.suffix == ".gz" else data
                # The beginning: some are generated, and as large as all of a text.
                text = data[:40_000].decode(errors="ignore").encode()
                sizes[held] += len(text)
                if held:
                    held_out.write(text)
                elif text:
                    write_bytes(folder / name / f"{number}.txt", text, durable=False)
        if sizes[False] < BYTES // 3 or sizes[True] < HELD_OUT_BYTES // 2:
            raise SystemExit(f"{place} has too little text for {name}: {sizes}")


def batches(text: Path, tokenizer: tuple[Path, int], *, seed: int) -> Iterator[Tensor]:
    """Yield micro-batches of a member's own text, as its data workers cut them."""
    settings = DataSettings(own=True, own_text=(str(text),), pages_per_block=1, rows_per_page=64)
    spec = WorkerSpec(
        settings=settings, uid=0, rank=0, world_size=1, sequence_length=CONTEXT,
        tokenizer_path=tokenizer[0], eos_id=tokenizer[1], folder=text.parent,
        draw_pages=PageDraw("bench", "bench", rows_per_page=64, held_out_pages=0),
    )  # fmt: skip
    source, draw = OwnTokens(spec, Counts()), np.random.default_rng(seed)
    for place in itertools.count(1000 * seed):
        tokens = source.block(place, 1).tokens
        cut = tokens[: len(tokens) // CONTEXT * CONTEXT].reshape(-1, CONTEXT)
        cut = cut[draw.permutation(len(cut))].astype(np.int64)
        yield from torch.from_numpy(cut).split(BATCH)[:-1]


def trainer(
    seed: int, *, batch: int, model: dict[str, Any], rate: float, frozen: Path | None = None
) -> Trainer:
    made = Trainer(
        settings=TrainingSettings(
            local_batch_size_train=BATCH,
            local_batch_size_train_effective=batch,
            sequence_length=CONTEXT,
            learning_rate=rate,
            warmup_steps=30,
            total_steps=100_000,
            seed=seed,
        ),
        model_config=model,
        device=torch.device("cpu"),
        say=lambda line: None,
        frozen=frozen,
    )
    first_weights.begin(made)
    return made


def inner_steps(made: Trainer, texts: list[Iterator[Tensor]], steps: int) -> None:
    for _ in range(steps):
        for text in texts:
            made.add_micro_batch(next(text))


def loss(
    made: Trainer, held: dict[str, Tensor], config: dict[str, Any], frozen: Path | None = None
) -> float:
    """Return the mean of the held-out losses on each text, in nats per byte."""
    model = EvaluationModel(model_config=config, device=torch.device("cpu"), frozen=frozen)
    model.load(made.outer.current())
    return statistics.mean(model.loss(text) for text in held.values())


def read_held_out(folder: Path, tokenizer: tuple[Path, int]) -> dict[str, Tensor]:
    """Return the held-out sequences of each text."""
    made, held = TextTokenizer(tokenizer[0], eos_id=tokenizer[1]), {}
    for name in TEXTS:
        text = (folder / f"{name}.held").read_text()
        tokens = made.encode_rows([text], max_length=10**9).astype(np.int64)
        starts = np.linspace(0, len(tokens) - CONTEXT, HELD_OUT).astype(int)
        held[name] = torch.from_numpy(np.stack([tokens[s : s + CONTEXT] for s in starts]))
    return held


def exchange(
    members: Sequence[Trainer], state: OuterState, folder: Path, outer_step: int
) -> tuple[OuterState, float]:
    """Let ``members`` take an outer step; return the state after it, and the bytes of an upload."""
    schema, uploads, path = members[0].schema, [], folder / "update"

    def header(kind: Literal["upload", "update"]) -> Header:
        return Header(
            kind=kind, run_id="bench", outer_step=outer_step, serial=1, hotkey="bench",
            start="0" * 64, codec=UPDATE_CODEC, inner_steps=1, tokens=1,
        )  # fmt: skip

    for number, member in enumerate(members):
        own = folder / f"upload-{number}"
        written = member.write_upload(own, header("upload"), sign=lambda _: bytes(64))
        written.join()
        if written.error is not None:
            raise written.error
        uploads.append(UpdateFile.reopen(own, schema))
    path.unlink(missing_ok=True)
    layout, rule = UpdateLayout.of(schema, header("update")), Rule(NESTEROV, 1.0, 0.0)
    _, state = merge(
        uploads, [1.0] * len(uploads), state, rule, path=path, layout=layout,
        sign=lambda _: bytes(64),
    )  # fmt: skip
    rows = (each.reshape(rows_and_columns(each.shape)) for each in state.weights)
    digest = digest_weights(map(digest_rows, rows))
    for member, upload in zip(members, uploads, strict=True):
        member.prepare_update(Update(outer_step + 1, path, Base.MERGED, upload.path, digest))
        member.commit_outer_step()
    return state, statistics.mean(upload.layout.body_bytes for upload in uploads)


class Adapters:
    """One way to train adapters: of one rank, both matrices or only B."""

    def __init__(
        self, base: Path, config: dict[str, Any], way: str, rank: int, folder: Path
    ) -> None:
        rules = read_rules(f"r={rank},alpha={2 * rank},train={way},dtype=bfloat16", config)
        self.config = with_rules(config, "lora", None, rules)
        self.way, self.rank, self.folder = way, rank, folder
        self.frozen = folder / "frozen"
        begin(folder / "adapters", self.config)
        write_frozen(self.frozen, self.config, base, folder / "adapters")
        self.weights = [*read_weights(folder / "adapters", self.config)]

    def trainer(self, seed: int, *, batch: int, rate: float) -> Trainer:
        made = trainer(seed, batch=batch, model=self.config, frozen=self.frozen, rate=rate)
        with torch.no_grad():
            for shard, weights in zip(made.shards, self.weights, strict=True):
                shard.local.copy_(weights.view_as(shard.local))
        made.begin_epoch(0)
        return made


def make_base(
    folder: Path, config: dict[str, Any], texts: list[Iterator[Tensor]], steps: int
) -> Trainer:
    """Train a base on all texts, and write it as transformers reads it."""
    made = trainer(0, batch=BATCH * len(texts), model=config, rate=1e-3)
    inner_steps(made, texts, steps)
    folder.mkdir()
    values = zip((name for name, _ in made.schema), made.outer.current(), strict=True)
    save_file(dict(values), folder / keys.MODEL, metadata=keys.SAFETENSORS_METADATA)
    write_config(folder, config)
    return made


def main() -> None:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--seeds", type=int, default=3)
    add("--rounds", type=int, default=5)
    add("--steps", type=int, default=20, help="inner steps of a round")
    add("--hidden", type=int, default=256)
    add("--layers", type=int, default=4)
    add("--base-steps", type=int, default=150)
    add("--rate", type=float, default=2e-3, help="learning rate of adapters")
    add("--ranks", type=some_of(("4", "8", "16", "32")), default=["8", "16"])
    add("--ways", type=some_of(("B", "both")), default=["B", "both"])
    options = arguments.parse_args()
    config = llama_config(
        hidden=options.hidden, layers=options.layers, heads=8, kv_heads=8,
        intermediate=options.hidden * 8 // 3 // 32 * 32, vocab=BYTE_VOCABULARY,
        max_positions=CONTEXT,
    )  # fmt: skip
    rows: list[tuple[object, ...]] = []
    with alone(), tempfile.TemporaryDirectory(prefix="bench-") as made:
        folder = Path(made)
        write_texts(folder)
        tokenizer = build_tokenizer("bytes", folder / "tokenizer")
        held = read_held_out(folder, tokenizer)

        def read(name: str, seed: int) -> Iterator[Tensor]:
            return batches(folder / name, tokenizer, seed=seed)

        texts = [read(name, 99) for name in TEXTS]
        base = make_base(folder / "base", config, texts, options.base_steps)
        count = sum(each.local.numel() for each in base.shards)
        print(f"base of {count / 1e6:.1f} million: {loss(base, held, config):.4f}", flush=True)
        del base
        kinds = []
        for way, rank in itertools.product(options.ways, map(int, options.ranks)):
            (place := folder / f"{way}-{rank}").mkdir()
            kinds.append(Adapters(folder / "base", config, way, rank, place))
        for seed, kind in itertools.product(range(1, options.seeds + 1), kinds):
            rows.append(of_seed(kind, read, held, seed, options))
            print(*rows[-1], flush=True)
    table(
        ("train", "r", "seed", "merged", "best single", "against it", "one on all", "against it",
         "bytes per value"), rows,
    )  # fmt: skip
    print(f"goals: below the best single one; at most {GOAL:.0%} above the one on all")


def of_seed(
    adapters: Adapters, read: Any, held: dict[str, Tensor], seed: int, options: Any
) -> tuple[object, ...]:
    """Return the row of one seed: mean losses on the three texts, of merged adapters and others."""
    steps, rate, trained = options.steps, options.rate, (adapters.config, adapters.frozen)
    members = [adapters.trainer(seed, batch=BATCH, rate=rate) for _ in TEXTS]
    state, sent = OuterState(adapters.weights), 0.0
    texts = [read(name, seed) for name in TEXTS]
    for step in range(options.rounds):
        for member, text in zip(members, texts, strict=True):
            inner_steps(member, [text], steps)
        state, size = exchange(members, state, adapters.folder, step)
        sent += size
    merged = loss(members[0], held, *trained)
    values = sum(each.numel() for each in state.weights) * options.rounds
    single = []
    for name in TEXTS:
        one = adapters.trainer(seed, batch=BATCH, rate=rate)
        inner_steps(one, [read(name, seed)], options.rounds * steps)
        single.append(loss(one, held, *trained))
    one = adapters.trainer(seed, batch=BATCH * len(TEXTS), rate=rate)
    inner_steps(one, [read(name, seed) for name in TEXTS], options.rounds * steps)
    of_all = loss(one, held, *trained)
    return (
        adapters.way, adapters.rank, seed, f"{merged:.4f}",
        f"{min(single):.4f}", f"{merged / min(single) - 1:+.2%}", f"{of_all:.4f}",
        f"{merged / of_all - 1:+.2%}", f"{sent / values:.3f}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
