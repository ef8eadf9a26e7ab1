"""Read from and write to a registry, the chain of a network without a public one.

A thread polls with the ETag of the list that it knows, and reads never wait for it. While a
registry is down, the state only gets older. A registry that was restored from an old backup shows
an older state, so this client repeats its writes before it accepts that state.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Annotated, Any, NamedTuple

import httpx
from pydantic import Field, TypeAdapter

from distributed_training.common import http
from distributed_training.common.addresses import keeps_secrets
from distributed_training.common.backoff import Backoff
from distributed_training.common.proxies import proxy_for
from distributed_training.config.settings import ChainSettings
from distributed_training.config.types import ConfigError
from distributed_training.network import NetworkFileError
from distributed_training.network_place import certificates
from distributed_training.protocol.network_report import NetworkReport

from .base import Chain, ChainError, ChainUnavailable, Neuron, find
from .identity import Wallet

log = logging.getLogger(__name__)

#: Pauses between two tries while the registry is down.
_FIRST_WAIT, _LONGEST_WAIT = timedelta(milliseconds=300), timedelta(seconds=30)
KEPT = timedelta(seconds=20)  # how long an idle connection is kept; the registry keeps it longer
#: The line that `dt-network invite` prints for a new member: the URL of the network's file, the
#: file's digest, and the secret, of which the registry has a hash.
INVITATION = re.compile(r"(https?://[^\s#]{1,2000}#[0-9a-f]{64})\.([\w-]{16,128})", re.ASCII)
_FIRST_ANSWER = timedelta(seconds=30)  # time limit for the first answer to a command
_MOST_BYTES = 16 * 2**20  # bytes of an answer; 4096 neurons take 2 MB, or 11 with the longest keys
_OURS = "could not be asked, by a fault of this program"  # replaces "does not answer" in a warning


@dataclass(frozen=True)
class RegistryState:
    """An answer to ``/state``.

    ``start``: id of the process that answered; ``version``: the number of its writes. ``rows``:
    uid, neuron and commitment of each uid. ``expelled``: all expelled hotkeys.
    """

    registry: Annotated[str, Field(pattern=r"^[a-z0-9.-]{1,63}/[0-9a-f]{1,32}/\w{40,60}$")]
    start: Annotated[str, Field(pattern="^[0-9a-f]{1,32}$")]
    version: int
    rows: tuple[tuple[int, Neuron, str | None], ...] = ()
    expelled: tuple[str, ...] = ()
    etag: str = ""  # etag of the rows and of the expelled hotkeys

    def writes_of(self, hotkey: str) -> dict[str, dict[str, Any]]:
        """Return the writes of ``hotkey`` in the rows, by kind; no writes if it has no uid."""
        for _, neuron, text in self.rows:
            if neuron.hotkey == hotkey:
                serve = {"ip": neuron.ip, "port": neuron.port, "peer": neuron.peer}
                return {"serve": serve, "commit": {"text": text}}
        return {}


_STATE = TypeAdapter(RegistryState)
_NO_SUCH_PATH, _TOO_MANY = 404, 429


class RegistryAnswer(NamedTuple):
    """An answer of the registry over HTTP."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class RefusedWrite(ChainError):
    """The write was not sent, or the registry refused it.

    After any other failure the registry may have done the write.
    """


class Busy(RefusedWrite):
    """The registry was asked too often; it will answer a little later."""


class Unusable(ValueError):
    """The answer is another network's, or not a registry's; the text gives the reason."""


#: Errors that a connection, a host name or an answer may raise. Any other error is a fault of this
#: program.
_FAILURES = (httpx.HTTPError, Unusable, UnicodeError)


@contextmanager
def _reading(status: int) -> Iterator[None]:
    """Raise Unusable for any error that the content of an answer causes while it is read."""
    try:
        yield
    except Unusable:
        raise
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        why = f"its answer (status {status}) is not a registry's: {_why(error)}"
        raise Unusable(why) from error


