"""How far annotators agree, and how good each of them is: all figures of `annotation agreement`, none of its words.

docs/agreement.md defines every figure, with its source and with what it does not tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from rich.console import Console

from annotation.annotator_quality import Annotator, ConfidenceLevel, Estimate, annotators_of, confidence_levels, estimate_of
from annotation.tasks import Task
from annotation.verdicts import Verdict
from annotation.vote_table import VoteTable, fit_truth, vote_table
from annotation.votes import PairKey, PairVote, pair_votes
from rlhf.errors import DataError
from rlhf.maths.agreement import reliability, sums_by
from rlhf.progress import Bar, progress

RESAMPLES = 400
MOST_DISPUTED = 20


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Of a set of verdicts. None where nothing can be told: no two annotators judged the same, or all votes are the same."""

    tasks: int
    annotators: int
    verdicts: int
    shared_pairs: int
    """Pairs of responses that at least two annotators judged; the others say nothing about agreement."""
    alpha: Estimate | None
    """Krippendorff's alpha, nominal: a unit is a pair of responses, a value is first, second or tie, by the order in which the task lists
    its responses. Where that order tells which one tends to be better, much agreement counts as chance."""
    alpha_either_order: Estimate | None
    """The same with each pair entered both ways round, so that the order cannot matter; `alpha` is never much above it."""
    rank_alpha: Estimate | None
    """Ordinal: a unit is a response, a value is the place that it was given among the responses of its task."""
    same_choice: Estimate | None
    """Chance that two votes on a pair are the same, ties among them."""


@dataclass(frozen=True, kw_only=True)
class SharedWork:
    """Two annotators."""

    first: str
    second: str
    pairs: int
    """That both judged."""
    same_choice: float


@dataclass(frozen=True, kw_only=True)
class DisputedTask:
    task_id: str
    source: str
    annotators: int
    same_choice: float
    """Share of equal ones among all two votes on the same pair of the task's responses."""


@dataclass(frozen=True, kw_only=True)
class AgreementReport:
    overall: Agreement
    by_responses: Mapping[int, Agreement]
    """By the number of responses of the task."""
    by_guideline: Mapping[str, Agreement]
    """By the version that was shown."""
    overlap: Mapping[int, int]
    """Number of annotators -> number of tasks that so many have ranked."""
    annotators: tuple[Annotator, ...]
    shared_work: tuple[SharedWork, ...]
    disputed: tuple[DisputedTask, ...]
    """The worst ones, at most MOST_DISPUTED; only tasks on which two votes differ."""
    confidence: tuple[ConfidenceLevel, ...]
    """Empty where annotators were not asked."""
    truth_settled: bool
    """False: the Dawid-Skene fit had not converged, so that its figures are rough."""


def measure(tasks: Mapping[str, Task], verdicts: Iterable[Verdict], *, seed: int, console: Console | None = None) -> AgreementReport:
    """Every figure about the verdicts that stand: one at most of an annotator on a task. `seed` is that of the bootstrap.

    Gold items count like all others, and their answers are told to nothing but the figures that are named after them. Raises DataError
    for verdicts on other tasks, or two of one annotator on one task.
    """
    standing = list(verdicts)
    for verdict in standing:
        _require_fits(verdict, tasks)
    submitted = [verdict for verdict in standing if verdict.kind == "submitted"]
    table = vote_table(pair_votes(submitted), annotators={verdict.annotator for verdict in standing if verdict.kind != "withdrawn"})
    by_responses, by_guideline = parts_by_responses(table, tasks), parts_by_guideline(table, submitted)
    parts = [part for parts in (by_responses, by_guideline) if len(parts) > 1 for part in parts.values()]
    with progress(console, "measure agreement", 2 * len(table.pair) + sum(len(part.pair) for part in parts)) as bar:
        overall = _agreement(table, seed, bar)
        truth = fit_truth(table) if len(table.pair) else None
        annotators = annotators_of(tasks, standing, table, truth)
        bar.advance(len(table.pair))
        return AgreementReport(
            overall=overall,
            by_responses=_agreements(by_responses, overall, seed, bar),
            by_guideline=_agreements(by_guideline, overall, seed, bar),
            overlap=dict(sorted(Counter(Counter(verdict.task_id for verdict in submitted).values()).items())),
            annotators=annotators,
            shared_work=_shared_work(table),
            disputed=_most_disputed(table, tasks),
            confidence=confidence_levels(submitted, table),
            truth_settled=truth is None or truth.converged)


def pair_posteriors(votes: Iterable[PairVote]) -> dict[PairKey, tuple[float, ...]]:
    """Chance that the first is better, that the second is, that they are equal (by CHOICES), for each pair that anybody judged.

    Dawid & Skene over all votes: a vote counts by how reliable its annotator has shown to be on all other pairs.
    """
    table = vote_table(votes)
    if not table.pairs:
        return {}
    return dict(zip(table.pairs, map(tuple, fit_truth(table).posteriors.tolist()), strict=True))


