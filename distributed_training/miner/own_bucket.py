"""This miner's own bucket, as a start finds it."""

from __future__ import annotations

import logging
from contextlib import closing

from distributed_training.chain.base import ChainUnavailable
from distributed_training.config import Config
from distributed_training.node import buckets
from distributed_training.node.identity import Member
from distributed_training.node.start import NetworkFailure

log = logging.getLogger(__name__)


def check_own_bucket(config: Config, member: Member, bucket: str) -> str:
    """Check both keys of our bucket; return its commitment: its read key, as the chain holds it.

    Raises ConfigError, NetworkFailure.
    """
    try:
        with closing(buckets.open_own(config.store, bucket)) as store:
            buckets.check_own(store)
        return buckets.own_commitment(config.store, bucket)
    except NetworkFailure as error:
        commitment = buckets.commitment_text(config.store)
        try:
            shown = member.chain.commitment(member.hotkey)
        except ChainUnavailable:  # only the neurons could be read so far
            shown = None
        # What the chain shows was tried by an earlier start; other keys are not published untried.
        if shown != commitment:
            raise
        log.warning(
            "Bucket %s does not answer (%s): starting without a look into it; uploads are tried "
            "until it answers",
            bucket,
            error,
        )
        return commitment
