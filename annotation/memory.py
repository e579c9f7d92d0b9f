"""A backend in memory, for tests and dry runs: it keeps the promises of annotation.backend as Argilla does, without a server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from uuid import uuid4

from annotation.backend import Added, Answer, Refused, Sheet, SheetProgress, Status, now
from annotation.tasks import ShownTask
from rlhf.errors import BackendError, ConfigError

MOST_MESSAGES = 500


@dataclass
class Stored:
    """A sheet and what is in it."""

    sheet: Sheet
    tasks: dict[str, ShownTask] = field(default_factory=dict)
    answers: dict[tuple[str, str], Answer] = field(default_factory=dict)
    """By task and annotator."""


class MemoryBackend:
    """Implements annotation.backend.Backend; `respond` and `delete_response` are what annotators do."""

    def __init__(self) -> None:
        self._stored: dict[str, Stored] = {}

    def close(self) -> None:
        """There is no connection; what is stored stays."""

    def ensure_sheet(self, sheet: Sheet) -> None:
        stored = self._stored.setdefault(sheet.name, Stored(sheet))
        if replace(stored.sheet, guidelines=sheet.guidelines, min_submitted=sheet.min_submitted) != sheet:
            raise ConfigError(f"the sheet {sheet.name} has other places or questions: there {stored.sheet}, here {sheet}")
        stored.sheet = sheet

    def add(self, sheet: Sheet, tasks: Sequence[ShownTask]) -> Added:
        stored = self._of(sheet)
        refused = tuple(Refused(task.id, why) for task in tasks if (why := refusal(task)))
        accepted = {task.id: task for task in tasks if not refusal(task)}
        new = tuple(task_id for task_id in accepted if task_id not in stored.tasks)
        stored.tasks |= {task_id: accepted[task_id] for task_id in new}
        return Added(new=new, present=len(tasks) - len(new) - len(refused), refused=refused)

    def remove(self, sheet: Sheet, task_ids: Sequence[str]) -> int:
        stored = self._of(sheet)
        gone = [task_id for task_id in dict.fromkeys(task_ids) if stored.tasks.pop(task_id, None)]
        stored.answers = {key: answer for key, answer in stored.answers.items() if key[0] not in gone}
        return len(gone)

    def answers(self, sheet: Sheet, *, after: str | None = None) -> Iterator[Answer]:
        for answer in list(self._of(sheet).answers.values()):
            if after is None or answer.updated_at >= after:
                yield answer

    def progress(self, sheet: Sheet) -> SheetProgress:
        stored = self._of(sheet)
        by_annotator: dict[str, dict[Status, int]] = {}
        votes = dict.fromkeys(stored.tasks, 0)
        for answer in stored.answers.values():
            counts = by_annotator.setdefault(answer.annotator, {"submitted": 0, "draft": 0, "discarded": 0})
            counts[answer.status] += 1
            votes[answer.task_id] += answer.status == "submitted"
        return SheetProgress(tasks=len(stored.tasks), completed=sum(count >= stored.sheet.min_submitted for count in votes.values()),
                             by_annotator=by_annotator)

    def shown(self, sheet: Sheet) -> list[ShownTask]:
        """What annotators can see, in the order in which it came."""
        return list(self._of(sheet).tasks.values())

    def respond(self, sheet: Sheet, task_id: str, annotator: str, status: Status = "submitted", ranks: Sequence[int] = (), *,
                confidence: int | None = None, reason: str | None = None, comment: str | None = None) -> Answer:
        """Store or change an annotator's response. Raises BackendError for what no annotator could send."""
        stored = self._of(sheet)
        if task_id not in stored.tasks or (status == "submitted" and len(ranks) != sheet.places):
            raise BackendError(f"no response of {len(ranks)} ranks to task {task_id!r} of {sheet.name} can be {status}")
        moment = now()
        earlier = stored.answers.get((task_id, annotator))
        answer = Answer(response_id=earlier.response_id if earlier else str(uuid4()), task_id=task_id, annotator=annotator, status=status,
                        ranks=tuple(ranks) if len(ranks) == sheet.places else (), confidence=confidence, reason=reason, comment=comment,
                        inserted_at=earlier.inserted_at if earlier else moment, updated_at=moment)
        stored.answers[task_id, annotator] = answer
        return answer

    def delete_response(self, sheet: Sheet, task_id: str, annotator: str) -> None:
        del self._of(sheet).answers[task_id, annotator]

    def _of(self, sheet: Sheet) -> Stored:
        if sheet.name not in self._stored:
            raise BackendError(f"there is no sheet {sheet.name}; push makes it")
        return self._stored[sheet.name]


def refusal(task: ShownTask) -> str:
    """Why Argilla would not take a task; empty where it would."""
    if len(task.prompt.messages) > MOST_MESSAGES:
        return f"more than {MOST_MESSAGES} messages"
    return "an empty message" if any(not message.content for message in task.prompt.messages) else ""
