"""Check what this miner needs from other machines: clock, chain, bucket, link, peers and data."""

from __future__ import annotations

import dataclasses
import secrets
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path

import httpx

from distributed_training.chain.base import Chain, ChainError
from distributed_training.chain.identity import AddressUnknown, load_wallet
from distributed_training.chain.kinds import how_to_register
from distributed_training.common.http import PAST_CACHES, answered_at
from distributed_training.common.memory import ModelShape
from distributed_training.common.proxies import proxy_for, unusable
from distributed_training.config import Config, ConfigError
from distributed_training.health.machine import Checker, Examination
from distributed_training.network_place import certificates
from distributed_training.node.buckets import (
    check_own,
    commitment_text,
    open_by_registry,
    open_own,
    own_commitment,
)
from distributed_training.node.identity import (
    check_global_state,
    check_network,
    follow_chain,
    public_address,
)
from distributed_training.node.start import NetworkFailure
from distributed_training.protocol import keys
from distributed_training.protocol.growth import file_bytes
from distributed_training.protocol.keys import miner_bucket
from distributed_training.protocol.types import Check
from distributed_training.store.base import ObjectStore
from distributed_training.store.errors import StoreError
from distributed_training.store.s3 import endpoint_of
from distributed_training.store.transfer import Retry

_CHAIN_TIMEOUT = timedelta(seconds=30)  # time limit for the chain's first answer
_SOON = timedelta(seconds=7)  # the same for a registry, or while the miner runs
_TIMEOUT = timedelta(seconds=5)  # time limit for one request or connection
_ADDRESS_TIMEOUT = timedelta(seconds=2)  # time limit for each service that tells our address
_STORE_TIMEOUT = timedelta(seconds=10)  # time limit for the store's first answer
_LINE_BYTES = 8 * 1024 * 1024

_KEYS_REMEDY = "check the R2_ variables in .env, and the bucket and keys at R2 or another store"

_WRONG = (ValueError, RuntimeError, OSError)  # the errors that end a start

#: Two peers whose clocks differ by ``LIMIT`` seconds do not meet. The clocks of two peers differ by
#: that much if both are wrong by ``WARN`` seconds, in opposite directions.
LIMIT, WARN = 3.0, 1.5
_CLOCK_REMEDY = "timedatectl set-ntp true; then timedatectl shows 'synchronized: yes'"
# OSError is raised for certificates that cannot be read.
_NO_TIME = (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, KeyError, OverflowError)


def _failure(name: str, error: Exception, remedy: str) -> Check:
    finding = " ".join(str(error).split()) or type(error).__name__  # some errors have several lines
    return Check(name, "fail", finding, remedy)


# --- chain and clock ------------------------------------------------------------------------------


def check_proxies(examination: Examination) -> list[Check]:
    """Report the proxy variables that cannot be used; nothing if there are none."""
    if not (wrong := unusable()):
        return []
    finding = f"{', '.join(wrong)} names no HTTP proxy, so it is not used"
    return [Check("proxies", "warn", finding, "set it to http://HOST:PORT, or unset it")]


