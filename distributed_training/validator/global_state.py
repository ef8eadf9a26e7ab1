"""The global state and its bucket: every outer step as a folder, the root metadata last.

A new network starts from an initial model that the first validator makes. ``config.json`` also says
how many inner steps the network has taken, so that a newcomer knows its place in the learning
rate's schedule.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from bittensor_core import verify
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from distributed_training.common.files import atomic_file, write_bytes
from distributed_training.config.versions import Versions
from distributed_training.network import FILE, LARGEST_FILE, LARGEST_SHOWN, Network, Shown
from distributed_training.node.identity import Member
from distributed_training.node.start import WrongNetwork
from distributed_training.protocol import keys
from distributed_training.protocol.gradients import Schema
from distributed_training.protocol.manifest import Master, State
from distributed_training.protocol.metadata import ConfigExtras, Metadata, RoundNotes
from distributed_training.protocol.types import PublicationReport, Revision
from distributed_training.store.base import ObjectStore
from distributed_training.store.bucket_reader import (
    BucketReader,
    StateUnavailable,
    check_run,
    remove_states,
)
from distributed_training.store.cleanup import prune_epochs
from distributed_training.store.errors import IntegrityError, StoreError
from distributed_training.store.journal import Journal
from distributed_training.store.transfer import Retry, Sender, Sent, deadline_in
from distributed_training.training.model import hf_config, schema_of
from distributed_training.training.outer_step import (
    GlobalState,
    OuterOptimizerState,
    load_weights,
    model_bytes,
    save_outer_optimizer,
)


def small_llama(*, vocabulary: int, sequence_length: int, eos_token: int) -> dict[str, Any]:
    """Return ``config.json`` of a Llama of 1 to 2 million parameters for up to 4096 words."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": 160,
        "intermediate_size": 432,
        "num_hidden_layers": 4,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "max_position_embeddings": sequence_length,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": eos_token,
        "pad_token_id": eos_token,
    }


def initial_weights(model_config: Mapping[str, Any], *, seed: int) -> list[Tensor]:
    """Draw float32 weights in schema order as transformers does, the same for one seed."""
    from transformers import AutoModelForCausalLM

    # Without a list torch would also save each GPU's generator, and start CUDA for it.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Named: a config.json may say bfloat16, and a state's weights are float32.
        model = AutoModelForCausalLM.from_config(hf_config(model_config), dtype=torch.float32)
    parameters = dict(model.named_parameters())
    return [parameters[name].detach().clone() for name, _ in schema_of(model)]


# Local folders of the global state that are kept: the current outer step's and the one before,
# which is still scored for half a period.
KEPT_EPOCHS = 2
_PUBLICATION = timedelta(minutes=30)  # one, with its retries
_SMALL = timedelta(seconds=30)  # one small write with its retries


class GlobalStateError(RuntimeError):
    """The validator cannot continue from the global bucket's content. The text has the remedy."""


def claim_global_bucket(
    store: ObjectStore,
    network: Network,
    *,
    finished: str = "",
    versions: Versions | None = None,
    member: Member | None = None,
) -> None:
    """Write into the global bucket whose it is, and whether the network is ``finished``.

    What is there already is left. ``versions``: of the network's file, which miners read there;
    ``network`` is the newest. ``member``: signs as the master, but for files of format 1.

    Raises WrongNetwork where it is another founder's: two networks of one name would overwrite each
    other's model. Raises StoreError.
    """
    master, sign = network.values["chain.master_hotkey"], None
    wanted = replace(Shown.of(network), finished=finished or None)
    if member is not None and network.head.format > 1 and member.hotkey == master:
        sign = member.wallet.hotkey.sign
        wanted = replace(wanted, network=network.values["run_id"])
    shown: Shown | None = None
    with suppress(ValueError, IntegrityError):  # it is damaged: what is written now replaces it
        shown = Shown.parse(store.get(keys.NETWORK, limit=LARGEST_SHOWN) or b"")
    owner = master if shown is None else shown.master
    # Anybody can write an unsigned one, or sign one with a key made for it.
    proven = shown is not None and shown.network is not None
    if sign is not None and owner != master and (not proven or _is_led(store, network)):
        owner = master
    if owner != master:
        raise WrongNetwork(
            f"the global bucket {store.bucket} is another network's (its master is {owner}, not "
            f"{master}), so each would overwrite the other's model and nothing was started: give "
            "this network's file another store.global_bucket and sign it again"
        )
    for version in versions.known if versions is not None else ():
        key, data = keys.VERSION.format(version.head.version), version.files[FILE].encode()
        with suppress(IntegrityError):
            if store.get(key, limit=LARGEST_FILE) == data:
                continue
        store.put(key, data)
    # Last: miners look for the version that it names.
    if shown != wanted:
        store.put(keys.NETWORK, wanted.to_bytes(sign))


def _is_led(store: ObjectStore, network: Network) -> bool:
    """Return whether the bucket's state is signed by the master of ``network``."""
    master = Master(network.values["run_id"], network.values["chain.master_hotkey"], verify)
    with suppress(ValueError, IntegrityError):
        State.parse(store.get(keys.STATE, limit=State.most_bytes) or b"", master)
        return True
    return False


