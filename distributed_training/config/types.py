"""Declare a setting once: its flag, type, default, range and help.

Each package has one frozen pydantic dataclass in ``settings.py``. A field in it looks like this:

    upload_steps: int = flag("neuron.upload_steps", 60, ge=1, le=100_000)
    "inner steps between two uploads, at least"

Nothing else has to be written: the command line, ``--help``, the page of flags, the environment
variable, the conversion from text and the checks of type and range follow from it. pydantic checks
type and range whenever a settings object is created, so tests and scripts cannot bypass the checks.

A type's validator raises ValueError with a description of what it accepts ("an IP address"); the
loader adds the flag and its place. Hotkeys are checked by their checksums, without the library that
uses them. Otherwise a typing error would look like a network whose files nobody has signed.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import base58
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, SecretStr

from distributed_training.common.kinds import Kinds, Made, UnknownKindError
from distributed_training.common.webhook import open_service
from distributed_training.network import USUAL
from distributed_training.protocol.types import ExitStatus


class ConfigError(ValueError):
    """Bad input from the operator: one line naming cause, consequence and remedy. Exit status 2."""

    status = ExitStatus.BAD_CONFIGURATION


class ConfigAway(ConfigError):
    """A place that the settings name cannot be reached, but may come back: exit status 1."""

    status = ExitStatus.FAULT


class NoNetworkNamed(ConfigError):
    """No setting says which network to join."""


def choose_kind(kinds: Kinds[Made], name: str, *, key: str) -> Made:
    """Return the kind that ``key`` (in the network's file, or a flag) names. Raises ConfigError."""
    try:
        return kinds[name]
    except UnknownKindError as error:
        raise no_such_kind(error, key=key) from None


def no_such_kind(error: UnknownKindError, *, key: str, done: str = "started") -> ConfigError:
    """Return the error for a kind that is not registered. ``done``: what was therefore not done."""
    return ConfigError(f"{key}: {error}, so nothing was {done}: choose one of these")


#: The ``config=`` of every settings class. The string below a field is its help text.
SETTINGS = ConfigDict(
    extra="forbid",
    allow_inf_nan=False,
    str_min_length=1,
    use_attribute_docstrings=True,
    validate_default=True,
)

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
DAY = timedelta(days=1)


def flag(
    name: str,
    default: Any = None,
    *,
    ge: Any = None,
    le: Any = None,
    env: str | None = None,
    network: str = "",
) -> Any:
    """Declare a field as a setting that the flag ``--name`` gives (``neuron.upload_steps``).

    ``ge`` and ``le`` are the smallest and largest value; every number, duration and size has both,
    here or in its type. ``env`` names an environment variable that may also give the value. A field
    of type ``Secret`` comes from ``env`` only. ``network``: the key under which a network's file
    gives the value if the operator does not.
    """
    return _declare(name, default, ge=ge, le=le, env=env, network=network)


def rule(key: str, default: Any = None, *, ge: Any = None, le: Any = None) -> Any:
    """Declare a field that only a network's file sets, under ``key``; it has no flag.

    ``ge`` and ``le`` are as in :func:`flag`. The default is the value in :data:`USUAL`, or else
    ``default``.
    """
    return _declare(key, default, ge=ge, le=le, network=key, is_rule=True)


def _declare(name: str, default: Any, *, ge: Any, le: Any, network: str, **more: Any) -> Any:
    declared = {"name": name, "network": network, **more}  # see Setting of schema.py
    return Field(USUAL.get(network, default), ge=ge, le=le, json_schema_extra=declared)


def is_ss58(text: str) -> bool:
    """Return whether ``text`` is an account in Substrate's format 42 with a valid checksum.

    The format: https://github.com/paritytech/ss58-registry
    """
    try:
        data = base58.b58decode(text)
    except ValueError:
        return False
    if len(data) != 35 or data[0] != 42:
        return False
    return hashlib.blake2b(b"SS58PRE" + data[:33]).digest()[:2] == data[33:]


T = TypeVar("T")

#: Names that the chain's client knows; with any other name its thread would end at once.
SUBTENSORS = frozenset({"finney", "test", "archive", "devnet", "local"})
_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
# Match up to the last @, since a password may contain one.
_USER = re.compile(r"(?<=://).*@")


def parse_duration(text: str) -> timedelta:
    """Parse ``90``, ``90s``, ``15m``, ``2h``, ``1d``; without a unit: seconds.

    Raises ValueError.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(ms|s|m|h|d)?\s*", text, re.ASCII)
    if match is None:
        raise ValueError("a duration such as 90, 90s, 15m or 2h")
    try:
        return timedelta(seconds=float(match[1]) * _SECONDS[match[2] or ""])
    except OverflowError:
        raise ValueError("a duration that a clock can hold") from None


def _from_text(parse: Any) -> BeforeValidator:
    return BeforeValidator(lambda value: parse(value) if isinstance(value, str) else value)


def _bare(text: str) -> str:
    """Return a secret without surrounding blanks. Raises ValueError for copied curly quotes."""
    text = text.strip()
    if not text.isascii():
        raise ValueError("of ASCII characters only: remove curly quotes and the like")
    return text


def _webhook(secret: SecretStr) -> SecretStr:
    open_service(secret.get_secret_value())
    return secret


def _split(text: str) -> tuple[str, ...]:
    # A flag of several words needs at least one, so "none" stands for an empty list.
    words = text.replace(",", " ").split()
    return () if text.strip().lower() == "none" else tuple(words)


def _holds(wanted: str, condition: Any) -> AfterValidator:
    """Return a validator that raises ValueError(``wanted``) unless ``condition(value)``."""

    def check(value: str) -> str:
        if not condition(value):
            raise ValueError(wanted)
        return value

    return AfterValidator(check)


def _expand(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError("a path: no user has this name") from None


def is_ip(text: str, *, versions: tuple[int, ...] = (4, 6)) -> bool:
    """Return whether ``text`` is an IP address; a version 6 address may be in brackets."""
    try:
        return ipaddress.ip_address(text.strip("[]")).version in versions
    except ValueError:
        return False


def _is_url(*schemes: str, user: bool = False) -> Any:
    def condition(text: str) -> bool:
        try:
            url = urlsplit(text)
            host, _ = url.hostname, url.port  # .port raises ValueError if it is not a port
        except ValueError:
            return False
        return url.scheme in schemes and bool(host) and (user or "@" not in url.netloc)

    return condition


_is_node = _is_url("ws", "wss", user=True)
_is_bucket = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]").fullmatch


Count = Annotated[int, Field(ge=1, le=1_000_000)]
CountFrom0 = Annotated[int, Field(ge=0, le=1_000_000)]
Port = Annotated[int, Field(ge=0, le=65535)]  # a port of this machine; 0 stands for a free one
OuterPort = Annotated[int, Field(ge=1, le=65535)]  # the router's port for it
Duration = Annotated[timedelta, _from_text(parse_duration)]
Patience = Annotated[Duration, Field(ge=SECOND, le=DAY)]
File = Annotated[Path, AfterValidator(_expand)]  # or a folder; ~ is the home folder
Secret = Annotated[SecretStr, _from_text(_bare)]
Key = Secret | None
Webhook = Annotated[Secret, AfterValidator(_webhook)]
Words = Annotated[tuple[T, ...], _from_text(_split)]

Text = Annotated[str, Field(min_length=0)]  # may be empty
RepositoryFolder = Annotated[
    Text,
    _holds(
        "a folder's path without '.', '..' or a '/' at either end",
        lambda text: text == "" or not {"", ".", ".."} & {*text.split("/")},
    ),
]
FileName = Annotated[
    str,
    _holds(
        "a name without '/'",
        lambda text: (
            "/" not in text
            and text.strip() not in ("", ".", "..")
            # File systems allow 255 bytes, and suffixes such as .rank0.log.3 are added.
            and len(text.encode()) <= 200
        ),
    ),
]
Bucket = Annotated[
    str,
    _holds(
        "a bucket's name (3 to 63 lower-case letters, digits and '-'), or BUCKET/PREFIX",
        lambda text: text.count("/") < 2 and all(map(_is_bucket, text.split("/"))),
    ),
]
GlobalBucket = Annotated[  # a miner's own bucket has four characters more
    Bucket,
    _holds(
        "a bucket's name, or BUCKET/PREFIX, of at most 59 characters",
        lambda text: len(text.rpartition("/")[2]) <= 59,
    ),
]
NetworkName = Annotated[  # the network's name, and its bucket's name by default
    str,
    _holds(
        "3 to 59 lower-case letters, digits and '-', with no '-' first or last",
        lambda text: len(text) <= 59 and _is_bucket(text),
    ),
]
Hotkey = Annotated[
    str, _holds("a hotkey: an ss58 address with a valid checksum (47 or 48 characters)", is_ss58)
]


@dataclass(frozen=True)
class Domain:
    """One of the texts that outer steps are judged on.

    ``name``: the label of each loss on it. ``place``: pages, python, or a file's path or https URL,
    with the file's SHA-256 in ``digest``. ``weight``: the weight of its loss in the judged mean.
    """

    name: str
    place: str
    digest: str | None = None
    weight: float = 1.0


#: A file is written as NAME= or NAME*WEIGHT=, its place and its digest. A place has no "#", so that
#: in a line of several files each ends with its digest. Logs, pages and metrics show the name.
DOMAIN_NAME = (
    r"(?:(?P<name>[a-z0-9][a-z0-9-]{0,31})(?:\*(?P<weight>[0-9]{1,6}(?:\.[0-9]{1,6})?))?=)?"
)
_DOMAIN = re.compile(
    DOMAIN_NAME + r"(?P<place>(?:https://)?[^#\\\x00-\x1f]{1,500})#(?P<digest>[0-9a-f]{64})(?: |$)"
)
_MOST_DOMAINS = 16


def parse_domains(text: str) -> tuple[Domain, ...]:
    """Return the held-out files that ``data.held_out`` names. Raises ValueError."""
    found, end = [], 0
    while end < len(text) and (match := _DOMAIN.match(text, end)):
        end, place, weight = match.end(), match["place"], float(match["weight"] or 1)
        name = match["name"] or place.rpartition("/")[2]
        found.append((Domain(name, place, match["digest"], weight), match["name"]))
    if end < len(text) or not 0 < len(found) <= _MOST_DOMAINS:
        raise ValueError(
            "held-out text: pages, python, PATH#SHA256 or https://...#SHA256 of a file, or up to "
            f"{_MOST_DOMAINS} of those, each as NAME=FILE or NAME*WEIGHT=FILE"
        )
    if len(found) > 1 and not len({name for _, name in found} - {None}) == len(found):
        raise ValueError("held-out text: each of several files needs a name of its own, NAME=FILE")
    if not all(domain.weight for domain, _ in found):
        raise ValueError("held-out text: a domain with weight 0 has no effect")
    return tuple(domain for domain, _ in found)


def _check_domains(text: str) -> str:
    if text not in ("pages", "python"):
        parse_domains(text)
    return text


HeldOutText = Annotated[str, AfterValidator(_check_domains)]
IpAddress = Annotated[str, _holds("an IP address such as 203.0.113.7", is_ip)]
Ipv4Address = Annotated[
    str,
    _holds(
        "an IPv4 address such as 203.0.113.7",
        lambda text: "[" not in text and is_ip(text, versions=(4,)),
    ),
]
# An address that the program finds itself if none is given (in older settings: "auto").
Found = Annotated[
    T | None, BeforeValidator(lambda value: None if str(value).lower() == "auto" else value)
]
NodeUrl = Annotated[str, _holds("a ws:// or wss:// URL", _is_node)]
Subtensor = Annotated[
    str,
    _holds(
        "finney, test, local, or a ws:// or wss:// URL",
        lambda text: text in SUBTENSORS or _is_node(text),
    ),
]
HostPort = Annotated[
    str,
    _holds(
        "a host's name or address, or HOST:PORT",
        lambda text: _is_url("https")(f"https://{text}") and urlsplit(f"//{text}").netloc == text,
    ),
]
WebUrl = Annotated[
    str, _holds("an http:// or https:// URL without user and password", _is_url("http", "https"))
]


def _check_endpoint(text: str) -> str:
    if re.fullmatch(r"(?!https?:)[a-z][a-z0-9]*://\S*", text):
        return text  # that kind of store checks the rest
    if not _is_url("http", "https")(text):
        raise ValueError("an http:// or https:// URL without user and password, or folder:///PLACE")
    parts = urlsplit(text)
    host, rest = parts.hostname or "", re.sub(r"^[^:]*://[^/?#]*", "", text)
    # Some stores are below a path. But if the path could be a bucket's name, it was copied from a
    # URL with the bucket, such as R2's dashboard shows.
    path = rest.strip("/")
    is_r2 = host.endswith(".r2.cloudflarestorage.com")
    if path and (is_r2 or "//" in rest or rest != parts.path or _is_bucket(path)):
        raise ValueError(
            f"only the endpoint: leave out {rest!r:.100}, the bucket's name is added later"
        )
    if host.endswith(".r2.dev"):
        raise ValueError(
            "an S3 endpoint but the place where browsers read a bucket: give "
            "https://<account id>.r2.cloudflarestorage.com"
        )
    return text


EndpointUrl = Annotated[str, AfterValidator(_check_endpoint)]


def show(value: Any) -> str:
    """Return a value as an operator would write it. Mask secrets and the user part of a URL."""
    if isinstance(value, SecretStr):
        return "********" if value.get_secret_value() else "(empty)"
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
        for unit, length in (("d", 86400), ("h", 3600)):
            if seconds >= 2 * length and seconds % length == 0:
                return f"{seconds / length:g}{unit}"
        return f"{seconds:g}s"
    if isinstance(value, tuple):
        return " ".join(hide_user(str(v)) for v in value) or "-"
    return hide_user(str(value))


def hide_user(text: str) -> str:
    """Return ``text`` without the user and password that a URL in it may contain."""
    return _USER.sub("********@", text)
