"""Settings of the reference validator. Defaults are those of the public network's validators."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from .flags import DAY, HOUR, MINUTE, SECOND, SETTINGS, flag
from .values import Duration, File


@dataclass(frozen=True, config=SETTINGS)
class ValidatorSettings:
    """What the validator calls, scores and publishes, and when."""

    # the period
    blocks_per_allreduce: int = flag("neuron.blocks_per_allreduce", 400, ge=1, le=1_000_000)
    """blocks between two all-reduce rounds, as the validator counts them (1 block = 12 s)"""
    blocks_per_allreduce_later: int = flag(
        "validator.blocks_per_allreduce_later", 750, ge=0, le=1_000_000
    )
    """blocks between two rounds after the first successful one; 0: no change"""
    epoch_length: int = flag("neuron.epoch_length", 160, ge=1, le=1_000_000)
    """blocks between two times the weights are written to the chain"""
    tick: Duration = flag("validator.tick", SECOND, ge=SECOND / 100, le=MINUTE)
    """time between two looks at the block clock"""

    # the round
    alive_wanted: int = flag("validator.alive_wanted", 64, ge=1, le=4096)
    """miners to call to a round; each sweep that finds fewer lowers this by one, down to
    --validator.alive_least"""
    alive_least: int = flag("validator.alive_least", 3, ge=1, le=4096)
    """fewest alive miners with which a round is called at all"""
    alive_timeout: Duration = flag(
        "validator.alive_timeout", 2.3 * SECOND, ge=SECOND / 10, le=MINUTE
    )
    """time a miner has to answer one IsAlive call"""
    sweep_interval: Duration = flag(
        "validator.sweep_interval", 5 * SECOND, ge=SECOND / 1000, le=HOUR
    )
    """time between two IsAlive sweeps while too few miners are alive"""
    sweep_patience: Duration = flag("validator.sweep_patience", 120 * SECOND, ge=0 * SECOND, le=DAY)
    """how long sweeps go on while not even --validator.alive_least miners are alive; then the round
    has failed and a whole period passes"""
    minimum_peers: int = flag("validator.minimum_peers", 3, ge=1, le=4096)
    """peers (this validator included, failed ones not) without which an average is refused"""
    loss_tolerance: float = flag("validator.loss_tolerance", 0.25, ge=0, le=1000)
    """an outer step is refused when it makes the held-out loss worse by more than this fraction"""
    top_candidates: int = flag("validator.top_candidates", 3, ge=0, le=256)
    """miners, best first, whose checkpoint is tried as this validator's own contribution"""

    publication_budget: Duration = flag(
        "validator.publication_budget", 1800 * SECOND, ge=0 * SECOND, le=DAY
    )
    """how long the publication of an outer step is tried again before the step is given up"""

    # the initial model, only when the global bucket is empty
    model_config: File | None = flag("validator.model_config", None)
    """config.json of the model to publish when the global bucket is empty (default: a Llama of
    about 2 million parameters)"""
    initial_seed: int = flag("validator.initial_seed", 42, ge=0, le=2**63 - 1)
    """seed of the initial weights"""

    # scoring
    score_blocks: int = flag("validator.score_blocks", 25, ge=1, le=1_000_000)
    """blocks between two scoring passes over the miners' uploads"""
    score_uids: int = flag("validator.score_uids", 25, ge=1, le=4096)
    """miners scored in one pass"""
    upload_age_limit: Duration = flag(
        "validator.upload_age_limit", 4800 * SECOND, ge=SECOND, le=30 * DAY
    )
    """an upload older than this makes its miner's total score zero"""
    evaluation_ranks: int = flag("validator.evaluation_ranks", 4, ge=1, le=64)
    """ranks of a miner whose pages are evaluated (2 pages each); the public validators use 4"""
    evaluation_pages: int = flag("validator.evaluation_pages", 2, ge=1, le=1000)
    """pages evaluated for each rank: the first of the miner's"""
    evaluation_sequences: int = flag("validator.evaluation_sequences", 0, ge=0, le=1_000_000)
    """at most so many sequences for each evaluation; 0: all of the pages"""
    held_out_sequences: int = flag("validator.held_out_sequences", 32, ge=1, le=1_000_000)
    """sequences of held-out text on which each outer step is judged"""
    seed: int = flag("validator.seed", 0, ge=0, le=2**63 - 1)
    """seed of the random blocks; 0: from the system"""
    minimum_stake: float = flag("validator.minimum_stake", 40960.0, ge=0, le=1e12)
    """uids with a permit and more stake than this are validators and not called"""
