"""Test ``dt-network audit``, ``rewind`` and ``recover``: their output and what they publish."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from distributed_training import chain_command, network_command
from distributed_training.chain_command import begin_again, go_back
from distributed_training.protocol import keys
from distributed_training.protocol.manifest import Manifest, Master
from distributed_training.scoring.verdicts import open_bucket
from distributed_training.store.folder import FolderStore
from distributed_training.validator.global_state import GlobalStateError
from distributed_training.validator.merge import OuterState, Rule, digest_of
from distributed_training.validator.outer_steps import SERIALS, OuterSteps
from distributed_training.validator.replay import ChainBroken, ManifestChain
from distributed_training.validator.store_rounds import LEDGER
from tests.tools.outer_steps import MASTER, RUN_ID, open_chain, publish_chain, sign, verify

pytestmark = pytest.mark.timeout(300)

STEPS = 6  # outer steps 0 and 4 have whole weights


def steps_of(bucket: Path, folder: Path) -> OuterSteps:
    store, master = FolderStore(bucket, writes=True), Master(RUN_ID, MASTER, verify)
    return OuterSteps(store, folder / "global", master, sign, keep_uploads=8)


def opened(bucket: Path, folder: Path) -> tuple[OuterSteps, ManifestChain]:
    steps = steps_of(bucket, folder)
    assert steps.load()
    return steps, open_chain(bucket, folder / "replay")


def back(bucket: Path, folder: Path, to: int) -> Manifest:
    return go_back(*opened(bucket, folder), to, config={"a": 1}, period=1000.0, grace=100.0)


def assert_same(one: OuterState, two: OuterState) -> None:
    for name in ("weights", "momentum", "residual"):
        for ours, theirs in zip(getattr(one, name), getattr(two, name), strict=True):
            assert torch.equal(ours, theirs), name


def test_going_back_is_one_more_outer_step(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    states = publish_chain(bucket, STEPS)
    before = open_chain(bucket, tmp_path).state()
    manifest = back(bucket, tmp_path, 5)
    assert (manifest.outer_step, manifest.rewound_to, manifest.update) == (STEPS + 1, 5, "")
    chain = open_chain(bucket, tmp_path)
    state = chain.state()
    state.check_after(before)
    # That state is old, so the next serials may have been used since.
    assert state.outer_step == STEPS + 1 and state.serial == before.serial + SERIALS + 1
    # A validator continues from there, and anybody can check the chain.
    assert_same(chain.replay(state), states[5])
    found = chain.audit()
    assert found.problems == [] and found.replayed_from == 4
    assert json.loads((bucket / keys.outer_key(STEPS + 1, keys.CONFIG)).read_text())["a"] == 1


def keep_copy(bucket: Path, folder: Path) -> None:
    """Create the validator's copy of the chain on a founder's machine."""
    signed = folder / "global" / "signed"
    signed.mkdir(parents=True)
    shutil.copy(bucket / keys.STATE, signed)
    for step in range(STEPS + 1):
        shutil.copytree(
            bucket / "outer" / str(step), folder / "global" / keys.epoch_folder(step).strip("/")
        )
        shutil.copy(bucket / keys.outer_key(step, keys.MANIFEST), signed / f"{step}.json")


def test_a_network_goes_back_by_this_machines_copy_of_a_bad_bucket(tmp_path: Path) -> None:
    """In the bucket, all files that this machine has are damaged, and the state is old."""
    bucket, early = tmp_path / "bucket", tmp_path / "early"
    states = publish_chain(bucket, STEPS)
    publish_chain(early, 3)
    before = open_chain(bucket, tmp_path).state()
    keep_copy(bucket, tmp_path)
    good = {path: path.read_bytes() for path in bucket.glob("outer/*/*.*")}
    for path, data in good.items():
        path.write_bytes(data[:-9])
    shutil.copy(early / keys.STATE, bucket)
    manifest = back(bucket, tmp_path, 5)
    chain = open_chain(bucket, tmp_path)
    state = chain.state()
    state.check_after(before)
    assert (manifest.rewound_to, state.outer_step, state.head) == (5, STEPS + 1, manifest.digest)
    assert state.serial > before.serial and manifest.momentum == states[5].digests[1]
    assert digest_of(chain.replay(state).weights) == digest_of(states[5].weights)
    assert good == {path: path.read_bytes() for path in good}


@pytest.mark.parametrize("name", [keys.MANIFEST, keys.UPDATE])
@pytest.mark.parametrize("there", [True, False], ids=["damaged", "missing"])
def test_what_nobody_has_costs_a_rewind_one_line(name: str, there: bool, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    publish_chain(bucket, STEPS)
    (bucket / keys.outer_key(5, name)).unlink()
    if there:
        (bucket / keys.outer_key(5, name)).write_bytes(b"damaged")
    before = {path: path.read_bytes() for path in bucket.rglob("*") if path.is_file()}
    with pytest.raises((GlobalStateError, ChainBroken)) as end:
        back(bucket, tmp_path, 5)
    assert len(str(end.value).splitlines()) == 1
    assert before == {path: path.read_bytes() for path in bucket.rglob("*") if path.is_file()}


def test_scores_of_a_round_that_was_never_published_do_not_count(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    publish_chain(bucket, STEPS)
    steps, _ = opened(bucket, tmp_path)
    ledger = steps.place(STEPS + 1) / LEDGER
    ledger.parent.mkdir(parents=True)
    ledger.write_text("{}")
    back(bucket, tmp_path, 5)
    assert ledger.parent.exists() and not ledger.exists()


def test_where_uploads_are_gone_momentum_begins_again(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    states = publish_chain(bucket, STEPS, keep_uploads=1)
    manifest = back(bucket, tmp_path, 5)
    assert (manifest.momentum, manifest.residual) == ("", "")
    chain = open_chain(bucket, tmp_path)
    for ours, theirs in zip(chain.replay(chain.state()).weights, states[5].weights, strict=True):
        assert torch.equal(ours, theirs)
    assert chain.audit().problems == []


def found(folder: Path) -> None:
    words = ["init", str(folder), "--name", "lab", "--registry", "http://127.0.0.1:8100"]
    words += ["--store", "https://s3.example.org", "--data-source", "stdlib"]
    assert network_command.main(words) == 0


def recovered(
    bucket: Path, folder: Path, *, period: float = 1e11, above: int = -1
) -> tuple[Manifest, ManifestChain]:
    """Recover a network. Its period is thousands of years long, because its files are from 1970."""
    steps, chain = steps_of(bucket, folder), open_chain(bucket, folder / "replay")
    store, pace = FolderStore(bucket, writes=True), {"period": period, "grace": 100.0}
    return begin_again(steps, chain, store, config={"a": 1}, above=above, **pace), chain


LOST: dict[str, Callable[[Path], object]] = {
    "nothing": lambda bucket: None,
    "state": lambda bucket: (bucket / keys.STATE).unlink(),
    "state damaged": lambda bucket: (bucket / keys.STATE).write_bytes(b"x"),
    "head manifest": lambda bucket: (bucket / keys.outer_key(STEPS, keys.MANIFEST)).unlink(),
    "newest weights": lambda bucket: (bucket / keys.outer_key(4, keys.MODEL)).unlink(),
    "an upload": lambda bucket: (bucket / keys.merged_key(6, 5)).write_bytes(b"x"),
    "an update": lambda bucket: (bucket / keys.outer_key(6, keys.UPDATE)).write_bytes(b"x"),
}


@pytest.mark.parametrize("lost", LOST)
def test_a_recovery_begins_above_all_with_the_newest_weights(lost: str, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    states = publish_chain(bucket, STEPS)
    before = open_chain(bucket, tmp_path).state()
    LOST[lost](bucket)
    manifest, chain = recovered(bucket, tmp_path)
    newest = STEPS - (lost in ("head manifest", "an update"))
    assert (manifest.outer_step, manifest.recovered) == (STEPS + 1, STEPS + 1)
    assert (manifest.rewound_to, manifest.previous, manifest.update) == (newest, "", "")
    assert digest_of(states[newest].weights) == manifest.weights
    assert bool(manifest.momentum) == (lost != "an upload")
    state = chain.state()
    state.check_after(before)
    assert state.serial >= 2**32 and state.weights_at == (STEPS + 1,)
    found = chain.audit(keep_uploads=8)
    assert found.problems == [] and found.recovered == found.replayed_from == STEPS + 1
    # The validator continues from there, even on another machine.
    steps, _ = opened(bucket, tmp_path / "empty")
    assert steps.head.digest == manifest.digest and steps.history == [steps.head]


def test_a_recovery_uses_the_run_folder_where_that_is_further(tmp_path: Path) -> None:
    bucket, old, run = tmp_path / "bucket", tmp_path / "old", tmp_path / "global"
    states = publish_chain(bucket, STEPS)
    publish_chain(old, 2)
    for name in (keys.MODEL, keys.OUTER_STATE, keys.CONFIG):
        (run / "epoch-4").mkdir(parents=True, exist_ok=True)
        shutil.copy(bucket / keys.outer_key(4, name), run / "epoch-4")
    (run / "signed").mkdir()
    shutil.copy(bucket / keys.outer_key(4, keys.MANIFEST), run / "signed" / "4.json")
    manifest, chain = recovered(old, tmp_path)
    assert (manifest.outer_step, manifest.rewound_to) == (5, 4)
    assert manifest.weights == digest_of(states[4].weights) and manifest.momentum
    assert chain.audit().problems == []
    shutil.rmtree(old)
    old.mkdir()  # now the bucket is empty
    manifest, _ = recovered(old, tmp_path)
    assert manifest.outer_step > 5 and manifest.rewound_to in (4, 5)


def test_a_recovery_is_above_what_others_saw_meanwhile(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    publish_chain(bucket, STEPS)
    manifest, _ = recovered(bucket, tmp_path, above=70)
    assert manifest.outer_step == 71
    again, _ = recovered(bucket, tmp_path / "b", period=1000.0)
    assert again.outer_step == 72, "no close can have passed in the seconds since"
    shutil.rmtree(bucket)
    publish_chain(bucket, STEPS)  # its files are signed in 1970
    manifest, _ = recovered(bucket, tmp_path / "c")
    again, _ = recovered(bucket, tmp_path / "d", period=1e8)
    assert again.outer_step == manifest.outer_step + 1


@pytest.fixture
def emptied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> FolderStore:
    """Return the empty bucket of the network whose folder is ``lab``."""
    found(tmp_path / "lab")
    (tmp_path / "bucket").mkdir()
    store = FolderStore(tmp_path / "bucket", writes=True)
    monkeypatch.setattr(chain_command, "open_own", lambda settings, bucket: store)
    capsys.readouterr()
    return store


@pytest.mark.usefixtures("emptied")
def test_nothing_to_recover_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert network_command.main(["recover", str(tmp_path / "lab")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "so nothing was published: restore the bucket from a backup" in line


def test_an_audit_of_a_copy_names_each_wrong_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found(tmp_path / "lab")
    bucket = tmp_path / "copy"
    publish_chain(bucket, 2)
    monkeypatch.setattr(
        chain_command, "_open", lambda config, store, folder: open_chain(bucket, folder)
    )
    file = str(tmp_path / "lab" / "network.toml")
    words = ["audit", file, "--from", str(bucket)]
    capsys.readouterr()
    assert network_command.main(words) == 1
    line, *_ = capsys.readouterr().out.splitlines()
    assert line.startswith("does not fit: outer/0/manifest.json names the rules rules, but no vers")
    rules = {"rules": (1, 0, Rule("nesterov", 0.7, 0.9))}
    monkeypatch.setattr(chain_command, "_versions", lambda *given: rules)
    (bucket / keys.NETWORK).write_bytes(b'{"name":"lab","version":999,"master":"x"}')
    assert network_command.main(words) == 1
    line, *_ = capsys.readouterr().out.splitlines()
    assert line.startswith("does not fit: network.json is not signed by the network's master")
    (bucket / keys.NETWORK).unlink()
    assert network_command.main(words) == 0
    head = open_chain(bucket, tmp_path).state().head
    assert capsys.readouterr().out.splitlines() == [
        f"outer step 2, whose manifest has the digest {head}",
        "updates give the weights from outer step 0 on",
        "merge, momentum and residual were computed again from outer step 0 on",
    ]
    (bucket / keys.merged_key(2, 5)).write_bytes(b"x")
    assert network_command.main(words) == 1
    line, *_ = capsys.readouterr().out.splitlines()
    assert line.startswith("does not fit: outer/2/uploads/5.safetensors has the digest ")


def test_a_rewind_to_an_unknown_step_is_refused_in_one_line(
    emptied: FolderStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(tmp_path / "lab" / "validator", ignore_errors=True)
    assert network_command.main(["rewind", str(tmp_path / "lab"), "--to", "3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: outer step 3 is not before the network's newest, so nothing")
    assert not [path for path in (tmp_path / "bucket").rglob("*") if path.is_file()]
    emptied.put(keys.STATE, b"damaged")
    assert network_command.main(["rewind", str(tmp_path / "lab"), "--to", "3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("so it is unclear where training stands: restore its files")


def test_a_founder_with_the_embedded_store_audits_while_no_registry_runs(tmp_path: Path) -> None:
    folder = tmp_path / "lab"
    words = ["--name", "lab", "--registry", "http://127.0.0.1:8100", "--store", "embedded"]
    assert network_command.main(["init", str(folder), *words, "--data-source", "stdlib"]) == 0
    with ExitStack() as stack:
        store = open_bucket(chain_command._founders(folder), stack)
        assert isinstance(store, FolderStore) and store.head(keys.STATE) is None
