"""Check a founder's model, tokenizer and data, and pin them, before the file is signed.

A mistake in that file can cost every member weeks. So the data and the tokenizer are read, and the
model is built and compared with ``transformers``. Anything that could change later is pinned in the
rules by a commit, a row count or a digest.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from distributed_training.common.proxies import HUB, share
from distributed_training.config import ConfigError
from distributed_training.config.types import DOMAIN_NAME, ConfigAway
from distributed_training.network import HELD_OUT
from distributed_training.node.start import hub_is_away
from distributed_training.protocol.keys import ADAPTERS, FROZEN
from distributed_training.protocol.metadata import with_rules
from distributed_training.protocol.pages import HELD_OUT_PAGES

_HELD_OUT_SHARE = 16  # one in this many pages of a small data set is held out
_HUB_SECONDS = 10.0  # seconds that the hub may take to name a commit
_OF_HUB = (OSError, ValueError, httpx.HTTPError)  # the hub's errors, and that of an invalid name
# The files of a model that are downloaded from the hub.
_OF_BASE = ["*.json", "*.safetensors", "*.model", "*.txt"]


def pin_data(data: dict[str, Any], *, unpinned: bool) -> None:
    """Add to ``[data]`` the commit and row count that its source serves now, unless it has them.

    The standard library's text is not pinned, since it is for trials on one machine. If
    ``unpinned``, nothing is added. In that case, or if ``[data]`` already has a commit or a row
    count, a source that does not answer is no error.

    Raises ConfigError for a source that no miner could read.
    """
    from pydantic import ValidationError

    from distributed_training.config.settings import DataSettings
    from distributed_training.data.page_source import NothingToRead, PageUnavailable
    from distributed_training.data.sources import kind_of, readable

    if kind_of(DataSettings(source=data["source"]).spec).for_trials:
        return
    read = ("source", "dataset", "folder", "text_column")
    given = {key: data[key] for key in read if key in data}
    free = unpinned or bool({"revision", "rows"} & set(data))
    try:
        found = readable(DataSettings(**given))
    except ValidationError:
        return  # a later check refuses the whole file
    except NothingToRead as error:
        raise ConfigError(
            f"no miner could read the data ({error}), so no network was created: correct "
            "--data-source, or data.dataset, data.folder and data.text_column with --set"
        ) from None
    except PageUnavailable as error:
        if free:
            print(f"the data could not be read, so it was not checked: {error}", file=sys.stderr)
            return
        raise ConfigAway(
            f"the data cannot be pinned ({error}), so no network was created: try again, use "
            "--data-source parquet:DIR, or --unpinned to let it change while the network runs"
        ) from None
    if not free:
        data |= {key: value for key, value in vars(found).items() if value is not None}


def choose_pages(data: dict[str, Any], *, beside: Path | None = None) -> dict[str, bytes]:
    """Choose ``data.selection`` 2 for pinned data, so that no two members share a page.

    Also choose how many pages are held out, and pin the files of held-out text. Return the contents
    of local files by the names that the network's file gives them. ``beside``: the folder of
    another network's file, whose held-out text may be named.

    Raises ConfigError.
    """
    named, kept = data.get("held_out"), dict[str, bytes]()
    files = [named] if isinstance(named, str) else named
    if named in ("pages", "python") or not (
        isinstance(files, list) and all(isinstance(file, str) for file in files)
    ):
        files = []
    pinned = [_pin_file(file, data["text_column"], kept, beside) for file in files]
    if pinned:
        data["held_out"] = pinned if isinstance(named, list) else pinned[0]
    if data.get("rows") is not None:
        data.setdefault("selection", 2)
    rows, of_a_page = data.get("rows"), data["rows_per_page"]
    # A value of the wrong type is refused later, when the whole file is checked.
    if data.get("selection") == 2 and type(rows) is type(of_a_page) is int and of_a_page > 0:
        share = rows // of_a_page // _HELD_OUT_SHARE
        # If there is a file of held-out text, hold out only the one page that the draw needs.
        share = 1 if pinned else min(HELD_OUT_PAGES, share)
        data.setdefault("held_out_pages", max(1, share))
    return kept


def _pin_file(named: str, column: str, kept: dict[str, bytes], beside: Path | None) -> str:
    """Return the name of a file of held-out text, or of a domain ``NAME=FILE``, with its digest.

    The name of a local file loses its folder, which members do not have, and its content is added
    to ``kept``. Raises ConfigError if the file cannot be read.
    """
    from distributed_training.data.held_out import file_rows, read_file
    from distributed_training.data.page_source import PageUnavailable

    start = re.match(DOMAIN_NAME, named)
    assert start is not None  # the pattern matches any text, since all its parts are optional
    place, _, digest = named[start.end() :].partition("#")
    try:
        source = place
        if "://" not in place and beside is not None and (beside / HELD_OUT / place).is_file():
            source = str(beside / HELD_OUT / place)
        content = read_file(source, digest or None)
    except PageUnavailable as error:
        raise ConfigAway(f"{error}, so no network was created: try again") from None
    file_rows(place, content, column)
    digest = hashlib.sha256(content).hexdigest()
    if "://" not in place:
        place = re.sub(r"[^\w.-]", "-", Path(place).name)
        if kept.setdefault(place, content) != content:  # if another file has the same name
            place = f"{digest[:8]}-{place}"
            kept[place] = content
    return f"{start[0]}{place}#{digest}"


def pin_tokenizer(table: dict[str, Any]) -> None:
    """Add the commit of a tokenizer at the hub to ``[tokenizer]``, unless it has one.

    If the hub does not name the commit, print a warning, since everybody will use the newest one.
    """
    name = table["name"]
    if name == "bytes" or "revision" in table or Path(name).is_dir():
        return
    try:
        table["revision"] = _commit_at_hub(name)
    except _OF_HUB as error:
        why = " ".join(str(error).split())[:200]
        print(
            f"the hub did not name a commit of the tokenizer {name} ({why}), so it is not pinned: "
            "if it changed there, peers would differ. Add tokenizer.revision and sign the file",
            file=sys.stderr,
        )


def _commit_at_hub(name: str, revision: str = "") -> str:
    """Return the commit of a model or tokenizer at the hub. Raises one of ``_OF_HUB``."""
    from huggingface_hub import HfApi

    share(HUB)
    info = HfApi().model_info(name, revision=revision or None, timeout=_HUB_SECONDS)
    if info.sha is None:
        raise ValueError("it names no commit")
    return info.sha


def refuse_vocabulary(table: Mapping[str, Any], model: Any) -> None:
    """Raise ConfigError for a tokenizer that cannot be used, or has more words than the model.

    A tokenizer at the hub is read only if its commit is known.
    """
    from distributed_training.data.tokenizer import TextTokenizer, build_tokenizer

    name, words = table["name"], model.get("vocab_size") if isinstance(model, dict) else None
    if not isinstance(name, str) or not isinstance(words, int):
        return  # a later check refuses the whole file
    revision = table.get("revision")
    pinned = isinstance(revision, str) and re.fullmatch(r"[0-9a-f]{40}", revision)
    if not (name == "bytes" or Path(name).is_dir() or pinned):
        return
    try:
        with TemporaryDirectory() as folder:
            path, end = build_tokenizer(name, Path(folder), revision=revision)
            needed = TextTokenizer(path, eos_id=end).vocabulary
    except (ValueError, OSError) as error:  # OSError: the disk of the temporary folder fails
        if hub_is_away(error):
            print(f"the tokenizer was not checked: {error}", file=sys.stderr)
            return
        raise ConfigError(f"no network was created: {error}") from None
    if needed > words:
        raise ConfigError(
            f"the tokenizer {name} has {needed} words, but the model's vocab_size is {words}, so "
            "the model could not read its tokens and no network was created: choose a --model "
            "with a larger vocab_size, or another --tokenizer"
        )


def publish_folders(rules: dict[str, Any], target: Path) -> None:
    """Copy a tokenizer and data that are on this machine to ``target``, and name them by digest.

    The validator publishes ``target``, so no member needs the founder's path. Raises ConfigError.
    """
    from distributed_training.config.settings import DataSettings
    from distributed_training.data.sources import kind_of
    from distributed_training.node.published import TOKENIZER_FILES, list_files

    tokenizer, data = rules["tokenizer"], rules["data"]
    spec = DataSettings(source=data["source"]).spec
    try:
        target.mkdir(parents=True, exist_ok=True)
        if "files" not in tokenizer and (source := Path(tokenizer["name"])).is_dir():
            tokenizer["files"] = list_files(source, target, names=TOKENIZER_FILES)
            _compare_tokenizers(source, target / tokenizer["files"])
            tokenizer["name"] = "tokenizer"
        folder = spec.folder if kind_of(spec).open is not None else None
        if folder is not None and "files" not in data and data.get("own") is not True:
            data["files"] = list_files(folder, target)
            data["source"] = f"{spec.kind}:data"
    except OSError as error:
        raise ConfigError(
            f"{error.filename} cannot be copied for the members ({error.strerror}), so no network "
            "was created: free some disk space, or use --unpinned and distribute it yourself"
        ) from None


def _compare_tokenizers(given: Path, copied: Path) -> None:
    """Raise ConfigError if the copied files do not make up the whole tokenizer."""
    from distributed_training.data.tokenizer import build_tokenizer, tokenizer_hash

    found = []
    try:
        for folder in (given, copied):
            with TemporaryDirectory() as scratch:
                path, end = build_tokenizer(str(folder), Path(scratch))
                found.append((tokenizer_hash(path), end))
    except ValueError as error:
        raise ConfigError(f"no network was created: {error}") from None
    if found[0] != found[1]:
        raise ConfigError(
            f"the tokenizer of {given} needs files that are not published, so no network was "
            "created: save it with transformers' save_pretrained, and use that folder"
        )


def read_model(path: Path | None, *, tokenizer: str) -> dict[str, Any]:
    """Return ``[model.config]``: a config.json, a named size, or a tiny model on bytes.

    Raises ConfigError.
    """
    from distributed_training.common.llama import local_llama_config, read_config

    try:
        if path is not None:
            content = read_config(str(path))
        elif tokenizer == "bytes":
            # This model of 1.9 million parameters reads bytes and trains on a laptop. Token 256
            # ends a text.
            ends = {"eos_token_id": 256, "pad_token_id": 256}
            content = local_llama_config(sequence_length=1024) | ends
        else:
            raise ValueError("the tiny model works only with the tokenizer 'bytes'")
        return _without_nulls_of_meaning(content)
    except ValueError as error:
        raise ConfigError(
            f"there is no model to create a network with ({error}), so nothing was created: set "
            "--model to 125m, 1b, 4b or the config.json of a Llama-like model"
        ) from None


def check_model(model: dict[str, Any], length: Any) -> None:
    """Compare ``[model]`` with the model that peers build, and fill in its number of parameters.

    ``length``: tokens in a sequence; if it is not a number, a later check refuses the file.

    Raises ConfigError for a model that our code would compute differently from ``transformers``,
    for a wrong number of parameters, and for a ``length`` above the model's positions.
    """
    from distributed_training.common.memory import ModelShape
    from distributed_training.training.model import blocks_of, build_meta_model, count_parameters

    content = model["config"]
    try:
        # Refuse sizes that would fill the memory, before the model is built.
        ModelShape.from_config(_with_usual_names(content), 1)
        built: Any = build_meta_model(_of_table(model))
        blocks_of(built)
    except (ValueError, AttributeError) as error:
        raise ConfigError(
            f"there is no model to create a network with ({error}), so nothing was signed: use "
            "the config.json of a Llama-like model"
        ) from None
    count, trained = count_parameters(built)
    if model.setdefault("parameters", count) != count:
        raise ConfigError(
            f"model.parameters is {model['parameters']}, but the model has {count}, and memory and "
            "disk are planned by that number, so nothing was signed: correct model.parameters"
        )
    if trained < count and model.setdefault("trainable_parameters", trained) != trained:
        raise ConfigError(
            f"model.trainable_parameters is {model['trainable_parameters']}, but the model trains "
            f"{trained}, and uploads are planned by that number, so nothing was signed: "
            "correct model.trainable_parameters"
        )
    positions = getattr(built.config, "max_position_embeddings", None)
    if isinstance(length, int) and isinstance(positions, int) and length > positions:
        raise ConfigError(
            f"training.sequence_length {length} is more than the model's {positions} positions, so "
            f"nothing was signed: use --set training.sequence_length={positions}, or "
            "correct max_position_embeddings"
        )


def _of_table(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``config.json`` in ``[model]`` with the other rules of that table."""
    return with_rules(
        model["config"], model.get("kind"), model.get("trainable"), model.get("settings")
    )


