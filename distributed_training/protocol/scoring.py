"""Score miners as validators do (protocol page, section 7).

A validator measures how much each upload lowers the loss on two kinds of pages: random ones, the
same for all miners of a pass, and the ones assigned to that miner by its block list. ``random`` is
a Plackett-Luce rating over the relative improvements on the random pages: who ranks above others
gains from them, and more from those that are rated higher (Weng and Lin 2011, by openskill 6.1.3).
``assigned`` is a moving average of "improved more on the assigned pages than on the random ones",
so training on other data lowers it. Their product, floored at 0, is the train score; the total adds
the all-reduce score, each normalised over all uids.

A *reset* (upload missing, stale or unreadable) is an improvement of exactly 0. openskill 6.1.3
replaces a score of exactly 0.0 by the team's index in the list, so a reset uid usually ranks below
uids that did harm. That is what the network's validators do, so it is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from openskill.models import PlackettLuce

# (before, after) that writes relative = absolute = 0, as validators do for an invalid upload.
RESET = (0.0, 0.0)
EMA_ALPHA = 0.6  # of the published score
ASSIGNED_ALPHA = 0.05  # of the assigned score: weight of the newest comparison
TRAIN_WEIGHT = 0.75  # of the total; the all-reduce score has the rest
MAX_MISSED_SWEEPS = 10  # more failed IsAlive sweeps in a row than this force the score to 0


def absolute_improvement(before: float, after: float) -> float:
    """Return ``before - after``, nats per token."""
    return before - after


def relative_improvement(before: float, after: float) -> float:
    """Return (before - after) / before; 0 when before is 0, which only a reset has."""
    return (before - after) / before if before else 0.0


class ScoreBoard:
    """Scores of a fixed set of uids, as one validator keeps them.

    A rating's mu starts at 25, its sigma at 25/3.
    """

    def __init__(self, uids: Iterable[int]) -> None:
        self._model = PlackettLuce(beta=7, tau=0.1)
        self._ratings: dict[int, Any] = {}
        self._assigned: dict[int, float] = {}
        for uid in uids:
            self.add(uid)

    @property
    def uids(self) -> tuple[int, ...]:
        """Uids on the board, in the order in which they came."""
        return tuple(self._ratings)

    def add(self, uid: int) -> None:
        """Start ``uid`` afresh: new on the board, or registered by another hotkey."""
        self._ratings[uid] = self._model.rating(name=str(uid))
        self._assigned[uid] = 0.0

    def update_round(
        self,
        random: Mapping[int, tuple[float, float]],
        assigned: Mapping[int, tuple[float, float]],
    ) -> None:
        """Take in one round's evaluations: uid -> (loss before, loss after), ``RESET`` for failed.

        The order of ``random`` matters where an improvement is exactly 0 (module docstring). With
        fewer than two uids there is nobody to compare with and ratings stay as they are. A uid
        that is only in ``random`` counts as reset in ``assigned``; one only in ``assigned`` is an
        error. Raises KeyError for a uid that is not on the board, ValueError for a loss that is
        not finite.
        """
        # All of it before anything changes: half of a pass would stay in the ratings.
        for losses in (random, assigned):
            for uid, pair in losses.items():
                if uid not in self._ratings:
                    raise KeyError(f"uid {uid} is not on the score board")
                if not all(abs(x) < float("inf") for x in pair):  # also false for NaN
                    raise ValueError(f"uid {uid}: losses {pair} are not finite")
        if extra := assigned.keys() - random.keys():
            raise KeyError(f"uids {sorted(extra)} have an assigned but no random evaluation")
        if len(random) >= 2:
            rated = self._model.rate(
                [[self._ratings[uid]] for uid in random],
                scores=[relative_improvement(*pair) for pair in random.values()],
            )
            for uid, (rating,) in zip(random, rated, strict=True):
                self._ratings[uid] = rating
        for uid, pair in random.items():
            # Strictly: a reset, 0 on both, has to lower the average.
            better = absolute_improvement(*assigned.get(uid, RESET)) > absolute_improvement(*pair)
            before = self._assigned[uid]
            self._assigned[uid] = moving_average(before, float(better), alpha=ASSIGNED_ALPHA)

    def rating(self, uid: int) -> tuple[float, float]:
        """Return (mu, sigma)."""
        rating = self._ratings[uid]
        return float(rating.mu), float(rating.sigma)

    def random_score(self, uid: int) -> float:
        """Return mu - 3 sigma."""
        mu, sigma = self.rating(uid)
        return mu - 3 * sigma

    def assigned_score(self, uid: int) -> float:
        """Return the moving average of a uid, in 0..1."""
        return self._assigned[uid]

    def train_score(self, uid: int) -> float:
        """Return the rating times the average of ``assigned``, at least 0."""
        return max(0.0, self.random_score(uid) * self._assigned[uid])

    def total_scores(
        self, *, all_reduce: Mapping[int, float], repo_valid: Mapping[int, float]
    ) -> dict[int, float]:
        """Return the total of each uid on the board.

        A uid missing from either mapping counts as 0 there. The sums to normalise by run over all
        uids, invalid repositories included.
        """
        train = {uid: self.train_score(uid) for uid in self._ratings}
        train_sum = sum(abs(s) for s in train.values())
        reduce_sum = sum(abs(float(all_reduce.get(uid, 0))) for uid in self._ratings)
        totals = {}
        for uid, score in train.items():
            total = TRAIN_WEIGHT * score / train_sum if train_sum else 0.0
            if reduce_sum:
                total += (1 - TRAIN_WEIGHT) * float(all_reduce.get(uid, 0)) / reduce_sum
            totals[uid] = total * float(repo_valid.get(uid, 0))
        return totals

    def state(self) -> dict[str, Any]:
        """Return a JSON-able state that :meth:`restore` takes."""
        return {
            str(uid): {"mu": mu, "sigma": sigma, "assigned": self._assigned[uid]}
            for uid in self._ratings
            for mu, sigma in (self.rating(uid),)
        }

    def restore(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Restore a :meth:`state`, adding its uids to the board. Raises KeyError, ValueError."""
        for text, entry in state.items():
            uid = int(text)
            self._ratings[uid] = self._model.rating(
                mu=float(entry["mu"]), sigma=float(entry["sigma"]), name=text
            )
            self._assigned[uid] = float(entry["assigned"])


def moving_average(previous: float, newest: float, *, alpha: float = EMA_ALPHA) -> float:
    """Return ``previous`` after one more value, whose weight is ``alpha``.

    By default that is the published score after one more total.
    """
    return alpha * newest + (1 - alpha) * previous
