"""Candidates -> tasks in the ledger -> tasks on the server, so that every one is there exactly once, whatever happens in between.

A task's id is a hash of what it shows. Its line in the ledger is on the disk before the task is sent, and the server takes no id twice:
pushing again adds what is missing and nothing else.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import NamedTuple, TypeVar

from rich.console import Console

from annotation.append_only import only_writer
from annotation.backend import Backend, Sheet, now
from annotation.candidates import Reading, Reject, count_reasons, write_rejects
from annotation.home import Home
from annotation.project import Project, add_to_ledger, load_project, load_tasks, next_guideline, save_project, take_back
from annotation.tasks import Candidates, Task, make_task
from rlhf.errors import BackendError, ConfigError, DataError, Problem
from rlhf.progress import progress

DEFAULT_OVERLAP = 3
SENT_AT_ONCE = 500
"""Tasks between two movements of the progress bar."""
REJECTS_FILE = "rejects.jsonl"
Known = TypeVar("Known", str, int)


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a push asks of its project. None: as the project has it, and the usual where it is new."""

    workspace: str | None = None
    overlap: int | None = None
    confidence: bool | None = None
    reasons: tuple[str, ...] | None = None
    comment: bool | None = None
    guidelines: str | None = None


class Settled(NamedTuple):
    project: Project
    """As it will be; not written down yet."""
    changes: tuple[str, ...]
    """What is different from now on, for people."""


def settle(home: Home, name: str, wishes: Wishes, *, workspace: str, guidelines: str) -> Settled:
    """The project that a push goes to. `workspace` and `guidelines` are those of a new project whose wishes leave them open.

    Raises ConfigError where the wishes contradict what the first push fixed: answers to other questions could not be compared.
    """
    if name not in home.projects():
        text = guidelines if wishes.guidelines is None else wishes.guidelines
        project = Project(folder=home.project(name), workspace=wishes.workspace or workspace,
                          overlap=DEFAULT_OVERLAP if wishes.overlap is None else wishes.overlap, confidence=bool(wishes.confidence),
                          reasons=wishes.reasons or (), comment=bool(wishes.comment),
                          guidelines=(next_guideline((), text),))
        return Settled(project, (f"new project {name}, guidelines {project.guideline.version}",))
    project = load_project(home, name)
    fixed = (("--workspace", wishes.workspace, project.workspace), ("--confidence", wishes.confidence, project.confidence),
             ("--reasons", wishes.reasons, project.reasons), ("--comment", wishes.comment, project.comment))
    problems = [Problem(option, f"the project has {_said(has)}, this push asks for {_said(wish)}") for option, wish, has in fixed
                if wish is not None and wish != has]
    if problems:
        raise ConfigError(f"project {name} asks its annotators other questions. Leave these options out, or start a project under another "
                          "name", problems)
    return _brought_up_to_date(project, wishes)


def _brought_up_to_date(project: Project, wishes: Wishes) -> Settled:
    changes = []
    changed = project
    if wishes.overlap is not None and wishes.overlap != project.overlap:
        changed = replace(changed, overlap=wishes.overlap)
        changes.append(f"overlap {project.overlap} -> {wishes.overlap}; it holds for all tasks, those already answered as well")
    if wishes.guidelines is not None:
        changed = changed.with_guidelines(wishes.guidelines)
        if changed.guideline != project.guideline:
            changes.append(f"guidelines {project.guideline.version} -> {changed.guideline.version}; verdicts from now on carry the new one")
    return Settled(changed, tuple(changes))


def _said(value: object) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


class Plan(NamedTuple):
    """What a push does to the ledger and to the server."""

    tasks: dict[str, Task]
    """To be there afterwards, in the order in which annotators get them."""
    entries: list[Task]
    """Lines for the ledger: tasks that it lacks, and tasks of which more is known now."""
    fresh: frozenset[str]
    """Ids that the ledger lacks."""
    repeated: int
    """Candidates that say what earlier ones of the same push say."""
    rejects: list[Reject]


def plan(candidates: Iterable[Candidates], ledger: Mapping[str, Task], *, seed: int) -> Plan:
    """One task for the same prompt and responses, in whatever order they are given."""
    tasks: dict[str, Task] = {}
    entries: dict[str, Task] = {}
    rejects: list[Reject] = []
    repeated = 0
    for candidate in candidates:
        task = make_task(candidate, seed=seed)
        repeated += task.id in tasks
        known = tasks.get(task.id) or ledger.get(task.id)
        if known is not None:
            try:
                task, told = told_more(known, task), known
            except DataError as error:
                rejects.append(Reject(candidate.source, "conflict", str(error)))
                continue
            if task != told:
                entries[task.id] = task
        else:
            entries[task.id] = task
        tasks[task.id] = task
    return Plan(mixed(tasks), list(entries.values()), frozenset(tasks.keys() - ledger.keys()), repeated, rejects)


def told_more(known: Task, again: Task) -> Task:
    """The known task with what another candidate adds: who wrote the responses, their gold ranks.

    The order of the responses stays: verdicts may refer to it. Raises DataError where the two contradict each other.
    """
    models = _reordered(again.models, again.responses, known.responses)
    gold = _reordered(again.gold, again.responses, known.responses)
    return replace(known, models=_joined("models", known.models, models, known), gold=_joined("gold ranks", known.gold, gold, known))


def _reordered(values: tuple[Known, ...], given: Sequence[str], wanted: Sequence[str]) -> tuple[Known, ...]:
    """Values of the responses in their given order -> in the wanted one; nothing where there are none."""
    return tuple(values[given.index(text)] for text in wanted) if values else ()


