"""Share among the tests of the chain: development keys, requests of both schemes, a poll helper."""

from __future__ import annotations

import json
import threading
import time
import uuid as uuids
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from bittensor import http_auth
from bittensor.sp_core import Keypair

from distributed_training.chain.identity import Wallet
from distributed_training.chain.server import MinerCallbacks, SignedServer
from distributed_training.config.settings import ChainSettings
from distributed_training.protocol.synapses import LEGACY_BODY_HASH, legacy_signed_text
from distributed_training.protocol.types import RoundRequest
from tests.tools.chain_memory import MemoryChain, MemoryLedger

VECTORS = json.loads(
    (Path(__file__).parents[1] / "vectors" / "legacy_dendrite_requests.json").read_text()
)
MINER_IP = "127.0.0.1"


def wallet_of(uri: str) -> Wallet:
    return Wallet(Keypair.create_from_uri(uri), None)


MINER = wallet_of("//miner")
VALIDATOR = wallet_of("//validator")  # the master
SECOND = wallet_of("//second-validator")  # permit and stake
POOR = wallet_of("//poor-validator")  # permit, no stake
PEER = wallet_of("//peer")  # stake, no permit
STRANGER = wallet_of("//stranger")
EPOCH = 12
# Nothing in the way of tests that send much from one address.
SETTINGS = replace(
    ChainSettings(),
    axon_ip=MINER_IP,
    axon_port=0,
    requests_per_address=10_000.0,
    requests_per_hotkey=10_000.0,
)


class World:
    """A server, its chain and the events it posted. ``offset`` moves its wall clock (ns), ``later``
    its monotonic one (s); ``due``: whether a round is."""

    def __init__(self, settings: ChainSettings = SETTINGS, folder: Path | None = None) -> None:
        self.ledger = MemoryLedger()
        self.ledger.register(MINER.ss58, uid=7)
        self.ledger.register(VALIDATOR.ss58, stake=1e6, validator_permit=True)
        self.ledger.register(SECOND.ss58, stake=1e6, validator_permit=True)
        self.ledger.register(POOR.ss58, stake=1.0, validator_permit=True)
        self.ledger.register(PEER.ss58, stake=1e6)
        self.chain = MemoryChain(hotkey=MINER.ss58, ledger=self.ledger)
        self.events: list[RoundRequest] = []
        self.told: list[int] = []  # outer steps at which the master says that it is
        self.asked: list[None] = []  # for the model
        self.offset = 0
        self.later = 0.0
        self.due: bool | Callable[[], bool] | None = True
        self.server = SignedServer(
            settings=settings,
            wallet=MINER,
            chain=self.chain,
            master_hotkey=VALIDATOR.ss58,
            miner=MinerCallbacks(
                epoch=lambda: EPOCH,
                on_all_reduce=self.events.append,
                round_due=lambda: self.due() if callable(self.due) else self.due,
                on_validator_epoch=self.told.append,
                on_model_asked=lambda: self.asked.append(None),
            ),
            folder=folder,
            clock=lambda: time.time_ns() + self.offset,
            monotonic=lambda: time.monotonic() + self.later,
        )

    @property
    def url(self) -> str:
        return f"http://{MINER_IP}:{self.server.port}"

    def refused(self, reason: str) -> int:
        return self.server.counters().get(f"refused.{reason}", 0)


@contextmanager
def running(made: World) -> Iterator[World]:
    made.server.start()
    try:
        yield made
    finally:
        made.server.close()


def world(
    settings: ChainSettings = SETTINGS, folder: Path | None = None
) -> AbstractContextManager[World]:
    return running(World(settings, folder))


def sign(
    scheme: str,
    wallet: Wallet,
    path: str,
    body: bytes,
    *,
    receiver: str = MINER.ss58,
    nonce: int | None = None,
    timeout: float = 2.3,
) -> dict[str, str]:
    """Headers of a call that ``wallet`` signed; btauth through the SDK's own ``sign``."""
    if scheme == "btauth":
        return http_auth.sign(
            wallet.hotkey,
            method="POST",
            path=path,
            body=body,
            receiver_ss58=receiver,
            nonce_ns=nonce,
        )
    nonce = time.time_ns() if nonce is None else nonce
    uuid, sender = str(uuids.uuid1()), wallet.ss58
    text = legacy_signed_text(nonce=nonce, sender=sender, receiver=receiver, uuid=uuid)
    signature = wallet.hotkey.sign(text.encode())
    return {
        "name": path[1:],
        "timeout": str(timeout),
        "bt_header_axon_ip": MINER_IP,
        "bt_header_axon_port": "1",
        "bt_header_axon_hotkey": receiver,
        "bt_header_dendrite_ip": "0.0.0.0",
        "bt_header_dendrite_version": str(10005000),
        "bt_header_dendrite_nonce": str(nonce),
        "bt_header_dendrite_uuid": uuid,
        "bt_header_dendrite_hotkey": sender,
        "bt_header_dendrite_signature": "0x" + bytes(signature).hex(),
        "header_size": "0",
        "total_size": "0",
        "computed_body_hash": LEGACY_BODY_HASH,
    }


@contextmanager
def answers(answer: Callable[[BaseHTTPRequestHandler], tuple[int, bytes]]) -> Iterator[int]:
    """The port of a server that answers each request with a status and content."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            status, content = answer(self)
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            return None

    with ThreadingHTTPServer((MINER_IP, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join(5)
