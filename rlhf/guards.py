"""What a run checks about itself: things that must hold, which stop it, and things that smell, which are recorded as alarms.

The checks are functions of figures; `StepGuards` carries them into the Trainer. Each one, and what to do about it: docs/guards.md.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from rlhf.distributed.state import latest_checkpoint
from rlhf.errors import GuardError
from rlhf.maths.losses import NEEDS_REFERENCE
from rlhf.step_log import StepLog

LN2 = math.log(2)
LN2_LOSSES = frozenset({"sigmoid", "robust", "aot", "aot_unpaired", "sigmoid_norm"})
"""Losses that are ln 2 for every pair, whatever the smoothing, where policy = reference."""
ZERO_IS_LEGAL_LOSSES = frozenset({"hinge"})
"""Losses that are exactly 0 once every pair is past its margin."""
STEP_0_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
"""On the loss; twice that on the margin, as the slope of the loss is 1/2 there. Summing in another order moves log-probs so far."""


# ---- what must hold ----

def non_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that hold a NaN or an infinity.

    A sum is not finite when one of its terms is not, and is the fastest pass over a tensor; one transfer from the device tells that
    all is well. Only when it is not are the tensors looked at one by one: a sum of finite values may overflow, too.
    """
    if not tensors:
        return []
    sums = [tensor.detach().sum(dtype=torch.float32) for tensor in tensors.values()]
    if bool(torch.stack([total.to(sums[0].device) for total in sums]).isfinite().all()):
        return []
    return [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]


def named_briefly(names: Sequence[str], *, at_most: int = 8) -> str:
    shown = ", ".join(names[:at_most])
    return shown if len(names) <= at_most else f"{shown} and {len(names) - at_most} more"


def expect_step_0(*, loss: float, largest_margin: float, losses: Mapping[str, float], dtype: str) -> None:
    """Before the first update the policy is the reference: every margin is 0, and the loss ln 2 where it is a function of the margin alone.

    `losses` are names and weights, `largest_margin` is the largest |reward margin| of the pairs; both taken in evaluation mode (dropout
    makes the two differ). Combinations with a loss that does not compare with the reference only have their margin checked.
    """
    if not set(losses) & NEEDS_REFERENCE:
        return
    tolerance = STEP_0_TOLERANCE[dtype]
    if not abs(largest_margin) <= 2 * tolerance:
        raise GuardError(f"step 0: a reward margin is {largest_margin:.6g}, it must be 0 (within {2 * tolerance:g} in {dtype}): the policy "
                         "is not the reference. Is the SFT adapter part of the reference? Do both see the same template and lengths?")
    if set(losses) <= LN2_LOSSES:
        expected = LN2 * sum(losses.values())
        if not abs(loss - expected) <= tolerance * sum(losses.values()):
            raise GuardError(f"step 0: the loss is {loss:.6f}, it must be {expected:.6f} (within {tolerance:g} in {dtype}) while the "
                             "policy is the reference. The margins are right, so the loss is wrong: look at its weights and its divisor.")


def expect_same_reference(*, before: str, after: str) -> None:
    """Fingerprints of the reference weights at the start and at the end of a run."""
    if before != after:
        raise GuardError(f"the reference changed while training ({before} became {after}): margins and KL of this run mean nothing. "
                         "A module of it is shared with the policy, or has requires_grad set.")


def expect_trained(*, untrained_adapters: Sequence[str] = (), missing_from_save: Sequence[str] = ()) -> None:
    """After training: every adapter has moved (B is no longer zero), and whatever was trained is in the saved files."""
    faults = [
        f"{what}: {named_briefly(names)}" for what, names in (
            ("adapters whose B is still zero", untrained_adapters),
            ("trained, but not in the saved files", missing_from_save),
        ) if names
    ]
    if faults:
        raise GuardError("not everything that should be trained was: " + "; ".join(faults) +
                         ". Was the learning rate 0 throughout? Does the loss reach these modules? Are they in lora.targets by mistake?")


# ---- what smells ----

