"""Keep the members' standings, which are the results of their rounds and their scores.

They survive a restart. :class:`~.protocol.scoring.ScoreBoard` computes the scores from the judge's
measurements, and the manifests publish them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from distributed_training.chain.base import Neuron
from distributed_training.common.files import write_json
from distributed_training.protocol.scoring import RESET, ScoreBoard, moving_average
from distributed_training.scoring.evaluator import Evaluation
from distributed_training.validator.global_state import GlobalStateError


@dataclass
class _Entry:
    hotkey: str
    published: float = 0.0  # the moving average of its total scores
    all_reduce: int = 0  # 1 if it contributed to the last outer step
    repo_valid: int = 0
    scored_at: int = -1  # when its last upload was judged, in seconds since the epoch; -1: never
    uploaded: float | None = None  # when its upload arrived, in seconds since the epoch
    missed: int = 0  # number of consecutive closes without an upload
    fault: str = ""  # why it contributed nothing to the last close
    reset: str = ""  # why its last upload that was judged was reset

    @property
    def cause(self) -> str:
        """The reason why the member has no score, as far as it is known."""
        waits = "none of its uploads was judged yet" if self.scored_at < 0 else ""
        return self.fault or self.reset or waits or "its uploads have gained nothing so far"


@dataclass(frozen=True)
class PastRound:
    """A round that ended at ``ended``, in seconds since the epoch; see RoundReport."""

    outer_step: int
    ended: float
    seconds: float
    participants: list[int]  # uids
    tokens: int
    fault: str
    detail: str


@dataclass
class Standings:
    """The standings of all members by uid. A uid with a new hotkey starts again from zero."""

    # These fields and ``board`` are saved to the file.
    entries: dict[int, _Entry] = field(default_factory=dict)
    failed_rounds: int = 0  # failed rounds since the last success
    successful_rounds: int = 0
    rounds: list[PastRound] = field(default_factory=list)  # the last rounds

    def __post_init__(self) -> None:
        self.board = ScoreBoard(())
        # Uids that were not registered at the last check, and uids of other validators.
        self._absent: set[int] = set()
        self._validators: set[int] = set()

    def sync(self, neurons: Sequence[Neuron]) -> None:
        """Note which members are registered now. The others keep their standings for a return."""
        present = {n.uid: n.hotkey for n in neurons}
        # A registry that was restored from a backup, or a chain node that lags behind, may hide
        # members for a while.
        self._absent = self.entries.keys() - present.keys()
        self._validators = {n.uid for n in neurons if n.validator_permit}
        for uid, hotkey in present.items():
            entry = self.entries.get(uid)
            if entry is None or entry.hotkey != hotkey:
                self.entries[uid] = _Entry(hotkey)
                self.board.add(uid)

    def judged(
        self, judgements: Sequence[Evaluation], valid: Mapping[int, bool]
    ) -> dict[int, dict[str, float]]:
        """Record the measurements of a round; return all scores by uid, in the form of events."""
        # Members that were not judged this time get new totals too.
        for uid, is_valid in valid.items():
            self.entries[uid].repo_valid = int(is_valid)
        self.board.update_round(
            random={j.uid: j.random.losses if j.random else RESET for j in judgements},
            assigned={j.uid: j.assigned.losses if j.assigned else RESET for j in judgements},
            # An upload is not to blame if its pages are too short to be measured.
            unknown={j.uid for j in judgements if j.ok and j.assigned is None},
        )
        for judgement in judgements:
            entry = self.entries[judgement.uid]
            entry.scored_at, entry.reset = int(time.time()), judgement.reason
        present = self.present()
        totals = self.board.total_scores(
            all_reduce={uid: e.all_reduce for uid, e in present.items()},
            repo_valid={uid: e.repo_valid for uid, e in present.items()},
        )
        for uid, entry in present.items():
            entry.published = moving_average(entry.published, totals[uid])
        ratings = {uid: self.board.rating(uid) for uid in present}
        return {
            uid: {
                "random": self.board.random_score(uid),
                "mu": ratings[uid][0],
                "sigma": ratings[uid][1],
                "assigned": self.board.assigned_score(uid),
                "train": self.board.train_score(uid),
                "all_reduce": entry.all_reduce,
                "repo_valid": entry.repo_valid,
                "total": totals[uid],
                "published": entry.published,
            }
            for uid, entry in present.items()
        }

    def weights(self) -> dict[int, float]:
        return {uid: e.published for uid, e in self.present().items() if e.published > 0}

    def present(self) -> dict[int, _Entry]:
        """Return the entries of the members, which were registered at the last check.

        On a public chain other validators are registered too. A hotkey that may be a validator's is
        a member only once it has sent an upload, or has earlier scores.
        """
        known = {u for u, e in self.entries.items() if e.uploaded is not None or e.published > 0}
        validators = self._validators - known
        return {u: e for u, e in self.entries.items() if u not in self._absent | validators}

    def save(self, path: Path) -> None:
        board = {u: s for u, s in self.board.state().items() if int(u) in self.entries}
        write_json(path, asdict(self) | {"board": board})

    @classmethod
    def load(cls, path: Path) -> Standings:
        """Load the standings, which are empty if there is no file.

        Raises GlobalStateError for a damaged file.
        """
        try:
            # Do not use read_state, which would move a damaged file away and begin with empty
            # scores.
            data = path.read_bytes()
            found = TypeAdapter(cls).validate_json(data, strict=True)
            found.board.restore(json.loads(data)["board"])
        except FileNotFoundError:
            return cls()
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise GlobalStateError(
                f"{path} is damaged ({type(error).__name__}), so the members' scores are unknown: "
                "restore it, or remove it to start with empty scores"
            ) from None
        return found
