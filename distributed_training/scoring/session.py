"""Everything a score preview needs that outlives one look: chain, clients, text, model, weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from distributed_training.chain.base import Neuron
from distributed_training.config import Config, ConfigError
from distributed_training.data.source import open_source
from distributed_training.data.tokenizer import TextTokenizer
from distributed_training.node.chain import follow_chain, miners_of
from distributed_training.node.peers import PeerBuckets, Reader
from distributed_training.node.start import fetch_tokenizer
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import MAX_CONFIG_BYTES, MetadataError, parse_config
from distributed_training.scoring.evaluator import Evaluator, Pages
from distributed_training.scoring.folder import FolderReader
from distributed_training.scoring.judged import Judged, NotJudgeable, read_judged
from distributed_training.scoring.model import EvaluationModel, evaluation_device
from distributed_training.scoring.pages import PageReader
from distributed_training.scoring.preview import Preview, Previewer, draw_random_blocks
from distributed_training.scoring.ranking import PASSES
from distributed_training.store.errors import ObjectMissingError, StoreError


@dataclass(frozen=True)
class Wanted:
    """``uids``: whose score, None: everybody's. ``others``: so many miners to rank them among, the
    best paid first. ``random_blocks``: as validators drew them; empty: ``draws`` of our own.
    ``timeout``: for all that is read from one miner."""

    uids: Sequence[int] | None = None
    others: int = 8
    random_blocks: Sequence[int] = ()
    draws: int = 1
    passes: int = PASSES
    timeout: timedelta = timedelta(seconds=60)


@dataclass(frozen=True)
class Sources:
    """Where a preview looks: the block of now, the miners, the global bucket, a miner's bucket."""

    block: Callable[[], int]
    miners: Callable[[], Sequence[Neuron]]
    global_bucket: Callable[[], Reader]
    open_bucket: Callable[[Neuron], Reader]
    outer_step: int | None = None  # to judge; None: as the block says


def on_chain(
    config: Config,
    stack: ExitStack,
    *,
    master: str | None,
    timeout: timedelta,
    instead: Mapping[int, Reader] | None = None,
) -> Sources:
    """The subnet's own. No wallet is needed: what is read is public. ``master``: hotkey of whoever
    owns the global bucket, None for the validator with the largest stake. ``instead``: by uid, what
    is read in place of its bucket. Raises NetworkFailure."""
    chain = follow_chain(config.chain, stack)
    peers = PeerBuckets(config.store, chain, large=timeout)
    patient = PeerBuckets(config.store, chain, small=timedelta(seconds=30))
    stake = config.validator.minimum_stake
    readers = instead or {}

    def miners() -> Sequence[Neuron]:
        # One that is not served yet can be read all the same.
        known = miners_of(chain.neurons(), minimum_stake=stake)
        return [*known, *(n for n in chain.neurons() if n.uid in readers and n not in known)]

    def global_bucket() -> Reader:
        validators = [n for n in chain.neurons() if n.validator_permit]
        largest = max(validators, key=lambda n: n.stake, default=None)
        return patient.of_master(master or (largest.hotkey if largest else ""))

    return Sources(
        block=chain.block,
        miners=miners,
        global_bucket=global_bucket,
        open_bucket=lambda neuron: readers.get(neuron.uid) or peers.of_miner(neuron),
    )


def in_folders(upload: Path, global_state: Path, uid: int) -> Sources:
    """An upload in a folder against a global state in a folder, without any network. "Now" is when
    its newest block was trained. Raises ConfigError."""
    reader, state = FolderReader(upload), FolderReader(global_state)
    try:
        root = reader.root()
        if root is None:
            raise ObjectMissingError(f"{upload} holds no upload")
        config = reader.get(keys.epoch_key(root.outer_step, keys.CONFIG), limit=MAX_CONFIG_BYTES)
        blocks = parse_config(config or b"{}")[1].block_list
    except (StoreError, MetadataError) as error:
        raise ConfigError(
            f"--folder {upload} cannot be scored ({error}): give the folder of one upload"
        ) from None
    return Sources(
        block=lambda: max(blocks, default=0),
        miners=lambda: [Neuron(uid, hotkey="", port=1)],
        global_bucket=lambda: state,
        open_bucket=lambda neuron: reader,
        outer_step=root.outer_step,
    )


class Session:
    """``config``: of kind validator, since a preview judges as one does. ``folder`` keeps tokenizer
    and global weights. Raises ConfigError."""

    def __init__(self, config: Config, sources: Sources, *, folder: Path) -> None:
        self._config = config
        self._sources = sources
        self._folder = folder
        tokenizer_path, eos_id = fetch_tokenizer(config, folder)
        self._pages: Pages = PageReader.from_settings(
            config, open_source(config.data), TextTokenizer(tokenizer_path, eos_id=eos_id)
        )
        self._device = evaluation_device(config.miner.device)
        self._model: EvaluationModel | None = None
        self._random = random.Random()

    def look(self, wanted: Wanted) -> Preview:
        """Raises NotJudgeable, ConfigError (a uid nobody has), ChainError, Stopped."""
        settings, sources = self._config.validator, self._sources
        block = sources.block()
        judged = self._judged(block)
        previewer = Previewer(
            judged=judged,
            open_bucket=sources.open_bucket,
            evaluator=Evaluator(model=self._model_of(judged), pages=self._pages),
            age_limit=settings.upload_age_limit,
            timeout=wanted.timeout,
        )
        blocks = wanted.random_blocks or draw_random_blocks(block, wanted.draws, self._random)
        return previewer.run(
            choose(sources.miners(), wanted), random_blocks=blocks, passes=wanted.passes
        )

    def _judged(self, block: int) -> Judged:
        settings = self._config.validator
        try:
            bucket = self._sources.global_bucket()
        except StoreError as error:
            raise NotJudgeable(
                f"the global bucket cannot be found ({error}): check --neuron.master_ss58_address"
            ) from None
        return read_judged(
            bucket,
            self._folder / "global",
            block=block,
            bpa=settings.blocks_per_allreduce,
            bpa_later=settings.blocks_per_allreduce_later,
            outer_step=self._sources.outer_step,
        )

    def _model_of(self, judged: Judged) -> EvaluationModel:
        """Made once; a network does not change its model."""
        if self._model is None or list(self._model.schema) != list(judged.schema):
            self._model = EvaluationModel(model_config=judged.model_config, device=self._device)
        return self._model


def choose(miners: Sequence[Neuron], wanted: Wanted) -> Sequence[Neuron]:
    """Those asked for, then those to compare them with. Raises ConfigError."""
    if wanted.uids is None:
        return miners
    by_uid = {neuron.uid: neuron for neuron in miners}
    for uid in wanted.uids:
        if uid not in by_uid:
            raise ConfigError(
                f"uid {uid} is no miner with an endpoint on this subnet, so validators do not "
                "score it: check --uid, --netuid and the network"
            )
    asked = [by_uid[uid] for uid in dict.fromkeys(wanted.uids)]
    rest = [neuron for neuron in miners if neuron.uid not in set(wanted.uids)]
    rest.sort(key=lambda neuron: (-neuron.incentive, neuron.uid))
    return [*asked, *rest[: wanted.others]]
