"""Find the miners that spoil rounds, by calling some of them and not others.

One miner whose values are not finite, or that never ends, makes a round fail for all, and the next
one too. Where the averager has seen who it was, it *names* that miner. Elsewhere only this is
known: of those called together at least one is to blame. So the next round calls half of them,
and those that a good round has cleared meanwhile. The half whose round fails is halved again: a
hunt ends after about as many rounds as its first set can be halved, and its rounds without the
culprit are good ones. The culprit rests for one good round, then for two, four, up to 32, and is
called again after each; a good round with it takes one step back. So nobody is excluded for ever,
and a persistent culprit costs the others a logarithm of the rounds.

A miner that spoils only some rounds is in each that fails: ``doubts`` add that up, and of two
halves the less doubted is called. Whoever comes back is suspected first if a round with it fails.

Everything here is plain data, so that it can be kept over a restart.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

LONGEST_REST = 32  # good rounds, for one miner that was found
_HIGHEST_LEVEL = LONGEST_REST.bit_length()
_FAILURES_KEPT = 16
_DRAWS = 32  # of half a set, until one holds no set that failed
_NO_DOUBT = 0.01
_FADES = 0.9  # what is left of the doubt in one that is not called, a good round later


@dataclass
class Sentence:
    """``level``: how often it was found, less the good rounds since.

    ``rest``: good rounds it still sits out. ``named``: the averager saw that it was this one.
    """

    cause: str
    level: int
    rest: int
    named: bool


@dataclass(frozen=True)
class Choice:
    """``left_out``: who is not called, and why.

    ``no_choice``: who is called though rounds failed by it, since too few others are there.
    """

    called: tuple[int, ...]
    left_out: Mapping[int, str] = field(default_factory=dict)
    no_choice: tuple[int, ...] = ()


@dataclass
class Suspects:
    """Remember suspected miners by uid: :meth:`choose` the called ones, then :meth:`ended`."""

    sentences: dict[int, Sentence] = field(default_factory=dict)
    failures: list[list[int]] = field(default_factory=list)  # of each at least one is to blame
    doubts: dict[int, float] = field(default_factory=dict)

    def choose(
        self, present: Sequence[int], *, least: int, most: int, rng: random.Random
    ) -> Choice:
        """Choose ``least`` to ``most`` of ``present``, of which the best come first, to call.

        Where that leaves no choice all are called, and the hunt begins again.
        """
        resting = {u for u in present if u in self.sentences and self.sentences[u].rest > 0}
        free = [uid for uid in present if uid not in resting][:most]
        sets = [kept for f in self.failures if (kept := set(f).intersection(free))]
        too_few = len(free) < least <= len(present)
        chosen = set(free)
        innocent, target = chosen.difference(*sets), min(sets, key=len, default=set[int]())
        # Half of the smallest set, and whoever is in none of them.
        for draw in range(_DRAWS):
            if not any(kept <= chosen for kept in sets):
                break
            # The doubts first; where they lead nowhere any half is as good.
            doubts = self.doubts if draw == 0 else {}
            order = sorted(free, key=lambda u: (doubts.get(u, 0.0), rng.random()))
            chosen = innocent.union([u for u in order if u in target][: len(target) // 2])
            others = sorted((u for u in order if u not in chosen), key=target.__contains__)
            chosen.update(others[: max(0, least - len(chosen))])
        if too_few or any(kept <= chosen for kept in sets):
            blamed = resting.union(*self.failures).intersection(present)
            for uid in resting:
                self.sentences[uid].rest = 0
            self.failures = []
            return Choice(tuple(present[:most]), no_choice=tuple(sorted(blamed)))
        left_out = {uid: self.sentences[uid].cause for uid in present if uid in resting}
        left_out |= {
            uid: "one of those in a round that failed" for uid in free if uid not in chosen
        }
        return Choice(tuple(uid for uid in free if uid in chosen), left_out)

    def ended(
        self, called: Iterable[int], *, fault: str = "", causes: Mapping[int, str] | None = None
    ) -> dict[int, Sentence]:
        """Take in a round of ``called``; return who was found by it, and is to rest.

        ``fault``: why it failed, where that is the doing of one of them. ``causes``: who was seen
        to be the one, in a good round as well.
        """
        causes = causes or {}
        group = set(called) - causes.keys()
        if not fault:
            for uid, sentence in list(self.sentences.items()):
                sentence.rest = max(0, sentence.rest - 1)
                sentence.level -= uid in group
                if sentence.level <= 0:
                    del self.sentences[uid]
            self.doubts = {
                uid: less
                for uid, doubt in self.doubts.items()
                if (less := doubt * (0.5 if uid in group else _FADES)) > _NO_DOUBT
            }
            rests = ([uid for uid in failed if uid not in group] for failed in self.failures)
            self.failures = [rest for rest in rests if rest]
        elif not causes and group:
            self._failed(group)
        found = {uid: self._find(uid, why, named=True) for uid, why in causes.items()}
        while single := next((f for f in self.failures if len(f) == 1), None):
            why = f"rounds with it failed{fault and f', the last with {fault}'}"
            found[single[0]] = self._find(single[0], why, named=False)
        return found

    def _failed(self, group: set[int]) -> None:
        # Who has just come back is the first suspect; then who is hunted.
        back = {u for u in group if u in self.sentences and not self.sentences[u].named}
        suspects = back or group & set[int]().union(*self.failures) or group
        for uid in suspects:
            self.doubts[uid] = self.doubts.get(uid, 0.0) + 1 / len(suspects)
        self.failures = [*self.failures, sorted(suspects)][-_FAILURES_KEPT:]

    def _find(self, uid: int, cause: str, *, named: bool) -> Sentence:
        """Have a miner rest, longer each time; whatever rounds it was in are explained by it."""
        before = self.sentences.get(uid)
        level = min(before.level + 1 if before else 1, _HIGHEST_LEVEL)
        sentence = self.sentences[uid] = Sentence(cause, level, 0, named)
        unnamed = sum(not s.named for s in self.sentences.values())
        # Each return of one that was not seen may cost a round, so they share that cost.
        sentence.rest = 2 ** (level - 1) * (1 if named else unnamed)
        self.failures = [f for f in self.failures if uid not in f]
        return sentence

    def forget(self, uid: int) -> None:
        """Forget a uid, which has another owner now."""
        self.sentences.pop(uid, None)
        self.doubts.pop(uid, None)
        self.failures = [kept for f in self.failures if (kept := [u for u in f if u != uid])]
