"""Intervals for reported figures: percentile bootstrap of a mean or a paired difference, Wilson for a proportion."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.errors import ConfigError, ShapeError
from rlhf.maths.shapes import expect_shape

DRAWS_AT_A_TIME = 1 << 22
"""Bounds the index matrix of one block of resamples to 32 MiB, whatever the data set's size."""


class Interval(NamedTuple):
    mean: float
    low: float
    high: float


def bootstrap_mean(values: Tensor, *, resamples: int, generator: torch.Generator, clusters: Tensor | None = None,
                   level: float = 0.95) -> Interval:
    """Percentile bootstrap interval of a mean. Efron & Tibshirani 1993, sections 13.3 (percentiles) and 8.6 (units that belong together).

    values [N]. clusters [N] names the unit that is drawn: rows with one number (all pairs of one prompt) are resampled
    together, because they are not independent; without it each row is its own unit. A resample's mean is over the
    rows it holds, so large clusters weigh more, as they do in the mean itself.
    """
    _require_level(level)
    if resamples < 1:
        raise ConfigError(f"resamples must be at least 1, got {resamples}")
    sums, counts = _cluster_totals(values, clusters)
    means = torch.cat([sums[rows].sum(-1) / counts[rows].sum(-1) for rows in _draws(len(sums), resamples, generator)])
    tail = (1 - level) / 2
    low, high = means.quantile(torch.tensor([tail, 1 - tail], dtype=means.dtype)).tolist()
    return Interval((sums.sum() / counts.sum()).item(), low, high)


def bootstrap_difference(values: Tensor, baseline: Tensor, *, resamples: int, generator: torch.Generator,
                         clusters: Tensor | None = None, level: float = 0.95) -> Interval:
    """Interval of mean(values - baseline), row by row: both were measured on the same rows, in the same order. [N], [N]."""
    expect_shape("N", values=values, baseline=baseline)
    return bootstrap_mean(values.double() - baseline.double(), resamples=resamples, generator=generator, clusters=clusters, level=level)


def wilson_interval(successes: float, total: float, *, level: float = 0.95) -> Interval:
    """Score interval of a proportion. Wilson 1927, J. Am. Stat. Assoc. 22.

    (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n), with p = successes / n and z the normal quantile.
    Unlike the bootstrap it keeps a width when every one of few trials succeeded. Trials that are not independent count as the smaller
    number of independent ones they are worth, which need not be whole.
    """
    _require_level(level)
    if total < 1 or not 0 <= successes <= total:
        raise ConfigError(f"wilson_interval needs 0 <= successes <= total and total >= 1, got {successes} of {total}")
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, shrink = successes / total, 1 + z * z / total
    centre = (share + z * z / (2 * total)) / shrink
    half = z * (share * (1 - share) / total + z * z / (4 * total * total)) ** 0.5 / shrink
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))


def _cluster_totals(values: Tensor, clusters: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum and number of rows of each unit, float64 on the CPU, where the generator draws."""
    expect_shape("N", values=values, **({} if clusters is None else {"clusters": clusters}))
    if values.numel() == 0:
        raise ShapeError("values is empty, so it has no mean")
    rows = values.detach().cpu().double()
    if clusters is None:
        return rows, torch.ones_like(rows)
    names, unit = torch.unique(clusters.cpu(), return_inverse=True)
    empty = torch.zeros(len(names), dtype=torch.double)
    return empty.index_add(0, unit, rows), empty.index_add(0, unit, torch.ones_like(rows))


def _draws(units: int, resamples: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Units drawn with replacement, [block, units] at a time."""
    block = max(1, DRAWS_AT_A_TIME // units)
    for start in range(0, resamples, block):
        yield torch.randint(units, (min(block, resamples - start), units), generator=generator)


def _require_level(level: float) -> None:
    if not 0 < level < 1:
        raise ConfigError(f"level is the share of intervals that cover and must be in (0, 1), got {level}")
