"""Read what the validator of a store network has signed: verdicts on uploads, and whole weights.

A manifest says for each upload of its close whether it was merged, and if not, why. So nobody needs
to judge an upload again: ``dt-score`` shows the verdict that counts, and ``dt-export`` exports the
newest whole weights. In the bucket, both trust only what the network's master has signed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from distributed_training.chain.auth import verify_signature
from distributed_training.chain.base import ChainError
from distributed_training.chain.identity import load_wallet
from distributed_training.chain.registry import answering
from distributed_training.config import Config
from distributed_training.exchange.chain_copy import ChainCopy
from distributed_training.node.buckets import open_as_member, open_by_registry, open_own
from distributed_training.node.identity import follow_chain
from distributed_training.node.start import NetworkFailure
from distributed_training.protocol import keys
from distributed_training.protocol.manifest import Manifest, Master, State
from distributed_training.store.base import ObjectStore
from distributed_training.store.bucket_reader import MOST_BYTES, BucketReader, StateUnavailable
from distributed_training.store.errors import AccessDeniedError, StoreError


def open_bucket(config: Config, stack: ExitStack) -> ObjectStore:
    """Open the network's bucket: with the founder's keys, otherwise the way a member does.

    Raises ConfigError, ChainError, StoreError.
    """
    name = config.store.global_model_name
    has_key = config.kind == "validator" and config.store.write_access_key_id is not None
    if has_key or config.in_folder:  # an embedded store is a folder on the founder's machine
        own = open_own(config.store, name)
        stack.callback(own.close)
        try:
            own.head(keys.STATE)
        except AccessDeniedError as error:  # a member may have the key of another network's bucket
            print(f"{error}: so the bucket is opened as by a member", file=sys.stderr)
        else:
            return own
    if config.has_bucket:
        try:
            return open_as_member(config, follow_chain(config.chain, stack))
        except NetworkFailure as error:
            raise ChainError(str(error)) from None
    wallet, master = load_wallet(config.chain), config.miner.master_ss58_address
    chain = stack.enter_context(answering(config.chain, wallet, master))
    store = open_by_registry(config.store, chain, private=config.chain.private)
    stack.callback(store.close)
    return store


class SignedChain:
    """The newest outer step of a network, as the bucket shows it.

    ``folder``: where our copies are kept. Raises StoreError.
    """

    def __init__(self, config: Config, reader: BucketReader, folder: Path) -> None:
        by = Master(config.swarm.run_id, config.miner.master_ss58_address, verify_signature)
        self._reader = reader
        self._copy = ChainCopy(reader, folder / "chain", by)
        # Do not compare the time, so that a network that nobody leads any more can be read too.
        self.state: State = self._copy.state(reader.head(keys.STATE), 0.0)

    def head(self) -> Manifest:
        """Return the manifest of the newest outer step."""
        self._copy.link(self.state.outer_step, self.state)
        return self._copy.manifest(self.state.outer_step)

    def fetch_weights(self, folder: Path, outer_step: int | None) -> int:
        """Fetch the whole weights of ``outer_step`` (None: the newest) into ``folder``.

        They are arranged as in a run folder. Returns their outer step. Raises OSError too.
        """
        there = self.state.weights_at
        found = max(there, default=0) if outer_step is None else outer_step
        if found not in there:
            raise StateUnavailable(
                f"the bucket has whole weights of outer steps {', '.join(map(str, there))}, but "
                f"none of {found}"
            )
        self._copy.link(found, self.state)
        manifest = self._copy.manifest(found)
        for name in (keys.CONFIG, keys.MODEL):
            path = folder / "global" / keys.epoch_folder(found) / name
            digest = manifest.files.get(name, "")
            key = keys.outer_key(found, name)
            self._reader.fetch_signed(key, path, digest, limit=MOST_BYTES)
        return found


# --- dt-score -------------------------------------------------------------------------------------


def show(config: Config, options: argparse.Namespace) -> int:
    """Print the newest verdicts, once or repeatedly; return the exit status.

    Raises ConfigError.
    """
    every = options.all or options.uid or options.subnet
    hotkey = None if every else load_wallet(config.chain).ss58
    with TemporaryDirectory() as folder:
        while True:
            try:
                with ExitStack() as stack:  # open it again each time, so that no failure lasts
                    reader = BucketReader(open_bucket(config, stack))
                    chain = SignedChain(config, reader, Path(folder))
                    manifest = chain.head()
                    rows = list(verdicts(manifest, uids=options.uid, hotkey=hotkey))
                    if options.json:
                        facts = {
                            "outer_step": manifest.outer_step,
                            "closes_at": chain.state.closes_at,
                            "losses_before": dict(manifest.losses_before),
                            "losses_after": dict(manifest.losses_after),
                            "uploads": rows,
                        }
                        shown = json.dumps(facts)
                    else:
                        shown = "\n".join(lines_of(manifest, chain.state.closes_at, rows))
                print(shown, flush=True)
            except (ChainError, StoreError, OSError) as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
                if options.watch is None:
                    return 1
            if options.watch is None:
                return 0
            time.sleep(options.watch)


def verdicts(
    manifest: Manifest, *, uids: Sequence[int] | None = None, hotkey: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield what a manifest says about each upload of these uids, of this hotkey, or of all."""
    carried = manifest.carried_over
    found = [
        *(
            {"verdict": "carried" if one.uid in carried else "merged", **asdict(one)}
            for one in manifest.merged
        ),
        *({"verdict": "refused", **asdict(one)} for one in manifest.refused),
    ]
    for row in sorted(found, key=lambda row: row["uid"]):
        if hotkey in (None, row["hotkey"]) and (not uids or row["uid"] in uids):
            yield row | {"score": manifest.scores.get(row["uid"])}


def lines_of(
    manifest: Manifest, closes_at: float, rows: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Yield a line for the outer step, and a line for each upload."""
    closes = datetime.fromtimestamp(closes_at, UTC)
    carried = len(manifest.carried_over)
    yield (
        f"outer step {manifest.outer_step}: {len(manifest.merged) - carried} uploads merged, "
        f"{f'{carried} carried over, ' if carried else ''}{len(manifest.refused)} refused; "
        f"the next close is at {closes:%Y-%m-%d %H:%M:%S} UTC"
    )
    for row in rows:
        if row["verdict"] == "merged":
            # After an average the factor may be 0, although the upload is in the average.
            whole = row["factor"] in (0.0, 1.0)
            clipped = "" if whole else f", clipped to {row['factor']:.2f} of it"
            score = "" if row["score"] is None else f", score {row['score']:.3f}"
            found = f"merged: {row['improvement']:+.4f} nats per token{clipped}{score}"
        elif row["verdict"] == "carried":
            found = (
                f"carried over: {row['improvement']:+.4f} nats per token is less than others gain, "
                "or than chance explains, so its member sends that movement again"
            )
        else:
            found = f"refused ({row['cause']}): {row['reason']}"
        yield f"uid {row['uid']:03d}: {found}"
    if not rows:
        yield "none of the requested members uploaded for that close"
