"""Chunked log-probabilities equal the whole computation, in value and gradient, and never hold the whole logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf.errors import ShapeError
from rlhf.maths.likelihood import chunked_entropy, chunked_logps, segment_sums, target_logps

ROWS, HIDDEN, VOCABULARY = 37, 8, 101


class LoraHead(nn.Module):
    """A frozen linear layer with a trained low-rank update, a bias and Gemma's soft-capping: all that a real head may have."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(HIDDEN, VOCABULARY).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(HIDDEN, 2)), nn.Parameter(torch.randn(2, VOCABULARY))

    def forward(self, hidden: Tensor) -> Tensor:
        return 5.0 * torch.tanh((self.base(hidden) + hidden @ self.down @ self.up) / 5.0)


HEADS: dict[str, Callable[[], nn.Module]] = {
    "trained": lambda: nn.Linear(HIDDEN, VOCABULARY),
    "trained bias": lambda: _trained_bias(),
    "frozen": lambda: nn.Linear(HIDDEN, VOCABULARY).requires_grad_(False),
    "lora": LoraHead,
}


def _trained_bias() -> nn.Module:
    head = nn.Linear(HIDDEN, VOCABULARY)
    head.weight.requires_grad_(False)
    return head


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(ROWS, HIDDEN, requires_grad=True), torch.randint(VOCABULARY, (ROWS,)), torch.randn(ROWS)


def gradients(logps: Tensor, weights: Tensor, hidden: Tensor, head: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad((logps * weights).sum(), [hidden, *(p for p in head.parameters() if p.requires_grad)]))


@pytest.mark.parametrize("chunk", [1, 5, 36, 37, 500])
@pytest.mark.parametrize("kind", HEADS)
def test_values_and_gradients_are_those_of_the_whole(kind: str, chunk: int) -> None:
    hidden, targets, weights = batch()
    head = HEADS[kind]()
    whole = head(hidden).log_softmax(-1)[torch.arange(ROWS), targets]
    parts = chunked_logps(hidden, head, targets, chunk=chunk)
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=0)
    for got, expected in zip(gradients(parts, weights, hidden, head), gradients(whole, weights, hidden, head), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", HEADS)
def test_without_gradients_nothing_is_recorded(kind: str) -> None:
    hidden, targets, _ = batch()
    head = HEADS[kind]()
    with torch.no_grad():
        logps = chunked_logps(hidden, head, targets, chunk=5)
    assert not logps.requires_grad
    torch.testing.assert_close(logps, head(hidden).log_softmax(-1)[torch.arange(ROWS), targets].detach())


def test_a_head_alone_can_be_trained() -> None:
    hidden, targets, weights = batch()
    head = nn.Linear(HIDDEN, VOCABULARY)
    (got,) = torch.autograd.grad((chunked_logps(hidden.detach(), head, targets, chunk=5) * weights).sum(), [head.weight])
    (expected,) = torch.autograd.grad((head(hidden).log_softmax(-1)[torch.arange(ROWS), targets] * weights).sum(), [head.weight])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    frozen = chunked_logps(hidden.detach(), head.requires_grad_(False), targets, chunk=5)
    assert not frozen.requires_grad


class LargestOutput(TorchDispatchMode):
    """Elements of the largest tensor that any operation made, forward and backward."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


class Held:
    """A saved tensor, weakly countable."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def largest_and_saved(kind: str, logps_of: Callable[[Tensor, nn.Module, Tensor], Tensor]) -> tuple[int, int]:
    """Elements of the largest tensor of a training step, and elements that the graph holds between forward and backward."""
    hidden, targets, weights = batch()
    head, held = HEADS[kind](), WeakSet[Held]()

    def pack(tensor: Tensor) -> Held:
        box = Held(tensor)
        held.add(box)
        return box

    with LargestOutput() as watch:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
            logps = logps_of(hidden, head, targets)
        saved = sum(box.tensor.numel() for box in held)
        (logps * weights).sum().backward()
    return watch.largest, saved


@pytest.mark.parametrize("kind", HEADS)
def test_no_tensor_is_larger_than_the_logits_of_a_chunk(kind: str) -> None:
    chunk = 10
    largest, saved = largest_and_saved(kind, lambda hidden, head, targets: chunked_logps(hidden, head, targets, chunk=chunk))
    assert largest <= chunk * VOCABULARY
    assert saved < ROWS * VOCABULARY / 4
    whole, kept = largest_and_saved(kind, lambda hidden, head, targets: target_logps(head(hidden), targets))
    assert whole == ROWS * VOCABULARY <= kept      # the watch sees what it is there to see


def count_head_rows(kind: str, chunk: int) -> int:
    hidden, targets, weights = batch()
    head, rows = HEADS[kind](), 0

    def counted(part: Tensor) -> Tensor:
        nonlocal rows
        rows += len(part)
        logits: Tensor = head(part)
        return logits

    (chunked_logps(hidden, counted, targets, chunk=chunk) * weights).sum().backward()
    return rows - 1      # the row that asks whether the head is trained


@pytest.mark.parametrize(("kind", "chunk", "passes"), [("frozen", 5, 1), ("trained", 500, 1), ("trained", 5, 2), ("lora", 5, 2)])
def test_the_head_runs_twice_only_where_it_must(kind: str, chunk: int, passes: int) -> None:
    assert count_head_rows(kind, chunk) == passes * ROWS


def test_half_precision_logits_are_normalised_in_float32() -> None:
    torch.manual_seed(0)
    logits = (30 * torch.randn(6, VOCABULARY)).bfloat16().requires_grad_()
    targets = torch.randint(VOCABULARY, (6,))
    logps = target_logps(logits, targets)
    torch.testing.assert_close(logps, logits.float().log_softmax(-1)[torch.arange(6), targets])
    (grad,) = torch.autograd.grad(logps.sum(), logits)
    assert logps.dtype == torch.float32 and grad.dtype == torch.bfloat16


def test_target_logps_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3)], [1000.0, 0.0]], requires_grad=True)
    logps = target_logps(logits, torch.tensor([1, 1]))
    torch.testing.assert_close(logps, torch.tensor([math.log(0.75), -1000.0]))      # 3 / (1 + 3); no overflow
    logps.sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.25, 0.25], [-1.0, 1.0]]))    # onehot - softmax


