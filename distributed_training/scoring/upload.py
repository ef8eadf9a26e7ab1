"""Read one upload to be judged: its bucket, block list, text and pseudo-gradient.

An invalid bucket multiplies the total score by 0 whatever the upload is worth (protocol page,
section 7). The upload is read from ``epoch-X`` of the miner's bucket, X being the outer step that
is judged now; it is judged on the pages of one listed block, cut into sequences as miners cut them
(protocol page, section 5). Everything in a bucket is untrusted: sizes are bounded before anything
is read, the content is checked before use. A :class:`Cause` names why a score is zero and the one
thing that fixes it; causes are ordered by what stands in the way first.
"""

from __future__ import annotations

import enum
import errno
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from distributed_training.chain.base import ChainError, Neuron
from distributed_training.config import Config
from distributed_training.data.block_builder import open_source
from distributed_training.data.held_out import domain_tokens
from distributed_training.data.page_source import PageSource, PageUnavailable
from distributed_training.data.tokenizer import TextTokenizer
from distributed_training.node.buckets import NoBucket
from distributed_training.node.start import NetworkFailure
from distributed_training.protocol import keys
from distributed_training.protocol.compression import Compression
from distributed_training.protocol.gradients import (
    TOP_K,
    PayloadError,
    Schema,
    load_payload,
    max_payload_bytes,
)
from distributed_training.protocol.metadata import MAX_METADATA_BYTES, Metadata, MetadataError
from distributed_training.protocol.page_permutation import DrawPages
from distributed_training.protocol.pages import JUDGED_OF_DOMAINS, select_pages
from distributed_training.protocol.scoring import blocks_are_fresh
from distributed_training.store.base import ObjectInfo
from distributed_training.store.bucket_reader import (
    BucketReader,
    StateUnavailable,
    pt_content,
    states,
)
from distributed_training.store.errors import (
    DeadlineError,
    IntegrityError,
    ObjectMissingError,
    StoreError,
)
from distributed_training.store.folder import FolderStore
from distributed_training.store.snapshot_folder import read_config

log = logging.getLogger(__name__)


class Cause(enum.Enum):
    """The causes of a zero score, or of one to come: what it costs, and its one fix.

    Ordered by what stands in the way first: nothing below a cause matters before it is fixed.
    """

    NO_COMMITMENT = (
        "total score 0: validators do not know the bucket",
        "start the miner with read keys in .env; it writes them to the chain by itself",
    )
    UNREACHABLE = (
        "total score 0: validators cannot read the bucket",
        "check that the bucket exists under this name and that the committed read key may read it",
    )
    NOTHING_PUBLISHED = (
        "total score 0: nothing was uploaded in the outer step that is judged",
        "look into the miner's log for why no upload ended; scripts/diagnose.py checks the keys",
    )
    STALE = (
        "total score 0: the newest upload is older than validators allow",
        "upload more often: lower --neuron.upload_steps, or shorten the upload",
    )
    NO_METADATA = (
        "never judged: the root metadata.json is missing or damaged",
        "let the miner finish an upload; it writes this file last",
    )
    INNER_STEP_ZERO = (
        "never judged: the uploaded inner step is 0",
        "let the miner upload after its first inner steps",
    )
    NO_BLOCKS = (
        "reset, as if it ranked last: block_list in config.json is missing or empty",
        "upload again; every block that was trained on belongs in the list",
    )
    OLD_BLOCKS = (
        "reset, as if it ranked last: the newest trained block is too old",
        "train on recent blocks: faster steps, fewer blocks fetched ahead, earlier uploads",
    )
    BAD_GRADIENT = (
        "reset, as if it ranked last: gradients.pt cannot be used",
        "upload again with an unchanged miner; the reason names what is wrong in the file",
    )
    TOO_SLOW = (
        "validators may give up on it: the bucket answers too slowly",
        "check the bucket's place and whether something else fills the line",
    )
    NOT_FINITE = (
        "reset, as if it ranked last: the loss after the upload is not finite",
        "the uploaded values are far too large: check the learning rate and the run's loss",
    )
    NO_DATA = (
        "not known here: the text of its blocks could not be had",
        "try again later, or check --data.source",
    )
    MAKES_IT_WORSE = (
        "ranks behind uploads that do nothing: the upload raises the loss on unseen text",
        "check the run's loss and training.learning_rate",
    )
    ASSIGNED_NOT_BETTER = (
        "assigned score falls by 5 %: its own text does not gain more than unseen text",
        "train on every judged page of the listed blocks; more inner steps before each upload",
    )

    def __init__(self, costs: str, remedy: str) -> None:
        self.costs = costs
        self.remedy = remedy


