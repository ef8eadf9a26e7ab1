"""Name the causes of a miner's zero score, or of one to come, each with its one fix.

Ordered by what stands in the way first: nothing below a cause matters before it is fixed.
"""

from __future__ import annotations

import enum


class Cause(enum.Enum):
    """``value``: (what it costs, what to do)."""

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
        "upload again; every block that was trained on belongs into the list",
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
        "check the run's loss, --neuron.learning_rate and --neuron.error_feedback",
    )
    ASSIGNED_NOT_BETTER = (
        "assigned score falls by 5 %: its own text does not gain more than unseen text",
        "train on every judged page of the listed blocks; more inner steps before each upload",
    )
    RANKED_LOW = (
        "train score 0: others' uploads lower the loss more",
        "upload a better step: --neuron.step_length search, more inner steps before an upload",
    )

    @property
    def costs(self) -> str:
        return self.value[0]

    @property
    def remedy(self) -> str:
        return self.value[1]
