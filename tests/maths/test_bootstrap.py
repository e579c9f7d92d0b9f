"""Intervals against hand values, known distributions and coverage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rlhf.errors import ConfigError, ShapeError
from rlhf.maths import bootstrap
from rlhf.maths.bootstrap import Interval, bootstrap_difference, bootstrap_mean, wilson_interval


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_two_values_have_a_known_bootstrap_distribution() -> None:
    values = torch.tensor([0.0, 1.0])      # a resample's mean is 0, 1/2, 1 with chances 1/4, 1/2, 1/4
    assert bootstrap_mean(values, resamples=4000, generator=seeded(), level=0.4) == Interval(0.5, 0.5, 0.5)      # 30 % to 70 %
    assert bootstrap_mean(values, resamples=4000, generator=seeded(), level=0.95) == Interval(0.5, 0.0, 1.0)


def test_width_is_that_of_the_normal_approximation() -> None:
    values = torch.randn(400, generator=seeded(1))
    interval = bootstrap_mean(values, resamples=4000, generator=seeded())
    half = 1.96 * values.double().std(correction=0).item() / 20                    # standard error s / sqrt(400)
    assert interval.mean == pytest.approx(values.double().mean().item())
    assert (interval.high - interval.low) / 2 == pytest.approx(half, rel=0.05)


def test_nineteen_of_twenty_intervals_cover_the_true_mean() -> None:
    draws = torch.randn(500, 60, generator=seeded(2)) + 3
    intervals = [bootstrap_mean(row, resamples=400, generator=seeded(i)) for i, row in enumerate(draws)]
    share = sum(interval.low <= 3 <= interval.high for interval in intervals) / len(intervals)
    assert 0.91 <= share <= 0.97


def test_rows_of_one_cluster_are_drawn_together() -> None:
    values = torch.randn(50, generator=seeded(3))
    repeated, prompt = values.repeat_interleave(4), torch.arange(50).repeat_interleave(4) + 1000
    alone = bootstrap_mean(values, resamples=2000, generator=seeded())
    clustered = bootstrap_mean(repeated, resamples=2000, generator=seeded(), clusters=prompt)
    assert clustered == pytest.approx(alone)
    naive = bootstrap_mean(repeated, resamples=2000, generator=seeded())
    assert (alone.high - alone.low) / (naive.high - naive.low) == pytest.approx(2, rel=0.1)      # four copies pretend to halve the error


def test_the_mean_weighs_rows_and_not_clusters() -> None:
    interval = bootstrap_mean(torch.tensor([1.0, 1.0, 1.0, 5.0]), resamples=10, generator=seeded(), clusters=torch.tensor([7, 7, 7, 9]))
    assert interval.mean == 2.0


def test_a_paired_difference_does_not_see_what_both_sides_share() -> None:
    shared, gain = 10 * torch.randn(200, generator=seeded(4)), 0.5 + 0.1 * torch.randn(200, generator=seeded(5))
    interval = bootstrap_difference(shared + gain, shared, resamples=1000, generator=seeded())
    assert 0.45 < interval.low < interval.mean < interval.high < 0.55
    assert bootstrap_difference(shared, shared, resamples=100, generator=seeded()) == Interval(0.0, 0.0, 0.0)


def test_the_seed_decides_and_the_blocks_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(30, generator=seeded(6))
    once = bootstrap_mean(values, resamples=300, generator=seeded())
    assert bootstrap_mean(values, resamples=300, generator=seeded()) == once
    assert bootstrap_mean(values, resamples=300, generator=seeded(1)) != once
    monkeypatch.setattr(bootstrap, "DRAWS_AT_A_TIME", 100)
    assert bootstrap_mean(values, resamples=300, generator=seeded()) == once


def test_wilson_by_hand() -> None:
    # 8 of 10 at z = 1.959964: centre (0.8 + 3.841459 / 20) / 1.3841459 = 0.716740, half 1.959964 sqrt(0.025604) / 1.3841459 = 0.226577
    assert wilson_interval(8, 10) == pytest.approx(Interval(0.8, 0.490163, 0.943317), abs=2e-6)
    # all of n: the low end is n / (n + z^2) = 10 / 13.841459
    assert wilson_interval(10, 10) == pytest.approx(Interval(1.0, 0.722467, 1.0), abs=1e-6)
    assert wilson_interval(0, 10) == pytest.approx(Interval(0.0, 0.0, 0.277533), abs=1e-6)


@pytest.mark.parametrize(("attempt", "message"), [
    (lambda: bootstrap_mean(torch.zeros(2), resamples=0, generator=seeded()), "resamples must be at least 1, got 0"),
    (lambda: bootstrap_mean(torch.zeros(2), resamples=1, generator=seeded(), level=95), r"in \(0, 1\), got 95"),
    (lambda: wilson_interval(3, 2), "got 3 of 2"),
    (lambda: wilson_interval(0, 0), "got 0 of 0"),
])
def test_refusals(attempt: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        attempt()


def test_shapes() -> None:
    with pytest.raises(ShapeError, match="empty"):
        bootstrap_mean(torch.zeros(0), resamples=1, generator=seeded())
    with pytest.raises(ShapeError, match="clusters has N=3, but values has N=2"):
        bootstrap_mean(torch.zeros(2), resamples=1, generator=seeded(), clusters=torch.zeros(3))
    with pytest.raises(ShapeError, match="baseline has N=3"):
        bootstrap_difference(torch.zeros(2), torch.zeros(3), resamples=1, generator=seeded())
