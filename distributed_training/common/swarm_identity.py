"""Make a swarm identity before its peer is up, so that others know its address at once.

The identity file is libp2p's ``PrivateKey`` message (key type RSA, the key in PKCS #1 DER); the
peer id is the base58 text of the multihash of the matching ``PublicKey`` message. Source: libp2p's
specification "Peer Ids and Keys".
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import base58
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from distributed_training.common.files import atomic_file

_FIELDS = b"\x08\x00\x12"
_SHA2_256 = bytes([0x12, 32])  # multihash prefix: the function and the length of its digest


def identity_file(run_folder: Path) -> Path:
    """Return the path at which the swarm of a neuron expects its identity."""
    return run_folder / "swarm" / "identity.key"


def make_identity(run_folder: Path) -> str:
    """Write a new identity. Returns the peer id."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    der = key.private_bytes(
        serialization.Encoding.DER,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    with atomic_file(identity_file(run_folder), private=True) as file:
        file.write(_message(der))
    # Not the private key's form: the peer id is of the PKIX form (SubjectPublicKeyInfo).
    public = key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    digest = hashlib.sha256(_message(public)).digest()
    return base58.b58encode(_SHA2_256 + digest).decode()


def _message(data: bytes) -> bytes:
    """Encode both key messages in Protobuf: field 1 the type (0, RSA), field 2 the bytes."""
    length = bytearray()
    rest = len(data)
    # Protobuf's varint: seven bits a byte, the lowest first; the high bit tells that more follow.
    while rest > 0x7F:
        length.append(rest & 0x7F | 0x80)
        rest >>= 7
    return _FIELDS + bytes(length) + bytes([rest]) + data
