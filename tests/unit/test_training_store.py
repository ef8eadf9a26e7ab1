"""Test the outer step: all of a miner's movement is merged, carried over or named as dropped."""

from __future__ import annotations

import copy
import functools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from distributed_training.common.files import sha256_of
from distributed_training.protocol.types import Base, OuterStepError, Progress, Update
from distributed_training.protocol.update_file import rows_and_columns
from distributed_training.training import outer_step
from distributed_training.training.checkpoint import Checkpointer
from distributed_training.training.outer_rule import NESTEROV, OuterRule, nesterov_sgd
from distributed_training.training.trainer import Trainer
from distributed_training.validator.merge import digest_of
from testbed.first_weights import begin
from tests.tools.outer_steps import header, sign
from tests.tools.store_member import decoded, drawn, move, write_update
from tests.tools.training_world import finished, save_checkpoint, tiny, trainer

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("process_group")]


def flat(tensors: Sequence[Tensor] | None) -> Tensor:
    """Return all values as one float64 vector; without tensors, a single 0."""
    if not tensors:
        return torch.zeros(1, dtype=torch.float64)
    return torch.cat([each.detach().reshape(-1).double() for each in tensors])


def overlap_of(
    now: list[Tensor], written: Sequence[Tensor], new: list[Tensor], start: list[Tensor]
) -> Tensor:
    """Return the component along the update of what was trained since the upload, as one vector."""
    parts = []
    for n, w, to, of in zip(now, written, new, start, strict=True):
        late, update = (n - w).double().flatten(), (to - of).double().flatten()
        share = torch.dot(late, update) / update.square().sum()
        parts.append(share.clamp_min(0) * update)
    return torch.cat(parts)


@functools.cache
def two_trainers() -> tuple[Trainer, Trainer]:
    """Return two trainers that stand for a miner's process before and after a restart."""
    model = tiny(hidden=16, layers=1, intermediate=24, vocab=17, heads=2)
    first, second = (trainer(model=model, seed=seed) for seed in (0, 7))
    return first, second


@dataclass
class Ledger:
    """Sums of the miner's movement, as gradients; a restart goes back to a checkpoint's sums."""

    trained: Tensor
    merged: Tensor
    dropped: Tensor
    sent: Tensor | None = None  # what the last upload was written from
    sent_steps: int = 0

    @property
    def left(self) -> Tensor:
        return self.trained - self.merged - self.dropped


@dataclass
class Network:
    """The validator, and the store that holds the files sent to it."""

    weights: list[list[Tensor]]
    serial: int = 1
    sent: dict[tuple[int, int], str] = field(
        default_factory=dict
    )  # digest of the file, by outer step and close
    #: By outer step: what became of our upload for the previous one, and the upload's digest.
    fates: dict[int, tuple[Base, str]] = field(default_factory=dict)
    files: dict[str, list[Tensor]] = field(default_factory=dict)  # by digest

    @property
    def outer_step(self) -> int:
        return len(self.weights) - 1


