"""How often a strict vote is wrong, told from how often two annotators agree, and what that makes of a decided pair.

The one-coin model of Dawid & Skene 1979 (Applied Statistics 28, 20-28): of two responses one is truly better, each equally likely to be;
every strict vote names it with the same chance q, independently of the others. docs/adjudication.md derives both formulas and says where
the model fails. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from annotation.adjudicate import Tally


class StrictAgreement(NamedTuple):
    """Of all pairs of strict votes on one pair of responses: how many there are, and how many name the same response."""

    agreeing: int
    vote_pairs: int

    @property
    def share(self) -> float:
        """(agreeing + 1) / (vote_pairs + 2), the rule of succession: a handful of votes that all agree does not prove that nobody errs."""
        return (self.agreeing + 1) / (self.vote_pairs + 2)

    @property
    def error_rate(self) -> float | None:
        """1 - q, in (0, 0.5]; None where no two annotators judged the same pair strictly, so that nothing can be told.

        Two votes agree when both are right or both are wrong: q^2 + (1 - q)^2 = share, so q = (1 + sqrt(2 share - 1)) / 2. At a share
        of a half or less annotators agree no more than coins do: 0.5.
        """
        if not self.vote_pairs:
            return None
        return (1 - math.sqrt(max(0.0, 2 * self.share - 1))) / 2


def strict_agreement(tallies: Iterable[Tally]) -> StrictAgreement:
    """Counted over all pairs of responses; ties are no strict votes."""
    agreeing = vote_pairs = 0
    for votes in tallies:
        agreeing += math.comb(votes.first, 2) + math.comb(votes.second, 2)
        vote_pairs += math.comb(votes.first + votes.second, 2)
    return StrictAgreement(agreeing, vote_pairs)


def chance_wrong(votes_for: int, votes_against: int, *, error_rate: float) -> float:
    """P(the response that `votes_for` name is not the better one | the votes), in [0, 0.5].

    By Bayes' rule with even prior odds: the odds of being right are (q / (1 - q))^(votes_for - votes_against). Votes for a tie say nothing
    about the direction. Where no more votes are for it than against it, the votes do not speak for it: 0.5.
    """
    odds_against = error_rate / (1 - error_rate)
    power = odds_against ** max(0, votes_for - votes_against)
    return power / (1 + power)
