"""Switch a model's own dropout off: log-ratios against a reference mean nothing when either side is noisy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PretrainedConfig

NOISE = ("drop", "jitter")
"""In the names of rates that act in training mode only: attention_dropout, resid_pdrop, layerdrop, jitter_noise."""


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Every dropout of the model is 0 inside; those of adapters, chosen by `lora.dropout`, are kept.

    Dropout lives in modules of its own, in numbers that layers hold (OPT, Bloom), and in the configuration where layers read it there
    (Falcon, GPT-Neo). All are put back on leaving, so that what is saved has the configuration that was loaded.
    """
    rates = list(_rates(model))
    before = [vars(owner)[name] for owner, name in rates]
    try:
        for owner, name in rates:
            setattr(owner, name, 0.0)
        yield
    finally:
        for (owner, name), rate in zip(rates, before, strict=True):
            setattr(owner, name, rate)


def _rates(model: nn.Module) -> Iterator[tuple[nn.Module | PretrainedConfig, str]]:
    """Who holds a rate above 0, and under which name."""
    configs: dict[int, PretrainedConfig] = {}
    for place, module in model.named_modules():
        if isinstance(module, _DropoutNd) and "lora_dropout" not in place and module.p > 0:
            yield module, "p"
        yield from ((module, name) for name in _noisy(vars(module)))
        config = vars(module).get("config")
        if isinstance(config, PretrainedConfig):
            configs[id(config)] = config
    for config in configs.values():
        yield from ((config, name) for name in _noisy(vars(config)))


def _noisy(attributes: dict[str, object]) -> list[str]:
    return [name for name, rate in attributes.items() if isinstance(rate, float) and rate > 0 and any(word in name for word in NOISE)]
