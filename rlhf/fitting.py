"""Fit a policy to an objective in a stage's folder: plan the steps, guard them, resume where a kill left off, save what came out."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback, TrainingArguments
from transformers.integrations import TensorBoardCallback

from rlhf.config import BatchConfig, LoopConfig, ModelConfig, OptimConfig, TemplateName
from rlhf.data.prepared import PreparedData
from rlhf.data.templates import TRL_STANDS_IN, Template, template_for
from rlhf.distributed.ranks import rank, world_size
from rlhf.distributed.state import CheckpointSeal, checkpoints_protected, latest_checkpoint, require_same_run, step_of, torn_checkpoints
from rlhf.errors import ConfigError
from rlhf.guards import Alarm, StepGuards, expect_same_reference, expect_trained
from rlhf.models.dropout import without_dropout
from rlhf.models.inspection import missing_from_save, untrained_adapters
from rlhf.models.loading import Policy, require_positions, save_policy
from rlhf.models.packing import Layout, PackedBatch, pack
from rlhf.models.roles import Reference
from rlhf.step_log import StepLog, first_evaluation, read_log
from rlhf.step_plan import StepPlan
from rlhf.training import Objective, ObjectiveTrainer
from rlhf.training_progress import TrainingProgress


@dataclass(frozen=True)
class Site:
    """Where a training stage runs and what it starts from."""

    folder: Path
    name: str
    model: ModelConfig
    seed: int
    start: str | None
    """Folder or hub name; None: model.name."""
    inputs: dict[str, str]
    """Everything that the result depends on, by name; a checkpoint with other inputs is never continued."""
    console: Console


@dataclass(frozen=True)
class FitResult:
    steps: int
    kept_step: int
    """Step whose weights were saved: the last one, or with patience the one with the lowest eval_loss."""
    seconds: float
    """Of training, evaluations included; of the last start only, when the run was resumed."""
    before: dict[str, float]
    """Metrics on the held-out rows before the first step; empty when nothing is held out."""
    after: dict[str, float]
    layout: Layout
    layout_reason: str
    tokens: int
    """Tokens forwarded by the policy in the steps taken."""
    padded_tokens: int
    """What one padded row a response would have forwarded for the same microbatches."""
    alarms: tuple[Alarm, ...]


def with_template(policy: Policy, name: TemplateName, console: Console) -> tuple[Policy, Template]:
    """The stage's template, and the policy with the tokenizer that carries it: what is saved generates as it was trained."""
    template = template_for(policy.tokenizer, name)
    if template.replaced:
        console.print(f"[yellow]chat template[/yellow]: {TRL_STANDS_IN}; the saved tokenizer carries it", highlight=False)
    return replace(policy, tokenizer=template.tokenizer), template


def fit(
    policy: Policy, objective: Objective, data: PreparedData, *, optim: OptimConfig, batch: BatchConfig, loop: LoopConfig, site: Site,
    layout: tuple[Layout, str], reference: Reference | None = None, reference_fingerprint: str = "", zero_loss_is_legal: bool = False,
    check_start: Callable[[nn.Module, PackedBatch], None] | None = None,
) -> FitResult:
    """Train, evaluate before and after, check what came out, and save it to `model/` in the stage's folder.

    A checkpoint of the same run in the folder is continued exactly, one of another run refused. `check_start` sees the first microbatch
    before the first step. `reference_fingerprint`: of the reference as it is now, where that is known; hashing a large base takes minutes.
    Raises GuardError, CheckpointError, StorageError.
    """
    require_positions(policy.model, longest=max(run.longest for run in (*data.train, *data.holdout)))
    chosen_layout, reason = layout
    site.console.print(f"layout [bold]{chosen_layout}[/bold]: {reason}")
    require_evaluation_rows(loop, data, site.console)
    plan = StepPlan(runs=data.train, batch=batch, seed=site.seed, epochs=loop.epochs, max_steps=loop.max_steps, world_size=world_size(),
                    packed=chosen_layout == "packed")
    checkpoints = site.folder / "checkpoints"
    for damaged in torn_checkpoints(checkpoints):
        site.console.print(f"[yellow]{damaged} is not whole and is not used")
    resume = latest_checkpoint(checkpoints)
    if resume is not None:
        require_same_run(resume, site.inputs)
        site.console.print(f"continuing from [bold]{resume.name}[/bold] of {plan.steps}")
    elif check_start is not None:
        check_start(policy.model, pack([plan.runs[row] for row in plan.microbatches_of(0)[rank()][0]], layout=chosen_layout))
    reference_before = reference_fingerprint or (reference.fingerprint() if reference is not None else "")
    with (
        nullcontext() if loop.dropout else without_dropout(policy.model),
        StepLog(log_path(site) if rank() == 0 else None, tokens_of=plan.tokens_of,
                resume_step=0 if resume is None else step_of(resume)) as log,
        TrainingProgress(site.console, site.name) as display, checkpoints_protected(checkpoints),
    ):
        guards = StepGuards(checkpoints, log=log, zero_is_legal=zero_loss_is_legal)
        callbacks: list[TrainerCallback] = [log, guards, display,
                                            CheckpointSeal(checkpoints, fingerprint=site.inputs, keep=loop.save_total_limit)]
        if loop.patience is not None:
            callbacks.append(EarlyStoppingCallback(loop.patience))
        if "tensorboard" in loop.trackers:
            callbacks.append(tensorboard_in(site.folder / "tensorboard"))
        trainer = ObjectiveTrainer(
            model=policy.model, objective=objective, plan=plan, evaluation_rows=data.holdout, batch=batch, layout=chosen_layout,
            args=training_arguments(optim=optim, loop=loop, plan=plan, site=site, evaluate=bool(data.holdout), resuming=resume is not None),
            tokenizer=policy.tokenizer, callbacks=callbacks, guards=guards, evaluation_bar=display.evaluation)
        trainer.remove_callback(PrinterCallback)
        clock = time.perf_counter()
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        seconds = time.perf_counter() - clock
        after = trainer.evaluation_at_end() if data.holdout else {}
    if reference is not None:
        expect_same_reference(before=reference_before, after=reference.fingerprint())
    expect_trained(untrained_adapters=untrained_adapters(policy.model))
    save_policy(policy, site.folder / "model")
    expect_trained(missing_from_save=missing_from_save(policy.model, site.folder / "model"))
    steps, kept = trainer.state.global_step, trainer.kept_step()
    if kept != steps:
        site.console.print(f"stopped after step {steps}; the model of step {kept} is kept, which has the lowest eval_loss")
    return FitResult(
        steps=steps, kept_step=kept, seconds=round(seconds, 3), before=metrics_of(first_evaluation(read_log(log_path(site)).lines)),
        after=after, layout=chosen_layout, layout_reason=reason, tokens=sum(map(plan.tokens_of, range(steps))),
        padded_tokens=plan.padded_tokens(steps), alarms=tuple(guards.alarms))


