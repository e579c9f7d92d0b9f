"""Krippendorff's alpha: the example of its author, parity with the krippendorff package, invariances, and intervals that cover."""

from __future__ import annotations

from collections.abc import Callable

import krippendorff
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.errors import ConfigError, ShapeError
from rlhf.maths import agreement
from rlhf.maths.agreement import Level, Ratings, krippendorff_alpha, ratings_of, reliability

LEVELS: tuple[Level, ...] = ("nominal", "ordinal", "interval")
NONE = float("nan")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_table(generator: torch.Generator, *, raters: int, units: int, values: int, missing: float) -> torch.Tensor:
    table = torch.randint(values, (raters, units), generator=generator).double()
    return torch.where(torch.rand(raters, units, generator=generator) < missing, NONE, table)


@pytest.mark.parametrize(("level", "published"), [("nominal", 0.743), ("ordinal", 0.815), ("interval", 0.849)])
def test_the_example_of_krippendorff_2011(level: Level, published: float) -> None:
    table = torch.tensor([
        [1, 2, 3, 3, 2, 1, 4, 1, 2, NONE, NONE, NONE],
        [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, NONE, 3],
        [NONE, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, NONE],
        [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, NONE]], dtype=torch.double)
    assert krippendorff_alpha(ratings_of(table), level=level) == pytest.approx(published, abs=5e-4)


def test_two_raters_by_hand() -> None:
    # (a, a), (a, b): of four ratings three are a. D_o = 2/4, D_e = 2 * 3 * 1 / (4 * 3) = 1/2, alpha = 0.
    assert krippendorff_alpha(Ratings(torch.tensor([0, 0, 1, 1]), torch.tensor([5.0, 5, 5, 7])), level="nominal") == pytest.approx(0)
    # (a, b), (b, a): always apart. D_o = 1, D_e = 2 * 2 * 2 / (4 * 3) = 2/3, alpha = -1/2.
    assert krippendorff_alpha(Ratings(torch.tensor([0, 0, 1, 1]), torch.tensor([5.0, 7, 7, 5])), level="nominal") == pytest.approx(-0.5)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), raters=st.integers(2, 6), units=st.integers(1, 30), values=st.integers(2, 6),
       missing=st.sampled_from([0.0, 0.3, 0.7]), level=st.sampled_from(LEVELS))
def test_parity_with_the_krippendorff_package(seed: int, raters: int, units: int, values: int, missing: float, level: Level) -> None:
    table = random_table(seeded(seed), raters=raters, units=units, values=values, missing=missing)
    ours = krippendorff_alpha(ratings_of(table), level=level)
    pairable = table[:, (~table.isnan()).sum(0) >= 2]
    if len(torch.unique(pairable[~pairable.isnan()])) < 2:
        assert ours is None
    else:
        assert ours == pytest.approx(krippendorff.alpha(table.numpy(), level_of_measurement=level), abs=1e-9)


@pytest.mark.parametrize(("level", "same"), [
    ("nominal", lambda values: torch.tensor([3.0, 0.0, 7.0, -1.0])[values.long()]),     # other names
    ("ordinal", lambda values: torch.exp(5 * values)),                                  # the same order
    ("interval", lambda values: 1e6 - 3 * values)])                                     # another scale
def test_what_a_level_does_not_read_cannot_change_alpha(level: Level, same: Callable[[torch.Tensor], torch.Tensor]) -> None:
    ratings = ratings_of(random_table(seeded(1), raters=4, units=40, values=4, missing=0.2))
    changed = Ratings(ratings.unit, same(ratings.value))
    assert krippendorff_alpha(changed, level=level) == pytest.approx(krippendorff_alpha(ratings, level=level), abs=1e-9)


@pytest.mark.parametrize("level", LEVELS)
def test_units_with_one_rating_say_nothing(level: Level) -> None:
    ratings = ratings_of(random_table(seeded(2), raters=3, units=20, values=3, missing=0.0))
    alone = Ratings(torch.cat([ratings.unit, torch.arange(100, 150)]), torch.cat([ratings.value, torch.full((50,), 9.0)]))
    assert krippendorff_alpha(alone, level=level) == krippendorff_alpha(ratings, level=level)


