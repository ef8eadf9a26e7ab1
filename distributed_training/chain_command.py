"""Check the chain of a store network, or continue it from earlier weights.

These are ``dt-network audit``, ``rewind`` and ``recover``.

An audit needs only the bucket. The founder reads it with the keys on the founder's machine, a
member through the registry, and anybody else from a copy of its files. A rewind publishes one more
outer step, signed by the master, with the weights of an earlier outer step, and withdraws nothing.
A recovery does the same, but starts a new chain, for a bucket that has lost objects that members
have seen.
"""

from __future__ import annotations

import argparse
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from bittensor_core import verify

from distributed_training.chain.identity import load_wallet
from distributed_training.config import OPERATORS_FILE, Config, ConfigError, load_config, rules_at
from distributed_training.config.versions import Versions, under
from distributed_training.founder import FounderPlan
from distributed_training.node.buckets import open_own
from distributed_training.node.start import sole_user
from distributed_training.protocol import keys
from distributed_training.protocol.keys import NETWORK
from distributed_training.protocol.manifest import Manifest, Master, State
from distributed_training.protocol.metadata import config_bytes
from distributed_training.protocol.types import ExitStatus
from distributed_training.registry.store import FILE
from distributed_training.scoring.verdicts import open_bucket
from distributed_training.store.base import ObjectStore
from distributed_training.store.bucket_reader import BucketReader, StateUnavailable, states
from distributed_training.store.errors import IntegrityError
from distributed_training.store.folder import FolderStore
from distributed_training.training.model import parameter_schema
from distributed_training.validator import replay
from distributed_training.validator.global_state import GlobalStateError, network_model
from distributed_training.validator.merge import OuterState, Rule
from distributed_training.validator.outer_steps import OuterSteps, next_state
from distributed_training.validator.replay import ChainBroken, ManifestChain, read_set, write_set

_SERIALS = 1 << 32  # more serials than a network can have used since the newest known serial


def audit(options: argparse.Namespace) -> int:
    """Print everything that does not fit the chain; return exit status 1 if there is anything.

    Raises ConfigError, ChainError, StoreError.
    """
    founded = Path(options.place).is_dir()
    if founded:
        config = rules = _founders(Path(options.place))
    else:
        given = ["--network", options.place]
        config = load_config("miner", given, file=OPERATORS_FILE, check=False)
        rules = rules_at(options.place, "validator")
    network_model(config)  # refuses a network without [model.config]
    with ExitStack() as stack:
        store: ObjectStore
        if options.source is not None:
            store = FolderStore(options.source)
        else:
            store = open_bucket(config, stack)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dt-audit-"))
        versions = _versions(rules, store, Path(folder))
        found = _open(config, store, Path(folder)).audit(
            keep_uploads=rules.rounds.keep_uploads, versions=versions
        )
        found.problems += _check_statement(rules, store, versions)
    for problem in found.problems:
        print(f"does not fit: {problem}")
    if found.recovered:
        print(f"the chain begins at outer step {found.recovered}, with the founder's recovery")
    if found.head:
        print(f"outer step {found.outer_step}, whose manifest has the digest {found.head}")
        print(f"updates give the weights {_since(found.weights_from)}")
        print(f"merge, momentum and residual were computed again {_since(found.replayed_from)}")
    return ExitStatus.FAULT if found.problems else ExitStatus.STOPPED


def _versions(config: Config, store: ObjectStore, folder: Path) -> replay.Versions:
    """Return the rules of each version of the network's file, for an audit.

    The versions are read from the folder of the file and from the bucket.
    """
    reader, known = BucketReader(store), Versions(config.network, folder)
    known.look_beside(config.network.place)

    def read(number: int) -> str | None:
        try:
            return reader.version(number)
        except (IntegrityError, StateUnavailable):
            return None

    known.look(read, quiet=True)
    return {
        each.rules_id: (each.head.version, each.head.from_outer_step, Rule.of(under(config, each)))
        for each in known.known
    }


def _check_statement(config: Config, store: ObjectStore, versions: replay.Versions) -> list[str]:
    """Return the problems of ``network.json``, which members read. Raises StoreError."""
    try:
        shown = BucketReader(store).network()
    except (IntegrityError, StateUnavailable) as error:
        return [str(error)]
    if shown is None:
        return []
    if not shown.counts_for(config.network):
        return [f"{NETWORK} is not signed by the network's master, so members ignore it"]
    if shown.run_id not in versions:
        return [f"{NETWORK} names rules {shown.run_id}, but no version of the network's file does"]
    return []


