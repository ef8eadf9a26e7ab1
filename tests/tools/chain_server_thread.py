"""Run a registry on a thread of the test's process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from distributed_training.common.ports import free_ports, listen
from distributed_training.registry.access import Access
from distributed_training.registry.files import ServedFolder
from distributed_training.registry.service import Limits, Service
from distributed_training.registry.store import Admission, Charter, Registry
from tests.tools.chain_world import VALIDATOR

FAST = Limits(requests_per_address=1e5, requests_per_hotkey=1e4, max_connections_per_address=1024)


class RegistryServer:
    """``start`` returns when requests are answered. After a ``stop`` it serves the same folder at
    the same port again. ``master`` founds it: the one who has uid 0."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        master: str = VALIDATOR.ss58,
        admission: Admission = "open",
        name: str = "test",
        limits: Limits = FAST,
        access: Callable[[], tuple[Access, ServedFolder | None]] | None = None,
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory() if folder is None else None
        self.folder = folder or Path(self._temporary.name)
        self.limits = limits
        self._access = access
        self.charter = Charter(
            name=name,
            master=master,
            most_uids=256,
            admission=admission,
        )
        (self.port,) = free_ports(1)  # nothing else can get the port between a stop and a start
        self.registry: Registry | None = None
        self._service: Service | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> RegistryServer:
        sock = listen("127.0.0.1", self.port)
        self.registry = Registry.at(self.folder, self.charter)
        self.charter = self.registry.charter
        self.access: Access | None = None
        files = None
        if self._access is not None:
            self.access, files = self._access()
        self._service = Service(self.registry, sock, self.limits, access=self.access, files=files)
        self._service.start()
        return self

    def stop(self) -> None:
        if self._service is not None and self.registry is not None:
            self._service.close()
            if self.access is not None:
                self.access.close()
            self.registry.close()
        self._service = None

    def __enter__(self) -> RegistryServer:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
