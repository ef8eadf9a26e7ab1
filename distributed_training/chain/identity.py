"""Load a neuron's hotkey, and find the address at which others reach the neuron.

Only the hotkey of the bittensor wallet is read, never the coldkey. The wallet's files are read and
written with ``bittensor_core``, as bittensor does. Members of a registry's network need no other
part of bittensor.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import bittensor_core
import httpx

from distributed_training.common import http
from distributed_training.common.addresses import reach
from distributed_training.common.files import atomic_file
from distributed_training.config.settings import ChainSettings
from distributed_training.config.types import ConfigError

if TYPE_CHECKING:
    from bittensor_core import Keypair


@dataclass(frozen=True)
class Wallet:
    """A hotkey that can sign, and the ``file`` that it was read from.

    It cannot be pickled, because the key cannot: load it in the process that needs it.
    """

    hotkey: Keypair = field(repr=False)
    file: Path | None = None  # WALLETS/NAME/hotkeys/HOTKEY

    @property
    def ss58(self) -> str:
        return self.hotkey.ss58_address

    def of_sdk(self) -> Any:
        """Return the ``bittensor.Wallet`` for calls to a Bittensor chain."""
        import bittensor

        assert self.file is not None
        folder = self.file.parents[1]
        return bittensor.Wallet(folder.name, self.file.name, str(folder.parent))


def hotkey_file(folder: str | Path, name: str, hotkey: str) -> Path:
    return Path(os.path.expanduser(folder)) / name / "hotkeys" / hotkey


def require_hotkey(settings: ChainSettings) -> None:
    """Raise ConfigError unless a readable hotkey is at ``--wallet.name/.hotkey/.path``.

    It takes almost no time, so it is called at a start before torch is imported.
    """
    path = hotkey_file(settings.wallet_path, settings.wallet_name, settings.wallet_hotkey)
    if not os.path.isfile(path):  # also False if a parent folder may not be entered
        is_public = settings.kind == "bittensor"  # a registry's members have no btcli
        raise ConfigError(
            f"no hotkey at {path}, so the miner has no identity: check --wallet.name, "
            "--wallet.hotkey and --wallet.path, or "
            + ("create it with `btcli wallet new-hotkey`" if is_public else "join with dt-join")
        )
    if not os.access(path, os.R_OK):
        raise ConfigError(
            f"the hotkey at {path} cannot be read by this user, so the miner has no identity: "
            "run it as the wallet's owner, or correct the file's permissions (chmod 600)"
        )


def load_wallet(settings: ChainSettings) -> Wallet:
    """Load the wallet that ``--wallet.name/.hotkey/.path`` name.

    Raises ConfigError if the key file is missing, unreadable, encrypted or damaged. An encrypted
    file is of no use: a miner runs unattended, so nobody could type a password.
    """
    require_hotkey(settings)
    path = hotkey_file(settings.wallet_path, settings.wallet_name, settings.wallet_hotkey)
    try:
        data = path.read_bytes()
        if bittensor_core.keyfile_data_is_encrypted(data):
            raise ConfigError(
                f"the hotkey at {path} is encrypted, and a miner cannot be asked for a "
                "password: create an unencrypted hotkey with `btcli wallet new-hotkey` (the "
                "coldkey may stay encrypted, it is not read)"
            )
        keypair = bittensor_core.deserialize_keypair_from_keyfile_data(data)
    except (bittensor_core.KeyfileError, ValueError, OSError) as error:
        if isinstance(error, ConfigError):
            raise
        # Do not show the library's text, which could contain parts of the file.
        raise ConfigError(
            f"the hotkey at {path} is not a bittensor key file ({type(error).__name__}), so "
            "the miner has no identity: restore it with `btcli wallet regen-hotkey`"
        ) from None
    return Wallet(keypair, path)


def create_wallet(folder: Path, name: str, hotkey: str = "default") -> Wallet:
    """Create a wallet with a new unencrypted hotkey and no coldkey.

    An existing wallet in ``folder`` is used again. The mnemonic is neither printed nor kept.
    """
    core, path = bittensor_core, hotkey_file(folder, name, hotkey)
    if path.exists():
        return Wallet(core.deserialize_keypair_from_keyfile_data(path.read_bytes()), path)
    made = core.Keypair.create_from_mnemonic(core.Keypair.generate_mnemonic(12))
    public = core.Keypair(
        ss58_address=made.ss58_address,
        public_key=bytes(made.public_key),
        crypto_type=made.crypto_type,
        ss58_format=made.ss58_format,
    )
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for place, key in ((path.with_name(f"{hotkey}pub.txt"), public), (path, made)):
        with atomic_file(place, private=True) as file:
            file.write(bytes(core.serialized_keypair_to_keyfile_data(key)))
    return Wallet(made, path)


# Each service answers a GET with the caller's address as text.
SERVICES = (
    "https://checkip.amazonaws.com",
    "https://api.ipify.org",
    "https://icanhazip.com",
)
_ANY_HOST = "192.0.2.1"  # an address that nobody has, so the default route is used
_MOST_BYTES = 256  # most bytes of an answer; a proxy's login page has more
_ALIKE = 2  # number of equal answers before an address is trusted


class AddressUnknown(RuntimeError):
    """This machine's address was not found: the network may be down for a while."""


def external_ip(
    settings: ChainSettings,
    *,
    services: Sequence[str] = SERVICES,
    timeout: timedelta = timedelta(seconds=5),
) -> str:
    """Return the address that ``services`` agree on; in a private network, the one used there.

    Each service is asked at most twice, in turn, and without the environment's proxies, since peers
    connect directly too. ``timeout`` covers one complete request. Raises AddressUnknown if no two
    answers give the same global address.
    """
    if settings.private:
        return _private_ip(settings)
    address, given = http.run_to_end(_find_address(services, timeout))
    if address is None:
        others = f"; answers were {', '.join(given)}" if given else ""
        raise AddressUnknown(
            f"the public address of this machine is unknown{others}, so peers could not reach "
            "it: set it with --dht.ip"
        )
    return address


def _private_ip(settings: ChainSettings) -> str:
    """Return the address that this machine uses for connections in its private network."""
    host = urlsplit(settings.registry_url or "").hostname
    try:
        # Nothing is sent: the kernel chooses the interface.
        found = socket.getaddrinfo(host or _ANY_HOST, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], socket.SOCK_DGRAM) as link:
            link.connect(found[4])
            address = str(link.getsockname()[0]).partition("%")[0]
    except OSError as error:
        why = error.strerror or str(error)
    else:
        if reach(address) <= settings.narrowest:
            return address
        why = f"{host} is reached from {address}"
    raise AddressUnknown(
        f"the address of this machine in the private network is unknown ({why}), so peers "
        "could not reach it: set it with --dht.ip"
    )


async def _find_address(
    services: Sequence[str], timeout: timedelta
) -> tuple[str | None, list[str]]:
    """Return the address that two answers gave (None if no two agreed), and all given addresses."""
    found: Counter[str] = Counter()
    async with httpx.AsyncClient(trust_env=False, follow_redirects=False) as client:
        # Ask each service twice, since one that was down for a moment may still agree.
        for service in (*services, *services):
            try:
                reply, answer = await http.ask(
                    client, "GET", service, most=_MOST_BYTES, seconds=timeout.total_seconds()
                )
                reply.raise_for_status()
                address = ipaddress.ip_address(answer.decode("ascii").strip())
            except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError):
                continue
            if not address.is_global:
                continue
            found[str(address)] += 1
            if found[str(address)] == _ALIKE:
                return str(address), sorted(found)
    return None, sorted(found)
