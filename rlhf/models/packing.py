"""The batch layout: a prompt is laid out once, its responses after it, and nothing is padded.

    packed   one row:               [prompt | r1 | r2 | ... | rk] [prompt | r1 | ...] ...
    padded   one row a response:    [prompt | r1 | pad], [prompt | r2 | pad], ...

In the packed row positions restart after the prompt for each response, and `rlhf.models.attention` lets a token see its own prompt and
its own response only, so both layouts give a response the same hidden states. Only positions that predict a response token meet the
head; the last token of a prompt predicts the first token of each of its responses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from rlhf.errors import ModelError, ShapeError
from rlhf.maths.likelihood import chunked_logps, target_logps
from rlhf.records import TokenRun

Layout = Literal["packed", "padded"]

LOGITS_AT_ONCE = 2**26
"""Logits that may be alive at a time: 256 MB in float32. More than that are computed in chunks, and again in the backward."""


class RunShape(NamedTuple):
    """Lengths of one run, in tokens."""

    prompt: int
    responses: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.responses)


@dataclass(frozen=True, slots=True, eq=False)
class PrefixLayout:
    """Which token of the packed row may see which; handed to every attention layer as the keyword argument `prefix_layout`."""

    runs: tuple[RunShape, ...]
    run_of: Tensor
    """[N], the run a token belongs to."""
    segment_of: Tensor
    """[N], 0 in the prompt, i in the i-th response of the run."""
    positions: Tensor
    """[N], distance from the start of the token's sequence (prompt and one response)."""
    masks: dict[Any, Any] = field(default_factory=dict)
    """What the attention kernels derive from the fields above, kept for the other layers of the same forward."""

    def visible(self, query: Tensor, key: Tensor, window: int | Tensor | None) -> Tensor:
        """Whether token `query` sees token `key` (indices into the row, any broadcastable shapes).

        Within a sequence the order in the row is the order of positions. A window of w tokens reaches back w - 1 positions.
        """
        own = (self.segment_of[key] == 0) | (self.segment_of[key] == self.segment_of[query])
        seen = (query >= key) & (self.run_of[query] == self.run_of[key]) & own
        return seen if window is None else seen & (self.positions[query] - self.positions[key] < window)


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """One microbatch. S responses in all, numbered run by run; R response tokens in all, in the order of their responses."""

    layout: Layout
    input_ids: Tensor
    """[rows, N]; one row when packed, S rows when padded. Padding is id 0 and is never read."""
    position_ids: Tensor
    """[rows, N]"""
    attention_mask: Tensor | None
    """[rows, N] bool, False on padding; None when packed."""
    prefix_layout: PrefixLayout | None
    """None when padded."""
    runs: tuple[RunShape, ...]
    source: Tensor
    """[R], index into the rows * N hidden states of the one that predicts a response token."""
    targets: Tensor
    """[R], the response tokens."""
    response: Tensor
    """[R], the response a token belongs to."""
    lengths: Tensor
    """[S], tokens of each response."""
    ids: tuple[str, ...]
    """`TokenRun.id` of each run."""
    smoothing: Tensor
    """[runs], `TokenRun.smoothing`."""

    @property
    def tokens(self) -> int:
        """Tokens forwarded, padding included."""
        return self.input_ids.numel()

    @property
    def responses(self) -> int:
        return self.lengths.numel()

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedBatch:
        return _map_tensors(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedBatch:
        """The hook by which torch's DataLoader pins a batch."""
        return _map_tensors(self, Tensor.pin_memory)


class ResponseLogps(NamedTuple):
    token_logps: Tensor  # [R] float32, log p(response token | what is before it)
    logps: Tensor        # [S] float32, their sums by response


def pack(runs: Sequence[TokenRun], *, layout: Layout) -> PackedBatch:
    """Lay out runs of one or more responses each as one microbatch."""
    if not runs:
        raise ShapeError("pack: a microbatch needs at least one run, got none")
    shapes = tuple(RunShape(len(run.prompt), tuple(map(len, run.responses))) for run in runs)
    lengths = [length for shape in shapes for length in shape.responses]
    arranged = _packed_row(runs, shapes) if layout == "packed" else _padded_rows(runs, shapes)
    return PackedBatch(
        **arranged, layout=layout, runs=shapes,
        targets=torch.tensor([token for run in runs for token in chain(*run.responses)]),
        response=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        lengths=torch.tensor(lengths),
        ids=tuple(run.id for run in runs),
        smoothing=torch.tensor([run.smoothing for run in runs], dtype=torch.float32))


def _packed_row(runs: Sequence[TokenRun], shapes: Sequence[RunShape]) -> dict[str, Any]:
    ids: list[int] = []
    positions: list[int] = []
    source: list[int] = []
    segments: list[int] = []
    for run in runs:
        prompt, last = len(run.prompt), len(ids) + len(run.prompt) - 1
        ids += run.prompt
        positions += range(prompt)
        segments += [0] * prompt
        for number, response in enumerate(run.responses, start=1):
            source += [last, *range(len(ids), len(ids) + len(response) - 1)]
            ids += response
            positions += range(prompt, prompt + len(response))
            segments += [number] * len(response)
    position_ids = torch.tensor(positions)
    run_of = torch.repeat_interleave(torch.arange(len(shapes)), torch.tensor([shape.tokens for shape in shapes]))
    return {"input_ids": torch.tensor([ids]), "position_ids": position_ids[None], "attention_mask": None, "source": torch.tensor(source),
            "prefix_layout": PrefixLayout(tuple(shapes), run_of, torch.tensor(segments), position_ids)}


def _padded_rows(runs: Sequence[TokenRun], shapes: Sequence[RunShape]) -> dict[str, Any]:
    rows = [run.prompt + response for run in runs for response in run.responses]
    starts = [shape.prompt for shape in shapes for _ in shape.responses]
    width = max(map(len, rows))
    source = [row * width + t - 1 for row, start in enumerate(starts) for t in range(start, len(rows[row]))]
    return {"input_ids": torch.tensor([[*row, *[0] * (width - len(row))] for row in rows]),
            "position_ids": torch.arange(width).repeat(len(rows), 1),
            "attention_mask": torch.arange(width) < torch.tensor([[len(row)] for row in rows]),
            "prefix_layout": None, "source": torch.tensor(source)}


def _map_tensors(batch: PackedBatch, move: Callable[[Tensor], Tensor]) -> PackedBatch:
    def moved(record: PackedBatch | PrefixLayout) -> dict[str, Any]:
        values = {item.name: getattr(record, item.name) for item in fields(record)}
        return {name: move(value) for name, value in values.items() if isinstance(value, Tensor)}

    prefix = batch.prefix_layout
    return replace(batch, **moved(batch), prefix_layout=None if prefix is None else replace(prefix, **moved(prefix), masks={}))


def response_logps(model: nn.Module, batch: PackedBatch, *, logits_at_once: int = LOGITS_AT_ONCE) -> ResponseLogps:
    """Log-probability of every response token and of every response.

    The call goes through `model` itself, whatever wraps it (PEFT, DDP, a DeepSpeed engine), so that its hooks run. Where R x vocabulary is
    at most `logits_at_once`, the model's own head scores the positions in `batch.source` in that call. Where it is more, the head is called
    again for so many positions at a time, and no tensor of R x vocabulary is ever alive.
    """
    language_model = causal_lm(model)
    at_once = max(1, logits_at_once // language_model.config.get_text_config().vocab_size)
    if len(batch.targets) <= at_once:
        logits = _forward(model, batch)
        token_logps = target_logps(logits.reshape(-1, logits.shape[-1]), batch.targets)
    else:
        token_logps = _chunked_token_logps(model, language_model, batch, at_once)
    counts = [length for run in batch.runs for length in run.responses]
    # Not index_add: its order of additions is left open on a GPU, and a run must repeat to the last bit.
    return ResponseLogps(token_logps, torch.stack([part.sum() for part in torch.split(token_logps, counts)]))


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The transformers model with the language-model head, inside whatever wraps it."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.get_output_embeddings() is not None:
            return module
    raise ModelError(f"{type(model).__name__} holds no transformers model with a language-model head; load it with AutoModelForCausalLM")


def _forward(model: nn.Module, batch: PackedBatch) -> Tensor:
    """The model's logits at the source positions: [1, R, V] when packed, [R, V] when padded."""
    if batch.prefix_layout is None:
        scored = torch.zeros_like(batch.input_ids, dtype=torch.bool)
        scored.view(-1)[batch.source] = True
        logits: Tensor = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False,
                               logits_to_keep=scored).logits
    else:
        # A mask of four axes is handed on to the layers as it is, instead of a dense [N, N] one being built; an empty one cannot
        # be broadcast, so attention that does not know the layout raises instead of letting every token see every other.
        no_mask = torch.empty(1, 1, 0, 0, dtype=torch.bool, device=batch.input_ids.device)
        logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=no_mask, use_cache=False,
                       logits_to_keep=batch.source, prefix_layout=batch.prefix_layout).logits
    return logits