@dataclass(frozen=True)
class Judged:
    """The global state that uploads are judged against, at one block.

    Args:
        block: The chain's present block.
        bpa: Blocks between two rounds (blocks per all-reduce).
        outer_step: X, the folder of a miner's bucket that is judged now: after a round it is the
            outer step before, for half a round period.
        schema: Names and shapes of the parameters, in state-dict order.
        weights: Global weights of outer step X, float32 on the CPU, in the order of ``schema``.
        learning_rate: The outer learning rate.
        compression: How uploads are encoded.

    Examples:
        ```python
        judged = Judged(
            block=5120,
            bpa=750,
            outer_step=state.outer_step,
            schema=state.schema,
            weights=state.weights,
            learning_rate=state.learning_rate,
        )
        ```
    """

    block: int
    bpa: int
    outer_step: int
    schema: Schema
    weights: Sequence[Tensor]
    learning_rate: float
    compression: Compression = field(default=TOP_K, kw_only=True)


# A miner's bucket, by its commitment. Raises NoBucket, and ChainError.
OpenBucket = Callable[[Neuron], BucketReader]


@dataclass(frozen=True)
class Repository:
    """The findings of one visit to a miner's bucket.

    ``valid``: the factor of the total score. ``cause`` and ``reason`` give the reason if it is 0; a
    valid bucket has them too when its metadata cannot be used. ``metadata``: of the root, None if
    unreadable.
    """

    uid: int
    valid: bool
    cause: Cause | None = None
    reason: str = ""
    bucket: BucketReader | None = None
    metadata: Metadata | None = None
    age: timedelta | None = None  # of epoch-X/gradients.pt, by the store's clock

    @property
    def trained(self) -> bool:
        """True if an inner step was uploaded: no other repository is judged."""
        return self.metadata is not None and self.metadata.inner_step > 0

    @property
    def tag(self) -> str:
        """``run.outer.inner`` of the root metadata, empty without one."""
        return self.metadata.revision.tag if self.metadata else ""


def inspect(
    neuron: Neuron, open_bucket: OpenBucket, *, outer_step: int, age_limit: timedelta
) -> Repository:
    """Check commitment, credentials, age of ``epoch-X/gradients.pt``. Raises ChainError."""
    metadata, cause, reason = None, None, ""
    try:
        bucket = open_bucket(neuron)
        age = bucket.age(outer_step)
        try:
            # Damaged metadata leaves the factor at 1, as with the public validator: it looks at the
            # commitment and at the age only.
            metadata = bucket.metadata()
        except StateUnavailable as error:
            reason = str(error)
    except NoBucket as error:
        return Repository(neuron.uid, False, Cause.NO_COMMITMENT, str(error))
    except StoreError as error:
        return Repository(neuron.uid, False, Cause.UNREACHABLE, str(error))
    except ChainError:
        raise
    except Exception as error:  # noqa: BLE001 - foreign bytes: one bucket costs no other its pass
        why = in_a_line(error)
        log.warning("uid %d: its bucket cannot be read, which counts as none: %s", neuron.uid, why)
        return Repository(neuron.uid, False, Cause.UNREACHABLE, why)
    if metadata is None:
        cause, reason = Cause.NO_METADATA, reason or f"no {keys.ROOT_METADATA} at the root"
    elif metadata.inner_step == 0:
        cause, reason = Cause.INNER_STEP_ZERO, "inner_step of the root metadata is 0"
    valid = age is not None and age < age_limit
    if age is None:
        cause = Cause.NOTHING_PUBLISHED
        reason = f"no {keys.epoch_key(outer_step, keys.GRADIENTS)}"
    elif not valid:
        old, limit = age.total_seconds(), age_limit.total_seconds()
        cause, reason = Cause.STALE, f"upload is {old:.0f} s old, limit {limit:.0f} s"
    return Repository(neuron.uid, valid, cause, reason, bucket, metadata, age)


PAGES = 2  # the first pages of each rank are evaluated, if it reads that many
BATCH = 2  # sequences come in pairs


class DataUnavailable(RuntimeError):
    """Pages, or this machine's memory, cannot be had now; says nothing about the upload."""


class ShortText(DataUnavailable):
    """A block has less text than a judgement needs, and never will have more."""