def require_evaluation_rows(loop: LoopConfig, data: PreparedData, console: Console) -> None:
    """A few prompts may all fall on the side of training: patience cannot do without the others, evaluations are left out."""
    if data.holdout or loop.evaluate_every is None:
        return
    if loop.patience is not None:
        raise ConfigError(f"loop.patience compares evaluations, but none of the {len(data.train)} rows is held out. Raise "
                          "data.holdout_percent, name files in data.holdout, or remove patience.")
    console.print("[yellow]no row is held out: loop.evaluate_every has nothing to evaluate on")


def tensorboard_in(folder: Path) -> TensorBoardCallback:
    """The Trainer's own callback; left alone it would write among the checkpoints."""
    callback = TensorBoardCallback()
    callback.logging_dir = str(folder)
    return callback


def log_path(site: Site) -> Path:
    return site.folder / "train_log.jsonl"


def metrics_of(line: dict[str, float | int | str]) -> dict[str, float]:
    """The eval_* figures of a line of the log."""
    return {name: value for name, value in line.items() if name.startswith("eval_") and isinstance(value, float)}


def training_arguments(*, optim: OptimConfig, loop: LoopConfig, plan: StepPlan, site: Site, evaluate: bool,
                       resuming: bool) -> TrainingArguments:
    """The Trainer's arguments. Every step is logged (train_log.jsonl), and whatever would hide a fault or act behind ours is off."""
    evaluations: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": loop.evaluate_every} if evaluate and loop.evaluate_every else {}
    if loop.patience is not None:
        evaluations |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False}
    save_every = loop.evaluate_every if loop.patience is not None else loop.save_every
    arguments = TrainingArguments(
        output_dir=str(site.folder / "checkpoints"), seed=site.seed, data_seed=site.seed, use_cpu=not torch.cuda.is_available(),
        max_steps=plan.steps, per_device_train_batch_size=1, gradient_accumulation_steps=plan.accumulation,
        learning_rate=optim.learning_rate, optim=optim.optimizer, weight_decay=optim.weight_decay, max_grad_norm=optim.max_grad_norm,
        lr_scheduler_type="constant_with_warmup" if optim.schedule == "constant" else optim.schedule,
        warmup_steps=round(optim.warmup_fraction * plan.steps),
        bf16=site.model.dtype == "bfloat16", fp16=site.model.dtype == "float16",
        logging_strategy="steps", logging_steps=1, logging_nan_inf_filter=False,
        save_strategy="steps" if save_every else "no", save_steps=save_every or plan.steps, save_total_limit=None,
        restore_callback_states_from_checkpoint=True,
        eval_on_start=evaluate and not resuming, report_to=[name for name in loop.trackers if name != "tensorboard"],
        run_name=f"{site.folder.parent.name}/{site.name}", remove_unused_columns=False, disable_tqdm=True,
        dataloader_pin_memory=False, label_names=[], **evaluations)
    if arguments.world_size != plan.world_size:
        raise ConfigError(f"the steps were planned for {plan.world_size} process(es), but {arguments.world_size} were started together. "
                          "This version trains in one; start it without a launcher.")
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1    # one process trains on one GPU; the Trainer would wrap the model in DataParallel, which splits rows anew
    return arguments
