"""Which rows each microbatch of each step holds, decided before training from nothing but lengths, ids and a seed.

The rows of all epochs form one long stream (epoch after epoch, each in its own order), cut into steps of `per_step` rows. The rows of
a step are spread over a fixed number of microbatches a device, balanced by tokens, so that

- every device has the same number of microbatches in every step (none waits for another that has already finished);
- what a step divides by (its rows, its tokens, over all devices) is known to every device without communication;
- a resumed run finds its place by counting microbatches, whatever the epoch.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rlhf.config import BatchConfig, exact_div
from rlhf.errors import ConfigError
from rlhf.records import TokenRun


@dataclass(frozen=True, slots=True)
class StepTotals:
    """What the losses of a step are divided by, over all its microbatches and devices."""

    rows: int
    response_tokens: int
    """Tokens of all responses."""
    first_response_tokens: int
    """Tokens of the first response of each row: the demonstration, or `chosen`."""

    @classmethod
    def of(cls, runs: Sequence[TokenRun]) -> StepTotals:
        return cls(
            rows=len(runs),
            response_tokens=sum(len(response) for run in runs for response in run.responses),
            first_response_tokens=sum(len(run.responses[0]) for run in runs),
        )


def epoch_order(ids: Sequence[str], *, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """Row numbers in the order of this epoch: sorted by a hash of (seed, epoch, position, id), the same on every machine."""
    rows = list(range(len(ids)))
    if shuffle:
        rows.sort(key=lambda row: hashlib.sha256(f"{seed}/{epoch}/{row}/{ids[row]}".encode()).digest())
    return rows


def balance(rows: Sequence[int], tokens: Sequence[int], *, bins: int, most_rows: int) -> list[list[int]]:
    """Spread rows over bins so that the fullest holds few tokens: longest first, each into the emptiest bin that has room.

    Graham 1969: at most 4/3 of the best possible. No bin stays empty when there are as many rows as bins.
    """
    heap = [(0, 0, number) for number in range(bins)]
    filled: list[list[int]] = [[] for _ in range(bins)]
    for row in sorted(rows, key=lambda row: (-tokens[row], row)):
        load, count, number = heapq.heappop(heap)
        filled[number].append(row)
        if count + 1 < most_rows:
            heapq.heappush(heap, (load + tokens[row], count + 1, number))
    return filled


def padded_size(runs: Sequence[TokenRun]) -> int:
    """Tokens of a batch with one row a response, all as long as the longest."""
    return sum(len(run.responses) for run in runs) * max(len(run.prompt) + max(map(len, run.responses)) for run in runs)


@dataclass(frozen=True)
class StepPlan:
    """The whole run as rows: `microbatches_of(step)[rank]` are lists of row numbers, `accumulation` of them in a full step."""

    runs: Sequence[TokenRun]
    batch: BatchConfig
    seed: int
    epochs: float
    max_steps: int | None
    world_size: int = 1
    packed: bool = True

    def __post_init__(self) -> None:
        if not self.runs:
            raise ConfigError("there is no row to train on; see rejects.jsonl for what became of the data")
        exact_div(self.batch.per_step, self.world_size, "batch.per_step / number of devices")
        longest = max(self.tokens)
        budget = self.batch.tokens_per_microbatch
        if budget is not None and longest > budget:
            worst = self.runs[self.tokens.index(longest)]
            raise ConfigError(f"batch.tokens_per_microbatch is {budget}, but row {worst.id} alone has {longest} tokens in this layout; "
                              "raise it or lower data.max_length")

    @cached_property
    def tokens(self) -> list[int]:
        return [run.packed_tokens if self.packed else run.padded_tokens for run in self.runs]

    @cached_property
    def rows_in_run(self) -> int:
        """Rows of all steps. The last step is filled to a multiple of the devices, if need be from the start of a further epoch."""
        if self.max_steps is not None:
            return self.max_steps * self.batch.per_step
        rows = max(1, round(self.epochs * len(self.runs)))
        return math.ceil(rows / self.world_size) * self.world_size

    @property
    def steps(self) -> int:
        return math.ceil(self.rows_in_run / self.batch.per_step)

    @cached_property
    def _orders(self) -> dict[int, list[int]]:
        """Rows by epoch, as far as epochs were asked for: a run may be given more steps than it will ever take."""
        return {}

    def rows_of(self, step: int) -> list[int]:
        """Row numbers of this step, in the order of the stream."""
        first = step * self.batch.per_step
        return [self._row_at(position) for position in range(first, min(first + self.batch.per_step, self.rows_in_run))]

    def _row_at(self, position: int) -> int:
        epoch, place = divmod(position, len(self.runs))
        if epoch not in self._orders:
            self._orders[epoch] = epoch_order([run.id for run in self.runs], seed=self.seed, epoch=epoch, shuffle=self.batch.shuffle)
        return self._orders[epoch][place]

    @cached_property
    def accumulation(self) -> int:
        """Microbatches a device in every full step: the fewest with which each of them keeps within its rows and tokens."""
        budget = self.batch.tokens_per_microbatch
        most = exact_div(self.batch.per_step, self.world_size, "batch.per_step / number of devices")
        for count in range(math.ceil(most / self.batch.per_microbatch), most + 1):
            if budget is None or all(self._fits(self.rows_of(step), count, budget) for step in range(self.steps)):
                return count
        return most

    def _fits(self, rows: Sequence[int], count: int, budget: int) -> bool:
        bins = balance(rows, self.tokens, bins=count * self.world_size, most_rows=self.batch.per_microbatch)
        return max(sum(self.tokens[row] for row in members) for members in bins) <= budget

    def microbatches_of(self, step: int) -> list[list[list[int]]]:
        """[rank][microbatch] -> row numbers of this step. The last step may have fewer microbatches, the same number on each rank."""
        rows = self.rows_of(step)
        count = min(self.accumulation, len(rows) // self.world_size)
        bins = balance(rows, self.tokens, bins=count * self.world_size, most_rows=self.batch.per_microbatch)
        return [bins[rank::self.world_size] for rank in range(self.world_size)]

    def totals_of(self, step: int) -> StepTotals:
        return StepTotals.of([self.runs[row] for row in self.rows_of(step)])

    def tokens_of(self, step: int) -> int:
        """Tokens that the devices forward in this step."""
        return sum(self.tokens[row] for row in self.rows_of(step))

    def padded_tokens(self, steps: int) -> int:
        """What one padded row a response would forward for the same microbatches in the first so many steps."""
        microbatches = (rows for step in range(steps) for rank in self.microbatches_of(step) for rows in rank)
        return sum(padded_size([self.runs[row] for row in rows]) for rows in microbatches)

    def epoch_at(self, step: int) -> float:
        """Epochs seen after so many steps."""
        return min(step * self.batch.per_step, self.rows_in_run) / len(self.runs)

    @cached_property
    def microbatch_count(self) -> int:
        """Microbatches of one device in the whole run."""
        return (self.steps - 1) * self.accumulation + len(self.microbatches_of(self.steps - 1)[0])


@dataclass(frozen=True, slots=True)
class EvaluationBatch:
    rows: list[int]
    counted: bool
    """False for a repetition that only keeps the devices in step."""


def evaluation_batches(runs: Sequence[TokenRun], batch: BatchConfig, *, packed: bool, world_size: int, rank: int) -> list[EvaluationBatch]:
    """Rows of each forward of an evaluation on this device: within the limits of training, the same number on every device."""
    batches: list[list[int]] = []
    load = 0
    budget = batch.tokens_per_microbatch or math.inf
    lengths = [run.packed_tokens if packed else run.padded_tokens for run in runs]
    for row in sorted(range(len(runs)), key=lambda row: (-lengths[row], row)):
        if not batches or len(batches[-1]) == batch.per_microbatch or load + lengths[row] > budget:
            batches.append([])
            load = 0
        batches[-1].append(row)
        load += lengths[row]
    counted = [EvaluationBatch(rows, True) for rows in batches]
    while counted and len(counted) % world_size:
        counted.append(EvaluationBatch(batches[0], False))
    return counted[rank::world_size]