class World:
    """One miner and its network, in ``folder``."""

    def __init__(self, folder: Path, *, drops: bool = False, rule: OuterRule = NESTEROV) -> None:
        self.folder, self.drops = folder, drops
        self.made, self.other = two_trainers()
        for made in (self.made, self.other):
            made.outer._drop_overlap, made.outer.rule = drops, rule
        begin(self.made)
        self.made.total_inner_steps = 0
        step = self.made.outer
        nothing = torch.zeros_like(flat(step.epoch_start))
        self.ledger = Ledger(nothing, nothing, nothing)
        self.saved: list[Ledger] = []
        self.network = Network([[t.clone() for t in step.epoch_start or []]])
        self.serials: dict[int, int] = {}  # the last close of each outer step
        self.begun = 0  # number of movements drawn so far
        self.damaged = False  # a checkpoint was lost
        self.checkpoint()

    # --- what the miner does

    def train(self) -> None:
        self.begun += 1
        before = flat(self.made.outer.current())
        move(self.made, drawn(self.begun))
        self.ledger.trained = self.ledger.trained + before - flat(self.made.outer.current())

    def checkpoint(self) -> None:
        keeper = Checkpointer(trainer=self.made, folder=self.folder / "checkpoints")
        self.saved.append(copy.copy(self.ledger))
        progress = Progress(self.made.outer_step, self.made.inner_step)
        save_checkpoint(keeper, progress, {"ledger": len(self.saved) - 1})
        assert keeper.last_error is None

    def restart(self) -> None:
        self.made, self.other = self.other, self.made
        # Overwrite everything first, so that only the checkpoint can bring the state back.
        move(self.made, drawn(0, scale=1.0))
        self.made.begin_epoch(99)
        restored = Checkpointer(trainer=self.made, folder=self.folder / "checkpoints").restore()
        assert restored is not None
        self.ledger = copy.copy(self.saved[restored[1]["ledger"]])

    def damage(self) -> None:
        names = sorted((self.folder / "checkpoints").glob("checkpoint-*"))
        if len(names) > 1:
            shutil.rmtree(names[-1])
            self.damaged = True
            self.restart()

    def path(self) -> Path:
        return self.folder / f"{self.made.outer_step}.{self.network.serial}.safetensors"

    def upload(self, *, killed: str = "", fails: bool = False) -> None:
        """Write an upload, save a checkpoint, and send the upload; a kill may come in between."""
        made, network = self.made, self.network
        if made.outer_step != network.outer_step or made.outer.serial == network.serial:
            return
        made.inner_step = max(made.inner_step, 1)
        self.ledger.sent, self.ledger.sent_steps = self.ledger.left, made.inner_step
        failing = mock.Mock(side_effect=lambda *_: int("no number"))
        with mock.patch.object(
            outer_step, "write_rows", failing if fails else outer_step.write_rows
        ):
            head = header("upload", 0, serial=network.serial)
            handle = made.write_upload(self.path(), head, sign=sign)
            self.train()  # while the upload is written
            handle.join()
        assert (handle.error is not None) == fails
        assert not list(self.folder.glob("*.parts"))
        if killed == "written":
            return self.restart()
        self.checkpoint()
        if killed == "saved":
            self.restart()
        self.send()

    def send(self) -> None:
        """Send the upload that the checkpoint knows, once for each close."""
        if self.made.outer.serial == self.network.serial and self.path().exists():
            place = self.made.outer_step, self.network.serial
            digest = sha256_of(self.path())
            self.network.files[digest] = decoded(self.path(), self.made.schema)
            self.network.sent.setdefault(place, digest)  # the first file counts

    def apply(self, *, whole: bool = False, refused_first: bool = False) -> None:
        made, network, ledger = self.made, self.network, self.ledger
        before = made.outer_step
        if before == network.outer_step:
            return
        base, digest = network.fates[before + 1]
        serial = self.serials[before]
        target = network.outer_step if whole else before + 1
        path = self.folder / f"{target}.{'model' if whole else 'update'}"
        own: Path | None = self.folder / f"{before}.{serial}.safetensors"
        if base is Base.KEPT or not own.exists() or sha256_of(own) != digest:
            own = None
        known = own is not None and made.outer.serial == serial
        weights = digest_of(network.weights[target])
        given = Update(target, path, base, own, weights, whole="asked for" if whole else "")
        if refused_first:
            now, kept = flat(made.outer.current()), made.outer.state_dict()
            with pytest.raises(OuterStepError, match="so it is not applied"):
                made.prepare_update(replace(given, weights="0" * 64))
            made.roll_back_outer_step()
            assert torch.equal(flat(made.outer.current()), now)
            assert made.outer.state_dict() == kept
        steps, overlap = made.inner_step, torch.zeros_like(ledger.dropped)
        since = made.outer._written or []
        if base is Base.KEPT:
            since = made.outer.epoch_start or []
        if base is Base.KEPT or (self.drops and base is Base.MERGED and known):
            overlap = overlap_of(
                made.outer.current(),
                since,
                network.weights[target],
                network.weights[before],
            )
        made.prepare_update(given)
        made.commit_outer_step()
        assert made.outer_step == target and made.outer.serial is None
        if base is Base.MERGED:
            ledger.merged = ledger.merged + flat(network.files[digest])
        assert base is Base.KEPT or known or self.damaged, "a checkpoint knows what was sent"
        taken, dropped = 0, base is Base.REFUSED or (base is Base.MERGED and own is None)
        if base is not Base.KEPT:
            taken = ledger.sent_steps if known else steps
        if dropped and not known:
            ledger.sent = ledger.trained - ledger.merged - ledger.dropped
        if dropped:
            assert ledger.sent is not None
            ledger.dropped = ledger.dropped + ledger.sent
        ledger.dropped = ledger.dropped - overlap
        assert made.inner_step == steps - taken
        missed = base is Base.KEPT and steps > 0
        assert bool(made.outer.dropped) == (dropped or missed)

    # --- what the network does

    def move_close(self) -> None:
        self.network.serial += 1

    def publish(self, fate: Base) -> None:
        network, serial = self.network, self.network.serial
        outer_step = network.outer_step
        self.serials[outer_step] = serial
        digest = network.sent.get((outer_step, serial), "")
        fate = fate if digest else Base.KEPT
        movement = [
            1e-3 * drawn(900 + outer_step)(i, s) for i, (_, s) in enumerate(self.made.schema)
        ]
        if fate is Base.MERGED:
            movement = [m + 0.7 * d for m, d in zip(movement, network.files[digest], strict=True)]
        path = self.folder / f"{outer_step + 1}.update"
        update = write_update(path, self.made.schema, movement)
        after = [
            now - update.decode(name, shape)
            for now, (name, shape) in zip(network.weights[-1], self.made.schema, strict=True)
        ]
        network.weights.append(after)
        network.fates[outer_step + 1] = fate, digest
        names = [name for name, _ in self.made.schema]
        save_file(dict(zip(names, after, strict=True)), path.with_suffix(".model"))
        network.serial += 1

    # --- what must hold at any time

    def check(self) -> None:
        made, step = self.made, self.made.outer
        assert step.start == digest_of(self.network.weights[made.outer_step])
        live = flat(step.epoch_start) - flat(made.outer.current()) + flat(step.residual)
        torch.testing.assert_close(live, self.ledger.left, rtol=0, atol=2e-5)
        if made.outer_step == self.network.outer_step:
            merged = [d for base, d in self.network.fates.values() if base is Base.MERGED]
            total = sum((flat(self.network.files[d]) for d in merged), torch.zeros_like(live))
            torch.testing.assert_close(self.ledger.merged, total, rtol=0, atol=1e-9)


