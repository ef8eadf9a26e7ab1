"""Score members as the network's validator does.

A validator measures how much each upload lowers the loss on two kinds of pages: random pages, the
same for all uploads of a close, and assigned pages, which the upload names among those that its
member was assigned. ``random`` is a Plackett-Luce rating over the relative improvements on the
random pages: a uid that ranks above others gains rating from them, and more from those with higher
ratings (Weng and Lin 2011, computed by openskill 6.1.3). ``assigned`` is a moving average of
"improved more on the assigned pages than on the random ones", so training on other data lowers it.
The train score is their product, but at least 0. The total adds the participation in the outer
step; both are normalised over all uids.

A *reset* (an upload that was refused) is an improvement of exactly 0. openskill 6.1.3 replaces a
score of exactly 0.0 by the team's index in the list, so a reset uid usually ranks below uids whose
uploads did harm. The public network's validators behaved this way, so it is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from random import Random
from typing import Any

from .pages import block_at


def random_block(draw: Random) -> int:
    """Return a block from an outer step that no network reaches, so that nobody trains on it.

    Args:
        draw: The random generator. Whoever can predict it could train on that text.
    """
    return block_at(draw.randrange(1 << 20, 1 << 30), 0)


# --- scores -------------------------------------------------------------------------------------

# Losses (before, after) that count as no improvement, used for an invalid upload.
RESET = (0.0, 0.0)
EMA_ALPHA = 0.6  # weight of the newest total in the published score
ASSIGNED_ALPHA = 0.05  # weight of the newest comparison in the assigned score
TRAIN_WEIGHT = 0.75  # weight of the train score in the total; participation has the rest


def relative_improvement(before: float, after: float) -> float:
    """Return (before - after) / before, or 0 if ``before`` is 0, which only a reset has.

    Args:
        before: Loss without the upload, in nats per token.
        after: Loss with the upload.
    """
    return (before - after) / before if before else 0.0


class ScoreBoard:
    """One validator's scores of a set of uids.

    A rating's mu starts at 25, its sigma at 25/3.

    Args:
        uids: The first uids on the board; :meth:`add` adds more.

    Examples:
        >>> board = ScoreBoard([0, 1])
        >>> losses = {0: (2.0, 1.5), 1: (2.0, 1.9)}  # uid: loss before, loss after
        >>> board.update_round(losses, {0: (2.0, 1.4), 1: (2.0, 1.95)})
        >>> board.random_score(0) > board.random_score(1)
        True
        >>> board.assigned_score(0), board.assigned_score(1)
        (0.05, 0.0)
    """

    def __init__(self, uids: Iterable[int]) -> None:
        from openskill.models import PlackettLuce  # not at the top: miners compute no scores

        self._model = PlackettLuce(beta=7, tau=0.1)
        #: False if the members' assigned text is unknown, so that only the rating counts.
        self.assigned_counts = True
        self._ratings: dict[int, Any] = {}
        self._assigned: dict[int, float] = {}
        for uid in uids:
            self.add(uid)

    @property
    def uids(self) -> tuple[int, ...]:
        """Uids on the board, in the order in which they were added."""
        return tuple(self._ratings)

    def add(self, uid: int) -> None:
        """Reset the scores of ``uid``: it is new, or now belongs to another hotkey.

        Args:
            uid: The uid, on the board or not.
        """
        self._ratings[uid] = self._model.rating(name=str(uid))
        self._assigned[uid] = 0.0

    def update_round(
        self,
        random: Mapping[int, tuple[float, float]],
        assigned: Mapping[int, tuple[float, float]],
        *,
        unknown: Collection[int] = (),
    ) -> None:
        """Update ratings and assigned scores with the evaluations of one close.

        The order of ``random`` matters if an improvement is exactly 0 (module docstring). With
        fewer than two uids there is nothing to compare, and ratings stay unchanged. A uid that is
        only in ``random`` counts as reset in ``assigned``.

        Args:
            random: ``(loss before, loss after)`` of each uid on the random pages, in nats per
                token; ``RESET`` for an upload that could not be judged.
            assigned: The same on the pages assigned to that uid.
            unknown: Uids whose assigned pages could not be measured: their average is unchanged.

        Raises:
            KeyError: For a uid that is not on the board, or only in ``assigned``. Nothing has
                changed.
            ValueError: For a loss that is not finite. Nothing has changed.
        """
        # Check everything before anything changes; otherwise half an update could remain.
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
            if uid in unknown:
                continue
            # Losses are in nats per token. The comparison is strict, since a reset (0 and 0) must
            # lower the average.
            before, after = assigned.get(uid, RESET)
            better = before - after > pair[0] - pair[1]
            average = moving_average(self._assigned[uid], float(better), alpha=ASSIGNED_ALPHA)
            self._assigned[uid] = average

    def rating(self, uid: int) -> tuple[float, float]:
        """Return ``(mu, sigma)`` of a uid's rating.

        Args:
            uid: A uid on the board.
        """
        rating = self._ratings[uid]
        return float(rating.mu), float(rating.sigma)

    def random_score(self, uid: int) -> float:
        """Return mu - 3 sigma of a uid's rating.

        Args:
            uid: A uid on the board.
        """
        mu, sigma = self.rating(uid)
        return mu - 3 * sigma

    def assigned_score(self, uid: int) -> float:
        """Return the moving average of a uid's assigned comparisons, in 0..1.

        Args:
            uid: A uid on the board.
        """
        return self._assigned[uid]

    def train_score(self, uid: int) -> float:
        """Return a uid's random score times its assigned score, at least 0.

        Args:
            uid: A uid on the board.
        """
        assigned = self._assigned[uid] if self.assigned_counts else 1.0
        return max(0.0, self.random_score(uid) * assigned)

    def total_scores(
        self, *, all_reduce: Mapping[int, float], repo_valid: Mapping[int, float]
    ) -> dict[int, float]:
        """Return the total score of each uid on the board.

        A uid missing from a mapping counts as 0 there. The sums used to normalise include all uids,
        even those whose bucket is invalid.

        Args:
            all_reduce: All-reduce score of each uid, at least 0.
            repo_valid: 1 for a uid whose bucket is valid, else 0; it multiplies the total.
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
        """Return a JSON-able state for :meth:`restore`."""
        return {
            str(uid): {"mu": mu, "sigma": sigma, "assigned": self._assigned[uid]}
            for uid in self._ratings
            for mu, sigma in (self.rating(uid),)
        }

    def restore(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Restore a :meth:`state`, and add its uids to the board.

        Args:
            state: uid in decimal digits -> the numbers ``mu``, ``sigma`` and ``assigned``.

        Raises:
            KeyError: If a number is missing.
            ValueError: If a uid or another value is not a number.
        """
        for text, entry in state.items():
            uid = int(text)
            self._ratings[uid] = self._model.rating(
                mu=float(entry["mu"]), sigma=float(entry["sigma"]), name=text
            )
            self._assigned[uid] = float(entry["assigned"])


def moving_average(previous: float, newest: float, *, alpha: float = EMA_ALPHA) -> float:
    """Return the average after one more value, whose weight is ``alpha``.

    Args:
        previous: The average so far.
        newest: The value to add.
        alpha: Weight of ``newest``, in 0..1. The default is the published score's weight.
    """
    return alpha * newest + (1 - alpha) * previous
