"""How good each annotator is: against gold items, against the others, against the truth behind the votes; habits and pace."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import NormalDist, median, quantiles
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from annotation.tasks import Task
from annotation.verdicts import Verdict
from annotation.vote_table import FIRST, MODEL, TIE, VoteTable
from annotation.votes import CHOICES, gold_choices
from rlhf.maths.agreement import sums_by
from rlhf.maths.bootstrap import Interval, wilson_interval
from rlhf.maths.dawid_skene import DawidSkene, accuracy_intervals

Flag = Literal["gold", "skill", "position", "pace"]
LEAST_ACCURACY = 0.7
"""An annotator who is surely below it is flagged: the whole interval is."""
SIGNIFICANCE = 0.05
"""Chance of flagging anybody for a position bias where nobody has one."""
PAUSE_SECONDS = 1800.0
"""What lies further apart has a break in between, and is no time spent on a task."""
FEWEST_TIMES = 10
"""Tasks after which a pace can be told."""
FASTEST_READING = 100.0
"""Characters a second. Silent reading goes at 238 words a minute (Brysbaert 2019, J. Mem. Lang. 109), which is 24 in English."""
SECONDS_EDGES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    value: float
    low: float
    high: float
    """95 % interval."""
    count: int
    """Of what it was estimated from: pairs, votes or responses, as the figure says."""


@dataclass(frozen=True, kw_only=True)
class PositionBias:
    """Of choices between two responses that are no ties: the share that fell on the one shown first, minus 1/2."""

    value: float
    low: float
    high: float
    count: int
    p_value: float
    """Two-sided, of no bias; not corrected for the number of annotators."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds from one stored verdict to the next, breaks left out."""

    median: float
    quartiles: tuple[float, float]
    count: int
    too_fast: float
    """Share of the tasks whose responses could not have been read in the time."""
    histogram: tuple[int, ...]
    """Tasks that took less than the first of SECONDS_EDGES, from there to the next, ..., the last or more."""


@dataclass(frozen=True, kw_only=True)
class Annotator:
    """One annotator. A figure is None where there is nothing to tell it from."""

    name: str
    tasks: int
    discarded: int
    gold: Estimate | None
    """Share of right choices on the pairs of gold items."""
    with_the_rest: Estimate | None
    """Share of choices that are what most of the others chose, on pairs where the others have one most frequent choice."""
    skill: Estimate | None
    """Chance of choosing right on a pair of this project, by Dawid & Skene; gold answers are not used."""
    position_bias: PositionBias | None
    ties: float | None
    """Share of ties among the pairs judged."""
    pace: Pace | None
    flags: tuple[Flag, ...]


@dataclass(frozen=True, kw_only=True)
class ConfidenceLevel:
    """Votes that annotators gave with one confidence."""

    confidence: int
    votes: int
    with_the_rest: Estimate | None


def estimate_of(interval: Interval, count: int) -> Estimate:
    return Estimate(value=interval.mean, low=interval.low, high=interval.high, count=count)


def annotators_of(tasks: Mapping[str, Task], verdicts: Sequence[Verdict], table: VoteTable,
                  truth: DawidSkene | None) -> tuple[Annotator, ...]:
    """Those of the table, by name. `truth` is the fit to its votes."""
    people = len(table.annotators)
    answers = {pair: CHOICES.index(choice) for pair, choice in gold_choices(tasks).items()}
    gold = _numbers([answers.get(pair, -1) for pair in table.pairs])[table.pair]
    agreeing, comparable = _most_of_the_others(table)
    by_first_shown = (table.choice == FIRST) == table.first_shown
    votes = torch.bincount(table.annotator, minlength=people).tolist()
    ties = torch.bincount(table.annotator[table.choice == TIE], minlength=people).tolist()
    figures = zip(table.annotators,
                  map(_estimate, shares(table.choice == gold, gold >= 0, table.annotator, people, table)),
                  map(_estimate, shares(agreeing, comparable, table.annotator, people, table)),
                  _skills(table, truth),
                  map(_position_bias, shares(by_first_shown, table.choice != TIE, table.annotator, people, table)),
                  ties, votes, strict=True)
    paces = _paces(verdicts, tasks)
    kinds = Counter((verdict.annotator, verdict.kind) for verdict in verdicts)
    return tuple(Annotator(
        name=name, tasks=kinds[name, "submitted"], discarded=kinds[name, "discarded"], gold=on_gold, with_the_rest=with_the_rest,
        skill=skill, position_bias=bias, ties=tied / given if given else None, pace=paces.get(name),
        flags=_flags(on_gold, skill, bias, paces.get(name), annotators=people))
        for name, on_gold, with_the_rest, skill, bias, tied, given in figures)


def confidence_levels(verdicts: Iterable[Verdict], table: VoteTable) -> tuple[ConfidenceLevel, ...]:
    """How often the others agree with votes of each confidence, by confidence."""
    stated = {(verdict.task_id, verdict.annotator): verdict.confidence for verdict in verdicts}
    level = _numbers([stated[table.tasks[task], table.annotators[annotator]] or 0
                      for task, annotator in zip(table.task.tolist(), table.annotator.tolist(), strict=True)])
    agreeing, comparable = _most_of_the_others(table)
    levels = torch.bincount(level).tolist()
    found = shares(agreeing, comparable, level, len(levels), table)
    return tuple(ConfidenceLevel(confidence=confidence, votes=votes, with_the_rest=_estimate(share))
                 for confidence, (votes, share) in enumerate(zip(levels, found, strict=True)) if confidence and votes)


