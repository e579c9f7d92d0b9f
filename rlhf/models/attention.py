"""Attention over the packed layout, and which models can take it.

`prefix_shared` is an attention implementation of transformers. With a `prefix_layout` among the forward's keyword arguments it lets each
response see its prompt and itself; without one it is plain SDPA, so `generate` and ordinary forwards are what they were.

On a CPU each run is one SDPA call, causal where it has one response and masked where it has more, or two where it is long. On CUDA the
whole row is one FlexAttention call whose block mask skips what no token sees; attention dropout, which that kernel lacks, takes the SDPA
calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlhf.config import Layout as WantedLayout
from rlhf.errors import ModelError
from rlhf.maths.likelihood import target_logps
from rlhf.models.packing import Layout, PrefixLayout, RunShape, causal_lm, pack, response_logps
from rlhf.records import TokenRun

logger = logging.getLogger(__name__)

PREFIX_SHARED = "prefix_shared"

LONG_RUN = 384
"""Tokens from which two smaller calls beat one with a mask (0.8 times as fast at 44 tokens, even at about 300, 1.4 times at 1,024)."""

DISAGREEMENT = 1e-3
"""Largest difference of a token's log-probability (nats, float32 weights) up to which two layouts count as the same computation."""

HALF_DISAGREEMENT = 0.25
"""The same for weights in 16 bits, whose logits are rounded to about a percent."""


def prefix_shared_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None,
    prefix_layout: PrefixLayout | None = None, **settings: Any,
) -> tuple[Tensor, None]:
    """query [B, Hq, N, D], key and value [B, Hkv, N, D] -> [B, N, Hq, D]; the signature is transformers'."""
    if unsupported := [name for name in ("s_aux", "position_bias") if settings.get(name) is not None]:
        raise ModelError(f"{type(module).__name__} asks for {', '.join(unsupported)} in attention, which {PREFIX_SHARED} does not compute. "
                         "Use layout: padded.")
    if prefix_layout is None:
        if softcap is None:
            output: Tensor
            output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **settings)
            return output, None
        return _attend(query, key, value, attention_mask, scaling, dropout, softcap).transpose(1, 2), None
    if query.device.type == "cuda" and dropout == 0:
        return _attend_by_block(query, key, value, prefix_layout, sliding_window, scaling, softcap).transpose(1, 2), None
    return _attend_by_run(query, key, value, prefix_layout, sliding_window, scaling, dropout, softcap), None


AttentionInterface.register(PREFIX_SHARED, prefix_shared_attention)
AttentionMaskInterface.register(PREFIX_SHARED, sdpa_mask)


def _attend_by_run(query: Tensor, key: Tensor, value: Tensor, layout: PrefixLayout, window: int | None, scaling: float | None,
                   dropout: float, softcap: float | None) -> Tensor:
    """One or two calls a run: [1, N, Hq, D]. The row is split once, because every single slice costs its backward a whole row of zeros."""
    tokens = [run.tokens for run in layout.runs]
    runs = zip(*(torch.split(tensor, tokens, 2) for tensor in (query, key, value)), _run_calls(layout, window, query.dtype), strict=True)
    parts = [_attend(q[:, :, call.rows], k[:, :, :call.keys], v[:, :, :call.keys], call.mask, scaling, dropout, softcap)
             for q, k, v, calls in runs for call in calls]
    return torch.cat([part.transpose(1, 2) for part in parts], 1)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, dropout: float,
            softcap: float | None) -> Tensor:
    """SDPA, or with soft-capping softmax(c tanh(scale q k^T / c) + mask) v (Gemma 2, arXiv:2408.00118, section 2): [B, Hq, N, D].

    No mask means causal; a single query without one is the newest token and sees every key.
    """
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, dropout_p=dropout, scale=scaling,
                                              enable_gqa=True)
    heads, queries, keys = key.shape[1], query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    if mask.dtype == torch.bool:    # the smallest number and not -inf: padding may see nothing at all, and must not become NaN
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, torch.finfo(query.dtype).min)
    grouped = query.reshape(len(query), heads, -1, query.shape[-1])                                # [B, Hkv, groups * N, D]
    scores = grouped @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    capped = (softcap * torch.tanh(scores / softcap)).reshape(len(query), heads, -1, queries, keys) + mask.unsqueeze(-3)
    weights = F.dropout(capped.softmax(-1, dtype=torch.float32).to(query.dtype), dropout)
    return (weights.reshape(scores.shape) @ value).reshape(query.shape)


