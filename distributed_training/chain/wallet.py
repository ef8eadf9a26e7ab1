"""The hotkey of a bittensor wallet. The coldkey is never read."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed_training.config.flags import ConfigError

if TYPE_CHECKING:
    from bittensor.sp_core import Keypair

    from distributed_training.config.chain import ChainSettings


@dataclass(frozen=True)
class Wallet:
    """A hotkey that can sign, and the SDK's wallet object for chain calls.

    Cannot be pickled (the key cannot): load it in the process that needs it.
    """

    hotkey: Keypair = field(repr=False)
    sdk: Any = field(repr=False)  # bittensor.Wallet

    @property
    def ss58(self) -> str:
        return self.hotkey.ss58_address


def _open(name: str, hotkey: str, path: str) -> Any:
    import bittensor

    return bittensor.Wallet(name=name, hotkey=hotkey, path=os.path.expanduser(path))


def require_hotkey(settings: ChainSettings) -> None:
    """Raises ConfigError if there is no readable hotkey where ``--wallet.name/.hotkey/.path`` say.

    Takes no time, so a start asks it before torch and bittensor are imported.
    """
    folder = Path(os.path.expanduser(settings.wallet_path)) / settings.wallet_name
    path = folder / "hotkeys" / settings.wallet_hotkey
    if not os.path.isfile(path):  # False also where a folder on the way may not be entered
        raise ConfigError(
            f"no hotkey at {path}, so the miner has no identity: check --wallet.name, "
            "--wallet.hotkey and --wallet.path, or create it with `btcli wallet new-hotkey`"
        )
    if not os.access(path, os.R_OK):
        raise ConfigError(
            f"the hotkey at {path} cannot be read by this user, so the miner has no identity: "
            "run it as the owner of the wallet or correct the permissions (chmod 600)"
        )


def load_wallet(settings: ChainSettings) -> Wallet:
    """The wallet that ``--wallet.name/.hotkey/.path`` name.

    Raises ConfigError when the key file is missing, unreadable, encrypted or damaged: a miner runs
    unattended, so nobody could type a password.
    """
    require_hotkey(settings)
    from bittensor.sp_core import KeyfileError

    sdk = _open(settings.wallet_name, settings.wallet_hotkey, settings.wallet_path)
    file = sdk.hotkey_file
    try:
        if file.is_encrypted():
            raise ConfigError(
                f"the hotkey at {file.path} is encrypted, and a miner cannot be asked for a "
                "password: create an unencrypted hotkey with `btcli wallet new-hotkey` (the "
                "coldkey may stay encrypted, it is not read)"
            )
        keypair = file.get_keypair()
    except (KeyfileError, ValueError, OSError) as error:
        if isinstance(error, ConfigError):
            raise
        # The SDK's text could hold parts of the file.
        raise ConfigError(
            f"the hotkey at {file.path} is not a bittensor key file ({type(error).__name__}), so "
            "the miner has no identity: restore it with `btcli wallet regen-hotkey`"
        ) from None
    return Wallet(keypair, sdk)


def create_wallet(folder: Path, name: str) -> Wallet:
    """A wallet with a new unencrypted hotkey and no coldkey below ``folder``: for local subnets.

    The hotkey is called ``default``; an existing one is used again. The mnemonic is neither printed
    nor kept.
    """
    sdk = _open(name, "default", str(folder))
    if not sdk.hotkey_file.exists_on_device():
        sdk.create_new_hotkey(use_password=False, suppress=True)
    return Wallet(sdk.hotkey, sdk)
