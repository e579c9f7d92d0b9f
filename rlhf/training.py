"""The one training loop: transformers.Trainer, an objective handed in, and nothing but documented hooks.

`get_train_dataloader`, `get_batch_samples`, `compute_loss`, its context manager, `log` and `evaluate` are overridden; checkpoints,
schedulers, trackers, mixed precision and launchers are the Trainer's own. Losses are divided by what the whole step holds, so
micro-batches of any size and any number of devices give one loss curve. (Why not the trainers of TRL: docs/architecture.md.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from rlhf.config import BatchConfig
from rlhf.distributed.ranks import rank, sum_over_ranks, world_size
from rlhf.guards import StepGuards
from rlhf.models.attention import evaluating
from rlhf.models.packing import Layout, PackedBatch, pack
from rlhf.progress import Bar
from rlhf.records import TokenRun
from rlhf.step_plan import StepPlan, StepTotals, evaluation_batches


@dataclass(frozen=True, slots=True)
class Mean:
    """A metric as a sum and a count, so that means are taken over the whole step and never over means."""

    total: Tensor
    """Scalar."""
    count: float


class ObjectiveTerms(NamedTuple):
    loss: Tensor
    """Scalar; over the microbatches of a step they add up to the loss of the step."""
    metrics: dict[str, Mean]
    """By the names of TRL where it has one; detached."""


class Objective(Protocol):
    def loss(self, model: nn.Module, batch: PackedBatch, totals: StepTotals) -> ObjectiveTerms:
        """The part that this microbatch contributes to the loss of a step with these totals."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    packed: PackedBatch
    totals: StepTotals


class MicrobatchDataset(Dataset[Microbatch]):
    """The microbatches of one device in the order of training: item i is number i of the whole run."""

    def __init__(self, plan: StepPlan, *, layout: Layout, rank: int) -> None:
        self.plan, self.layout, self.rank = plan, layout, rank

    def __len__(self) -> int:
        return self.plan.microbatch_count

    def __getitem__(self, index: int) -> Microbatch:
        step, number = divmod(index, self.plan.accumulation)
        rows = self.plan.microbatches_of(step)[self.rank][number]
        return Microbatch(pack([self.plan.runs[row] for row in rows], layout=self.layout), self.plan.totals_of(step))


def the_only(items: list[Microbatch]) -> dict[str, Microbatch]:
    """Collates a list of one: a microbatch is already a batch. The Trainer wants a mapping."""
    (microbatch,) = items
    return {"microbatch": microbatch}


class MetricSums:
    """Sums and counts on the device, read once a step."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, metrics: Mapping[str, Mean]) -> None:
        for name, mean in metrics.items():
            total = mean.total.double()
            pair = torch.stack([total, torch.full_like(total, mean.count)])
            self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def take(self) -> dict[str, float]:
        """Means over all devices since the last call; every device must call it."""
        if not self._sums:
            return {}
        sums = sum_over_ranks(torch.stack(list(self._sums.values()))).tolist()
        names = list(self._sums)
        self._sums = {}
        return {name: total / count for name, (total, count) in zip(names, sums, strict=True)}


class EpochOfRows(TrainerCallback):  # type: ignore[misc]
    """`epoch` counts passes over the rows, whatever the loop around the loader counts."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        state.epoch = self.plan.epoch_at(state.global_step)


