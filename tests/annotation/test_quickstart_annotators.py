"""The quickstart's annotators: their true figures in closed form, and a round of annotation with the real server."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from annotation.home import Home
from annotation.project import load_project, load_tasks
from annotation.verdicts import VerdictLog

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "quickstart"
RANKINGS = ((1, 2, 3, 4), (1, 1, 2, 3), (1, 2, 2, 2), (1, 1, 1, 1), (2, 1, 2, 1))
"""In places 1 to 4, before they are shuffled."""


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"quickstart_{name}", RECIPE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


simulate, grammar = load("simulate"), load("grammar")


def test_closed_forms_by_hand() -> None:
    """b = 1/4 and s = 4/5: the true ranking comes with 3/4 * 4/5 = 3/5."""
    annotator = simulate.SimulatedAnnotator(name="x", skill=0.8, position_bias=0.25)
    assert annotator.truthful == pytest.approx(0.6)
    assert annotator.accuracy(tied=0) == pytest.approx(0.8)      # 3/5 + 2/5 / 2
    assert annotator.accuracy(tied=1) == pytest.approx(0.6)
    assert annotator.accuracy(tied=0.5) == pytest.approx(0.7)
    assert annotator.preference_for_the_first_place(tied=0) == pytest.approx(0.125)
    assert annotator.preference_for_the_first_place(tied=1) == pytest.approx(0.125 / 0.4)      # its ties are no choices


@pytest.mark.parametrize("annotator", [*simulate.TEAM, simulate.SimulatedAnnotator(name="clicker", skill=0.0, position_bias=1.0)],
                         ids=lambda annotator: annotator.name)
def test_what_an_annotator_does_has_the_closed_form(annotator: object) -> None:
    rng = random.Random(7)
    pairs = tied = right = strict = first = 0
    for number in range(6000):
        truth = rng.sample(rng.choice(RANKINGS), 4)
        given = annotator.ranking(truth, random.Random(number))  # type: ignore[attr-defined]
        for one, other in combinations(range(4), 2):
            choice, correct = ((ranks[one] > ranks[other]) - (ranks[one] < ranks[other]) for ranks in (given, truth))
            pairs, tied, right = pairs + 1, tied + (correct == 0), right + (choice == correct)
            strict, first = strict + (choice != 0), first + (choice == -1)
    # Six choices of a task go together: their share has a standard error of 0.5 / sqrt(6000) at most.
    assert right / pairs == pytest.approx(annotator.accuracy(tied=tied / pairs), abs=4 * 0.5 / 6000 ** 0.5)  # type: ignore[attr-defined]
    bias = annotator.preference_for_the_first_place(tied=tied / pairs)  # type: ignore[attr-defined]
    assert first / strict - 0.5 == pytest.approx(bias, abs=4 * 0.5 / 6000 ** 0.5)


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=8), st.integers(0, 99), st.permutations([1, 2, 3, 4]))
def test_the_same_task_is_answered_the_same_way(task: str, seed: int, truth: list[int]) -> None:
    for annotator in simulate.TEAM:
        assert annotator.reply(task, truth, seed=seed) == annotator.reply(task, truth, seed=seed)


def test_some_tasks_are_discarded_and_some_left_half_done() -> None:
    annotator = simulate.SimulatedAnnotator(name="x", skill=1.0, discards=0.1, drafts=0.05)
    replies = [annotator.reply(f"task {number}", (2, 1), seed=0) for number in range(4000)]
    found = Counter(reply.status for reply in replies)
    assert found["discarded"] == pytest.approx(400, abs=4 * 19) and found["draft"] == pytest.approx(200, abs=4 * 14)
    assert {reply.ranks for reply in replies} == {(2, 1), (2,), ()}


@pytest.fixture(scope="module")
def finished(server_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of annotate.py after a round on 14 prompts and 6 gold items, with an untrained policy."""
    made, folder = tmp_path_factory.mktemp("prepared"), tmp_path_factory.mktemp("annotate")
    for script, arguments in (
            ("prepare.py", [made, "--prompts", 100, "--unranked", 14, "--gold", 6, "--test", 2, "--hidden", 16, "--layers", 1]),
            ("annotate.py", [folder, "--policy", made / "model", "--prompts", made / "prompts.jsonl", "--gold", made / "gold.jsonl",
                             "--responses", 3, "--seed", 5])):
        done = subprocess.run([sys.executable, str(RECIPE / script), *map(str, arguments)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_what_was_said_is_what_was_pulled(finished: Path) -> None:
    """Each verdict, put back by place, is the annotator's reply to what the page showed, computed again here."""
    project = load_project(Home(finished / "home"), "quickstart")
    tasks, verdicts = load_tasks(project), list(VerdictLog(project.verdicts_file).current())
    team = {annotator.name: annotator for annotator in simulate.TEAM}
    for verdict in verdicts:
        task = tasks[verdict.task_id]
        shown = [task.responses[index] for index in task.order]
        faults = [len(grammar.faults(task.prompt.messages[0].content, response)) for response in shown]
        truth = [sorted(set(faults)).index(count) + 1 for count in faults]
        reply = team[verdict.annotator].reply(task.id, truth, seed=5)
        assert reply.status == verdict.kind
        assert reply.ranks == tuple(verdict.ranks[index] for index in task.order if verdict.ranks)
    votes = Counter(verdict.task_id for verdict in verdicts if verdict.kind == "submitted")
    assert sorted(votes) == sorted(tasks) and min(votes.values()) >= 3
    assert len(tasks) == 20 and sum(bool(task.gold) for task in tasks.values()) == 6


def test_records_come_from_the_prompts_and_never_from_gold_items(finished: Path) -> None:
    tasks = load_tasks(load_project(Home(finished / "home"), "quickstart")).values()
    rows = [json.loads(line) for file in (finished / "export").rglob("rankings.jsonl") for line in file.read_text().splitlines()]
    recorded = {row["prompt"]["messages"][0]["content"] for row in rows}
    assert recorded and recorded <= {task.prompt.messages[0].content for task in tasks if not task.gold}


def test_the_short_version_has_everybody_beside_the_truth(finished: Path) -> None:
    content = json.loads((finished / "annotation.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in content["annotators"]] == [annotator.name for annotator in simulate.TEAM]
    assert content["overall"]["tasks"] == 20 and content["page"] == "agreement.html"
    gold = 0
    for row, annotator in zip(content["annotators"], simulate.TEAM, strict=True):
        assert 0 < row["figures"]["skill"]["true"] < annotator.accuracy(tied=0)      # there are ties in a policy's responses
        if "gold" in row["figures"]:
            gold += 1
            assert row["figures"]["gold"]["true"] == pytest.approx(annotator.accuracy(tied=0))
    assert gold >= 3      # each of six items goes to three annotators
    assert (finished / "agreement.html").is_file()
