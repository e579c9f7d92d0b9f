"""A project: one round of annotation, as a folder. Its settings, every version of its guidelines, and the ledger of its tasks.

`project.json` is replaced as a whole; `tasks.jsonl` only grows. A task is in the ledger before it is sent anywhere: who wrote which
response, and in what order it is shown, is known here alone. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from annotation.append_only import append_entries, read_entries
from annotation.backend import Sheet
from annotation.home import PROJECT_FILE, TASKS_FILE, VERDICTS_FILE, Home
from annotation.tasks import FEWEST, MOST, Task
from rlhf.errors import ConfigError, DataError
from rlhf.records import Message, Prompt
from rlhf.whole_files import replace_file

LONGEST_GUIDELINES = 9_900
"""Characters. Argilla keeps 10,000; the line that names the version needs some."""


@dataclass(frozen=True, kw_only=True)
class Guideline:
    """A version of the text that annotators read."""

    version: str
    """v1-1a2b3c4d: its number, and how the SHA-256 of the text begins."""
    since: str
    """When it was put before the annotators, as `backend.utc`; empty before that. It holds until the next one."""
    text: str
    """Markdown."""

    @property
    def shown(self) -> str:
        """The text with its version below, so that annotators can tell which one they read."""
        return f"{self.text.rstrip()}\n\n*Guidelines {self.version}*\n"


def next_guideline(earlier: tuple[Guideline, ...], text: str, *, since: str = "") -> Guideline:
    """The version that follows. Raises ConfigError for a text that cannot be shown."""
    if not text.strip():
        raise ConfigError("the guidelines are empty; annotators need to know what better means")
    if len(text) > LONGEST_GUIDELINES:
        raise ConfigError(f"the guidelines have {len(text)} characters; Argilla shows up to {LONGEST_GUIDELINES}. Shorten them, or link to "
                          "the long text")
    return Guideline(version=f"v{len(earlier) + 1}-{hashlib.sha256(text.encode()).hexdigest()[:8]}", since=since, text=text)


@dataclass(frozen=True, kw_only=True)
class Project:
    """Settings are fixed by the first push, except for the guidelines and the overlap."""

    folder: Path
    workspace: str
    overlap: int
    """Annotators that must submit before a task leaves the queues of the others; a floor, not a limit."""
    confidence: bool = False
    """Whether annotators are asked how sure they are, from 1 to 5."""
    reasons: tuple[str, ...] = ()
    """Labels to choose a reason from; empty: not asked."""
    comment: bool = False
    """Whether there is a box for a comment."""
    seed: int = 0
    """Of the orders in which responses are shown."""
    places: tuple[int, ...] = ()
    """Numbers of responses for which there are tasks, ascending: each has a sheet."""
    guidelines: tuple[Guideline, ...]
    """The last one holds."""
    schema: Literal["project/1"] = "project/1"

    def __post_init__(self) -> None:
        if self.overlap < 1:
            raise ConfigError(f"overlap must be at least 1 annotator a task, got {self.overlap}")
        if len(set(self.reasons)) != len(self.reasons) or any(not reason.strip() for reason in self.reasons):
            raise ConfigError(f"reasons must be different and not empty, got {', '.join(map(repr, self.reasons))}")
        if len(self.reasons) == 1:
            raise ConfigError(f"one reason ({self.reasons[0]}) is no choice; name two or more, or none")
        if not self.guidelines:
            raise ConfigError(f"project {self.name} has no guidelines")

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def tasks_file(self) -> Path:
        return self.folder / TASKS_FILE

    @property
    def verdicts_file(self) -> Path:
        return self.folder / VERDICTS_FILE

    @property
    def guideline(self) -> Guideline:
        """The one that holds now."""
        return self.guidelines[-1]

    def guideline_at(self, time: str) -> str:
        """Version that was shown at a time as `backend.utc` writes it. Before the first one held, it is the first."""
        held = [guideline for guideline in self.guidelines if guideline.since <= time]
        return (held[-1] if held else self.guidelines[0]).version

    def sheet(self, places: int) -> Sheet:
        """The data set of the tasks with so many responses: NAME-k2, NAME-k4."""
        if not FEWEST <= places <= MOST:
            raise ConfigError(f"a task has {FEWEST} to {MOST} responses, got {places}")
        return Sheet(name=f"{self.name}-k{places}", places=places, workspace=self.workspace, guidelines=self.guideline.shown,
                     min_submitted=self.overlap, confidence=self.confidence, reasons=self.reasons, comment=self.comment)

    def sheets(self) -> list[Sheet]:
        """One for each number of responses that the project has tasks with."""
        return [self.sheet(places) for places in self.places]

    def with_guidelines(self, text: str, *, since: str = "") -> Project:
        """The project under another text; itself where it is the text that holds already."""
        if text == self.guideline.text:
            return self
        return replace(self, guidelines=(*self.guidelines, next_guideline(self.guidelines, text, since=since)))

    def announced(self, *, at: str) -> Project:
        """The project once its guidelines are before the annotators: a version that was new until then holds from that time."""
        return replace(self, guidelines=tuple(replace(guideline, since=guideline.since or at) for guideline in self.guidelines))

    def with_places(self, places: Iterable[int]) -> Project:
        return replace(self, places=tuple(sorted({*self.places, *places})))


def save_project(project: Project) -> None:
    """Write project.json as a whole, making the folder where it is new."""
    project.folder.mkdir(parents=True, exist_ok=True)
    values = {name: value for name, value in asdict(project).items() if name != "folder"}
    replace_file(project.folder / PROJECT_FILE, json.dumps(values, indent=2, ensure_ascii=True) + "\n")


def load_project(home: Home, name: str) -> Project:
    """Raises ConfigError where the home has no such project, DataError where its file cannot be read."""
    folder = home.project(name)
    path = folder / PROJECT_FILE
    if not path.is_file():
        known = ", ".join(home.projects()) or "none yet"
        raise ConfigError(f"{home.folder} has no project {name} (known: {known}). `annotation push {name} CANDIDATES.jsonl` makes one; "
                          "--home names another folder.")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        lists = {"reasons": tuple(values["reasons"]), "places": tuple(values["places"]),
                 "guidelines": tuple(Guideline(**guideline) for guideline in values["guidelines"])}
        return Project(folder=folder, **(values | lists))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read as a project: {error}. Restore it from a backup (`annotation restore`).") from error


# The ledger of tasks

def load_tasks(project: Project) -> dict[str, Task]:
    """Every task that was pushed and not taken back, by id, in the order of the pushes.

    A later line about a task tells more about it (who wrote what, gold ranks) and replaces the earlier one; one with `taken_back` ends it.
    """
    tasks: dict[str, Task] = {}
    for number, values in read_entries(project.tasks_file):
        try:
            if "taken_back" in values:
                tasks.pop(values["id"], None)
            else:
                tasks[values["id"]] = _task_of(values)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{project.tasks_file}:{number} is no task: {type(error).__name__} {error}. Restore the file from a backup "
                            "(`annotation restore`).") from error
    return tasks


def add_to_ledger(project: Project, tasks: Iterable[Task]) -> None:
    """Keep tasks, on the disk, before they are sent."""
    append_entries(project.tasks_file, map(_entry_of, tasks))


def take_back(project: Project, reasons: Mapping[str, str]) -> None:
    """Task id -> why it is no task of this project after all: the server refused it, or an atomic push failed."""
    append_entries(project.tasks_file, _taken_back(reasons))


def _taken_back(reasons: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for task_id, why in reasons.items():
        yield {"schema": "task/1", "id": task_id, "taken_back": why}


def _entry_of(task: Task) -> dict[str, Any]:
    return {"schema": "task/1", "id": task.id, "prompt": [[message.role, message.content] for message in task.prompt.messages],
            "responses": task.responses, "models": task.models, "gold": task.gold, "order": task.order, "source": task.source}


def _task_of(values: Mapping[str, Any]) -> Task:
    if values["schema"] != "task/1":
        raise DataError(f"schema {values['schema']!r} is not task/1; it was written by another version")
    return Task(id=values["id"], prompt=Prompt(messages=tuple(Message(role=role, content=content) for role, content in values["prompt"])),
                responses=tuple(values["responses"]), models=tuple(values["models"]), gold=tuple(values["gold"]),
                order=tuple(values["order"]), source=values["source"])