def _chunked_token_logps(model: nn.Module, language_model: PreTrainedModel, batch: PackedBatch, chunk: int) -> Tensor:
    """As the whole logits would give, from the states that reach the head; the model itself scores one position, as a check."""
    head = language_model.get_output_embeddings()
    finish = _after_head(language_model.config.get_text_config())
    reached: list[Tensor] = []

    def keep_first(_head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        reached.append(inputs[0].reshape(-1, inputs[0].shape[-1]))
        return (inputs[0][..., :1, :],)

    hook = head.register_forward_pre_hook(keep_first)
    try:
        own = _forward(model, batch).detach().reshape(1, -1).float()
    finally:
        hook.remove()
    (hidden,) = reached
    with torch.no_grad():
        ours = finish(head(hidden[:1])).float()
    if not torch.allclose(ours, own, rtol=1e-2, atol=1e-2):
        raise ModelError(f"{type(language_model).__name__} changes its logits after the head in a way that is not known here (they differ "
                         f"by up to {(ours - own).abs().max().item():.3g}), so they cannot be scored in chunks. Lower "
                         f"batch.tokens_per_microbatch until {len(batch.targets)} response tokens fit at once.")
    return chunked_logps(hidden, lambda rows: finish(head(rows)), batch.targets, chunk=chunk)


def _after_head(config: PretrainedConfig) -> Callable[[Tensor], Tensor]:
    """What the families that have it do to logits after the head: soft-capping (Gemma), a factor (Cohere), a divisor (Granite)."""
    settings = config.to_dict()
    if cap := settings.get("final_logit_softcapping"):
        return lambda logits: cap * torch.tanh(logits / cap)
    if factor := settings.get("logit_scale"):
        return lambda logits: logits * factor
    if divisor := settings.get("logits_scaling"):
        return lambda logits: logits / divisor
    return lambda logits: logits