def find_base(given: Path) -> tuple[Path, str]:
    """Return the folder of ``--from`` and, for a model at the hub, its name and commit.

    Raises ConfigError.
    """
    name, _, revision = str(given).partition("@")
    if given.is_dir() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return given.absolute(), ""
    from huggingface_hub import snapshot_download

    try:
        commit = _commit_at_hub(name, revision)
        folder = snapshot_download(name, revision=commit, allow_patterns=_OF_BASE)
    except _OF_HUB as error:
        why = " ".join(str(error).split())[:200]
        raise ConfigAway(
            f"--from {given} is not a folder here, and the hub does not provide such a model "
            f"({why}), so no network was created: correct the name, or try again"
        ) from None
    return Path(folder), f"{name}@{commit}"


def adapter_rules(lora: str, config: Path, base: str) -> list[tuple[str, Any]]:
    """Return the keys that ``--lora`` adds to ``[model]``; ``base`` is the base's name.

    Raises ConfigError.
    """
    from distributed_training.training.lora import LORA, read_rules

    content = read_model(config, tokenizer="")
    if "quantization_config" in content:
        raise ConfigError(
            f"{config} is for a quantized base, but a network publishes the base's values, so no "
            "network was created: set --from to the model that was quantized"
        )
    return [("model.kind", LORA), ("model.settings", read_rules(lora, content, base))]


