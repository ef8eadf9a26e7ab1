"""Read the chain of a store network, check it, and compute its outer steps again.

The bucket has everything that led to the current weights: a signed manifest of each outer step, the
updates since the older set of whole weights, and the uploads that the last outer steps merged. The
weights of an outer step can be computed from earlier weights and the updates. From the uploads, the
updates themselves, the outer momentum and the residual can be computed too, and are bit-identical.
So a validator with an empty disk can continue from the bucket, and anybody can check what was
published.

Nothing in the bucket is trusted: each object has a digest in a manifest, and each manifest is
signed and names the previous manifest.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from safetensors.torch import save_file

from distributed_training.common.files import atomic_file, sha256_of, write_bytes
from distributed_training.protocol import keys
from distributed_training.protocol.average_file import Average
from distributed_training.protocol.codecs import CODECS
from distributed_training.protocol.manifest import Manifest, Master, Merged, State
from distributed_training.protocol.metadata import MAX_CONFIG_BYTES
from distributed_training.protocol.types import Schema
from distributed_training.protocol.update_file import UpdateFile, UpdateLayout, largest_file
from distributed_training.store.bucket_reader import BucketReader, StateUnavailable
from distributed_training.store.errors import IntegrityError, ObjectMissingError, StoreError
from distributed_training.training.weights import load_weights, model_bytes
from distributed_training.validator.merge import (
    OuterState,
    Rule,
    Values,
    digest_of,
    measured,
    merge_factors,
    merge_named,
    norm_of,
    subtract,
)

log = logging.getLogger(__name__)

_MOMENTUM, _RESIDUAL = "momentum/", "residual/"  # prefixes of parameters in state.safetensors
_LIKE = 1e-5  # largest relative difference of norms and factors computed on another machine
_CLOCK_BACK = 300.0  # seconds by which a store's clock may have been set back
_COUNTS = ("total_inner_steps", "total_tokens")
_TIMES = ("serial", "closed_at")
_UNSIGNED = bytes(64)
#: Rules' id -> number of the version, the outer step from which it is in force, its outer rule.
Versions = Mapping[str, tuple[int, int, Rule]]
_File = TypeVar("_File", State, Manifest)
_Found = TypeVar("_Found")


class ChainBroken(ValueError):
    """An object in the bucket is missing, or differs from what the chain says."""

    def __init__(self, key: str, why: object, *, missing: bool = False) -> None:
        super().__init__(f"{key} {why}")
        self.missing = missing


def write_set(folder: Path, schema: Schema, state: OuterState, config: bytes) -> dict[str, str]:
    """Write weights, momentum and residual in the bucket's form; return the manifest's ``files``.

    ``config``: content of the model's ``config.json``. Raises OSError.
    """
    names = [name for name, _ in schema]
    files = {keys.MODEL: dict(zip(names, state.weights, strict=True))}
    if state.momentum is not None and state.residual is not None:
        files[keys.OUTER_STATE] = {
            prefix + name: tensor
            for prefix, some in ((_MOMENTUM, state.momentum), (_RESIDUAL, state.residual))
            for name, tensor in zip(names, some, strict=True)
        }
    for file, tensors in files.items():
        with atomic_file(folder / file) as handle:
            # Pass the name, because save_file opens the file itself. The handle is only for the
            # sync and the rename.
            save_file(tensors, handle.name, metadata=keys.SAFETENSORS_METADATA)
    write_bytes(folder / keys.CONFIG, config)
    return {name: sha256_of(folder / name) for name in (*files, keys.CONFIG)}


def read_set(folder: Path, schema: Schema, manifest: Manifest) -> OuterState:
    """Read what :func:`write_set` wrote for a manifest. Raises ValueError.

    The caller compares the digests.
    """
    momentum, residual = (
        load_weights(folder / keys.OUTER_STATE, [(prefix + name, shape) for name, shape in schema])
        if digest
        else None
        for prefix, digest in ((_MOMENTUM, manifest.momentum), (_RESIDUAL, manifest.residual))
    )
    return OuterState(load_weights(folder / keys.MODEL, schema), momentum, residual)


@dataclass
class Audit:
    """The result of an audit.

    ``weights_from``: the outer step from which on each update gives the weights of its manifest.
    ``replayed_from``: the outer step from which on each update is also the merge of its uploads.
    Either is None if this does not hold even for the newest outer step. ``recovered``: the first
    outer step of the chain.
    """

    outer_step: int | None = None
    head: str = ""
    recovered: int = 0
    problems: list[str] = field(default_factory=list)
    weights_from: int | None = None
    replayed_from: int | None = None

    def get(self, find: Callable[[], _Found], *, needed: bool = True) -> _Found | None:
        """Return the result of ``find``; if it raises ChainBroken, note the problem, return None.

        A missing object is a problem only if it is ``needed``.
        """
        try:
            return find()
        except ChainBroken as broken:
            if (needed or not broken.missing) and str(broken) not in self.problems:
                self.problems.append(str(broken))
            return None

    def count(self, manifest: Manifest, known: OuterState | None) -> None:
        """Add the next outer step to the result; ``known``: its state, if it could be found."""
        step, first, all_from = manifest.outer_step, self.weights_from, self.replayed_from
        whole = _is_whole(known, manifest)
        self.weights_from = (step if first is None else first) if known is not None else None
        self.replayed_from = (step if all_from is None else all_from) if whole else None


@contextmanager
def _faults_of(key: str) -> Iterator[None]:
    """Raise ChainBroken for a fault of an object; other errors of the store stay as they are."""
    try:
        yield
    except ObjectMissingError:
        raise ChainBroken(key, "is missing", missing=True) from None
    except IntegrityError as error:
        raise ChainBroken(key, f"cannot be read: {error}") from None
    except StateUnavailable as error:
        raise ChainBroken(key, str(error).removeprefix(f"{key} ")) from None
    except ChainBroken:
        raise
    except ValueError as error:
        raise ChainBroken(key, f"is refused: {error}") from None


def _call(find: Callable[[], Any], *, needed: bool = True) -> Any:
    del needed  # only an audit uses it, which continues after a fault
    return find()


def _is_whole(state: OuterState | None, manifest: Manifest) -> bool:
    """Return whether the momentum and residual of a manifest are known too."""
    return state is not None and (state.momentum is None) == (not manifest.momentum)


class ManifestChain:
    """The chain of one network in its bucket.

    ``folder``: the folder for downloads, which are removed once they are read. Methods raise
    ChainBroken for an object that does not fit, StoreError if the bucket does not answer, and
    OSError.
    """

    def __init__(self, bucket: BucketReader, schema: Schema, folder: Path, master: Master) -> None:
        self._bucket = bucket
        self.schema = schema
        self._largest = max(largest_file(schema, codec) for codec in CODECS)
        self._folder = folder
        self.master = master

    # objects

    def state(self) -> State:
        return self._signed(State, keys.STATE)

    def manifest(self, outer_step: int) -> Manifest:
        """Return one manifest; its link to the previous manifest is not checked."""
        key = keys.outer_key(outer_step, keys.MANIFEST)
        manifest = self._signed(Manifest, key)
        if manifest.outer_step != outer_step:
            raise ChainBroken(key, f"is the manifest of outer step {manifest.outer_step}")
        return manifest

    def _signed(self, kind: type[_File], key: str) -> _File:
        with _faults_of(key):
            data = self._bucket.get(key, limit=kind.most_bytes)
            if data is None:
                raise ObjectMissingError(key)
            return kind.parse(data, self.master)

    def _fetch(self, key: str, digest: str, limit: int) -> Path:
        """Download an object, and check its SHA-256."""
        path = self._folder / key
        with _faults_of(key):
            self._bucket.fetch_signed(key, path, digest, limit=limit)
        return path

    def set_of(self, manifest: Manifest) -> OuterState:
        """Return the weights, momentum and residual in a manifest's folder."""
        step, limit = manifest.outer_step, model_bytes(self.schema)
        key = keys.outer_key(step, keys.MODEL)
        limits = {keys.MODEL: limit, keys.OUTER_STATE: 2 * limit, keys.CONFIG: MAX_CONFIG_BYTES}
        needed = [keys.MODEL, keys.OUTER_STATE][: 1 + bool(manifest.momentum or manifest.residual)]
        for name in (name for name in needed if name not in manifest.files):
            place = keys.outer_key(step, name)
            raise ChainBroken(place, "has no digest in its manifest", missing=True)
        paths = [
            self._fetch(keys.outer_key(step, name), digest, limits[name])
            for name, digest in manifest.files.items()
            if name in limits
        ]
        try:
            with _faults_of(key):
                found = read_set(paths[0].parent, self.schema, manifest)
        finally:
            # The tensors are memory-mapped, so they stay after the files are deleted.
            for path in paths:
                path.unlink()
        self._compare(key, found, manifest)
        return found

    def _compare(self, key: str, found: OuterState, manifest: Manifest) -> None:
        wanted = (manifest.weights, manifest.momentum, manifest.residual)
        for what, one, two in zip(
            ("weights", "momentum", "residual"), found.digests, wanted, strict=True
        ):
            if one != two:
                step = manifest.outer_step
                raise ChainBroken(
                    key, f"gives {what} of outer step {step} that its manifest does not name"
                )

    def update(self, manifest: Manifest, before: Manifest) -> UpdateFile:
        """Return the update that led to a manifest's weights."""
        key = keys.outer_key(manifest.outer_step, keys.UPDATE)
        return self._open(key, manifest.update, "update", self.master.hotkey, before)

    def upload(self, manifest: Manifest, each: Merged, before: Manifest) -> UpdateFile:
        """Return one of the uploads that a manifest has merged."""
        key = keys.merged_key(manifest.outer_step, each.uid)
        upload = self._open(key, each.digest, "upload", each.hotkey, before)
        header = upload.header
        wanted = (manifest.serial, each.inner_steps, each.tokens)
        if (header.serial, header.inner_steps, header.tokens) != wanted:
            raise ChainBroken(key, "has a serial or count that its manifest does not name")
        if not math.isclose(norm_of(upload), each.norm, rel_tol=_LIKE):
            key = keys.outer_key(manifest.outer_step, keys.MANIFEST)
            raise ChainBroken(key, f"names a wrong norm for uid {each.uid}")
        return upload

    def average(self, manifest: Manifest) -> Average:
        """Return the members' average that a manifest's update was made from."""
        key = keys.outer_key(manifest.outer_step, keys.AVERAGE)
        path = self._fetch(key, manifest.files.get(keys.AVERAGE, ""), model_bytes(self.schema))
        try:
            with _faults_of(key):
                return Average(path, self.schema)
        finally:
            path.unlink()  # an open file is memory-mapped, so its content stays

    def _open(
        self,
        key: str,
        digest: str,
        kind: Literal["upload", "update"],
        hotkey: str,
        before: Manifest,
    ) -> UpdateFile:
        path = self._fetch(key, digest, self._largest)
        try:
            with _faults_of(key):
                file = UpdateFile.open(
                    path,
                    self.schema,
                    run_id=self.master.run_id,
                    kind=kind,
                    hotkey=hotkey,
                    verify=self.master.verify,
                )
        finally:
            path.unlink()  # an open file is memory-mapped, so its content stays
        place = (before.outer_step, before.weights)
        if (file.header.outer_step, file.header.start) != place:
            raise ChainBroken(key, f"starts from other weights than outer step {place[0]}'s")
        return file

    # outer steps

    def replay(self, state: State, to: int | None = None, *, whole: bool = True) -> OuterState:
        """Return weights, momentum and residual of outer step ``to`` (None: the newest).

        They are computed from the newest sound set before it and the uploads since then. Not
        ``whole``: only the weights are computed, from the updates since then.
        """
        to = state.outer_step if to is None else to
        sets = [step for step in state.weights_at if step <= to]
        if not sets:
            raise ChainBroken(keys.STATE, f"names no set of weights up to outer step {to}")
        before, found = self._newest_set(sets)
        while before.outer_step < to:
            manifest = self._next(before)
            found, before = self._follow(found, manifest, before, whole=whole), manifest
        if to == state.outer_step and before.digest != state.head:
            raise ChainBroken(keys.STATE, "names another head than the last manifest")
        # Keep the downloads until here, so that a restart after a kill need not repeat them.
        shutil.rmtree(self._folder / "outer", ignore_errors=True)
        return found

    def newest(self, sets: Iterable[int]) -> tuple[Manifest, OuterState]:
        """Return the newest outer step that can be computed from ``sets``, with its values.

        If uploads are missing, the values are only the weights.
        """
        before, found = self._newest_set(sets)
        with suppress(ChainBroken):
            while True:
                manifest = self._next(before)
                try:
                    found = self._follow(found, manifest, before)
                except ChainBroken:
                    found = self._follow(found, manifest, before, whole=False)
                before = manifest
        return before, found

    def _newest_set(self, sets: Iterable[int]) -> tuple[Manifest, OuterState]:
        """Return the newest sound set of ``sets``, after its manifest."""
        problem = ChainBroken(keys.STATE, "names no set of weights")
        for base in sorted(sets, reverse=True):
            try:
                manifest = self.manifest(base)
                return manifest, self.set_of(manifest)
            except ChainBroken as broken:
                problem = broken
                log.info("The weights of outer step %d are not used: %s", base, broken)
        raise problem

    def _next(self, before: Manifest) -> Manifest:
        """Return the manifest that follows ``before``, and check that it does."""
        manifest = self.manifest(before.outer_step + 1)
        with _faults_of(keys.outer_key(manifest.outer_step, keys.MANIFEST)):
            manifest.check_after(before)
        return manifest

    def _follow(
        self,
        known: OuterState | None,
        manifest: Manifest,
        before: Manifest,
        *,
        whole: bool = True,
        needed: bool = True,
        get: Callable[..., Any] = _call,
    ) -> Any:
        """Return the state after one more outer step, computed from its files and compared.

        Args:
            known: The previous state. None: it is not known, and files are only checked.
            manifest: The outer step's manifest.
            before: The manifest of the previous state.
            whole: False to compute only the weights, from the update.
            needed: Whether a missing update is a fault.
            get: Calls a function that returns a file or a state. Returns None for a noted fault.
        """
        if not manifest.update:  # a rewind, whose folder has whole weights
            return get(partial(self.set_of, manifest), needed=get is _call)
        update = get(partial(self.update, manifest, before), needed=needed)
        uploads, average = [], None
        if whole and manifest.averaged:
            average = get(partial(self.average, manifest), needed=False)
        if whole and (average is None or get is not _call):
            uploads = [
                get(partial(self.upload, manifest, each, before), needed=False)
                for each in manifest.merged
                if each.factor
            ]
        if known is None or update is None:
            return None
        whole = whole and _is_whole(known, before) and None not in uploads
        if not whole or (manifest.averaged and average is None):
            return get(partial(self._subtract, known, manifest, update))
        return get(partial(self._merge, known, manifest, update, uploads, average))

    def _merge(
        self,
        state: OuterState,
        manifest: Manifest,
        update: UpdateFile,
        uploads: Sequence[Values],
        average: Values | None,
    ) -> OuterState:
        path = self._folder / "replayed.safetensors"
        _, after = merge_named(
            manifest.merged,
            uploads,
            state,
            Rule(manifest.rule, manifest.learning_rate, manifest.mu),
            average=average,
            path=path,
            layout=UpdateLayout.of(self.schema, update.header),
            sign=lambda message: _UNSIGNED,
        )
        path.unlink()
        self._compare(keys.outer_key(manifest.outer_step, keys.UPDATE), after, manifest)
        return after

    def _subtract(self, state: OuterState, manifest: Manifest, update: UpdateFile) -> OuterState:
        weights = subtract(state.weights, update)
        if digest_of(weights) != manifest.weights:
            key = keys.outer_key(manifest.outer_step, keys.UPDATE)
            raise ChainBroken(key, "does not give the weights that its manifest names")
        return OuterState(weights)

    # audit

    def manifests(self, state: State, versions: Versions | None = None) -> list[Manifest]:
        """Return all manifests since the last recovery, each linked to the previous one."""
        chain: list[Manifest] = []
        head = self.manifest(state.outer_step)
        for step in range(head.recovered, state.outer_step + 1):
            manifest = self._next(chain[-1]) if chain else self.manifest(step)
            _check_history(manifest, chain)
            if versions is not None:
                _check_rules(manifest, chain, versions)
            chain.append(manifest)
        if chain[-1].digest != state.head:
            raise ChainBroken(keys.STATE, "names another head than the last manifest")
        return chain

    def _check_newest(self, state: State) -> None:
        """Raise ChainBroken if the bucket has a signed manifest that is later than its state."""
        later = {state.outer_step + 1}
        with suppress(StoreError):  # members are not allowed to list the bucket
            listed = [
                keys.parse_outer_key(i.key) for i in self._bucket.store.list_objects("outer/")
            ]
            later |= {found[0] for found in listed if found and found[1] == keys.MANIFEST}
        for step in sorted((step for step in later if step > state.outer_step), reverse=True):
            key = keys.outer_key(step, keys.MANIFEST)
            try:
                self.manifest(step)
            except ChainBroken:
                continue
            if self.state() == state:  # otherwise it was published just now
                raise ChainBroken(
                    keys.STATE,
                    f"is of outer step {state.outer_step}, but {key} is signed: the state is from "
                    "a backup, or its validator was ended before it wrote the next one",
                )

    def audit(self, *, keep_uploads: int = 0, versions: Versions | None = None) -> Audit:
        """Check every object, and compute each outer step again, as far back as files are kept.

        The audit ends at a manifest that does not fit: nothing after it can be trusted.

        Args:
            keep_uploads: Number of outer steps whose merged uploads the network keeps.
            versions: The versions of the network's file that the rules are checked against; None:
                they are not checked.
        """
        found = Audit()
        try:
            state = self.state()
            found.outer_step = state.outer_step
            chain = self.manifests(state, versions)
        except ChainBroken as broken:
            found.problems.append(str(broken))
            return found
        found.head, found.recovered = state.head, chain[0].outer_step
        found.get(partial(self._check_newest, state))
        known: OuterState | None = None
        first = min(state.weights_at, default=state.outer_step)
        kept = min(state.outer_step - keep_uploads, max(state.weights_at, default=0))
        for before, manifest in zip((None, *chain), chain, strict=False):
            step = manifest.outer_step
            if before is not None:
                if step > kept:
                    found.get(partial(self._require_uploads, manifest))
                needed = step > first
                known = self._follow(known, manifest, before, needed=needed, get=found.get)
            if step in state.weights_at and (manifest.update or known is None):
                known = found.get(partial(self.set_of, manifest)) or known
            found.count(manifest, known)
        return found

    def _require_uploads(self, manifest: Manifest) -> None:
        """Raise ChainBroken if merged uploads of an outer step that keeps them are missing."""
        wanted = [
            keys.merged_key(manifest.outer_step, each.uid)
            for each in manifest.merged
            if each.factor
        ]
        if gone := [key for key in wanted if self._bucket.head(key) is None]:
            many = f" (and {len(gone) - 1} more)" if gone[1:] else ""
            raise ChainBroken(gone[0] + many, "is missing, so nobody can compute the merge again")