def pages_of(
    config: Config, tokenizer_path: Path, eos_id: int, *, limit: int = 0
) -> Callable[[int, int], Tensor]:
    """Return the reader of the text that this network's uploads are judged on.

    Raises ConfigError, NetworkFailure.
    """
    if not config.data.own:
        return PageReader.from_settings(config, tokenizer_path, eos_id, limit=limit)
    length, wanted = config.training.sequence_length, limit or JUDGED_OF_DOMAINS
    try:
        tokens = domain_tokens(config, tokenizer_path, eos_id)
    except PageUnavailable as error:
        raise NetworkFailure(f"uploads cannot be judged: {error}") from None

    def read(uid: int, block: int) -> Tensor:
        del uid  # all are judged on the same
        draw, found = random.Random(block), []
        for domain in config.domains:
            of_domain = tokens[domain.name]
            for _ in range(max(1, round(wanted * domain.weight))):
                start = draw.randint(0, len(of_domain) - length)
                found.append(torch.from_numpy(of_domain[start : start + length].astype(np.int64)))
        return torch.stack(found)

    return read


@dataclass(frozen=True)
class PageReader:
    """Reads the text of ``(uid, block)`` for the evaluator, as the miner with that uid reads it.

    Args:
        source: Has the rows of the data set.
        tokenizer: Turns rows into tokens.
        sequence_length: Tokens of a sequence.
        ranks: How many ranks of the miner are read.
        pages: Pages of each rank.
        rows_per_page: Rows of a page.
        max_length: Tokens after which a row is cut.
        limit: The most sequences in all; 0: no limit.
        draw_pages: The network's draw of pages.
        patience: The longest time for the pages of a block, apart from the last page's own.

    Examples:
        ```python
        read = PageReader.from_settings(config, tokenizer_path, eos_id=0)
        sequences = read(17, 5120)  # uid, block: int64 (n, sequence_length)
        ```
    """

    source: PageSource
    tokenizer: TextTokenizer
    sequence_length: int
    ranks: int
    pages: int
    rows_per_page: int
    max_length: int
    limit: int = 0
    draw_pages: DrawPages = select_pages
    patience: timedelta = timedelta(minutes=5)  # with the pages of a block, except the last one's

    @classmethod
    def from_settings(
        cls, config: Config, tokenizer_path: Path, eos_id: int, *, limit: int = 0
    ) -> PageReader:
        """Make the reader that a validator with this configuration has.

        Args:
            config: The validator's configuration, with the network's rules.
            tokenizer_path: A ``tokenizer.json``.
            eos_id: Token id that ends a row.
            limit: The most sequences of a block; 0: no limit.

        Raises:
            ConfigError: If the data source cannot be opened.
        """
        # A validator leads no round while it waits for a page, and asks for it again later.
        data = replace(config.data, longest_pause=timedelta(minutes=1))
        return cls(
            source=open_source(data, cache=config.data_cache),
            tokenizer=TextTokenizer(tokenizer_path, eos_id=eos_id),
            sequence_length=config.training.sequence_length,
            ranks=config.validator.evaluation_ranks,
            pages=min(PAGES, config.data.pages_per_block),
            rows_per_page=config.data.rows_per_page,
            max_length=config.data.max_length,
            limit=limit,
            draw_pages=config.draw_pages,
        )

    def __call__(self, uid: int, block: int) -> Tensor:
        """Return the text of a block as int64 ``(n, sequence_length)``.

        Raises DataUnavailable: rows cannot be had now, or come too slowly; ShortText: they are too
        few for two sequences or a page.
        """
        per_rank = -(-self.limit // self.ranks) if self.limit else None
        tokens = []
        try:
            # Once: a table that changes between two ranks would make a text that nobody trained on.
            table = self.source.num_rows()
            deadline = time.monotonic() + self.patience.total_seconds()
            # Each rank apart: the miner's ranks cut their own text, and joined it would shift.
            for rank in range(self.ranks):
                rows: list[str] = []
                for config, row, split in self.draw_pages(
                    uid=uid,
                    local_rank=rank,
                    block=block,
                    n_pages=self.pages,
                    num_rows=table,
                ):
                    # A slow server has two minutes for each page, and a validator leads no round
                    # before the text of an upload is there.
                    if time.monotonic() >= deadline:
                        took = f"its pages take longer than {self.patience.total_seconds():g} s"
                        raise PageUnavailable(took)
                    rows += self.source.rows(config, row, split=split, limit=self.rows_per_page)
                tokens.append(self.tokenizer.encode_rows(rows, max_length=self.max_length))
        # ValueError: the page selection drew a config that is too small for a page.
        except (PageUnavailable, OSError, ValueError) as error:
            kind = ShortText if isinstance(error, ValueError) else DataUnavailable
            raise kind(f"pages of uid {uid}, block {block}: {error}") from error
        # Validators cut all ranks to the shortest, and drop a tail of less than two sequences.
        length = self.sequence_length
        count = min(map(len, tokens)) // (BATCH * length) * BATCH
        if count == 0:
            raise ShortText(f"pages of uid {uid}, block {block} hold less than two sequences")
        cut = [each[: count * length].astype(np.int64).reshape(count, length) for each in tokens]
        return torch.cat([torch.from_numpy(each)[:per_rank] for each in cut])


Result = TypeVar("Result")


class InvalidUpload(ValueError):
    """An upload that is reset: validators count it as no improvement, which ranks it last.

    Args:
        cause: What stands in the way, with its remedy.
        reason: The finding in words, for the log.

    Examples:
        >>> error = InvalidUpload(Cause.OLD_BLOCKS, "block 5000 is too old")
        >>> str(error), error.cause.name
        ('block 5000 is too old', 'OLD_BLOCKS')
    """

    def __init__(self, cause: Cause, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


class Payload(Protocol):
    """The pseudo-gradient of an upload, of either exchange."""

    def decode(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return a parameter's values; None: it was not sent."""
        ...


@dataclass(frozen=True)
class Upload:
    """One miner's upload, read and checked.

    Args:
        uid: The miner's.
        blocks: Trained blocks as the miner lists them; never empty.
        payload: The pseudo-gradient.

    Examples:
        ```python
        upload = read_upload(repository, judged, timeout=timedelta(minutes=5))
        print(upload.uid, max(upload.blocks))
        for name, shape in judged.schema:
            delta = upload.payload.decode(name, shape)  # float32, or None: not sent
        ```
    """

    uid: int
    blocks: tuple[int, ...]  # as the miner lists them; never empty
    payload: Payload


def in_a_line(error: BaseException) -> str:
    """Return type and text of an error that nobody expected, 200 characters at most."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


_LACKING = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EIO)


def of_this_machine(error: BaseException | None) -> bool:
    """Return whether it is this machine that lacks something, whatever it was reading."""
    if isinstance(error, OSError):
        return error.errno in _LACKING
    lacking = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
    # torch raises a RuntimeError where the host has no memory left.
    return isinstance(error, lacking) or "t allocate memory" in str(error)


def within(timeout: timedelta, task: Callable[[], Result]) -> Result:
    """Run ``task()`` in a thread of its own, which is left behind after ``timeout``.

    A store may send a byte a minute for ever. Raises TimeoutError and the errors of ``task``.
    """
    return begun(task).result(timeout=max(0.0, timeout.total_seconds()))


def begun(task: Callable[[], Result]) -> Future[Result]:
    """Run ``task()`` in a thread of its own, which does not keep the program from ending."""
    done: Future[Result] = Future()
    # No pool: Python waits for a pool's threads before it ends.
    threading.Thread(target=fulfil, args=(done, task), name="asking", daemon=True).start()
    return done


def fulfil(promised: Future[Result], task: Callable[[], Result]) -> None:
    """Run ``task()`` here and give its result, or its error, to ``promised``."""
    try:
        promised.set_result(task())
    except BaseException as error:  # noqa: BLE001 - whatever it is, whoever waits gets it
        promised.set_exception(error)


def read_upload(repository: Repository, judged: Judged, *, timeout: timedelta) -> Upload:
    """Read and check the upload in a miner's bucket.

    Args:
        repository: The bucket, as :func:`inspect` found it.
        judged: The global state to judge it against.
        timeout: Time for all reading.

    Raises:
        InvalidUpload: If the upload cannot be used, or the bucket does not answer.
        DataUnavailable: If this machine could not read it.
    """
    try:
        return within(timeout, partial(_read, repository, judged))
    except TimeoutError:
        why = f"gradients.pt was not read in {round(timeout.total_seconds(), 1):g} s"
        raise InvalidUpload(Cause.TOO_SLOW, why) from None
    # IntegrityError and DeadlineError are StoreErrors too, so they come first.
    except IntegrityError as error:
        raise InvalidUpload(Cause.BAD_GRADIENT, str(error)) from None
    except DeadlineError as error:
        raise InvalidUpload(Cause.TOO_SLOW, str(error)) from None
    except StoreError as error:
        raise InvalidUpload(Cause.UNREACHABLE, str(error)) from None
    except InvalidUpload:
        raise
    except Exception as error:  # noqa: BLE001 - whatever foreign bytes made a library raise
        if of_this_machine(error) or of_this_machine(error.__cause__):
            raise DataUnavailable(f"this machine could not read it: {in_a_line(error)}") from None
        raise InvalidUpload(Cause.BAD_GRADIENT, in_a_line(error)) from None


def _read(repository: Repository, judged: Judged) -> Upload:
    bucket = repository.bucket
    if repository.cause is not None or bucket is None:
        raise InvalidUpload(repository.cause or Cause.UNREACHABLE, repository.reason)
    try:
        # Before gradients.pt: a stale list saves its download.
        blocks = bucket.config(judged.outer_step)[1].block_list
    except StateUnavailable as error:
        raise InvalidUpload(Cause.NO_BLOCKS, f"block_list cannot be read: {error}") from None
    if not blocks:
        raise InvalidUpload(Cause.NO_BLOCKS, "block_list is empty")
    if not blocks_are_fresh(blocks, block=judged.block, bpa=judged.bpa):
        raise InvalidUpload(
            Cause.OLD_BLOCKS,
            f"newest trained block {max(blocks)} is too old at block {judged.block}: more than "
            f"{judged.bpa // 2} blocks",
        )
    key = keys.epoch_key(judged.outer_step, keys.GRADIENTS)
    try:
        # No byte is fetched of a file that is larger than this model's can be.
        raw = bucket.read(key, limit=max_payload_bytes(judged.schema, judged.compression))
        # Checked here, within the timeout: a judgement only uses it.
        payload = load_payload(raw, judged.schema, judged.compression)
        return Upload(repository.uid, tuple(blocks), payload)
    except ObjectMissingError:
        raise InvalidUpload(Cause.NOTHING_PUBLISHED, "gradients.pt is gone") from None
    except PayloadError as error:
        if of_this_machine(error.__cause__):
            raise
        raise InvalidUpload(Cause.BAD_GRADIENT, str(error)) from None


# --- a folder in place of a bucket ----------------------------------------------------------------


class SnapshotFolder(FolderStore):
    """A folder as a bucket to read, whatever its layout.

    Its files have no age: a copy says nothing of when the original was published, and what is not
    published cannot be too old.

    ``folder`` is laid out like a bucket (``epoch-N/...``), or holds the files of one outer step, as
    a snapshot does and as a miner keeps the global state. Its root metadata is ``metadata.json``,
    else the newest ``epoch-N/metadata.json``, else what the files say of themselves; of which run
    they are they do not say: ``run``.
    """

    def __init__(self, folder: Path, run: int) -> None:
        super().__init__(folder)
        self._run = run

    def root(self) -> Metadata | None:
        """Read the metadata, None for a folder that holds none. Raises StoreError."""
        found = [self._folder / keys.ROOT_METADATA]
        found += [path / keys.METADATA for _, path in reversed(states(self._folder))]
        for path in found:
            if path.exists():
                try:
                    with self._errors(path.name):
                        return Metadata.parse(path.read_bytes()[: MAX_METADATA_BYTES + 1])
                except MetadataError as error:
                    raise StateUnavailable(f"{path.parent}/{error}") from None
        gradients, config = (self._folder / name for name in (keys.GRADIENTS, keys.CONFIG))
        if not gradients.exists() or not config.exists():
            return None
        content = pt_content(gradients).content
        said = content.get("metadata") if isinstance(content, dict) else None
        outer_step = said.get("outer_step") if isinstance(said, dict) else None
        if type(outer_step) is not int or outer_step < 0:
            raise IntegrityError(f"{gradients} does not say of which outer step it is")
        return Metadata(self._run, outer_step, read_config(config).inner_step, "")

    def head(self, key: str) -> ObjectInfo | None:
        info = super().head(key)
        return None if info is None else replace(info, age_seconds=0.0)

    def get(self, key: str, *, limit: int) -> bytes | None:
        # A snapshot's folder has no such file: then it is made of what its files say.
        if key == keys.ROOT_METADATA:
            root = self.root()
            return root.to_json() if root is not None else None
        return super().get(key, limit=limit)

    def _path(self, key: str) -> Path:
        parsed = keys.parse_epoch_key(key)
        if parsed is not None and not states(self._folder):
            root = self.root()
            if root is not None and root.outer_step == parsed[0]:
                # The files of one outer step, as a snapshot has them: without a folder epoch-N.
                return self._folder / parsed[1]
        return super()._path(key)


def folder_reader(folder: Path, *, run: int = 0) -> BucketReader:
    """Return a reader of a folder that is laid out like a bucket, see :class:`SnapshotFolder`."""
    return BucketReader(SnapshotFolder(folder, run))