def _joined(what: str, known: tuple[Known, ...], told: tuple[Known, ...], task: Task) -> tuple[Known, ...]:
    if known and told and known != told:
        raise DataError(f"{what} {told} contradict {known} of the same prompt and responses in {task.source} (task {task.id}); the first "
                        "ones stay")
    return known or told


def mixed(tasks: Mapping[str, Task]) -> dict[str, Task]:
    """Tasks in the order given, with the gold items spread by their hashes among those of as many responses, which share a queue with
    them, so that no place in the queue gives them away."""
    ordinary: defaultdict[int, list[Task]] = defaultdict(list)
    for task in tasks.values():
        if not task.gold:
            ordinary[len(task.responses)].append(task)
    places = {task.id: (index + 0.5) / len(queue) for queue in ordinary.values() for index, task in enumerate(queue)}
    places |= {task.id: int.from_bytes(sha256(f"gold/{task.id}".encode()).digest()[:6], "big") / 2.0**48
               for task in tasks.values() if task.gold}
    return {task_id: tasks[task_id] for task_id in sorted(places, key=lambda task_id: (places[task_id], task_id))}


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """What a push did. Every candidate and every line that was none is one of new, present, repeated or rejected."""

    new: int
    present: int
    repeated: int
    rejects: tuple[Reject, ...]
    gold: int
    """Gold items among the new and present ones."""
    by_sheet: Mapping[str, int]
    """The new and present ones by data set."""


def push(project: Project, backend: Backend, reading: Reading[Candidates], *, atomic: bool = False,
         console: Console | None = None) -> Pushed:
    """Send the tasks that are missing, and write down what was not used in PROJECT/rejects.jsonl.

    atomic: all or nothing. A reject, or a task that the server refuses, raises DataError, and what this call added is taken back.

    Raises DataError where nothing can be used, BackendError where the server cannot be used, StorageError where another process pushes.
    """
    project.folder.mkdir(parents=True, exist_ok=True)
    with only_writer(project.folder):
        ledger = load_tasks(project)
        planned = plan(reading.found, ledger, seed=project.seed)
        unused = [*reading.rejects, *planned.rejects]
        if not planned.tasks or (atomic and unused):
            raise _nothing_pushed(project, unused)
        project = project.with_places(len(task.responses) for task in planned.tasks.values())
        for sheet in project.sheets():
            backend.ensure_sheet(sheet)
        save_project(project.announced(at=now()))
        add_to_ledger(project, planned.entries)
        sending = Sending(project, backend, planned)
        try:
            sending.run(console)
            if atomic and sending.refused:
                raise _nothing_pushed(project, sending.rejects())
        except (DataError, BackendError, KeyboardInterrupt):
            if atomic:
                sending.undo()
            raise
        take_back(project, sending.refused)
        unused += sending.rejects()
        _note(project, unused)
        accepted = [task for task in planned.tasks.values() if task.id not in sending.refused]
        return Pushed(new=len(sending.new), present=sending.present, repeated=planned.repeated + reading.repeated, rejects=tuple(unused),
                      gold=sum(bool(task.gold) for task in accepted),
                      by_sheet=dict(sorted(Counter(project.sheet(len(task.responses)).name for task in accepted).items())))


class Sending:
    """The tasks of one push on their way, and what became of them so far."""

    def __init__(self, project: Project, backend: Backend, planned: Plan) -> None:
        self.project, self.backend, self.planned = project, backend, planned
        self.new: list[str] = []
        self.present = 0
        self.refused: dict[str, str] = {}
        """Task id -> what the server says against it."""

    def run(self, console: Console | None) -> None:
        with progress(console, "push", len(self.planned.tasks)) as bar:
            for sheet, tasks in self._by_sheet():
                for start in range(0, len(tasks), SENT_AT_ONCE):
                    part = tasks[start:start + SENT_AT_ONCE]
                    added = self.backend.add(sheet, [task.shown() for task in part])
                    self.new += added.new
                    self.present += added.present
                    self.refused |= dict(added.refused)
                    bar.advance(len(part))

    def rejects(self) -> list[Reject]:
        return [Reject(self.planned.tasks[task_id].source, "refused", why) for task_id, why in self.refused.items()]

    def undo(self) -> None:
        """Take back what this push added, from the server and from the ledger. What was there before stays, with its responses."""
        added = self.planned.fresh | set(self.new)
        try:
            for sheet, tasks in self._by_sheet():
                self.backend.remove(sheet, [task.id for task in tasks if task.id in added])
        except BackendError as error:
            raise BackendError(f"the push failed, and so did taking back what it had added: {error}\nSome of its tasks may be on the "
                               "server. Push the same again: either all of it will be there, or none.") from error
        take_back(self.project, dict.fromkeys(sorted(added), "an atomic push failed"))

    def _by_sheet(self) -> list[tuple[Sheet, list[Task]]]:
        sizes = sorted({len(task.responses) for task in self.planned.tasks.values()})
        return [(self.project.sheet(size), [task for task in self.planned.tasks.values() if len(task.responses) == size]) for size in sizes]


def _nothing_pushed(project: Project, unused: Sequence[Reject]) -> DataError:
    _note(project, unused)
    first = "".join(f"\n  {reject.where}: {reject.reason}: {reject.detail}" for reject in unused[:10])
    more = f"\n  and {len(unused) - 10} more, all in {project.folder / REJECTS_FILE}" if len(unused) > 10 else ""
    reasons = ", ".join(f"{count} {reason}" for reason, count in count_reasons(unused).items()) or "no rows at all"
    return DataError(f"nothing was pushed: {reasons}{first}{more}")


def _note(project: Project, unused: Sequence[Reject]) -> None:
    """rejects.jsonl is about the last push; there is none if everything was used."""
    path = project.folder / REJECTS_FILE
    if unused:
        write_rejects(unused, path)
    else:
        path.unlink(missing_ok=True)
