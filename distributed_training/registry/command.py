"""Run the registry commands of ``dt-network``: serve a registry, and administer its members.

dt-network serve --folder F --network FILE     create a registry, or continue with an existing one
dt-network invite --network FILE --uses 3      print an invitation
dt-network allow --url URL HOTKEY...           let hotkeys register
dt-network expel --url URL HOTKEY...           shut hotkeys out
dt-network members --url URL                   list the members
dt-network backup --folder F FILE              copy a registry while it is served
dt-network restore --folder F FILE             restore a registry while it is not served
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed_training.common.kinds import UnknownKindError
from distributed_training.config.loader import (
    Parser,
    add_wallet,
    argument,
    load_config,
    ranged,
)
from distributed_training.config.types import (
    ConfigError,
    File,
    Hotkey,
    IpAddress,
    WebUrl,
    no_such_kind,
)
from distributed_training.network import FILE, VERSIONS, Network, NetworkFileError, read_text
from distributed_training.protocol.growth import largest_upload
from distributed_training.telemetry.logs import LineFormatter

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from distributed_training.chain.registry import RegistryChain
    from distributed_training.config.model import Config
    from distributed_training.registry.access import Access
    from distributed_training.registry.files import ServedFolder
    from distributed_training.registry.store import Registry

log = logging.getLogger(__name__)

#: Rules that a registry can never change: their names in its charter -> in the network's file.
FIXED = {"name": "name", "master": "chain.master_hotkey", "most_uids": "limits.max_uids"}
_FOLLOWS = 15.0  # seconds within which a registry starts to serve a new version
#: Rules that a registry reads only when it starts.
_AT_START = ("private", "store.endpoint", "store.region", "store.global_bucket", "store.access")
_OTHER_FILES = 64  # files that the service opens in addition to its connections


def add_commands(commands: Any) -> None:
    """Add the registry commands to ``dt-network``."""

    def made(run: Callable[[argparse.Namespace], None], text: str) -> Callable[..., Any]:
        command = commands.add_parser(run.__name__, help=text)
        command.set_defaults(run=run)
        add: Callable[..., Any] = command.add_argument
        return add

    def of_founder(run: Callable[[argparse.Namespace], None], text: str) -> Callable[..., Any]:
        add = made(run, text)
        add_wallet(commands.choices[run.__name__])
        return add

    folder = {"type": argument(File), "default": Path("runs/registry"), "help": "[runs/registry]"}
    url = {"type": argument(WebUrl), "help": "the registry's URL"}
    hotkeys = {
        "nargs": "+",
        "type": argument(Hotkey),
        "metavar": "HOTKEY",
        "help": "ss58 addresses",
    }
    add = made(serve, "create a registry, or continue with an existing one")
    add("--folder", **folder)
    add("--network", metavar="FILE", help="the network's file or its URL, served to everyone")
    of_admission = "who may register; can be changed by a restart [invited]"
    add("--admission", choices=("open", "invited", "listed"), help=of_admission)
    add("--host", type=argument(IpAddress), default="127.0.0.1", help="address [127.0.0.1]")
    of_store = "serve the network's bucket from this folder, instead of an S3 store"
    add("--store", type=argument(File), metavar="FOLDER", help=of_store)
    add("--port", type=ranged(0, 65535), default=8100, help="[8100] 0: any free port")
    of_proxy = "address of the TLS proxy in front, whose X-Forwarded-For is trusted"
    add("--proxy", type=argument(IpAddress), help=of_proxy)
    of_name = "host name under which browsers may open the page; repeatable [loopback's]"
    add("--host-name", action="append", default=[], help=of_name)
    of_rate = "requests that are answered per second and address [50.0]"
    add("--requests-per-address", type=ranged(0.1, 1e6), default=50.0, help=of_rate)
    for run, text in ((backup, "copy it to FILE while it serves"), (restore, "restore from FILE")):
        add = made(run, text)
        add("--folder", **folder)
        add("file", type=argument(File), metavar="FILE", help="the copy")
    add = of_founder(invite, "print an invitation")
    of_file = "the network's file, which names the registry, or its https URL"
    add("--network", metavar="FILE", help=of_file)
    add("--url", **url)
    add("--uses", type=ranged(1, 4096), default=1, help="how many hotkeys it admits [1]")
    add("--days", type=ranged(0.001, 365.0), default=7.0, help="days until it expires [7.0]")
    add("--list", action="store_true", help="print all invitations")
    add("--revoke", metavar="ID", help="revoke the invitation that --list shows under ID")
    add = of_founder(allow, "put hotkeys on the list of those that may register")
    add("--url", required=True, **url)
    add("hotkeys", **hotkeys)
    add("--remove", action="store_true", help="take them off the list")
    add = of_founder(expel, "shut hotkeys out for good")
    add("--url", required=True, **url)
    add("hotkeys", **hotkeys)
    add("--again", action="store_true", help="let them in again")
    made(members, "list the members")("--url", required=True, **url)


def parse_serve(words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of ``serve``. A wrong one ends the program with status 2."""
    parser = Parser(prog="dt-network")
    add_commands(parser.add_subparsers(dest="command"))
    return parser.parse_args(["serve", *words])


