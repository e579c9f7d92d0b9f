"""Whole runs: our trainer, from file to train_log.jsonl, gives the losses and metrics of stock trl.DPOTrainer on the same pairs.

Both train, so equal losses at later steps mean equal gradients and updates at the earlier ones.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_stage import FAMILIES, LEARNING_RATE, run_dpo, write_model, write_pairs
from transformers import AutoModelForCausalLM

from rlhf.config import BatchConfig
from rlhf.models.loading import find_source, load_tokenizer

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

pytestmark = [
    # trl 1.16 reads the old name of a property that transformers 5.24 renamed
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

STEPS, BATCH = 3, 4
METRICS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected")


def run_trl(folder: Path, model: Path, rows: list[dict[str, str]]) -> list[dict[str, Any]]:
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    arguments = trl.DPOConfig(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, per_device_train_batch_size=BATCH,
        activation_checkpointing=False, max_length=64, max_steps=STEPS, logging_steps=1, save_strategy="no", learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant", train_sampling_strategy="sequential")
    trainer = trl.DPOTrainer(model=policy, ref_model=copy.deepcopy(policy), args=arguments, train_dataset=datasets.Dataset.from_list(rows),
                             processing_class=load_tokenizer(find_source(str(model))))
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_metrics_of_each_step_are_those_of_stock_trl(family: str, tmp_path: Path) -> None:
    rows, model = write_pairs(tmp_path), write_model(tmp_path, family)
    theirs = run_trl(tmp_path, model, rows)
    result, ours = run_dpo(tmp_path, model, "ours", steps=STEPS, batch=BatchConfig(per_step=BATCH, per_microbatch=BATCH, shuffle=False))
    assert result.layout == "packed"
    assert len(ours) == len(theirs) == STEPS
    assert ours[0]["loss"] != ours[2]["loss"]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        for name in METRICS:
            assert mine[name] == pytest.approx(other[name], rel=1e-4, abs=1e-4), name
