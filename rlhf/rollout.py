"""Responses of a policy: the most probable one, or samples; in batches that do not change them.

The loop over tokens, its cache and its stopping are transformers' `generate`. Sampling is a logits processor of ours: it leaves each row
one token, the one that the row's own number in [0, 1) falls on. That number is a hash of (seed, prompt, draw, position), so that a sample
is the same in every batch, in every order and on every machine; `generate(do_sample=True)` would draw for all rows from one stream.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from peft import PeftModel
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from rlhf.data.templates import Template
from rlhf.errors import ConfigError, ModelError
from rlhf.maths.shapes import expect_shape
from rlhf.models.attention import evaluating
from rlhf.models.loading import generation_pad_id, positions_of
from rlhf.models.packing import causal_lm
from rlhf.progress import Bar, SilentBar
from rlhf.records import Prompt

ROUNDS = 8
"""How often duplicates are drawn again. Where the policy is that sure of itself, a prompt gets fewer responses."""
KEY_BITS = 48
"""Of a number in [0, 1): few enough that its product with a total, in float64, stays below the total."""


class Response(NamedTuple):
    text: str
    tokens: int
    """Generated, the stop token included."""
    finished: bool
    """A stop token came within the limit."""


class Continuation(NamedTuple):
    """What is to be generated: a row of some batch."""

    prompt_ids: tuple[int, ...]
    key: str
    """Names the randomness of the row; of no effect where nothing is sampled."""


def generate_responses(model: PreTrainedModel | PeftModel, template: Template, prompts: Sequence[Prompt], *, max_new_tokens: int,
                       batch: int, bar: Bar | None = None) -> list[Response]:
    """The most probable continuation of each prompt, token by token, up to the first of `template.stop_ids`; in the order of the prompts.

    Settings that the model brings along for sampling (temperature, repetition penalty) are not used. Raises ModelError where a prompt
    leaves no room in the model's positions.
    """
    rows = [Continuation(template.prompt_ids(prompt), "") for prompt in prompts]
    shown = SilentBar() if bar is None else bar
    return continued(model, template, rows, temperature=0.0, top_p=1.0, max_new_tokens=max_new_tokens, batch=batch, bar=shown)


def sample_responses(model: PreTrainedModel | PeftModel, template: Template, prompts: Sequence[Prompt], *, count: int, temperature: float,
                     top_p: float, max_new_tokens: int, batch: int, seed: int, bar: Bar | None = None) -> list[list[Response]]:
    """`count` sampled responses with different texts for each prompt, in the order of the prompts and, for each, of its draws.

    temperature   divides the logits. 0 is greedy: there is one response then
    top_p         a token comes from the fewest most probable ones that hold this share of the probability (Holtzman et al. 2020,
                  arXiv:1904.09751); 1 is all of them
    batch         rows at a time; like the order of the prompts, it changes no response
    bar           of `count` a prompt

    A text that a prompt has already is drawn again, in at most ROUNDS rounds; a list may be shorter than `count` after that, which is for
    the caller to report. Texts may be empty, and unfinished where they reached `max_new_tokens`. Raises ConfigError for settings out of
    range, ModelError where a prompt leaves no room in the model's positions.
    """
    if count < 1 or temperature < 0 or not 0 < top_p <= 1:
        raise ConfigError(f"sampling needs count >= 1, temperature >= 0 and 0 < top_p <= 1, got count={count}, temperature={temperature}, "
                          f"top_p={top_p}")
    wanted, rounds = (count, 1 + ROUNDS) if temperature else (1, 1)
    ids, names = [template.prompt_ids(prompt) for prompt in prompts], [prompt.content_id for prompt in prompts]
    found: list[dict[str, Response]] = [{} for _ in prompts]
    drawn = [0] * len(prompts)
    shown = SilentBar() if bar is None else bar
    for round_ in range(rounds):
        owners = [row for row in range(len(prompts)) for _ in range(wanted - len(found[row]))]
        draws = []
        for row in owners:
            draws.append(Continuation(ids[row], f"{seed}/{names[row]}/{drawn[row]}"))
            drawn[row] += 1
        if round_ and draws:
            shown.advance(0, again=f"{len(draws)} duplicates")
        responses = continued(model, template, draws, temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens, batch=batch,
                              bar=SilentBar() if round_ else shown)
        for row, response in zip(owners, responses, strict=True):
            found[row].setdefault(response.text, response)
    return [list(texts.values()) for texts in found]


def continued(model: PreTrainedModel | PeftModel, template: Template, rows: Sequence[Continuation], *, temperature: float, top_p: float,
              max_new_tokens: int, batch: int, bar: Bar) -> list[Response]:
    """What the model writes behind each row, in their order; rows of similar length are generated together."""
    require_room_to_generate(model, longest=max((len(row.prompt_ids) for row in rows), default=0), max_new_tokens=max_new_tokens)
    pad, stops = generation_pad_id(template.tokenizer), sorted(template.stop_ids)
    settings = GenerationConfig(do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=stops, pad_token_id=pad, use_cache=True)
    responses: dict[int, Response] = {}
    by_length = sorted(range(len(rows)), key=lambda row: (-len(rows[row].prompt_ids), row))
    with evaluating(model), torch.inference_mode(), generation_defaults(model):
        for start in range(0, len(rows), batch):
            together = by_length[start:start + batch]
            prompt_ids, mask = left_padded([rows[row].prompt_ids for row in together], pad)
            width = prompt_ids.shape[1]
            sampling = [Sampling([rows[row].key for row in together], temperature, top_p, prompt_width=width)] if temperature else []
            whole = model.generate(input_ids=prompt_ids.to(model.device), attention_mask=mask.to(model.device), generation_config=settings,
                                   logits_processor=LogitsProcessorList(sampling))
            for row, continuation in zip(together, whole[:, width:].tolist(), strict=True):
                responses[row] = read_response(continuation, template)
            bar.advance(len(together))
    return [responses[row] for row in range(len(rows))]


class Sampling(LogitsProcessor):  # type: ignore[misc]
    """Leaves each row of a batch the one token that its number falls on; greedy decoding then takes it."""

    def __init__(self, keys: Sequence[str], temperature: float, top_p: float, *, prompt_width: int) -> None:
        self.keys, self.temperature, self.top_p, self.prompt_width = keys, temperature, top_p, prompt_width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores [B, V] before the softmax -> 0 for the token that is drawn, -inf for all others."""
        position = input_ids.shape[1] - self.prompt_width
        numbers = torch.tensor([number_of(f"{key}/{position}") for key in self.keys], dtype=torch.float64, device=scores.device)
        tokens = draw_tokens(scores, numbers, temperature=self.temperature, top_p=self.top_p)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)


