"""Annotators whose skill and bias are known, because they are programs: what agreement figures say about them can be checked.

Faced with a task, a simulated annotator

    with chance b         ranks by place: what is shown first comes first                  (b: position bias)
    else, with chance s   gives the true ranking, its ties too                             (s: skill)
    else                  gives a ranking at random, each order without ties equally likely

With c = (1 - b) s, the chance of the true ranking, the right choice between two responses has the chance

    (1 + c) / 2    where one of the two is better: by place, or at random, half of the choices are right
    c              where they are equally good: only the true ranking has ties

Standard library only.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Reply(NamedTuple):
    status: Literal["submitted", "draft", "discarded"]
    ranks: tuple[int, ...]
    """By place, 1 is best. Of a draft only the first place; of a discarded task none."""


@dataclass(frozen=True, kw_only=True)
class SimulatedAnnotator:
    name: str
    skill: float
    position_bias: float = 0.0
    discards: float = 0.02
    """Chance of refusing a task."""
    drafts: float = 0.02
    """Chance of leaving a task half done."""

    @property
    def truthful(self) -> float:
        """Chance of the true ranking."""
        return (1 - self.position_bias) * self.skill

    def accuracy(self, *, tied: float) -> float:
        """Expected share of right choices among pairs of which the share `tied` is equally good."""
        return (1 - tied) * (1 + self.truthful) / 2 + tied * self.truthful

    def preference_for_the_first_place(self, *, tied: float) -> float:
        """Expected share of the response shown first among this annotator's choices without a tie, minus 1/2.

        All choices made by place are for it, of the others half; ties are in true rankings only.
        """
        strict_choices = 1 - self.truthful * tied
        return self.position_bias / (2 * strict_choices)

    def reply(self, task: str, true_ranks: Sequence[int], *, seed: int) -> Reply:
        """To a task whose responses have these true ranks by place. The same annotator says the same to the same task."""
        rng = random.Random(f"{seed}/{self.name}/{task}")
        behaviour = rng.random()
        ranks = self.ranking(true_ranks, rng)
        if behaviour < self.discards:
            return Reply("discarded", ())
        if behaviour < self.discards + self.drafts:
            return Reply("draft", ranks[:1])
        return Reply("submitted", ranks)

    def ranking(self, true_ranks: Sequence[int], rng: random.Random) -> tuple[int, ...]:
        by_place = range(1, len(true_ranks) + 1)
        if rng.random() < self.position_bias:
            return tuple(by_place)
        if rng.random() < self.skill:
            return tuple(true_ranks)
        return tuple(rng.sample(by_place, len(by_place)))


TEAM = (
    SimulatedAnnotator(name="ada", skill=0.95),
    SimulatedAnnotator(name="ben", skill=0.85, position_bias=0.05),
    SimulatedAnnotator(name="cleo", skill=0.8, position_bias=0.1),
    SimulatedAnnotator(name="dan", skill=0.6, position_bias=0.1),
    SimulatedAnnotator(name="eve", skill=0.5, position_bias=0.4),
)
