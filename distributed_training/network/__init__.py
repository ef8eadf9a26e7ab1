"""Handle the signed file that all peers of one network share: read, verify, sign, fetch."""

from .file import Network, NetworkFileError, digest_of, parse, public_values, signed
from .source import NetworkAway, keep, read_network

__all__ = [
    "Network",
    "NetworkAway",
    "NetworkFileError",
    "digest_of",
    "keep",
    "parse",
    "public_values",
    "read_network",
    "signed",
]
