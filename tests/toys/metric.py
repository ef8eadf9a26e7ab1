"""Add two metrics from outside of the package: one of each inner step, one of the machine."""

from __future__ import annotations

import math
import os

from distributed_training.telemetry.metrics import register_metric

register_metric(
    "toy_loss_bits",
    "mean cross-entropy of the last inner step, bits per token",
    step=lambda report: report.loss / math.log(2),
)
register_metric(
    "toy_load", "processes that want a core, over a minute", measure=lambda: os.getloadavg()[0]
)
