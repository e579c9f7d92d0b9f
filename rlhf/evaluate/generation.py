"""Greedy responses of a policy, in batches that do not change them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from peft import PeftModel
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from rlhf.data.templates import Template
from rlhf.errors import ModelError
from rlhf.models.attention import evaluating
from rlhf.models.loading import generation_pad_id, positions_of
from rlhf.models.packing import causal_lm
from rlhf.progress import Bar, SilentBar
from rlhf.records import Prompt


class Response(NamedTuple):
    text: str
    tokens: int
    """Generated, the stop token included."""
    finished: bool
    """A stop token came within the limit."""


def generate_responses(model: PreTrainedModel | PeftModel, template: Template, prompts: Sequence[Prompt], *, max_new_tokens: int,
                       batch: int, bar: Bar | None = None) -> list[Response]:
    """The most probable continuation of each prompt, token by token, up to the first of `template.stop_ids`; in the order of the prompts.

    Settings that the model brings along for sampling (temperature, repetition penalty) are not used. Raises ModelError where a prompt
    leaves no room in the model's positions.
    """
    ids = [template.prompt_ids(prompt) for prompt in prompts]
    require_room_to_generate(model, longest=max(map(len, ids), default=0), max_new_tokens=max_new_tokens)
    pad, stops = generation_pad_id(template.tokenizer), sorted(template.stop_ids)
    settings = GenerationConfig(do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=stops, pad_token_id=pad, use_cache=True)
    responses: dict[int, Response] = {}
    shown = SilentBar() if bar is None else bar
    by_length = sorted(range(len(ids)), key=lambda row: (-len(ids[row]), row))
    with evaluating(model), torch.inference_mode(), generation_defaults(model):
        for start in range(0, len(ids), batch):
            rows = by_length[start:start + batch]
            prompt_ids, mask = left_padded([ids[row] for row in rows], pad)
            whole = model.generate(input_ids=prompt_ids.to(model.device), attention_mask=mask.to(model.device), generation_config=settings)
            for row, continuation in zip(rows, whole[:, prompt_ids.shape[1]:].tolist(), strict=True):
                responses[row] = read_response(continuation, template)
            shown.advance(len(rows))
    return [responses[row] for row in range(len(ids))]


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
                         "positions of the model. Lower evaluate.max_new_tokens or leave out such prompts.")


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