def _since(step: int | None) -> str:
    return "at no outer step" if step is None else f"from outer step {step} on"


def rewind(options: argparse.Namespace) -> int:
    """Publish the weights of an earlier outer step as the next step; return the exit status.

    Raises ConfigError, StoreError.
    """
    config = _founders(options.folder)
    with _leading(config, options.folder) as (steps, chain, _):
        try:
            if not steps.load() or options.to >= steps.head.outer_step:
                raise ConfigError(
                    f"outer step {options.to} is not before the network's newest, so nothing was "
                    "published: choose an earlier one for --to"
                )
            manifest = go_back(
                steps,
                chain,
                options.to,
                config=network_model(config),
                period=config.rounds.period.total_seconds(),
                grace=config.rounds.grace.total_seconds(),
            )
        except GlobalStateError as error:  # its text says what to do
            raise ConfigError(str(error)) from None
        except ChainBroken as error:
            raise ConfigError(
                f"{error}, so the network cannot go back to outer step {options.to}: choose another"
                " one for --to, or restore that file"
            ) from None
    _print_next(manifest, options.folder)
    return ExitStatus.STOPPED


def recover(options: argparse.Namespace) -> int:
    """Start a chain above all outer steps that members can have seen; return the exit status.

    Raises ConfigError, StoreError.
    """
    config = _founders(options.folder)
    with _leading(config, options.folder) as (steps, chain, store):
        manifest = begin_again(
            steps,
            chain,
            store,
            config=network_model(config),
            period=config.rounds.period.total_seconds(),
            grace=config.rounds.grace.total_seconds(),
            above=max(options.above or 0, _reported(options.folder / "registry" / FILE)),
        )
    _print_next(manifest, options.folder)
    return ExitStatus.STOPPED


@contextmanager
def _leading(
    config: Config, folder: Path
) -> Iterator[tuple[OuterSteps, ManifestChain, ObjectStore]]:
    """Open the founder's network for publishing. Raises ConfigError, StoreError."""
    network_model(config)  # refuses a network without [model.config]
    signer, place = load_wallet(config.chain).hotkey.sign, config.run_folder / "global"
    config.run_folder.mkdir(parents=True, exist_ok=True)  # it may be missing, as on a new disk
    with ExitStack() as stack:
        instead = "wait until it ends"
        stack.enter_context(
            sole_user(config.run_folder, "validator.lock", "validator", instead=instead)
        )
        store = open_own(config.store, config.store.global_model_name)
        stack.enter_context(closing(store))
        keep = config.rounds.keep_uploads
        steps = OuterSteps(store, place, _master(config), signer, keep_uploads=keep)
        yield steps, _open(config, store, place / "replay"), store


def _print_next(manifest: Manifest, folder: Path) -> None:
    what = "weights, momentum and residual" if manifest.momentum else "weights"
    print(
        f"outer step {manifest.outer_step} has the {what} of outer step {manifest.rewound_to} "
        f"again, and members load them. Continue with dt-network run {folder}"
    )


def _reported(ledger: Path) -> int:
    """Return the newest outer step that the validator has reported to the registry, or -1."""
    with (
        suppress(sqlite3.Error),
        closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as db,
    ):
        return int(db.execute("SELECT max(outer_step) FROM losses").fetchone()[0] or -1)
    return -1


def go_back(
    steps: OuterSteps,
    chain: ManifestChain,
    to: int,
    *,
    config: Mapping[str, Any],
    period: float,
    grace: float,
) -> Manifest:
    """Publish the weights of outer step ``to`` as the next outer step; return its manifest.

    ``config``: the model's ``config.json``. Momentum and residual start again from zero if the
    uploads from which they are computed are no longer kept.

    Raises ChainBroken, GlobalStateError, StoreError.
    """
    # First repair the bucket from this machine's copy, since the chain is read from the bucket.
    steps.restore(deep=True, older=True)
    head, before = steps.head, steps.state or chain.state()
    try:
        values = chain.replay(before, to)
    except ChainBroken as broken:
        if not broken.missing:
            raise
        values = OuterState(chain.replay(before, to, whole=False).weights)
    now = steps.now()
    manifest = _publish_again(
        steps,
        chain,
        chain.manifest(to),
        values,
        config,
        now,
        rules_id=head.rules_id,
        outer_step=head.outer_step + 1,
        previous=head.digest,
        losses_before=head.losses_after,
        scores=head.scores,
        serial=before.serial,
    )
    steps.write(next_state(before, manifest, steps.serial + 1, now=now, period=period, grace=grace))
    return manifest


