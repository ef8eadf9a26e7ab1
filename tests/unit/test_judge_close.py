"""Test how the uploads of a close are judged: refused, recognized as copies, or scored."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bittensor.sp_core import verify

from distributed_training.protocol import keys
from distributed_training.protocol.pages import place_of
from distributed_training.protocol.update_file import UpdateFile
from distributed_training.scoring.evaluator import DataUnavailable, Evaluator, Judged
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.store.errors import IntegrityError
from distributed_training.training.outer_rule import nesterov_sgd
from distributed_training.validator import judging
from distributed_training.validator.judging import Accepted, UploadJudge, find_copies
from tests.tools.store_world import StoreMiner, StoreWorld, keypair
from tests.tools.validator_world import VOCABULARY, one_thread  # noqa: F401

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def world(tmp_path: Path) -> StoreWorld:
    return StoreWorld(tmp_path)


#: Bad uploads by name: the cause of the refusal, and a function that makes the upload. Other kinds
#: of damage are refused in the same way (test_protocol_update_file.py).
BAD: dict[str, tuple[str, Callable[[StoreMiner], bytes]]] = {
    "signature": ("damaged", lambda m: m.encode(pair=keypair("another"))),
    "bits": ("damaged", lambda m: m.encode(codec="2-bit")),
    "cut": ("damaged", lambda m: m.encode()[:-1]),
    "larger": ("damaged", lambda m: m.encode() + bytes(1 << 22)),
    "serial": ("other-close", lambda m: m.encode(serial=m.world.state.serial + 1)),
    "outer step": ("other-close", lambda m: m.encode(outer_step=7)),
    "start": ("other-start", lambda m: m.encode(start="ab" * 32)),
    # Editions before 0.3 name chain blocks in this form.
    "chain blocks": ("damaged", lambda m: m.encode(pages=(5117, 5118, 5120))),
    "pages backwards": ("damaged", lambda m: m.encode(pages=(9, 2))),
    "endless pages": ("damaged", lambda m: m.encode(pages=(0, 2**32))),
    "zeros": ("empty", lambda m: m.encode(moved=[torch.zeros_like(t) for t in m.moved])),
    "sign": ("worse", lambda m: m.encode(moved=[-t for t in m.moved])),
    "hundredfold": ("worse", lambda m: m.encode(moved=[100 * t for t in m.moved])),
    # The text may not show it, because the huge values may be those of a word that no text has.
    "huge values": ("worse", lambda m: m.encode(moved=[torch.full_like(t, 1e15) for t in m.moved])),
}


#: Errors that are raised while the validator fetches or opens an upload, by the uid of its sender.
WHILE_READ = {98: IntegrityError("it was replaced again and again"), 99: ZeroDivisionError("odd")}


def test_bad_uploads_cost_only_their_senders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = dict(enumerate(BAD, 40))
    world = StoreWorld(tmp_path, uids=(3, 5, *bad, *WHILE_READ))
    world.send(3, 5, *WHILE_READ)
    sent = {uid: BAD[name][1](world.miners[uid]) for uid, name in bad.items()}
    for uid, data in sent.items():
        world.miners[uid].upload(data)
    replaced, odd = (world.miners[uid] for uid in WHILE_READ)
    download, reopen = BucketReader.download, judging.UpdateFile.open

    def replaced_meanwhile(self: BucketReader, name: str, path: Path, **how: Any) -> Any:
        if name == replaced.key:
            raise WHILE_READ[replaced.uid]
        return download(self, name, path, **how)

    def oddly(path: Path, *args: Any, hotkey: str, **more: Any) -> Any:
        if hotkey == odd.pair.ss58_address:
            raise WHILE_READ[odd.uid]
        return reopen(path, *args, hotkey=hotkey, **more)

    monkeypatch.setattr(BucketReader, "download", replaced_meanwhile)
    monkeypatch.setattr(judging.UpdateFile, "open", oddly)
    world.end()
    causes = {uid: BAD[name][0] for uid, name in bad.items()}
    causes |= dict.fromkeys(WHILE_READ, "damaged")
    assert world.fates(1) == {3: "merged", 5: "merged"} | causes
    scores, refused = world.validator.standings.entries, world.manifest(1).refused
    events = {e["uid"]: e for e in world.events.of("upload_scored")}
    for one in refused:
        assert one.hotkey == world.miners[one.uid].pair.ss58_address and one.reason
        assert bad.get(one.uid) != "huge values" or "its norm" in one.reason
        assert scores[one.uid].published == 0 < scores[3].published
        assert not events[one.uid]["ok"] and events[one.uid]["reason"] == one.reason
        if one.uid in sent:
            # An upload that is too large is not even fetched, so its digest is unknown.
            found = "" if bad[one.uid] == "larger" else hashlib.sha256(sent[one.uid]).hexdigest()
            assert one.digest == found, bad[one.uid]


@pytest.mark.parametrize(
    ("pages", "gains"),
    [
        ((0, 7), "more"),
        ((0, 2**32 - 1), "chance"),
        ((8, 15), "chance"),
        ((3, 3), "none"),
        ((), "none"),
    ],
)
def test_a_claim_of_pages_that_were_not_trained_costs_only_its_sender(
    world: StoreWorld, pages: tuple[int, ...], gains: str
) -> None:
    """A single page does not count as own text, because another member may have trained on it."""
    for uid in (3, 5, 17):
        world.miners[uid].train()
    world.until_close()
    world.miners[17].upload(pages=pages)
    for uid in (3, 5):
        world.miners[uid].upload()
    world.end()
    assert world.fates(1) == dict.fromkeys((3, 5, 17), "merged")
    events = {e["uid"]: e for e in world.events.of("upload_scored")}
    more = {uid: e["assigned_relative"] - e["random_relative"] for uid, e in events.items()}
    assert min(more[3], more[5], events[17]["random_relative"]) > 0
    if gains == "none":  # it is judged on random text twice
        assert more[17] == 0
    elif gains == "more":
        assert more[17] > 0
    else:  # the upload was not trained on this text, so its gain there depends on chance
        assert pages[0] <= events[17]["assigned_page"] <= pages[1] - 7


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_of_an_upload_and_its_copy_the_later_is_refused(world: StoreWorld, noise: float) -> None:
    world.train()
    world.until_close()
    generator = torch.Generator().manual_seed(7)
    original = world.miners[5].moved
    copy = [
        t + noise * t.pow(2).mean().sqrt() * torch.randn(t.shape, generator=generator)
        for t in original
    ]
    world.miners[5].upload()
    world.clock.ahead += 1
    world.miners[3].upload(moved=copy)
    world.miners[17].upload()
    world.end()
    assert world.fates(1) == {3: "copy", 5: "merged", 17: "merged"}
    reason = world.manifest(1).refused[0].reason
    assert "a copy of uid 5's upload, whose own text gained more" in reason
    # By then everybody can read the original, so a copy of it is refused later too.
    world.train()
    world.until_close()
    world.miners[3].upload(moved=original)
    world.miners[17].upload()
    world.end()
    assert world.fates(2)[3] in ("copy", "worse")


def test_what_all_can_read_is_a_copy_also_after_a_restart(world: StoreWorld) -> None:
    world.round()
    world.round()
    path = world.folder / "read"
    path.write_bytes(world.bucket.objects[keys.merged_key(1, 5)][0])
    file = UpdateFile.reopen(path, world.schema)
    world.restarted()
    world.send(3, 5)
    old = [file.decode(name, shape) for name, shape in world.schema]
    world.miners[17].upload(moved=old)
    world.end()
    assert world.fates(3) == {3: "merged", 5: "merged", 17: "copy"}
    assert "uid 5's upload of outer step 1" in world.manifest(3).refused[0].reason


def test_twice_the_text_is_read_where_fewer_than_half_of_the_uploads_help(
    world: StoreWorld,
) -> None:
    for n in range(1, 3):
        world.train()
        world.until_close()
        for miner in world.miners.values():
            generator = torch.Generator().manual_seed(miner.uid + n)
            miner.upload(
                moved=[1e-6 * torch.randn(t.shape, generator=generator) for t in miner.moved]
            )
        world.end()
        assert world.fates(n) == dict.fromkeys(world.uids, "merged")
        assert world.validator._texts == 2**n
    world.round()
    assert world.fates(3) == dict.fromkeys(world.uids, "merged")
    assert world.validator._texts == 2


def test_text_that_cannot_be_had_is_no_fault_of_an_upload(world: StoreWorld) -> None:
    world.send()
    pages = world.pages

    def away(uid: int, block: int) -> torch.Tensor:
        raise DataUnavailable("the source does not answer")

    world.pages = away
    world.end(2)
    assert world.state.outer_step == 0
    world.pages = pages
    world.clock.ahead += 10  # between two tries
    world.tick()
    assert set(world.fates(1).values()) == {"merged"}


def test_merged_upload_that_is_no_better_scores_zero(world: StoreWorld) -> None:
    world.train()
    generator = torch.Generator().manual_seed(3)
    # The noise is so small that no text can show its effect.
    noise = [1e-5 * torch.randn(t.shape, generator=generator) for t in world.miners[17].moved]
    world.until_close()
    world.miners[3].upload()
    world.miners[5].upload()
    world.miners[17].upload(moved=noise)
    world.end()
    assert world.fates(1) == {3: "merged", 5: "merged", 17: "carried"}
    merged = {one.uid: one for one in world.manifest(1).merged}
    scores = world.manifest(1).scores
    assert scores[3] > 0 and scores[5] > 0
    assert (scores[17] > 0) == (merged[17].improvement > 0)


class Bigrams:
    """Replace :class:`EvaluationModel` by a table of logits, which is much faster."""

    WORDS = 24

    def __init__(self) -> None:
        self.schema = (("table", (self.WORDS, self.WORDS)),)
        self.table = torch.zeros(self.WORDS, self.WORDS)

    def load(self, weights: Sequence[torch.Tensor]) -> None:
        self.table = weights[0].clone()

    def subtract(self, name: str, delta: torch.Tensor, factor: float) -> None:
        self.table -= factor * delta

    def losses(self, text: torch.Tensor) -> tuple[float, ...]:
        chosen = self.table.log_softmax(1)[text[:, :-1], text[:, 1:]]
        return tuple((-chosen.mean(1)).tolist())

    @staticmethod
    def text(seed: int, count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        words = torch.randint(Bigrams.WORDS, (count, 65), generator=generator)
        for t in range(1, words.shape[1]):
            ruled = (words[:, t - 1] * 5 + 3) % Bigrams.WORDS
            noisy = torch.rand(count, generator=generator) < 0.4
            words[:, t] = torch.where(noisy, words[:, t], ruled)
        return words

    def trained(self, start: torch.Tensor, seed: int, steps: int) -> torch.Tensor:
        table = start.clone().requires_grad_(True)
        optimizer = torch.optim.AdamW([table], lr=0.03)
        for step in range(steps):
            text = self.text(seed * 1000 + step, 8)
            logits = table.log_softmax(1)[text[:, :-1], text[:, 1:]]
            optimizer.zero_grad()
            (-logits.mean()).backward()
            optimizer.step()
        return start - table.detach()


def trained_upload(
    model: Bigrams, weights: torch.Tensor, seed: int, steps: int, outer_step: int
) -> Any:
    """Return a stand-in for the file of what a member has trained."""
    moved = model.trained(weights, seed, steps)
    header = SimpleNamespace(pages=(0, 7), outer_step=outer_step, serial=outer_step + 1)
    return SimpleNamespace(decode=lambda name, shape: moved, header=header)


@pytest.mark.timeout(600)
def test_no_honest_upload_is_refused_in_200_rounds() -> None:
    """Judge them on the least text, and long after there is nothing left to learn."""
    model, members = Bigrams(), {3: 3, 5: 3, 17: 1}  # inner steps of each

    def text(uid: int, block: int) -> torch.Tensor:
        return Bigrams.text(uid * 10_007 + (place_of(block)[0] or block), 8)

    evaluator = Evaluator(model, text)  # type: ignore[arg-type]
    judge = UploadJudge(evaluator, model.schema, "run", "4-bit", verify, secret=11)
    weights, momentum = torch.zeros(model.WORDS, model.WORDS), None
    judged_count, harmful, nearest = 0, 0, 0.0
    earlier: dict[str, torch.Tensor] = {}
    for n in range(200):
        accepted = []
        for uid, steps in members.items():
            upload = trained_upload(model, weights, uid * 1_000_000 + n, steps, n)
            norm, sample = judge._measure(upload)
            one = Accepted(uid, f"{uid}", float(uid), upload, norm, sample, judging._NOT_JUDGED)
            accepted.append(judge.measure(one, Judged(n, [weights], 0.9, [10_000 + n])))
        judged_count += len(accepted)
        harmful += sum(one.improvement < 0 for one in accepted)
        assert find_copies(accepted, earlier) == {}
        nearest = max(
            nearest, *(judging._cosine(a.sample, b.sample) for a, b in combinations(accepted, 2))
        )
        earlier = {f"that of uid {one.uid}": one.sample for one in accepted}
        mean = torch.stack([one.file.decode("table", model.schema[0][1]) for one in accepted])
        weights, momentum = nesterov_sgd(weights, mean.mean(0), momentum, lr=0.7, mu=0.9)
    print(f"{judged_count} honest uploads, {harmful} of them harmful, nearest cosine {nearest:.3f}")
    assert judged_count == 600 and harmful > 100  # so training went on long after it helped
