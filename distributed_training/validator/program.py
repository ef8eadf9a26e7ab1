"""The validator as a program: from its configuration to an exit status.

The hotkey, the buckets and the text may take long to open, or fail to. They are opened before a
model is built, so that a missing key or an unregistered hotkey is reported at once. Tests pass
their own parts.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from bittensor_core import verify as verify_signature
from torch import Tensor

from distributed_training.chain.base import ChainError
from distributed_training.common.files import write_json
from distributed_training.config import Config, ConfigError
from distributed_training.config.versions import Versions, under
from distributed_training.data.held_out import held_out_batches
from distributed_training.data.page_source import PageUnavailable
from distributed_training.network_place import save_copy
from distributed_training.node.buckets import PeerBuckets, check_own, open_own, own_commitment
from distributed_training.node.identity import Member, commit, join_subnet
from distributed_training.node.published import fetch_published, open_versions, publish
from distributed_training.node.start import (
    NetworkFailure,
    OtherRules,
    StopNow,
    StopSignals,
    WrongPlace,
    dashboard,
    exit_status_of,
    fetch_tokenizer,
    log_settings,
    make_run_folder,
    require_data,
    sole_user,
    start_log,
    write_settings,
)
from distributed_training.protocol.manifest import Master
from distributed_training.protocol.types import ExitStatus, Verify
from distributed_training.scoring.evaluator import (
    EvaluationModel,
    Evaluator,
    OpenBucket,
    Pages,
    evaluation_device,
    pages_of,
)
from distributed_training.store.base import ObjectStore
from distributed_training.store.bucket_reader import BucketReader, states
from distributed_training.store.errors import StoreError
from distributed_training.telemetry import EventLog
from distributed_training.telemetry.trackers import open_trackers
from distributed_training.training.model import (
    UnfitModelError,
    initial_weights,
    parameter_schema,
)
from distributed_training.training.outer_rule import rule_of_network
from distributed_training.training.pretrained import WeightsError, digest_weights, read_weights
from distributed_training.training.weights import GlobalState
from distributed_training.validator.average import kind_of_validator
from distributed_training.validator.exports import Exports
from distributed_training.validator.global_state import (
    GlobalStateError,
    claim_global_bucket,
    network_model,
)
from distributed_training.validator.judging import UploadJudge
from distributed_training.validator.outer_steps import AnotherLeadsError, OuterSteps
from distributed_training.validator.own_copy import RECOVER, OwnCopy, age_of
from distributed_training.validator.reporter import RoundReporter
from distributed_training.validator.standings import Standings
from distributed_training.validator.store_rounds import LEDGER, StoreValidator

log = logging.getLogger(__name__)

_CLAIM_AGAIN = 60.0  # seconds between two checks that the bucket is still marked as ours


@dataclass(frozen=True)
class ValidatorParts:
    """``store``: the global bucket, writable. ``held_out``: held-out sequences by domain."""

    member: Member
    store: ObjectStore
    open_bucket: OpenBucket
    pages: Pages
    held_out: Mapping[str, Tensor]
    verify: Verify = verify_signature
    versions: Versions | None = None  # versions of the network's file
    publish_files: Callable[[], None] = lambda: None  # raises StoreError


def connect(config: Config, folder: Path, stack: ExitStack) -> ValidatorParts:
    """Open everything that a validator needs from outside; ``stack`` closes it.

    Raises ConfigError, NetworkFailure.
    """
    member = join_subnet(config, stack)
    store = open_own(config.store, config.store.global_model_name)
    check_own(store)
    by = Master(config.swarm.run_id, config.miner.master_ss58_address, verify_signature)
    copy = OwnCopy(store, folder / "global", by)
    found = [one.file for one in (copy.own_state(), copy.stored_state()) if one is not None]
    outer_step = max(found, key=age_of).outer_step if found else 0
    versions = open_versions(config.network, folder, outer_step, BucketReader(store).version)
    config = under(config, versions.in_force)
    claim_global_bucket(store, versions.newest, versions=versions, member=member)
    # Commit only after the claim, because a commitment leads everybody to this bucket. If the
    # registry hands out URLs, a commitment would let members read uploads before they are merged.
    if config.has_bucket:
        commit(member, own_commitment(config.store, store.bucket))
    fetch_published(config, lambda: BucketReader(store))
    publish(config, store)
    require_data(config)
    tokenizer_path, eos_id = fetch_tokenizer(config, folder)
    try:
        held_out = held_out_batches(
            config, tokenizer_path, eos_id, sequences=config.validator.held_out_sequences
        )
        pages = pages_of(config, tokenizer_path, eos_id)
    except PageUnavailable as error:
        raise NetworkFailure(
            f"the held-out text cannot be read ({error}), so no outer step could be judged: "
            "try again later"
        ) from None

    def publish_files() -> None:
        try:
            publish(config, store)
        except OSError as error:  # training continues without them
            log.warning("The network's files are not written again: %s", error)

    return ValidatorParts(
        member=member,
        store=store,
        open_bucket=PeerBuckets(config.store, member.chain, large=config.rounds.grace).of_miner,
        pages=pages,
        held_out=held_out,
        versions=versions,
        publish_files=publish_files,
    )


def follow_rules(config: Config, parts: ValidatorParts) -> Callable[[int], None]:
    """Return a function that publishes new versions of the network's file.

    It raises OtherRules at the outer step from which another version is in force.
    """
    versions, problem, due = parts.versions, "", 0.0
    shown = versions.newest if versions is not None else None

    def follow(outer_step: int) -> None:
        nonlocal problem, shown, due
        if versions is None:
            return
        found = versions.look_beside(config.network.place)
        wanted = versions.newest
        if wanted != shown or time.monotonic() >= due:
            due = time.monotonic() + _CLAIM_AGAIN
            try:
                claim_global_bucket(parts.store, wanted, versions=versions, member=parts.member)
                shown = wanted
            except (StoreError, WrongPlace) as error:  # the next check tries again
                if wanted != shown:
                    found = found or f"The network's file is not published: {error}"
        if found != problem and found:
            log.warning("%s", found)
        problem = found
        in_force = versions.at(outer_step)
        if in_force is not versions.in_force:
            raise OtherRules(
                f"version {in_force.head.version} of the network's file applies from outer step "
                f"{in_force.head.from_outer_step}, so the validator restarts with it"
            )

    return follow


def run_validator(
    config: Config, *, connect: Callable[[Config, Path, ExitStack], ValidatorParts] = connect
) -> int:
    """Run the validator, and return its exit status.

    0: it stopped as asked. 1: a fault, after which pm2 starts it again. 2: the settings are
    refused, or another process leads. 5: it must be started again at once.

    Call it in the main thread: it handles SIGINT, SIGTERM and SIGHUP.
    """
    try:
        start_log(config)
        log_settings(config)
        folder = make_run_folder(config)
        # Until the validator runs, a signal raises StopNow, since downloads do not check an event.
        with StopSignals(interrupts=True) as signals, ExitStack() as stack:
            # A second validator here would share the ledger and the copy of the chain.
            stack.enter_context(sole_user(folder, "validator.lock", "validator"))
            # From this file the dashboard knows whether the process is still running.
            write_json(folder / "instance.json", {"pid": os.getpid()})
            stack.enter_context(dashboard(config, folder))
            write_settings(config, folder)
            save_copy(config.network, folder)
            parts = connect(config, folder, stack)
            validator = build(config, parts, folder=folder, stop=signals.stop, stack=stack)
            validator.start()
            # From here on a signal only sets an event, since a publication must not be cut short.
            signals.interrupts = False
            validator.run()
    except StopNow:
        log.info("Stopped before the start was complete")
    except (
        ConfigError,
        NetworkFailure,
        GlobalStateError,
        StoreError,
        ChainError,
        OSError,
    ) as error:
        log.log(logging.INFO if isinstance(error, OtherRules) else logging.ERROR, "%s", error)
        # A restart with the same model, or while the other process leads, would fail again.
        if isinstance(error, UnfitModelError | AnotherLeadsError):
            return ExitStatus.BAD_CONFIGURATION
        return exit_status_of(error)
    return ExitStatus.STOPPED


def build(
    config: Config, parts: ValidatorParts, *, folder: Path, stop: threading.Event, stack: ExitStack
) -> StoreValidator:
    """Return the validator, with the state that it starts from.

    ``stack`` closes what must be closed. Raises ConfigError, GlobalStateError, StoreError.
    """
    if parts.versions is not None:
        config = under(config, parts.versions.in_force)
    rounds, record = config.rounds, EventLog.open(folder).write
    # Refuse a rule that breaks its promises before anything is published.
    rule_of_network(config)
    master = Master(config.swarm.run_id, config.miner.master_ss58_address, parts.verify)
    steps, state, found = find_state(config, parts, master, folder)
    model = EvaluationModel(
        model_config=state.model_config,
        device=evaluation_device(config.miner.device),
        frozen=config.frozen_weights,
        stop=stop,
    )

    def losses(weights: Sequence[Tensor]) -> dict[str, float]:
        model.load(weights)
        return {name: model.loss(text) for name, text in parts.held_out.items()}

    standings = Standings.load(folder / LEDGER)
    standings.board.assigned_counts = not config.data.own
    name = f"{config.miner.name}-validator"
    stack.enter_context(open_trackers(config.telemetry, folder, name=name))
    exports = Exports(config, folder, record=record)
    stack.callback(exports.close)
    return kind_of_validator(config)(
        config=config,
        state=state,
        found=found,
        losses_of=losses,
        follow=follow_rules(config, parts),
        publish_files=parts.publish_files,
        member=parts.member,
        steps=steps,
        judge=UploadJudge(
            evaluator=Evaluator(model, parts.pages, assigned=not config.data.own),
            schema=state.schema,
            run_id=config.swarm.run_id,
            codec=rounds.codec,
            verify=parts.verify,
            secret=secrets.randbits(62),
        ),
        folder=folder,
        record=record,
        stop=stop,
        reporter=RoundReporter(
            chain=parts.member.chain,
            standings=standings,
            record=record,
            least=rounds.least,
            round_seconds=(rounds.grace + rounds.period / 2).total_seconds(),
            run_folder=folder,
        ),
        after_step=exports.after,
        of_member=parts.open_bucket if config.has_bucket else None,
    )


def find_state(
    config: Config, parts: ValidatorParts, master: Master, folder: Path
) -> tuple[OuterSteps, GlobalState, bool]:
    """Return the bucket's writer, the state to start from, and whether the bucket had that state.

    Raises ConfigError, GlobalStateError, StoreError.
    """
    if parts.member.hotkey != master.hotkey:
        raise ConfigError(
            f"this network is led by its master {master.hotkey} only, but --wallet.hotkey is "
            f"{parts.member.hotkey}, so nothing was started: use the master's wallet"
        )
    steps = OuterSteps(
        parts.store,
        folder / "global",
        master,
        parts.member.wallet.hotkey.sign,
        keep_uploads=config.rounds.keep_uploads,
    )
    if steps.load():
        state = steps.read_state(network_model(config))
        # These scores were left by a process that was killed just after the publication.
        with suppress(FileNotFoundError):
            os.replace(steps.place(state.outer_step) / LEDGER, folder / LEDGER)
        return steps, state, True
    if states(folder / "global"):
        raise GlobalStateError(
            f"the global bucket is empty, but {folder / 'global'} has its outer steps without "
            f"their signed manifests, so nothing was published: restore the bucket and {RECOVER}, "
            "or move that folder away to begin at outer step 0"
        )
    return steps, initial_state(config), False


def initial_state(config: Config) -> GlobalState:
    """Return the state that a network begins with, for the model that its file describes.

    The weights come from the folder ``--validator.model``, or are random. Raises ConfigError if the
    folder cannot be used.
    """
    model_config, folder = dict(network_model(config)), config.validator.model
    named = config.network.head.weights  # the digest of the weights, if the file names them
    if folder is not None:
        try:
            weights = list(read_weights(folder, model_config))
        except WeightsError as error:
            raise ConfigError(f"{error}, so nothing was published: {error.remedy}") from None
        if named not in (None, digest_weights(weights)):
            raise ConfigError(
                f"{folder} has other weights than the network's file names, so nothing was "
                "published: set --validator.model to the folder that dt-network init --from read"
            )
    elif named is None:
        weights = initial_weights(model_config, seed=config.training.seed)
    else:
        raise ConfigError(
            "the network's file names the weights that it begins with, but the global bucket is "
            "empty, so nothing was published: name their folder with --validator.model"
        )
    return GlobalState(
        model_config=model_config,
        schema=parameter_schema(model_config),
        outer_step=0,
        weights=weights,
    )