def test_target_logps_passes_gradcheck() -> None:
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: target_logps(z, torch.tensor([0, 3, 6, 3])), (logits,))


def test_entropy_is_that_of_the_distribution() -> None:
    hidden, _, _ = batch()
    head = nn.Linear(HIDDEN, VOCABULARY)
    entropy = chunked_entropy(hidden, head, chunk=5)
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=head(hidden)).entropy().detach())
    assert not entropy.requires_grad
    uniform = chunked_entropy(hidden, lambda rows: torch.zeros(len(rows), 8), chunk=5)
    torch.testing.assert_close(uniform, torch.full((ROWS,), math.log(8)))


def test_segment_sums_by_hand_with_an_empty_segment_and_its_gradient() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 8.0], requires_grad=True)
    sums = segment_sums(values, torch.tensor([2, 0, 2, 0]), 4)
    torch.testing.assert_close(sums, torch.tensor([10.0, 0.0, 5.0, 0.0]))
    sums[2].backward()
    torch.testing.assert_close(values.grad, torch.tensor([1.0, 0.0, 1.0, 0.0]))


def test_a_segments_sum_is_the_same_bits_beside_any_others() -> None:
    torch.manual_seed(0)
    values, segment = torch.randn(5000), torch.randint(7, (5000,))
    together = segment_sums(values, segment, 7)
    for s in range(7):
        own = values[segment == s]
        assert torch.equal(segment_sums(own, torch.zeros(len(own), dtype=torch.long), 1)[0], together[s])


@pytest.mark.parametrize(("attempt", "message"), [
    (lambda: chunked_logps(torch.zeros(3, 2), nn.Identity(), torch.zeros(2, dtype=torch.long), chunk=1), "hidden has R=3, but targets"),
    (lambda: chunked_logps(torch.zeros(3, 2), nn.Identity(), torch.zeros(3, dtype=torch.long), chunk=0), "at least 1, got 0"),
    (lambda: chunked_logps(torch.zeros(0, 2), nn.Identity(), torch.zeros(0, dtype=torch.long), chunk=4), "no rows"),
    (lambda: segment_sums(torch.zeros(3), torch.zeros(2, dtype=torch.long), 1), "segment has R=2"),
])
def test_refusals(attempt: Callable[[], object], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        attempt()
