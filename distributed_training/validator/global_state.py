"""The global state and its bucket: every outer step as a folder, the root metadata last.

A new network starts from an initial model that the first validator makes.

*The inner optimizer.* A public miner that joins loads the bucket's four
``epoch-N/inner_optimizer.rankRRRR-of-4.pt`` right after the model: moments, and the place in the
learning rate's schedule (protocol page, section 3). Without them it cannot join. A validator does
not train, so it hands on a miner's. That miner is untrusted: sizes are bounded before a byte is
fetched, nothing in its files runs, moments that AdamW cannot have made are refused. The uploaded
files are written by the validator. The schedule's place is the network's, never a beginner's.

A thread does this beside the rounds and the scoring passes. The files of the next outer step are
there before the round that leads to it, so its upload takes no longer. They are written once for
each outer step: nobody reads a mixture of two.
"""

from __future__ import annotations

import io
import json
import logging
import math
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from distributed_training.common.files import atomic_file, read_state, write_bytes, write_state
from distributed_training.config.settings import TrainingSettings
from distributed_training.config.types import ConfigError
from distributed_training.network import LARGEST_SHOWN, Network, Shown
from distributed_training.node.start import WrongNetwork
from distributed_training.protocol import keys
from distributed_training.protocol.gradients import Schema
from distributed_training.protocol.metadata import ConfigExtras, Metadata, RoundNotes
from distributed_training.protocol.types import PublicationReport, Revision
from distributed_training.store.bucket_reader import (
    BucketReader,
    StateUnavailable,
    check_run,
    pt_content,
    remove_states,
)
from distributed_training.store.cleanup import prune_epochs
from distributed_training.store.journal import Journal
from distributed_training.store.s3 import S3ObjectStore, StoppedError, StoreError, Uplink
from distributed_training.store.transfer import Sender, Sent, deadline_in, patient
from distributed_training.training.collectives import row_range
from distributed_training.training.inner_optimizer import CosineSchedule
from distributed_training.training.inner_state import (
    MOMENTS,
    InnerState,
    describe_inner,
    finished_steps,
    write_shard,
)
from distributed_training.training.model import hf_config, schema_of, without_extras
from distributed_training.training.outer_step import (
    GlobalState,
    OuterOptimizerState,
    load_weights,
    model_bytes,
    save_outer_optimizer,
)

log = logging.getLogger(__name__)


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


