"""Names of hotkeys and peers, checked without the libraries that use them.

A typing error in one of them is found by the network only after minutes, or never: no round is
ever called by a hotkey that does not exist. Both formats carry what finds it at once.
"""

from __future__ import annotations

import hashlib
import ipaddress

import base58

_SHA2_256, _IDENTITY = 0x12, 0x00  # multihash codes of the two kinds of peer id


def is_ss58(text: str) -> bool:
    """Whether ``text`` is an account of Substrate's format 42, its checksum included.

    The format: https://github.com/paritytech/ss58-registry
    """
    try:
        data = base58.b58decode(text)
    except ValueError:
        return False
    if len(data) != 35 or data[0] != 42:
        return False
    return hashlib.blake2b(b"SS58PRE" + data[:33]).digest()[:2] == data[33:]


def is_peer_id(text: str) -> bool:
    """Whether ``text`` is a libp2p peer id: a multihash of a public key, in base58.

    The format: https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md
    """
    try:
        data = base58.b58decode(text)
    except ValueError:
        return False
    return len(data) > 2 and data[0] in (_SHA2_256, _IDENTITY) and data[1] == len(data) - 2


def is_peer_address(text: str) -> bool:
    """Whether ``text`` is ``/ip4/<ip>/tcp/<port>/.../p2p/<peer id>`` (or ip6, dns, udp)."""
    start, *words = text.split("/")
    if start or len(words) < 6 or words[-2] != "p2p" or not is_peer_id(words[-1]):
        return False
    kind, host, transport, port = words[:4]
    if kind in ("ip4", "ip6"):
        try:
            known = ipaddress.ip_address(host).version == int(kind[-1])
        except ValueError:
            return False
    else:
        known = kind in ("dns", "dns4", "dns6") and bool(host)
    is_port = port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536
    return known and transport in ("tcp", "udp") and is_port