class GlobalPublisher:
    """Writes the global bucket, and reads it back at a start.

    ``folder``: local copies, ``epoch-N/`` each, and the journal of uploads, by which a restarted
    validator continues a large file where it was. ``run``: its number in the metadata.
    ``keep_epochs``: outer steps left in the bucket; the present one and the one before are always
    left.
    """

    def __init__(
        self,
        *,
        store: ObjectStore,
        folder: Path,
        run: int,
        keep_epochs: int = 3,
    ) -> None:
        self._store = store
        self._bucket = BucketReader(store)
        self._folder = folder
        self.run = run
        self._keep_epochs = max(KEPT_EPOCHS, keep_epochs)

    def load(self) -> GlobalState | None:
        """Load the state that the bucket holds, None if it is empty.

        Raises GlobalStateError for a state that is damaged or of another run, StoreError when the
        bucket does not answer.
        """
        try:
            root = self._bucket.metadata()
            if root is None:
                return None
            outer_step = check_run(root, self.run).outer_step
            # By way of the bucket: a local copy may be of a publication that readers never saw.
            return GlobalState.read(self._bucket.fetch(outer_step, self._folder), outer_step)
        except (StateUnavailable, ValueError) as error:
            raise GlobalStateError(
                f"the state in the global bucket is damaged ({error}), so it is not known where "
                "training stands: restore its files, or empty the bucket and say with "
                "--validator.model_from the model that the network continues with"
            ) from None

    def publish(self, state: GlobalState, peer_id: str) -> PublicationReport:
        """Write local files, data, ``epoch-N/metadata.json``, root, in this order.

        Readers see the old state or the new. ``peer_id``: of our averager. A bucket or a disk that
        fails is a report with ``ok=False`` and the reason; the root is then unchanged unless
        writing it was what failed.
        """
        began, sent, reason = time.monotonic(), Sent(), ""
        step, revision = state.outer_step, Revision(self.run, state.outer_step, 0)
        metadata = Metadata.of(revision, peer_id).to_json()
        try:
            folder, journal = self._write(state), Journal(self._folder / "uploads.json")
            deadline = deadline_in(_PUBLICATION)
            with Sender(store=self._store, journal=journal, deadline=deadline, sent=sent) as sender:
                files = [(keys.epoch_key(step, n), folder / n) for n in keys.GLOBAL_DATA_FILES]
                # Parts of an outer step that was given up would fill the bucket for days.
                sender.abandon_all_but(key for key, _ in files)
                sender.upload_all(files)
                # In this order: whoever reads the root asks for that folder at once.
                for key in (keys.epoch_key(step, keys.METADATA), keys.ROOT_METADATA):
                    self._put(key, metadata)
        # A disk that is full is a RuntimeError of torch's, and safetensors has an error of its own.
        except (StoreError, OSError, SafetensorError, RuntimeError) as error:
            reason = str(error)
        if not reason:
            prune_epochs(self._store, newest=step, keep=self._keep_epochs)
            remove_states(self._folder, before=step - KEPT_EPOCHS + 1)
        return PublicationReport(
            revision=revision,
            ok=not reason,
            seconds=time.monotonic() - began,
            bytes_sent=sent.bytes,
            reason=reason,
            finished_at=time.time(),
        )

    def announce(self, outer_step: int, peer_id: str) -> None:
        """Write this process's peer id into the root metadata; nothing else changes.

        Raises StoreError.
        """
        metadata = Metadata.of(Revision(self.run, outer_step, 0), peer_id)
        self._put(keys.ROOT_METADATA, metadata.to_json())

    def outer_step(self) -> int:
        """Return the outer step that the root metadata shows, -1 without one. Raises StoreError."""
        root = self._bucket.metadata()
        return -1 if root is None else root.outer_step

    def weights(self, outer_step: int, schema: Schema) -> list[Tensor]:
        """Return the global weights of an outer step, from the local copy or the bucket.

        Raises StoreError, ValueError.
        """
        folder = self._folder / keys.epoch_folder(outer_step)
        # A validator that was not there for a round has no copy of its outer step.
        if not (folder / keys.MODEL).exists():
            limit = model_bytes(schema)
            self._bucket.fetch(outer_step, self._folder, (keys.MODEL,), limit=limit)
        return load_weights(folder / keys.MODEL, schema)

    def write_notes(self, notes: RoundNotes) -> None:
        """Write who was not in the last round, for whoever looks up a score. Raises StoreError."""
        self._put(keys.ROUND, notes.to_json())

    def _put(self, key: str, data: bytes) -> None:
        Retry(each=_SMALL)(self._store.put, key, data)

    def _write(self, state: GlobalState) -> Path:
        folder = self._folder / keys.epoch_folder(state.outer_step)
        folder.mkdir(parents=True, exist_ok=True)
        extras = ConfigExtras(
            (), 0, state.last_allreduce_block, state.total_inner_steps, state.total_tokens or None
        )
        write_bytes(folder / keys.CONFIG, extras.merge_into(state.model_config))
        parameters = [name for name, _ in state.schema]
        tensors = dict(zip(parameters, state.weights, strict=True))
        with atomic_file(folder / keys.MODEL) as file:
            # By name: save_file opens the file itself. The handle is for the sync and the rename.
            save_file(tensors, file.name, metadata=keys.SAFETENSORS_METADATA)
        save_outer_optimizer(
            folder / keys.OUTER_OPTIMIZER,
            OuterOptimizerState(state.momentum, state.learning_rate, state.mu, state.outer_step),
            parameters=len(state.schema),
        )
        return folder