class RegistryChain(Chain):
    """A chain over HTTP or HTTPS: the registry that ``settings`` name.

    ``master``: the hotkey that must have created the registry; None: the creator of the first
    registry that answers. ``timeout``: the time limit for each wait in a call; the whole call may
    take three times as long.
    """

    def __init__(
        self,
        settings: ChainSettings,
        wallet: Wallet | None,
        master: str | None = None,
        *,
        timeout: timedelta = timedelta(seconds=10),
    ) -> None:
        super().__init__()
        self._url = str(settings.registry_url).rstrip("/")
        self._settings = settings
        self._wallet = wallet
        self._master = master
        try:
            verify = certificates() if self._url.startswith("https") else False
        except NetworkFileError as error:
            raise ConfigError(f"{error}, so the registry cannot be asked: {error.remedy}") from None
        # An event loop that runs only during calls: a deadline for a whole answer needs a loop.
        self._runner = asyncio.Runner()
        self._client = httpx.AsyncClient(
            timeout=timeout.total_seconds(),
            verify=verify,
            limits=httpx.Limits(keepalive_expiry=KEPT.total_seconds()),
            proxy=proxy_for(self._url),
            trust_env=False,
        )
        self._timeout = timeout.total_seconds()
        self._lock = threading.Lock()  # one call at a time, so that answers cannot cross
        self._stop = threading.Event()
        self._seen: RegistryState | None = None
        self.identity = ""  # identity of the registry, once it has answered
        self.all_expelled: frozenset[str] = frozenset()  # expelled hotkeys, as last read
        # These are kept in case the registry is restored from an old backup.
        self._written: dict[str, dict[str, Any]] = {}  # kind -> the last accepted write
        self._thread = threading.Thread(target=self._poll, name="registry", daemon=True)
        self._thread.start()

    # writes

    def register(self) -> int:
        """Ask for a uid, with the invitation if there is one. Return the uid. Raises ChainError."""
        return int(self._write("register", self._registration()))

    def join(self) -> int | None:
        try:
            uid = self.register()
        except ChainError as error:
            log.warning("The registry gave this hotkey no uid (%s)", error)
            return None
        log.info("The registry gave this hotkey uid %d", uid)
        return uid

    def access(self, request: Mapping[str, Any]) -> Any:
        """Ask for URLs of the global bucket, as :mod:`..registry.access` grants them.

        The URLs are secrets. Raises RefusedWrite (Busy if asked too often), or another ChainError
        if it may help to ask again.
        """
        self._refuse_plain("access", "a signed URL is")
        return self._write("access", dict(request), changes=False)

    def administer(self, kind: str, **fields: Any) -> Any:
        """Make a write that only the founder may make; return its result. Raises ChainError.

        ``kind``: expel, invite, invitations, revoke or allow. ``fields`` and the result are those
        of the method with this name in :class:`~..registry.store.Registry`.
        """
        return self._write(kind, fields)

    def commit(self, text: str) -> None:
        self._write("commit", {"text": text})

    def serve(self, ip: str, port: int, peer: str = "") -> None:
        self._write("serve", {"ip": ip, "port": port, "peer": peer})

    def set_weights(self, weights: Mapping[int, float]) -> None:
        """Do nothing: the manifests of a network without a public chain have the scores."""

    def report(self, report: NetworkReport) -> None:
        """Report the network's state for the registry's page. For the founder's validator only."""
        self._write("report", {"report": asdict(report)})

    def _write(self, kind: str, fields: dict[str, Any], *, changes: bool = True) -> Any:
        """Write to the registry, and return the result.

        If the write ``changes`` the registry's state, the new state is read as well.
        """
        with self._writing(), self._lock:
            if self._stop.is_set():
                raise ChainError(f"{kind}: the chain was closed")
            try:
                if self._seen is None:
                    self._read_state()  # learn which receiver to sign for
                result = self._post(kind, fields)
                if changes:
                    self._read_state()
                return result
            except _FAILURES as error:
                raise ChainError(f"{kind}: {_why(error)} at {self._url}") from error

    def _registration(self) -> dict[str, Any]:
        if self._settings.invitation is None:
            return {}
        self._refuse_plain("register", "an invitation is")
        # The setting may be the whole line that `dt-network invite` printed.
        return {"invitation": self._settings.invitation.get_secret_value().rpartition(".")[2]}

    def _refuse_plain(self, kind: str, what: str) -> None:
        """Raise RefusedWrite unless a secret may travel to the registry and back."""
        if not keeps_secrets(self._url, private=self._settings.private):
            raise RefusedWrite(
                f"{kind}: {what} a secret, and {self._url} is not https, so it was not sent: the "
                "founder must set chain.url of the network's file to an https:// URL, or private = "
                "true there, if all machines are in one private network"
            )

    def _post(self, kind: str, fields: dict[str, Any]) -> Any:
        """Post a signed write.

        Raises ChainError if it is refused, httpx.HTTPError if it did not get through.
        """
        if self._wallet is None:
            raise ChainError(f"{kind}: no wallet was given, so nothing can be signed")
        answer = self._fetch(f"/{kind}", json.dumps(fields).encode())
        with _reading(answer.status):
            content = json.loads(answer.body)
            given = content["result" if answer.status == 200 else "message"]
        if answer.status == _NO_SUCH_PATH:
            raise RefusedWrite(f"{kind}: this registry does not support it")
        if answer.status != 200:
            message = str(given)[:300].removeprefix(f"{kind}: ")
            # A proxy may report an error after the registry has done the write.
            refused = RefusedWrite if answer.status < 500 else ChainError
            refused = Busy if answer.status == _TOO_MANY else refused
            raise refused(f"{kind}: {message}")
        if kind in ("commit", "serve"):
            self._written[kind] = fields
        return given

    def _fetch(self, path: str, body: bytes | None = None) -> RegistryAnswer:
        try:
            return http.run_to_end(self._exchange(path, body), self._runner)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            # The registry closed the idle connection while we asked. If it did accept the write, it
            # is signed again here, and changes nothing the second time.
            return http.run_to_end(self._exchange(path, body), self._runner)
        except RuntimeError as error:
            if "start new thread" not in str(error):
                raise
            raise Unusable(f"this machine has no thread left to ask with: {error}") from error

    async def _exchange(self, path: str, body: bytes | None) -> RegistryAnswer:
        """Return the answer to a read, or to a write, which is signed here."""
        from .auth import sign_btauth

        method, headers = "GET", {"if-none-match": self._seen.etag} if self._seen else {}
        if body is not None and self._wallet is not None:
            receiver = self.identity
            method = "POST"
            headers = sign_btauth(self._wallet, path=path, body=body, receiver=receiver)
        url = self._url + path
        try:
            reply, answer = await http.ask(
                self._client,
                method,
                url,
                most=_MOST_BYTES,
                seconds=3 * self._timeout,
                content=body,
                headers=headers,
                compressed=True,  # a thousand miners read a thousand rows
            )
        except (http.TooLong, TimeoutError):
            raise Unusable("its answer does not end") from None
        return RegistryAnswer(reply.status_code, reply.headers, answer)

    # reads

    def file(self, name: str) -> str:
        """Return a file of the network that the registry serves, or "" if it has no such file.

        Raises ChainError.
        """
        with self._lock:
            try:
                answer = self._fetch(f"/{name}")
                with _reading(answer.status):
                    return answer.body.decode() if answer.status == 200 else ""
            except _FAILURES as error:
                raise ChainError(f"{name}: {_why(error)} at {self._url}") from error

    def expelled(self, hotkey: str) -> bool:
        return hotkey in self.all_expelled

    def _poll(self) -> None:
        interval = self._settings.poll_interval
        backoff = Backoff(first=min(interval, _FIRST_WAIT), longest=_LONGEST_WAIT)
        try:
            while not self._stop.is_set():
                wait = interval * random.uniform(0.9, 1.1)  # so that miners do not poll all at once
                try:
                    with self._lock:
                        self._read_state()
                    if self.trouble:
                        log.info("The registry at %s answers again", self._url)
                    self.trouble = ""
                    backoff.succeeded()
                except Exception as error:  # noqa: BLE001 - no other thread of this process reads
                    self._counts["failures"] += 1
                    why = _why(error)
                    # Log once per outage, and once for each other program that answers instead of
                    # the registry.
                    if not self.trouble or (isinstance(error, Unusable) and why != self.trouble):
                        log.warning(
                            "The registry at %s %s (%s): training continues with what "
                            "was last known, and more tries follow; if this lasts, check chain.url "
                            "of the network's file",
                            self._url,
                            "does not answer" if isinstance(error, _FAILURES) else _OURS,
                            why,
                        )
                    self.trouble = why
                    wait = backoff.failed()
                self._stop.wait(wait.total_seconds())
        finally:
            with self._lock, self._runner:  # wait for the end of a write
                self._runner.run(self._client.aclose())

    def _read_state(self) -> None:
        """Ask for the changes since the last answer. The caller must hold the lock."""
        state, seen = self._ask(), self._seen
        own = self._wallet.ss58 if self._wallet is not None else ""
        ours = find(self._neurons, own)
        if seen is not None and state.start != seen.start and ours is not None:
            shown = state.writes_of(own)
            if {**shown, **self._written} != shown or not shown:
                # The registry came back without one of our writes. Repeat it before trusting the
                # state, because our older endpoint would look like somebody else's.
                log.warning(
                    "The registry at %s went back from version %d to %d: it was restored from an "
                    "older backup; endpoint and commitment are written again, so there is nothing "
                    "to do",
                    self._url,
                    seen.version,
                    state.version,
                )
                try:
                    if not shown:  # another uid would mean another bucket
                        self._post("register", {**self._registration(), "uid": ours.uid})
                    for kind, fields in self._written.items():
                        self._post(kind, fields)
                except ChainError as refusal:
                    log.warning("The registry refused it: %s", refusal)
                self._seen = None  # ask for the whole state again
                state = self._ask()
        self.all_expelled = frozenset(state.expelled)
        texts = {neuron.hotkey: text for _, neuron, text in state.rows if text is not None}
        self._seen = state
        self._saw(tuple(neuron for _, neuron, _ in state.rows), texts)

    def _ask(self) -> RegistryState:
        """Ask for the state. Raises httpx.HTTPError, Unusable."""
        answer = self._fetch("/state")
        with _reading(answer.status):
            if answer.status == 304 and self._seen is not None:
                # What we have read is still valid, no matter which process answers or from which
                # backup. Compare the next answers with this version.
                self._seen = replace(
                    self._seen,
                    start=answer.headers["x-start"],
                    version=int(answer.headers["x-version"]),
                )
                return self._seen
            if answer.status != 200:
                raise Unusable(f"status {answer.status}")
            state = _STATE.validate_json(answer.body)
        founder = state.registry.rpartition("/")[2]
        if self._master is not None and founder != self._master:
            raise Unusable(f"it was created by {founder}, not by {self._master}")
        if self.identity and state.registry != self.identity:
            raise Unusable(f"it is {state.registry} now, no longer {self.identity}")
        self.identity = state.registry
        return replace(state, etag=answer.headers.get("etag", ""))

    def close(self) -> None:
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(self._timeout + 1)


@contextmanager
def answering(
    settings: ChainSettings, wallet: Wallet | None, master: str | None = None
) -> Iterator[RegistryChain]:
    """Open a registry for one command, once it has answered. Raises ChainUnavailable."""
    logging.getLogger("distributed_training.chain").setLevel(logging.ERROR)  # one line is enough
    with closing(RegistryChain(settings, wallet, master)) as chain:
        if not chain.wait_ready(_FIRST_ANSWER):
            raise ChainUnavailable(
                f"the registry at {settings.registry_url} does not answer "
                f"({chain.trouble or 'no answer'}), so nothing was done: check the URL and the "
                "network, or ask the founder"
            )
        yield chain


def _why(error: Exception) -> str:
    if isinstance(error, (ChainError, Unusable)):
        return str(error)
    # Show the error's own words: they describe a fault that only the operator can fix, such as in a
    # host name or a certificate.
    words = "".join(filter(str.isprintable, str(error).partition("\n")[0]))
    words = "connection refused" if http.refuses(error) else words
    return f"{type(error).__name__}: {words:.200}".removesuffix(": ")
