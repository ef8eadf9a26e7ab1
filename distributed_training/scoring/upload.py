"""One upload as it is judged: the blocks it says it was trained on and its pseudo-gradient.

Read from ``epoch-X`` of a miner's bucket, X being the outer step that is judged now. Everything in
it is a stranger's: sizes are bounded before anything is read, the content is checked before use.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar

from distributed_training.protocol import keys, schedule
from distributed_training.protocol.metadata import MAX_CONFIG_BYTES, MetadataError, parse_config
from distributed_training.protocol.payload import (
    GradientPayload,
    PayloadError,
    Schema,
    load_payload,
    max_payload_bytes,
)
from distributed_training.scoring.causes import Cause
from distributed_training.scoring.repository import Repository
from distributed_training.store.errors import DeadlineError, IntegrityError, StoreError

Result = TypeVar("Result")


class InvalidUpload(ValueError):
    """An upload that is reset: validators count it as no improvement, which ranks it last."""

    def __init__(self, cause: Cause, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


@dataclass(frozen=True)
class Upload:
    uid: int
    blocks: tuple[int, ...]  # as the miner lists them; never empty
    payload: GradientPayload

    @property
    def assigned_block(self) -> int:
        """The block it is judged on, drawn as the network's validators draw it: from its list, by
        a generator seeded with the uid."""
        return random.Random(self.uid).sample(list(self.blocks), 1)[0]


def within(timeout: timedelta, task: Callable[[], Result]) -> Result:
    """``task()`` in a thread of its own, which is left behind after ``timeout``: a store may send a
    byte a minute for ever.

    Raises TimeoutError and what ``task`` raises.
    """
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(task())
        except BaseException as error:  # noqa: BLE001 - whatever it is, whoever waits gets it
            done.set_exception(error)

    threading.Thread(target=run, name="upload-read", daemon=True).start()
    return done.result(timeout=max(0.0, timeout.total_seconds()))


def read_upload(
    repository: Repository,
    schema: Schema,
    *,
    outer_step: int,
    block: int,
    bpa: int,
    timeout: timedelta,
) -> Upload:
    """``outer_step``: X. ``block``: now; ``bpa``: blocks between two rounds. ``timeout`` covers all
    that is read.

    Raises InvalidUpload, also for a bucket that does not answer.
    """
    read = partial(_read, repository, schema, outer_step=outer_step, block=block, bpa=bpa)
    try:
        return within(timeout, read)
    except TimeoutError:
        why = f"gradients.pt was not read in {round(timeout.total_seconds(), 1):g} s"
        raise InvalidUpload(Cause.TOO_SLOW, why) from None
    except IntegrityError as error:
        raise InvalidUpload(Cause.BAD_GRADIENT, str(error)) from None
    except DeadlineError as error:
        raise InvalidUpload(Cause.TOO_SLOW, str(error)) from None
    except StoreError as error:
        raise InvalidUpload(Cause.UNREACHABLE, str(error)) from None


def _read(
    repository: Repository, schema: Schema, *, outer_step: int, block: int, bpa: int
) -> Upload:
    bucket, metadata = repository.bucket, repository.metadata
    if not repository.valid or bucket is None:
        raise InvalidUpload(repository.cause or Cause.UNREACHABLE, repository.reason)
    if metadata is None:
        raise InvalidUpload(Cause.NO_METADATA, repository.reason or "no root metadata")
    if metadata.inner_step == 0:
        raise InvalidUpload(Cause.INNER_STEP_ZERO, "inner_step of the root metadata is 0")
    data = bucket.get(keys.epoch_key(outer_step, keys.CONFIG), limit=MAX_CONFIG_BYTES)
    try:
        blocks = parse_config(data)[1].block_list if data is not None else ()
    except MetadataError as error:
        raise InvalidUpload(Cause.NO_BLOCKS, str(error)) from None
    if not blocks:
        raise InvalidUpload(Cause.NO_BLOCKS, "block_list is empty")
    if not schedule.blocks_are_fresh(blocks, block=block, bpa=bpa):
        raise InvalidUpload(
            Cause.OLD_BLOCKS,
            f"newest trained block {max(blocks)} is too old at block {block}: more than "
            f"{bpa // 2} blocks",
        )
    raw = bucket.read(keys.epoch_key(outer_step, keys.GRADIENTS), limit=max_payload_bytes(schema))
    if raw is None:
        raise InvalidUpload(Cause.NOTHING_PUBLISHED, "gradients.pt is gone")
    try:
        return Upload(repository.uid, tuple(blocks), load_payload(raw, schema))
    except PayloadError as error:
        raise InvalidUpload(Cause.BAD_GRADIENT, str(error)) from None
