"""The truth behind the labels of raters who err, and how often each of them does. Dawid & Skene 1979, Applied Statistics 28, 20-28."""

from __future__ import annotations

from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.errors import ConfigError, ShapeError
from rlhf.maths.agreement import sums_by
from rlhf.maths.bootstrap import Interval
from rlhf.maths.shapes import expect_shape

MOST_STEPS = 5000
SETTLED = 1e-5
"""Largest change of a probability in a step of a fit that has converged."""
DENSE_AT_A_TIME = 1 << 22
"""Bounds the dense part of a product to 32 MiB, whatever the numbers of units and raters."""


class Labels(NamedTuple):
    """One row a label. A label that is missing has no row; a rater may label a unit more than once."""

    unit: Tensor
    """[N] 0 .. U-1, each at least once."""
    rater: Tensor
    """[N] 0 .. R-1."""
    label: Tensor
    """[N] 0 .. K-1."""


class LabelModel(NamedTuple):
    """What is assumed of the labels. K classes; labels of a unit are independent of each other, given its true class."""

    classes: int
    exchangeable: tuple[int, ...] | None = None
    """A permutation of the classes that only renames them: (1, 0, 2) for first, second, tie, where it means nothing which response is
    called the first. Prior and confusion are then the same under it, and a rater has 3 free numbers instead of 6."""
    smoothing: float = 0.0
    """Made-up labels in each cell: maximum a posteriori under Dirichlet(1 + smoothing). 0 is the paper's maximum likelihood."""

    @property
    def renamed(self) -> Tensor:
        """[K]. Raises ConfigError for what is not a permutation that undoes itself."""
        names = torch.arange(self.classes) if self.exchangeable is None else torch.tensor(self.exchangeable)
        if sorted(names.tolist()) != list(range(self.classes)) or not torch.equal(names[names], torch.arange(self.classes)):
            raise ConfigError(f"exchangeable must swap classes among 0 .. {self.classes - 1}, got {self.exchangeable}")
        return names


class DawidSkene(NamedTuple):
    """A fit to U units, R raters, K classes; float64."""

    posteriors: Tensor
    """[U, K] chance of each class, given all labels of the unit."""
    confusion: Tensor
    """[R, K, K] confusion[r, c, l] is the chance that rater r says l where c is true."""
    prior: Tensor
    """[K] share of each class."""
    objective: Tensor
    """[steps] what is maximised, in nats, as each step found it: the log-likelihood and the log of the Dirichlet priors. It never falls."""
    converged: bool

    @property
    def accuracy(self) -> Tensor:
        """[R] chance that a rater labels a unit of this population right: sum_c prior[c] confusion[r, c, c]."""
        return (self.prior * self.confusion.diagonal(dim1=1, dim2=2)).sum(1)


def labels_of(matrix: Tensor) -> Labels:
    """A table of labels [units, raters], -1 where a rater gave none, as one row a label."""
    expect_shape("UR", matrix=matrix)
    unit, rater = torch.nonzero(matrix >= 0, as_tuple=True)
    return Labels(unit, rater, matrix[unit, rater].long())


def dawid_skene(labels: Labels, model: LabelModel, *, most_steps: int = MOST_STEPS) -> DawidSkene:
    """Expectation maximisation.

    E-step (their Eq. 2.5)   posterior[u, c] ~ prior[c] prod_{labels l of u, by r} confusion[r, c, l]
    M-step (Eq. 2.3, 2.4)    confusion[r, c, l] ~ smoothing + sum_{labels l by r, of u} posterior[u, c]
                             prior[c] ~ smoothing + sum_u posterior[u, c]

    It starts from the shares of the labels of each unit (Eq. 3.1), so that classes keep their names as long as majorities are more often
    right than wrong. Raises ShapeError for numbers out of range. `converged` tells whether it settled within `most_steps`.
    """
    units, raters = _require_labels(labels, model)
    shares = sums_by(labels.unit, torch.nn.functional.one_hot(labels.label, model.classes).double(), units)
    posteriors = shares / shares.sum(1, keepdim=True)
    said = labels.rater * model.classes + labels.label
    prior, confusion = _parameters(posteriors, labels.unit, said, raters, model)
    objective: list[Tensor] = []
    converged = False
    while not converged and len(objective) < most_steps:
        evidence = confusion.log().transpose(1, 2).reshape(-1, model.classes).index_select(0, said)
        joint = prior.log() + sums_by(labels.unit, evidence, units)
        most = joint.max(1, keepdim=True).values
        weights = (joint - most).exp()
        total = weights.sum(1, keepdim=True)
        objective.append((most + total.log()).sum() + _log_dirichlet(prior, model) + _log_dirichlet(confusion, model))
        posteriors = weights / total
        new_prior, new_confusion = _parameters(posteriors, labels.unit, said, raters, model)
        change = torch.maximum((new_prior - prior).abs().max(), (new_confusion - confusion).abs().max())
        prior, confusion, converged = new_prior, new_confusion, change.item() < SETTLED
    return DawidSkene(posteriors, confusion, prior, torch.stack(objective), converged)


