"""Serve the dashboard, a page that shows a miner from the files in its run folder.

The page has its own process at low priority (:class:`PageProcess`), which reads ``events.jsonl``
and ``metrics.prom``. So the page does not slow training down, shows the history after a restart,
and still answers when the miner hangs, which is when people open it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import SecretStr

from distributed_training.common.backoff import Throttle
from distributed_training.common.processes import ChildLog, ChildProcess

_LINES_PER_MINUTE = 20  # lines that the page may log; anybody who calls it can cause some


class PageProcess(ChildProcess):
    """The process that serves ``folders`` on the dashboard, until it is closed or its parent ends.

    ``told`` is called from a thread with each line that the process logs, at most 20 times a
    minute. The first line is ``page: <address>``, or the reason why there is no page. If the
    process ends, it is restarted, unless its settings are refused. It gets none of this process's
    secrets except ``token``.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: SecretStr | None = None,
        told: Callable[[str], None],
    ) -> None:
        may_pass = Throttle(60.0, most=_LINES_PER_MINUTE)

        def forward(line: ChildLog) -> None:
            if may_pass(line.text):
                told(line.text)

        super().__init__(
            "The page",
            "distributed_training.telemetry.page",
            *map(str, folders),
            *("--host", host, "--port", str(port), "--with-parent"),
            effect="training is not affected",
            begin=lambda: self.send(token),
            log_line=forward,
        )
        self.start()
