"""One copy of the model over two machines (--neuron.shard_across_nodes): real launchers in network
namespaces, run folders of their own, nothing shared."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.multiprocess.test_nodes import (
    Again,
    Node,
    Nodes,
    nodes,  # noqa: F401 - a fixture
    two,  # noqa: F401
)
from tests.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

FLAG = "neuron.shard_across_nodes"
Two = Callable[..., list[Node]]


def _train(pair: list[Node], steps: int, **changes: str) -> dict[int, float]:
    """The losses up to ``steps``, each step once."""
    for node in reversed(pair):
        node.start(steps=steps, **changes)
    for node in pair:
        assert node.wait() == 0, node.output[-6000:]
    return pair[0].inner_steps()


def _snapshots(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "snapshots").glob("*") if path.is_dir())


def _is_whole(snapshot: Path, ranks: int) -> None:
    """Complete, as rank 0 hands it to the uploader."""
    for rank in range(ranks):
        done = json.loads((snapshot / f"rank-{rank}.done.json").read_text())
        for entry in done["files"]:
            data = (snapshot / entry["name"]).read_bytes()
            found = len(data), hashlib.sha256(data).hexdigest()
            assert found == (entry["size"], entry["sha256"]), entry
        assert (snapshot / f"inner_optimizer.rank{rank + 1:04d}-of-{ranks}.pt").exists()
    assert not list(snapshot.glob(".*")), "parts and temporary files are gone"


def test_one_copy_over_two_nodes_is_that_of_one_node_and_no_disk_is_needed(
    two: Two,  # noqa: F811
    nodes: Nodes,  # noqa: F811
) -> None:
    """Stopped every twelve steps: gone on with what is there, then with a new disk in either node.
    Nothing is held back for previews: a new disk has no such sequences, and others are taken."""
    plain = {"neuron.preview_sequences": "0"}
    straight = nodes("one", nproc_per_node="2", **plain).start(steps=48)
    pair = two(**plain, **{FLAG: "true"})
    _train(pair, 12)
    published = re.findall(r"pushed new model state with tag 5\.(\S+)", pair[0].output)
    assert published and not _snapshots(pair[1].folder)
    for snapshot in _snapshots(pair[0].folder):  # one that the stop cut short is left as it is
        if snapshot.name.rpartition(".")[0] in published:
            _is_whole(snapshot, 2)
            published.remove(snapshot.name.rpartition(".")[0])
    assert not published
    assert straight.wait() == 0, straight.output
    expected = straight.inner_steps()
    for model in straight.folder.glob("snapshots/*/model.safetensors"):
        other = pair[0].folder / model.relative_to(straight.folder)
        if not other.exists():
            continue
        with safe_open(model, "pt") as a, safe_open(other, "pt") as b:
            assert all(torch.equal(a.get_tensor(k), b.get_tensor(k)) for k in a.keys())  # noqa: SIM118
    got = pair[0].inner_steps()
    for steps, lost in ((24, None), (36, 1), (48, 0)):
        if lost is not None:
            shutil.rmtree(pair[lost].folder)
        got |= _train(pair, steps)
    assert f"Resumed at outer step 0, inner step {36}" in pair[0].output
    assert got == expected, "to the last bit"


def test_with_copies_neither_disk_is_needed_either(
    two: Two,  # noqa: F811
    nodes: Nodes,  # noqa: F811
) -> None:
    """Each node has a copy over two ranks."""
    plain = {"neuron.preview_sequences": "0"}
    pair = two(**plain, nproc_per_node="2")
    got = _train(pair, 6)
    for steps, lost in ((12, 0), (18, 1)):
        shutil.rmtree(pair[lost].folder)
        got |= _train(pair, steps)
    straight = nodes("one", nproc_per_node="4", **plain).start(steps=18)
    assert straight.wait() == 0, straight.output
    assert got == pytest.approx(straight.inner_steps(), abs=1e-4)
    listed = [_blocks(each.folder) for each in (pair[0], straight)]
    assert "The state comes from node 1, since another has none" in pair[0].output
    assert listed[0] >= listed[1] > set(), "what was trained on since the last publication"


def _blocks(folder: Path) -> set[int]:
    manifest = json.loads(
        (max(folder.glob("checkpoints/checkpoint-*")) / "rank-0.json").read_text()
    )
    return {block for block, _ in manifest["extra"]["rank_zero"]["blocks"]["blocks"]}


def test_a_lost_node_of_one_copy_comes_back_and_all_go_on_exactly(
    two: Two,  # noqa: F811
    nodes: Nodes,  # noqa: F811
) -> None:
    straight = nodes("one", nproc_per_node="2").start(steps=20)
    assert straight.wait() == 0, straight.output
    pair, again = two(**{FLAG: "true"}), Again()
    for node in pair:
        node.start(steps=20)
    wait_for(lambda: len(pair[0].inner_steps()) >= 8, "steps", seconds=200)
    pair[1].kill()
    again.lost()
    before = max(pair[0].inner_steps())
    pair[1].start(steps=20)
    again.wait_for(lambda: max(pair[0].inner_steps()) > before, "training again")
    for node in pair:
        assert node.wait() == 0, node.output
    assert pair[0].inner_steps() == straight.inner_steps(), "to the last bit"


def test_a_checkpoint_loads_at_any_layout(two: Two, nodes: Nodes) -> None:  # noqa: F811
    """With the flag, without it, with it again, and on node 0 alone."""
    pair = two()
    shared, copies = {FLAG: "true"}, {FLAG: "false"}
    losses = _train(pair, 6, **shared) | _train(pair, 12, **copies) | _train(pair, 18, **shared)
    for step in (6, 12):
        assert f"Resumed at outer step 0, inner step {step}" in pair[0].output
    alone = nodes("node0", nproc_per_node="1").start(steps=24)
    assert alone.wait() == 0, alone.output
    assert "Resumed at outer step 0, inner step 18" in alone.output
    losses |= alone.inner_steps()
    assert set(losses) == set(range(1, 25))
    assert max(losses[step] for step in range(21, 25)) < losses[1]
    # On a node that has nothing, with the part of another that is not here.
    for path in alone.folder.glob("checkpoints/checkpoint-*"):
        shutil.rmtree(path)
    _train(pair, 30, **shared)
    for path in pair[0].folder.glob("checkpoints/checkpoint-*/rank-1.*"):
        path.unlink()
    assert alone.start(steps=36).wait() == 2
    line = alone.output.splitlines()[-1]
    assert "what rank 1 had of it is on none of the nodes there are now" in line
    assert "Start all nodes that it is of, or copy their folders" in line
