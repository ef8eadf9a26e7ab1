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
from typing import Any

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

ASK_EVERY = timedelta(minutes=5)  # for the public address


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
    public_ip: Callable[[], str | None] | None = None,
) -> RegistrationWatcher:
    """Watch that the hotkey stays registered and ours alone. Close what is returned.

    ``stop(reason, exit status)`` is called when it does not: deregistered or used by a second node
    (3: starting again would not help), moved to another uid (1: a new start publishes to the new
    bucket). What a reorganization took back is written again.

    ``public_ip``, if given, is asked every five minutes, None if there is no reason to look: a
    provider or a cloud may give the machine another address, and validators would call the old one
    for ever. An address that it tells twice in a row is written to the chain.
    """
    ours: dict[str, Any] = {"endpoint": endpoint, "commitment": commitment}

    def changed(event: RegistrationEvent) -> None:
        moved = event.change is Change.UID_CHANGED
        stop(event.line, ExitStatus.FAULT if moved else ExitStatus.DEREGISTERED)

    def lost(what: str) -> None:
        if what == "endpoint":
            announce(member, *ours["endpoint"])
        else:
            commit(member, commitment)

    watcher = RegistrationWatcher(
        chain=member.chain,
        hotkey=member.hotkey,
        uid=member.uid,
        on_event=changed,
        on_lost=lost,
        ours=ours,
        interval=interval,
    )
    watcher.start()
    if public_ip is not None:
        threading.Thread(
            target=_follow_address,
            args=(member, watcher, ours, public_ip),
            name="public-address",
            daemon=True,
        ).start()
    return watcher


def _follow_address(
    member: Member,
    watcher: RegistrationWatcher,
    ours: dict[str, Any],
    public_ip: Callable[[], str | None],
) -> None:
    seen = None
    while not watcher.closed(ASK_EVERY):
        before, (old, port) = seen, ours["endpoint"]
        seen = public_ip()
        if seen is None or seen == old or seen != before:
            continue
        log.warning(
            "No round was called here, and the public address of this machine is %s now, no "
            "longer %s: it is written to the chain; if that is not where validators reach it, "
            "give --axon.external_ip",
            seen,
            old,
        )
        ours["endpoint"] = (seen, port)  # first: what we write is no second miner's
        announce(member, seen, port)


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
