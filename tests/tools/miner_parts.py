"""Parts of a miner that several of its tests build alike."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from distributed_training.config import Config
from distributed_training.protocol.types import PublicationReport, Revision, StepReport
from distributed_training.store.upload_schedule import UploadSchedule
from tests.tools.network import ALICE, network_file
from tests.tools.settings import load_config


def config_of(*argv: str, rules: Mapping[str, Any] = {}, signer: Any = ALICE) -> Config:
    """Return the configuration of only these flags, unchecked.

    ``rules``: where the network's file is not the public one's.
    """
    with tempfile.TemporaryDirectory() as folder:
        if rules:
            file = network_file(Path(folder), rules, base="sn38", signer=signer)
            argv = ("--network", file, *argv)
        return load_config("miner", argv, environ={}, dotenv=None, check=False)


def step_report(inner_step: int = 7, *, outer_step: int = 3, **changes: Any) -> StepReport:
    """A step of 2 s."""
    figures = {"loss": 2.5, "learning_rate": 1e-3, "tokens": 256, "samples": 8, "seconds": 2.0}
    figures |= {"data_wait_seconds": 0.5, "micro_batches": 2}
    return StepReport(outer_step, inner_step, **figures | changes)  # type: ignore[arg-type]


def upload_schedule(
    *, upload_steps: int = 10, first: int = 10, published_at: float | None = None
) -> UploadSchedule:
    """An upload every ``upload_steps`` inner steps from the step ``first`` on."""
    return UploadSchedule(
        upload_steps=upload_steps,
        minimum_inner_step=first,
        age_limit=timedelta(hours=9),
        published_at=published_at,
    )


class KeptUploads:
    """In the place of the uploader: it keeps what it is given, and reports as scripted.

    ``succeeds``: each submission, at once.
    """

    busy = False

    def __init__(self, *, last_checked: int | None = None, succeeds: bool = False) -> None:
        self.last_checked, self._succeeds = last_checked, succeeds
        self.paused = False
        self.submitted: list[dict[str, Any]] = []
        self.answers: list[PublicationReport] = []

    def submit(
        self, folder: Path, revision: Revision, world_size: int, *, preview_delta: float | None
    ) -> None:
        given = {"tag": revision.tag, "delta": preview_delta, "paused": self.paused}
        if (config := folder / "config.json").exists():
            given["blocks"] = json.loads(config.read_text())["block_list"]
        self.submitted.append(given | {"folder": str(folder), "world_size": world_size})
        if self._succeeds:
            self.answers.append(PublicationReport(revision, True, 0.0, 1, "", time.time()))

    def publish_peer_id(self, peer_id: str) -> None: ...

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def describe(self) -> str:
        return "3.10, 1.0 of 2.0 MB after 30 s"

    def reports(self) -> list[PublicationReport]:
        answers, self.answers = self.answers, []
        return answers

    def close(self) -> None: ...
