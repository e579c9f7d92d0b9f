"""A stock Trainer with the callbacks under test on a tiny Llama: what the tests of resume run, in their process or in one they kill.

`python toy_run.py FOLDER` trains in FOLDER, continuing from its latest checkpoint. A file FOLDER/slow_save makes every save wait for a
minute between the weights and the optimizer, after writing FOLDER/saving: a place to be killed at.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from rlhf.distributed.state import CheckpointSeal, checkpoints_protected, latest_checkpoint, require_same_run, step_of
from rlhf.guards import StepGuards
from rlhf.step_log import StepLog

ROWS, STEPS = 13, 10    # 7 microbatches an epoch, the last one smaller; 4 steps an epoch; 2.5 epochs
FINGERPRINT = {"data content": "a", "optim.learning_rate": "0.01"}


def toy_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                         attention_dropout=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return LlamaForCausalLM(config)


def toy_rows(seed: int = 1, rows: int = ROWS) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 32, (rows, 6), generator=generator).tolist()
    return [{"input_ids": row, "labels": row} for row in ids]


class ToyTrainer(Trainer):
    def __init__(self, folder: Path, guards: StepGuards, poison_step: int | None = None, **arguments: Any) -> None:
        self.folder, self.guards, self.poison_step, self.loss_factor = folder, guards, poison_step, 1.0
        super().__init__(**arguments)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if model.training:
            loss = loss * self.loss_factor
            if self.state.global_step + 1 == self.poison_step:
                loss = loss * float("nan")
            self.guards.microbatch(loss, [f"row-{number}" for number in inputs["input_ids"][:, 0].tolist()])
        return loss

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        return ([], None) if self.control.should_training_stop else super().get_batch_samples(epoch_iterator, num_batches, device)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if (self.folder / "slow_save").exists():
            (self.folder / "saving").touch()
            time.sleep(60)


def toy_arguments(folder: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(**{
        "output_dir": str(folder / "checkpoints"), "use_cpu": True, "seed": 3, "num_train_epochs": 2.5, "learning_rate": 0.01,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1, "logging_nan_inf_filter": False,
        "save_steps": 3, "save_total_limit": None, "restore_callback_states_from_checkpoint": True, "report_to": [],
        "disable_tqdm": True, "dataloader_pin_memory": False, **changes})


def toy_trainer(folder: Path, log: StepLog, *, keep: int = 2, extra: tuple[TrainerCallback, ...] = (), poison_step: int | None = None,
                patience: int | None = None, **changes: Any) -> ToyTrainer:
    set_seed(3)
    guards = StepGuards(folder / "checkpoints", log=log, zero_is_legal=False)
    callbacks = [log, guards, CheckpointSeal(folder / "checkpoints", fingerprint=FINGERPRINT, keep=keep), *extra]
    if patience is not None:
        callbacks.append(EarlyStoppingCallback(patience))
        changes = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True,
                   "metric_for_best_model": "eval_loss", "greater_is_better": False, **changes}
    return ToyTrainer(folder, guards, poison_step, model=toy_model(), args=toy_arguments(folder, **changes), train_dataset=toy_rows(),
                      eval_dataset=toy_rows(seed=2, rows=4), callbacks=callbacks)


def toy_run(folder: Path, **options: Any) -> ToyTrainer:
    """Train to the end, from the latest checkpoint where there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints = folder / "checkpoints"
    with checkpoints_protected(checkpoints):
        latest = latest_checkpoint(checkpoints)
        if latest is not None:
            require_same_run(latest, FINGERPRINT)
        with StepLog(folder / "train_log.jsonl", tokens_of=lambda _: 24, resume_step=0 if latest is None else step_of(latest)) as log:
            trainer = toy_trainer(folder, log, **options)
            trainer.train(resume_from_checkpoint=None if latest is None else str(latest))
    return trainer


if __name__ == "__main__":
    torch.set_num_threads(1)
    toy_run(Path(sys.argv[1]))