def accuracy_intervals(fit: DawidSkene, labels: Labels, model: LabelModel, *, clusters: Tensor | None = None,
                       coverage: float = 0.95) -> list[Interval]:
    """Of each rater's accuracy, by the delta method on the scale of log-odds. `labels` and `model` are those of the fit.

    The variance is the inverse of the information that the labels hold about the logits of prior and confusion: that of labels with known
    true classes, less what is missing because they are not known (Louis 1982, J. R. Stat. Soc. B 44, 226-233), so that an interval is as
    wide as the doubt about the truth makes it.

    clusters [U] names units that are not independent of each other (all pairs of one ranking). A rater's variance is then the larger one of
    this and the sandwich J^-1 K J^-1, with K the outer products of the clusters' summed scores (Godambe 1960, Ann. Math. Stat. 31,
    1208-1211); the sandwich alone comes out too small for raters with few labels or hardly an error.
    """
    if model.smoothing <= 0:
        raise ConfigError("accuracy_intervals needs a smoothing above 0: a confusion of exactly 0 has no finite logit")
    scores = _scores(fit, model)
    information = _known_classes(fit, labels, model, scores) - _missing(fit, labels, scores)
    variance = torch.linalg.inv((information + information.T) / 2)
    slope = fit.prior * fit.confusion.diagonal(dim1=1, dim2=2)
    diagonal = scores.confusion.diagonal(dim1=1, dim2=2).movedim(-1, 1)
    gradient = torch.cat([_block_diagonal(torch.einsum("rc,rcf->rf", slope, diagonal)[:, None]), slope @ scores.prior], 1)
    along = gradient @ variance
    squared_error = (along * gradient).sum(1)
    if clusters is not None:
        expect_shape("U", clusters=clusters, posteriors=fit.posteriors[:, 0])
        cluster = torch.unique(clusters, return_inverse=True)[1]
        squared_error = squared_error.maximum(((along @ _gram(_expected_scores(fit, labels, scores, row=cluster))) * along).sum(1))
    accuracy, z = fit.accuracy, NormalDist().inv_cdf((1 + coverage) / 2)
    half = z * squared_error.sqrt() / (accuracy * (1 - accuracy))
    low, high = (accuracy.logit() - half).sigmoid(), (accuracy.logit() + half).sigmoid()
    return [Interval(*figures) for figures in torch.stack([accuracy, low, high], 1).tolist()]


# Expectation maximisation

def _require_labels(labels: Labels, model: LabelModel) -> tuple[int, int]:
    """Numbers of units and of raters."""
    expect_shape("N", unit=labels.unit, rater=labels.rater, label=labels.label)
    if not len(labels.unit):
        raise ShapeError("there are no labels")
    if labels.label.min() < 0 or labels.label.max() >= model.classes:
        raise ShapeError(f"labels must be 0 .. {model.classes - 1}, got {int(labels.label.min())} .. {int(labels.label.max())}; a missing "
                         "label has no row (see labels_of)")
    if labels.unit.min() < 0 or (torch.bincount(labels.unit) == 0).any():
        raise ShapeError("units must be numbered 0 .. U-1 and each have a label")
    return int(labels.unit.max()) + 1, int(labels.rater.max()) + 1


def _parameters(posteriors: Tensor, unit: Tensor, said: Tensor, raters: int, model: LabelModel) -> tuple[Tensor, Tensor]:
    """The M-step: prior [K] and confusion [R, K, K]. Row i of the labels is said[i] = rater K + label, of unit[i]."""
    classes = model.classes
    counts = sums_by(said, posteriors.index_select(0, unit), raters * classes).view(raters, classes, classes).transpose(1, 2)
    marginal = posteriors.sum(0)
    if model.exchangeable is not None:
        renamed = model.renamed
        counts, marginal = (counts + counts[:, renamed][:, :, renamed]) / 2, (marginal + marginal[renamed]) / 2
    return _shares(marginal + model.smoothing), _shares(counts + model.smoothing)


def _shares(counts: Tensor) -> Tensor:
    """Along the last axis; where all counts are 0, any shares are as likely, and equal ones are taken."""
    totals = counts.sum(-1, keepdim=True)
    return torch.where(totals > 0, counts / totals, 1 / counts.shape[-1])


def _log_dirichlet(shares: Tensor, model: LabelModel) -> Tensor:
    return torch.xlogy(torch.full_like(shares, model.smoothing), shares).sum()


# Information. Prior and confusion are softmaxes of logits; logits move along a basis of those directions that change something and respect
# `exchangeable`: F directions for a rater, F' for the prior. Parameters are ordered rater by rater, then the prior.

class _Scores(NamedTuple):
    """Derivatives of log-probabilities along the basis."""

    confusion: Tensor
    """[R, K, K, F] of log confusion[r, c, l]."""
    prior: Tensor
    """[K, F'] of log prior[c]."""


class _Sparse(NamedTuple):
    row: Tensor
    column: Tensor
    value: Tensor
    shape: tuple[int, int]