def number_of(key: str) -> float:
    """A number in [0, 1) for a text: the first bits of its SHA-256."""
    first = int.from_bytes(hashlib.sha256(key.encode()).digest()[:KEY_BITS // 8], "big")
    return first / 2.0**KEY_BITS


def draw_tokens(logits_BV: Tensor, numbers_B: Tensor, *, temperature: float, top_p: float) -> Tensor:
    """The token of each row whose stretch of [0, 1) holds the row's number: [B].

    Stretches are as long as the probabilities softmax(logits / temperature), and stand in the order of the vocabulary, so that the last
    bits of the logits, which differ with the batch, cannot exchange two of them. With top_p < 1 the fewest most probable tokens that
    together reach it are kept, and their probabilities scaled to 1.
    """
    expect_shape("B", numbers=numbers_B, logits=logits_BV[:, 0])
    probabilities = (logits_BV.double() / temperature).softmax(-1)
    if top_p < 1:
        falling, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
        beyond = falling.cumsum(-1) - falling >= top_p      # those before it suffice
        probabilities = probabilities.masked_fill(torch.zeros_like(beyond).scatter_(-1, tokens, beyond), 0.0)
    ends = probabilities.cumsum(-1)
    return torch.searchsorted(ends, numbers_B[:, None] * ends[:, -1:], right=True).squeeze(-1)


def read_response(ids: Sequence[int], template: Template) -> Response:
    """What a row of a generated batch says: behind its first stop token there is only padding."""
    end = next((index for index, token in enumerate(ids) if token in template.stop_ids), None)
    return Response(template.decode_response(ids), len(ids) if end is None else end + 1, end is not None)


def left_padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids [rows, longest] with the padding in front, where generation needs it, and the mask of what is no padding."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    lengths = torch.tensor([[len(row)] for row in rows])
    return ids, (torch.arange(width) >= width - lengths).long()


def require_room_to_generate(model: PreTrainedModel | PeftModel, *, longest: int, max_new_tokens: int) -> None:
    room = positions_of(causal_lm(model).config)
    if room is not None and longest + max_new_tokens > room:
        raise ModelError(f"the longest prompt has {longest} tokens; with max_new_tokens={max_new_tokens} that is more than the {room} "
                         "positions of the model. Lower max_new_tokens or leave out such prompts.")


@contextmanager
def generation_defaults(model: PreTrainedModel | PeftModel) -> Iterator[None]:
    """`generate` fills what its settings leave open from the model's own; inside, those are the library's defaults."""
    language_model = causal_lm(model)
    own = language_model.generation_config
    language_model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        language_model.generation_config = own
