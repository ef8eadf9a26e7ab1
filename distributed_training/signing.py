"""Sign a network's file as its next version, after the checks that a member's start makes."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from distributed_training.common.files import read_json_object, write_bytes
from distributed_training.config import Config, ConfigError, rules_at
from distributed_training.config.model import check_exchange, check_schedule
from distributed_training.config.settings import ChainSettings
from distributed_training.config.versions import describe, parse_version
from distributed_training.founder import MASTER
from distributed_training.founding_checks import check_model
from distributed_training.network import (
    FORMATS,
    VERSION_KEYS,
    VERSIONS,
    NetworkFileError,
    digest_of,
    flatten,
    is_identity,
    read_text,
    refuse_format,
    signed,
    tree_of,
    without_blocks,
)
from distributed_training.registry.command import FIXED

_HIGHEST_RATE = 0.1  # the highest sensible learning rate for AdamW and Muon


def sign(options: argparse.Namespace, text: str | None = None) -> None:
    """Sign the file as its next version. Raises ConfigError.

    ``text``: what to sign instead of the file's text.
    """
    from distributed_training.chain.identity import load_wallet

    path: Path = options.file
    wallets = path.absolute().parent / "wallets"
    master = load_wallet(ChainSettings(wallet_path=str(wallets), wallet_name=MASTER))
    text = without_blocks(text or read_text(path))
    flat = flatten(tree_of(text))
    refuse_format(flat)
    named = flat.get("chain.master_hotkey")
    if named != master.ss58:
        raise ConfigError(
            f"{path} names the master {named}, but the wallet in {wallets} is {master.ss58}, so "
            "nothing was signed: put the master's wallet there"
        )
    if "model.config" in flat:
        model = {key.removeprefix("model."): flat[key] for key in flat if key.startswith("model.")}
        check_model(model, flat.get("training.sequence_length"))
    flat["format"] = FORMATS[-1]  # the same network in the newest format
    head = {"format": flat["format"], **_next_version(options, flat)}
    after = write_file(path, signed(text, master.hotkey, head=head)).network
    assert after is not None
    print(after.line)
    if after.head.previous is not None:
        before = read_text(path.absolute().parent / VERSIONS / f"{after.head.version - 1}.toml")
        print(describe(parse_version(before, after), after))


def decay(options: argparse.Namespace) -> None:
    """Write the two keys for a decay into the file, and sign the file. Raises ConfigError."""
    path, begins = options.file, options.begins
    outer_step, inner_steps = _place_of_the_validator(path)
    text = read_text(path)
    flat = flatten(tree_of(text))
    before = flat.get("from_outer_step", 0)
    if not isinstance(before, int):
        raise ConfigError(f"from_outer_step {before!r:.50} in {path} is no number: remove the line")
    at = _first_outer_step(options, outer_step, before)
    if begins is None and outer_step and inner_steps:
        begins = round(inner_steps * max(1.0, at / outer_step))  # at the pace so far
    if not begins:
        raise ConfigError(
            f"{path.absolute().parent / 'validator'} does not say at which inner step the network "
            "is, so nothing was signed: set --from to total_inner_steps from the newest "
            "outer/N/manifest.json in the global bucket"
        )
    added = {"training.decay_from": begins, "training.decay_steps": options.steps}
    wanted = flat | added
    text = re.sub(r"(?m)^[ \t]*decay_(from|steps)[ \t]*=.*\n", "", text)
    lines = "".join(f"{key.partition('.')[2]} = {value}\n" for key, value in added.items())
    text = re.sub(r"(?m)^\[training\].*\n", lambda head: head[0] + lines, text, count=1)
    # Check the result, because the patterns do not match every layout that TOML allows.
    if flatten(tree_of(text)) != wanted:
        raise ConfigError(
            f"{path} is not laid out as dt-network init writes it, so nothing was signed: put "
            f"{' and '.join(f'{key} = {value}' for key, value in added.items())} into it, and run "
            "dt-network sign"
        )
    sign(options, text)
    print(
        f"the learning rate will fall to 0 from inner step {begins} of the network to inner step "
        f"{begins + options.steps}. Weights, outer step and the place in the schedule stay"
    )


def _next_version(options: argparse.Namespace, flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that link the file to its previous version. Raises ConfigError."""
    path: Path = options.file
    folder = path.absolute().parent / VERSIONS
    kept = {int(p.stem): p for p in folder.glob("*.toml") if p.stem.isdecimal()}
    if not kept:
        if flat.get("version") != 1:
            raise ConfigError(
                f"{path} is version {flat.get('version')}, but {folder} has no earlier one, so "
                "nothing was signed: restore that folder, or set version = 1 for a new network"
            )
        return dict.fromkeys(VERSION_KEYS) | {"version": 1}
    newest = max(kept)
    before = flatten(tree_of(read_text(kept[newest])))
    try:
        refuse_format(before)
    except NetworkFileError as error:
        raise ConfigError(
            f"{kept[newest]}: {error}, so nothing was signed: {error.remedy}"
        ) from None
    if flat.get("exchange") != before.get("exchange"):
        raise ConfigError(
            f"exchange is not the one of version {newest}, and members of the two cannot "
            "meet, so nothing was signed: create a new network with dt-network succeed"
        )
    apart = {*VERSION_KEYS, "signature"}
    changed = {k for k in flat.keys() | before.keys() if flat.get(k) != before.get(k)} - apart
    for key in sorted(filter(is_identity, changed)):
        raise ConfigError(
            f"{key} differs from version {newest}, so this would be another network and "
            "nothing was signed: create that network with dt-network init"
        )
    if flat.get("chain.kind") == "registry" and (fixed := changed & {*FIXED.values()}):
        raise ConfigError(
            f"{min(fixed)} differs from version {newest}, but a registry keeps for good what it "
            "was created with, so nothing was signed: restore the old value"
        )
    # Nothing would publish the new files, so members would keep reading the files that they have.
    if "data.files" in changed or ("data.files" in flat and "data.source" in changed):
        raise ConfigError(
            f"the data differs from version {newest}, but data.files are published only when a "
            "network is created, so nothing was signed: restore data.source and data.files, or "
            "continue with the new data by dt-network succeed"
        )
    holds = before.get("from_outer_step", 0)
    if not changed and options.at in (None, holds):
        return {key: before.get(key) for key in VERSION_KEYS}
    if not changed and options.at > holds:
        raise ConfigError(
            f"version {newest} has these rules and is in force from outer step {holds} on, so one "
            f"from {options.at} on would not delay them, and nothing was signed: undo the change "
            f"with --at {holds}, and make it again with --at {options.at}"
        )
    return {
        "version": newest + 1,
        "previous": f"sha256:{digest_of(before)}",
        "from_outer_step": _first_outer_step(options, _place_of_the_validator(path)[0], holds),
    }


