"""What is shipped as data is read by what it is meant for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rlhf.recipe import load_recipe, to_yaml

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("recipe.yaml"))


def test_there_are_recipes() -> None:
    assert RECIPES


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.parent.name)
def test_every_shipped_recipe_is_right(file: Path) -> None:
    load_recipe(file)


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.parent.name)
def test_a_resolved_recipe_loads_back_equal(file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(file)
    (tmp_path / "resolved.yaml").write_text(to_yaml(recipe), encoding="utf-8")
    assert load_recipe(tmp_path / "resolved.yaml") == recipe


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_takes_its_settings(stage: int) -> None:
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    settings = json.loads((ROOT / f"configs/deepspeed/zero{stage}.json").read_text(encoding="utf-8"))
    assert HfDeepSpeedConfig(settings).is_zero3() == (stage == 3)
    assert settings["zero_optimization"]["stage"] == stage


@pytest.mark.parametrize("name", ["cpu-2-ranks", "one-node-8-gpus"])
def test_accelerate_takes_its_settings(name: str) -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    file = ROOT / f"configs/accelerate/{name}.yaml"
    config = ClusterConfig.from_yaml_file(str(file))
    assert config.num_processes == yaml.safe_load(file.read_text(encoding="utf-8"))["num_processes"]
