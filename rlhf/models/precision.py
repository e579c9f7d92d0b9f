"""The precision a model computes in: weights that train are float32, and matrix products run in the recipe's dtype under autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from rlhf.config import Dtype

DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def computing_in(dtype: Dtype, device: torch.device) -> AbstractContextManager[object]:
    """What the Trainer computes a training loss in: scores taken elsewhere (step 0, precomputed references) must be taken in it, too."""
    return nullcontext() if dtype == "float32" else torch.autocast(device.type, DTYPES[dtype])
