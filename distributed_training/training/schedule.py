"""Learning rate of the inner optimizer: linear warm-up, then a cosine to zero.

Shape and constants as the public network uses them (protocol page, section 5).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass
class CosineSchedule:
    """Maps the number of finished inner steps, never reset, to a learning rate.

    The first step trains at ``peak / warmup_steps``: unlike the common form, which spends its
    first step at a learning rate of zero.
    """

    peak: float
    warmup_steps: int
    total_steps: int
    factor: float = 1.0  # of the peak; lowered for ``slow_steps`` after a roll-back
    slow_until: int = 0  # inner steps in total at which ``factor`` returns to 1

    def __post_init__(self) -> None:
        if self.peak <= 0:
            raise ValueError(
                f"--neuron.learning_rate {self.peak} is not above 0, so nothing would be learned: "
                "give a positive rate such as 2.5e-4"
            )
        if not 0 <= self.warmup_steps < self.total_steps:
            raise ValueError(
                f"--neuron.warmup_steps {self.warmup_steps} is not below --neuron.total_steps "
                f"{self.total_steps}, so the learning rate would never fall: correct one of them"
            )

    def rate(self, finished_steps: int) -> float:
        """Learning rate of the step after ``finished_steps`` steps."""
        step = finished_steps + 1
        if step <= self.warmup_steps:
            shape = step / self.warmup_steps
        else:
            progress = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
            shape = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
        slow = self.factor if finished_steps < self.slow_until else 1.0
        return self.peak * shape * slow

    def slow_down(self, finished_steps: int, *, steps: int) -> None:
        """Halve the rate for the next ``steps`` steps. A second call compounds."""
        still_slow = finished_steps < self.slow_until
        self.factor = 0.5 * (self.factor if still_slow else 1.0)
        self.slow_until = finished_steps + steps

    def state(self) -> dict[str, Any]:
        return {"factor": self.factor, "slow_until": self.slow_until}

    def load(self, state: dict[str, Any]) -> None:
        self.factor = float(state["factor"])
        self.slow_until = int(state["slow_until"])

    def published_state(self, finished_steps: int) -> dict[str, Any]:
        """As ``torch.optim.lr_scheduler.LambdaLR.state_dict()`` has it (protocol page, 3)."""
        return {
            "base_lrs": [self.peak],
            "last_epoch": finished_steps,
            "_step_count": finished_steps + 1,
            "_get_lr_called_within_step": False,
            "_last_lr": [self.rate(finished_steps)],
            "lr_lambdas": [None],
        }
