"""Token log-probabilities from hidden states, a chunk of rows at a time: the [R, V] float32 logits never exist as a whole.

R is the number of predicted tokens, D the hidden size, V the vocabulary. At V = 128,256 and R = 8,192 those logits and their
gradient are 8 GB, more than anything else of a step with adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rlhf.errors import ShapeError
from rlhf.maths.shapes import expect_shape

Head = Callable[[Tensor], Tensor]
"""Hidden states [n, D] to logits [n, V], row by row: a linear layer with what belongs to it (bias, adapters, soft-capping)."""


def chunked_logps(hidden: Tensor, head: Head, targets: Tensor, *, chunk: int) -> Tensor:
    """log p(target) = log softmax(logits)[target] of each row, [R], float32 or wider.

    hidden [R, D], targets [R] int64. At most `chunk` rows have logits at any time, in the forward and in the backward:

    - Where nothing needs a gradient, or all rows fit one chunk, nothing is computed twice.
    - Where the head has nothing to train, d logp / d hidden is worked out beside the logits and kept ([R, D]): a row's
      log-probability depends on its own hidden state only, so the backward scales it by the incoming gradient.
    - Otherwise each chunk is recomputed in the backward (one more head forward), because the gradient of the head's
      weights needs the incoming gradient before the rows are summed.

    Under ZeRO-3 the caller gathers the head around the call: ranks differ in R, hence in how often `head` is called.
    """
    expect_shape("R", targets=targets, hidden=hidden[..., 0])
    _require_rows(len(targets), chunk)
    if not torch.is_grad_enabled():
        return _logps_by_chunk(hidden, head, targets, chunk)
    if not _is_trained(head, hidden):
        if not hidden.requires_grad:
            return _logps_by_chunk(hidden, head, targets, chunk)
        logps: Tensor = _FrozenHead.apply(hidden, head, targets, chunk)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
        return logps
    if len(targets) <= chunk:
        return target_logps(head(hidden), targets)
    return torch.cat([checkpoint(_head_logps, rows, head, wanted, use_reentrant=False) for rows, wanted in _chunks(hidden, targets, chunk)])


@torch.no_grad()
def chunked_entropy(hidden: Tensor, head: Head, *, chunk: int) -> Tensor:
    """Entropy of each row's next-token distribution in nats, [R], without gradient: logsumexp(z) - sum softmax(z) z."""
    expect_shape("RD", hidden=hidden)
    _require_rows(len(hidden), chunk)
    entropies = []
    for rows in torch.split(hidden, chunk):
        logps = head(rows).float().log_softmax(-1)
        entropies.append(-(logps.exp() * logps).sum(-1))
    return torch.cat(entropies)


def target_logps(logits: Tensor, targets: Tensor) -> Tensor:
    """log softmax(logits)[target] of each row, [R], float32 or wider. logits [R, V], targets [R] int64."""
    expect_shape("R", targets=targets, logits=logits[..., 0])
    logps: Tensor = _TargetLogps.apply(logits, targets)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return logps


def segment_sums(values: Tensor, segment: Tensor, count: int) -> Tensor:
    """Sum of the values of each segment, [count]: out[s] = sum of values[r] over rows with segment[r] = s. values [R], segment [R] int64.

    On a CPU the rows of a segment are added in order, so the result does not depend on threads or on the other segments. On CUDA the
    order of additions is left open and last bits differ from run to run, unless torch.use_deterministic_algorithms(True) is on.
    """
    expect_shape("R", values=values, segment=segment)
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, segment, values)


class _TargetLogps(torch.autograd.Function):
    """Keeps one [n, V] tensor; torch's own log_softmax and gather keep the same one, but their backward makes two more."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        logps = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        ctx.save_for_backward(logps, targets)
        ctx.logits_dtype = logits.dtype
        return logps.gather(-1, targets[:, None]).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """d logp / d z = onehot(target) - softmax(z)."""
        logps, targets = ctx.saved_tensors
        gradient = logps.exp().mul_(-grad[:, None]).scatter_add_(-1, targets[:, None], grad[:, None])
        return gradient.to(ctx.logits_dtype), None


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Head, targets: Tensor, chunk: int) -> Tensor:
        logps, slopes = [], []
        for rows, wanted in _chunks(hidden, targets, chunk):
            with torch.enable_grad():
                leaf = rows.detach().requires_grad_()
                values = _head_logps(leaf, head, wanted)
            slopes.append(torch.autograd.grad(values, leaf, torch.ones_like(values))[0])
            logps.append(values.detach())
        ctx.save_for_backward(torch.cat(slopes))
        return torch.cat(logps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return (slopes * grad[:, None]).to(slopes.dtype), None, None, None


def _chunks(hidden: Tensor, targets: Tensor, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True)


def _head_logps(hidden: Tensor, head: Head, targets: Tensor) -> Tensor:
    return target_logps(head(hidden), targets)


def _logps_by_chunk(hidden: Tensor, head: Head, targets: Tensor, chunk: int) -> Tensor:
    with torch.no_grad():
        return torch.cat([_head_logps(rows, head, wanted) for rows, wanted in _chunks(hidden, targets, chunk)])


def _is_trained(head: Head, hidden: Tensor) -> bool:
    """Whether the logits of a constant need a gradient: asks the callable itself, whatever it closes over."""
    return head(hidden[:1].detach()).requires_grad


def _require_rows(rows: int, chunk: int) -> None:
    if chunk < 1:
        raise ShapeError(f"chunk is the number of rows with logits at one time and must be at least 1, got {chunk}")
    if rows == 0:
        raise ShapeError("hidden has no rows: a batch without response tokens has no log-probabilities")
