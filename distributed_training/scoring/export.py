"""Export the network's model as a folder that ``transformers`` loads.

    dt-export FOLDER [options] [flags of the validator]...

    dt-export model                                  the newest state of the network's bucket
    dt-export model --subnet runs/localnet           the state of a running local subnet
    dt-export model --from runs/localnet/validator   the state in a run folder
    dt-export model --sample "def main" --eval       also print text and held-out perplexity

    --outer-step N     the outer step to export (default: the newest)
    --from FOLDER      read a run folder instead of the network
    --subnet FOLDER    the run folder of a local subnet
    --merge            merge adapters into their base, as one whole model
    --sample TEXT      continue this text with the exported model
    --tokens N         the most tokens that --sample adds (64)
    --eval [N]         loss and perplexity on N sequences of the held-out text (16)

The export writes config.json, model.safetensors (float32) and the tokenizer's files into FOLDER,
all or nothing, and a model card, README.md. If the network trains adapters, it writes the files
that PEFT reads, without the base; --sample and --eval then need --merge. Send FOLDER to the Hugging
Face Hub with `hf upload OWNER/NAME FOLDER`. Load it with
``AutoModelForCausalLM.from_pretrained(FOLDER)``, or with lm-evaluation-harness's ``--model hf
--model_args pretrained=FOLDER``. Exit status: 0 exported, 1 the network or the state could not be
read, 2 a flag is wrong.
"""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed_training import NO_HELP
from distributed_training.config import OPERATORS_FILE, Config, ConfigError, exit_with, load_config
from distributed_training.config.installed import require
from distributed_training.config.loader import Parser, argument, ranged
from distributed_training.config.model import extras_of_network
from distributed_training.config.types import File
from distributed_training.scoring.command import subnet_flags

if TYPE_CHECKING:
    import torch


class ExportError(RuntimeError):
    """The state cannot be exported now; the text says why and what to do."""