def _require_fits(verdict: Verdict, tasks: Mapping[str, Task]) -> None:
    if verdict.task_id not in tasks:
        raise DataError(f"{verdict.annotator} judged task {verdict.task_id}, which is none of the project's {len(tasks)} tasks: the tasks "
                        "and the verdicts belong to two projects. Put the right tasks.jsonl back.")
    count = len(tasks[verdict.task_id].responses)
    if verdict.kind == "submitted" and len(verdict.ranks) != count:
        raise DataError(f"task {verdict.task_id} has {count} responses, but {verdict.annotator} gave {len(verdict.ranks)} ranks. The tasks "
                        "and the verdicts belong to two projects; put the right tasks.jsonl back.")


# Agreement

def _agreement(table: VoteTable, seed: int, bar: Bar) -> Agreement:
    """Pairs and responses of one task are not independent, so tasks are what the bootstrap draws."""
    choices = reliability(table.choices, level="nominal", resamples=RESAMPLES, generator=_seeded(seed), clusters=table.task)
    both_ways = reliability(table.choices_both_ways, level="nominal", resamples=RESAMPLES, generator=_seeded(seed),
                            clusters=table.task.repeat(2))
    ratings, task = table.places()
    places = reliability(ratings, level="ordinal", resamples=RESAMPLES, generator=_seeded(seed), clusters=task)
    shared = int((torch.bincount(table.pair) > 1).sum())
    bar.advance(len(table.pair))
    return Agreement(
        tasks=len(torch.unique(table.task)), annotators=len(torch.unique(table.annotator)),
        verdicts=len(torch.unique(table.task * max(1, len(table.annotators)) + table.annotator)), shared_pairs=shared,
        alpha=estimate_of(choices.alpha, choices.units) if choices is not None else None,
        alpha_either_order=estimate_of(both_ways.alpha, shared) if both_ways is not None else None,
        rank_alpha=estimate_of(places.alpha, places.units) if places is not None else None,
        same_choice=estimate_of(choices.agreement, choices.units) if choices is not None and choices.agreement is not None else None)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


K = TypeVar("K", int, str)


def _agreements(parts: Mapping[K, VoteTable], overall: Agreement, seed: int, bar: Bar) -> dict[K, Agreement]:
    """A part that is everything need not be measured again."""
    return {key: overall if len(parts) == 1 else _agreement(part, seed, bar) for key, part in parts.items()}


def parts_by_responses(table: VoteTable, tasks: Mapping[str, Task]) -> dict[int, VoteTable]:
    size = torch.tensor([len(tasks[name].responses) for name in table.tasks], dtype=torch.long)[table.task]
    return {count: table.where(size == count) for count in sorted(set(size.tolist()))}


def parts_by_guideline(table: VoteTable, verdicts: Sequence[Verdict]) -> dict[str, VoteTable]:
    """Verdicts are the submitted ones that the table was made of."""
    version_of = {(verdict.task_id, verdict.annotator): verdict.guideline for verdict in verdicts}
    versions = sorted(set(version_of.values()), key=lambda name: (len(name), name))
    number = {version: place for place, version in enumerate(versions)}
    key = torch.tensor([number[version_of[table.tasks[task], table.annotators[annotator]]]
                        for task, annotator in zip(table.task.tolist(), table.annotator.tolist(), strict=True)], dtype=torch.long)
    return {version: table.where(key == place) for version, place in number.items()}


def _shared_work(table: VoteTable) -> tuple[SharedWork, ...]:
    """Every two annotators who judged the same pair."""
    one, other = table.two_votes()
    count = len(table.annotators)
    low, high = torch.minimum(table.annotator[one], table.annotator[other]), torch.maximum(table.annotator[one], table.annotator[other])
    names, both = torch.unique(low * count + high, return_inverse=True)
    same = (table.choice[one] == table.choice[other]).double()
    sums = sums_by(both, torch.stack([torch.ones_like(same), same], 1), len(names)).tolist()
    return tuple(SharedWork(first=table.annotators[name // count], second=table.annotators[name % count], pairs=int(pairs),
                            same_choice=equal / pairs) for name, (pairs, equal) in zip(names.tolist(), sums, strict=True))


def _most_disputed(table: VoteTable, tasks: Mapping[str, Task]) -> tuple[DisputedTask, ...]:
    votes = table.votes_of_pair.double()
    twos, same = votes.sum(1) * (votes.sum(1) - 1) / 2, (votes * (votes - 1)).sum(1) / 2
    sums = sums_by(table.task_of_pair, torch.stack([twos, same, votes.sum(1)], 1), len(table.tasks)).tolist()
    annotators = sums_by(table.task_of_pair, torch.ones(len(table.pairs), 1), len(table.tasks))
    disputed = [DisputedTask(task_id=name, source=tasks[name].source, annotators=round(given / pairs), same_choice=equal / of)
                for name, (of, equal, given), (pairs,) in zip(table.tasks, sums, annotators.tolist(), strict=True) if equal < of]
    return tuple(sorted(disputed, key=lambda task: (task.same_choice, -task.annotators, task.task_id))[:MOST_DISPUTED])