class _Call(NamedTuple):
    """A block of one run's scores: tokens `rows` look at the run's first `keys` tokens."""

    rows: slice
    keys: int
    mask: Tensor | None
    """What to add to the scores, [rows, keys] of 0 and -inf; None where plain causal attention says the same."""


def _run_calls(layout: PrefixLayout, window: int | None, dtype: torch.dtype) -> list[list[_Call]]:
    known: list[list[_Call]] | None = layout.masks.get((window, dtype))
    if known is None:
        starts = accumulate((run.tokens for run in layout.runs), initial=0)
        known = [list(_calls_of(run, start, layout, window, dtype)) for run, start in zip(layout.runs, starts, strict=False)]
        layout.masks[window, dtype] = known
    return known


def _calls_of(run: RunShape, start: int, layout: PrefixLayout, window: int | None, dtype: torch.dtype) -> Iterator[_Call]:
    """The first sequence of a run is causal, which skips half of its scores; in short runs one masked call costs less than two."""
    first = run.prompt + run.responses[0]
    cut = 0 if run.tokens < LONG_RUN and len(run.responses) > 1 else first
    for rows in (slice(0, cut), slice(cut, run.tokens)):
        if rows.start == rows.stop:
            continue
        if rows.stop == first and (window is None or window >= first):
            yield _Call(rows, rows.stop, None)
        else:
            index = torch.arange(start, start + rows.stop, device=layout.positions.device)
            hidden = ~layout.visible(index[rows, None], index[None, :], window)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            yield _Call(rows, rows.stop, mask)


def _attend_by_block(query: Tensor, key: Tensor, value: Tensor, layout: PrefixLayout, window: int | None, scaling: float | None,
                     softcap: float | None) -> Tensor:
    """The whole row in one FlexAttention call: [1, Hq, N, D]."""
    score_mod = None
    if softcap is not None:
        cap = torch.tensor(softcap, device=query.device)        # a number would be compiled in as a symbol

        def score_mod(score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
            return cap * torch.tanh(score / cap)

    return _compiled_flex()(query, key, value, score_mod=score_mod, block_mask=block_mask(layout, window), scale=scaling, enable_gqa=True)


def block_mask(layout: PrefixLayout, window: int | None) -> BlockMask:
    """FlexAttention's view of the row: which blocks of 128 x 128 tokens need work at all."""
    known: BlockMask | None = layout.masks.get((window, BlockMask))
    if known is None:
        tokens, device = len(layout.positions), layout.positions.device
        reach = None if window is None else torch.tensor(window, device=device)     # a number would be compiled in as a symbol
        known = create_block_mask(lambda _batch, _head, query, key: layout.visible(query, key, reach), None, None, tokens, tokens,
                                  device=device)
        layout.masks[window, BlockMask] = known
    return known


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=True)   # the row's length changes from step to step
    return compiled


def choose_layout(model: nn.Module, wanted: WantedLayout) -> tuple[Layout, str]:
    """The layout this model will be given, and why. Where it is "packed" the model's attention is set to `prefix_shared`."""
    if wanted == "padded":
        return "padded", "asked for"
    obstacle = packing_obstacle(model)
    if obstacle is None:
        language_model = causal_lm(model)
        before = language_model.config._attn_implementation
        language_model.set_attn_implementation(PREFIX_SHARED)
        obstacle = _seen_obstacle(model)
        if obstacle is None:
            return "packed", "each prompt is forwarded once and nothing is padded"
        language_model.set_attn_implementation(before)
    if wanted == "packed":
        raise ModelError(f"layout: packed was asked for, but {obstacle}. Use layout: auto or padded.")
    logger.warning("padded layout: %s", obstacle)
    return "padded", obstacle


