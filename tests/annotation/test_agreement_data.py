"""Public votes of people: the alphas that are known of them, and the krippendorff package on the same votes."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import krippendorff
import numpy
import pytest
import torch

from annotation.agreement import AgreementReport, measure
from annotation.tasks import Task
from annotation.verdicts import Verdict
from rlhf.maths.agreement import Ratings, krippendorff_alpha
from rlhf.records import Message, Prompt

DATA = Path(__file__).resolve().parents[2] / "../shared/data"
PROMPT = Prompt(messages=(Message(role="user", content="left out"),))


def opened(name: str) -> Iterator[Any]:
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"{path.name} is not there")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from json.load(lines) if name.endswith(".json.gz") else map(json.loads, lines)


class Votes:
    """Tasks and verdicts, and each annotator's value of each unit for the oracle."""

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}
        self.verdicts: dict[tuple[str, str], Verdict] = {}
        self.choices: defaultdict[object, dict[str, float]] = defaultdict(dict)
        self.places: defaultdict[object, dict[str, float]] = defaultdict(dict)

    def add(self, task_id: str, responses: tuple[str, ...], annotator: str, ranks: tuple[int, ...]) -> None:
        order = tuple(range(len(responses)))
        self.tasks[task_id] = Task(id=task_id, prompt=PROMPT, responses=responses, models=(), gold=(), order=order, source="")
        self.verdicts[task_id, annotator] = Verdict(task_id=task_id, annotator=annotator, kind="submitted", ranks=ranks, order=order)
        for first, second in combinations(order, 2):
            self.choices[task_id, first, second][annotator] = float(numpy.sign(ranks[first] - ranks[second]))
        for index in order:
            self.places[task_id, index][annotator] = sum(rank < ranks[index] for rank in ranks) + 0.5 * (ranks.count(ranks[index]) - 1)

    def measured(self) -> AgreementReport:
        return measure(self.tasks, self.verdicts.values(), seed=0)


def oracle(units: dict[object, dict[str, float]], level: str) -> float:
    annotators = sorted({name for ratings in units.values() for name in ratings})
    table = numpy.array([[ratings.get(name, numpy.nan) for ratings in units.values()] for name in annotators])
    return krippendorff.alpha(table, level_of_measurement=level)


def pandalm() -> Votes:
    votes = Votes()
    for row in opened("pandalm_testset/testset-v1.json.gz"):
        for number in (1, 2, 3):
            votes.add(str(row["idx"]), ("one", "two"), f"annotator{number}", ((1, 1), (1, 2), (2, 1))[row[f"annotator{number}"]])
    return votes


def mt_bench() -> Votes:
    """The two models of a row come in either order; a task has them by name. One judge voted twice on a task: the later vote stands."""
    votes = Votes()
    for row in opened("mtbench_votes/human.jsonl.gz"):
        models = tuple(sorted((row["model_a"], row["model_b"])))
        winner = row["winner"]
        ranks = (1, 1) if winner == "tie" else (1, 2) if row[winner] == models[0] else (2, 1)
        votes.add(f"{row['question_id']}/{row['turn']}/{models}", models, row["judge"], ranks)
    return votes


def squality() -> Votes:
    votes = Votes()
    for row in opened("squality_human_eval/all-responses.jsonl.gz"):
        for number, systems in row["questions"].items():
            names = tuple(sorted(systems))
            for reviews in zip(*(systems[name]["reviews"] for name in names), strict=True):
                assert len({review["worker_id"] for review in reviews}) == 1
                ranks = tuple(review["overall-rank"] for review in reviews)
                votes.add(f"{row['passage-id']}/{number}", names, reviews[0]["worker_id"], ranks)
    return votes


def test_pandalm() -> None:
    votes = pandalm()
    overall = votes.measured().overall
    assert (overall.tasks, overall.annotators, overall.verdicts, overall.shared_pairs) == (999, 3, 2997, 999)
    assert overall.alpha and overall.rank_alpha
    assert overall.alpha.value == pytest.approx(0.864, abs=5e-4)
    assert overall.alpha.value == pytest.approx(oracle(votes.choices, "nominal"))
    assert overall.rank_alpha.value == pytest.approx(oracle(votes.places, "ordinal"))
    assert overall.same_choice
    assert overall.same_choice.value == pytest.approx((879 * 3 + 120) / (999 * 3))      # 879 unanimous, 120 two to one: 3 or 1 of 3 pairs


def test_squality() -> None:
    """0.439 is the nominal alpha of the choices between two systems: 100 questions, three systems, three reviews each."""
    votes = squality()
    overall = votes.measured().overall
    assert (overall.tasks, overall.verdicts, overall.shared_pairs) == (100, 300, 300)
    assert overall.alpha and overall.rank_alpha and overall.alpha_either_order
    assert overall.alpha.value == pytest.approx(0.439, abs=5e-4)
    assert overall.alpha.value == pytest.approx(oracle(votes.choices, "nominal"))
    assert overall.rank_alpha.value == pytest.approx(oracle(votes.places, "ordinal"))
    # Systems are listed by name, and people prefer what people wrote: the order tells who tends to win.
    assert overall.alpha_either_order.value > overall.alpha.value + 0.2


def test_mt_bench_by_choices() -> None:
    votes = mt_bench()
    report = votes.measured()
    overall = report.overall
    assert (overall.tasks, overall.annotators, overall.verdicts, overall.shared_pairs) == (1814, 65, 3354, 960)
    assert overall.alpha and overall.rank_alpha and overall.alpha_either_order
    assert overall.alpha.value == pytest.approx(oracle(votes.choices, "nominal"))
    assert overall.rank_alpha.value == pytest.approx(oracle(votes.places, "ordinal"))
    assert overall.alpha_either_order.value == pytest.approx(overall.alpha.value, abs=2e-3)     # neither name tends to win


def test_mt_bench_by_winners() -> None:
    """0.587 is the nominal alpha where a value is the name of the winning model, or tie: seven values, so that chance agrees less often."""
    winners: defaultdict[object, list[str]] = defaultdict(list)
    for row in opened("mtbench_votes/human.jsonl.gz"):
        unit = row["question_id"], row["turn"], *sorted((row["model_a"], row["model_b"]))
        winners[unit].append(row["winner"] if row["winner"] == "tie" else row[row["winner"]])
    names = sorted({winner for unit in winners.values() for winner in unit})
    rows = [(number, names.index(winner)) for number, unit in enumerate(winners.values()) for winner in unit]
    unit, value = torch.tensor(rows).unbind(1)
    assert len(rows) == 3355
    assert krippendorff_alpha(Ratings(unit, value.double()), level="nominal") == pytest.approx(0.587, abs=5e-4)
