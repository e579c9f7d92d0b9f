"""Dawid & Skene: the tables of their paper, a likelihood that never falls, truth recovered, intervals against automatic derivatives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.functional import hessian, jacobian

from rlhf.errors import ConfigError, ShapeError
from rlhf.maths.dawid_skene import DawidSkene, LabelModel, Labels, accuracy_intervals, dawid_skene, labels_of

PAIRS = LabelModel(classes=3, exchangeable=(1, 0, 2), smoothing=0.1)
PATIENTS = """1111111 3334334 1122122 2223121 2223222 2223322 1222111 3333433 2222223 2322223 4444444 2223343 1111111 2223212 1211111
1112111 1111111 1111111 2222221 2221322 2222222 2222221 2223222 2212222 1111111 1111111 2322222 1111111 1111111 1121121 1111111 3333233
1111111 2222222 2223232 4334343 2212232 2323233 3333432 1111111 1111111 1212111 2322222 1211111 2222222"""
"""Their Table 1: 45 patients, seen three times by the first of five anaesthetists, once by the others; classes 1 to 4."""


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def simulated(generator: torch.Generator, *, units: int, votes: int, truthful: Tensor, ties: float = 0.1) -> tuple[Labels, Tensor]:
    """Raters say the truth (first, second, tie) with their chance, else first or second. Also the truth."""
    truth = torch.multinomial(torch.tensor([(1 - ties) / 2, (1 - ties) / 2, ties]), units, replacement=True, generator=generator)
    raters = torch.rand(units, len(truthful), generator=generator).argsort(1)[:, :votes]
    guess = torch.randint(2, raters.shape, generator=generator)
    said = torch.where(torch.rand(raters.shape, generator=generator) < truthful[raters], truth[:, None], guess)
    return Labels(torch.arange(units).repeat_interleave(votes), raters.flatten(), said.flatten()), truth


def expected_accuracy(truthful: Tensor, ties: float = 0.1) -> Tensor:
    return (1 - ties) * (1 + truthful) / 2 + ties * truthful


def test_the_tables_of_the_paper() -> None:
    rows = torch.tensor([[int(digit) - 1 for digit in patient] for patient in PATIENTS.split()])
    unit, seen = torch.nonzero(rows >= 0, as_tuple=True)
    fit = dawid_skene(Labels(unit, torch.tensor([0, 0, 0, 1, 2, 3, 4])[seen], rows[unit, seen]), LabelModel(classes=4))
    assert fit.prior.round(decimals=2).tolist() == [0.40, 0.42, 0.11, 0.07]                                              # Table 2
    assert fit.confusion[0].round(decimals=2).tolist() == [[0.89, 0.11, 0.0, 0.0], [0.07, 0.88, 0.05, 0.0],              # Table 3
                                                           [0.0, 0.34, 0.66, 0.0], [0.0, 0.0, 0.56, 0.44]]
    assert fit.posteriors[:6].round(decimals=2).argmax(1).tolist() == [0, 3, 1, 1, 1, 1]                                 # Table 4
    assert fit.posteriors[:6].max(1).values.tolist() == pytest.approx([1.0] * 6, abs=5e-3)
    assert fit.converged


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), exchangeable=st.sampled_from([None, (1, 0, 2)]), smoothing=st.sampled_from([0.0, 0.1, 2.0]))
def test_what_is_maximised_never_falls(seed: int, exchangeable: tuple[int, ...] | None, smoothing: float) -> None:
    table = torch.randint(-1, 3, (40, 6), generator=seeded(seed))
    labels = labels_of(table[(table >= 0).any(1)])
    fit = dawid_skene(labels, LabelModel(3, exchangeable, smoothing), most_steps=300)
    steps = fit.objective.diff()
    assert (steps >= -1e-9 * fit.objective[-1].abs()).all()
    torch.testing.assert_close(fit.confusion.sum(2), torch.ones(len(fit.confusion), 3, dtype=torch.double))
    torch.testing.assert_close(fit.posteriors.sum(1), torch.ones(len(fit.posteriors), dtype=torch.double))


def test_it_does_not_matter_which_response_is_called_the_first() -> None:
    labels, _ = simulated(seeded(1), units=200, votes=3, truthful=torch.tensor([0.9, 0.7, 0.5, 0.3]))
    turned = torch.rand(200, generator=seeded(2)) < 0.5
    other = Labels(labels.unit, labels.rater, torch.where(turned[labels.unit], torch.tensor([1, 0, 2])[labels.label], labels.label))
    fit, again = dawid_skene(labels, PAIRS), dawid_skene(other, PAIRS)
    torch.testing.assert_close(again.confusion, fit.confusion)
    torch.testing.assert_close(torch.where(turned[:, None], again.posteriors[:, [1, 0, 2]], again.posteriors), fit.posteriors)
    assert fit.prior[0] == fit.prior[1]
    torch.testing.assert_close(fit.confusion[:, 0, 1], fit.confusion[:, 1, 0])


def test_known_skills_and_the_truth_are_found() -> None:
    truthful = torch.tensor([0.95, 0.85, 0.7, 0.5, 0.2])
    labels, truth = simulated(seeded(3), units=4000, votes=3, truthful=truthful)
    fit = dawid_skene(labels, PAIRS)
    assert fit.accuracy.tolist() == pytest.approx(expected_accuracy(truthful).tolist(), abs=0.03)
    shares = torch.nn.functional.one_hot(labels.label, 3).double()
    majority = torch.zeros(4000, 3, dtype=torch.double).index_add(0, labels.unit, shares).argmax(1)
    assert (fit.posteriors.argmax(1) == truth).double().mean() > (majority == truth).double().mean() + 0.02
    # A posterior of 0.9 is right nine times in ten: calibration.
    sure = (fit.posteriors.max(1).values - 0.9).abs() < 0.05
    assert (fit.posteriors.argmax(1) == truth)[sure].double().mean() == pytest.approx(0.9, abs=0.06)


def test_a_rater_who_is_always_wrong_is_found_out_and_used() -> None:
    truth = torch.randint(2, (300,), generator=seeded(4))
    good = torch.where(torch.rand(300, 3, generator=seeded(5)) < 0.9, truth[:, None], 1 - truth[:, None])
    fit = dawid_skene(labels_of(torch.cat([good, 1 - truth[:, None]], 1)), LabelModel(2, smoothing=0.1))
    assert fit.accuracy[3] < 0.05
    assert (fit.posteriors.argmax(1) == truth).double().mean() > 0.99


# Intervals against the Hessian of a likelihood that is written down independently, in other parameters

def logits_to_shares(free: Tensor) -> Tensor:
    return torch.cat([free, torch.zeros(*free.shape[:-1], 1, dtype=free.dtype)], -1).softmax(-1)


def plain(theta: Tensor, raters: int) -> tuple[Tensor, Tensor]:
    return logits_to_shares(theta[:2]), logits_to_shares(theta[2:].view(raters, 3, 2))


def mirrored(theta: Tensor, raters: int) -> tuple[Tensor, Tensor]:
    """Tie or not; then for each rater: right, wrong, tie where there is a better one; tie or not where there is none."""
    tie = theta[0].sigmoid()
    prior = torch.stack([(1 - tie) / 2, (1 - tie) / 2, tie])
    strict = logits_to_shares(theta[1:].view(raters, 3)[:, :2])
    tied = theta[1:].view(raters, 3)[:, 2].sigmoid()
    rows = [strict, strict[:, [1, 0, 2]], torch.stack([(1 - tied) / 2, (1 - tied) / 2, tied], 1)]
    return prior, torch.stack(rows, 1)


def log_posterior(prior: Tensor, confusion: Tensor, labels: Labels, smoothing: float) -> Tensor:
    units = int(labels.unit.max()) + 1
    joint = prior.log().expand(units, -1).index_add(0, labels.unit, confusion.log()[labels.rater, :, labels.label])
    return joint.logsumexp(1).sum() + smoothing * (prior.log().sum() + confusion.log().sum())


def parameters(fit: DawidSkene, model: LabelModel) -> Tensor:
    def free(shares: Tensor) -> Tensor:
        return shares[..., :-1].log() - shares[..., -1:].log()
    if model.exchangeable is None:
        return torch.cat([free(fit.prior), free(fit.confusion).flatten()])
    tied = fit.confusion[:, 2, 2].logit()
    return torch.cat([fit.prior[2:].logit(), torch.cat([free(fit.confusion[:, 0]), tied[:, None]], 1).flatten()])


@pytest.mark.parametrize(("model", "shape"), [(LabelModel(3, None, 0.5), plain), (LabelModel(3, (1, 0, 2), 0.5), mirrored)])
def test_intervals_are_those_of_the_hessian(model: LabelModel, shape: Callable[[Tensor, int], tuple[Tensor, Tensor]],
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.maths.dawid_skene.SETTLED", 1e-10)
    labels, _ = simulated(seeded(6), units=150, votes=3, truthful=torch.tensor([0.9, 0.7, 0.5]), ties=0.2)
    fit = dawid_skene(labels, model)
    theta = parameters(fit, model)

    def objective(theta: Tensor) -> Tensor:
        return log_posterior(*shape(theta, 3), labels, model.smoothing)

    def accuracy(theta: Tensor) -> Tensor:
        prior, confusion = shape(theta, 3)
        return (prior * confusion.diagonal(dim1=1, dim2=2)).sum(1).logit()
    assert jacobian(objective, theta).abs().max() < 1e-5          # the fit is where the likelihood is flat
    slope = jacobian(accuracy, theta)
    variance = slope @ torch.linalg.inv(-hessian(objective, theta)) @ slope.T
    found = torch.tensor(accuracy_intervals(fit, labels, model), dtype=torch.double).logit()
    torch.testing.assert_close(found[:, 2] - found[:, 1], 2 * 1.959964 * variance.diagonal().sqrt(), rtol=1e-4, atol=0)


def test_intervals_cover_the_true_accuracies() -> None:
    truthful = torch.tensor([0.9, 0.75, 0.6, 0.4, 0.2])
    true = expected_accuracy(truthful).tolist()
    covered = []
    for i in range(60):
        labels, _ = simulated(seeded(100 + i), units=150, votes=3, truthful=truthful)
        fit = dawid_skene(labels, PAIRS)
        covered += [low <= value <= high for (_, low, high), value in zip(accuracy_intervals(fit, labels, PAIRS), true, strict=True)]
    assert 0.90 <= sum(covered) / len(covered) <= 0.99


def test_units_of_one_cluster_count_as_one() -> None:
    once, _ = simulated(seeded(7), units=400, votes=3, truthful=torch.tensor([0.9, 0.7, 0.5, 0.6]))
    twice = Labels(torch.cat([once.unit, once.unit + 400]), once.rater.repeat(2), once.label.repeat(2))
    fit = dawid_skene(twice, PAIRS)
    naive = accuracy_intervals(fit, twice, PAIRS)
    clustered = accuracy_intervals(fit, twice, PAIRS, clusters=torch.arange(400).repeat(2))
    wider = torch.tensor([(wide.high - wide.low) / (narrow.high - narrow.low) for wide, narrow in zip(clustered, naive, strict=True)])
    assert wider.mean() == pytest.approx(2 ** 0.5, rel=0.08)


def test_blocks_do_not_change_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    labels, _ = simulated(seeded(8), units=100, votes=2, truthful=torch.tensor([0.9, 0.7, 0.5]))
    fit = dawid_skene(labels, PAIRS)
    whole = accuracy_intervals(fit, labels, PAIRS)
    monkeypatch.setattr("rlhf.maths.dawid_skene.DENSE_AT_A_TIME", 70)
    torch.testing.assert_close(torch.tensor(accuracy_intervals(fit, labels, PAIRS)), torch.tensor(whole))


@pytest.mark.parametrize(("attempt", "error", "message"), [
    (lambda: dawid_skene(labels_of(torch.tensor([[3]])), PAIRS), ShapeError, r"labels must be 0 \.\. 2, got 3"),
    (lambda: dawid_skene(labels_of(torch.tensor([[-1]])), PAIRS), ShapeError, "no labels"),
    (lambda: dawid_skene(labels_of(torch.tensor([[-1], [1]])), PAIRS), ShapeError, "each have a label"),
    (lambda: dawid_skene(labels_of(torch.tensor([[1]])), LabelModel(3, (1, 2, 0))), ConfigError, "must swap classes"),
    (lambda: dawid_skene(labels_of(torch.tensor([[1]])), LabelModel(3, (0, 1))), ConfigError, r"0 \.\. 2, got \(0, 1\)"),
    (lambda: accuracy_intervals(dawid_skene(labels_of(torch.tensor([[1]])), LabelModel(3)), labels_of(torch.tensor([[1]])), LabelModel(3)),
     ConfigError, "smoothing above 0")])
def test_refusals(attempt: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attempt()