def begin_adapters(folder: Path, model: Mapping[str, Any], lora: str) -> Path:
    """Make ``folder`` with the adapters that the network starts with (``--lora``), and return it.

    Raises ConfigError.
    """
    from distributed_training.training import lora as adapters

    try:
        if (source := Path(lora.partition(",")[0]) / ADAPTERS).is_file():
            shutil.copytree(source.parent, folder)
        else:
            adapters.begin(folder, _of_table(model))
    except OSError as error:
        raise ConfigError(
            f"cannot write the adapters ({error.strerror}), so no network was created: check the "
            "disk and its free space"
        ) from None
    return folder


def pin_weights(
    model: dict[str, Any], target: Path, folder: Path | None, start: Path | None
) -> None:
    """Pin the weights that the network starts with by their digest, and copy the frozen ones.

    Args:
        model: The table ``[model]`` of the file.
        target: The folder that the validator publishes.
        folder: The folder of a transformers model to start with; None if the weights are random.
        start: The folder of the trained weights; None if they are random.

    Raises:
        ConfigError: If the weights do not fit the model, or cannot be written to the disk.
    """
    from distributed_training.node.published import list_files
    from distributed_training.training.pretrained import (
        WeightsError,
        digest_weights,
        read_weights,
        write_frozen,
    )

    content = _of_table(model)
    try:
        if start is not None:
            model["weights"] = digest_weights(read_weights(start, content))
        if "trainable_parameters" in model and "frozen" not in model:
            with TemporaryDirectory(dir=target.parent) as made:
                more = None if start == folder else start
                write_frozen(Path(made, FROZEN), content, folder, more)
                target.mkdir(parents=True, exist_ok=True)
                model["frozen"] = list_files(Path(made), target)
    except WeightsError as error:
        raise ConfigError(f"{error}, so no network was created: {error.remedy}") from None
    except OSError as error:
        raise ConfigError(
            f"cannot write the frozen tensors ({error.strerror}), so no network was created: "
            "check the disk and its free space"
        ) from None


