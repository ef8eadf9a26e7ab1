"""Fill the disk for an hour under the files that a running miner writes repeatedly."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed_training.chain.base import ChainState
from distributed_training.common import files
from distributed_training.common.backoff import Repeats
from distributed_training.common.files import atomic_file
from distributed_training.telemetry import EventLog, MetricsFile, events

FOR_ALL = 10  # most lines in the first ten minutes: one for each file, and a few to spare


def writers(folder: Path) -> list[Callable[[], object]]:
    """Return writers that write different content each time, as they skip equal content."""
    number = itertools.count()
    log = EventLog.open(folder)
    metrics = MetricsFile(folder / "metrics.prom", every=0.0)
    return [
        lambda: ChainState("registry", float(next(number)), (), {}).save(folder / "chain.json"),
        lambda: log.write("step", number=next(number)),
        lambda: metrics.write(lambda: None),
    ]


def test_an_hour_of_a_full_disk_is_a_line_for_each_file_every_ten_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, full = 0.0, False
    monkeypatch.setattr(files, "_not_written", Repeats(600.0, clock=lambda: now))
    write = os.write

    def no_room(*_: object, **__: object) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(events.os, "write", lambda *a: no_room() if full else write(*a))

    def replace(source: Path, target: Path) -> None:
        no_room() if full else os.rename(source, target)

    monkeypatch.setattr(files.os, "replace", replace)
    written = writers(tmp_path)
    full, lines = True, []
    for now in map(float, range(3600)):
        for each in written if now < 90 or now % 60 == 0 else ():
            each()
        if now in (89, 3599):
            # Threads that other tests left running write to other folders.
            lines.append(sum(str(tmp_path) in record.getMessage() for record in caplog.records))
    assert lines[0] <= FOR_ALL and lines[1] <= 6 * FOR_ALL
    assert "chain.json was not written (No space left on device): a start while" in caplog.text
    assert "(97 more times since the last such line)" in caplog.text
    with pytest.raises(OSError), atomic_file(tmp_path / "other"):
        pass
    assert not list(tmp_path.glob(".*.tmp"))
