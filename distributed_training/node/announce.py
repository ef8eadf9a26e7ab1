"""What a node writes to the chain, and whether it stays there.

Two things: the *commitment*, the read credentials of its bucket, through which others find what it
publishes; and the *endpoint* it is called at. Chains are slow and refuse now and then, and a
reorganization may take a write back, so both are written in a thread, tried again until the chain
shows them, and put back when they vanish.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from distributed_training.chain.base import ChainError, find
from distributed_training.chain.registration import (
    INTERVAL,
    Change,
    RegistrationEvent,
    RegistrationWatcher,
)
from distributed_training.common.backoff import doubling
from distributed_training.common.exits import ExitStatus
from distributed_training.node.chain import Member
from distributed_training.protocol import lines

log = logging.getLogger(__name__)


def commit(member: Member, text: str) -> None:
    """Write the commitment unless the chain holds it already. Returns at once."""

    def shown() -> bool:
        return member.chain.commitment(member.hotkey) == text

    def write() -> None:
        member.chain.commit(text)
        log.info("%s", lines.METADATA_LOGGED)

    _in_background("commitment", shown, write, timedelta(seconds=5), timedelta(minutes=10))


def announce(member: Member, ip: str, port: int) -> None:
    """Write the endpoint unless the chain holds it already. Returns at once."""

    def shown() -> bool:
        me = find(member.chain.neurons(), member.hotkey)
        return me is not None and (me.ip, me.port) == (ip, port)

    def write() -> None:
        member.chain.serve(ip, port)
        log.info("Endpoint %s:%d written to the chain", ip, port)

    _in_background("endpoint", shown, write, timedelta(seconds=2), timedelta(minutes=5))


def follow_registration(
    member: Member,
    *,
    endpoint: tuple[str, int],
    commitment: str,
    stop: Callable[[str, int], None],
    interval: timedelta = INTERVAL,
) -> RegistrationWatcher:
    """Watch that the hotkey stays registered and ours alone. Close what is returned.

    ``stop(reason, exit status)`` is called when it does not: deregistered or used by a second node
    (3: starting again would not help), moved to another uid (1: a new start publishes to the new
    bucket). What a reorganization took back is written again.
    """

    def changed(event: RegistrationEvent) -> None:
        moved = event.change is Change.UID_CHANGED
        stop(event.line, ExitStatus.FAULT if moved else ExitStatus.DEREGISTERED)

    def lost(what: str) -> None:
        if what == "endpoint":
            announce(member, *endpoint)
        else:
            commit(member, commitment)

    watcher = RegistrationWatcher(
        chain=member.chain,
        hotkey=member.hotkey,
        uid=member.uid,
        on_event=changed,
        on_lost=lost,
        ours={"endpoint": endpoint, "commitment": commitment},
        interval=interval,
    )
    watcher.start()
    return watcher


def _in_background(
    what: str,
    shown: Callable[[], bool],
    write: Callable[[], None],
    first: timedelta,
    longest: timedelta,
) -> None:
    """``write`` in a thread until it goes through or the chain shows it anyway."""

    def run() -> None:
        failures = 0
        while True:
            try:
                if not shown():
                    write()
                return
            except ChainError as error:
                failures += 1
                log.warning("The %s was not written (%s). Trying again.", what, error)
            time.sleep(doubling(failures, first=first, longest=longest).total_seconds())

    threading.Thread(target=run, name=what, daemon=True).start()