OPERATIONS = {
    "train": World.train,
    "checkpoint": World.checkpoint,
    "restart": World.restart,
    "damage": World.damage,
    "upload": World.upload,
    "upload killed before its checkpoint": lambda w: w.upload(killed="written"),
    "upload killed before it was sent": lambda w: w.upload(killed="saved"),
    "upload failed": lambda w: w.upload(fails=True),
    "send": World.send,
    "move": World.move_close,
    "merge": lambda w: w.publish(Base.MERGED),
    "keep": lambda w: w.publish(Base.KEPT),
    "refuse": lambda w: w.publish(Base.REFUSED),
    "apply": World.apply,
    "apply after a failure": lambda w: w.apply(refused_first=True),
    "load": lambda w: w.apply(whole=True),
}
OFTEN = ("train", "upload", "merge", "apply", "apply", "restart")


#: Cases that once failed: whether overlap is dropped, the share that is sent, the operations.
KNOWN = (
    (False, None, "train upload train merge restart apply restart apply"),
    (False, None, "upload move upload keep apply train upload refuse apply"),
    (False, None, "train upload merge apply keep apply upload merge apply"),
    (False, None, "train upload damage train merge apply"),
    (False, None, "train upload damage train refuse apply"),
    (False, None, "train upload move train upload damage refuse apply"),
    (False, None, "train upload move train upload damage merge apply"),
    (False, None, "upload damage upload merge apply train upload merge load"),
    (False, None, "upload merge merge keep restart load train restart"),
    (True, None, "train upload train train merge apply restart apply"),
    (True, None, "train upload train merge merge keep load"),
    (False, 0.1, "train upload train merge restart apply upload merge apply"),
)


