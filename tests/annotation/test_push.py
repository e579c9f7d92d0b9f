"""Push: everything there exactly once, whatever the order, however often, and wherever it was interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from annotation.backend import Added, Sheet, now
from annotation.candidates import Reading, Reject
from annotation.cli_push import text_of
from annotation.home import Home
from annotation.memory import MemoryBackend
from annotation.project import Project, load_project, load_tasks
from annotation.push import Pushed, Wishes, mixed, plan, settle
from annotation.push import push as push_reading
from annotation.tasks import Candidates, ShownTask, make_task
from rlhf.errors import BackendError, ConfigError, DataError
from rlhf.records import Message, Prompt

TOO_LONG = Candidates(prompt=Prompt(messages=(Message(role="user", content="x"),) * 501), responses=("a", "b"), source="long.jsonl:7")
"""What the server refuses: more than 500 messages."""


def candidate(number: int, places: int = 2, *, models: tuple[str, ...] = (), gold: tuple[int, ...] = (), source: str = "") -> Candidates:
    return Candidates(prompt=Prompt.of_text(f"question {number}"), responses=tuple(f"{letter}{number}" for letter in "abcdefgh"[:places]),
                      models=models, gold=gold, source=source or f"file.jsonl:{number}")


def new_project(home: Path, **wishes: object) -> Project:
    return settle(Home(home), "week-48", Wishes(**wishes), workspace="preferences", guidelines="Be fair.").project  # type: ignore[arg-type]


def push(project: Project, backend: MemoryBackend, candidates: Sequence[Candidates], rejects: Sequence[Reject] = (), *,
         atomic: bool = False) -> Pushed:
    return push_reading(project, backend, Reading(tuple(candidates), tuple(rejects)), atomic=atomic)


def held(backend: MemoryBackend, project: Project) -> list[str]:
    return [task.id for sheet in project.sheets() for task in backend.shown(sheet)]


class Breaks(MemoryBackend):
    """A connection that breaks when so many tasks were taken, some of them perhaps without anybody knowing."""

    def __init__(self, after: int, *, unnoticed: int = 0) -> None:
        super().__init__()
        self.left, self.unnoticed = after, unnoticed

    def add(self, sheet: Sheet, tasks: Sequence[ShownTask]) -> Added:
        if len(tasks) > self.left:
            super().add(sheet, tasks[:self.left + self.unnoticed])
            raise BackendError("the connection broke")
        self.left -= len(tasks)
        return super().add(sheet, tasks)


def test_pushing_again_adds_nothing_and_keeps_responses(tmp_path: Path) -> None:
    project, backend = new_project(tmp_path), MemoryBackend()
    candidates = [candidate(number, 2 + number % 3) for number in range(30)]
    first = push(project, backend, candidates)
    assert (first.new, first.present, first.by_sheet) == (30, 0, {"week-48-k2": 10, "week-48-k3": 10, "week-48-k4": 10})
    project = load_project(Home(tmp_path), "week-48")
    sheet = project.sheet(2)
    backend.respond(sheet, backend.shown(sheet)[0].id, "ada", ranks=(2, 1))
    ledger, there = project.tasks_file.read_bytes(), held(backend, project)
    turned = [replace(each, responses=each.responses[::-1]) for each in reversed(candidates)]
    second = push(project, backend, turned)
    assert (second.new, second.present) == (0, 30)
    assert (project.tasks_file.read_bytes(), held(backend, project)) == (ledger, there)
    assert [answer.ranks for answer in backend.answers(sheet)] == [(2, 1)]


def test_the_same_task_twice_in_one_file_is_one(tmp_path: Path) -> None:
    project, backend = new_project(tmp_path), MemoryBackend()
    done = push(project, backend, [candidate(1), candidate(2), candidate(1)])
    assert (done.new, done.repeated) == (2, 1)
    assert len(load_tasks(project)) == 2


def test_what_rows_of_one_file_say_about_a_task_adds_up(tmp_path: Path) -> None:
    project = new_project(tmp_path)
    push(project, MemoryBackend(), [candidate(1, models=("m1", "m2")), candidate(1), candidate(1, gold=(2, 1))])
    task = load_tasks(project)[candidate(1).task_id]
    assert (task.models, task.gold) == (("m1", "m2"), (2, 1))


@settings(deadline=None)
@given(after=st.integers(0, 11), unnoticed=st.integers(0, 3), atomic=st.booleans())
def test_an_interrupted_push_is_continued(tmp_path_factory: pytest.TempPathFactory, after: int, unnoticed: int, atomic: bool) -> None:
    home = tmp_path_factory.mktemp("home")
    project, backend = new_project(home), Breaks(after, unnoticed=unnoticed)
    candidates = [candidate(number, 2 + number % 2) for number in range(12)]
    with pytest.raises(BackendError, match="broke"):
        push(project, backend, candidates, atomic=atomic)
    project = load_project(Home(home), "week-48")
    assert set(held(backend, project)) <= set(load_tasks(project)), "the server has a task that nobody can unblind"
    if atomic:
        assert held(backend, project) == []
    backend.left = 100
    done = push(project, backend, candidates, atomic=atomic)
    assert done.new + done.present == 12
    assert sorted(held(backend, project)) == sorted(load_tasks(project)) == sorted(each.task_id for each in candidates)


def test_one_bad_row_of_a_thousand_is_named_and_the_rest_goes_in(tmp_path: Path) -> None:
    project, backend = new_project(tmp_path), MemoryBackend()
    candidates = [candidate(number) for number in range(999)]
    done = push(project, backend, [*candidates[:500], TOO_LONG, *candidates[500:]])
    assert done.new == 999
    assert [(reject.where, reject.reason) for reject in done.rejects] == [("long.jsonl:7", "refused")]
    assert TOO_LONG.task_id not in load_tasks(project)
    assert "long.jsonl:7" in (project.folder / "rejects.jsonl").read_text()
    push(project, backend, candidates)
    assert not (project.folder / "rejects.jsonl").exists()


@pytest.mark.parametrize(("candidates", "rejects"), [
    ([candidate(2), TOO_LONG, candidate(3)], []),                                        # the server refuses one
    ([candidate(2)], [Reject("file.jsonl:9", "bad_json", "not JSON")]),                  # a line cannot be read
    ([candidate(2), candidate(1, gold=(2, 1))], []),                                     # gold ranks contradict those that are known
])
def test_atomic_means_all_or_nothing(tmp_path: Path, candidates: list[Candidates], rejects: list[Reject]) -> None:
    project, backend = new_project(tmp_path), MemoryBackend()
    push(project, backend, [candidate(1, gold=(1, 2))])
    project = load_project(Home(tmp_path), "week-48")
    backend.respond(project.sheet(2), candidate(1).task_id, "ada", ranks=(1, 1))
    before = load_tasks(project)
    with pytest.raises(DataError, match="nothing was pushed"):
        push(project, backend, [candidate(1), *candidates], rejects, atomic=True)
    assert held(backend, project) == [candidate(1).task_id]
    assert load_tasks(project) == before
    assert len(list(backend.answers(project.sheet(2)))) == 1


def test_nothing_usable_makes_no_project(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing was pushed: 1 bad_json"):
        push(new_project(tmp_path), MemoryBackend(), [], [Reject("file.jsonl:1", "bad_json", "not JSON")])
    assert Home(tmp_path).projects() == []


def test_what_is_learned_later_joins_the_task(tmp_path: Path) -> None:
    """Gold ranks and models come in the order of that row, which may be another one than the first row's."""
    project, backend = new_project(tmp_path), MemoryBackend()
    push(project, backend, [candidate(1)])
    turned = replace(candidate(1), responses=("b1", "a1"), models=("model of b", "model of a"), gold=(1, 2))
    done = push(project, backend, [turned])
    task = load_tasks(project)[candidate(1).task_id]
    assert (task.responses, task.models, task.gold) == (("a1", "b1"), ("model of a", "model of b"), (2, 1))
    assert (done.new, done.present, done.gold) == (0, 1, 1)
    assert task.shown() == make_task(candidate(1), seed=0).shown()