def begin_again(
    steps: OuterSteps,
    chain: ManifestChain,
    store: ObjectStore,
    *,
    config: Mapping[str, Any],
    period: float,
    grace: float,
    above: int = -1,
) -> Manifest:
    """Publish the newest available weights as the first outer step of a new chain.

    Return its manifest. Its outer step and serial are above all those in the bucket and on this
    machine. They are also above all that others can have seen since the newest known outer step was
    signed, because an outer step takes at least half a ``period``.

    Args:
        steps: The validator's outer steps, not loaded, since the bucket's chain may be damaged.
        chain: Reads the chain in the same bucket.
        store: The bucket.
        config: The model's ``config.json``.
        period: Seconds from one close to the next.
        grace: Seconds that uploads may take after a close.
        above: An outer step that a member has seen.

    Raises:
        ConfigError: Neither the bucket nor this machine has weights that the master has signed.
        StoreError: The bucket does not answer.
    """
    listed = store.list_objects()
    outer = [one for info in listed if (one := keys.parse_outer_key(info.key))]
    uploads = [upload for info in listed if (upload := keys.parse_upload_key(info.key))]
    own = dict(states(steps.place(0).parent))
    signed: list[Manifest | State] = []
    for step in {step for step, _ in outer} | own.keys():
        with suppress(ChainBroken):
            signed.append(steps.manifest(step) or chain.manifest(step))
    with suppress(ChainBroken):
        signed.append(chain.state())
    found: tuple[Manifest, OuterState] | None = None
    with suppress(ChainBroken):
        found = chain.newest(step for step, name in outer if name == keys.MODEL)
    for step in sorted(own, reverse=True):
        if found is not None and step <= found[0].outer_step:
            break
        with suppress(ChainBroken, OSError, ValueError):
            manifest = steps.manifest(step) or chain.manifest(step)
            values = read_set(own[step], chain.schema, manifest)
            if values.digests == (manifest.weights, manifest.momentum, manifest.residual):
                found = manifest, values
    if found is None:
        raise ConfigError(
            "neither the bucket nor the validator's run folder has weights that this network's "
            "master has signed, so nothing was published: restore the bucket from a backup, or "
            "create a network from a member's weights (dt-network succeed)"
        )
    info = store.head(listed[0].key) if listed else None
    now = time.time() if info is None else info.modified + (info.age_seconds or 0.0)
    at, last = max(
        (each.made_at if isinstance(each, Manifest) else each.written_at, each.outer_step)
        for each in signed
    )
    since = int(max(0.0, now - at) / (period / 2))
    known = [above, last + since, *own, *(step for step, _ in outer), *(u[1] for u in uploads)]
    step = max(known) + 1
    serial = max(0, *(each.serial for each in signed), *(u[2] for u in uploads)) + _SERIALS
    manifest = _publish_again(
        steps,
        chain,
        *found,
        config,
        now,
        outer_step=step,
        previous="",
        recovered=step,
        losses_before=found[0].losses_after,
        serial=serial,
    )
    steps.write(next_state(None, manifest, serial, now=now, period=period, grace=grace))
    return manifest


def _publish_again(
    steps: OuterSteps,
    chain: ManifestChain,
    target: Manifest,
    values: OuterState,
    config: Mapping[str, Any],
    now: float,
    **changes: Any,
) -> Manifest:
    """Publish ``values``, the state of ``target``, as another outer step; return its manifest."""
    folder = steps.place(changes["outer_step"])
    # If a round was merged but never published, its scores are left here, and they would count.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    files = write_set(folder, chain.schema, values, config_bytes(config))
    weights, momentum, residual = values.digests
    manifest = replace(
        target,
        update="",
        weights=weights,
        momentum=momentum,
        residual=residual,
        merged=(),
        refused=(),
        closed_at=now,
        made_at=now,
        files=files,
        rewound_to=target.outer_step,
        **changes,
    )
    steps.publish(manifest, manifest.to_bytes(steps.sign))
    return manifest


def _founders(folder: Path) -> Config:
    """Return the configuration of the validator in a founder's folder. Raises ConfigError."""
    plan = FounderPlan.of(folder)
    return load_config("validator", plan.words["validator"], environ=plan.environ, check=False)


def _open(config: Config, store: ObjectStore, folder: Path) -> ManifestChain:
    """Return the chain in a global bucket. Raises ConfigError."""
    schema = parameter_schema(network_model(config))
    return ManifestChain(BucketReader(store), schema, folder, _master(config))


def _master(config: Config) -> Master:
    return Master(config.swarm.run_id, config.miner.master_ss58_address, verify)