def check_chain(examination: Examination) -> list[Check]:
    """Check the network, the hotkey and the commitment as the chain has them.

    The uid is stored in ``examination``, unless the operator gave one.
    """
    config = examination.config
    shared, own = ["network"], []
    if config.has_bucket:  # the chain holds the read keys of this bucket and of the master's bucket
        shared, own = ["network", "global state"], ["commitment"]
    wallet, refused = None, None
    try:
        wallet = load_wallet(config.chain)
    # Continue, because the check of the network itself needs no wallet.
    except ConfigError as error:
        cause, _, remedy = str(error).rpartition(": ")
        refused = Check("hotkey", "fail", cause or str(error), remedy or "--wallet.name, .path")
    # A start waits for a chain that does not answer, but a person at a terminal needs a result.
    longest = _SOON if examination.running or config.chain.registry_url else _CHAIN_TIMEOUT
    quick = min(config.chain.start_timeout, longest)
    settings = dataclasses.replace(config.chain, start_timeout=quick)
    with ExitStack() as stack:
        try:
            chain = follow_chain(settings, stack, wallet)
            # Check the network even without a wallet, because newcomers must know before they
            # register that it is the right one.
            network = check_network(
                chain.neurons(),
                netuid=config.chain.netuid,
                master=config.miner.master_ss58_address,
            )
            found = [network]
            if "global state" in shared:
                alive = Check("global state", "skip", "not checked: network failed")
                if network.status == "ok":
                    alive = check_global_state(config, chain)
                found.append(alive)
            if wallet is None or refused is not None:
                return [*found, *filter(None, [refused]), *_skipped(own, "hotkey failed")]
            uid = chain.uid(wallet.ss58)
            if uid is None:
                finding = f"{wallet.ss58} is not registered on subnet {config.chain.netuid}"
                remedy = how_to_register(config.chain)
                if network.status == "fail":
                    # A registration there would cost money and bring nothing.
                    remedy = "do not register it there: see the row network"
                unregistered = Check("hotkey", "fail", finding, remedy)
                return [*found, unregistered, *_skipped(own, "hotkey failed")]
            found.append(Check("hotkey", "ok", f"{wallet.ss58} has uid {uid}"))
            if "commitment" in own:
                found.append(_check_commitment(config, chain, wallet.ss58))
            if examination.uid is None:
                examination.uid = uid
            return found
        except (NetworkFailure, ChainError) as error:
            finding = f"the chain does not answer ({str(error).partition(',')[0]})"
            remedy = "check the network, or name another node with --subtensor.chain_endpoint"
            silent = refused or Check("hotkey", "fail", finding, remedy)
            return [silent, *_skipped([*shared, *own], "the chain does not answer")]


def _skipped(names: Sequence[str], why: str) -> list[Check]:
    return [Check(name, "skip", f"not checked: {why}") for name in names]


def _check_commitment(config: Config, chain: Chain, hotkey: str) -> Check:
    try:
        ours, held = commitment_text(config.store), chain.commitment(hotkey)
    except ConfigError as error:
        return Check("commitment", "skip", f"not compared: {error}")
    if held == ours:
        return Check("commitment", "ok", "the chain holds the read key of .env")
    if held is None:
        return Check("commitment", "ok", "none yet: the miner writes it at its start")
    return Check(
        "commitment",
        "warn",
        "the chain has a different read key from .env, and validators use it until it is replaced",
        "start the miner: it writes the new key; keep the old token until then",
    )


def check_clock(examination: Examination) -> list[Check]:
    """Compare this machine's clock with that of the store.

    If the clocks of two DHT peers are more than 3 s apart, they do not meet, because hivemind
    refuses the other's entries. Stores refuse requests whose time is 15 minutes off. So a wrong
    clock looks like a closed port or a wrong key. The store usually runs on another machine, and
    its answers have a ``Date``. If a registry refuses a call because of a wrong clock, it says so
    itself.
    """
    name = "clock"
    try:
        url = endpoint_of(examination.config.store)
        with httpx.Client(
            proxy=proxy_for(url),
            trust_env=False,
            verify=certificates() if url.startswith("https") else False,
            timeout=_TIMEOUT.total_seconds(),
            headers=PAST_CACHES,
        ) as client:
            began = time.time()
            reply = client.head(url)
            ended = time.time()
        theirs, cached = answered_at(reply.headers)
    except _NO_TIME as error:
        return [Check(name, "skip", f"the store does not tell its time ({error})")]
    if cached:
        return [Check(name, "skip", "a cache in front of the store answers instead of it")]
    # The store gives whole seconds. Assume that it answered in the middle of that second, and
    # halfway between the request and the arrival of the answer.
    ahead = (began + ended) / 2 - (theirs + 0.5)
    sure = abs(ahead) - (ended - began) / 2
    finding = f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the store's"
    if sure >= LIMIT:
        finding += "; no DHT peer can meet it, and from 10 s on the registry refuses its calls"
        return [Check(name, "fail", finding, _CLOCK_REMEDY)]
    if sure >= WARN:
        finding += f"; from {LIMIT:.0f} s on no DHT peer can meet it"
        return [Check(name, "warn", finding, _CLOCK_REMEDY)]
    return [Check(name, "ok", finding)]