def test_what_contradicts_the_known_is_a_reject(tmp_path: Path) -> None:
    project, backend = new_project(tmp_path), MemoryBackend()
    push(project, backend, [candidate(1, models=("m1", "m2"))])
    done = push(project, backend, [candidate(1, models=("m2", "m1"), source="late:3"), candidate(2)])
    assert [(reject.where, reject.reason) for reject in done.rejects] == [("late:3", "conflict")]
    assert "contradict ('m1', 'm2') of the same prompt and responses in file.jsonl:1" in done.rejects[0].detail
    assert load_tasks(project)[candidate(1).task_id].models == ("m1", "m2")


def test_gold_items_are_spread_over_the_queue() -> None:
    ordinary, gold = [candidate(number) for number in range(900)], [candidate(number, gold=(1, 2)) for number in range(900, 1000)]
    order = list(plan([*ordinary, *gold], {}, seed=0).tasks.values())
    assert [task.source for task in order if not task.gold] == [f"file.jsonl:{number}" for number in range(900)]
    for start in range(0, 1000, 200):
        assert 8 <= sum(bool(task.gold) for task in order[start:start + 200]) <= 35
    assert list(mixed({task.id: task for task in reversed(order) if task.gold})) == [task.id for task in order if task.gold]


def test_gold_items_are_spread_over_the_queue_that_they_are_in() -> None:
    """Tasks of two and of four responses have a queue each, wherever the one kind stands in the files."""
    found = [candidate(number, 2) for number in range(300)] + [candidate(number, 4) for number in range(300, 400)]
    gold = [candidate(number, 4, gold=(1, 2, 3, 4)) for number in range(400, 420)]
    queue = [task for task in plan([*found, *gold], {}, seed=0).tasks.values() if len(task.responses) == 4]
    by_quarter = [sum(bool(task.gold) for task in queue[start:start + 30]) for start in range(0, 120, 30)]
    assert sum(by_quarter) == 20
    assert min(by_quarter) >= 1
    assert max(by_quarter) <= 10


