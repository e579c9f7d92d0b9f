"""An evaluation holds one microbatch, however many rows there are."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from tiny_policies import saved
from torch import nn
from transformers import TrainingArguments

from rlhf.config import BatchConfig, ModelConfig
from rlhf.guards import StepGuards
from rlhf.models.attention import choose_layout
from rlhf.models.loading import load_policy
from rlhf.models.packing import PackedBatch
from rlhf.progress import Bar, progress
from rlhf.records import TokenRun
from rlhf.sft import SftObjective
from rlhf.step_log import StepLog
from rlhf.step_plan import StepPlan, StepTotals
from rlhf.training import Objective, ObjectiveTerms, ObjectiveTrainer


class WatchedObjective:
    """The SFT objective, noting the bytes of all tensors alive when a microbatch begins."""

    def __init__(self) -> None:
        self.alive: list[int] = []

    def loss(self, model: nn.Module, batch: PackedBatch, totals: StepTotals) -> ObjectiveTerms:
        self.alive.append(sum(item.nbytes for item in gc.get_objects() if issubclass(type(item), torch.Tensor)))
        return SftObjective().loss(model, batch, totals)


def rows(count: int) -> list[TokenRun]:
    return [TokenRun(id=str(number), prompt=(2, 3, 4), responses=((5 + number % 7, 6, 7, 8),)) for number in range(count)]


def evaluated(folder: Path, count: int, objective: Objective) -> float:
    def silent(total: int) -> AbstractContextManager[Bar]:
        return progress(None, "evaluation", total)

    gc.collect()    # what an earlier run left in reference cycles is none of this one's
    batch, runs = BatchConfig(per_step=4, per_microbatch=4), rows(count)
    policy = load_policy(ModelConfig(name=saved(folder / "base")), method="full", start=None, seed=0)
    layout, _ = choose_layout(policy.model, "packed")
    with StepLog(None, tokens_of=range(count).__getitem__, resume_step=0) as log:
        trainer = ObjectiveTrainer(
            model=policy.model, objective=objective, plan=StepPlan(runs=runs, batch=batch, seed=0, epochs=1, max_steps=1),
            evaluation_rows=runs, batch=batch, layout=layout,
            args=TrainingArguments(output_dir=str(folder / "out"), use_cpu=True, report_to=[], disable_tqdm=True),
            tokenizer=policy.tokenizer, callbacks=[], guards=StepGuards(folder, log=log, zero_is_legal=False), evaluation_bar=silent)
        return trainer.evaluate()["eval_loss"]


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    few, many = WatchedObjective(), WatchedObjective()
    evaluated(tmp_path / "few", 8, few)
    evaluated(tmp_path / "many", 32, many)
    assert (len(few.alive), len(many.alive)) == (2, 8)
    logits_of_a_batch = 4 * 4 * 96 * 4
    assert max(many.alive) - min(many.alive) < logits_of_a_batch
    assert max(many.alive) - max(few.alive) < logits_of_a_batch


def test_the_loss_is_the_mean_over_tokens_whatever_the_batches(tmp_path: Path) -> None:
    repeated = evaluated(tmp_path / "a", 28, SftObjective())
    once = evaluated(tmp_path / "b", 7, SftObjective())     # the same seven responses, four times over
    assert repeated == pytest.approx(once, abs=1e-6)