@dataclass(frozen=True, slots=True)
class Alarm:
    step: int
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What alarms look at, of one step. None where the objective has no such figure."""

    step: int
    grad_norm: float | None
    learning_rate: float
    chosen: float | None
    """rewards/chosen: beta times the chosen log-prob, counted from the reference; it falls as the log-prob falls, with less noise."""
    margin: float | None
    accuracy: float | None

    @classmethod
    def of_line(cls, line: Mapping[str, object]) -> StepFigures:
        def figure(name: str) -> float | None:
            value = line.get(name)
            return float(value) if isinstance(value, int | float) else None

        step, learning_rate = figure("step"), figure("learning_rate")
        if step is None or learning_rate is None:
            raise GuardError(f"a line of the step log needs step and learning_rate, got {sorted(line)}")
        return cls(step=int(step), grad_norm=figure("grad_norm"), learning_rate=learning_rate, chosen=figure("rewards/chosen"),
                   margin=figure("rewards/margins"), accuracy=figure("rewards/accuracies"))


class Trend(NamedTuple):
    """Least-squares line through a window."""

    change: float
    """From the first step of the window to the last, on the line."""
    certainty: float
    """|slope| in standard errors of the slope."""


def trend(values: Sequence[float]) -> Trend:
    """y = a + b t by least squares.

    change = b (n - 1); certainty = |b| / sqrt(sum (y - a - b t)^2 / (n - 2) / sum (t - mean t)^2)
    """
    times = range(len(values))
    slope, start = statistics.linear_regression(times, values)
    squares = sum((value - start - slope * t) ** 2 for t, value in zip(times, values, strict=True))
    error = math.sqrt(squares / (len(values) - 2) / (statistics.pvariance(times) * len(values)))
    return Trend(slope * (len(values) - 1), abs(slope) / error if error else math.inf)


DISPLACEMENT_WINDOW = 50
DISPLACEMENT_FALL = 0.05
"""Reward units: half a nat of log-prob at beta 0.1."""
DISPLACEMENT_CERTAINTY = 3.0
EXPLODED_MARGIN = 30.0
"""sigmoid(-30) = 1e-13: the gradient of such a pair is gone."""
FIRST_STEPS = 10


def falling_chosen(history: Sequence[StepFigures]) -> str | None:
    """Likelihood displacement (Razin et al. 2024, arXiv:2410.08847): over 50 steps rewards/chosen falls by 0.05 or more while
    rewards/margins rises, each with a slope of at least 3 standard errors."""
    window = history[-DISPLACEMENT_WINDOW:]
    chosen = [figures.chosen for figures in window if figures.chosen is not None]
    margins = [figures.margin for figures in window if figures.margin is not None]
    if len(chosen) < DISPLACEMENT_WINDOW or len(margins) < DISPLACEMENT_WINDOW:
        return None
    fall, rise = trend(chosen), trend(margins)
    if fall.change > -DISPLACEMENT_FALL or rise.change <= 0 or min(fall.certainty, rise.certainty) < DISPLACEMENT_CERTAINTY:
        return None
    return (f"over {DISPLACEMENT_WINDOW} steps rewards/chosen fell by {-fall.change:.3g} while rewards/margins rose by {rise.change:.3g}: "
            "the policy makes the better responses less likely, too. Add an sft loss, lower the learning rate, or raise beta.")


def perfect_from_the_start(history: Sequence[StepFigures]) -> str | None:
    """Steps 2 to 10 all have accuracy 1; step 1 is left out, where every pair is a tie."""
    if len(history) != FIRST_STEPS or any(figures.accuracy != 1.0 for figures in history[1:]):
        return None
    return (f"rewards/accuracies is 1.0 from the start (steps {history[1].step} to {history[-1].step}): the pairs differ in something "
            "trivial (an end token, a prefix), or the reference is not the model training started from. Run rlhf check on the data.")


def no_gradient(history: Sequence[StepFigures]) -> str | None:
    if history[-1].grad_norm != 0.0:
        return None
    return "the gradient is exactly 0: nothing was learned in this step. Are the pairs identical, or are no trained weights in the graph?"


def no_learning_rate(history: Sequence[StepFigures]) -> str | None:
    if len(history) != FIRST_STEPS or any(figures.learning_rate != 0.0 for figures in history):
        return None
    return f"the learning rate was 0 in all of the first {FIRST_STEPS} steps. Look at optim.learning_rate and optim.warmup_fraction."


def exploded_margin(history: Sequence[StepFigures]) -> str | None:
    margin = history[-1].margin
    if margin is None or abs(margin) <= EXPLODED_MARGIN:
        return None
    return f"rewards/margins is {margin:.4g}; beyond {EXPLODED_MARGIN:g} pairs have no gradient left. Lower the learning rate or beta."


RULES: dict[str, Callable[[Sequence[StepFigures]], str | None]] = {
    "falling_chosen": falling_chosen,
    "perfect_from_the_start": perfect_from_the_start,
    "no_gradient": no_gradient,
    "no_learning_rate": no_learning_rate,
    "exploded_margin": exploded_margin,
}


def alarms_at(history: Sequence[StepFigures], *, raised: Collection[str] = ()) -> list[Alarm]:
    """What is wrong at the last step of a history that starts at step 1. Names in `raised` are not raised again."""
    found = ((name, rule(history)) for name, rule in RULES.items() if name not in raised)
    return [Alarm(history[-1].step, name, text) for name, text in found if text is not None]


# ---- in the Trainer ----

class StepGuards(TrainerCallback):  # type: ignore[misc]
    """Stops a run before a bad step reaches the weights, and before bad weights reach a checkpoint; records alarms.

    The trainer calls `microbatch` with each training loss. `on_pre_optimizer_step` is the last event before the weights move; the
    Trainer must not hide non-finite losses (`logging_nan_inf_filter=False`). Goes after `StepLog` in the list of callbacks.
    """

    def __init__(self, checkpoints: Path, *, log: StepLog, zero_is_legal: bool) -> None:
        """`zero_is_legal`: the objective may reach a loss of exactly 0. Alarms look back over the lines of earlier starts of the run."""
        self.checkpoints, self.log, self.zero_is_legal = checkpoints, log, zero_is_legal
        self.history = [StepFigures.of_line(line) for line in log.earlier if "loss" in line]
        self.alarms = [Alarm(int(line["step"]), str(line["alarm"]), str(line["text"])) for line in log.earlier if "alarm" in line]
        self._losses: list[Tensor] = []
        self._ids: list[str] = []

    def microbatch(self, loss: Tensor, ids: Sequence[str]) -> None:
        """The loss of one microbatch, and the `content_id`s of its rows. Costs no transfer from the device."""
        self._losses.append(loss.detach())
        self._ids.extend(ids)

    @override
    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if args.logging_nan_inf_filter:
            raise GuardError("TrainingArguments.logging_nan_inf_filter must be False: it would log an average instead of a NaN")

    @override
    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self._losses, self._ids = [], []

    @override
    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module,
                              **_: object) -> None:
        assert self._losses, "the trainer must hand each training loss to StepGuards.microbatch"
        loss = float(torch.stack(self._losses).sum())
        if not math.isfinite(loss):
            self._stop(state, f"the loss is {loss}")
        if loss == 0.0 and not self.zero_is_legal:
            self._stop(state, "the loss is exactly 0, so no response token counts or the log-probs are not what they seem")
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        # A loss scaler skips the steps whose gradients overflow in float16; that is its way to find its scale.
        if not args.fp16 and (names := non_finite(gradients)):
            self._stop(state, f"the gradient is not finite in {named_briefly(names)}")

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **_: object) -> None:
        if control.should_save:
            self._expect_finite_weights(state, model)

    @override
    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **_: object) -> None:
        self._expect_finite_weights(state, model)      # a new best is saved right after this event

    @override
    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **_: object) -> None:
        self._expect_finite_weights(state, model)

    @override
    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Mapping[str, float], **_: object) -> None:
        if "loss" not in logs:
            return
        self.history.append(StepFigures.of_line({"step": state.global_step, **logs}))
        for alarm in alarms_at(self.history, raised={alarm.name for alarm in self.alarms}):
            self.alarms.append(alarm)
            self.log.write({"step": alarm.step, "alarm": alarm.name, "text": alarm.text})

    def _expect_finite_weights(self, state: TrainerState, model: nn.Module) -> None:
        names = non_finite({name: weight for name, weight in model.named_parameters() if weight.requires_grad})
        if names:
            raise GuardError(f"after step {state.global_step} the weights are not finite in {named_briefly(names)}; they are not saved. "
                             f"{self._way_on()}")

    def _stop(self, state: TrainerState, what: str) -> None:
        raise GuardError(f"step {state.global_step + 1} was not taken: {what}. Rows of this step: {named_briefly(self._ids)}. "
                         f"The weights are those after step {state.global_step}. {self._way_on()}")

    def _way_on(self) -> str:
        last = latest_checkpoint(self.checkpoints)
        kept = f"The last good checkpoint is {last}." if last else f"There is no checkpoint in {self.checkpoints} yet."
        return f"{kept} Look at these rows, lower the learning rate, or use bfloat16 instead of float16."
