"""Describe a registry to its readers: its members, their uids, bucket read keys and addresses."""

from __future__ import annotations

import hashlib
import ipaddress
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from pydantic import AfterValidator, Field, TypeAdapter

from distributed_training.chain.base import Neuron
from distributed_training.protocol.network_report import NetworkReport


def _plain_ip(text: str) -> str:
    """Raise ValueError unless ``text`` is an IP address without a zone.

    DHT peers connect to the address, and programs print it.
    """
    try:
        ipaddress.ip_address("" if "%" in text else text)
    except ValueError:
        raise ValueError("this is not an IP address") from None  # do not repeat the text
    return text


Uid = Annotated[int, Field(ge=0, lt=4096)]
Port = Annotated[int, Field(ge=1, le=65535)]
Address = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_plain_ip)]
PeerId = Annotated[str, Field(pattern=r"^(|[1-9A-HJ-NP-Za-km-z]{40,53})$")]
_REPORT: TypeAdapter[tuple[float, NetworkReport]] = TypeAdapter(tuple[float, NetworkReport])


@dataclass(frozen=True)
class LedgerMember:
    """A member. ``since``: when it got its uid, in seconds since the epoch."""

    neuron: Neuron
    since: float
    commitment: str | None  # the read key of its own bucket


@dataclass(frozen=True)
class Snapshot:
    """The state that readers see after a write. ``version`` counts the writes."""

    version: int
    members: tuple[LedgerMember, ...]  # in order of uid
    expelled: tuple[str, ...]  # hotkeys
    reported: str | None = None  # when the validator's last report arrived, and the report, as JSON

    @property
    def neurons(self) -> tuple[Neuron, ...]:
        """All neurons, in order of uid."""
        return tuple(member.neuron for member in self.members)

    @cached_property
    def report(self) -> tuple[float, NetworkReport] | None:
        """When the validator's last report arrived (seconds since the epoch), and the report."""
        if self.reported is None:
            return None
        try:
            return _REPORT.validate_json(self.reported)
        except ValueError:  # written by another version of this program
            return None

    @cached_property
    def content(self) -> bytes:
        """The JSON fields that pollers get: each uid, neuron and commitment; expelled hotkeys."""
        rows = [[m.neuron.uid, vars(m.neuron), m.commitment] for m in self.members]
        return f'"rows": {json.dumps(rows)}, "expelled": {json.dumps(self.expelled)}'.encode()

    @cached_property
    def etag(self) -> str:
        """The HTTP ETag of :attr:`content`: equal content has an equal ETag.

        It is a weak ETag, which compressing proxies leave unchanged.
        """
        return f'W/"{hashlib.sha256(self.content).hexdigest()[:32]}"'
