"""Statistics over a mask. What lies outside the mask is never read, whatever it holds."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.errors import ShapeError


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the selected values, a scalar; any axes, the mask is bool and has the same ones."""
    return _inside(values, mask, "masked_mean").mean()


def standardise(values: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and variance 1 (divided by n, not n - 1) over the mask; 0 outside it."""
    inside = _inside(values, mask, "standardise")
    return _outside_zero((inside - inside.mean()) / _deviation(inside), mask)


def scale_to_unit_variance(values: Tensor, mask: Tensor) -> Tensor:
    """Variance 1 over the mask, mean kept; 0 outside it. For rewards, whose zero has a meaning."""
    inside = _inside(values, mask, "scale_to_unit_variance")
    mean = inside.mean()
    return _outside_zero((inside - mean) / _deviation(inside) + mean, mask)


def _inside(values: Tensor, mask: Tensor, what: str) -> Tensor:
    if mask.dtype is not torch.bool or mask.shape != values.shape:
        raise ShapeError(f"{what}: mask must be bool of shape {tuple(values.shape)}, got {mask.dtype} of shape {tuple(mask.shape)}")
    inside = values[mask]
    if inside.numel() == 0:
        raise ShapeError(f"{what}: the mask selects nothing of {mask.numel()} values, so there is no mean")
    return inside


def _deviation(inside: Tensor) -> Tensor:
    """The floor keeps a constant batch at 0 instead of 0 / 0."""
    return inside.std(correction=0).clamp_min(1e-8)


def _outside_zero(inside: Tensor, mask: Tensor) -> Tensor:
    """Scattered rather than selected by torch.where, whose backward would multiply what lies outside by 0: NaN * 0 is NaN."""
    return torch.zeros(mask.shape, dtype=inside.dtype, device=inside.device).masked_scatter(mask, inside)
