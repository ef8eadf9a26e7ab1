"""Plan a local subnet: its neurons, their ports and their folders."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

from distributed_training.common.ports import free_ports
from distributed_training.config.model import PRESETS
from distributed_training.config.types import ConfigError

# uid u's rank 1 reads the same pages as uid u + 1's rank 0 (protocol: seed = uid + local rank), so
# uids are spaced wider than any world size that makes sense on one machine.
UID_SPACING = 11
VALIDATOR_UID = 200


@dataclass(frozen=True)
class SubnetOptions:
    """The options of a run of the local subnet. ``ranks``: world size of each miner, in order."""

    folder: Path
    ranks: tuple[int, ...] = (2, 1)
    outer_steps: int = 2
    seconds_per_block: float = 1.0
    blocks_per_allreduce: int | None = None  # None: as the preset says
    # Miners without which no round is called, and peers of a group less one. None: all of them, so
    # that a slow start on a busy machine does not leave one out. Lower it to kill miners.
    least_miners: int | None = None
    restart_miners: bool = False  # one that ended with a fault is started again, as pm2 would
    miner_flags: tuple[str, ...] = ()
    validator_flags: tuple[str, ...] = ()
    miner_script: Path | None = None  # None: the project's neurons
    validator_script: Path | None = None

    @property
    def longest(self) -> timedelta:
        """The longest time of a run: two minutes, and half as long again as its round periods."""
        blocks = self.blocks_per_allreduce or int(PRESETS["local"]["neuron.blocks_per_allreduce"])
        return timedelta(seconds=120 + 1.5 * self.outer_steps * blocks * self.seconds_per_block)


@dataclass(frozen=True)
class NeuronPlan:
    """One neuron of a local subnet, before its start."""

    name: str
    kind: Literal["miner", "validator"]
    uid: int
    world_size: int
    folder: Path
    axon_port: int
    dht_port: int

    @property
    def events(self) -> Path:
        """The path of the neuron's events."""
        return self.folder / "events.jsonl"


def parse_ranks(text: str | None, miners: int | None) -> tuple[int, ...]:
    """Parse world sizes of the miners from ``--ranks 2,1`` and ``--miners N``.

    Without ranks the first miner has 2 and the others 1, so that world sizes differ; a shorter list
    is filled with 1. Raises ConfigError.
    """
    try:
        given = [int(word) for word in text.split(",")] if text else [2]
    except ValueError:
        raise ConfigError(
            f"--ranks {text!r} is not a list of numbers, so nothing was started: "
            "give one per miner, e.g. --ranks 2,1"
        ) from None
    if miners is None:
        miners = len(given) if text else 2
    if miners < 1:
        raise ConfigError(
            f"--miners {miners} leaves nobody to train, so nothing was started: give 1 or more"
        )
    if len(given) > miners and text:
        raise ConfigError(
            f"--ranks names {len(given)} miners but --miners {miners} are wanted, so nothing was "
            "started: make them agree"
        )
    ranks = (given + [1] * miners)[:miners]
    if any(not 1 <= rank < UID_SPACING for rank in ranks):
        raise ConfigError(
            f"--ranks {text}: a miner on this machine has 1 to {UID_SPACING - 1} ranks, so nothing "
            "was started: correct --ranks"
        )
    if miners * UID_SPACING > VALIDATOR_UID:
        raise ConfigError(
            f"--miners {miners} is more than the {VALIDATOR_UID // UID_SPACING} that fit here, so "
            "nothing was started: ask for fewer"
        )
    return tuple(ranks)


def plan_neurons(options: SubnetOptions, folder: Path) -> list[NeuronPlan]:
    """Plan the validator first, which uploads the initial model the miners load."""
    ports = iter(free_ports(2 * (len(options.ranks) + 1)))
    plans = [
        NeuronPlan(
            name="validator",
            kind="validator",
            uid=VALIDATOR_UID,
            world_size=1,
            folder=folder / "validator",
            axon_port=next(ports),
            dht_port=next(ports),
        )
    ]
    for i, ranks in enumerate(options.ranks):
        uid = i * UID_SPACING
        plans.append(
            NeuronPlan(
                name=f"miner-{uid:03d}",
                kind="miner",
                uid=uid,
                world_size=ranks,
                folder=folder / f"miner-{uid:03d}",
                axon_port=next(ports),
                dht_port=next(ports),
            )
        )
    return plans
