"""Candidates become blinded ranking tasks. Which model wrote a response, and which order is right, never leaves this machine.

Standard library only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf.errors import DataError
from rlhf.records import Prompt, content_hash

FEWEST, MOST = 2, 8
"""Responses of a task: what a person can hold side by side."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """A prompt with the responses that are to be ranked."""

    prompt: Prompt
    responses: tuple[str, ...]
    models: tuple[str, ...] = ()
    """Who wrote each response; empty where nobody knows."""
    gold: tuple[int, ...] = ()
    """The known ranks of a gold item: 1 is best, equal ranks are ties. Empty for all others."""
    source: str = ""
    """File and line, for messages."""

    def __post_init__(self) -> None:
        count = len(self.responses)
        if not FEWEST <= count <= MOST:
            raise DataError(f"{count} responses; a ranking task has {FEWEST} to {MOST}")
        if len(set(self.responses)) != count:
            raise DataError("two responses are the same text; nobody could rank them. Keep one of them")
        if any(not response.strip() for response in self.responses):
            raise DataError("a response is empty")
        for name, values in (("models", self.models), ("gold", self.gold)):
            if values and len(values) != count:
                raise DataError(f"{count} responses but {len(values)} {name}")
        if any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 1 for rank in self.gold):
            raise DataError(f"gold ranks are whole numbers from 1 (best), got {self.gold}")

    @property
    def task_id(self) -> str:
        """The same for the same prompt and the same set of responses, in whatever order, on every machine."""
        return content_hash("task/1", self.prompt.content_id, sorted(self.responses))


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownTask:
    """What annotators, and whoever reads the API as one, can see of a task."""

    id: str
    prompt: Prompt
    responses: tuple[str, ...]
    """By place: the first is shown first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A task with what only this side knows. `responses`, `models` and `gold` are in the order of the candidates, not as shown."""

    id: str
    prompt: Prompt
    responses: tuple[str, ...]
    models: tuple[str, ...]
    gold: tuple[int, ...]
    order: tuple[int, ...]
    """order[place] is the index of the response shown at that place."""
    source: str

    def shown(self) -> ShownTask:
        return ShownTask(id=self.id, prompt=self.prompt, responses=tuple(self.responses[index] for index in self.order))

    def unblind(self, ranks_by_place: Sequence[int]) -> tuple[int, ...]:
        """Ranks as given for the places -> ranks in the order of `responses`. Raises DataError for another number of ranks."""
        if len(ranks_by_place) != len(self.order):
            raise DataError(f"task {self.id} shows {len(self.order)} responses but was answered with {len(ranks_by_place)} ranks")
        ranks = dict(zip(self.order, ranks_by_place, strict=True))
        return tuple(ranks[index] for index in range(len(self.order)))


def shuffled(task_id: str, count: int, *, seed: int) -> tuple[int, ...]:
    """The order in which a task shows its responses: fixed by hash, blind to who wrote them, the same on every machine.

    Responses are sorted by a hash of (seed, task, position in the sorted texts), so that each of the count! orders is equally likely.
    """
    keys = [hashlib.sha256(f"{seed}/{task_id}/{index}".encode()).digest() for index in range(count)]
    return tuple(sorted(range(count), key=keys.__getitem__))


def make_task(candidates: Candidates, *, seed: int) -> Task:
    """Blind the candidates. Responses are put in the order of their texts first, so that the file's order cannot show through."""
    indices = sorted(range(len(candidates.responses)), key=candidates.responses.__getitem__)
    order = tuple(indices[position] for position in shuffled(candidates.task_id, len(indices), seed=seed))
    return Task(id=candidates.task_id, prompt=candidates.prompt, responses=candidates.responses, models=candidates.models,
                gold=candidates.gold, order=order, source=candidates.source)