def read_model_config(path: Path, vocabulary: int) -> dict[str, Any]:
    """Read a ``config.json``.

    Raises ConfigError if it is none or its vocabulary is too small for the tokenizer.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as a config.json ({error}), so there is no model to publish: "
            "correct --validator.model_config"
        ) from None
    if not isinstance(content, dict) or int(content.get("vocab_size", 0)) < vocabulary:
        raise ConfigError(
            f"the model of {path} has fewer words than the tokenizer's {vocabulary}, so it cannot "
            "be trained on its tokens: correct --validator.model_config"
        )
    return without_extras(content)


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
    """The global bucket holds something that cannot be gone on from. The text says what to do."""


def claim(store: S3ObjectStore, network: Network) -> None:
    """Write into the global bucket whose it is.

    Raises WrongNetwork where it is another founder's: two networks of one name would overwrite each
    other's model. Raises StoreError.
    """
    master = network.values["chain.master_hotkey"]
    try:
        owner = Shown.parse(store.get(keys.NETWORK, limit=LARGEST_SHOWN) or b"").master
    except ValueError:
        owner = master  # none or damaged: what is written now replaces it
    if owner != master:
        raise WrongNetwork(
            f"the global bucket {store.bucket} is another network's (its master is {owner}, not "
            f"{master}), so each would overwrite the other's model and nothing was started: give "
            "this network's file another store.global_bucket and sign it again"
        )
    store.put(keys.NETWORK, json.dumps(asdict(Shown.of(network))).encode())


class GlobalPublisher:
    """Writes the global bucket, and reads it back at a start.

    ``folder``: local copies, ``epoch-N/`` each, and the journal of uploads, by which a restarted
    validator goes on with a large file where it was. ``run``: its number in the metadata.
    ``keep_epochs``: outer steps left in the bucket; the present one and the one before are always
    left.
    """

    def __init__(
        self,
        *,
        store: S3ObjectStore,
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
                "training stands: restore its files, or empty the bucket to start anew"
            ) from None

    def publish(self, state: GlobalState, peer_id: str) -> PublicationReport:
        """Write local files, data, ``epoch-N/metadata.json``, root, in this order.

        Readers see the old state or the new. ``peer_id``: of our averager. A bucket or a disk that
        fails is a report with ``ok=False`` and the reason; the root is then unchanged unless
        writing it was what failed.
        """
        began, sent, reason = time.monotonic(), Sent(), ""
        revision = Revision(self.run, state.outer_step, 0)
        try:
            self._send(self._write(state), Metadata.of(revision, peer_id), sent)
        # A disk that is full is a RuntimeError of torch's, and safetensors has an error of its own.
        except (StoreError, OSError, SafetensorError, RuntimeError) as error:
            reason = str(error)
        if not reason:
            self._prune(state.outer_step)
        return PublicationReport(
            revision=revision,
            ok=not reason,
            seconds=time.monotonic() - began,
            bytes_sent=sent.bytes,
            reason=reason,
            finished_at=time.time(),
        )

    def _send(self, folder: Path, metadata: Metadata, sent: Sent) -> None:
        """Upload the files of ``folder``, the metadata last. Raises StoreError, OSError."""
        step, journal = metadata.outer_step, Journal(self._folder / "uploads.json")
        deadline = deadline_in(_PUBLICATION)
        with Sender(store=self._store, journal=journal, deadline=deadline, sent=sent) as sender:
            _upload(sender, step, folder, keys.GLOBAL_DATA_FILES)
            # In this order: whoever reads the root asks for that folder at once.
            for key in (keys.epoch_key(step, keys.METADATA), keys.ROOT_METADATA):
                self._put(key, metadata.to_json())

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

    def tell_round(self, notes: RoundNotes) -> None:
        """Write who was not in the last round, for whoever looks up a score. Raises StoreError."""
        self._put(keys.ROUND, notes.to_json())

    def _put(self, key: str, data: bytes) -> None:
        patient(self._store, each=_SMALL).put(key, data)

    def _write(self, state: GlobalState) -> Path:
        folder = self._folder / keys.epoch_folder(state.outer_step)
        folder.mkdir(parents=True, exist_ok=True)
        extras = ConfigExtras((), 0, state.last_allreduce_block)
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

    def _prune(self, outer_step: int) -> None:
        try:
            done = prune_epochs(self._store, newest=outer_step, keep=self._keep_epochs)
            problem = done.why if done.failed else ""
        except StoreError as error:
            problem = str(error)
        if problem:
            log.warning("Old outer steps stay in the global bucket for now: %s", problem)
        remove_states(self._folder, before=outer_step - KEPT_EPOCHS + 1)


def _upload(sender: Sender, outer_step: int, folder: Path, names: Sequence[str]) -> None:
    files = [(keys.epoch_key(outer_step, name), folder / name) for name in names]
    # Parts of an outer step that was given up would fill the bucket for days.
    sender.abandon_all_but(key for key, _ in files)
    sender.upload_all(files)


_ASKED = 16  # miners, best first, whose place in the schedule is looked at
_FETCHED = 3  # of them, whose files may be fetched before this try is given up
_RANKS = (keys.PUBLIC_RANKS, 1, 2, 3, 5, 6, 7, 8, 16, 32, 64)  # that a donor may have
_ANSWER = timedelta(seconds=30)  # of a donor's bucket, for one file's description
_STEPS_OF_A_BLOCK = 12  # inner steps: one a second is more than any network takes
# |m| <= c sqrt(v) holds for any gradients (Cauchy-Schwarz): c = 1.2 for betas of 0.9 and 0.95, 7.3
# for 0.9 and 0.999.
_MOST_RATIO, _ROUNDING = 8.0, 1e-12
_MOST_SQUARES = 4.0  # of the squared clipping norm, in all of v together


@dataclass(frozen=True)
class Donor:
    """A miner whose files may be handed on. Donors come best first."""

    uid: int
    bucket: BucketReader


@dataclass(frozen=True)
class _Made:
    """The complete set of files in the folder. ``place``: in the schedule."""

    outer_step: int
    uid: int
    place: int


class InnerPublisher:
    """``folder`` keeps what is under way, so that a validator that was killed goes on with it.

    ``budget`` covers the upload; 0: nothing is published.
    """

    def __init__(
        self,
        *,
        store: S3ObjectStore,
        folder: Path,
        schema: Schema,
        training: TrainingSettings,
        budget: timedelta,
        record: Callable[..., None],
    ) -> None:
        self._store = store
        self._global = BucketReader(store)
        self._folder = folder
        self._schema = schema
        self._training = training
        self._schedule = CosineSchedule(
            training.learning_rate, training.warmup_steps, training.total_steps
        )
        self._budget = budget
        self._record = record
        self._uplink = Uplink()
        self._reading: BucketReader | None = None
        self._published: set[int] = set()
        self._thread: threading.Thread | None = None

    def look(
        self, outer_step: int, donors: Sequence[Donor], *, judged: int, period: int, late: bool
    ) -> None:
        """Begin what is missing, unless something is under way.

        ``judged``: the outer step whose uploads ``donors`` have. ``period``: blocks in which an
        outer step's inner steps were made. ``late`` in it, the next outer step's files are made.
        """
        # One at a time: two threads would write the same folder.
        if not self._budget or not donors or (self._thread and self._thread.is_alive()):
            return
        # Until half of the period the uploads of the step before are judged: too old for the next.
        following = [outer_step + 1] if late and judged == outer_step else []
        wanted = [outer_step, *following]
        self._thread = threading.Thread(
            target=self._run, args=(wanted, donors, judged, period), name="inner-optimizer"
        )
        self._thread.daemon = True
        self._thread.start()

    def join(self) -> None:
        """Wait until the work under way has ended."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """End what is under way; the next process goes on with it."""
        self._uplink.stop()
        if self._reading is not None:
            self._reading.stop()
        self.join()

    def _run(self, wanted: list[int], donors: Sequence[Donor], judged: int, period: int) -> None:
        try:
            for outer_step in wanted:
                if not self._there(outer_step):
                    self._publish(outer_step, donors, judged, period)
        except StoppedError:
            return
        except Exception as error:  # noqa: BLE001 - in a thread: it would be lost
            log.warning(
                "The inner optimizer that newcomers take over is not published yet (%s): tried "
                "again after the next scoring pass",
                error,
            )

    def _there(self, outer_step: int) -> bool:
        # All of them: a newcomer cannot begin with a part of the set.
        if outer_step not in self._published and all(
            self._global.head(keys.epoch_key(outer_step, name))
            for name in _names(keys.PUBLIC_RANKS)
        ):
            self._published.add(outer_step)
        return outer_step in self._published

    def _publish(self, outer_step: int, donors: Sequence[Donor], judged: int, period: int) -> None:
        began = time.monotonic()
        made = read_state(self._note, _Made, lost="it is made once more")
        # A set made before a kill is sent as it was: some of it may be in the bucket already.
        if made is None or made.outer_step != outer_step:
            made = self._make(outer_step, donors, judged, period)
        if made is None:
            return
        with Sender(
            store=self._store,
            journal=Journal(self._folder / "uploads.json"),
            deadline=deadline_in(self._budget),
            uplink=self._uplink,
        ) as sender:
            _upload(sender, outer_step, self._folder, _names(keys.PUBLIC_RANKS))
        # Twice the size of the model, and of no use once it is sent.
        shutil.rmtree(self._folder, ignore_errors=True)
        self._published.add(outer_step)
        self._record(
            "inner_optimizer",
            outer_step=outer_step,
            uid=made.uid,
            finished_steps=made.place,
            seconds=round(time.monotonic() - began, 3),
        )
        log.info(
            "Published the inner optimizer of outer step %d: moments of uid %d, inner step %d of "
            "the schedule",
            outer_step,
            made.uid,
            made.place,
        )

    @property
    def _note(self) -> Path:
        return self._folder / "made.json"

    # --- the donor --------------------------------------------------------------------------------

    def _make(
        self, outer_step: int, donors: Sequence[Donor], judged: int, period: int
    ) -> _Made | None:
        """Make the files of an outer step; None if no donor's can be handed on."""
        before = self._place_of(self._global, outer_step - 1) if outer_step else 0
        # A network's first files: before outer step 0 nobody had made a step.
        if before is None and judged == 0:
            before = 0
        most = math.inf if before is None else before + _STEPS_OF_A_BLOCK * period
        places = {}
        for donor in donors[:_ASKED]:
            self._uplink.check_stopped()  # a stop would wait for the answers of all of them
            place = self._place_of(donor.bucket, judged)
            if place is not None and place > most:
                log.warning(
                    "uid %d's inner optimizer is not handed on to newcomers: inner step %d of the "
                    "schedule is beyond what the network can have made (%d)",
                    donor.uid,
                    place,
                    most,
                )
            elif place is not None:
                places[donor.uid] = place
        if not places:
            return None
        # The median: one miner, a liar or a beginner, does not move it.
        place = max(before or 0, statistics.median_low(places.values()))
        ordered = sorted(
            (donor for donor in donors if donor.uid in places),
            key=lambda donor: 2 * places[donor.uid] < place,  # beginners last
        )
        for donor in ordered[:_FETCHED]:
            try:
                found = self._fetch(donor, judged)
                self._check(found)
            except StoppedError:
                raise  # what was fetched stays
            except Exception as error:  # noqa: BLE001 - foreign bytes: another donor's will do
                log.warning(
                    "uid %d's inner optimizer is not handed on to newcomers: %s", donor.uid, error
                )
                continue
            self._write(outer_step, found, place)
            shutil.rmtree(self._folder / "donor", ignore_errors=True)
            made = _Made(outer_step, donor.uid, place)
            write_state(self._note, made)
            return made
        return None

    def _place_of(self, bucket: BucketReader, outer_step: int) -> int | None:
        """Return the place in the schedule in the first file of an outer step; None without one."""
        try:
            ranks = self._ranks(bucket, outer_step)
            if ranks is None:
                return None
            key = keys.epoch_key(outer_step, keys.inner_optimizer(0, ranks))
            return finished_steps(
                pt_content(io.BufferedReader(bucket.open(key, within=_ANSWER), 1 << 16))
            )
        except StoppedError:
            raise
        except Exception as error:  # noqa: BLE001 - foreign bytes: another donor's will do
            log.info("No inner optimizer in bucket %s: %s", bucket.name, error)
            return None

    def _ranks(self, bucket: BucketReader, outer_step: int) -> int | None:
        """Return the number of ranks whose files there are.

        Asked by name: an untrusted bucket's list may have no end.
        """
        for ranks in _RANKS:
            if bucket.head(keys.epoch_key(outer_step, keys.inner_optimizer(0, ranks))):
                return ranks
        return None

    def _fetch(self, donor: Donor, outer_step: int) -> InnerState:
        """Fetch a donor's files. Raises StoreError, ValueError."""
        ranks = self._ranks(donor.bucket, outer_step)
        if ranks is None:
            raise StateUnavailable(f"bucket {donor.bucket.name} has none of {outer_step}")
        self._reading = donor.bucket
        found = donor.bucket.fetch(
            outer_step,
            self._folder / "donor",
            _names(ranks),
            limit=_most_bytes(self._schema, ranks),
        )
        return InnerState(found, self._schema)

    # --- the files --------------------------------------------------------------------------------

    def _write(self, outer_step: int, state: InnerState, place: int) -> None:
        """Write the donor's moments as the files of four ranks."""
        # First: a note of the set before would vouch for this one while it is half written.
        self._note.unlink(missing_ok=True)
        training = self._training
        description = describe_inner(
            self._schema,
            self._schedule,
            finished_steps=place,
            outer_step=outer_step,
            betas=(training.adam_beta1, training.adam_beta2),
            weight_decay=training.weight_decay,
        )
        for rank in range(keys.PUBLIC_RANKS):
            moments = {
                kind: [_rows(state.moment(kind, i), rank) for i in range(len(self._schema))]
                for kind in MOMENTS
            }
            write_shard(
                self._folder / keys.inner_optimizer(rank, keys.PUBLIC_RANKS),
                description,
                schema=self._schema,
                rank=rank,
                ranks=keys.PUBLIC_RANKS,
                steps=state.facts.steps,
                moments=moments,
            )
            self._uplink.check_stopped()

    def _check(self, state: InnerState) -> None:
        """Raise ValueError for moments that AdamW cannot have made."""
        # NaN and Inf are none here: files that hold them were refused when they were fetched.
        squares, clip = 0.0, self._training.gradient_clip
        for index, (name, _) in enumerate(self._schema):
            first, second = (state.moment(kind, index) for kind in MOMENTS)
            if bool((first.abs() > _MOST_RATIO * second.sqrt() + _ROUNDING).any()):
                raise ValueError(f"the moments of {name} are none of AdamW: |m| is above 8 sqrt(v)")
            squares += float(second.sum(dtype=torch.float64))
        if clip and not squares <= _MOST_SQUARES * clip * clip:
            raise ValueError(
                f"its second moments sum up to {squares:.3g}, which gradients clipped to {clip:g} "
                "cannot have made"
            )


def _names(ranks: int) -> list[str]:
    return [keys.inner_optimizer(rank, ranks) for rank in range(ranks)]


def _most_bytes(schema: Schema, ranks: int) -> int:
    """Return the largest size of one donor's file.

    It holds both float32 moments of the first rank's rows, and their description.
    """
    elements = sum(row_range(shape[0], ranks, 0)[1] * math.prod(shape[1:]) for _, shape in schema)
    return 8 * elements + 4096 * len(schema) + (1 << 20)


def _rows(whole: Tensor, rank: int) -> Tensor:
    start, stop = row_range(len(whole), keys.PUBLIC_RANKS, rank)
    # torch.save writes the whole storage of a view: each file would hold all rows.
    return whole[start:stop].clone()
