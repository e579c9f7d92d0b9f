"""Masked statistics: by hand, and blind to what the mask hides, in value and gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlhf.errors import ShapeError
from rlhf.maths.masking import masked_mean, scale_to_unit_variance, standardise
from rlhf.maths.shapes import expect_shape

MASK = torch.tensor([[True, True, False], [True, False, False]])
VALUES = torch.tensor([[1.0, 3.0, 100.0], [8.0, -7.0, 100.0]])     # inside: 1, 3, 8; mean 4, variance (9 + 1 + 16) / 3 = 26 / 3


def test_by_hand() -> None:
    deviation = (26 / 3) ** 0.5
    torch.testing.assert_close(masked_mean(VALUES, MASK), torch.tensor(4.0))
    torch.testing.assert_close(standardise(VALUES, MASK), torch.tensor([[-3.0, -1.0, 0.0], [4.0, 0.0, 0.0]]) / deviation)
    torch.testing.assert_close(scale_to_unit_variance(VALUES, MASK),
                               torch.tensor([[4 - 3 / deviation, 4 - 1 / deviation, 0.0], [4 + 4 / deviation, 0.0, 0.0]]))


@pytest.mark.parametrize("function", [masked_mean, standardise, scale_to_unit_variance])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_the_mask_hides_is_never_read(function: Callable[[Tensor, Tensor], Tensor], poison: float) -> None:
    clean = VALUES.clone().requires_grad_()
    poisoned = torch.where(MASK, VALUES, torch.tensor(poison)).requires_grad_()
    torch.testing.assert_close(function(poisoned, MASK), function(clean, MASK))
    for leaf in (clean, poisoned):
        function(leaf, MASK).square().sum().backward()
    torch.testing.assert_close(poisoned.grad, clean.grad)
    assert (poisoned.grad[~MASK] == 0).all()


def test_a_constant_batch_standardises_to_zero() -> None:
    torch.testing.assert_close(standardise(torch.full((2, 3), 5.0), MASK), torch.zeros(2, 3))


@pytest.mark.parametrize("function", [masked_mean, standardise, scale_to_unit_variance])
def test_refusals(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(ShapeError, match="selects nothing of 6 values"):
        function(VALUES, torch.zeros(2, 3, dtype=torch.bool))
    with pytest.raises(ShapeError, match=r"must be bool of shape \(2, 3\), got torch.int64"):
        function(VALUES, MASK.long())
    with pytest.raises(ShapeError, match=r"of shape \(3,\)"):
        function(VALUES, MASK[0])


def test_expect_shape_names_the_tensor_the_axis_and_both_sizes() -> None:
    expect_shape("BT", logps=torch.zeros(2, 3), mask=torch.zeros(2, 3))
    with pytest.raises(ShapeError, match="mask has T=4, but logps has T=3"):
        expect_shape("BT", logps=torch.zeros(2, 3), mask=torch.zeros(2, 4))
    with pytest.raises(ShapeError, match=r"mask must be \[B, T\], got shape \(2,\)"):
        expect_shape("BT", logps=torch.zeros(2, 3), mask=torch.zeros(2))
    with pytest.raises(ShapeError, match="weight has N=2, but weight has N=1"):
        expect_shape("NN", weight=torch.zeros(1, 2))
