"""Create, serve and administer the registry of a network that has no public chain.

    dt-registry serve --folder F --network FILE                 create it, or continue with it
    dt-network invite --network FILE --uses 3                  print an invitation (founder)
    dt-network allow --url URL HOTKEY...                       list hotkeys (founder)
    dt-registry enroll --url URL HOTKEY --uid 7                 give a uid (founder)
    dt-network expel --url URL HOTKEY...                       shut them out (founder)
    dt-registry register --url URL                              take a uid; DT_INVITATION in .env
    dt-network members --url URL                                list the members
    dt-network backup --folder F FILE                          while it serves
    dt-network restore --folder F FILE                         while it does not

`dt-registry` is `python -m distributed_training.registry`.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from distributed_training import NO_HELP
from distributed_training.common.kinds import UnknownKindError
from distributed_training.config.loader import (
    Parser,
    add_wallet,
    argument,
    exit_with,
    load_config,
    ranged,
    read_dotenv,
)
from distributed_training.config.types import (
    ConfigError,
    File,
    FileName,
    Hotkey,
    IpAddress,
    WebUrl,
    no_such_kind,
)
from distributed_training.network import FILE, VERSIONS, Network, NetworkFileError, read_text
from distributed_training.protocol.growth import file_bytes
from distributed_training.protocol.types import ExitStatus
from distributed_training.telemetry.logs import LineFormatter

if TYPE_CHECKING:
    from distributed_training.chain.registry import RegistryChain
    from distributed_training.config.model import Config
    from distributed_training.registry.access import Access
    from distributed_training.registry.files import ServedFolder
    from distributed_training.registry.store import Registry

log = logging.getLogger(__name__)

_FOLLOWS = 15.0  # seconds, in which a registry serves a version that was signed just now
#: Rules that a registry reads at its start only.
_AT_START = ("private", "store.endpoint", "store.region", "store.global_bucket", "store.access")
_OTHER_FILES = 64  # that the service opens in addition to its connections


def parser() -> Parser:
    lines = (__doc__ or NO_HELP).splitlines()
    made = Parser(
        prog="dt-registry",
        description=lines[0],
        epilog="\n".join(lines[2:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = made.add_subparsers(dest="command", required=True, parser_class=Parser)
    command: argparse.ArgumentParser
    command = commands.add_parser("serve", help="create a registry, or continue with it")
    _add_folder(command)
    new = command.add_argument_group("of a new registry")
    new.add_argument(
        "--network",
        metavar="FILE",
        help="the network's file or its URL, served to all: gives name, founder, number of uids",
    )
    new.add_argument("--name", type=argument(FileName), help="the network's: letters, digits, - .")
    new.add_argument("--master", type=argument(Hotkey), help="the founder's hotkey")
    new.add_argument("--most-uids", type=ranged(2, 4096), help="[256] (2 to 4096)")
    command.add_argument(
        "--admission",
        choices=("open", "invited", "listed"),
        help="who may register; may be changed with a restart [invited]",
    )
    command.add_argument(
        "--host", type=argument(IpAddress), default="127.0.0.1", help="address [127.0.0.1]"
    )
    command.add_argument(
        "--store",
        type=argument(File),
        metavar="FOLDER",
        help="serve the network's bucket from this folder, in place of an S3 store",
    )
    command.add_argument("--port", type=ranged(0, 65535), default=8100, help="[8100] 0: a free one")
    command.add_argument(
        "--proxy",
        type=argument(IpAddress),
        help="address of the TLS proxy in front, whose X-Forwarded-For is believed",
    )
    command.add_argument(
        "--host-name",
        action="append",
        default=[],
        help="name at which browsers may open the page; several are possible [loopback's]",
    )
    command.add_argument("--requests-per-address", type=ranged(0.1, 1e6), default=50.0, help="[50]")
    command.add_argument("--requests-per-hotkey", type=ranged(0.1, 1e6), default=5.0, help="[5]")
    command.add_argument("--max-connections", type=ranged(1, 65535), default=8192, help="[8192]")
    for name, text in (("backup", "copy it to FILE while it serves"), ("restore", "put FILE back")):
        command = commands.add_parser(name, help=text)
        _add_folder(command)
        command.add_argument("file", type=argument(File), metavar="FILE")
    command = _client(commands, "invite", "print an invitation; for the founder", url=False)
    command.add_argument(
        "--network",
        metavar="FILE",
        help="the network's file, which names the registry, or its https URL",
    )
    command.add_argument(
        "--uses", type=ranged(1, 4096), default=1, help="how many hotkeys it admits [1]"
    )
    command.add_argument(
        "--days", type=ranged(0.001, 365.0), default=7.0, help="days until it expires [7]"
    )
    instead = command.add_mutually_exclusive_group()
    instead.add_argument("--list", action="store_true", help="print all invitations")
    instead.add_argument(
        "--revoke", metavar="ID", help="revoke the invitation that --list shows under ID"
    )
    command = _client(commands, "allow", "list hotkeys that may register; for the founder")
    command.add_argument("hotkeys", nargs="+", type=argument(Hotkey), metavar="HOTKEY")
    command.add_argument("--remove", action="store_true", help="take them off the list")
    command = _client(commands, "expel", "shut hotkeys out for good; for the founder")
    command.add_argument("hotkeys", nargs="+", type=argument(Hotkey), metavar="HOTKEY")
    command.add_argument("--again", action="store_true", help="let them in again")
    command = _client(commands, "enroll", "register a hotkey, or move it to a uid; for the founder")
    command.add_argument("hotkey", type=argument(Hotkey), metavar="HOTKEY")
    command.add_argument("--uid", type=ranged(0, 4095), help="its uid (default: the first free)")
    _client(commands, "register", "take a uid with this wallet's hotkey")
    command = commands.add_parser("status", help="list the members")
    command.add_argument("--url", type=argument(WebUrl), required=True, help="the registry's")
    return made


def _add_folder(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--folder", type=argument(File), default=Path("runs/registry"), help="[runs/registry]"
    )


def _client(commands: Any, name: str, text: str, *, url: bool = True) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text)
    command.add_argument("--url", type=argument(WebUrl), required=url, help="the registry's")
    add_wallet(command)
    return command


# --- the service ----------------------------------------------------------------------------------


def serve(given: argparse.Namespace) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    from distributed_training.common.ports import listen
    from distributed_training.common.processes import limit_resources
    from distributed_training.registry.service import Limits, Service

    # Before anything is opened: a stop that comes meanwhile must still close it.
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with closing(_registry(given)) as registry:
        follow = _Followed(given.network, registry).look
        follow()
        host = f"[{given.host}]" if ":" in given.host else given.host
        try:
            sock = listen(given.host.strip("[]"), given.port, backlog=1024)
        except OSError as error:
            raise OSError(  # 1: an address may come late after a boot, and a port be free again
                f"cannot listen on {host}:{given.port} ({error.strerror}), so nothing was started: "
                "stop what uses the port, or give another --port or --host"
            ) from None
        limits = Limits(
            requests_per_address=given.requests_per_address,
            requests_per_hotkey=given.requests_per_hotkey,
            # What the system does not let it open would keep the rest out instead.
            max_connections=min(given.max_connections, limit_resources() - _OTHER_FILES),
            proxy=given.proxy,
            host_names=(host, *given.host_name),
            private=given.private,
        )
        access, files = None, None
        if given.access is not None:
            access, files = given.access(registry.charter.master)
        with (
            closing(access) if access is not None else nullcontext(),
            closing(
                Service(registry, sock, limits, access=access, files=files, follow=follow)
            ) as service,
        ):
            service.start()
            port, charter = sock.getsockname()[1], registry.charter
            print(f"registry {charter.name} at http://{host}:{port}")
            print(f"created by {charter.master}; registration: {charter.admission}")
            # With the pid: a log that is appended to has the READY of earlier starts.
            print(f"READY {os.getpid()}", flush=True)
            stop.wait()


class _Followed:
    """The network's file that ``registry`` serves, in its newest signed version.

    ``place``: of the file; None: there is none. One at a URL is read at the start only.
    """

    def __init__(self, place: str | None, registry: Registry) -> None:
        self._place, self._registry = place, registry
        self._seen: object = None  # how the file looked when it was read last
        self._network: Network | None = None

    def look(self) -> None:
        """Serve the file as it is now, unless nobody has signed it as the next version."""
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
            log.info("%s; version %d of it stays served", error, known.head.version)
            return
        network = config.network
        assert network is not None  # it was named
        if known is not None:
            if network.values["run_id"] != known.values["run_id"]:
                log.warning("%s is another network's now, so it is not served", path)
                return
            if fixed := [k for k in _AT_START if network.values.get(k) != known.values.get(k)]:
                log.warning("Restart the registry: it does not use the new %s before", fixed[0])
        files = dict(network.files)
        for version in sorted(path.parent.glob(f"{VERSIONS}/*.toml")):
            with suppress(NetworkFileError):  # a new member compares its digest
                files[f"{VERSIONS}/{version.name}"] = read_text(version)
        self._registry.files, self._registry.file_version = files, network.head.version
        self._network = network
        if known is not None:
            log.info("Serving version %d of %s", network.head.version, path)


def _registry(given: argparse.Namespace) -> Registry:
    """Open the registry of ``--folder``, or create it. Raises ConfigError, StoreFault."""
    from distributed_training.common.files import FSTAB, late_mount
    from distributed_training.registry import store

    # Read again at every start: its values are compared with the registry's own.
    in_file, given.private, given.access = [], False, None
    if given.store is not None and given.network is None:
        raise ConfigError(
            "--store without --network, so the buckets of the members would have no name and "
            "nothing was started: give --network too"
        )
    if given.network is not None:
        config = load_config("validator", ["--network", given.network], check=False)
        network = config.network
        assert network is not None  # it was named
        given.private = config.chain.private
        if not config.has_bucket:
            given.access = partial(_open_access, config, given)
        elif given.store is not None:
            raise ConfigError(
                f"--store, and in {given.network} each member has a bucket of its own "
                "(store.access), so the registry would serve the folder to nobody and nothing was "
                "started: leave it out"
            )
        in_network = {**network.values, "name": network.head.name}
        in_file = [field for field in FIXED if getattr(given, field) is None]
        for field in in_file:
            setattr(given, field, in_network.get(FIXED[field]))
    if (given.folder / store.FILE).exists():
        registry = store.Registry.at(given.folder, None)
        for field, key in FIXED.items():
            wanted, has = getattr(given, field), getattr(registry.charter, field)
            if wanted is not None and wanted != has:
                registry.close()
                said, remedy = f"--{field.replace('_', '-')} {wanted}", "leave it out"
                if field in in_file:
                    said = f"{key} {wanted} in {given.network}"
                    remedy = "set it back there (dt-network sign), leave --network out"
                raise ConfigError(
                    f"{said} differs from the registry in {given.folder}, created with {has}, "
                    f"so nothing was started: {remedy}, or give another --folder"
                )
        if given.admission is not None:
            registry.change_charter(admission=given.admission)
        return registry
    if (mount := late_mount(given.folder)) is not None:
        raise store.StoreFault(
            f"{given.folder} is on {mount} of {FSTAB}, which is not mounted, so a second registry "
            f"would be created in its place and everybody lose the uid: mount {mount}"
        )
    if given.name is None or given.master is None:
        raise ConfigError(
            f"there is no registry in {given.folder}, so nothing was started: correct --folder, or "
            "give --network FILE (or --name and --master) to create one"
        )
    if not store.NAME.fullmatch(given.name):
        raise ConfigError(
            f"--name {given.name!r} is not 1 to 63 lower-case letters, digits, '-' and '.', so "
            "nothing was started: correct --name"
        )
    charter = store.Charter(
        name=given.name,
        master=given.master,
        most_uids=given.most_uids or 256,
        admission=given.admission or "invited",
    )
    return store.Registry.at(given.folder, charter)


def _open_access(
    config: Config, given: argparse.Namespace, master: str
) -> tuple[Access, ServedFolder | None]:
    """Open the global bucket, whose URLs the registry signs for members.

    It is in the folder of ``--store``, or at a store whose key R2_WRITE_... of .env is. Raises
    ConfigError, OSError.
    """
    from distributed_training.chain.auth import verify_signature
    from distributed_training.protocol.manifest import Master
    from distributed_training.registry.access import Access
    from distributed_training.registry.files import ServedFolder, read_secret
    from distributed_training.store.s3 import S3ObjectStore

    network, name = config.network, config.store.global_model_name
    assert network is not None  # it was named
    bucket: S3ObjectStore | ServedFolder
    files = None
    if given.store is not None:
        refuse_old_store(given.store)
        url, secret = config.store.endpoint_url or "", read_secret(given.folder)
        bucket = files = ServedFolder(given.store / name, url=url, secret=secret)
    else:
        # Whoever waited longer would ask again, while the first request still holds a thread.
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
    parameters, codec = network.head.exchanged, config.miner.codec
    try:
        # A later version of the network's file may have any of the product's codecs.
        largest = max(file_bytes(parameters), file_bytes(parameters, codec))
    except UnknownKindError as error:
        raise no_such_kind(error, key="round.codec") from None
    return Access(bucket, master=signer, largest_upload=largest), files


def refuse_old_store(folder: Path) -> None:
    """Raise ConfigError unless ``folder`` is one of buckets, which the validator writes too."""
    if (folder / "swift.conf").exists() or (folder / "credentials.json").exists():
        raise ConfigError(
            f"{folder} is an object store of the edition before (OpenStack Swift), which this one "
            "does not read, so nothing was started: copy its bucket with that edition (aws s3 "
            f"sync s3://BUCKET NEW/BUCKET), put NEW in the place of {folder}, and sign the "
            "network's file with store.endpoint = the URL of its registry"
        )
    if not folder.is_dir():
        raise ConfigError(
            f"there is no {folder}, which holds what members read, so nothing was started: "
            "mount its disk, or correct --store"
        )


#: The final settings of a new registry, and each one's key in a network's file.
FIXED = {
    "name": "name",
    "master": "chain.master_hotkey",
    "most_uids": "limits.max_uids",
}


def backup(given: argparse.Namespace) -> None:
    from distributed_training.registry import store

    version = store.backup(given.folder / store.FILE, given.file)
    print(f"{given.file}: version {version}")


def restore(given: argparse.Namespace) -> None:
    from distributed_training.registry import store

    kept = store.restore(given.file, given.folder)
    print(f"{given.folder / store.FILE} is {given.file} now")
    if kept is not None:
        print(f"the registry before it is kept as {kept}")


# --- its clients ----------------------------------------------------------------------------------


def _chain(given: argparse.Namespace) -> AbstractContextManager[RegistryChain]:
    """Open the registry at ``--url``, by the wallet if the command has one.

    Raises ConfigError, ChainError.
    """
    from distributed_training.chain.identity import load_wallet
    from distributed_training.chain.registry import answering
    from distributed_training.config.settings import ChainSettings

    flags = {name: value for name, value in vars(given).items() if name.startswith("wallet.")}
    settings = ChainSettings(**{name.replace(".", "_"): value for name, value in flags.items()})
    # Not a flag: other users of the machine can read command lines.
    found = {**read_dotenv(Path(".env")), **os.environ}.get("DT_INVITATION", "")
    return answering(
        url=given.url,
        wallet=load_wallet(settings) if flags else None,
        invitation=SecretStr(found) if found else None,
    )


def invite(given: argparse.Namespace) -> None:
    """Print a new invitation, or list or end earlier ones. The registry keeps only hashes.

    With the network's file it prints the line for dt-join, which holds all that a new member needs.
    """
    from distributed_training.registry.store import ID_LENGTH, hash_of

    place = text = ""  # text: of the file that the registry serves
    if given.network is not None:
        config = load_config("miner", ["--network", given.network], check=False)
        network = config.network
        assert network is not None  # it was named
        if (public := config.chain.registry_url) is None:
            raise ConfigError(
                f"{given.network} is of a network without a registry, so nobody can be invited: "
                "who joins registers on its chain"
            )
        public = public.rstrip("/")
        given.url = given.url or public
        hosted = given.network.partition("#")[0] if "://" in given.network else ""
        text = "" if hosted else network.files[FILE]
        place = f"{hosted or f'{public}/{FILE}'}#{network.digest}"
    if given.url is None:
        raise ConfigError("neither --network nor --url is given, so nobody was asked: give one")
    with _chain(given) as chain:
        if given.revoke is not None:
            members = chain.revoke(given.revoke)
            print(f"invitation {given.revoke} lets nobody in any more")
            print(f"by it came, and stay: {' '.join(members) or 'nobody'}")
            return
        if given.list:
            for invitation in chain.invitations():
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
        while text and chain.file(FILE) != text:  # it looks for a new version every few seconds
            if time.monotonic() > ends:
                raise ConfigError(
                    f"the registry at {given.url} does not serve {given.network} as it is now, so "
                    "no invitation was made: start it again with --network and this file"
                )
            time.sleep(0.5)
        token, expires = secrets.token_urlsafe(24), time.time() + given.days * 86400
        # Only the hash: whoever reads the registry's file or its backup can let nobody in.
        chain.invite(hash_of(token), uses=given.uses, expires=expires)
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(expires))
    print(f"invitation {hash_of(token)[:ID_LENGTH]}, good for {given.uses} until {until}; a secret")
    if place:
        print(f"whoever joins runs this line:\n\ndt-join {place}.{token}")
    print(f"\nfor the .env of a miner that is set up already:\n\nDT_INVITATION={token}")


def allow(given: argparse.Namespace) -> None:
    with _chain(given) as chain:
        for hotkey in given.hotkeys:
            chain.allow(hotkey, not given.remove)


def expel(given: argparse.Namespace) -> None:
    with _chain(given) as chain:
        for hotkey in given.hotkeys:
            done = chain.expel(hotkey, again=given.again)
            if given.again:
                print(f"{hotkey} may register again, by another invitation or the list")
                continue
            had = "it had no uid" if done["uid"] is None else f"it had uid {done['uid']}"
            print(f"{hotkey} is expelled ({had}), and gets no uid until `expel --again`")
            if done["invitation"]:
                print(f"the invitation it came by, {done['invitation']}, lets nobody in any more")
            if done["others"]:
                print(f"by the same invitation came, and stay: {' '.join(done['others'])}")


def enroll(given: argparse.Namespace) -> None:
    with _chain(given) as chain:
        uid = chain.enroll(given.hotkey, uid=given.uid)
    print(f"uid {uid}")


def register(given: argparse.Namespace) -> None:
    with _chain(given) as chain:
        print(f"uid {chain.register()}")


def status(given: argparse.Namespace) -> None:
    with _chain(given) as chain:
        neurons = chain.neurons()
        print(chain.identity)
        for n in neurons:
            where = f"{n.ip}:{n.port}" if n.port is not None else "no endpoint"
            role = "validator" if n.validator_permit else "member"
            print(f"{n.uid:4} {n.hotkey}  {role}, {where}")
        for hotkey in sorted(chain.all_expelled):
            print(f"   - {hotkey}  expelled")


_COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    function.__name__: function
    for function in (serve, invite, allow, enroll, expel, register, status, backup, restore)
}


def main(argv: list[str] | None = None) -> int:
    """Run a command; return 2 for refused flags, 1 for a fault outside of the program."""
    given = parser().parse_args(argv)
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(rank=0))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # Its line for each request would stand among the command's own output.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        _COMMANDS[given.command](given)
        return ExitStatus.STOPPED
    except ConfigError as error:
        return exit_with(error, of_service=given.command == "serve")
    except (RuntimeError, OSError, sqlite3.Error) as error:  # StoreFault, ChainError; a disk
        print(f"error: {error}", file=sys.stderr)
        return ExitStatus.FAULT
    except KeyboardInterrupt:
        return ExitStatus.INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
