"""The judgement of one task -> its records: the whole ranking, or a tie, and each decided pair."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from annotation.adjudicate import Decide, Pair, Tally, judge
from annotation.tasks import Task
from annotation.verdicts import Verdict
from annotation.votes import Choice, PairKey, choice_of
from rlhf.records import PreferenceRecord, RankedRecord

ChanceWrong = Callable[[PairKey, Tally, Choice], float | None]
"""How likely it is that a strict choice is wrong, in [0, 0.5]; None where nothing can be told."""
STRICT: tuple[Choice, Choice] = ("first", "second")


class Rule(NamedTuple):
    """How pairs are decided, and how far a decision is to be trusted."""

    decide: Decide
    chance_wrong: ChanceWrong


class TaskRecords(NamedTuple):
    kind: str
    """annotation.adjudicate.Kind."""
    rankings: list[RankedRecord]
    ties: list[RankedRecord]
    pairs: list[tuple[PreferenceRecord, ...]]
    """Of each pair that is judged strictly: its record, or under the policy `all` one for each order that somebody gave."""
    fates: Counter[str]
    """What became of every pair of the task."""


class Origin(NamedTuple):
    """What all records of a task share."""

    guideline: str
    source: str
    """PROJECT/TASK: the way back to the votes."""


def adjudicated(task: Task, tallies: Mapping[Pair, Tally], rule: Rule, *, min_votes: int, origin: Origin) -> TaskRecords:
    """One ranking or one tie at most, from the votes on all pairs together."""
    found = judge(task.id, len(task.responses), tallies, decide=rule.decide, min_votes=min_votes)
    if found.kind in ("too_few_votes", "contradiction"):
        return TaskRecords(found.kind, [], [], [], Counter({found.kind: _pairs_of(task)}))
    pairs: list[tuple[PreferenceRecord, ...]] = [(_pair(task, pair, choice, tallies[pair], rule, origin),)
                                                 for pair, choice in found.choices.items() if choice is not None and choice != "tie"]
    fates = Counter("open" if choice is None else "tie" if choice == "tie" else "strict" for choice in found.choices.values())
    if not found.ranks:
        return TaskRecords(found.kind, [], [], pairs, fates)
    if found.kind == "tie":
        return TaskRecords("tie", [], [_ranked(task, found.ranks, origin, votes=found.votes, agreement=found.agreement)], pairs, fates)
    chances = [rule.chance_wrong((task.id, *pair), votes, choice) for pair, votes in tallies.items()
               if (choice := choice_of(found.ranks[pair[0]], found.ranks[pair[1]])) != "tie"]
    ranking = _ranked(task, found.ranks, origin, votes=found.votes, agreement=found.agreement, smoothing=_mean(chances))
    return TaskRecords("ranking", [ranking], [], pairs, fates)


def as_given(task: Task, verdicts: Sequence[Verdict], tallies: Mapping[Pair, Tally], rule: Rule, *, min_votes: int,
             origin: Origin) -> TaskRecords:
    """Each ranking that anybody gave, once, with the number of those who gave it; and so each order of each pair. Agreement is 1."""
    if len(verdicts) < max(1, min_votes):
        return TaskRecords("too_few_votes", [], [], [], Counter(too_few_votes=_pairs_of(task)))
    rankings: list[RankedRecord] = []
    ties: list[RankedRecord] = []
    for ranks, count in sorted(Counter(dense(verdict.ranks) for verdict in verdicts).items()):
        if max(ranks) == 1:
            ties.append(_ranked(task, ranks, origin, votes=count, agreement=1.0))
        else:
            smoothing = rule.chance_wrong((task.id, 0, 1), Tally(first=count), "first")
            rankings.append(_ranked(task, ranks, origin, votes=count, agreement=1.0, smoothing=smoothing))
    pairs = [tuple(_pair(task, pair, choice, Tally(**{choice: votes.of(choice)}), rule, origin) for choice in STRICT if votes.of(choice))
             for pair, votes in tallies.items()]
    strict = [records for records in pairs if records]
    return TaskRecords("ranking" if rankings else "tie", rankings, ties, strict, Counter(strict=len(strict), tie=len(pairs) - len(strict)))


def _ranked(task: Task, ranks: Sequence[int], origin: Origin, *, votes: int, agreement: float,
            smoothing: float | None = None) -> RankedRecord:
    """Best first, equals by their text: the order in which the task lists its responses leaves no trace."""
    ordered = sorted(zip(ranks, task.responses, strict=True))
    return RankedRecord(prompt=task.prompt, responses=tuple(text for _, text in ordered), ranks=tuple(rank for rank, _ in ordered),
                        votes=votes, agreement=agreement, smoothing=smoothing, guideline=origin.guideline, source=origin.source)


def _pair(task: Task, pair: Pair, choice: Choice, votes: Tally, rule: Rule, origin: Origin) -> PreferenceRecord:
    better, worse = pair if choice == "first" else pair[::-1]
    return PreferenceRecord(
        prompt=task.prompt, chosen=task.responses[better], rejected=task.responses[worse], votes=votes.votes,
        agreement=votes.of(choice) / votes.votes, smoothing=rule.chance_wrong((task.id, *pair), votes, choice),
        guideline=origin.guideline, source=origin.source)


def _mean(chances: Iterable[float | None]) -> float | None:
    """Rounded once, so that the order in which the pairs come does not show in the last digit."""
    known = [chance for chance in chances if chance is not None]
    return math.fsum(known) / len(known) if known else None


def _pairs_of(task: Task) -> int:
    return len(task.responses) * (len(task.responses) - 1) // 2


def dense(ranks: Sequence[int]) -> tuple[int, ...]:
    """(5, 1, 5) -> (2, 1, 2)."""
    places = {rank: place for place, rank in enumerate(sorted(set(ranks)), 1)}
    return tuple(places[rank] for rank in ranks)


def versions(verdicts: Iterable[Verdict]) -> str:
    """The guideline that the votes were given under, or all of them: v1+v2."""
    return "+".join(sorted({verdict.guideline for verdict in verdicts if verdict.guideline}, key=lambda name: (len(name), name)))