def check_address(examination: Examination) -> list[Check]:
    """Report where others find this machine, as a start does, and how to test that from outside."""
    config = examination.config
    if config.rounds.exchange != "hivemind":
        return []
    try:
        ip = public_address(config, timeout=_ADDRESS_TIMEOUT)
    except AddressUnknown as error:
        cause, _, remedy = str(error).rpartition(": ")
        return [Check("address", "warn", cause, remedy)]
    port = config.swarm.dht_external_port or config.swarm.dht_port
    at = f"[{ip}]" if ":" in ip else ip
    finding = f"others get {at}, port {port} for DHT peers; test it from a second machine: "
    finding += f"python -m distributed_training doctor --probe {at}:{port}"
    return [Check("address", "ok", finding)]


# --- bucket and line ------------------------------------------------------------------------------


def check_bucket(examination: Examination) -> list[Check]:
    """Check the bucket as a start does, and that our keys can write, read back and delete.

    Then measure how long an upload takes.
    """
    config, uid = examination.config, examination.uid
    if not config.has_bucket:
        return []
    if uid is None:
        reason = "its name ends with the uid, which is not known: use --uid N"
        return [Check(name, "skip", reason) for name in ("bucket", "line")]
    bucket = miner_bucket(config.store.global_model_name, uid)
    try:
        with (
            closing(open_own(config.store, bucket)) as writer,
            closing(open_own(config.store, bucket, write=False)) as reader,
        ):
            check_own(writer, timeout=_STORE_TIMEOUT)
            own_commitment(config.store, bucket)  # checks that the public read key cannot write
            # Use a unique name: a miner may be at work in this bucket.
            key, content = f"diagnose-{secrets.token_hex(8)}", b"diagnose"
            writer.put(key, content)
            try:
                if reader.get(key, limit=64) != content:
                    raise StoreError(f"{bucket}: R2_READ does not see what R2_WRITE wrote")
            finally:
                # Delete it even if reading failed, because nothing else would.
                writer.delete(key)
            line = check_line(writer, config, examination.shape)
    except _WRONG as error:
        failed = _failure("bucket", error, _KEYS_REMEDY)
        return [failed, Check("line", "skip", "not measured: bucket failed")]
    return [Check("bucket", "ok", f"{bucket}: R2_WRITE writes, R2_READ only reads"), line]


def check_access(examination: Examination) -> list[Check]:
    """Check that the registry gives access to the bucket, and report which speed uploads need."""
    config, name = examination.config, "access"
    if (
        config.has_bucket
    ):  # check_chain has read the bucket, with the key in the master's commitment
        return []
    if refused := examination.failed("hotkey"):
        return [Check(name, "skip", f"not asked: {refused} failed")]
    with ExitStack() as stack:
        try:
            chain = follow_chain(config.chain, stack, load_wallet(config.chain))
            bucket = open_by_registry(config.store, chain, private=config.chain.private)
            stack.callback(bucket.close)
            state = Retry(each=_STORE_TIMEOUT)(bucket.head, keys.STATE)
        except _WRONG as error:
            remedy = "check the network, or ask the founder whether registry and store run"
            return [_failure(name, error, remedy)]
    finding = f"the registry hands out URLs for {config.store.global_model_name}"
    if state is None:
        remedy = "wait until its validator runs, or ask the founder"
        return [Check(name, "warn", f"{finding}, which has no state yet", remedy)]
    age = timedelta(seconds=max(0.0, state.age_seconds or 0.0))
    found = [Check(name, "ok", f"{finding}; its state is {age.total_seconds():.0f} s old")]
    if age > 2 * config.rounds.period:
        remedy = "ask the founder whether the validator runs"
        found = [Check(name, "warn", f"{finding}, with no new state for {age}", remedy)]
    if (shape := examination.shape) is not None:
        size, grace = file_bytes(shape.trained, config.rounds.codec), config.rounds.grace
        speed = 8 * size / grace.total_seconds() / 1e6
        finding = f"an upload of {size / 1e6:.1f} MB has {grace.total_seconds():.0f} s, so this "
        found += [Check("line", "ok", f"{finding}machine must send {speed:.2f} Mbit/s")]
    return found


