"""From votes on pairs to a judgement: every rule by hand, and what must not depend on names and order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from annotation.adjudicate import Decide, Judgement, Tally, judge, likelier_than, majority, order_of, tally, unanimous
from annotation.verdicts import Verdict
from annotation.votes import pair_votes

A, B, TIE = (1, 2), (2, 1), (1, 1)
"""Rankings of two responses: the first is better, the second is better, neither."""


def verdict(annotator: str, ranks: Sequence[int], order: Sequence[int] | None = None) -> Verdict:
    return Verdict(task_id="t", annotator=annotator, kind="submitted", ranks=tuple(ranks), order=tuple(order or range(len(ranks))))


def judged(ballots: Sequence[Sequence[int]], decide: Decide = majority, min_votes: int = 1) -> Judgement:
    tallies = tally(pair_votes(verdict(f"annotator {number}", ranks) for number, ranks in enumerate(ballots)))
    return judge("t", len(ballots[0]), {(first, second): votes for (_, first, second), votes in tallies.items()}, decide=decide,
                 min_votes=min_votes)


@pytest.mark.parametrize(("ballots", "by_majority", "by_unanimity"), [
    ([A, A, B], ("ranking", (1, 2), 2 / 3), "undecided"),
    ([A, A, TIE], ("ranking", (1, 2), 2 / 3), "undecided"),
    ([TIE, TIE, A], ("tie", (1, 1), 2 / 3), "undecided"),
    ([A, B, TIE], ("undecided", (), None), "undecided"),
    ([A, A, B, B], ("undecided", (), None), "undecided"),
    ([A, A, B, TIE], ("undecided", (), None), "undecided"),        # half is no majority
    ([B, B, B], ("ranking", (2, 1), 1.0), "ranking"),
    ([TIE, TIE], ("tie", (1, 1), 1.0), "tie"),
    ([A, B], ("undecided", (), None), "undecided"),
])
def test_two_responses_by_hand(ballots: list[tuple[int, int]], by_majority: tuple[str, tuple[int, ...], float | None],
                               by_unanimity: str) -> None:
    found = judged(ballots)
    assert (found.kind, found.ranks, found.agreement if found.ranks else None) == by_majority
    assert judged(ballots, unanimous).kind == by_unanimity


def test_fewer_votes_than_asked_for_are_no_judgement() -> None:
    assert judged([A, A], min_votes=3).kind == "too_few_votes"
    assert judged([A, A, A], min_votes=3).kind == "ranking"
    assert judge("t", 2, {}, decide=majority, min_votes=1).kind == "too_few_votes"


@pytest.mark.parametrize(("ballots", "kind", "ranks", "agreement"), [
    ([(1, 1, 2)], "ranking", (1, 1, 2), 1.0),
    ([(1, 1, 2), (1, 1, 2), (1, 2, 3)], "ranking", (1, 1, 2), 8 / 9),
    ([(1, 2, 3), (1, 2, 3), (3, 2, 1)], "ranking", (1, 2, 3), 6 / 9),
    ([(1, 2, 3), (1, 3, 2)], "ranking", (1, 2, 2), 4 / 6),             # B ? C is open, and both are below A
    ([(1, 2, 3), (2, 3, 1), (3, 1, 2)], "contradiction", (), None),      # Condorcet: A > B > C > A, each by 2 of 3
    ([(1, 2, 3), (1, 1, 1), (1, 1, 1), (2, 1, 2)], "undecided", (), None),   # the only decided pair is A = C
    ([(1, 2, 3), (3, 1, 2)], "unplaced", (), None),                      # only B > C is decided: where would A go?
    ([(1, 1, 1), (1, 1, 1), (1, 2, 3)], "tie", (1, 1, 1), 6 / 9),
    ([(1, 2, 3, 4), (1, 2, 3, 4), (2, 1, 4, 3)], "ranking", (1, 2, 3, 4), 16 / 18),
    ([(1, 9, 9), (1, 9, 9)], "ranking", (1, 2, 2), 1.0),                 # gaps mean nothing
])
def test_more_responses_by_hand(ballots: list[tuple[int, ...]], kind: str, ranks: tuple[int, ...], agreement: float | None) -> None:
    found = judged(ballots)
    assert (found.kind, found.ranks, found.agreement if found.ranks else None) == (kind, ranks, agreement)


def test_what_follows_from_decided_pairs_is_decided() -> None:
    assert order_of(3, {(0, 1): "first", (1, 2): "first", (0, 2): None}).ranks == (1, 2, 3)
    assert order_of(4, {(0, 1): "first", (1, 2): "first", (2, 3): "first", (0, 2): None, (0, 3): None, (1, 3): None}).ranks == (1, 2, 3, 4)
    assert order_of(3, {(0, 1): "tie", (1, 2): "first", (0, 2): None}).ranks == (1, 1, 2)
    assert order_of(3, {(0, 1): "tie", (1, 2): "tie", (0, 2): None}) == ("tie", (1, 1, 1))


def test_ties_that_do_not_carry_over_contradict() -> None:
    assert order_of(3, {(0, 1): "tie", (1, 2): "tie", (0, 2): "first"}).kind == "contradiction"


def test_a_posterior_decides_above_the_bar_only_and_only_what_somebody_said() -> None:
    decide = likelier_than(0.8, {("t", 0, 1): (0.1, 0.85, 0.05), ("u", 0, 1): (0.8, 0.1, 0.1)})
    assert decide(("t", 0, 1), Tally(first=2, second=1)) == "second"
    assert decide(("u", 0, 1), Tally(first=2, second=1)) is None
    assert decide(("t", 0, 1), Tally(first=2, tie=1)) is None


# Properties

RANKINGS = st.integers(2, 5).flatmap(lambda count: st.lists(st.lists(st.integers(1, 3), min_size=count, max_size=count).map(tuple),
                                                            min_size=1, max_size=6))
POLICIES = st.sampled_from([majority, unanimous])


@given(RANKINGS, POLICIES, st.randoms(use_true_random=False))
def test_who_said_what_and_in_which_order_changes_nothing(ballots, decide, random) -> None:
    shuffled = random.sample(ballots, len(ballots))
    assert judged(shuffled, decide) == judged(ballots, decide)


@given(RANKINGS, POLICIES, st.randoms(use_true_random=False))
def test_relabelled_responses_give_the_relabelled_judgement(ballots, decide, random) -> None:
    order = random.sample(range(len(ballots[0])), len(ballots[0]))
    found, relabelled = judged(ballots, decide), judged([tuple(ballot[index] for index in order) for ballot in ballots], decide)
    assert (relabelled.kind, relabelled.ranks) == (found.kind, tuple(found.ranks[index] for index in order) if found.ranks else ())
    if found.ranks:
        assert relabelled.agreement == pytest.approx(found.agreement)


@given(RANKINGS)
def test_one_more_vote_for_the_judgement_never_changes_it(ballots) -> None:
    found = judged(ballots)
    if found.ranks:
        again = judged([*ballots, found.ranks])
        assert (again.kind, again.ranks) == (found.kind, found.ranks)
        assert again.agreement >= found.agreement


@given(st.integers(2, 5).flatmap(lambda count: st.lists(st.integers(1, 3), min_size=count, max_size=count)), st.integers(1, 4))
def test_annotators_who_agree_are_taken_at_their_word(ranks, votes) -> None:
    found = judged([tuple(ranks)] * votes)
    assert [found.ranks[a] < found.ranks[b] for a, b in permutations(range(len(ranks)), 2)] == \
        [ranks[a] < ranks[b] for a, b in permutations(range(len(ranks)), 2)]
    assert (found.kind, found.agreement) == ("tie" if len(set(ranks)) == 1 else "ranking", 1.0)


@given(st.integers(2, 5).flatmap(lambda count: st.tuples(st.just(count), st.fixed_dictionaries(
    {pair: st.sampled_from(["first", "second", "tie", None]) for pair in combinations(range(count), 2)}))))
def test_an_order_is_one_that_every_decided_pair_fits_and_that_no_open_pair_is_made_up_for(drawn) -> None:
    """Against a search over all weak orders: those that fit the decided pairs and put a pair strictly only if every one of them does."""
    count, choices = drawn
    fitting = [ranks for ranks in weak_orders(count) if all(fits(ranks, pair, choice) for pair, choice in choices.items())]
    kind, ranks = order_of(count, choices)
    assert (kind == "contradiction") == (not fitting)
    if ranks:
        assert tuple(ranks) in fitting
        for first, second in combinations(range(count), 2):
            if ranks[first] != ranks[second]:
                assert {(other[first] > other[second]) - (other[first] < other[second]) for other in fitting} == \
                    {1 if ranks[first] > ranks[second] else -1}


def weak_orders(count: int) -> list[tuple[int, ...]]:
    found = [()]
    for _ in range(count):
        found = [(*ranks, rank) for ranks in found for rank in range(1, count + 1)]
    return [ranks for ranks in found if set(ranks) == set(range(1, max(ranks) + 1))]


def fits(ranks: Sequence[int], pair: tuple[int, int], choice: str | None) -> bool:
    first, second = (ranks[index] for index in pair)
    return {"first": first < second, "second": first > second, "tie": first == second, None: True}[choice]
