"""What an annotation backend must do. `argilla.py` does it with a server, `memory.py` in memory; both pass the same tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, NamedTuple, Protocol

from annotation.tasks import ShownTask

Status = Literal["submitted", "draft", "discarded"]


def utc(moment: datetime) -> str:
    """2026-12-01T09:30:00.000000Z: all of one width, so that the order of the texts is the order of the times."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def now() -> str:
    """This machine's time, as `utc` writes it."""
    return utc(datetime.now(UTC))


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """A data set of the backend: tasks with one number of responses, shown with one set of questions."""

    name: str
    """NAME-k2, NAME-k4, ...: a ranking question has a fixed number of options, so each number has its own sheet."""
    places: int
    workspace: str
    guidelines: str
    """Markdown."""
    min_submitted: int
    """A task leaves the queues of the others when so many annotators have submitted; a floor, not a limit."""
    confidence: bool = False
    reasons: tuple[str, ...] = ()
    """Labels to choose from; empty: not asked."""
    comment: bool = False


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A response as the backend holds it."""

    response_id: str
    task_id: str
    annotator: str
    status: Status
    ranks: tuple[int, ...]
    """By place, as stored. Empty where none are stored; drafts may rank only some places, and then it is empty, too."""
    confidence: int | None
    reason: str | None
    comment: str | None
    inserted_at: str
    updated_at: str
    """As `utc` writes them; of the server's clock."""


class Refused(NamedTuple):
    task_id: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Added:
    """What became of tasks that were sent: `new`, `present` and `refused` are all of them."""

    new: tuple[str, ...]
    """Ids of those that were certainly not there before."""
    present: int
    """Were there already, and are as they were; their responses, too."""
    refused: tuple[Refused, ...]


@dataclass(frozen=True, kw_only=True)
class SheetProgress:
    tasks: int
    completed: int
    """Tasks with at least min_submitted submitted responses."""
    by_annotator: Mapping[str, Mapping[Status, int]] = field(default_factory=dict)


class Backend(Protocol):
    """Raises BackendError where the backend cannot be reached, refuses the credentials, or answers what it should not."""

    def ensure_sheet(self, sheet: Sheet) -> None:
        """Create it, or check that it is there with the same places and questions; guidelines and min_submitted are brought up to date.

        Raises ConfigError where it is there with others.
        """

    def add(self, sheet: Sheet, tasks: Sequence[ShownTask]) -> Added:
        """Send tasks in batches; the same id twice is one task. What one batch refuses does not stop the rest."""

    def remove(self, sheet: Sheet, task_ids: Sequence[str]) -> int:
        """Take tasks back (an atomic push that failed). Returns how many were there."""

    def answers(self, sheet: Sheet, *, after: str | None = None) -> Iterator[Answer]:
        """Every response of every annotator. With `after`, at least those stored after that time; the backend may give more."""

    def progress(self, sheet: Sheet) -> SheetProgress:
        """Counts, as the backend has them."""

    def close(self) -> None:
        """Let go of connections."""
