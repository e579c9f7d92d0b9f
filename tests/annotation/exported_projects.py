"""Tasks and verdicts for tests of the export: small ones by hand, and those of public data sets."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from annotation.export import Export, ExportSettings, Policy, make_export
from annotation.tasks import Candidates, Task, make_task
from annotation.verdicts import Verdict
from rlhf.records import Prompt

DATA = Path(__file__).resolve().parents[2] / "../shared/data"


def task(prompt: str, *responses: str, gold: Sequence[int] = ()) -> Task:
    return make_task(Candidates(prompt=Prompt.of_text(prompt), responses=responses, gold=tuple(gold)), seed=0)


def verdict(task: Task, annotator: str, ranks: Sequence[int], guideline: str = "v1") -> Verdict:
    """A vote; ranks in the order of the task's responses."""
    return Verdict(task_id=task.id, annotator=annotator, kind="submitted", ranks=tuple(ranks), order=task.order, guideline=guideline)


def votes(task: Task, *ballots: Sequence[int]) -> list[Verdict]:
    """Of annotators ann0, ann1, ..."""
    return [verdict(task, f"ann{number}", ranks) for number, ranks in enumerate(ballots)]


def exported(tasks: Iterable[Task], verdicts: Iterable[Verdict], policy: Policy = "majority", *, min_votes: int = 1,
             **settings: Any) -> Export:
    return make_export({task.id: task for task in tasks}, verdicts, ExportSettings(policy=policy, min_votes=min_votes, **settings),
                       project="week-48")


def rows_of(name: str) -> list[dict[str, Any]]:
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"{name} is not here")
    text = gzip.decompress(path.read_bytes()).decode("utf-8")
    return json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]


Given = tuple[list[Task], list[Verdict]]
PANDALM = {0: (1, 1), 1: (1, 2), 2: (2, 1)}


def pandalm() -> Given:
    """A task a row, with texts that stand for the real ones, which are sometimes empty or the same."""
    rows = rows_of("pandalm_testset/testset-v1.json.gz")
    tasks = [task(f"row {row['idx']}", "response 1", "response 2") for row in rows]
    return tasks, [verdict(item, column, PANDALM[row[column]]) for item, row in zip(tasks, rows, strict=True)
                   for column in ("annotator1", "annotator2", "annotator3")]


def mt_bench() -> Given:
    """A task for each question, turn and unordered pair of models. Of a judge who voted twice the first vote stands."""
    tasks: dict[tuple[object, ...], Task] = {}
    verdicts: dict[tuple[str, str], Verdict] = {}
    for row in rows_of("mtbench_votes/human.jsonl.gz"):
        models = sorted((row["model_a"], row["model_b"]))
        key = (row["question_id"], row["turn"], *models)
        item = tasks.setdefault(key, task(f"question {row['question_id']}, turn {row['turn']}", *models))
        better = {"model_a": row["model_a"], "model_b": row["model_b"], "tie": None}[row["winner"]]
        ranks = (1, 1) if better is None else (1, 2) if better == models[0] else (2, 1)
        verdicts.setdefault((item.id, row["judge"]), verdict(item, row["judge"], ranks))
    return list(tasks.values()), list(verdicts.values())


def squality() -> Given:
    """A task for each of 100 questions, ranked by three workers."""
    tasks, verdicts = [], []
    for number, row in enumerate(rows_of("squality_human_eval/rankings_with_question.jsonl.gz")):
        systems = list(row["responses"])
        tasks.append(task(f"question {number}", *systems))
        ranks: dict[str, Mapping[str, int]] = {}
        for review in row["reviews"]:
            ranks[review["worker_id"]] = {**ranks.get(review["worker_id"], {}), review["system"]: review["overall-rank"]}
        verdicts += [verdict(tasks[-1], worker, [given[system] for system in systems]) for worker, given in ranks.items()]
    return tasks, verdicts
