"""What a recipe needs of the machine it runs on, known before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import torch

from rlhf.config import DpoConfig, Recipe, SftConfig
from rlhf.errors import Problem


def missing_requirements(recipe: Recipe) -> list[Problem]:
    """Trackers that are not installed, and a precision that the device cannot train in."""
    training = [config for _, config in recipe.stages if isinstance(config, SftConfig | DpoConfig)]
    problems = [problem for config in training for problem in _missing_trackers(config)]
    if training and recipe.model.dtype == "float16" and not torch.cuda.is_available():
        problems.append(Problem("model.dtype", "float16 is trained with a loss scaler, which needs a GPU, and none is found; use bfloat16 "
                                "or float32"))
    return problems


def _missing_trackers(config: SftConfig | DpoConfig) -> Iterator[Problem]:
    for name in config.loop.trackers:
        if find_spec(name) is None:
            yield Problem(f"{config.name}.loop.trackers", f"{name} is not installed; pip install 'prefloop[{name}]', or remove it")
