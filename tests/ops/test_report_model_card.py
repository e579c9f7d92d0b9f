"""The model card: Markdown with valid metadata, the figures of the run, and the right way to load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from report_runs import HOSTILE, write_run

from rlhf.errors import DataError
from rlhf.evaluate.model_card import model_card, write_model_card


def run_with_model(folder: Path, *, adapter: bool) -> Path:
    run = write_run(folder)
    (run / "dpo" / "model").mkdir()
    (run / "dpo" / "model" / ("adapter_config.json" if adapter else "config.json")).write_text("{}", encoding="utf-8")
    return run


@pytest.mark.parametrize(("adapter", "library", "loads"), [(True, "peft", "AutoPeftModelForCausalLM.from_pretrained"),
                                                          (False, "transformers", " AutoModelForCausalLM.from_pretrained")])
def test_a_card_names_library_figures_and_hashes(tmp_path: Path, adapter: bool, library: str, loads: str) -> None:
    run = run_with_model(tmp_path / "run", adapter=adapter)
    path = write_model_card(run, "dpo")
    card = path.read_text(encoding="utf-8")
    assert path == run / "dpo" / "model" / "README.md"
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head) == {"library_name": library, "pipeline_tag": "text-generation", "tags": ["prefloop", "dpo"]}
    assert loads in body
    assert "| loss | 0.6931 |" in body and "| data preferences.jsonl | 5e6f7a8b |" in body
    assert "| dpo | 83.6 % [77.6, 89.6] |" in body
    settings = yaml.safe_load(body.split("## Recipe\n\n```yaml\n")[1].split("```")[0])
    assert settings["stages"] == [{"dpo": {"name": "dpo", "beta": 0.1, "optim": {"learning_rate": 5e-4},
                                           "data": {"train": "@prepare/preferences.jsonl", "max_length": 96}}}]


def test_text_of_a_run_cannot_break_the_card(tmp_path: Path) -> None:
    run = run_with_model(tmp_path / "run", adapter=True)
    log = run / "dpo" / "train_log.jsonl"
    alarm = {"step": 3, "alarm": "chosen_falls", "text": HOSTILE + "\n| a | b |"}
    log.write_text(log.read_text() + json.dumps(alarm) + "\n", encoding="utf-8")
    card = model_card(run, "dpo")
    assert "<script" not in card and "\\| a \\| b \\|" in card


def test_a_stage_without_a_model_has_no_card(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no stage 'ppo' that made a model; it has sft, dpo, evaluate"):
        model_card(run_with_model(tmp_path / "run", adapter=True), "ppo")