def test_settings_that_conflict_are_said_and_those_that_may_change_are_announced(tmp_path: Path) -> None:
    push(new_project(tmp_path, confidence=True, overlap=2), MemoryBackend(), [candidate(1)])
    home = Home(tmp_path)
    with pytest.raises(ConfigError) as caught:
        settle(home, "week-48", Wishes(confidence=True, comment=True, reasons=("a", "b"), workspace="other"), workspace="w", guidelines="g")
    assert [problem.where for problem in caught.value.problems] == ["--workspace", "--reasons", "--comment"]
    same = settle(home, "week-48", Wishes(confidence=True, overlap=2, guidelines="Be fair."), workspace="w", guidelines="another default")
    assert same == (load_project(home, "week-48"), ())
    changed = settle(home, "week-48", Wishes(overlap=5, guidelines="Be kind."), workspace="w", guidelines="g")
    assert changed.project.overlap == 5
    assert [line.split()[0] for line in changed.changes] == ["overlap", "guidelines"]
    assert changed.project.guideline.version.startswith("v2-")


def test_a_change_reaches_every_sheet_of_the_project(tmp_path: Path) -> None:
    backend, home = MemoryBackend(), Home(tmp_path)
    push(new_project(tmp_path), backend, [candidate(1, 2), candidate(2, 4)])
    changed = settle(home, "week-48", Wishes(overlap=1, guidelines="Be kind."), workspace="w", guidelines="g").project
    push(changed, backend, [candidate(3, 2)])
    backend.respond(changed.sheet(4), candidate(2, 4).task_id, "ada", ranks=(1, 2, 3, 4))
    assert backend.progress(changed.sheet(4)).completed == 1
    assert load_project(home, "week-48").places == (2, 4)


def test_guidelines_hold_from_the_time_at_which_annotators_see_them(tmp_path: Path) -> None:
    """Settled before the responses are sampled, which may take hours, they are shown when the push reaches the server."""
    push(new_project(tmp_path), MemoryBackend(), [candidate(1)])
    settled = settle(Home(tmp_path), "week-48", Wishes(guidelines="Be kind."), workspace="w", guidelines="g").project
    meanwhile = now()
    push(settled, MemoryBackend(), [candidate(2)])
    project = load_project(Home(tmp_path), "week-48")
    assert [project.guideline_at(at)[:2] for at in (meanwhile, now())] == ["v1", "v2"]
    assert project.guidelines[0].since < meanwhile < project.guidelines[1].since


def test_guidelines_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin.md").write_bytes("# fair \xe9".encode("latin-1"))
    for name, why in (("latin.md", "byte 7 is not UTF-8"), ("absent.md", "No such file")):
        with pytest.raises(ConfigError, match=f"--guidelines .*{name} cannot be read .*{why}.*UTF-8"):
            text_of(tmp_path / name)