def build_parser() -> Parser:
    parser = Parser(add_help=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("folder", type=argument(File), nargs="?")
    parser.add_argument("--outer-step", type=ranged(0, 10**9))
    parser.add_argument("--from", type=argument(File), dest="source")
    parser.add_argument("--subnet", type=argument(File))
    parser.add_argument("--merge", action="store_true")
    parser.add_argument("--sample", type=argument(str))
    parser.add_argument("--tokens", type=ranged(1, 4096), default=64)
    parser.add_argument("--eval", type=ranged(2, 10**6), nargs="?", const=16, dest="sequences")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options, flags = build_parser().parse_known_args(argv)
    if options.help:
        print(__doc__ or NO_HELP)
        return 0
    try:
        # Check the folder before anything is fetched: otherwise a wrong folder would be refused
        # only after a download of gigabytes.
        folder: Path | None = options.folder
        if folder is None:
            raise ConfigError("no folder was given, so nothing was exported: dt-export FOLDER")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(
                f"{folder} already exists, so nothing was exported: choose a folder that does not"
            )
        if not folder.absolute().parent.is_dir():
            raise ConfigError(
                f"{folder.absolute().parent} does not exist, so nothing was exported: create it"
            )
        # Put these first, so that the same flag on the command line wins.
        given = ["--neuron.device", "cpu", *subnet_flags(options.subnet)]
        # A run folder has what the network publishes: its tokenizer and its text.
        if options.source is not None and (options.source / "published").is_dir():
            given += ["--neuron.run_folder", str(options.source)]
        given += flags
        config = load_config("validator", given, file=OPERATORS_FILE, check=False)
        adapters = config.network.head.kind == "lora"
        if adapters and not options.merge and (options.sequences or options.sample):
            raise ConfigError(
                "--eval and --sample need the whole model, but this network trains adapters, so "
                "nothing was exported: add --merge"
            )
        if options.source is None:
            require(**extras_of_network(config))
    except ConfigError as error:
        return exit_with(error)
    # Do the slow imports only once the flags are known to be right.
    from distributed_training.chain.base import ChainError
    from distributed_training.node.start import NetworkFailure
    from distributed_training.scoring.evaluator import DataUnavailable
    from distributed_training.store.errors import StoreError

    try:
        with ExitStack() as stack:
            source = options.source
            if source is None:
                source = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder.parent)))
                fetch_weights(config, source, options.outer_step)
            step, place = find_weights(source, options.outer_step)
            export_model(config, place, folder, merge=options.merge)
        print(f"exported the model of outer step {step} to {folder}")
        figures = ""
        if options.sequences:
            loss, text = held_out_loss(config, folder, options.sequences)
            figures = f"held-out loss {loss:.4f}, perplexity {math.exp(loss):.2f}, on {text}"
            print(figures)
        card = model_card(config, folder.name, step, figures, merge=options.merge)
        (folder / "README.md").write_text(card)
        if options.sample:
            print(sample(folder, options.sample, tokens=options.tokens))
    except ConfigError as error:
        return exit_with(error)
    except (ExportError, NetworkFailure, ChainError, StoreError, DataUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def fetch_weights(config: Config, folder: Path, outer_step: int | None) -> None:
    """Fetch whole weights from the network's bucket, and arrange them as in a run folder.

    Raises ConfigError, ChainError, StoreError, OSError.
    """
    from distributed_training.scoring.verdicts import SignedChain, open_bucket
    from distributed_training.store.bucket_reader import BucketReader

    with ExitStack() as stack:
        chain = SignedChain(config, BucketReader(open_bucket(config, stack)), folder)
        found = chain.fetch_weights(folder, outer_step)
    if chain.state.outer_step > found:
        print(f"the network is at outer step {chain.state.outer_step}; whole weights: {found}")


def find_weights(folder: Path, outer_step: int | None) -> tuple[int, Path]:
    """Return the outer step (None: the newest) of a run folder's weights, and their folder.

    Raises ExportError if there are none.
    """
    from distributed_training.protocol import keys
    from distributed_training.store.bucket_reader import states

    folder = folder / "global" if (folder / "global").is_dir() else folder
    found = {step: path for step, path in states(folder) if (path / keys.MODEL).exists()}
    step = max(found, default=0) if outer_step is None else outer_step
    if step not in found:
        there = f"those of outer steps {', '.join(map(str, found))}" if found else "none"
        raise ExportError(
            f"{folder} has no weights of outer step {step} ({there} are there), so nothing was "
            "exported: omit --outer-step for the newest weights, or --from for the network's"
        )
    return step, found[step]


def export_model(config: Config, place: Path, folder: Path, *, merge: bool = False) -> None:
    """Export the model whose configuration and weights are in ``place`` to ``folder``.

    ``merge``: whether to merge adapters into their base, as one whole model. ``folder`` appears
    only after everything was written and checked: no tensor is missing, and each is finite and has
    the shape that config.json implies. Raises ExportError, ConfigError.
    """
    from distributed_training.data.tokenizer import build_tokenizer, load_pretrained
    from distributed_training.protocol import keys
    from distributed_training.training.model import build_meta_model, kind_of, schema_of
    from distributed_training.training.weights import read_model_config

    try:
        published = read_model_config(place)
        model = build_meta_model(published)
        files = [(place / keys.MODEL, schema_of(model))]
        if fixed := schema_of(model, frozen=True):
            files.append((_frozen_file(config), fixed))
        # Write next to the folder: on the same disk a move is a rename, which succeeds completely
        # or not at all.
        with tempfile.TemporaryDirectory(dir=folder.absolute().parent, prefix=".export-") as made:
            part = Path(made, "model")
            part.mkdir()
            # Check each tensor, since transformers makes up a missing tensor and only warns.
            kind_of(published).save(part, published, files, merge=merge)
            name = config.miner.global_tokenizer_name
            if name == "bytes":
                build_tokenizer(name, part)
            else:
                pretrained = load_pretrained(name, revision=config.tokenizer_revision)
                pretrained.save_pretrained(part)
            # Remove an empty folder, since shutil.move would put the model inside it.
            if folder.exists():
                folder.rmdir()
            shutil.move(part, folder)
    except (ValueError, OSError) as error:
        raise ExportError(f"the weights in {place} cannot be exported: {error}") from None


def _frozen_file(config: Config) -> Path:
    """Return the file of the network's frozen tensors; fetch it if it is missing.

    Raises ConfigError, NetworkFailure.
    """
    from distributed_training.node.published import fetch_published
    from distributed_training.scoring.verdicts import open_bucket
    from distributed_training.store.bucket_reader import BucketReader

    if (path := config.frozen_weights) is None:
        raise ConfigError(
            "a part of this model is frozen, and only the network's file names that part, so "
            "nothing was exported: name that file with --network"
        )
    with ExitStack() as stack:
        fetch_published(config, lambda: BucketReader(open_bucket(config, stack)), wanted={"model"})
    return path


_FOLDER = "FOLDER-OF-THE-BASE"
_LOAD_MODEL = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{0}")
tokenizer = AutoTokenizer.from_pretrained("{0}")
"""
_LOAD_ADAPTERS = """from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained({1})
model = PeftModel.from_pretrained(base, "{0}")
tokenizer = AutoTokenizer.from_pretrained("{0}")
"""


def model_card(
    config: Config, name: str, outer_step: int, figures: str, *, merge: bool = False
) -> str:
    """Return the model's ``README.md``: what the model is, and how to load it.

    ``merge``: whether adapters were merged into their base.
    """
    network, library, load = config.network, "transformers", _LOAD_MODEL.format(name)
    if network.head.kind == "lora" and not merge:
        base, _, commit = str((network.head.settings or {}).get("base", "")).partition("@")
        of_base = f'"{base}", revision="{commit}"' if commit else f'"{base or _FOLDER}"'
        library, load = "peft", _LOAD_ADAPTERS.format(name, of_base)
    rows = {
        "Network": f"{network.head.name}, version {network.head.version} of its file",
        "Run": network.values["run_id"],
        "Signed by": network.values["chain.master_hotkey"],
        "Parameters": network.head.parameters,
        "Outer step": outer_step,
        "Tokenizer": config.miner.global_tokenizer_name,
    }
    data = config.data
    source = data.dataset if data.source == "hub" else data.source
    rows |= {"Data": "each member's own text" if data.own else source}
    rows |= {"Measured": figures} if figures else {}
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return f"""---
library_name: {library}
pipeline_tag: text-generation
tags: [distributed-training]
---
# {name}

Trained by several parties over the internet, who averaged their pseudo-gradients.

| | |
|---|---|
{table}

```python
{load}```
"""


def sample(folder: Path, prompt: str, *, tokens: int) -> str:
    """Return ``prompt`` and its continuation by the exported model in ``folder``.

    The continuation has at most ``tokens`` tokens, and no more than fit the model's context. It is
    sampled at temperature 0.8 with seed 0.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # Never load from the hub: a file that the export lacks must be an error here.
    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    room = model.config.max_position_embeddings
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    # Keep the end of a long prompt, since context and new tokens share max_position_embeddings.
    ids = ids[:, -max(1, room - tokens) :]
    # Use the seed only here: a caller in the same process keeps its random state.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=min(tokens, room - ids.shape[1]),
            do_sample=True,
            temperature=0.8,
            top_k=50,
            pad_token_id=tokenizer.eos_token_id,
        )
    new: torch.Tensor = out[0, ids.shape[1] :]
    return prompt + str(tokenizer.decode(new, skip_special_tokens=True))


