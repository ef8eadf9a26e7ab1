"""The first steps of every process of a node, and how it ends.

The first steps prepare its run folder, its log, its tokenizer and its data.

Some errors end a start although its settings passed their checks. Exit status 2 is for what parsing
and the settings themselves can refuse (``load_config``), and for a bucket, data or a run folder
that belong to another network. All other errors come from outside (disk, mount, driver, wallet,
chain, store, other machines) and may pass. So a ConfigError that is raised later counts as a
NetworkFailure: exit status 1, and the start is tried again.

SIGINT, SIGTERM and SIGHUP all request a stop. pm2 sends SIGINT, systemd SIGTERM, a closed terminal
SIGHUP; all mean the same, but if ``nohup`` has set SIGHUP to be ignored, it stays ignored. The
handler only notes the request. During its start a node may wait long for others (a DHT, a bucket)
in code that checks no flag: there the first signal also raises :class:`StopNow` in the main thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import SecretStr

from distributed_training.common.files import FSTAB, atomic_file, late_mount
from distributed_training.config import (
    SETTINGS_FILE,
    WARNING,
    Config,
    ConfigError,
    all_settings,
    describe,
)
from distributed_training.protocol.types import ExitStatus
from distributed_training.telemetry import setup_logging
from distributed_training.telemetry.page import PageProcess

log = logging.getLogger(__name__)

VALIDATOR_PAGE_PORT = 8011  # default port of a validator's dashboard


# --- errors that end a start ---------------------------------------------------------------------


class NetworkFailure(RuntimeError):
    """Something outside this process is unavailable; the text has the cause and the remedy."""


class NotRegistered(ConfigError):
    """The hotkey has no uid on the subnet."""


class WrongPlace(ConfigError):
    """Bucket, data or run folder belong to another network. Exit status 2: retrying is no use."""


class OtherRules(NetworkFailure):
    """Another version of the network's file is now in force. Exit status 5: start again with it."""


class Deregistered(NotRegistered):
    """The founder has expelled the hotkey. Exit status 3."""


def exit_status_of(error: Exception) -> ExitStatus:
    """Return the exit status for an error that ended a start after the settings were checked."""
    if isinstance(error, WrongPlace):
        return ExitStatus.BAD_CONFIGURATION
    if isinstance(error, OtherRules):
        return ExitStatus.AGAIN
    # Other errors may pass. With status 2 or 3, pm2 and systemd would not start the miner again.
    lost = isinstance(error, Deregistered)
    return ExitStatus.DEREGISTERED if lost else ExitStatus.FAULT


# --- the first steps ------------------------------------------------------------------------------

_NO_MINERS_FILES = {"launcher.prom", "launcher.json", "notify.json", "events.jsonl", "lost+found"}


def make_run_folder(config: Config, *, fstab: Path = FSTAB) -> Path:
    """Return the absolute path of the run folder, which contains all that a node must not lose.

    This creates the run folder and the other folders that flags name.

    Nothing is created at the path of a disk that is not mounted yet. Otherwise a miner would start
    over there, download the global state to the wrong disk, and lose both once the disk is mounted.
    So no parents of an absolute folder are created, and a disk that ``fstab`` lists must be
    mounted. Raises ConfigError if that is not so, or if a folder cannot be written.
    """
    for folder, flag, consequence in (
        (config.run_folder, "--neuron.run_folder", "nothing could be saved"),
        (config.telemetry.tensorboard_dir, "--neuron.tensorboard_dir", "no curve would be drawn"),
    ):
        if folder is None:
            continue
        cause = ""
        try:
            # A folder with files is not an empty mount point. Ignore files that the launcher writes
            # about a refused start, since it may have written them while the disk was not mounted.
            there = folder.iterdir() if folder.is_dir() else ()
            filled = any(path.name not in _NO_MINERS_FILES for path in there)
            if not filled and (mount := late_mount(folder, fstab)) is not None:
                cause, remedy = f"is on {mount} of {fstab}, which is not mounted", f"mount {mount}"
            else:
                # A relative folder is below the folder in which the miner starts, which exists.
                folder.mkdir(exist_ok=True, parents=not folder.is_absolute())
                with tempfile.TemporaryFile(dir=folder):  # a file system may be read-only
                    pass
        except OSError as error:
            cause, remedy = f"cannot be written ({error.strerror})", "use a folder of your own"
            if not (parent := folder.parent).exists():
                cause = f"cannot be created, since {parent} does not exist"
                remedy = f"mount its disk, or mkdir -p {parent} if there is no disk"
        if cause:
            raise ConfigError(f"{flag} {folder} {cause}, so {consequence}: {remedy}")
    return config.run_folder.absolute()


