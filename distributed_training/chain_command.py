"""Check the chain of a store network, or go back in it: ``dt-network audit`` and ``rewind``.

An audit needs only the bucket: as its founder, by the keys of that machine; as a member, by
the registry; or from a copy of its files. A rewind is one more outer step, signed by the master,
whose weights are those of an earlier one. Nothing that was published is taken back.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from bittensor_core import verify

from distributed_training.chain.identity import load_wallet
from distributed_training.config import OPERATORS_FILE, Config, ConfigError, load_config
from distributed_training.config.versions import Versions, under
from distributed_training.founder import Plan, own_store
from distributed_training.node.buckets import open_own
from distributed_training.node.start import sole_user
from distributed_training.protocol.keys import NETWORK
from distributed_training.protocol.manifest import Manifest, Master
from distributed_training.protocol.metadata import ConfigExtras
from distributed_training.protocol.types import ExitStatus
from distributed_training.scoring.verdicts import open_bucket
from distributed_training.store.base import ObjectStore
from distributed_training.store.bucket_reader import BucketReader, StateUnavailable
from distributed_training.store.errors import IntegrityError
from distributed_training.store.folder import FolderStore
from distributed_training.training.model import parameter_schema
from distributed_training.validator import replay
from distributed_training.validator.global_state import GlobalStateError
from distributed_training.validator.merge import OuterState, Rule
from distributed_training.validator.outer_steps import OuterSteps, Prepared, next_state
from distributed_training.validator.replay import Chain, ChainBroken, write_set


def audit(options: argparse.Namespace) -> int:
    """Print which objects fit; return the exit status, 1 if one does not fit.

    Raises ConfigError, ChainError, StoreError.
    """
    founded = Path(options.place).is_dir()
    if founded:
        config = rules = _founders(Path(options.place))
    else:
        given = ["--network", options.place]
        config = load_config("miner", given, file=OPERATORS_FILE, check=False)
        rules = load_config("validator", given, environ={}, dotenv=None, check=False)
    network_model(config)  # refuses a network that has no chain
    with ExitStack() as stack:
        store: ObjectStore
        if options.source is not None:
            store = FolderStore(options.source)
        else:
            store = open_bucket(config, stack)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dt-audit-"))
        versions = _versions(rules, store, Path(folder))
        found = _open(config, store, Path(folder)).audit(
            keep_uploads=rules.validator.keep_uploads, versions=versions
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
    """Return the versions of the network's file next to it and in the bucket, for an audit."""
    assert config.network is not None
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
    """Return what does not fit in ``network.json``, which members read. Raises StoreError."""
    assert config.network is not None
    try:
        shown = BucketReader(store).network()
    except (IntegrityError, StateUnavailable) as error:
        return [str(error)]
    if shown is None:
        return []
    if not shown.counts_for(config.network):
        return [f"{NETWORK} is not signed by the network's master, so members believe none of it"]
    if shown.run_id not in versions:
        return [f"{NETWORK} names the rules {shown.run_id}, of no version of the network's file"]
    return []


def _since(step: int | None) -> str:
    return "at no outer step" if step is None else f"from outer step {step} on"


def rewind(options: argparse.Namespace) -> int:
    """Publish the weights of an earlier outer step as the next one; return the exit status.

    Raises ConfigError, StoreError.
    """
    config = _founders(options.folder)
    model = network_model(config)
    signer = load_wallet(config.chain).hotkey.sign
    folder = config.run_folder / "global"
    config.run_folder.mkdir(parents=True, exist_ok=True)  # it may be on an empty disk
    with ExitStack() as stack:
        instead = "wait for its end"
        stack.enter_context(
            sole_user(config.run_folder, "validator.lock", "validator", instead=instead)
        )
        stack.enter_context(own_store(options.folder))
        store = open_own(config.store, config.store.global_model_name)
        stack.enter_context(closing(store))
        keep = config.validator.keep_uploads
        steps = OuterSteps(store, folder, _master(config), signer, keep_uploads=keep)
        chain = _open(config, store, folder / "replay")
        try:
            if not steps.load() or options.to >= steps.head.outer_step:
                raise ConfigError(
                    f"outer step {options.to} is not before the network's, so nothing was "
                    "published: give --to with an earlier one"
                )
            manifest = go_back(
                steps,
                chain,
                options.to,
                config=model,
                period=config.round_period.total_seconds(),
                grace=config.validator.grace.total_seconds(),
            )
        except GlobalStateError as error:  # it says what to do
            raise ConfigError(str(error)) from None
        except ChainBroken as error:
            raise ConfigError(
                f"{error}, so the network cannot go back to outer step {options.to}: give --to with"
                " another, or restore that file"
            ) from None
    what = "weights, momentum and residual" if manifest.momentum else "weights"
    print(
        f"outer step {manifest.outer_step} has the {what} of outer step {options.to} again, and "
        f"members load them. Go on with dt-network run {options.folder}"
    )
    return ExitStatus.STOPPED


def go_back(
    steps: OuterSteps,
    chain: Chain,
    to: int,
    *,
    config: Mapping[str, Any],
    period: float,
    grace: float,
) -> Manifest:
    """Publish the weights of outer step ``to`` as the next outer step; return its manifest.

    ``config``: the model's. Where uploads are not kept any more, momentum and residual begin again.
    Raises ChainBroken, GlobalStateError, StoreError.
    """
    head, before = steps.head, steps.state or chain.state()
    try:
        values = chain.replay(before, to)
    except ChainBroken as broken:
        if not broken.missing:
            raise
        values = OuterState(chain.replay(before, to, whole=False).weights)
    target, step, now = chain.manifest(to), head.outer_step + 1, steps.now()
    extras = ConfigExtras((), 0, None, target.total_inner_steps, target.total_tokens or None)
    folder = steps.place(step)
    # A round that was merged and never published has left its scores here, which would count now.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    files = write_set(folder, chain.schema, values, extras.merge_into(config))
    weights, momentum, residual = values.digests
    manifest = replace(
        target,
        rules_id=head.rules_id,
        outer_step=step,
        previous=head.digest,
        update="",
        weights=weights,
        momentum=momentum,
        residual=residual,
        merged=(),
        refused=(),
        losses_before=head.losses_after,
        scores=head.scores,
        closed_at=now,
        serial=before.serial,
        made_at=now,
        files=files,
        rewound_to=to,
    )
    paths = {name: folder / name for name in files}
    steps.publish(Prepared(manifest, manifest.to_bytes(steps.sign), paths))
    steps.write(next_state(before, manifest, steps.serial + 1, now=now, period=period, grace=grace))
    return manifest


def _founders(folder: Path) -> Config:
    """Return the configuration of the validator of a founder's folder. Raises ConfigError."""
    plan = Plan.of(folder)
    return load_config("validator", plan.words["validator"], environ=plan.environ, check=False)


def network_model(config: Config) -> Mapping[str, Any]:
    """Return the model's configuration in a store network's file. Raises ConfigError."""
    network = config.network
    if network is None or network.model is None or network.head.exchange != "store":
        raise ConfigError(
            "this network's rounds do not go through its store, so it has no chain: give the file "
            'of a network with exchange = "store"'
        )
    return network.model


def _open(config: Config, store: ObjectStore, folder: Path) -> Chain:
    """Return the chain in a global bucket. Raises ConfigError."""
    schema = parameter_schema(network_model(config))
    return Chain(BucketReader(store), schema, folder, _master(config))


def _master(config: Config) -> Master:
    return Master(config.swarm.run_id, config.miner.master_ss58_address, verify)
