"""Figures about annotators against values by hand, brute force, and annotators whose skill and bias are known."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import combinations

import pytest
import torch
from exported_projects import task, verdict, votes
from hypothesis import given, settings
from hypothesis import strategies as st

from annotation.agreement import measure, pair_posteriors
from annotation.agreement_tables import notes_of
from annotation.annotator_quality import Annotator, shares
from annotation.tasks import Task
from annotation.verdicts import Verdict
from annotation.vote_table import vote_table
from annotation.votes import pair_votes
from recipes.quickstart.simulate import SimulatedAnnotator
from rlhf.errors import DataError
from rlhf.maths.bootstrap import wilson_interval

A, B, TIE = (1, 2), (2, 1), (1, 1)


def by_id(*tasks: Task) -> dict[str, Task]:
    return {one.id: one for one in tasks}


def pair_tasks(count: int) -> list[Task]:
    return [task(f"question {number}", "a", "b") for number in range(count)]


# By hand

def test_agreement_of_three_tasks() -> None:
    one, two, three = pair_tasks(3)
    report = measure(by_id(one, two, three), [*votes(one, A, A, B), *votes(two, A, TIE), *votes(three, B)], seed=0)
    overall = report.overall
    assert (overall.tasks, overall.verdicts, overall.annotators, overall.shared_pairs) == (3, 6, 3, 2)
    assert report.overlap == {1: 1, 2: 1, 3: 1}
    # five ratings: A A B | A tie. D_o = (4/2 + 2/1) / 5 = 0.8; equal among the 10 pairs of ratings: A A in 3, so D_e = 0.7
    assert overall.same_choice and overall.same_choice.value == pytest.approx(0.2)
    assert overall.alpha and overall.alpha.value == pytest.approx(1 - 0.8 / 0.7)
    assert [(work.first, work.second, work.pairs, work.same_choice) for work in report.shared_work] == [
        ("ann0", "ann1", 2, 0.5), ("ann0", "ann2", 1, 0.0), ("ann1", "ann2", 1, 0.0)]
    assert [(item.task_id, item.annotators, round(item.same_choice, 3)) for item in report.disputed] == [
        (two.id, 2, 0.0), (one.id, 3, 0.333)]


def test_what_most_of_the_others_chose() -> None:
    one, two, three = pair_tasks(3)
    report = measure(by_id(one, two, three), [*votes(one, A, A, B), *votes(two, A, B, TIE), *votes(three, TIE, TIE, TIE)], seed=0)
    # one: for ann0 and ann1 the others are split, for ann2 they both say A. two: always split. three: always ties.
    rest = {annotator.name: annotator.with_the_rest for annotator in report.annotators}
    assert {name: (share.value, share.count) for name, share in rest.items() if share} == {"ann0": (1, 1), "ann1": (1, 1), "ann2": (0.5, 2)}
    assert [annotator.ties for annotator in report.annotators] == pytest.approx([1 / 3, 1 / 3, 2 / 3])


def test_gold_items_and_their_interval() -> None:
    gold = [task(f"gold {number}", "a", "b", gold=(1, 2) if number else (1, 1)) for number in range(10)]
    said = [verdict(item, "eve", A if number < 8 else B) for number, item in enumerate(gold)]     # right on 7: not on 0, 8 and 9
    eve = measure(by_id(*gold), said, seed=0).annotators[0]
    assert eve.gold and (eve.gold.value, eve.gold.count) == (0.7, 10)
    assert (eve.gold.low, eve.gold.high) == pytest.approx(wilson_interval(7, 10)[1:])
    assert eve.skill is None and eve.with_the_rest is None     # nobody else judged any of it


def test_position_bias() -> None:
    tasks = pair_tasks(100)
    by_place = [verdict(item, "eve", A if item.order[0] == 0 else B) for item in tasks[:70]]
    other_way = [verdict(item, "eve", B if item.order[0] == 0 else A) for item in tasks[70:90]]
    ties = [verdict(item, "eve", TIE) for item in tasks[90:]]
    report = measure(by_id(*tasks), [*by_place, *other_way, *ties], seed=0)
    bias = report.annotators[0].position_bias
    assert bias and bias.count == 90
    assert bias.value == pytest.approx(70 / 90 - 0.5)
    assert bias.low + 0.5 == pytest.approx(wilson_interval(70, 90).low)
    assert bias.p_value == pytest.approx(1.4e-7, rel=0.1)     # z = 2 sqrt(90) (70 / 90 - 1 / 2) = 5.27
    assert report.annotators[0].flags == ("position",)


def test_a_ranking_by_place_is_one_observation_and_not_six() -> None:
    tasks = [task(f"question {number}", "a", "b", "c", "d") for number in range(40)]
    said = []
    for number, item in enumerate(tasks):
        by_place = (1, 2, 3, 4) if number < 20 else (4, 3, 2, 1)
        said.append(verdict(item, "eve", [by_place[item.order.index(index)] for index in range(4)]))
    bias = measure(by_id(*tasks), said, seed=0).annotators[0].position_bias
    assert bias and (bias.value, bias.count) == (0, 240)
    assert bias.high + 0.5 == pytest.approx(wilson_interval(20, 40).high)


def test_independent_pairs_keep_their_weight() -> None:
    tasks = [task(f"question {number}", "a", "b", "c", "d") for number in range(400)]
    table = vote_table(pair_votes(verdict(item, "eve", (1, 2, 3, 4)) for item in tasks))
    hit = torch.rand(len(table.pair), generator=torch.Generator().manual_seed(0)) < 0.6
    share, = shares(hit, torch.ones_like(hit), table.annotator, 1, table)
    assert share and share.pairs == 2400
    assert share.worth == pytest.approx(2400, rel=0.12)


def test_pace_leaves_breaks_out_and_names_who_cannot_have_read() -> None:
    start = datetime(2026, 11, 1, 9, tzinfo=UTC)
    tasks = [task(f"question {number}", "a" * 1500, "b" * 1500) for number in range(25)]     # 3,000 characters: 30 s at the very least

    def given_at(name: str, seconds: float) -> list[Verdict]:
        times = [start + timedelta(seconds=seconds * number, hours=2 * (number > 12)) for number in range(25)]
        return [replace(verdict(item, name, A), at=time.isoformat()) for item, time in zip(tasks, times, strict=True)]
    fast, slow = measure(by_id(*tasks), [*given_at("fast", 20), *given_at("slow", 90)], seed=0).annotators
    assert fast.pace and slow.pace
    assert (fast.pace.median, fast.pace.count, fast.pace.too_fast) == (20, 23, 1)      # 24 steps, one of them over the break
    assert (slow.pace.median, slow.pace.quartiles, slow.pace.too_fast) == (90, (90, 90), 0)
    assert dict(enumerate(fast.pace.histogram))[5] == 23     # 16 to 32 s
    assert "pace" in fast.flags and "pace" not in slow.flags


def test_confidence_is_calibrated_against_the_others() -> None:
    tasks = pair_tasks(40)
    said = []
    for number, item in enumerate(tasks):
        said += [verdict(item, "ada", A), verdict(item, "ben", A)]
        said.append(replace(verdict(item, "cleo", A if number < 20 or number % 2 else B), confidence=5 if number < 20 else 1))
    unsure, sure = measure(by_id(*tasks), said, seed=0).confidence
    assert (unsure.confidence, unsure.votes, sure.confidence, sure.votes) == (1, 20, 5, 20)
    assert unsure.with_the_rest and unsure.with_the_rest.value == 0.5
    assert sure.with_the_rest and sure.with_the_rest.value == 1


# Properties

RANKINGS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.permutations([1, 2, 3]), st.booleans()), max_size=20)


def three_way(rows: list[tuple[int, int, list[int], bool]]) -> tuple[dict[str, Task], list[Verdict]]:
    """Rankings of three responses, of five tasks by four annotators at most, some with a tie."""
    tasks = [task(f"question {number}", "a", "b", "c") for number in range(5)]
    said = {(number, annotator): verdict(tasks[number], f"ann{annotator}", [1, 1, 2] if tie else ranks)
            for number, annotator, ranks, tie in rows}
    return by_id(*tasks), list(said.values())


@settings(max_examples=15, deadline=None)
@given(rows=RANKINGS, seed=st.integers(0, 99))
def test_the_order_of_the_log_does_not_matter(rows: list[tuple[int, int, list[int], bool]], seed: int) -> None:
    tasks, said = three_way(rows)
    report, again = measure(tasks, said, seed=1), measure(tasks, random.Random(seed).sample(said, len(said)), seed=1)
    for one, other in ((report.overall.alpha, again.overall.alpha), (report.overall.rank_alpha, again.overall.rank_alpha)):
        assert (one is None) == (other is None)
        assert one is None or other is None or one.value == pytest.approx(other.value)
    assert report.disputed == again.disputed
    assert report.shared_work == again.shared_work
    assert [annotator.name for annotator in report.annotators] == [annotator.name for annotator in again.annotators]
    for mine, theirs in zip(report.annotators, again.annotators, strict=True):
        assert (mine.skill is None) == (theirs.skill is None)
        assert mine.skill is None or theirs.skill is None or mine.skill.value == pytest.approx(theirs.skill.value)


@settings(max_examples=40, deadline=None)
@given(rows=RANKINGS)
def test_two_votes_are_all_two_votes_on_a_pair(rows: list[tuple[int, int, list[int], bool]]) -> None:
    _, said = three_way(rows)
    given_votes = list(pair_votes(said))
    one, other = vote_table(given_votes).two_votes()
    found = {frozenset(two) for two in zip(one.tolist(), other.tolist(), strict=True)}
    assert found == {frozenset((i, j)) for i, j in combinations(range(len(given_votes)), 2) if given_votes[i].pair == given_votes[j].pair}
    assert len(one) == len(found)


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1)])
def test_the_order_of_the_candidates_does_not_matter_where_it_says_so(order: tuple[int, ...]) -> None:
    """The same votes, with the responses of the tasks listed in another order."""
    rng = random.Random(0)
    tasks = [task(f"question {number}", "a", "b", "c") for number in range(30)]
    said = [verdict(item, f"ann{annotator}", rng.sample([1, 2, 3], 3) if rng.random() < 0.5 else (1, 2, 2))
            for item in tasks for annotator in range(3)]
    relisted = {item.id: replace(item, responses=tuple(item.responses[index] for index in order),
                                 order=tuple(order.index(index) for index in item.order)) for item in tasks}
    moved = [replace(one, ranks=tuple(one.ranks[index] for index in order), order=relisted[one.task_id].order) for one in said]
    report, again = measure(by_id(*tasks), said, seed=0), measure(relisted, moved, seed=0)
    assert report.overall.alpha_either_order and again.overall.alpha_either_order and report.overall.rank_alpha and again.overall.rank_alpha
    assert again.overall.alpha_either_order.value == pytest.approx(report.overall.alpha_either_order.value)
    assert again.overall.rank_alpha.value == pytest.approx(report.overall.rank_alpha.value)
    for mine, theirs in zip(report.annotators, again.annotators, strict=True):
        assert mine.skill and theirs.skill and mine.position_bias and theirs.position_bias
        assert (theirs.skill.low, theirs.skill.high) == pytest.approx((mine.skill.low, mine.skill.high), rel=1e-4)
        assert theirs.position_bias.value == pytest.approx(mine.position_bias.value)


def test_posteriors_trust_who_is_reliable() -> None:
    tasks = pair_tasks(60)
    rng = random.Random(0)
    said = []
    for item in tasks[1:]:
        said += [verdict(item, "ada", A), verdict(item, "ben", A), *(verdict(item, name, rng.choice((A, B))) for name in ("coin", "dice"))]
    said += [verdict(tasks[0], "ada", A), verdict(tasks[0], "coin", B), verdict(tasks[0], "dice", B)]
    posteriors = pair_posteriors(pair_votes(said))
    first, second, tie = posteriors[tasks[0].id, 0, 1]
    assert first > 0.9 > second + tie      # one reliable vote against two coins
    assert first + second + tie == pytest.approx(1)
    assert pair_posteriors([]) == {}


# Annotators whose skill is known

TEAM = (SimulatedAnnotator(name="ada", skill=0.95), SimulatedAnnotator(name="ben", skill=0.8), SimulatedAnnotator(name="cleo", skill=0.7),
        SimulatedAnnotator(name="dan", skill=0.6), SimulatedAnnotator(name="eve", skill=0.35, position_bias=0.4))
TIED = 0.1


@pytest.fixture(scope="module")
def known() -> dict[str, Annotator]:
    """All of a simulated team on 600 pairs, a tenth of them equally good, a quarter gold."""
    rng = random.Random(0)
    tasks, said = [], []
    for number in range(600):
        truth = TIE if rng.random() < TIED else rng.choice((A, B))
        item = task(f"question {number}", "a", "b", gold=truth if number % 4 == 0 else ())
        tasks.append(item)
        for annotator in TEAM:
            reply = annotator.reply(item.id, [truth[index] for index in item.order], seed=1)
            if reply.status == "submitted":
                said.append(verdict(item, annotator.name, item.unblind(reply.ranks)))
    return {one.name: one for one in measure(by_id(*tasks), said, seed=0).annotators}


@pytest.mark.parametrize("simulated", TEAM, ids=lambda simulated: simulated.name)
def test_known_skills_and_biases_are_in_their_intervals(simulated: SimulatedAnnotator, known: dict[str, Annotator]) -> None:
    found = known[simulated.name]
    accuracy, bias = simulated.accuracy(tied=TIED), simulated.preference_for_the_first_place(tied=TIED)
    assert found.skill and found.gold and found.position_bias
    assert found.skill.low <= accuracy <= found.skill.high
    assert found.gold.low <= accuracy <= found.gold.high
    assert found.position_bias.low <= bias <= found.position_bias.high
    assert found.skill.high - found.skill.low < 0.12


def test_only_the_one_who_is_biased_is_flagged(known: dict[str, Annotator]) -> None:
    assert {name: one.flags for name, one in known.items() if one.flags} == {"eve": ("gold", "skill", "position")}


# Little data, wrong data

def test_no_votes_and_no_overlap_are_said_and_not_guessed() -> None:
    tasks = by_id(*pair_tasks(3))
    nobody = measure(tasks, [], seed=0)
    assert nobody.overall.alpha is None and nobody.annotators == () and nobody.by_responses == {}
    assert "Nobody has submitted" in notes_of(nobody)[0]
    alone = measure(tasks, [verdict(item, "ada", A) for item in tasks.values()], seed=0)
    assert alone.overall.alpha is None and alone.annotators[0].skill is None
    assert "No two annotators judged the same task" in notes_of(alone)[0]
    unanimous = measure(tasks, [verdict(item, name, A) for item in tasks.values() for name in ("ada", "ben")], seed=0)
    assert unanimous.overall.alpha is None and unanimous.overall.shared_pairs == 3
    assert "alpha is not defined" in notes_of(unanimous)[0]


def test_who_only_discards_is_there_and_withdrawn_votes_are_nothing() -> None:
    one, two = pair_tasks(2)
    gone = [Verdict(task_id=two.id, annotator="zoe", kind="discarded", order=two.order),
            Verdict(task_id=two.id, annotator="yan", kind="withdrawn", order=two.order)]
    report = measure(by_id(one, two), [*votes(one, A, B), *gone], seed=0)
    assert [(annotator.name, annotator.tasks, annotator.discarded) for annotator in report.annotators] == [
        ("ann0", 1, 0), ("ann1", 1, 0), ("zoe", 0, 1)]
    assert report.overall.verdicts == 2


def test_refusals() -> None:
    one, two = pair_tasks(2)
    with pytest.raises(DataError, match="none of the project's 1 tasks"):
        measure(by_id(one), votes(two, A), seed=0)
    with pytest.raises(DataError, match="has 2 responses, but ann0 gave 3 ranks"):
        measure(by_id(one), [replace(votes(one, A)[0], ranks=(1, 2, 3), order=(0, 1, 2))], seed=0)
    with pytest.raises(DataError, match="ada voted 2 times on task"):
        measure(by_id(one), [verdict(one, "ada", A), verdict(one, "ada", B)], seed=0)


def test_parts_are_measured_like_projects_of_their_own() -> None:
    rng = random.Random(1)
    pairs, triples = pair_tasks(20), [task(f"other {number}", "a", "b", "c") for number in range(20)]
    said = [verdict(item, name, rng.sample([1, 2], 2), guideline=rng.choice(("v1", "v2"))) for item in pairs for name in ("x", "y", "z")]
    more = [verdict(item, name, rng.sample([1, 2, 3], 3), guideline="v10") for item in triples for name in ("x", "y", "z")]
    report = measure(by_id(*pairs, *triples), [*said, *more], seed=0)
    assert list(report.by_responses) == [2, 3] and list(report.by_guideline) == ["v1", "v2", "v10"]
    for part, alone in ((report.by_responses[2], measure(by_id(*pairs), said, seed=0).overall),
                        (report.by_guideline["v10"], measure(by_id(*triples), more, seed=0).overall)):
        assert (part.tasks, part.verdicts, part.shared_pairs) == (alone.tasks, alone.verdicts, alone.shared_pairs)
        assert part.alpha and alone.alpha and part.alpha.value == pytest.approx(alone.alpha.value)
        assert part.rank_alpha and alone.rank_alpha and part.rank_alpha.value == pytest.approx(alone.rank_alpha.value)
