"""Switch a model's own dropout off: log-ratios against a reference mean nothing when either side is noisy."""

from __future__ import annotations

from torch import nn


def without_dropout(model: nn.Module) -> int:
    """Set every dropout of the model to 0 and return how many there were; those of adapters, chosen by `lora.dropout`, are kept.

    Dropout lives in `nn.Dropout` modules and, in attention layers, in a number called `attention_dropout`.
    """
    switched = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and "lora_dropout" not in name and module.p > 0:
            module.p = 0.0
            switched += 1
        rate = vars(module).get("attention_dropout")
        if isinstance(rate, float) and rate > 0:
            module.attention_dropout = 0.0
            switched += 1
    return switched
