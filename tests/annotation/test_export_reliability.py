"""The policy dawid-skene: whom to believe is told by the votes, and its doubts are right as often as they say."""

from __future__ import annotations

import random

import pytest
from exported_projects import exported, pandalm, task, verdict

from annotation.agreement import pair_posteriors
from annotation.export import Export
from annotation.tasks import Task
from annotation.verdicts import Verdict
from rlhf.records import PreferenceRecord

SKILLS = {"ann": 0.95, "bob": 0.88, "cem": 0.8, "dee": 0.55, "eve": 0.55}
MAJORITY_ERRS, BEST_ERRS = 0.0860, 0.0376
"""Exact: sums over the 32 ways to vote, of three or more wrong ones, and of the less likely truth where the skills are known."""


def simulated(pairs: int, *, seed: int) -> tuple[list[Task], list[Verdict]]:
    """Of every pair the response that is called "right" is better; an annotator says so with their skill, whatever the pair."""
    drawn = random.Random(seed)
    tasks = [task(f"prompt {number}", "right", "wrong") for number in range(pairs)]
    return tasks, [verdict(item, name, (1, 2) if drawn.random() < skill else (2, 1)) for item in tasks for name, skill in SKILLS.items()]


def pairs(export: Export) -> list[PreferenceRecord]:
    return [pair for side in export.sides.values() for pair in side.pairs]


def share_wrong(records: list[PreferenceRecord]) -> float:
    return sum(record.chosen == "wrong" for record in records) / len(records)


def test_those_who_are_right_more_often_outvote_those_who_guess() -> None:
    tasks, verdicts = simulated(2000, seed=1)
    by_majority, by_reliability = pairs(exported(tasks, verdicts)), pairs(exported(tasks, verdicts, "dawid-skene", min_posterior=0.5))
    assert len(by_majority) == len(by_reliability) == 2000
    assert share_wrong(by_majority) == pytest.approx(MAJORITY_ERRS, abs=0.015)
    assert share_wrong(by_reliability) == pytest.approx(BEST_ERRS, abs=0.015)
    overruled = [record for record in by_reliability if record.agreement < 0.5]
    assert len(overruled) > 50 and share_wrong(overruled) < 0.25


def test_a_smoothing_is_the_share_that_is_wrong() -> None:
    records = pairs(exported(*simulated(3000, seed=2), "dawid-skene", min_posterior=0.5))
    for low, high in ((0, 0.02), (0.02, 0.1), (0.1, 0.5)):
        chosen = [record for record in records if record.smoothing is not None and low <= record.smoothing < high]
        said = sum(record.smoothing for record in chosen if record.smoothing is not None) / len(chosen)
        noise = 4 * (said * (1 - said) / len(chosen)) ** 0.5 + 0.01      # four standard errors, and what the estimated skills are off by
        assert share_wrong(chosen) == pytest.approx(said, abs=noise)


def test_a_higher_bar_decides_less_and_errs_less() -> None:
    tasks, verdicts = simulated(1500, seed=3)
    low, high = (exported(tasks, verdicts, "dawid-skene", min_posterior=bar) for bar in (0.5, 0.98))
    assert high.tasks["undecided"] > low.tasks["undecided"] == 0
    assert share_wrong(pairs(high)) < share_wrong(pairs(low))
    assert {pair.content_id for pair in pairs(high)} < {pair.content_id for pair in pairs(low)}


def test_good_annotators_are_judged_as_their_majority_judges() -> None:
    """PandaLM: three who agree nearly always, so that reliability has little to add; every unanimous row stays what it is."""
    tasks, verdicts = pandalm()
    unanimous, reliable = exported(tasks, verdicts, "unanimous", min_votes=2), exported(tasks, verdicts, "dawid-skene")
    assert {pair.content_id for pair in pairs(unanimous)} <= {pair.content_id for pair in pairs(reliable)}
    assert reliable.tasks["contradiction"] == 0 and reliable.tasks["ranking"] + reliable.tasks["tie"] > 900


def test_the_same_votes_give_the_same_records_whoever_is_listed_first() -> None:
    tasks, verdicts = simulated(200, seed=4)
    export, other = exported(tasks, verdicts, "dawid-skene"), exported(tasks[::-1], verdicts[::-1], "dawid-skene")
    assert export.sides == other.sides


def test_half_of_the_chance_of_a_tie_is_a_chance_of_being_wrong() -> None:
    tasks = [task(f"prompt {number}", "a", "b") for number in range(40)]
    verdicts = [verdict(item, name, (1, 1) if number % 5 == place else (1, 2) if number % 2 else (2, 1))
                for number, item in enumerate(tasks) for place, name in enumerate(("ann", "bob", "cem"))]
    export = exported(tasks, verdicts, "dawid-skene", min_posterior=0.5)
    chance_of = {f"week-48/{task_id}": chances for (task_id, _, _), chances in pair_posteriors(export.votes).items()}
    assert len(pairs(export)) > 20
    for record in pairs(export):
        for_a, for_b, tie = chance_of[record.source]
        assert record.smoothing == pytest.approx((for_b if record.chosen == "a" else for_a) + tie / 2)
    assert max(tie for _, _, tie in chance_of.values()) > 0.001
