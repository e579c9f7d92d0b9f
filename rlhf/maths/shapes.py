"""Shape checks that name the tensor, the axes it must have and what it has."""

from __future__ import annotations

from torch import Tensor

from rlhf.errors import ShapeError


def expect_shape(axes: str, **tensors: Tensor) -> None:
    """Each tensor must have exactly these axes and agree on their sizes: expect_shape("BT", logps=x, mask=m)."""
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor.ndim != len(axes):
            raise ShapeError(f"{name} must be [{', '.join(axes)}], got shape {tuple(tensor.shape)}")
        for axis, size in zip(axes, tensor.shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                raise ShapeError(f"{name} has {axis}={size}, but {owner[axis]} has {axis}={sizes[axis]}")
            owner.setdefault(axis, name)
