"""The votes on a task become one judgement: a ranking, a tie, or the reason why there is none.

Each pair of responses is decided by its votes under a policy, then the decided pairs are put into one order, if they have one. Nothing is
drawn by lot: the same votes give the same judgement, in whatever order they come. docs/adjudication.md works every rule out on examples.
Standard library only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Literal, NamedTuple

from annotation.votes import CHOICES, Choice, PairKey, PairVote, choice_of

Kind = Literal["ranking", "tie", "too_few_votes", "undecided", "contradiction", "unplaced"]
"""ranking, tie: judged. too_few_votes: fewer than asked for. undecided: no pair is decided strictly, and not all are ties. contradiction:
the decided pairs fit no order (A > B > C > A; or A = B, B = C, but A > C). unplaced: they leave a response without a place."""
Pair = tuple[int, int]
"""Indices into a task's responses, the smaller one first."""


class Tally(NamedTuple):
    """Votes on one pair of responses."""

    first: int = 0
    second: int = 0
    tie: int = 0

    @property
    def votes(self) -> int:
        return self.first + self.second + self.tie

    def of(self, choice: Choice) -> int:
        return self[CHOICES.index(choice)]


Decide = Callable[[PairKey, Tally], Choice | None]
"""A policy: what the votes on a pair decide; None leaves it open."""


def tally(votes: Iterable[PairVote]) -> dict[PairKey, Tally]:
    counts = Counter((vote.pair, vote.choice) for vote in votes)
    return {pair: Tally(*(counts[pair, choice] for choice in CHOICES)) for pair in dict.fromkeys(pair for pair, _ in counts)}


# Policies

def majority(_pair: PairKey, votes: Tally) -> Choice | None:
    """The choice with more than half of all votes, ties among them."""
    return next((choice for choice in CHOICES if 2 * votes.of(choice) > votes.votes), None)


def unanimous(_pair: PairKey, votes: Tally) -> Choice | None:
    """The choice that has all votes."""
    return next((choice for choice in CHOICES if votes.of(choice) == votes.votes), None)


def likelier_than(least: float, posteriors: Mapping[PairKey, Sequence[float]]) -> Decide:
    """The choice whose posterior probability is above `least`, a share from 0.5, if anybody made it. Posteriors go by CHOICES."""
    def decide(pair: PairKey, votes: Tally) -> Choice | None:
        return next((choice for choice, chance in zip(CHOICES, posteriors[pair], strict=True) if chance > least and votes.of(choice)), None)
    return decide


# From pairs to an order

class Order(NamedTuple):
    kind: Kind
    ranks: tuple[int, ...]
    """Of a ranking or a tie: 1 is best, dense, one a response. Else empty."""


def order_of(count: int, choices: Mapping[Pair, Choice | None]) -> Order:
    """The one weak order of `count` responses that the decided pairs lead to.

    "At least as good as" is closed under transitivity first (A > B and B > C decide A and C too, if their own votes do not). A response's
    score is then the number of responses below it less the number above it (Copeland 1951), and equal scores are equal ranks. Where all
    pairs are decided and consistent, this is their order. Responses between which nothing is decided must come out equal: an order that no
    vote supports is never made up.
    """
    as_good = [[a == b for b in range(count)] for a in range(count)]
    for (first, second), choice in choices.items():
        as_good[first][second] |= choice in ("first", "tie")
        as_good[second][first] |= choice in ("second", "tie")
    for middle, a, b in product(range(count), repeat=3):
        as_good[a][b] |= as_good[a][middle] and as_good[middle][b]
    if any(as_good[second][first] if choice == "first" else as_good[first][second]
           for (first, second), choice in choices.items() if choice in ("first", "second")):
        return Order("contradiction", ())
    scores = [sum(as_good[a][b] - as_good[b][a] for b in range(count)) for a in range(count)]
    open_pairs = [(a, b) for a, b in combinations(range(count), 2) if not (as_good[a][b] or as_good[b][a])]
    if any(scores[a] != scores[b] for a, b in open_pairs):
        return Order("unplaced", ())
    rank_of = {score: rank for rank, score in enumerate(sorted(set(scores), reverse=True), 1)}
    ranks = tuple(rank_of[score] for score in scores)
    if len(rank_of) > 1:
        return Order("ranking", ranks)
    return Order("undecided", ()) if open_pairs else Order("tie", ranks)


# Tasks

@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What became of one task."""

    kind: Kind
    ranks: tuple[int, ...]
    """Of a ranking or a tie: 1 is best, dense, in the order of the task's responses. Else empty."""
    votes: int
    """Annotators who ranked the task."""
    tallies: Mapping[Pair, Tally]
    choices: Mapping[Pair, Choice | None]
    """What was decided of each pair; None: open. Empty where there were too few votes."""

    @property
    def agreement(self) -> float:
        """Share of all pairwise votes that order their pair as `ranks` does. Of a ranking or a tie only."""
        agreeing = sum(votes.of(choice_of(self.ranks[first], self.ranks[second])) for (first, second), votes in self.tallies.items())
        return agreeing / sum(votes.votes for votes in self.tallies.values())


def judge(task_id: str, count: int, tallies: Mapping[Pair, Tally], *, decide: Decide, min_votes: int) -> Judgement:
    """Judge a task of `count` responses. Every ranking votes on every pair, so all tallies have the same number of votes."""
    votes = max((votes.votes for votes in tallies.values()), default=0)
    if votes < max(1, min_votes):
        return Judgement(kind="too_few_votes", ranks=(), votes=votes, tallies=tallies, choices={})
    choices = {pair: decide((task_id, *pair), votes) for pair, votes in tallies.items()}
    kind, ranks = order_of(count, choices)
    return Judgement(kind=kind, ranks=ranks, votes=votes, tallies=tallies, choices=choices)