def _scores(fit: DawidSkene, model: LabelModel) -> _Scores:
    classes = model.classes
    basis = _basis(classes, classes, model.renamed).view(classes, classes, -1)
    prior_basis = _basis(1, classes, model.renamed)
    return _Scores(basis - torch.einsum("rcm,cmf->rcf", fit.confusion, basis)[:, :, None], prior_basis - fit.prior @ prior_basis)


def _basis(rows: int, classes: int, renamed: Tensor) -> Tensor:
    """[rows * classes, F] orthonormal: matrices whose rows add up to 0 and that are the same under `renamed`."""
    centred = torch.eye(classes, dtype=torch.double) - 1 / classes
    swap = torch.eye(classes, dtype=torch.double)[renamed]
    same = torch.eye(rows * classes, dtype=torch.double) + torch.kron(swap if rows == classes else torch.eye(1, dtype=torch.double), swap)
    values, vectors = torch.linalg.eigh(torch.kron(torch.eye(rows, dtype=torch.double), centred) @ same / 2)
    basis: Tensor = vectors[:, values > 0.5]
    return basis


def _known_classes(fit: DawidSkene, labels: Labels, model: LabelModel, scores: _Scores) -> Tensor:
    """Information if the posteriors were known classes, with that of the made-up labels: each label's expected outer product of scores."""
    raters, classes = fit.confusion.shape[:2]
    counts = sums_by(labels.rater, fit.posteriors[labels.unit], raters) + classes * model.smoothing
    blocks = torch.einsum("rc,rcl,rclf,rclg->rfg", counts, fit.confusion, scores.confusion, scores.confusion)
    prior = (len(fit.posteriors) + classes * model.smoothing) * torch.einsum("c,cf,cg->fg", fit.prior, scores.prior, scores.prior)
    of_raters = _block_diagonal(blocks)
    return torch.cat([torch.nn.functional.pad(of_raters, (0, len(prior))), torch.nn.functional.pad(prior, (len(of_raters), 0))])


def _block_diagonal(blocks: Tensor) -> Tensor:
    """[R, A, B] -> [R A, R B]."""
    count, height, width = blocks.shape
    matrix = torch.zeros(count, height, count, width, dtype=blocks.dtype)
    matrix[torch.arange(count), :, torch.arange(count)] = blocks
    return matrix.view(count * height, count * width)


def _missing(fit: DawidSkene, labels: Labels, scores: _Scores) -> Tensor:
    """Over all units, the covariance of their score over the posterior of their class."""
    units, classes = fit.posteriors.shape
    root = fit.posteriors.sqrt()
    given = scores.confusion[labels.rater, :, labels.label] * root[labels.unit][..., None]
    rows = torch.arange(units * classes)
    of_label = (labels.unit[:, None] * classes + torch.arange(classes)).flatten()
    by_class = _sparse(of_label, labels.rater.repeat_interleave(classes), given.flatten(0, 1), rows,
                       (scores.prior * root[..., None]).flatten(0, 1), raters=len(fit.confusion))
    return _gram(by_class) - _gram(_expected_scores(fit, labels, scores, row=torch.arange(units)))


def _expected_scores(fit: DawidSkene, labels: Labels, scores: _Scores, *, row: Tensor) -> _Sparse:
    """The score of each unit, over the posterior of its class, added to its row."""
    of_labels = torch.einsum("nc,ncf->nf", fit.posteriors[labels.unit], scores.confusion[labels.rater, :, labels.label])
    return _sparse(row[labels.unit], labels.rater, of_labels, row, fit.posteriors @ scores.prior, raters=len(fit.confusion))


def _sparse(row: Tensor, rater: Tensor, values: Tensor, prior_row: Tensor, prior_values: Tensor, *, raters: int) -> _Sparse:
    """[rows, R F + F'] from the scores of labels [N, F] and of the prior [M, F']."""
    free, prior_free = values.shape[1], prior_values.shape[1]
    column = rater[:, None] * free + torch.arange(free)
    prior_column = (raters * free + torch.arange(prior_free)).expand(len(prior_values), -1)
    return _Sparse(torch.cat([row.repeat_interleave(free), prior_row.repeat_interleave(prior_free)]),
                   torch.cat([column.flatten(), prior_column.flatten()]), torch.cat([values.flatten(), prior_values.flatten()]),
                   (int(prior_row.max()) + 1, raters * free + prior_free))


def _gram(sparse: _Sparse) -> Tensor:
    """X^T X, a block of rows at a time."""
    order = sparse.row.argsort()
    row, column, value = sparse.row[order], sparse.column[order], sparse.value[order]
    height, width = sparse.shape
    gram = torch.zeros(width, width, dtype=torch.double)
    block = max(1, DENSE_AT_A_TIME // width)
    for start in range(0, height, block):
        here = slice(*torch.searchsorted(row, torch.tensor([start, start + block])).tolist())
        rows = min(block, height - start)
        dense = torch.zeros(rows, width, dtype=torch.double).index_put((row[here] - start, column[here]), value[here], accumulate=True)
        turned = torch.sparse_coo_tensor(torch.stack([column[here], row[here] - start]), value[here], (width, rows), check_invariants=False)
        gram += torch.sparse.mm(turned, dense)
    return gram