class ObjectiveTrainer(Trainer):  # type: ignore[misc]
    """What is ours on one screen: which rows, which loss, which means. `evaluation_rows` may be empty."""

    loss_is_scaled_for_ga = True    # objectives divide by the whole step; the Trainer must not divide again

    def __init__(
        self, *, model: nn.Module, objective: Objective, plan: StepPlan, evaluation_rows: Sequence[TokenRun], batch: BatchConfig,
        layout: Layout, args: TrainingArguments, tokenizer: PreTrainedTokenizerBase, callbacks: list[TrainerCallback], guards: StepGuards,
        evaluation_bar: Callable[[int], AbstractContextManager[Bar]],
    ) -> None:
        self.objective, self.plan, self.batch, self.layout, self.guards = objective, plan, batch, layout, guards
        self.evaluation_rows, self.evaluation_bar = evaluation_rows, evaluation_bar
        self.sums = MetricSums()
        super().__init__(model=model, args=args, processing_class=tokenizer, callbacks=[EpochOfRows(plan), *callbacks],
                         train_dataset=MicrobatchDataset(plan, layout=layout, rank=rank()), eval_dataset=evaluation_rows)

    @override
    def get_train_dataloader(self) -> DataLoader[Microbatch]:
        """One microbatch an item, already this device's own: not sharded again."""
        return DataLoader(self.train_dataset, batch_size=1, shuffle=False, collate_fn=the_only, generator=torch.Generator())

    @override
    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> tuple[list[Any], None]:
        """The microbatches of a step; none when a run that had ended was started again, which then takes no further step."""
        return ([] if self.control.should_training_stop else list(islice(epoch_iterator, num_batches))), None

    @override
    def compute_loss_context_manager(self) -> AbstractContextManager[object]:
        """The Trainer's autocast reaches the forward of its own model; a reference and a head scored in chunks need the same."""
        autocast: AbstractContextManager[object] = self.accelerator.autocast()
        return autocast

    @override
    def compute_loss(self, model: nn.Module, inputs: dict[str, Microbatch], return_outputs: bool = False,
                     num_items_in_batch: Tensor | int | None = None) -> Tensor:
        microbatch = inputs["microbatch"]
        terms = self.objective.loss(model, microbatch.packed.to(self.args.device), microbatch.totals)
        self.sums.add(terms.metrics)
        self.guards.microbatch(terms.loss, microbatch.packed.ids)
        return terms.loss * world_size()     # gradients are averaged over devices; the totals are of the whole step

    @override
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log({**logs, **self.sums.take()} if "loss" in logs else logs, start_time)

    @override
    @torch.no_grad()
    def evaluate(self, eval_dataset: Sequence[TokenRun] | None = None, ignore_keys: list[str] | None = None,
                 metric_key_prefix: str = "eval") -> dict[str, float]:
        """Loss and metrics over all evaluation rows: sums divided by counts once, memory of one microbatch."""
        rows = self.evaluation_rows if eval_dataset is None else eval_dataset
        batches = evaluation_batches(rows, self.batch, packed=self.layout == "packed", world_size=world_size(), rank=rank())
        totals = StepTotals.of(rows)
        model = self.model_wrapped if self.is_in_train else self.model
        sums = MetricSums()
        with evaluating(model), self.evaluation_bar(len(batches)) as bar:
            for batch in batches:
                packed = pack([rows[row] for row in batch.rows], layout=self.layout).to(self.args.device)
                with self.compute_loss_context_manager():
                    terms = self.objective.loss(model, packed, totals)
                weight = float(batch.counted)
                loss = Mean(terms.loss.detach() * weight, 1 / len(batches) / world_size())
                sums.add({name: Mean(mean.total * weight, mean.count * weight) for name, mean in terms.metrics.items()} | {"loss": loss})
                bar.advance()
        metrics: dict[str, float] = {f"{metric_key_prefix}_{name}": value for name, value in sums.take().items()}
        self.log(dict(metrics))     # the Trainer adds to what it is given
        self.control: TrainerControl = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def evaluation_at_end(self) -> dict[str, float]:
        """Metrics of the model as it is now; what an evaluation of the same step has found is not measured again."""
        kept = self.kept_step()
        known = [line for line in self.state.log_history if line["step"] == kept and "eval_loss" in line]
        return {name: value for name, value in known[-1].items() if name.startswith("eval_")} if known else self.evaluate()

    def kept_step(self) -> int:
        """The step whose weights the model has after training: the last, or the best one that the Trainer has loaded at the end."""
        best_was_loaded = self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None
        step: int = self.state.best_global_step if best_was_loaded else self.state.global_step
        return step