def _check_history(manifest: Manifest, chain: Sequence[Manifest]) -> None:
    """Check a manifest against the manifests before it. Raises ChainBroken."""
    key = keys.outer_key(manifest.outer_step, keys.MANIFEST)
    before = chain[-1] if chain else manifest
    if chain and manifest.rewound_to is not None:
        index = manifest.rewound_to - chain[0].outer_step
        if index < 0:
            raise ChainBroken(key, f"goes back further than outer step {chain[0].outer_step}")
        before = to = chain[index]
        pairs = ((manifest.momentum, to.momentum), (manifest.residual, to.residual))
        if manifest.weights != to.weights or any(one not in ("", two) for one, two in pairs):
            raise ChainBroken(key, f"goes back to other weights than outer step {to.outer_step}'s")
    for last, names in ((before, _COUNTS), (chain[-1] if chain else manifest, _TIMES)):
        for name in names:
            one, two = getattr(last, name), getattr(manifest, name)
            if two < one - (_CLOCK_BACK if name.endswith("_at") else 0):
                raise ChainBroken(key, f"has {name} {two:.0f} after {one:.0f}")
    if manifest.made_at < manifest.closed_at - _CLOCK_BACK:
        raise ChainBroken(key, f"has made_at {manifest.made_at:.0f} before its close")
    # Manifests from before uploads were carried over lack the values that decide the factors.
    if any(each.chance is None for each in manifest.merged):
        return
    wanted = merge_factors(measured(manifest.merged), chain)
    for each, factor in zip(manifest.merged, wanted, strict=True):
        if not math.isclose(each.factor, factor, rel_tol=_LIKE):
            raise ChainBroken(key, f"multiplies uid {each.uid} by {each.factor}, not by {factor}")


def _check_rules(manifest: Manifest, chain: Sequence[Manifest], versions: Versions) -> None:
    """Check that a manifest follows a version of the network's file. Raises ChainBroken."""
    key = keys.outer_key(manifest.outer_step, keys.MANIFEST)
    if (version := versions.get(manifest.rules_id)) is None:
        raise ChainBroken(
            key, f"names the rules {manifest.rules_id}, but no version of the file here has them"
        )
    number, begins, rule = version
    if manifest.outer_step < begins:
        raise ChainBroken(key, f"uses version {number}, in force only from outer step {begins} on")
    if chain and number < versions[chain[-1].rules_id][0]:
        raise ChainBroken(key, f"uses version {number} after a later one")
    named = Rule(manifest.rule, manifest.learning_rate, manifest.mu)
    if named != rule and manifest.rewound_to is None:  # a rewind keeps the rule of its weights
        raise ChainBroken(key, f"uses {named}, but version {number} of the file has {rule}")