def _flags(gold: Estimate | None, skill: Estimate | None, bias: PositionBias | None, pace: Pace | None, *,
           annotators: int) -> tuple[Flag, ...]:
    flags: dict[Flag, bool] = {
        "gold": gold is not None and gold.high < LEAST_ACCURACY,
        "skill": skill is not None and skill.high < LEAST_ACCURACY,
        "position": bias is not None and bias.p_value * annotators < SIGNIFICANCE,      # Bonferroni: of a hundred, five would be flagged
        "pace": pace is not None and pace.too_fast > 0.5}
    return tuple(flag for flag, raised in flags.items() if raised)


# Shares

class Share(NamedTuple):
    """A share of pairs, where the pairs of one task are not independent."""

    value: float
    pairs: int
    worth: float
    """Independent pairs that would tell as much: pairs / design effect (Kish 1965, Survey Sampling), never below the number of tasks."""


def shares(hit: Tensor, counted: Tensor, group: Tensor, groups: int, table: VoteTable) -> list[Share | None]:
    """Of the rows [N] that are counted, the share that is a hit, for each group 0 .. groups - 1; None for one without rows.

    With a_t hits among the b_t rows of task t and p = sum a / sum b, the variance of p is sum_t (a_t - p b_t)^2 / (sum b)^2 (ratio
    estimate), and independent pairs that are worth as much number p (1 - p) / variance. With one pair a task that is the number of pairs.
    """
    names, cluster = torch.unique(group[counted] * len(table.tasks) + table.task[counted], return_inverse=True)
    rows = torch.stack([torch.ones_like(cluster), hit[counted]], 1).double()
    by_task = sums_by(cluster, rows, len(names))
    owner = names // max(1, len(table.tasks))
    pairs, hits = sums_by(owner, by_task, groups).unbind(1)
    share = hits / pairs
    residual = by_task[:, 1] - share[owner] * by_task[:, 0]
    variance = sums_by(owner, residual.square()[:, None], groups)[:, 0] / pairs.square()
    worth = share * (1 - share) / variance
    tasks = torch.bincount(owner, minlength=groups).double()
    worth = torch.where(worth.isfinite(), worth.clamp(tasks, pairs), tasks)     # all hits or none: the variance tells nothing
    return [Share(value, round(count), of) if count else None
            for value, count, of in torch.stack([share, pairs, worth], 1).tolist()]


def _estimate(share: Share | None) -> Estimate | None:
    return None if share is None else estimate_of(wilson_interval(share.value * share.worth, share.worth), share.pairs)


def _position_bias(share: Share | None) -> PositionBias | None:
    if share is None:
        return None
    interval = wilson_interval(share.value * share.worth, share.worth)
    z = abs(share.value - 0.5) * 2 * share.worth ** 0.5      # score test: the standard error under no bias is 1 / (2 sqrt(n))
    return PositionBias(value=share.value - 0.5, low=interval.low - 0.5, high=interval.high - 0.5, count=share.pairs,
                        p_value=2 * (1 - NormalDist().cdf(z)))


def _most_of_the_others(table: VoteTable) -> tuple[Tensor, Tensor]:
    """For each vote, whether it is what most of the others chose, and whether the others have one most frequent choice. [N], [N]."""
    own = torch.nn.functional.one_hot(table.choice, len(CHOICES))
    others = table.votes_of_pair[table.pair] - own
    most = others.max(1, keepdim=True).values
    leading = (others == most) & (most > 0)
    return (leading & own.bool()).any(1), leading.sum(1) == 1


def _skills(table: VoteTable, truth: DawidSkene | None) -> list[Estimate | None]:
    """None for who judged nothing that anybody else judged: nothing could be told of the truth there."""
    shared = torch.bincount(table.pair)[table.pair] > 1 if len(table.pair) else torch.zeros(0, dtype=torch.bool)
    counts = torch.bincount(table.annotator[shared], minlength=len(table.annotators)).tolist()
    if truth is None or not any(counts):
        return [None] * len(counts)
    intervals = accuracy_intervals(truth, table.labels, MODEL, clusters=table.task_of_pair)
    return [estimate_of(intervals[place], count) if count else None for place, count in enumerate(counts)]


# Pace

def _paces(verdicts: Iterable[Verdict], tasks: Mapping[str, Task]) -> dict[str, Pace]:
    """A verdict that was changed later counts where it was changed: only the last time is known of it."""
    times: defaultdict[str, list[tuple[datetime, str]]] = defaultdict(list)
    for verdict in verdicts:
        if verdict.at and verdict.kind != "withdrawn":
            times[verdict.annotator].append((datetime.fromisoformat(verdict.at), verdict.task_id))
    paces = {}
    for name, stored in times.items():
        ordered = sorted(stored)
        spent = [((now - before).total_seconds(), task) for (before, _), (now, task) in pairwise(ordered)]
        working = [(seconds, task) for seconds, task in spent if seconds <= PAUSE_SECONDS]
        if len(working) >= FEWEST_TIMES:
            paces[name] = _pace(working, tasks)
    return paces


def _pace(working: Sequence[tuple[float, str]], tasks: Mapping[str, Task]) -> Pace:
    seconds = [spent for spent, _ in working]
    too_fast = [sum(map(len, tasks[task].responses)) > FASTEST_READING * spent for spent, task in working]
    low, _, high = quantiles(seconds, n=4)
    histogram = Counter(bisect_right(SECONDS_EDGES, spent) for spent in seconds)
    return Pace(median=median(seconds), quartiles=(low, high), count=len(seconds), too_fast=sum(too_fast) / len(too_fast),
                histogram=tuple(histogram[bin] for bin in range(len(SECONDS_EDGES) + 1)))


def _numbers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.long)