def with_known(test: Callable[..., None]) -> Callable[..., None]:
    for drops, share, names in KNOWN:
        test = example(names.split(), drops, share)(test)
    return test


@given(
    st.lists(st.sampled_from([*OPERATIONS, *OFTEN]), min_size=4, max_size=24),
    st.booleans(),
    st.none() | st.floats(0.01, 1),
)
@with_known
@settings(max_examples=40)
def test_all_movement_is_merged_once_or_carried_or_named_as_dropped(
    names: list[str], drops: bool, share: float | None
) -> None:
    """Try all settings: ``drops`` drops the overlap, and ``share`` is the part that is sent."""
    rule = NESTEROV
    if share is not None:
        rule = OuterRule(nesterov_sgd, select=partial(largest, share=share))
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), drops=drops, rule=rule)
        for name in names:
            OPERATIONS[name](world)
            world.check()


def largest(rows: Tensor, *, share: float = 0.25) -> Tensor:
    """Return ``rows`` with only the largest values of each row, and zeros for the rest."""
    places = rows.abs().topk(max(1, round(share * rows.shape[1])), dim=1).indices
    return torch.zeros_like(rows).scatter_(1, places, rows.gather(1, places))


@given(st.floats(0.01, 1), st.floats(0, 1), st.integers(1, 1000))
@settings(max_examples=10)
def test_a_rule_chooses_the_sent_rows_and_keeps_a_share_of_the_rest(
    share: float, feedback: float, seed: int
) -> None:
    made, _ = two_trainers()
    begin(made)
    select = partial(largest, share=share)
    made.outer.rule = OuterRule(nesterov_sgd, select=select, feedback=feedback)
    left = [torch.zeros(shape) for _, shape in made.schema]
    with tempfile.TemporaryDirectory() as name:
        for outer_step in range(3):
            move(made, drawn(seed + outer_step))
            starts = made.outer.epoch_start or []
            moved = [s - n for s, n in zip(starts, made.outer.current(), strict=True)]
            wanted = [m + old * feedback for m, old in zip(moved, left, strict=True)]
            own = Path(name) / f"{outer_step}"
            finished(made.write_upload(own, header("upload", outer_step, serial=1), sign=sign))
            sent = decoded(own, made.schema)
            for all_of_it, found in zip(wanted, sent, strict=True):
                rows = all_of_it.view(rows_and_columns(all_of_it.shape))
                chosen = select(rows)
                assert not found.view_as(rows)[chosen == 0].any()
                assert float((found.view_as(rows) - chosen).abs().max()) <= chosen.abs().max() / 13
            left = [w - d for w, d in zip(wanted, sent, strict=True)]
            update = write_update(own.with_suffix(".update"), made.schema, sent)
            after = [
                start - update.decode(name, shape)
                for start, (name, shape) in zip(starts, made.schema, strict=True)
            ]
            given = Update(outer_step + 1, update.path, Base.MERGED, own, digest_of(after))
            made.prepare_update(given)
            made.commit_outer_step()
            torch.testing.assert_close(flat(made.outer.residual), flat(left), rtol=0, atol=1e-9)


def test_a_progress_upload_changes_nothing_that_the_upload_for_a_close_carries(
    tmp_path: Path,
) -> None:
    made = trainer()
    move(made, drawn(1))
    made.outer.residual = [1e-3 * torch.ones_like(rows) for rows in made.outer.epoch_start or []]
    before = made.outer.state_dict()
    finished(made.write_upload(tmp_path / "first", header("upload", 0, serial=0), sign=sign))
    assert made.outer.state_dict() == before, "the very same tensors"
    finished(made.write_upload(tmp_path / "second", header("upload", 0, serial=1), sign=sign))
    progress, upload = (decoded(tmp_path / name, made.schema) for name in ("first", "second"))
    assert all(map(torch.equal, progress, upload)), "the residual is in both"
    assert made.outer.serial == 1
    # A later progress upload does not replace the weights that the upload was written from.
    written = made.outer._written
    move(made, drawn(2))
    finished(made.write_upload(tmp_path / "third", header("upload", 0, serial=0), sign=sign))
    assert made.outer._written is written and made.outer.serial == 1