def packing_obstacle(model: nn.Module) -> str | None:
    """Why a model cannot take the packed layout, as far as its class and settings tell; None where they speak of no obstacle."""
    for module in model.modules():
        if isinstance(module, PeftModel) and module.active_peft_config.is_prompt_learning:
            return f"{module.active_peft_config.peft_type.value} puts virtual tokens in front of the row; only its first run would see them"
    language_model = causal_lm(model)
    name, settings = type(language_model).__name__, language_model.config.get_text_config().to_dict()
    if language_model._is_stateful:
        return f"{name} has recurrent layers, which carry one response into the next"
    if not language_model._supports_attention_backend:
        return f"{name} does not take its attention from transformers' AttentionInterface"
    if not language_model._supports_sdpa and not settings.get("attn_logit_softcapping"):
        return f"{name} has attention that scaled dot products alone do not express (for example sinks)"
    if other := set(settings.get("layer_types") or ()) - {"full_attention", "sliding_attention"}:
        return f"{name} has {', '.join(sorted(other))} layers"
    return None


def layout_disagreement(model: nn.Module) -> float:
    """Largest difference in a token's log-probability between the packed layout and the model's own logits, one sequence at a time.

    Two random runs, in eval mode; needs `prefix_shared` to be set (`choose_layout` does). No random state is touched.
    """
    return _compare(model)[0]


class _Comparison(NamedTuple):
    difference: float
    windows: frozenset[int | None]
    """Sliding windows that the attention layers said they have."""
    dtype: torch.dtype


def _compare(model: nn.Module) -> _Comparison:
    language_model = causal_lm(model)
    device = language_model.get_input_embeddings().weight.device
    draw = torch.Generator().manual_seed(0)
    sizes = ((9, (5, 7)), (4, (6, 3, 2)))
    vocabulary = language_model.config.get_text_config().vocab_size

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocabulary, (count,), generator=draw).tolist())

    runs = [TokenRun(id=str(prompt), prompt=tokens(prompt), responses=tuple(map(tokens, responses))) for prompt, responses in sizes]
    batch = pack(runs, layout="packed").to(device)
    with evaluating(model), torch.no_grad():
        packed = response_logps(model, batch).token_logps
        alone = []
        for run in runs:
            for response in run.responses:
                logits = model(input_ids=torch.tensor([run.prompt + response], device=device), use_cache=False).logits
                alone.append(target_logps(logits[0, len(run.prompt) - 1:-1], torch.tensor(response, device=device)))
    assert batch.prefix_layout is not None
    windows = frozenset(window for window, _ in batch.prefix_layout.masks)
    return _Comparison((packed - torch.cat(alone)).abs().max().item(), windows, logits.dtype)


def _seen_obstacle(model: nn.Module) -> str | None:
    """What a forward over two tiny runs shows."""
    language_model = causal_lm(model)
    name, settings = type(language_model).__name__, language_model.config.get_text_config().to_dict()
    try:
        difference, windows, dtype = _compare(model)
    except (ModelError, TypeError, ValueError, RuntimeError, IndexError) as error:
        return f"{name} cannot run it ({type(error).__name__}: {error})"
    if not windows:
        return f"{name} does not hand the layout on to its attention"
    kinds = settings.get("layer_types")
    window = settings.get("sliding_window")
    if window is not None and (kinds is None or "sliding_attention" in kinds) and window not in windows:
        return f"{name} has a sliding window of {window} tokens that its attention does not speak of"
    allowed = DISAGREEMENT if dtype == torch.float32 else HALF_DISAGREEMENT
    if not difference <= allowed:
        return f"{name} gives log-probabilities that differ by {difference:.2g} nats from those of its plain forward (allowed {allowed})"
    return None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside, and each module's own mode again afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
