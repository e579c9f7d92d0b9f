"""A stage that measures models on held-out prompts: each is loaded the way it was trained, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from rlhf.config import EvaluateConfig, ModelConfig
from rlhf.evaluate.policy import evaluate_policies
from rlhf.models.loading import Policy, find_source, load_policy, training_settings


def load_trained(place: str, *, model: ModelConfig) -> Policy:
    """A model folder or hub name as it is; an adapter on its base, which is 4-bit where it was trained so."""
    source = find_source(place)
    if source.adapter is None:
        return load_policy(model, method="full", start=place, seed=0, to_train=False)
    settings = training_settings(source)
    if settings is None:     # made elsewhere: an ordinary adapter on the base that it names
        return load_policy(model, method="lora", start=place, seed=0)
    return load_policy(settings, method=settings.method, start=place, seed=0)


def run_evaluate(config: EvaluateConfig, *, places: Mapping[str, str], folder: Path, model: ModelConfig,
                 console: Console) -> dict[str, Any]:
    """`places`: folder or hub name by the name that the recipe gives it. Writes evaluation.json, returns its content."""
    loaders = {name: partial(load_trained, place, model=model) for name, place in places.items()}
    return evaluate_policies(config, loaders, folder=folder, console=console).as_json()
