"""What a validator knows of its miners over time, and keeps across restarts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed_training.chain.base import Neuron
from distributed_training.common.files import write_json
from distributed_training.protocol.scoring import (
    MAX_MISSED_SWEEPS,
    RESET,
    ScoreBoard,
    moving_average,
)
from distributed_training.scoring.evaluator import Judgement


@dataclass
class _Entry:
    hotkey: str
    published: float = 0.0  # the moving average of totals
    all_reduce: int = 0
    repo_valid: int = 0
    missed_sweeps: int = 0
    scored_at: int = -1  # block of the last evaluation
    seen: str = ""  # revision of the upload seen last


class Standings:
    """Scores and attendance by uid. A uid that changes its hotkey starts afresh."""

    def __init__(self) -> None:
        self.board = ScoreBoard(())
        self.entries: dict[int, _Entry] = {}
        self.failed_rounds = 0  # since the last success
        self.successful_rounds = 0
        self.last_round_block: int | None = None  # when the period was last restarted

    def sync(self, neurons: Iterable[Neuron]) -> None:
        """Take in who is registered now."""
        present = {n.uid: n.hotkey for n in neurons}
        for uid in [u for u in self.entries if u not in present]:
            del self.entries[uid]
        for uid, hotkey in present.items():
            entry = self.entries.get(uid)
            if entry is None or entry.hotkey != hotkey:
                self.entries[uid] = _Entry(hotkey)
                self.board.add(uid)

    def swept(self, alive: Iterable[int], asked: Iterable[int]) -> None:
        answered = set(alive)
        for uid in asked:
            entry = self.entries.get(uid)
            if entry is None:
                continue  # deregistered meanwhile
            entry.missed_sweeps = 0 if uid in answered else entry.missed_sweeps + 1

    def round_succeeded(
        self, *, alive: Iterable[int], asked: Iterable[int], failed: Iterable[int]
    ) -> None:
        """1 for whoever was alive, in the group or not; 0 for who failed in it or was not alive."""
        good = set(alive) - set(failed)
        for uid in self.entries.keys() & set(asked):
            self.entries[uid].all_reduce = int(uid in good)

    def judged(
        self, judgements: Sequence[Judgement], valid: Mapping[int, bool], *, block: int
    ) -> dict[int, dict[str, float]]:
        """Take in one scoring pass; all scores by uid, as an event tells them."""
        for uid, is_valid in valid.items():
            self.entries[uid].repo_valid = int(is_valid)
        self.board.update_round(
            random={j.uid: j.random.losses if j.random else RESET for j in judgements},
            assigned={j.uid: j.assigned.losses if j.assigned else RESET for j in judgements},
        )
        for judgement in judgements:
            self.entries[judgement.uid].scored_at = block
        present = self.entries
        totals = self.board.total_scores(
            all_reduce={uid: e.all_reduce for uid, e in present.items()},
            repo_valid={uid: e.repo_valid for uid, e in present.items()},
        )
        for uid, entry in present.items():
            entry.published = moving_average(entry.published, totals[uid])
            if entry.missed_sweeps > MAX_MISSED_SWEEPS:
                entry.published = 0.0
        return {uid: self._figures(uid, totals[uid]) for uid in present}

    def weights(self) -> dict[int, float]:
        return {uid: e.published for uid, e in self.entries.items() if e.published > 0}

    def save(self, path: Path) -> None:
        state = {
            "entries": {str(uid): vars(entry) for uid, entry in self.entries.items()},
            "board": {u: s for u, s in self.board.state().items() if int(u) in self.entries},
            "failed_rounds": self.failed_rounds,
            "successful_rounds": self.successful_rounds,
            "last_round_block": self.last_round_block,
        }
        write_json(path, state)

    @classmethod
    def load(cls, path: Path) -> Standings:
        """An empty one if there is no file. Raises ValueError for a damaged one."""
        found = cls()
        try:
            state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return found
        except RecursionError:
            raise ValueError("not a validator's standings: nested too deeply") from None
        try:
            found.entries = {int(uid): _Entry(**e) for uid, e in state["entries"].items()}
            found.board.restore(state["board"])
            found.failed_rounds = int(state["failed_rounds"])
            found.successful_rounds = int(state["successful_rounds"])
            last = state["last_round_block"]
            found.last_round_block = None if last is None else int(last)
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a validator's standings: {type(error).__name__}") from None
        return found

    def _figures(self, uid: int, total: float) -> dict[str, float]:
        mu, sigma = self.board.rating(uid)
        entry = self.entries[uid]
        return {
            "random": self.board.random_score(uid),
            "mu": mu,
            "sigma": sigma,
            "assigned": self.board.assigned_score(uid),
            "train": self.board.train_score(uid),
            "all_reduce": entry.all_reduce,
            "repo_valid": entry.repo_valid,
            "total": total,
            "published": entry.published,
        }
