"""Test versions of a network's file, by which all peers have the same rules at each step."""

from __future__ import annotations

import logging
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from bittensor_core import Keypair

from distributed_training.common.files import write_json
from distributed_training.config import Config, ConfigError, load_config
from distributed_training.config.versions import Versions, for_script, under
from distributed_training.miner.build import first_outer_step
from distributed_training.network import NetworkFileError, flatten, signed, tree_of
from distributed_training.node.published import require_published
from distributed_training.protocol import keys
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.training.checkpoint import DIGEST, FORMAT, manifest_digest
from distributed_training.training.inner_optimizer import Schedule
from tests.tools.memory_store import MemoryObjectStore
from tests.tools.network import ALICE, network_file
from tests.tools.r2_keys import KEYS

pytestmark = pytest.mark.timeout(120)


def config_of(path: str | Path, folder: Path, *flags: str) -> Config:
    words = ("--network", str(path), "--neuron.run_folder", str(folder), *flags)
    return load_config("miner", words, environ=KEYS, dotenv=None, check=False)


def next_version(
    config: Config, text: str, at: int, *changes: tuple[str, str], signer: Keypair = ALICE
) -> str:
    """Return the signed version that follows ``text``, the file of ``config``."""
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    head = {
        "version": config.network.head.version + 1,
        "previous": f"sha256:{config.network.digest}",
        "from_outer_step": at,
    }
    return signed(text, signer, head=head)


def rate(value: float) -> tuple[str, str]:
    return "[training]\n", f"[training]\nlearning_rate = {value}\n"


class Chain:
    """A founder's versions, each with its first outer step and its own learning rate."""

    def __init__(self, folder: Path, steps: list[int]) -> None:
        rules = {"training.learning_rate": 1.0, "name": "lab"}
        self.first = Path(network_file(folder / "founder", rules))
        self.configs = [config_of(self.first, folder / "founder" / "run")]
        self.texts = [self.first.read_text()]
        for number, step in enumerate(steps, 2):
            was, now = (f"learning_rate = {n:.1f}\n" for n in (number - 1, number))
            text = next_version(self.configs[-1], self.texts[-1], step, ("\n" + was, "\n" + now))
            path = folder / "founder" / f"{number}.toml"
            path.write_text(text)
            self.texts.append(text)
            self.configs.append(config_of(path, folder / "founder" / "run"))
        self.steps = [0, *steps]

    def at(self, outer_step: int) -> float:
        """Return the learning rate at ``outer_step``, that of the newest version in force."""
        return max(n for n, step in enumerate(self.steps, 1) if step <= outer_step)


@pytest.mark.parametrize("seed", range(8))
def test_members_of_the_newest_version_hold_the_same_rules_and_others_are_named(
    tmp_path: Path, seed: int
) -> None:
    """Versions, restarts and outer steps are random, and some peers are cut off for a while."""
    draw = random.Random(seed)
    chain = Chain(tmp_path, [draw.randrange(12) for _ in range(draw.randrange(1, 5))])
    published = 1  # number of versions in the bucket
    files = [tmp_path / f"peer-{n}" for n in range(3)]
    begun = [0] * 3  # the version with which each peer was started
    peers: list[Versions | None] = [None] * 3
    for outer_step in range(14):
        if published < len(chain.texts) and draw.random() < 0.4:
            published += 1
        truth = chain.configs[published - 1].network
        owner = Versions(truth, tmp_path / "owner" / str(outer_step))
        owner.look(dict(enumerate(chain.texts[:published], 1)).get)
        for n, folder in enumerate(files):
            if peers[n] is None or draw.random() < 0.3:  # a restart, perhaps with a newer file
                begun[n] = draw.randrange(begun[n], published)
                network = chain.configs[begun[n]].network
                peers[n] = Versions(network, folder)
            peer = peers[n]
            cut_off = draw.random() < 0.3
            if not cut_off:
                peer.look(dict(enumerate(chain.texts[:published], 1)).get)
            ours, theirs = owner.at(outer_step), peer.at(outer_step)
            same = theirs.values["training.learning_rate"] == ours.values["training.learning_rate"]
            assert same == (theirs.rules_id == ours.rules_id), "or it is named"
            assert same or cut_off or not peer.knows(outer_step)
            if published == len(chain.texts):
                assert ours.values["training.learning_rate"] == chain.at(outer_step)
            if not cut_off:
                # After a restart without the bucket, a peer still has what it has learned.
                again = Versions(chain.configs[begun[n]].network or ours, folder)
                assert again.at(outer_step).digest == theirs.digest


def test_a_version_that_does_not_follow_is_refused(tmp_path: Path) -> None:
    chain = Chain(tmp_path, [5, 9])
    first = chain.configs[0].network
    other_second = next_version(
        chain.configs[0], chain.texts[0], 5, ("rate = 1.0\n", "rate = 7.0\n")
    )
    other_model = next_version(chain.configs[0], chain.texts[0], 5, ('"lab"', '"lab2"'))
    versions = Versions(first, tmp_path / "run")
    with pytest.raises(NetworkFileError, match="names another previous version"):
        versions.add(chain.texts[2])
    with pytest.raises(NetworkFileError, match="another run"):
        versions.add(other_model)
    with pytest.raises(NetworkFileError, match="altered"):
        versions.add(chain.texts[1].replace("rate = 2.0\n", "rate = 3.0\n"))
    assert "not TOML" in versions.look({2: "["}.get) and len(versions.known) == 1
    versions.add(other_second)
    assert "version 3 of the network's file is refused" in versions.look({3: chain.texts[2]}.get)


