"""How far raters agree beyond chance: Krippendorff's alpha of three levels, with a bootstrap interval."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rlhf.errors import ConfigError, ShapeError
from rlhf.maths.bootstrap import Interval
from rlhf.maths.shapes import expect_shape

Level = Literal["nominal", "ordinal", "interval"]
"""What two different values say: only that they differ; which is more; how much more."""
DRAWS_AT_A_TIME = 1 << 22
"""Bounds the weights of one block of resamples to 32 MiB, whatever the number of units."""
VANISHING = 1e-12
"""Expected disagreement, relative to the size of the numbers it is the difference of, that is rounding and not disagreement."""


class Ratings(NamedTuple):
    """One row a rating. Missing ratings have no row; who gave a rating does not matter to alpha."""

    unit: Tensor
    """[N] whole numbers that name what was rated."""
    value: Tensor
    """[N] numbers, finite."""


class Reliability(NamedTuple):
    alpha: Interval
    agreement: Interval | None
    """Of nominal ratings: 1 - D_o, the chance that two ratings of a unit are the same. Otherwise disagreement has no natural unit."""
    units: int
    """With at least two ratings; others say nothing about agreement."""
    ratings: int
    """Of those units."""


def sums_by(index: Tensor, rows: Tensor, size: int) -> Tensor:
    """Rows [N, C] with the same index [N] add up: [size, C]."""
    return torch.zeros(size, rows.shape[1], dtype=rows.dtype).index_add(0, index, rows)


def ratings_of(matrix: Tensor) -> Ratings:
    """A table of ratings [raters, units], NaN where a rater gave none, as one row a rating."""
    expect_shape("RU", matrix=matrix)
    _, unit = torch.nonzero(~matrix.isnan(), as_tuple=True)
    return Ratings(unit, matrix[~matrix.isnan()])


def krippendorff_alpha(ratings: Ratings, *, level: Level) -> float | None:
    """1 is perfect agreement, 0 what chance gives. Krippendorff 2019, Content Analysis, 4th ed., chapter 12.

    alpha = 1 - D_o / D_e
    D_o = 1/n sum_u sum_{i != j in u} delta^2(x_i, x_j) / (m_u - 1)       over units u with m_u >= 2 ratings, n ratings in all
    D_e = 1 / (n (n - 1)) sum_{i != j} delta^2(x_i, x_j)                  over all of these ratings

    delta^2 of different values c < k is 1 (nominal), (k - c)^2 (interval), or (R(k) - R(c))^2 (ordinal), where R(c) is the mean rank of c
    among the n ratings; that is the book's sum_{g = c..k} n_g - (n_c + n_k) / 2.

    None where nothing can be told: no unit has two ratings, or all of these ratings are the same, so that no disagreement was possible.
    """
    totals = _cluster_totals(ratings, level, None)
    return _number(_alpha(totals.sum(0)))


def reliability(ratings: Ratings, *, level: Level, resamples: int, generator: torch.Generator, clusters: Tensor | None = None,
                coverage: float = 0.95) -> Reliability | None:
    """Alpha and observed agreement with percentile bootstrap intervals. None where krippendorff_alpha is None.

    clusters [N], the same for all ratings of a unit, names what is drawn: units that share a cluster (all pairs of one ranking) are not
    independent and are resampled together. Without it each unit is its own. D_e is computed anew in each resample; the mean ranks that the
    ordinal delta needs are those of the whole data, as in Krippendorff's own bootstrap. Resamples in which alpha is not defined, because
    they happen to hold one value only, are left out. (Krippendorff's procedure draws pairs of ratings instead, as if all were independent;
    its intervals are too narrow.)
    """
    if resamples < 1:
        raise ConfigError(f"resamples must be at least 1, got {resamples}")
    if not 0 < coverage < 1:
        raise ConfigError(f"coverage is the share of intervals that cover and must be in (0, 1), got {coverage}")
    totals = _cluster_totals(ratings, level, clusters)
    whole = totals.sum(0)
    alpha = _number(_alpha(whole))
    if alpha is None:
        return None
    drawn = torch.cat([weights @ totals for weights in _weights(len(totals), resamples, generator)])
    alphas = _alpha(drawn)
    defined = alphas.isfinite()
    units, ratings_left = _pairable(ratings)
    return Reliability(
        alpha=_percentiles(alpha, alphas[defined], coverage),
        agreement=_percentiles(_agreement(whole).item(), _agreement(drawn[defined]), coverage) if level == "nominal" else None,
        units=units, ratings=ratings_left)


# Values are points x whose squared distance is delta^2 (twice that, for nominal), so that sum_{i, j} |x_i - x_j|^2 = 2 (n sum |x|^2 -
# |sum x|^2) is linear work. A cluster adds up to a row: its ratings n, the disagreement within its units, sum of |x|^2, sum of x.

def _cluster_totals(ratings: Ratings, level: Level, clusters: Tensor | None) -> Tensor:
    """[clusters, 3 + D], float64 on the CPU, where the generator draws."""
    expect_shape("N", unit=ratings.unit, value=ratings.value, **({} if clusters is None else {"clusters": clusters}))
    if not ratings.value.isfinite().all():
        raise ShapeError("a value is not finite; a missing rating has no row (see ratings_of)")
    _, unit, counts = torch.unique(ratings.unit.cpu(), return_inverse=True, return_counts=True)
    kept = counts[unit] >= 2
    if not kept.any():
        return torch.zeros(0, 4, dtype=torch.double)
    _, unit, counts = torch.unique(unit[kept], return_inverse=True, return_counts=True)
    points = _points(ratings.value.cpu().double()[kept], level)
    size, square = counts.double(), sums_by(unit, points.square().sum(1, keepdim=True), len(counts))
    total = sums_by(unit, points, len(counts))
    within = 2 * (size[:, None] * square - total.square().sum(1, keepdim=True)) / (size[:, None] - 1)
    rows = torch.cat([size[:, None], within, square, total], 1)
    if clusters is None:
        return rows
    names, cluster = torch.unique(clusters.cpu()[kept], return_inverse=True)
    cluster_of_unit = torch.zeros(len(counts), dtype=torch.long).scatter(0, unit, cluster)
    if not torch.equal(cluster_of_unit[unit], cluster):
        raise ShapeError("ratings of one unit are in different clusters; a unit belongs to one cluster")
    return sums_by(cluster_of_unit, rows, len(names))


def _points(values: Tensor, level: Level) -> Tensor:
    """[N, D]. Shifted by one of the values, so that equal values are exactly 0."""
    if level == "interval":
        return (values - values[0])[:, None]
    _, code, counts = torch.unique(values, return_inverse=True, return_counts=True)
    if level == "nominal":
        corners: Tensor = torch.nn.functional.one_hot(code, len(counts)).double()
        return corners
    mean_ranks: Tensor = counts.cumsum(0).double() - counts / 2
    return (mean_ranks[code] - mean_ranks[code[0]])[:, None]


def _alpha(totals: Tensor) -> Tensor:
    """[..., 3 + D] -> [...]; NaN where no disagreement was possible."""
    n, within, square, total = totals[..., 0], totals[..., 1], totals[..., 2], totals[..., 3:]
    expected = 2 * (n * square - total.square().sum(-1))
    return torch.where(expected > VANISHING * n * square, 1 - within * (n - 1) / expected, torch.nan)


def _agreement(totals: Tensor) -> Tensor:
    """Of nominal points, which lie sqrt(2) apart."""
    return 1 - totals[..., 1] / (2 * totals[..., 0])


def _pairable(ratings: Ratings) -> tuple[int, int]:
    """Units with at least two ratings, and how many ratings these are."""
    counts = torch.unique(ratings.unit, return_counts=True)[1]
    return int((counts >= 2).sum()), int(counts[counts >= 2].sum())


def _weights(clusters: int, resamples: int, generator: torch.Generator) -> Iterator[Tensor]:
    """How often each cluster is in each resample, [block, clusters] at a time."""
    block = max(1, DRAWS_AT_A_TIME // clusters)
    for start in range(0, resamples, block):
        drawn = torch.randint(clusters, (min(block, resamples - start), clusters), generator=generator, dtype=torch.int32)
        yield torch.stack([torch.bincount(row, minlength=clusters) for row in drawn]).double()


def _percentiles(mean: float, drawn: Tensor, coverage: float) -> Interval:
    tail = (1 - coverage) / 2
    low, high = drawn.quantile(torch.tensor([tail, 1 - tail], dtype=drawn.dtype)).tolist()
    return Interval(mean, low, high)


def _number(value: Tensor) -> float | None:
    return value.item() if value.isfinite() else None