@contextlib.contextmanager
def sole_user(
    folder: Path,
    name: str,
    program: str,
    *,
    owner: Callable[[], int | None] = lambda: None,
    instead: str = "use another --neuron.run_folder (or --neuron.name)",
) -> Iterator[None]:
    """Let only one ``program`` use a run folder.

    ``name``: name of the file to lock; the kernel releases the lock however the process ends.
    ``owner``: returns the pid of the process that has the lock, if it is known. ``instead``: what
    else the operator can do. Raises ConfigError.
    """
    with (folder / name).open("a") as file:
        # A lock belongs to the open file: a process forked from ours would keep it after we exit.
        os.register_at_fork(after_in_child=file.close)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if (pid := owner()) == os.getpid():
                raise ConfigError(
                    f"this process already uses {folder}, so it cannot use it a second time: call "
                    "close() on the result of join() first"
                ) from None
            raise ConfigError(
                f"a {program} (pid {pid or '?'}) is running in {folder}, so a second one would "
                f"overwrite its files: stop it, or {instead}"
            ) from None
        # Lustre without -o flock and NFS without a lock service do not support locks.
        except OSError as error:
            raise ConfigError(
                f"the file system of {folder} has no locks ({error.strerror}), so a second "
                f"{program} could overwrite this one's files unnoticed: mount it with locks "
                f"(Lustre: -o flock; NFS: -o local_lock=flock), or {instead}, on another disk"
            ) from None
        yield


@contextlib.contextmanager
def sole_sender(config: Config) -> Iterator[None]:
    """Let only one program on this machine use a hotkey in a network. Raises ConfigError.

    If two programs used the same hotkey, only one of their uploads would be merged at each close.
    """
    from distributed_training.chain.identity import hotkey_file

    chain = config.chain
    path = hotkey_file(chain.wallet_path, chain.wallet_name, chain.wallet_hotkey)
    lock = path.with_name(f".{path.name}.{config.swarm.run_id}.lock")
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(lock.open("a"))
            os.register_at_fork(after_in_child=file.close)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another miner or script trains with the hotkey {path} in this network, and only "
                "one upload of the two would count, so nothing was started: stop it, or run "
                "dt-join --wallet.name two in a folder of its own"
            ) from None
        except OSError:  # the hotkey's folder is missing, is read-only, or does not support locks
            pass
        yield


def write_settings(config: Config, folder: Path) -> None:
    """Write all settings, with secrets masked, to a private ``config.txt`` in the run folder."""
    path = folder / SETTINGS_FILE
    try:
        with atomic_file(path, durable=False, private=True) as file:
            file.write(all_settings(config).encode())
    except OSError as error:
        log.warning("The settings could not be written to %s (%s)", path, error.strerror)


def log_settings(config: Config) -> None:
    """Log the settings that were given, and warnings about faulty ones."""
    for line in describe(config):
        text = line.removeprefix(WARNING)
        log.log(logging.INFO if text == line else logging.WARNING, "%s", text)


def start_log(config: Config, *, rank: int = 0) -> None:
    """Log to the terminal, with every secret in the configuration masked."""
    secrets = [value for value in config.values.values() if isinstance(value, SecretStr)]
    setup_logging(config.telemetry, rank=rank, secrets=secrets)


def fetch_tokenizer(config: Config, folder: Path) -> tuple[Path, int]:
    """Return the path of the tokenizer's file below ``folder``, and its end-of-sequence token.

    Raises ConfigError, or NetworkFailure if the hub does not answer, since that may pass without
    any change.
    """
    from distributed_training.data.tokenizer import build_tokenizer

    name = config.miner.global_tokenizer_name
    if "tokenizer" in config.published and not Path(name).is_dir():
        raise ConfigError(
            f"the network's tokenizer is not in {name}, so no text could be read: a miner that "
            "starts with this run folder fetches it"
        )
    try:
        return build_tokenizer(name, folder / "tokenizer", revision=config.tokenizer_revision)
    except (ValueError, OSError) as error:
        if hub_is_away(error):
            raise NetworkFailure(
                f"the tokenizer {name} is not on this machine and the Hugging Face hub does not "
                "answer, so no text could be read: check the network, or name a folder as "
                "tokenizer.name"
            ) from None
        if isinstance(error, OSError):
            raise ConfigError(
                f"the tokenizer {name} cannot be written ({error}), so no text could be read: "
                "free some disk space for --neuron.run_folder"
            ) from None
        raise ConfigError(str(error)) from None