@pytest.mark.parametrize("level", LEVELS)
def test_where_nothing_can_be_told_there_is_no_alpha(level: Level) -> None:
    apart = Ratings(torch.arange(5), torch.tensor([0.0, 1, 2, 0, 1]))
    same = Ratings(torch.tensor([0, 0, 1, 1]), torch.full((4,), 1 / 3))
    for ratings in (apart, same, Ratings(torch.zeros(0, dtype=torch.long), torch.zeros(0))):
        assert krippendorff_alpha(ratings, level=level) is None
        assert reliability(ratings, level=level, resamples=10, generator=seeded()) is None


def simulated(generator: torch.Generator, *, units: int, truthful: float) -> Ratings:
    """Three raters who say the truth, one of three values, with this chance, and anything otherwise: alpha is truthful^2."""
    truth = torch.randint(3, (units,), generator=generator).repeat(3)
    guess = torch.randint(3, (3 * units,), generator=generator)
    said = torch.where(torch.rand(3 * units, generator=generator) < truthful, truth, guess)
    return Ratings(torch.arange(units).repeat(3), said.double())


def test_nineteen_of_twenty_intervals_cover_the_true_alpha_and_agreement() -> None:
    found = [reliability(simulated(seeded(i), units=120, truthful=0.7), level="nominal", resamples=300, generator=seeded(i))
             for i in range(200)]
    alphas, agreements = [one.alpha for one in found if one], [one.agreement for one in found if one and one.agreement]
    assert 0.91 <= sum(low <= 0.49 <= high for _, low, high in alphas) / 200 <= 0.98
    assert 0.91 <= sum(low <= 0.49 + 0.51 / 3 <= high for _, low, high in agreements) / 200 <= 0.98


def test_units_of_one_cluster_are_drawn_together() -> None:
    alone = simulated(seeded(3), units=60, truthful=0.6)
    copies = Ratings(torch.cat([alone.unit + 60 * copy for copy in range(4)]), alone.value.repeat(4))
    clustered = reliability(copies, level="ordinal", resamples=1000, generator=seeded(), clusters=alone.unit.repeat(4))
    naive = reliability(copies, level="ordinal", resamples=1000, generator=seeded())
    single = reliability(alone, level="ordinal", resamples=1000, generator=seeded())
    assert clustered and naive and single

    def width(one: agreement.Reliability) -> float:
        return one.alpha.high - one.alpha.low
    assert width(clustered) == pytest.approx(width(single), rel=0.02)
    assert width(clustered) / width(naive) == pytest.approx(2, rel=0.15)     # four copies pretend to halve the error


def test_the_seed_decides_and_the_blocks_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    ratings = simulated(seeded(4), units=30, truthful=0.6)

    def once(seed: int) -> agreement.Reliability | None:
        return reliability(ratings, level="nominal", resamples=200, generator=seeded(seed))
    first = once(0)
    assert once(0) == first != once(1)
    monkeypatch.setattr(agreement, "DRAWS_AT_A_TIME", 100)
    assert once(0) == first


@pytest.mark.parametrize(("attempt", "error", "message"), [
    (lambda: krippendorff_alpha(Ratings(torch.zeros(2), torch.tensor([1.0, NONE])), level="nominal"), ShapeError, "not finite"),
    (lambda: krippendorff_alpha(Ratings(torch.zeros(2), torch.zeros(3)), level="nominal"), ShapeError, "value has N=3, but unit has N=2"),
    (lambda: reliability(Ratings(torch.zeros(2), torch.zeros(2)), level="nominal", resamples=9, generator=seeded(),
                         clusters=torch.tensor([0, 1])), ShapeError, "belongs to one cluster"),
    (lambda: reliability(Ratings(torch.zeros(2), torch.zeros(2)), level="nominal", resamples=0, generator=seeded()), ConfigError, "got 0"),
    (lambda: reliability(Ratings(torch.zeros(2), torch.zeros(2)), level="nominal", resamples=9, generator=seeded(), coverage=95),
     ConfigError, r"in \(0, 1\), got 95")])
def test_refusals(attempt: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attempt()
