"""Votes as tensors: what agreement, quality and the truth behind the votes are computed from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from annotation.tasks import MOST
from annotation.votes import CHOICES, PairKey, PairVote
from rlhf.errors import DataError
from rlhf.maths.agreement import Ratings, sums_by
from rlhf.maths.dawid_skene import DawidSkene, LabelModel, Labels, dawid_skene

FIRST, SECOND, TIE = range(len(CHOICES))
OTHER_WAY_ROUND = (SECOND, FIRST, TIE)
"""The same choice when the two responses change names."""
MODEL = LabelModel(classes=len(CHOICES), exchangeable=OTHER_WAY_ROUND, smoothing=0.1)
"""Which of two responses is called the first means nothing. A tenth of a vote in each cell keeps chances off 0 and hardly moves them."""


@dataclass(frozen=True, kw_only=True)
class VoteTable:
    """N pair votes, a row a vote. Numbers count from 0 into the tuples of names."""

    annotators: tuple[str, ...]
    tasks: tuple[str, ...]
    pairs: tuple[PairKey, ...]
    pair: Tensor
    """[N]"""
    annotator: Tensor
    """[N]"""
    choice: Tensor
    """[N] index into CHOICES."""
    task: Tensor
    """[N]"""
    first: Tensor
    """[N] index of the pair's first response; `second` [N] of the other."""
    second: Tensor
    first_shown: Tensor
    """[N] whether the pair's first response was shown before its second."""

    @property
    def task_of_pair(self) -> Tensor:
        """[pairs]"""
        return torch.zeros(len(self.pairs), dtype=torch.long).scatter(0, self.pair, self.task)

    @property
    def choices(self) -> Ratings:
        """Pairs are what is rated, choices are the values."""
        return Ratings(self.pair, self.choice.double())

    @property
    def choices_both_ways(self) -> Ratings:
        """Each pair twice, the second time with first and second swapped: what is called the first then cannot matter. [2 N]"""
        turned = torch.tensor(OTHER_WAY_ROUND)[self.choice]
        return Ratings(torch.cat([self.pair, self.pair + len(self.pairs)]), torch.cat([self.choice, turned]).double())

    @property
    def labels(self) -> Labels:
        return Labels(self.pair, self.annotator, self.choice)

    @property
    def votes_of_pair(self) -> Tensor:
        """[pairs, 3] votes for the first, for the second, for a tie."""
        return sums_by(self.pair, torch.nn.functional.one_hot(self.choice, len(CHOICES)), len(self.pairs))

    def where(self, kept: Tensor) -> VoteTable:
        """The rows that `kept` [N] selects; names keep their numbers."""
        return replace(self, pair=self.pair[kept], annotator=self.annotator[kept], choice=self.choice[kept], task=self.task[kept],
                       first=self.first[kept], second=self.second[kept], first_shown=self.first_shown[kept])

    def two_votes(self) -> tuple[Tensor, Tensor]:
        """Rows of all two votes on the same pair, each two once."""
        order = self.pair.argsort(stable=True)
        size = torch.bincount(self.pair)[self.pair[order]]
        position = torch.arange(len(order))
        start = torch.searchsorted(self.pair[order].contiguous(), self.pair[order].contiguous())
        later = start + size - 1 - position     # votes on the same pair that come after this one
        one = position.repeat_interleave(later)
        other = one + 1 + torch.arange(len(one)) - (later.cumsum(0) - later).repeat_interleave(later)
        return order[one], order[other]

    def places(self) -> tuple[Ratings, Tensor]:
        """Responses are what is rated; the value is where an annotator put one, from 0 (above all others) to 1 (below all others).

        It is (mean rank - 1) / (k - 1) for k responses, ties sharing the mean of their ranks (Kendall 1945, Biometrika 33), so that
        (1, 1, 2) and (1, 1, 3) are one ranking, and tasks with different k have one scale. Also the task of each rating.
        """
        ranking = self.task * len(self.annotators) + self.annotator
        names, entry = torch.unique(torch.cat([ranking * MOST + self.first, ranking * MOST + self.second]), return_inverse=True)
        share_above = torch.tensor([0.0, 1.0, 0.5], dtype=torch.double)     # of the other one above this one: if it is FIRST, SECOND, TIE
        above = torch.cat([share_above[self.choice], 1 - share_above[self.choice]])[:, None]
        sums = sums_by(entry, torch.cat([above, torch.ones_like(above)], 1), len(names))
        task = names // MOST // max(1, len(self.annotators))
        return Ratings(task * MOST + names % MOST, sums[:, 0] / sums[:, 1]), task


def vote_table(votes: Iterable[PairVote], *, annotators: Iterable[str] = ()) -> VoteTable:
    """Annotators are sorted by name; `annotators` are there even if they have no vote.

    Raises DataError where an annotator voted twice on a pair: only votes that stand are counted.
    """
    rows = list(votes)
    people = {name: number for number, name in enumerate(sorted({vote.annotator for vote in rows} | set(annotators)))}
    tasks = {name: number for number, name in enumerate(dict.fromkeys(vote.task_id for vote in rows))}
    pairs = {key: number for number, key in enumerate(dict.fromkeys(vote.pair for vote in rows))}
    codes = {choice: number for number, choice in enumerate(CHOICES)}
    table = VoteTable(
        annotators=tuple(people), tasks=tuple(tasks), pairs=tuple(pairs),
        pair=_whole([pairs[vote.pair] for vote in rows]), annotator=_whole([people[vote.annotator] for vote in rows]),
        choice=_whole([codes[vote.choice] for vote in rows]), task=_whole([tasks[vote.task_id] for vote in rows]),
        first=_whole([vote.first for vote in rows]), second=_whole([vote.second for vote in rows]),
        first_shown=torch.tensor([vote.first_shown for vote in rows], dtype=torch.bool))
    _require_one_vote_each(table)
    return table


def _require_one_vote_each(table: VoteTable) -> None:
    names, times = torch.unique(table.pair * max(1, len(table.annotators)) + table.annotator, return_counts=True)
    if (times > 1).any():
        pair, annotator = divmod(int(names[times > 1][0]), len(table.annotators))
        raise DataError(f"{table.annotators[annotator]} voted {int(times.max())} times on task {table.pairs[pair][0]}; one verdict of an "
                        "annotator on a task stands. Pass the current verdicts, not the whole log.")


def _whole(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.long)


def fit_truth(table: VoteTable) -> DawidSkene:
    """The truth behind the votes and each annotator's confusion: Dawid & Skene over pairs, with first and second exchangeable."""
    return dawid_skene(table.labels, MODEL)