def _with_usual_names(content: dict[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` with its sizes under Llama's names too, as transformers maps them.

    Raises ValueError for a model that does not predict the next token.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from distributed_training.training.model import hf_config

    kind = content.get("model_type")
    if kind in CONFIG_MAPPING_NAMES and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(
            f"model_type {kind!r} is not a decoder that predicts the next token, the only kind "
            "that a network trains"
        )
    try:
        read = hf_config(content)
    except Exception:  # noqa: BLE001 - building the model reports what transformers refuses
        return content
    if "hidden_size" not in (named := type(read).attribute_map):
        return content
    usual = {name: getattr(read, name, None) for name in (*named, "vocab_size")}
    usual["intermediate_size"] = getattr(read, "n_inner", None) or 4 * read.hidden_size  # GPT-2
    return {name: value for name, value in usual.items() if value is not None} | content


def _without_nulls_of_meaning(content: dict[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` that describes the same model without nulls.

    For an absent key, transformers uses a default, which a null overrides. For example, a Mistral
    model without a window would get one of 4096 tokens if its null were left out. Raises ValueError
    for such a null, unless a value can replace it.
    """
    from distributed_training.training.model import hf_config

    found = dict(_without_nulls(content))
    for key in content:
        if content[key] is not None or key.endswith("_token_id"):
            continue
        try:
            read = getattr(hf_config(found), key, None)
            meant = getattr(hf_config(found | {key: None}), key, None)
        except Exception:  # noqa: BLE001 - building the model reports what transformers refuses
            continue
        positions = content.get("max_position_embeddings")
        if meant == read or not read:  # null means the same as an absent key, or as false or 0
            continue
        if key != "sliding_window" or not isinstance(positions, int):
            raise ValueError(
                f"its {key} is null, which the network's file cannot express, and without it "
                f"transformers uses {read!r:.50}: set that key to a value"
            )
        found[key] = positions  # no sequence is longer
    return found


def _without_nulls(value: Any) -> Any:
    """Return JSON without its nulls, which TOML does not have."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        if None in value:
            raise ValueError("it has a list that contains a null")
        return [_without_nulls(inner) for inner in value]
    return value