def require_data(config: Config) -> None:
    """Raise WrongPlace if the source serves different data from what the network's file pins.

    In a network on members' own text, raise ConfigError if a miner's files have no text.

    A source that does not answer does not count as different data: it is checked again when its
    pages are read.
    """
    from distributed_training.data.own_text import require_own_text
    from distributed_training.data.page_source import OtherData, PageUnavailable
    from distributed_training.data.sources import Source, kind_of

    data = config.data
    if data.own:
        if config.kind == "miner" and config.reads_text:
            require_own_text(data)
        return
    if (data.revision, data.rows) == (None, None) or kind_of(data.spec).open is None:
        return
    try:
        Source(data, cache=config.data_cache).num_rows()
    except OtherData as error:
        raise WrongPlace(str(error)) from None
    except PageUnavailable as error:
        log.warning("Could not check yet whether this is the network's data (%s)", error)


def hub_is_away(error: BaseException | None) -> bool:
    """Return whether the cause of transformers' error is a hub that did not answer."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    while error is not None:
        if isinstance(error, LocalEntryNotFoundError):  # neither the hub nor its cache has it
            return True
        if isinstance(error, HfHubHTTPError):
            # These pass; other refusals (401, 404) need another name or token.
            return error.response.status_code == 429 or error.response.status_code >= 500
        error = error.__cause__
    return False


# --- a request to stop ----------------------------------------------------------------------------

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# pm2 signals the whole process tree, so one request may arrive twice; a second Ctrl-C comes later.
SAME_REQUEST_SECONDS = 1.0


class StopNow(BaseException):
    """The node stops and abandons its current work.

    Like KeyboardInterrupt, it is not an Exception: a signal may raise it anywhere during a start,
    and some libraries, such as logging, swallow every Exception.
    """


class StopSignals:
    """A context manager for the main thread that handles stop signals; it restores old handlers.

    A thread sets ``stop`` soon after the first signal. The handler does not: Event.set takes a
    lock, which the interrupted code may hold, so the handler could wait for itself. ``asked_at`` is
    the ``time.monotonic()`` of the first signal, ``name`` its name; ``hurry`` becomes True with a
    second Ctrl-C. Set ``interrupts`` to True while the first signal should also raise StopNow.
    """

    def __init__(self, *, interrupts: bool = False) -> None:
        self.stop = threading.Event()
        self.interrupts = interrupts
        self.asked_at: float | None = None
        self.name = ""
        self.hurry = False
        self._old: dict[int, Any] = {}
        # Use a SimpleQueue: its put() is reentrant, so a signal handler may call it.
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def __enter__(self) -> StopSignals:
        threading.Thread(target=self._set, name="stop-signals", daemon=True).start()
        for number in STOP_SIGNALS:
            # Under nohup, SIGHUP is ignored, and closing the terminal must not stop the node.
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._wake.put(False)

    def _set(self) -> None:
        if self._wake.get():
            self.stop.set()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked_at is None:
            self.asked_at, self.name = now, signal.Signals(number).name
            self._wake.put(True)
            if self.interrupts:
                raise StopNow
        elif number == signal.SIGINT and now - self.asked_at > SAME_REQUEST_SECONDS:
            self.hurry = True


@contextlib.contextmanager
def dashboard(config: Config, folder: Path) -> Iterator[None]:
    """Serve the dashboard from a process that outlives failed ranks: that is when it is needed."""
    settings = config.telemetry
    if settings.page_port == "off":
        yield
        return
    # A validator has a different default port, since its founder may also run a miner here.
    given = config.kind == "miner" or "neuron.page_port" in config.sources
    port = settings.page_port if given else VALIDATOR_PAGE_PORT

    def log_line(line: str) -> None:
        log.log(logging.INFO if line.startswith("page: ") else logging.WARNING, "%s", line)

    with contextlib.ExitStack() as stack:
        try:
            page = PageProcess(
                [folder],
                host=settings.page_host,
                port=port,
                token=settings.page_token,
                told=log_line,
            )
            stack.enter_context(page)
        except OSError as error:  # out of processes or file descriptors
            log.warning("The page could not be started (%s); training is not affected", error)
        yield
