"""Bring a network back whose global state is lost, with the validator's copy or a member's model.

A new network has an empty bucket too. All members would load its outer step 0 over their trained
weights. So nothing is published while a member is further on, until the master names with
``--validator.model_from`` the model that the network continues with.

Where members upload only the scored files, no bucket has a member's model. So the master asks one
member for it by name, with IsAlive calls, until an upload has it. These weights are published as
the next outer step, which all members load. The outer momentum begins at zero.
"""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta
from pathlib import Path

from distributed_training.chain.base import Chain, Neuron
from distributed_training.chain.client import SignedClient
from distributed_training.config import Config, ConfigError
from distributed_training.node.start import Stopped
from distributed_training.protocol import keys
from distributed_training.scoring.upload import OpenBucket
from distributed_training.store.bucket_reader import states
from distributed_training.store.errors import StoreError
from distributed_training.training.model import parameter_schema, without_extras
from distributed_training.training.outer_step import GlobalState, load_weights, model_bytes
from distributed_training.validator.global_state import GlobalStateError

log = logging.getLogger(__name__)

_ASK_EVERY = timedelta(seconds=10)


def read_own_copy(folder: Path) -> GlobalState:
    """Return the newest state of ``folder``, where the validator keeps its published states.

    Raises GlobalStateError where there is none that is whole.
    """
    why = "there is none"
    for outer_step, path in reversed(states(folder)):
        try:
            return GlobalState.read(path, outer_step)
        except (ValueError, OSError) as error:
            why = f"outer step {outer_step}: {error}"
    raise GlobalStateError(
        f"{folder} has no copy of the global state to continue from ({why}), so nothing was "
        "published: give --validator.model_from the uid of a member that runs"
    )


def refuse_to_begin_again(
    folder: Path, *, chain: Chain, client: SignedClient, timeout: timedelta
) -> None:
    """Raise GlobalStateError where the network of an empty bucket is beyond outer step 0.

    ``folder``: of the validator's copies. ``timeout``: for each member's answer. Raises ChainError.
    """
    own = max((outer_step for outer_step, _ in states(folder)), default=0)
    replies = client.sweep_is_alive([n for n in chain.neurons() if n.port], timeout, epoch=0)
    steps = {uid: reply.epoch or 0 for uid, reply in replies.items() if reply is not None}
    furthest = max(steps, key=lambda uid: (steps[uid], -uid), default=None)
    found = [f"this run folder has a copy of outer step {own}"] if own else []
    if furthest is not None and steps[furthest]:
        found.append(f"uid {furthest} is at outer step {steps[furthest]}")
    if found:
        raise GlobalStateError(
            f"the global bucket is empty and {' and '.join(found)}, so nothing was published, "
            "since all members would load outer step 0: give --validator.model_from own for the "
            "copy, a member's uid for its model, or none for outer step 0"
        )


def ask_member_for_state(
    config: Config,
    uid: int,
    *,
    chain: Chain,
    client: SignedClient,
    open_bucket: OpenBucket,
    folder: Path,
    stop: threading.Event,
) -> GlobalState:
    """Return the outer step after member ``uid``'s, with its model.

    ``folder``: for the download. Raises GlobalStateError when the member is not there, does not
    upload its model in time, or uploads one that is not this network's; ConfigError where members
    upload all; ChainError; Stopped.
    """
    if config.store.content == "all":
        raise ConfigError(
            "the network's file says upload.content = all, and its members' uploads do not say how "
            "many inner steps the network has taken, so nothing was published: give "
            "--validator.model_from own where this run folder has a copy"
        )
    # It uploads at a regular inner step, and may have to finish another upload first.
    patience = config.store.age_limit.total_seconds()
    log.info(
        "Asking uid %d for its model, which its next upload has: for up to %.0f min",
        uid,
        patience / 60,
    )
    until, why = time.monotonic() + patience, ""
    while time.monotonic() < until:
        neuron = next((n for n in chain.neurons() if n.uid == uid), None)
        if neuron is None:
            why = "it is no member"
            break
        try:
            return _load(config, neuron, open_bucket, folder)
        except (StoreError, ValueError, OSError) as error:
            why = str(error)
        client.sweep_is_alive([neuron], config.validator.alive_timeout, model=True)
        if stop.wait(_ASK_EVERY.total_seconds()):
            raise Stopped
    raise GlobalStateError(
        f"the network cannot be brought back with the model of uid {uid} ({why}), so nothing was "
        "published: give --validator.model_from a member that runs"
    )


def _load(config: Config, neuron: Neuron, open_bucket: OpenBucket, folder: Path) -> GlobalState:
    """Return the state that a member's bucket has the model of.

    Raises StoreError, ValueError, OSError for a state that is missing or another network's.
    """
    bucket, run = open_bucket(neuron), config.store.run
    root = bucket.metadata()
    if root is None or root.run != run:
        raise ValueError(f"its bucket has no upload of run {run}")
    step = root.outer_step
    content, extras = bucket.config(step)
    if extras.total_inner_steps is None:
        raise ValueError("its config.json does not say how many inner steps the network has taken")
    # The network's own where its file has one: a member may have written anything.
    rules = config.network.model if config.network is not None else None
    model_config = dict(rules) if rules is not None else without_extras(content)
    schema, path = parameter_schema(model_config), folder / keys.MODEL
    folder.mkdir(parents=True, exist_ok=True)
    try:
        key = keys.epoch_key(step, keys.MODEL)
        bucket.download(key, path, limit=model_bytes(schema))
        weights = [each.clone() for each in load_weights(path, schema)]
    finally:
        path.unlink(missing_ok=True)
    return GlobalState(
        model_config=model_config,
        schema=schema,
        outer_step=step + 1,
        weights=weights,
        momentum=None,
        learning_rate=config.training.outer_learning_rate,
        mu=config.training.outer_momentum,
        last_allreduce_block=0,
        total_inner_steps=extras.total_inner_steps,
    )
