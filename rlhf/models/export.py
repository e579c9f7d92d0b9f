"""Merge an adapter into its base and prove that the result says the same."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhf.config import Dtype
from rlhf.errors import ModelError, StorageError
from rlhf.models.adapters import load_adapter
from rlhf.models.folders import replacing_folder
from rlhf.models.loading import (
    Source,
    adapter_folder,
    base_as_trained,
    find_source,
    load_merged,
    load_tokenizer,
    save_plain,
    stored_dtype,
    training_settings,
)
from rlhf.models.precision import DTYPES

MAX_CHANGE: dict[Dtype, float] = {"float32": 0.01, "float16": 0.5, "bfloat16": 4.0}
"""Largest change of a logit that rounding the merged weights explains, in nats: over twice what docs/models.md saw on a real model. Merging
into a wrong base (the original of a 4-bit one) changed one by 20."""
PROMPTS, TOKENS = 4, 32


class ExportReport(NamedTuple):
    folder: Path
    dtype: Dtype
    dequantised: bool
    """The adapter was trained on a 4-bit base, whose values were merged into."""
    largest_logit_change: float
    mean_logit_change: float
    bound: float
    prompts: int
    """Token sequences compared."""


def export_merged(folder: Path, out: Path, *, dtype: Dtype | None = None, max_change: float | None = None) -> ExportReport:
    """Write the adapter in `folder` merged into its base as a plain transformers model; neither peft nor bitsandbytes is needed to load it.

    The logits of base + adapter are compared with those of the files written, on fixed token sequences. `dtype`: None keeps the precision
    of the base. `max_change`: None takes MAX_CHANGE, of the coarser of the precisions of training and export. Raises ModelError when the
    folder is no adapter or a logit changed by more, and then writes nothing; StorageError when `out` exists or cannot be written.
    """
    source = find_source(str(folder))
    adapter_folder(source)
    if out.exists():
        raise StorageError(f"{out} exists already; name a new folder")
    chosen: Dtype = dtype or stored_dtype(source)
    settings = training_settings(source)
    trained: Dtype = settings.dtype if settings is not None and settings.method == "qlora" else chosen
    bound = max(MAX_CHANGE[chosen], MAX_CHANGE[trained]) if max_change is None else max_change
    before = _logits_as_trained(source, chosen)
    with replacing_folder(out) as partial:
        _write_merged(source, partial, chosen)
        change = (_logits(AutoModelForCausalLM.from_pretrained(partial, dtype=DTYPES[chosen]).eval()) - before.logits).abs()
        largest, mean = change.max().item(), change.mean().item()
        if not largest <= bound:
            raise ModelError(f"merging {folder} changes a logit by {largest:.3g} nats (mean {mean:.3g}), allowed is {bound:.3g}. Nothing "
                             "was written. Export in float32, or raise max_change if the text it writes is good enough.")
    return ExportReport(out, chosen, before.quantised, largest, mean, bound, PROMPTS)


class _Logits(NamedTuple):
    logits: Tensor
    quantised: bool


def _logits_as_trained(source: Source, dtype: Dtype) -> _Logits:
    base, quantised = base_as_trained(source, dtype=DTYPES[dtype])
    return _Logits(_logits(load_adapter(base, adapter_folder(source)).eval()), quantised)


def _write_merged(source: Source, folder: Path, dtype: Dtype) -> None:
    save_plain(load_merged(source, dtype=DTYPES[dtype]), folder)
    load_tokenizer(source).save_pretrained(folder)


@torch.no_grad()
def _logits(model: PreTrainedModel | PeftModel) -> Tensor:
    """On token sequences that are the same in every run. [PROMPTS, TOKENS, vocabulary]"""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(vocabulary, (PROMPTS, TOKENS), generator=torch.Generator().manual_seed(0))
    logits: Tensor = model(input_ids=tokens.to(model.device), use_cache=False).logits
    return logits.float().cpu()
