"""Checks of what others must see of this miner: clock, chain, bucket, network link, peers, data."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx

from distributed_training.chain.base import Chain, ChainError, find
from distributed_training.chain.identity import load_wallet
from distributed_training.common.memory import ModelShape, snapshot_bytes
from distributed_training.config import Config, ConfigError
from distributed_training.diagnostics.checks import Check, ProbeError, run_probe
from distributed_training.doctor.speed import MAXIMUM_UPLOAD_AGE
from distributed_training.node.buckets import commitment_text
from distributed_training.node.failures import NetworkFailure
from distributed_training.node.identity import follow_chain, seconds_per_block
from distributed_training.node.network import check_global_state, check_network
from distributed_training.protocol.names import miner_bucket
from distributed_training.store.s3 import AccessDeniedError, S3ObjectStore, StoreError, endpoint_of
from distributed_training.swarm.supervisor import address_of, any_reachable
from distributed_training.telemetry.metrics import read_metrics

_CHAIN_TIMEOUT = timedelta(seconds=30)  # for a first answer
_TIMEOUT = timedelta(seconds=5)  # of one request or connection
_LINE_BYTES = 8 * 1024 * 1024
_METRICS_FRESH = 120.0  # seconds

_KEYS_REMEDY = "check the R2_ variables in .env, and bucket and tokens in the R2 dashboard"
_DATA_REMEDY = "check the network, --data.source and --data.rows_url"
_TOKENIZER_REMEDY = "check the network and --neuron.global_tokenizer_name"


def outside_checks(
    config: Config, *, uid: int | None, shape: ModelShape | None, tell: Callable[[str], None]
) -> list[Check]:
    """``uid``: as the operator gave it; else the chain tells."""
    tell("asking the chain, and the store for its clock")
    checks, registered = chain_checks(config)
    checks.append(check_clock(config))
    uid = registered if uid is None else uid
    tell("asking for bucket, tokenizer and data")
    if uid is None:
        reason = "its name ends in the uid, which is not known: give --uid N"
        checks += [Check(name, "skip", reason) for name in ("bucket", "line")]
    else:
        checks += bucket_checks(config, uid, shape)
    return [
        *checks,
        check_bootstrap(config),
        check_calls(config.run_folder / "metrics.prom"),
        run_probe("tokenizer", lambda: probe_tokenizer(config), remedy=_TOKENIZER_REMEDY),
        run_probe("data", lambda: probe_data(config), remedy=_DATA_REMEDY),
    ]


# --- clock and chain ------------------------------------------------------------------------------


def check_clock(config: Config) -> Check:
    """This machine's clock against the store's: signatures of calls and requests hold the time."""
    try:
        began = time.time()
        reply = httpx.head(endpoint_of(config.store), timeout=_TIMEOUT.total_seconds())
        theirs = parsedate_to_datetime(reply.headers["date"]).timestamp() + 0.5  # whole seconds
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
        return Check("clock", "skip", f"the store does not tell its time ({error})")
    skew = (began + time.time()) / 2 - theirs
    finding = f"{abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} the store's"
    beyond = max(0.0, abs(skew) - 0.5)
    return _judge_clock("clock", finding, beyond, config.chain.clock_skew)


def check_chain_clock(offset: timedelta | None, *, allowed: timedelta, block: timedelta) -> Check:
    """``offset``: our clock less the chain's, see :meth:`Chain.clock`. ``allowed``: how far those
    of validators may be from ours. A block is made every ``block``; the newest may be late."""
    name = "chain clock"
    if offset is None:
        return Check(name, "skip", "the chain did not tell the time of its newest block")
    seconds, late = offset.total_seconds(), 2 * block.total_seconds()
    if seconds < 0:
        return _judge_clock(name, f"{-seconds:.1f} s behind the newest block", -seconds, allowed)
    finding = f"{seconds:.1f} s after the newest block"
    return _judge_clock(name, finding, max(0.0, seconds - late), allowed)


def _judge_clock(name: str, finding: str, beyond: float, allowed: timedelta) -> Check:
    """``beyond``: seconds more than an answer that is right may differ by."""
    if beyond <= 0.5 * allowed.total_seconds():
        return Check(name, "ok", finding)
    far = beyond > allowed.total_seconds()
    wrong = f"{finding}; validators' calls, signed with their time, would be refused"
    remedy = "timedatectl set-ntp true; then timedatectl shows 'synchronized: yes'"
    return Check(name, "fail" if far else "warn", wrong if far else finding, remedy)


def chain_checks(config: Config) -> tuple[list[Check], int | None]:
    """Network, hotkey, commitment and endpoint as the chain has them; the uid."""
    shared, own = ("chain clock", "network", "global state"), ("commitment", "endpoint")
    wallet, refused = None, None
    try:
        wallet = load_wallet(config.chain)
    except ConfigError as error:
        cause, _, remedy = str(error).rpartition(": ")
        refused = Check("hotkey", "fail", cause or str(error), remedy or "--wallet.name, .path")
    quick = min(config.chain.start_timeout, _CHAIN_TIMEOUT)
    settings = dataclasses.replace(config.chain, start_timeout=quick)
    with ExitStack() as stack:
        try:
            chain = follow_chain(settings, stack, wallet)
            found = _shared_checks(config, chain)
            if wallet is None or refused is not None:
                return [*found, *filter(None, [refused]), *_skipped(own, "hotkey failed")], None
            uid = chain.uid(wallet.ss58)
            if uid is None:
                finding = f"{wallet.ss58} is not registered on subnet {config.chain.netuid}"
                remedy = f"btcli subnet register --netuid {config.chain.netuid}"
                if any(check.name == "network" and check.status == "fail" for check in found):
                    # A registration there is paid for and earns nothing.
                    remedy = "do not register it there: see network"
                unregistered = Check("hotkey", "fail", finding, remedy)
                return [*found, unregistered, *_skipped(own, "hotkey failed")], None
            registered = Check("hotkey", "ok", f"{wallet.ss58} has uid {uid}")
            commitment = _check_commitment(config, chain, wallet.ss58)
            endpoint = _check_endpoint(config, chain, wallet.ss58)
            return [*found, registered, commitment, endpoint], uid
        except (NetworkFailure, ChainError) as error:
            finding = f"the chain does not answer ({str(error).partition(',')[0]})"
            remedy = "check the network, or name another node with --subtensor.chain_endpoint"
            silent = refused or Check("hotkey", "fail", finding, remedy)
            return [silent, *_skipped((*shared, *own), "the chain does not answer")], None


def _shared_checks(config: Config, chain: Chain) -> list[Check]:
    """What needs no hotkey: is this the network, and does it live?"""
    network = check_network(
        chain.neurons(), netuid=config.chain.netuid, master=config.miner.master_ss58_address
    )
    state = Check("global state", "skip", "not looked at: network failed")
    if network.status == "ok":
        state = check_global_state(config, chain)
    now = chain.clock()
    clock = check_chain_clock(
        None if now is None else timedelta(seconds=time.time() - now),
        allowed=config.chain.clock_skew,
        block=timedelta(seconds=seconds_per_block(config)),
    )
    return [network, state, clock]


def _skipped(names: tuple[str, ...], why: str) -> list[Check]:
    return [Check(name, "skip", f"not looked at: {why}") for name in names]


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
        "the chain holds another read key than .env, with which validators read until it is new",
        "start the miner: it writes the new one; keep the old token until then",
    )


def _check_endpoint(config: Config, chain: Chain, hotkey: str) -> Check:
    me = find(chain.neurons(), hotkey)
    if me is None or me.port is None:
        return Check("endpoint", "ok", "none on the chain yet: the miner writes it at its start")
    written = f"the chain says {me.ip}:{me.port}"
    port = config.chain.external_port or config.chain.axon_port
    wrong_ip = config.chain.external_ip and config.chain.external_ip != me.ip
    if wrong_ip or (port and port != me.port):
        ours = f"{config.chain.external_ip or me.ip}:{port}"
        remedy = "start the miner with these flags: it writes them"
        return Check("endpoint", "warn", f"{written}, the flags say {ours}", remedy)
    return Check(
        "endpoint",
        "ok",
        f"{written}; from a second machine: python -m distributed_training doctor --probe "
        f"{me.ip}:{me.port}",
    )


def check_calls(metrics: Path) -> Check:
    """Whether validators reach a miner that runs: what its own metrics count."""
    name = "calls"
    figures = read_metrics(metrics)
    age = time.time() - figures.get("dt_metrics_written_timestamp_seconds", 0.0)
    if age > _METRICS_FRESH:
        return Check(name, "skip", "no miner runs in this run folder, so nobody calls it")
    if calls := figures.get("dt_server_accepted_total.IsAlive"):
        return Check(name, "ok", f"{calls:.0f} signed IsAlive calls since the start")
    return Check(
        name,
        "warn",
        "no validator has reached the running miner yet",
        "wait ten minutes after a start; then, from a second machine: "
        "python -m distributed_training doctor --probe IP:PORT",
    )


# --- bucket and line ------------------------------------------------------------------------------


def bucket_checks(config: Config, uid: int, shape: ModelShape | None) -> list[Check]:
    """Keys and permissions, then how long a publication takes on this line."""
    name = miner_bucket(config.miner.global_model_name, uid)
    bucket = run_probe("bucket", lambda: probe_bucket(config, name), remedy=_KEYS_REMEDY)
    if bucket.status == "fail":
        return [bucket, Check("line", "skip", "not measured: bucket failed")]
    return [bucket, check_line(config, name, shape)]


def probe_bucket(config: Config, bucket: str) -> str:
    """Write, read back and delete a small object; the reading key must not be able to write, since
    it is published on the chain. Raises ProbeError."""
    key, content = f"diagnose-{secrets.token_hex(8)}", b"diagnose"
    try:
        writer = S3ObjectStore.from_settings(config.store, bucket=bucket, write=True)
        reader = S3ObjectStore.from_settings(config.store, bucket=bucket, write=False)
        writer.put(key, content)
        try:
            if reader.get(key, limit=64) != content:
                raise ProbeError(f"{bucket}: R2_READ does not see what R2_WRITE wrote")
            with contextlib.suppress(AccessDeniedError):
                reader.put(key, content)
                raise ProbeError(
                    f"{bucket}: the key R2_READ may also write, and everybody reads it on the chain"
                )
        finally:
            writer.delete([key])
    except (StoreError, ValueError) as error:
        raise ProbeError(str(error)) from None
    return f"{bucket}: R2_WRITE writes, R2_READ only reads"


def check_line(config: Config, bucket: str, shape: ModelShape | None) -> Check:
    """Send 8 MiB, and compare with the time an upload has until this miner gives it up."""
    key, content = f"diagnose-{secrets.token_hex(8)}", secrets.token_bytes(_LINE_BYTES)
    try:
        writer = S3ObjectStore.from_settings(config.store, bucket=bucket, write=True)
        began = time.perf_counter()
        writer.put(key, content)
        speed = _LINE_BYTES / (time.perf_counter() - began)
        writer.delete([key])
    except (StoreError, ValueError) as error:
        return Check("line", "fail", f"8 MiB could not be sent ({error})", _KEYS_REMEDY)
    finding = f"{8 * speed / 1e6:.0f} Mbit/s up, on one connection"
    if shape is None:
        return Check("line", "ok", finding)
    seconds = snapshot_bytes(shape.tensors) / speed
    limit, end = MAXIMUM_UPLOAD_AGE, "validators refuse it"
    if config.store.longest_transfer < limit:
        limit, end = config.store.longest_transfer, "--r2.file_deadline gives it up"
    finding += f": a publication takes about {seconds / 60:.0f} min"
    if seconds < 0.5 * limit.total_seconds():
        return Check("line", "ok", finding)
    remedy = f"a faster line, or more connections: --r2.concurrency {2 * config.store.concurrency}"
    return Check(
        "line", "warn", f"{finding}, and {end} after {limit.total_seconds() / 60:.0f} min", remedy
    )


# --- peers and data -------------------------------------------------------------------------------


def check_bootstrap(config: Config) -> Check:
    name, peers = "bootstrap", config.swarm.initial_peers
    dialled = {peer: address for peer in peers if (address := address_of(peer))}
    if not dialled:
        return Check(name, "skip", "no initial peer with a TCP port is given")
    if any_reachable(list(dialled), timeout=_TIMEOUT):
        return Check(name, "ok", f"at least one of {len(dialled)} initial peers opens its port")
    places = ", ".join(f"{host}:{port}" for host, port in dialled.values())
    return Check(
        name,
        "fail",
        f"none of the initial peers can be reached ({places}), so no round can be taken part in",
        "check this machine's firewall for outgoing TCP, and --neuron.initial_peers",
    )


def probe_tokenizer(config: Config) -> str:
    """Fetch the tokenizer and encode a sentence. Raises ProbeError, OSError."""
    from distributed_training.data.tokenizer import TextTokenizer, build_tokenizer

    name = config.miner.global_tokenizer_name
    with tempfile.TemporaryDirectory() as folder:
        try:
            path, eos_id = build_tokenizer(name, Path(folder))
            tokens = TextTokenizer(path, eos_id=eos_id).encode_rows(["one two"], max_length=16)
        except ValueError as error:
            raise ProbeError(str(error)) from None
    return f"{name}, EOS is {eos_id}, {len(tokens)} tokens for two words"


def probe_data(config: Config) -> str:
    """Ask for the table of rows and for one page. Raises ProbeError."""
    from distributed_training.data.block_builder import open_source
    from distributed_training.data.page_source import PageUnavailable

    source = open_source(dataclasses.replace(config.data, request_attempts=2))
    try:
        table = source.num_rows()
        start = time.monotonic()
        texts = source.rows(min(table), 0, split="train", limit=config.data.rows_per_page)
    except PageUnavailable as error:
        raise ProbeError(f"{config.data.source}: {error}") from None
    seconds = time.monotonic() - start
    rows = sum(table.values())
    return f"{len(table)} configs, {rows} rows; a page of {len(texts)} rows in {seconds:.1f} s"