def check_line(writer: ObjectStore, config: Config, shape: ModelShape | None) -> Check:
    """Send 8 MiB, and compare the speed with the time that an upload has after a close."""
    # Send random bytes, because a link that compresses other bytes would seem faster than it is.
    key, content = f"diagnose-{secrets.token_hex(8)}", secrets.token_bytes(_LINE_BYTES)
    try:
        began = time.perf_counter()
        writer.put(key, content)
        speed = _LINE_BYTES / (time.perf_counter() - began)
        writer.delete(key)
    except StoreError as error:
        return Check("line", "fail", f"8 MiB could not be sent ({error})", _KEYS_REMEDY)
    finding = f"{8 * speed / 1e6:.0f} Mbit/s up, over one connection"
    if shape is None:
        return Check("line", "ok", finding)
    seconds = file_bytes(shape.trained, config.rounds.codec) / speed
    grace = config.rounds.grace.total_seconds()
    finding += f": an upload takes about {seconds:.0f} s"
    if seconds < 0.5 * grace:
        return Check("line", "ok", finding)
    finding += f", and has {grace:.0f} s after a close"
    return Check("line", "warn", finding, "use a faster network link")


# --- peers and data -------------------------------------------------------------------------------


def check_tokenizer(examination: Examination) -> list[Check]:
    """Fetch the tokenizer and encode a sentence."""
    config = examination.config
    name = config.miner.global_tokenizer_name
    if examination.running:  # importing the libraries would slow the ranks down for seconds
        return [Check("tokenizer", "ok", f"{name}; the running miner uses it")]
    from distributed_training.data.tokenizer import TextTokenizer, build_tokenizer

    if not config.published.get("tokenizer", Path()).exists():
        return [Check("tokenizer", "skip", f"not here yet: a start fetches it into {name}")]
    try:
        with tempfile.TemporaryDirectory() as folder:
            path, eos_id = build_tokenizer(name, Path(folder), revision=config.tokenizer_revision)
            tokens = TextTokenizer(path, eos_id=eos_id).encode_rows(["one two"], max_length=16)
    except _WRONG as error:
        return [_failure("tokenizer", error, "check the network and tokenizer.name")]
    finding = f"{name}, EOS is {eos_id}, {len(tokens)} tokens for two words"
    return [Check("tokenizer", "ok", finding)]


def check_data(examination: Examination) -> list[Check]:
    """Ask the data source for its table of rows and for one page."""
    from distributed_training.data.own_text import OwnText
    from distributed_training.data.page_source import Counts
    from distributed_training.data.sources import Source

    data, place = examination.config.data, examination.config.published.get("data", Path())
    if not examination.config.reads_text:
        return [Check("data", "skip", "the script reads its own text")]
    if not place.exists():
        return [Check("data", "skip", f"not here yet: a start fetches it into {place}")]
    try:
        if data.own:
            found = OwnText(data, Counts())
            return [Check("data", "warn" if found.left_out else "ok", f"own text: {found.finding}")]
        source = Source(data, cache=examination.config.data_cache)
        table = source.num_rows()
        start = time.monotonic()
        texts = source.rows(min(table), 0, split="train", limit=data.rows_per_page)
    except _WRONG as error:
        remedy = "check the network, --data.source and data.dataset"
        return [_failure("data", RuntimeError(f"{data.source}: {error}"), remedy)]
    seconds = time.monotonic() - start
    finding = f"{len(table)} configs, {sum(table.values())} rows; a page of {len(texts)} rows in "
    return [Check("data", "ok", f"{finding}{seconds:.1f} s")]


#: The order matters, because the bucket's name ends with the uid, which the chain knows.
CHECKS: tuple[Checker, ...] = (
    *(check_proxies, check_chain, check_clock, check_address, check_bucket, check_access),
    *(check_tokenizer, check_data),
)
