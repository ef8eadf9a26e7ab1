"""Refusals by the kernel: a packet filter on the listening socket.

Accepting a connection only to close it costs some 20 us with the interpreter held, 2,000 times a
second a twentieth of a core that trains. A filter on the socket itself (classic BPF, Linux, no
privileges needed) drops the first packet instead: nothing wakes up here, and the sender waits for
an answer that never comes. Where the kernel has no such filter, :mod:`.admission` still refuses.

Instruction codes and the offset of the network header are those of ``linux/filter.h``.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import struct
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from math import ceil

# A filter is charged to each accepted socket; older kernels grant 20 KiB (net.core.optmem_max).
MAX_ADDRESSES = 128  # of each kind

_SO_ATTACH_FILTER = 26
_SO_DETACH_FILTER = 27
_SO_MEMINFO = 55
_MEMINFO_DROPS = 8  # index of the count of packets dropped
_NETWORK_HEADER = 0x100000000 - 0x100000  # SKF_NET_OFF
_LOAD_WORD, _LOAD_BYTE, _SHIFT_RIGHT, _JUMP, _JUMP_IF_EQUAL, _RETURN = (
    0x20,
    0x30,
    0x74,
    0x05,
    0x15,
    0x06,
)
_PASS = 0xFFFFFFFF
_DROP = 0
_IPV4_SOURCE = 12  # offsets in the IP header
_IPV6_SOURCE = 8


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _words(key: str) -> tuple[int, ...]:
    """One word of an IPv4 address, two of an IPv6 /64; none for what is neither."""
    try:
        if "/" in key:
            high = int(ipaddress.IPv6Network(key).network_address) >> 64
            return high >> 32, high & 0xFFFFFFFF
        return (int(ipaddress.IPv4Address(key)),)
    except ValueError:
        return ()


def build(*, blocked: Sequence[str], trusted: Sequence[str], strangers: bool) -> list[bytes]:
    """The filter's instructions. Addresses as :func:`.admission.normalize` writes them.

    Packets from ``trusted`` pass, those from ``blocked`` are dropped, others pass if ``strangers``.
    """
    ipv4 = [_instruction(_LOAD_WORD, _NETWORK_HEADER + _IPV4_SOURCE)]
    ipv6 = []
    for keys, verdict in ((trusted, _PASS), (blocked, _DROP)):
        for words in map(_words, keys[:MAX_ADDRESSES]):
            if len(words) == 1:
                ipv4.append(_instruction(_JUMP_IF_EQUAL, words[0], 0, 1))
                ipv4.append(_instruction(_RETURN, verdict))
            elif words:
                ipv6.append(_instruction(_LOAD_WORD, _NETWORK_HEADER + _IPV6_SOURCE))
                ipv6.append(_instruction(_JUMP_IF_EQUAL, words[0], 0, 3))
                ipv6.append(_instruction(_LOAD_WORD, _NETWORK_HEADER + _IPV6_SOURCE + 4))
                ipv6.append(_instruction(_JUMP_IF_EQUAL, words[1], 0, 1))
                ipv6.append(_instruction(_RETURN, verdict))
    other = _instruction(_RETURN, _PASS if strangers else _DROP)
    ipv4.append(other)
    return [
        _instruction(_LOAD_BYTE, _NETWORK_HEADER),  # version and header length
        _instruction(_SHIFT_RIGHT, 4),
        _instruction(_JUMP_IF_EQUAL, 4, 1, 0),
        _instruction(_JUMP, len(ipv4)),
        *ipv4,
        *ipv6,
        other,
    ]


class Firewall:
    """The filter of one listening socket. Not thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._rules: tuple[tuple[str, ...], tuple[str, ...], bool] = ((), (), True)
        self.available = sys.platform == "linux"

    @property
    def active(self) -> bool:
        """Whether anybody is kept out."""
        return bool(self._rules[0]) or not self._rules[2]

    def apply(
        self, *, blocked: Iterable[str], trusted: Iterable[str], strangers: bool = True
    ) -> bool:
        """Whether the kernel filters by these rules from now on."""
        rules = (tuple(blocked), tuple(trusted), strangers)
        if not self.available:
            return False
        if rules == self._rules:
            return True
        program = build(blocked=rules[0], trusted=rules[1], strangers=strangers)
        instructions = ctypes.create_string_buffer(b"".join(program))
        option = struct.pack("@HP", len(program), ctypes.addressof(instructions))
        try:
            if rules[0] or not strangers:
                self._sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)
            else:
                self._detach()
        except OSError:  # forbidden in this sandbox, or too large for this kernel
            self.available = False
            with suppress(OSError):  # what was set before must not outlive its reason
                self._detach()
            self._rules = ((), (), True)
            return False
        self._rules = rules
        return True

    def _detach(self) -> None:
        if self.active:
            self._sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)

    def dropped(self) -> int:
        """Packets the kernel dropped at this socket, a sender's repetitions included."""
        if not self.available:
            return 0
        try:
            words = self._sock.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 64)
        except OSError:
            return 0
        at = 4 * _MEMINFO_DROPS
        return int(struct.unpack("=I", words[at : at + 4])[0]) if len(words) >= at + 4 else 0


def accept_with_data(sock: socket.socket, patience: timedelta) -> None:
    """Have the kernel hand over a connection of ``sock`` when its first bytes are there, or after
    about ``patience``: silent connections then wake nobody. Linux; elsewhere nothing happens."""
    option = getattr(socket, "TCP_DEFER_ACCEPT", None)
    if option is not None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, option, max(1, ceil(patience.total_seconds())))
        except OSError:
            return