def _first_outer_step(options: argparse.Namespace, now: int | None, before: int) -> int:
    """Return the outer step from which a new version is in force.

    ``now``: the network's outer step, if known. ``before``: the outer step from which the previous
    version is in force. Raises ConfigError.
    """
    if options.at is None and now is None:
        raise ConfigError(
            f"the validator's run folder is not next to {options.file}, so nothing was signed: "
            "set --at to the outer step from which the new version is to be in force, later than "
            "the network's"
        )
    if options.at is None:
        # A round may be in progress, so start two outer steps later, but not before the previous
        # version is in force.
        return max(0 if now == -1 else int(now or 0) + 2, before)
    if now is not None and options.at <= now:
        raise ConfigError(
            f"--at {options.at} is past: the network is at outer step {now}, so nothing was "
            f"signed: choose {now + 1} or later"
        )
    return int(options.at)


def _place_of_the_validator(path: Path) -> tuple[int | None, int | None]:
    """Return the outer step and inner steps of the newest global state on the founder's machine.

    Both are None if the validator's run folder, next to the file, has no global state. In a folder
    that is still as ``init`` made it, the outer step is -1.
    """
    from distributed_training.store.bucket_reader import states

    folder = path.absolute().parent / "validator"
    found = []
    with suppress(OSError):
        found = states(folder / "global")
    if not found:
        return (-1 if folder.is_dir() and not (folder / "ledger.json").exists() else None), None
    outer_step = found[-1][0]
    manifest = read_json_object(folder / "global" / "signed" / f"{outer_step}.json") or {}
    return outer_step, manifest.get("total_inner_steps")


def write_file(path: Path, text: str) -> Config:
    """Write a network's file if the network's programs accept it.

    Returns the configuration of a miner that uses the file. Raises ConfigError if they do not
    accept it; then the old file stays.
    """
    # Write the trial file into the same folder, since a rename works only within one disk.
    trial = path.with_name(f".{path.name}")
    write_bytes(trial, text.encode())
    try:
        config = rules_at(trial)
        problems = [*check_schedule(config), *check_exchange(config)]
        rate = config.training.learning_rate
        name = {"adamw": "AdamW", "muon": "Muon"}.get(config.training.optimizer)
        if name and rate > _HIGHEST_RATE:
            problems.append(
                f"training.learning_rate {rate} is above {_HIGHEST_RATE}, with which {name} trains "
                "no model, so nothing was signed: use a rate such as 2.5e-4"
            )
        if problems:
            raise ConfigError(problems[0])
        kept = path.absolute().parent / VERSIONS
        kept.mkdir(exist_ok=True)
        # Write the copy first, because a version without a copy could be signed a second time.
        write_bytes(kept / f"{config.network.head.version}.toml", text.encode())
        os.replace(trial, path)
    except ConfigError as error:
        raise ConfigError(str(error).replace(str(trial), str(path))) from None
    finally:
        trial.unlink(missing_ok=True)
    return config