def test_the_bucket_has_the_versions_and_one_line_announces_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chain = Chain(tmp_path, [5, 9])
    store = MemoryObjectStore("lab")
    reader = BucketReader(store)
    newest = chain.configs[2].network
    for number in (1, 2):
        store.put(keys.VERSION.format(number), chain.texts[number - 1].encode())
    late = Versions(newest, tmp_path / "late")
    assert not late.knows(4) and late.look(reader.version) == "" and late.knows(4)
    assert [late.at(step).head.version for step in (0, 4, 5, 8, 9, 99)] == [1, 1, 2, 2, 3, 3]
    caplog.set_level(logging.INFO)
    first = chain.configs[0].network
    running = Versions(first, tmp_path / "running")
    assert running.look(reader.version) == "" and running.look(reader.version) == ""
    line = "Version 2 of the network's file is in force from outer step 5: it changes training"
    assert caplog.text.count(line) == 1


def test_a_version_replaces_only_the_rules_of_the_file(tmp_path: Path) -> None:
    path = Path(network_file(tmp_path / "lab", {"name": "lab"}))
    rates = flatten(tree_of(path.read_text()))
    config = config_of(path, tmp_path / "run", "--data.source", "stdlib", "--dht.port", "9")
    text = next_version(
        config,
        path.read_text(),
        3,
        ("[training]\n", '[training]\nschedule = "constant"\ndecay_from = 200\ndecay_steps = 9\n'),
        (f"learning_rate = {rates['training.learning_rate']}\n", "learning_rate = 0.5\n"),
    )
    versions = Versions(config.network, tmp_path / "run")
    later = under(config, versions.add(text))
    assert (later.training.learning_rate, later.training.decay_from) == (0.5, 200)
    assert (later.data.source, later.swarm.dht_port) == ("stdlib", 9)
    assert later.network.rules_id != config.network.rules_id and later.swarm == config.swarm
    assert config.training.learning_rate != 0.5
    assert Schedule.of(later.training).rate(100) == 0.5
    assert under(later, config.network) == config
    before = versions.newest
    steps = ("minimum_valid_inner_step = ", "minimum_valid_inner_step = 1")
    text = next_version(later, text, 4, ("rows_per_page = ", "rows_per_page = 1"), steps)
    line = for_script(before, versions.add(text))
    assert "Version 3 of" in line and "follows it in round.minimum_valid_inner_step" in line
    assert line.endswith("start the script again for data.rows_per_page") and "yours" not in line
    assert "yours to change in the script: training.decay_from" in for_script(
        config.network, before
    )


def test_published_files_are_read_where_they_lie_by_the_rules_of_every_version(
    tmp_path: Path,
) -> None:
    pinned = {"tokenizer.name": "tokenizer", "tokenizer.files": "1" * 64, "data.files": "2" * 64}
    rules = {"name": "lab", "data.source": "parquet:data", **pinned}
    path = Path(network_file(tmp_path / "founder", rules))
    config = config_of(path, tmp_path / "run")
    change = ("[training]\n", '[training]\nschedule = "constant"\n')
    text = next_version(config, path.read_text(), 3, change)
    later = under(config, Versions(config.network, tmp_path / "run").add(text))
    assert later.training.schedule == "constant" and later.published == config.published
    for folder in config.published.values():
        with pytest.raises(ConfigError, match=f"is not in {folder} and only node 0 fetches it"):
            require_published(later)
        folder.mkdir(parents=True)
        (folder / ".files.json").touch()
    require_published(later)
    assert later.data.source == config.data.source == f"parquet:{config.published['data']}"
    assert later.miner.global_tokenizer_name == str(config.published["tokenizer"])


def test_a_damaged_newer_version_hides_none_that_holds(tmp_path: Path) -> None:
    chain = Chain(tmp_path, [5, 9])
    store = MemoryObjectStore("lab")
    reader = BucketReader(store)
    store.put(keys.VERSION.format(1), chain.texts[0].encode())
    for damage in (b"\xff", b"[", chain.texts[1].encode()):
        store.put(keys.VERSION.format(3), damage)
        second = chain.configs[1].network
        versions = Versions(second, tmp_path / "run")
        assert "version 3 of the network's file is refused" in versions.look(reader.version)
        assert versions.knows(4) and versions.at(4).head.version == 1
        shutil.rmtree(tmp_path / "run")


def test_a_start_continues_from_the_step_of_its_complete_checkpoint(tmp_path: Path) -> None:
    assert first_outer_step(tmp_path, 4) == 4
    # At the last checkpoint, a kill came before rank 1 had written its part.
    for name, outer_step, ranks in (("1", 5, 2), ("2", 6, 2), ("3", 7, 1)):
        (folder := tmp_path / f"checkpoint-{name}").mkdir()
        progress = {"outer_step": outer_step}
        content: dict[str, Any] = {"format": FORMAT, "world_size": 2, "progress": progress}
        for rank in range(ranks):
            write_json(folder / f"rank-{rank}.json", content | {DIGEST: manifest_digest(content)})
    assert first_outer_step(tmp_path, 4) == 6