def held_out_loss(config: Config, folder: Path, sequences: int) -> tuple[float, str]:
    """Return the mean cross-entropy of the exported model, in nats per token, and the text's name.

    The text is ``sequences`` sequences of the network's held-out text. Raises NetworkFailure if the
    text cannot be read now.
    """
    import torch

    from distributed_training.common.files import read_json_object
    from distributed_training.data.held_out import held_out_batches, mean_loss
    from distributed_training.data.page_source import PageUnavailable
    from distributed_training.node.start import NetworkFailure, fetch_tokenizer
    from distributed_training.protocol import keys, lines
    from distributed_training.scoring.evaluator import EvaluationModel
    from distributed_training.training.weights import load_weights

    content = read_json_object(folder / keys.CONFIG) or {}
    model = EvaluationModel(model_config=content, device=torch.device("cpu"))
    model.load(load_weights(folder / keys.MODEL, model.schema))
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = fetch_tokenizer(config, Path(scratch))
        try:
            texts = held_out_batches(config, *tokenizer, sequences=sequences)
        except PageUnavailable as error:
            raise NetworkFailure(f"the held-out text cannot be read: {error}") from None
    losses = {name: model.loss(text) for name, text in texts.items()}
    return (
        mean_loss(losses, config.domains),
        config.held_out_name + lines.describe_losses(losses),
    )


if __name__ == "__main__":
    sys.exit(main())
