"""Rankings as votes on pairs of responses: what agreement, quality and adjudication count. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import Literal, NamedTuple

from annotation.tasks import Task
from annotation.verdicts import Verdict

Choice = Literal["first", "second", "tie"]
CHOICES: tuple[Choice, ...] = ("first", "second", "tie")
PairKey = tuple[str, int, int]
"""Task, and the indices of two of its responses, the smaller one first."""


class PairVote(NamedTuple):
    """One annotator's choice between two responses of a task."""

    task_id: str
    first: int
    """Index into the task's `responses`; always below `second`. Neither is the one that was shown first."""
    second: int
    annotator: str
    choice: Choice
    first_shown: bool
    """Whether `first` was shown before `second`."""

    @property
    def pair(self) -> PairKey:
        """What was judged, whoever judged it."""
        return self.task_id, self.first, self.second


def choice_of(rank_of_first: int, rank_of_second: int) -> Choice:
    if rank_of_first == rank_of_second:
        return "tie"
    return "first" if rank_of_first < rank_of_second else "second"


def pair_votes(verdicts: Iterable[Verdict]) -> Iterator[PairVote]:
    """k (k - 1) / 2 votes for each submitted verdict on k responses; none for the others."""
    for verdict in verdicts:
        if verdict.kind != "submitted":
            continue
        place = {index: place for place, index in enumerate(verdict.order)}
        for first, second in combinations(range(len(verdict.ranks)), 2):
            yield PairVote(verdict.task_id, first, second, verdict.annotator, choice_of(verdict.ranks[first], verdict.ranks[second]),
                           place[first] < place[second])


def gold_choices(tasks: Mapping[str, Task]) -> dict[PairKey, Choice]:
    """The right choice for each pair of each gold item."""
    return {(task.id, first, second): choice_of(task.gold[first], task.gold[second])
            for task in tasks.values() if task.gold for first, second in combinations(range(len(task.gold)), 2)}
