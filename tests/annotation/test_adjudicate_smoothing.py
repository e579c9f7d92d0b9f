"""How likely a decided pair is wrong: by hand, at the ends, and against annotators whose error rate is known."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from annotation.adjudicate import Tally
from annotation.smoothing import StrictAgreement, chance_wrong, strict_agreement
from rlhf.errors import DataError
from rlhf.records import PreferenceRecord, Prompt, RankedRecord


def test_agreement_by_hand() -> None:
    """3:0 gives 3 agreeing pairs of votes of 3; 2:1 gives 1 of 3; 2:0 beside a tie 1 of 1; a single vote and ties give none."""
    tallies = [Tally(3, 0, 0), Tally(1, 2, 0), Tally(2, 0, 1), Tally(1, 0, 0), Tally(0, 0, 3)]
    assert strict_agreement(tallies) == StrictAgreement(agreeing=5, vote_pairs=7)
    assert StrictAgreement(5, 7).share == pytest.approx(6 / 9)


def test_error_rate_by_hand() -> None:
    """Annotators who are right 9 times of 10 agree with chance 0.81 + 0.01 = 0.82; (81 + 1) / (98 + 2) is this share."""
    assert StrictAgreement(agreeing=81, vote_pairs=98).error_rate == pytest.approx(0.1)
    assert StrictAgreement(agreeing=3, vote_pairs=10).error_rate == 0.5
    assert StrictAgreement(agreeing=0, vote_pairs=0).error_rate is None


@pytest.mark.parametrize(("votes", "chance"), [
    ((1, 0), 0.1),                      # one vote is as good as its annotator
    ((2, 1), 0.1),                      # one for and one against cancel
    ((2, 0), 0.01 / 0.82),              # both wrong, given that they agree
    ((3, 0), 0.001 / 0.730),
    ((1, 1), 0.5), ((0, 2), 0.5),       # the votes do not speak for it
])
def test_chance_by_hand(votes: tuple[int, int], chance: float) -> None:
    assert chance_wrong(*votes, error_rate=0.1) == pytest.approx(chance)


@given(st.integers(0, 400), st.integers(0, 400), st.floats(1e-6, 0.5))
def test_chance_is_a_smoothing_and_falls_with_every_vote_for_it(votes_for: int, votes_against: int, error_rate: float) -> None:
    chance = chance_wrong(votes_for, votes_against, error_rate=error_rate)
    assert 0 <= chance <= 0.5
    assert chance_wrong(votes_for + 1, votes_against, error_rate=error_rate) <= chance
    assert chance_wrong(votes_for, votes_against, error_rate=0.5) == 0.5


@pytest.mark.parametrize(("skill", "voters"), [(0.9, 3), (0.75, 3), (0.65, 5)])
def test_what_is_said_to_be_wrong_so_often_is_wrong_so_often(skill: float, voters: int) -> None:
    """20,000 simulated pairs, the first response always better: in each class of votes the share of wrong majorities is the chance."""
    drawn, pairs = random.Random(7), 20_000
    right = Counter(sum(drawn.random() < skill for _ in range(voters)) for _ in range(pairs))
    agreement = strict_agreement(Tally(count, voters - count, 0) for count in right.elements())
    assert agreement.error_rate == pytest.approx(1 - skill, abs=0.01)
    for lead in range((voters + 1) // 2, voters + 1):
        decided, wrong = right[lead] + right[voters - lead], right[voters - lead]
        said = chance_wrong(lead, voters - lead, error_rate=agreement.error_rate)
        noise = 4 * math.sqrt(said * (1 - said) / decided) + 0.01       # four standard errors, and what the estimated rate is off by
        assert wrong / decided == pytest.approx(said, abs=noise)


@pytest.mark.parametrize("smoothing", [-0.01, 0.51, float("nan")])
def test_a_record_refuses_a_smoothing_that_is_none(smoothing: float) -> None:
    with pytest.raises(DataError, match=r"smoothing must be in \[0, 0.5\] or None"):
        PreferenceRecord(prompt=Prompt.of_text("p"), chosen="a", rejected="b", smoothing=smoothing)
    with pytest.raises(DataError, match=r"smoothing must be in \[0, 0.5\] or None"):
        RankedRecord(prompt=Prompt.of_text("p"), responses=("a", "b"), ranks=(1, 2), smoothing=smoothing)


def test_a_minority_is_a_preference_only_where_something_else_speaks_for_it() -> None:
    with pytest.raises(DataError, match=r"agreement must be in \(0.5, 1\], or in \(0, 1\] with a smoothing, got 0.4"):
        PreferenceRecord(prompt=Prompt.of_text("p"), chosen="a", rejected="b", votes=5, agreement=0.4)
    overruled = PreferenceRecord(prompt=Prompt.of_text("p"), chosen="a", rejected="b", votes=5, agreement=0.4, smoothing=0.1)
    plain = PreferenceRecord(prompt=Prompt.of_text("p"), chosen="a", rejected="b")
    assert overruled.content_id == plain.content_id


def test_the_pairs_of_a_ranking_have_its_smoothing() -> None:
    ranking = RankedRecord(prompt=Prompt.of_text("p"), responses=("a", "b", "c"), ranks=(1, 2, 2), votes=3, agreement=0.4, smoothing=0.2)
    assert [(pair.chosen, pair.rejected, pair.smoothing) for pair in ranking.pairs()] == [("a", "b", 0.2), ("a", "c", 0.2)]