# --- the service ----------------------------------------------------------------------------------


def serve(given: argparse.Namespace) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises ConfigError, StoreFault, OSError."""
    from distributed_training.common.ports import listen
    from distributed_training.common.processes import limit_resources
    from distributed_training.registry.service import Limits, Service

    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(rank=0))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # Set this up before anything is opened, so that an early stop signal still closes everything.
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    config = None
    if given.network is not None:
        config = load_config("validator", ["--network", given.network], check=False)
    _check_store(given, config)
    with ExitStack() as stack:
        registry = stack.enter_context(closing(open_registry(given, config)))
        follow = _Followed(given.network, registry).look
        follow()
        host = f"[{given.host}]" if ":" in given.host else given.host
        try:
            sock = listen(given.host.strip("[]"), given.port, backlog=1024)
        except OSError as error:
            # Exit with status 1, since a retry may succeed: an address may appear late after a
            # boot, and a port may become free.
            raise OSError(
                f"cannot listen on {host}:{given.port} ({error.strerror}), so nothing was started: "
                "stop what uses the port, or choose another --port or --host"
            ) from None
        limits = Limits(
            requests_per_address=given.requests_per_address,
            # Stay below the system's limit, since a connection that cannot be opened would block
            # the others.
            max_connections=min(Limits.max_connections, limit_resources() - _OTHER_FILES),
            proxy=given.proxy,
            host_names=(host, *given.host_name),
            private=config is not None and config.chain.private,
        )
        access, files = None, None
        if config is not None and not config.has_bucket:
            access, files = open_access(config, given, registry.charter.master)
            stack.enter_context(closing(access))
        service = Service(registry, sock, limits, access=access, files=files, follow=follow)
        stack.enter_context(closing(service))
        service.start()
        port, charter = sock.getsockname()[1], registry.charter
        print(f"registry {charter.name} at http://{host}:{port}")
        print(f"created by {charter.master}; registration: {charter.admission}")
        # Print the pid, because the log may also contain READY lines of earlier starts.
        print(f"READY {os.getpid()}", flush=True)
        stop.wait()


class _Followed:
    """The network's file that ``registry`` serves, in its newest signed version.

    ``place``: the file's path or URL, or None if there is no file. A file at a URL is read only at
    the start.
    """

    def __init__(self, place: str | None, registry: Registry) -> None:
        self._place, self._registry = place, registry
        self._seen: object = None  # mtime, size and inode of the file when it was last read
        self._network: Network | None = None

    def look(self) -> None:
        """Serve the file as it is now. If it is not a valid signed version, keep the last one."""
        if self._place is None:
            return
        path, now = Path(self._place).expanduser(), None
        with suppress(OSError):
            found = path.stat()
            now = found.st_mtime_ns, found.st_size, found.st_ino
        if self._network is not None and (now is None or now == self._seen):
            return
        self._seen, known = now, self._network
        try:
            config = load_config("validator", ["--network", self._place], check=False)
        except ConfigError as error:
            if known is None:
                raise
            log.info("%s; still serving version %d of the file", error, known.head.version)
            return
        network = config.network
        assert network is not None  # the parser requires it
        if known is not None:
            if network.values["run_id"] != known.values["run_id"]:
                log.warning("%s now belongs to another network, so it is not served", path)
                return
            if fixed := [k for k in _AT_START if network.values.get(k) != known.values.get(k)]:
                log.warning("Restart the registry: it will not use the new %s until then", fixed[0])
        files = {FILE: network.text}
        for version in sorted(path.parent.glob(f"{VERSIONS}/*.toml")):
            with suppress(NetworkFileError):  # a new member compares the digests
                files[f"{VERSIONS}/{version.name}"] = read_text(version)
        self._registry.files, self._registry.file_version = files, network.head.version
        self._network = network
        if known is not None:
            log.info("Serving version %d of %s", network.head.version, path)


def _check_store(given: argparse.Namespace, config: Config | None) -> None:
    """Raise ConfigError if ``--store`` is a folder that the registry would serve to nobody."""
    if given.store is not None and (config is None or config.has_bucket):
        raise ConfigError(
            "--store names a folder that nobody would read, so nothing was started: give --network "
            "with a file whose members share a bucket (store.access), or leave --store out"
        )


def open_registry(given: argparse.Namespace, config: Config | None) -> Registry:
    """Open the registry of ``--folder``, or create it. Raises ConfigError, StoreFault."""
    from distributed_training.common.files import FSTAB, late_mount
    from distributed_training.registry import store

    # Read the file at every start, to compare its values with the registry's own.
    terms: dict[str, Any] = {}
    if config is not None:
        in_network = {**config.network.values, "name": config.network.head.name}
        terms = {field: in_network[key] for field, key in FIXED.items()}
    if (given.folder / store.FILE).exists():
        registry = store.Registry.at(given.folder)
        for field, wanted in terms.items():
            if wanted != (has := getattr(registry.charter, field)):
                registry.close()
                raise ConfigError(
                    f"{FIXED[field]} {wanted} in {given.network} differs from the registry in "
                    f"{given.folder}, created with {has}, so nothing was started: change the file "
                    "back (dt-network sign), leave --network out, or choose another --folder"
                )
        if given.admission is not None:
            registry.change_charter(admission=given.admission)
        return registry
    if (mount := late_mount(given.folder)) is not None:
        raise store.StoreFault(
            f"{given.folder} is on {mount} of {FSTAB}, which is not mounted, so a second registry "
            f"would be created in its place, and members would lose their uids: mount {mount}"
        )
    if not terms:
        raise ConfigError(
            f"there is no registry in {given.folder}, so nothing was started: correct --folder, or "
            "give --network FILE to create one"
        )
    return store.Registry.at(
        given.folder, store.Charter(**terms, admission=given.admission or "invited")
    )


def open_access(
    config: Config, given: argparse.Namespace, master: str
) -> tuple[Access, ServedFolder | None]:
    """Open the global bucket, for which the registry signs the members' URLs.

    The bucket is in the folder ``--store``, or in an S3 store whose key is R2_WRITE_... in .env.
    Raises ConfigError, OSError.
    """
    from distributed_training.chain.auth import verify_signature
    from distributed_training.protocol.manifest import Master
    from distributed_training.registry.access import Access
    from distributed_training.registry.files import ServedFolder, read_secret
    from distributed_training.store.s3 import S3ObjectStore

    network, name = config.network, config.store.global_model_name
    assert network is not None  # the parser requires it
    bucket: S3ObjectStore | ServedFolder
    files = None
    if given.store is not None:
        require_store(given.store)
        url, secret = config.store.endpoint_url or "", read_secret(given.folder)
        bucket = files = ServedFolder(given.store / name, url=url, secret=secret)
    else:
        # With longer timeouts, callers would ask again while their first request still occupies a
        # thread.
        settings = replace(
            config.store,
            connect_timeout=timedelta(seconds=5),
            read_timeout=timedelta(seconds=10),
        )
        try:
            bucket = S3ObjectStore.from_settings(settings, bucket=name, write=True)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    signer = Master(config.swarm.run_id, master, verify_signature)
    parameters, codec = network.head.exchanged, config.rounds.codec
    try:
        # Allow for every codec, since a later version of the network's file may choose another.
        largest = largest_upload(parameters, codec)
    except UnknownKindError as error:
        raise no_such_kind(error, key="round.codec") from None
    return Access(bucket, master=signer, largest_upload=largest), files


def require_store(folder: Path) -> None:
    """Raise ConfigError unless ``folder``, which is to hold the buckets, exists."""
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}, from which members would read, does not exist, so nothing was started: "
            "mount its disk, or correct --store"
        )


def backup(given: argparse.Namespace) -> None:
    from distributed_training.registry import store

    version = store.backup(given.folder / store.FILE, given.file)
    print(f"{given.file}: version {version}")


def restore(given: argparse.Namespace) -> None:
    from distributed_training.registry import store

    kept = store.restore(given.file, given.folder)
    print(f"{given.folder / store.FILE} was restored from {given.file}")
    if kept is not None:
        print(f"the previous registry is kept as {kept}")


# --- its clients ----------------------------------------------------------------------------------


def _chain(given: argparse.Namespace) -> AbstractContextManager[RegistryChain]:
    """Connect to the registry at ``--url``, with the wallet if the command takes one.

    Raises ConfigError, ChainError.
    """
    from distributed_training.chain.identity import load_wallet
    from distributed_training.chain.registry import answering
    from distributed_training.config.settings import ChainSettings

    flags = {name: value for name, value in vars(given).items() if name.startswith("wallet.")}
    words = {name.replace(".", "_"): value for name, value in flags.items()}
    settings = ChainSettings(registry_url=given.url, **words)
    # httpx logs a line per request, which would mix with the command's output.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    return answering(settings, load_wallet(settings) if flags else None)


def invite(given: argparse.Namespace) -> None:
    """Print a new invitation, or list or revoke earlier ones. The registry keeps only hashes.

    With the network's file, it also prints the commands for a new member: to install the software
    (only if the file names ``software``), to join and to start.
    """
    from distributed_training.registry.store import ID_LENGTH, hash_of

    place = text = software = ""  # text: the file that the registry must serve
    if given.network is not None:
        config = load_config("miner", ["--network", given.network], check=False)
        network = config.network
        assert network is not None  # the parser requires it
        if (public := config.chain.registry_url) is None:
            raise ConfigError(
                f"{given.network} names no registry, so nobody can be invited: new members "
                "register on the network's chain"
            )
        public = public.rstrip("/")
        software = network.head.software or ""
        given.url = given.url or public
        hosted = given.network.partition("#")[0] if "://" in given.network else ""
        text = "" if hosted else network.text
        place = f"{hosted or f'{public}/{FILE}'}#{network.digest}"
    if given.url is None:
        raise ConfigError("no registry was named, so no request was sent: give --network or --url")
    with _chain(given) as chain:
        if given.revoke is not None:
            members = chain.administer("revoke", invitation=given.revoke)
            print(f"invitation {given.revoke} no longer admits anybody")
            print(f"members that used it, who stay: {' '.join(members) or 'nobody'}")
            return
        if given.list:
            for invitation in chain.administer("invitations"):
                uses, expires = invitation["uses"], invitation["expires"]
                until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(expires))
                state = f"good for {uses} until {until}"
                if uses <= 0:
                    state = "used up" if uses == 0 else "taken back"
                elif expires < time.time():
                    state = f"expired {until}, {uses} not used"
                print(f"{invitation['id']}  {state}; {' '.join(invitation['hotkeys']) or 'nobody'}")
            return
        ends = time.monotonic() + _FOLLOWS
        while text and chain.file(FILE) != text:  # the registry looks for a new version every 2 s
            if time.monotonic() > ends:
                raise ConfigError(
                    f"the registry at {given.url} does not serve {given.network} as it is now, so "
                    "no invitation was created: restart it with --network and this file"
                )
            time.sleep(0.5)
        token, expires = secrets.token_urlsafe(24), time.time() + given.days * 86400
        # Send only the hash, so that nobody can take a usable invitation from the registry's file
        # or from a backup of it.
        chain.administer("invite", hashed=hash_of(token), uses=given.uses, expires=expires)
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(expires))
    print(f"invitation {hash_of(token)[:ID_LENGTH]}, good for {given.uses} until {until}; a secret")
    if place:
        install = f"python3 -m venv .venv && . .venv/bin/activate && pip install '{software}'\n"
        print("the new member runs, in an empty folder:\n")
        print(f"{install if software else ''}dt-join {place}.{token}\ndt-miner")
    print(f"\nfor the .env of a miner that is already set up:\n\nDT_INVITATION={token}")


def allow(given: argparse.Namespace) -> None:
    with _chain(given) as chain:
        for hotkey in given.hotkeys:
            chain.administer("allow", hotkey=hotkey, allowed=not given.remove)


def expel(given: argparse.Namespace) -> None:
    with _chain(given) as chain:
        for hotkey in given.hotkeys:
            done = chain.administer("expel", hotkey=hotkey, again=given.again)
            if given.again:
                print(f"{hotkey} may register again, with a new invitation or by the list")
                continue
            had = "it had no uid" if done["uid"] is None else f"it had uid {done['uid']}"
            print(f"{hotkey} is expelled ({had}), and gets no uid until `expel --again`")
            if done["invitation"]:
                print(f"the invitation it used, {done['invitation']}, no longer admits anybody")
            if done["others"]:
                print(f"members that used the same one, who stay: {' '.join(done['others'])}")


def members(given: argparse.Namespace) -> None:
    with _chain(given) as chain:
        neurons = chain.neurons()
        print(chain.identity)
        for n in neurons:
            where = f"{n.ip}:{n.port}" if n.port is not None else "no endpoint"
            role = "validator" if n.validator_permit else "member"
            print(f"{n.uid:4} {n.hotkey}  {role}, {where}")
        for hotkey in sorted(chain.all_expelled):
            print(f"   - {hotkey}  expelled")
