"""Provide a bucket at a real store, a registry that signs URLs of it, and members that use them."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from distributed_training.chain.auth import verify_signature
from distributed_training.chain.identity import Wallet
from distributed_training.chain.registry import RegistryChain
from distributed_training.config.settings import StoreSettings
from distributed_training.localnet.services import ObjectStoreServer
from distributed_training.node.buckets import open_by_registry
from distributed_training.protocol import keys
from distributed_training.protocol.growth import file_bytes
from distributed_training.protocol.manifest import Master, State
from distributed_training.registry.access import Access
from distributed_training.registry.files import ServedFolder, read_secret
from distributed_training.registry.service import Limits
from distributed_training.store.folder import FolderStore
from distributed_training.store.presigned import AccessStore
from distributed_training.store.s3 import S3ObjectStore
from tests.tools.chain_server_thread import FAST, RegistryServer
from tests.tools.chain_world import VALIDATOR, registry_at
from tests.tools.support_store import new_bucket, settings_for

RUN_ID = "v1"
KEYLESS: dict[str, Any] = {
    f"{kind}_{name}": None
    for kind in ("read", "write")
    for name in ("access_key_id", "secret_access_key")
}


class AccessWorld:
    """``owner``: the bucket with the store's own key. ``late``: seconds by which the registry's
    clock is ahead. ``server`` None: the bucket is a folder, which the registry serves."""

    def __init__(
        self,
        server: ObjectStoreServer | None,
        folder: Path,
        *,
        prefix: str = "",
        parameters: int = 10**6,
        limits: Limits = FAST,
        **settings: Any,
    ) -> None:
        self.server = RegistryServer(folder, access=self._open, limits=limits)
        self.folder = folder.parent / "store" if server is None else server.folder
        # On a busy machine an answer may take this long.
        wait = timedelta(seconds=60)
        if server is None:
            keyed = StoreSettings(endpoint_url=self.server.url, read_timeout=wait)
            bucket = self.folder / "lab" / prefix
            bucket.mkdir(parents=True)
            self.owner: Any = FolderStore(bucket, writes=True)
            self.name, self.keys = f"lab/{prefix}".strip("/"), dict[str, str]()
        else:
            keyed, self.keys = settings_for(server, read_timeout=wait), server.keys
            self.owner = new_bucket(server, keyed)
            self.name = self.owner.bucket
        self._keyed = keyed
        if prefix and server is not None:
            self.name = f"{self.owner.bucket}/{prefix}"
            self.owner = S3ObjectStore.from_settings(keyed, bucket=self.name, write=True)
        self.settings: StoreSettings = replace(
            keyed, global_model_name=self.name, **{**KEYLESS, **settings}
        )
        self.late, self.parameters = 0.0, parameters
        self._stack = ExitStack()

    def _open(self) -> tuple[Access, ServedFolder | None]:
        files = None
        if not self.keys:
            secret = read_secret(self.server.folder)
            url = self._keyed.endpoint_url or ""
            files = ServedFolder(self.folder / self.name, url=url, secret=secret)
        access = Access(
            files or S3ObjectStore.from_settings(self._keyed, bucket=self.name, write=True),
            master=Master(RUN_ID, VALIDATOR.ss58, verify_signature),
            largest_upload=file_bytes(self.parameters),
            clock=lambda: time.time() + self.late,
        )
        return access, files

    def __enter__(self) -> AccessWorld:
        self._stack.enter_context(self.server)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def publish(
        self,
        outer_step: int = 3,
        serial: int = 7,
        *,
        closes_in: float = 600.0,
        wallet: Wallet = VALIDATOR,
        finished: str | None = None,
    ) -> None:
        """Write the state."""
        now = time.time()
        state = State(
            RUN_ID,
            outer_step,
            serial,
            now + closes_in,
            30.0,
            "a" * 64,
            (0,),
            now,
            now + 2000.0,
            finished,
        )
        self.owner.put(keys.STATE, state.to_bytes(wallet.hotkey.sign))

    def chain(self, wallet: Wallet, *, register: bool = True) -> RegistryChain:
        chain = self._stack.enter_context(
            closing(
                registry_at(
                    self.server.url,
                    wallet,
                    poll_interval=timedelta(milliseconds=50),
                    timeout=timedelta(seconds=60),
                )
            )
        )
        assert chain.wait_ready(timedelta(seconds=60))
        if register:
            chain.register()
        return chain

    def member(self, wallet: Wallet) -> AccessStore:
        return open_by_registry(self.settings, self.chain(wallet), private=False)
