"""What stops a run, and what is recorded as an alarm."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

import pytest
import torch

from rlhf.errors import GuardError
from rlhf.guards import (
    LN2_LOSSES,
    RULES,
    StepFigures,
    alarms_at,
    expect_same_reference,
    expect_step_0,
    expect_trained,
    named_briefly,
    non_finite,
    trend,
)
from rlhf.maths.losses import LOSSES, NEEDS_REFERENCE, READS_SMOOTHING, PairLogps, preference_loss


def figures(step=1, *, grad_norm=1.0, learning_rate=1e-5, chosen=None, margin=None, accuracy=None):
    return StepFigures(step=step, grad_norm=grad_norm, learning_rate=learning_rate, chosen=chosen, margin=margin, accuracy=accuracy)


def raised(history):
    return [alarm.name for alarm in alarms_at(history)]


# ---- step 0 ----

def loss_at_the_reference(name: str, *, smoothing: float) -> torch.Tensor:
    chosen, rejected = torch.tensor([-30.0, -7.0, -90.5]), torch.tensor([-20.0, -11.0, -60.25])
    pairs = PairLogps(policy_chosen=chosen, policy_rejected=rejected, reference_chosen=chosen.clone(), reference_rejected=rejected.clone(),
                      chosen_tokens=torch.tensor([9, 3, 20]), rejected_tokens=torch.tensor([8, 5, 11]), smoothing=smoothing,
                      chosen_tokens_per_pair=10.0)
    return preference_loss(name, pairs, beta=0.3, simpo_gamma=0.5, discopop_tau=0.05)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_ln2_is_expected_of_exactly_the_losses_that_are_ln2_at_the_reference(name):
    found = [loss_at_the_reference(name, smoothing=smoothing) for smoothing in ((0.1, 0.2) if name in READS_SMOOTHING else (0.0,))]
    assert all(torch.allclose(loss, torch.tensor(math.log(2))) for loss in found) == (name in LN2_LOSSES)


def test_step_0_of_dpo_is_ln2():
    expect_step_0(loss=0.6931472, largest_margin=0.0, losses={"sigmoid": 1.0}, dtype="float32")
    expect_step_0(loss=0.6931472 * 0.5, largest_margin=0.0, losses={"sigmoid": 0.25, "robust": 0.25}, dtype="float32")


@pytest.mark.parametrize(("loss", "margin", "losses"), [
    (0.66, 0.0, {"sigmoid": 1.0}),
    (0.6931472, 0.05, {"sigmoid": 1.0}),        # two margins may cancel in the loss
    (math.nan, 0.0, {"sigmoid": 1.0}),
    (0.6931472, math.nan, {"sigmoid": 1.0}),
    (2.5, 0.3, {"ipo": 1.0}),                   # the margin must be 0 whatever the loss
    (0.6931472, 0.0, {"sigmoid": 2.0}),
])
def test_step_0_with_another_policy_than_the_reference_is_refused(loss, margin, losses):
    with pytest.raises(GuardError, match="step 0"):
        expect_step_0(loss=loss, largest_margin=margin, losses=losses, dtype="float32")


def test_bfloat16_is_given_more_room_than_float32():
    noisy = {"loss": 0.6931472 + 1e-3, "largest_margin": 2e-3, "losses": {"sigmoid": 1.0}}
    expect_step_0(**noisy, dtype="bfloat16")
    with pytest.raises(GuardError):
        expect_step_0(**noisy, dtype="float32")


def test_losses_without_a_reference_have_no_step_0():
    expect_step_0(loss=3.0, largest_margin=7.0, losses={"simpo": 1.0, "sft": 0.2}, dtype="float32")


# ---- the end ----

def test_a_changed_reference_voids_the_run():
    expect_same_reference(before="ab", after="ab")
    with pytest.raises(GuardError, match="ab became cd"):
        expect_same_reference(before="ab", after="cd")


def test_everything_that_was_not_trained_or_saved_is_named_at_once():
    expect_trained(untrained_adapters=[])
    with pytest.raises(GuardError) as caught:
        expect_trained(untrained_adapters=["layers.0.q_proj"], missing_from_save=["score.weight"])
    assert all(text in str(caught.value) for text in ("zero: layers.0.q_proj", "saved files: score.weight"))


# ---- tensors ----

@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_bad_value_among_many_is_found_and_named(value, dtype):
    tensors = {"a": torch.ones(1000, dtype=dtype), "b": torch.ones(3, 5, dtype=dtype)}
    assert non_finite(tensors) == []
    tensors["b"][1, 2] = value
    assert non_finite(tensors) == ["b"]


def test_an_infinity_of_each_sign_does_not_cancel():
    assert non_finite({"a": torch.tensor([math.inf, -math.inf])}) == ["a"]


@pytest.mark.parametrize(("value", "dtype"), [(3e38, torch.float32), (6e4, torch.float16)])
def test_large_finite_values_whose_sum_overflows_are_finite(value, dtype):
    assert non_finite({"a": torch.full((10,), value, dtype=dtype)}) == []


def test_long_lists_of_names_are_cut_with_a_count():
    assert named_briefly(["a", "b"]) == "a, b"
    assert named_briefly([str(number) for number in range(10)], at_most=2) == "0, 1 and 8 more"


# ---- alarms ----

def test_a_trend_by_hand():
    """Values 0, 2, 1, 3 at t = 0..3: slope 0.8, residuals -0.3, 0.9, -0.9, 0.3, standard error sqrt(1.8 / 2 / 5)."""
    change, certainty = trend([0.0, 2.0, 1.0, 3.0])
    assert change == pytest.approx(2.4)
    assert certainty == pytest.approx(0.8 / math.sqrt(0.18))


def run_of(steps, *, chosen_slope, margin_slope, noise):
    generator = random.Random(3)
    return [figures(step, chosen=chosen_slope * step + generator.gauss(0, noise), margin=margin_slope * step + generator.gauss(0, noise))
            for step in range(1, steps + 1)]


def test_falling_chosen_logps_with_a_rising_margin_raise_an_alarm():
    assert raised(run_of(50, chosen_slope=-0.01, margin_slope=0.02, noise=0.02)) == ["falling_chosen"]


@pytest.mark.parametrize(("steps", "chosen_slope", "margin_slope", "noise"), [
    (49, -0.01, 0.02, 0.02),        # the window is not full
    (50, 0.01, 0.02, 0.02),         # chosen rises
    (50, -0.01, -0.02, 0.02),       # the margin falls too: not displacement, just a bad run
    (50, -0.0005, 0.02, 0.0001),    # a fall too small to matter
    (50, -0.002, 0.02, 1.0),        # a fall that noise may explain
])
def test_no_displacement_no_alarm(steps, chosen_slope, margin_slope, noise):
    assert raised(run_of(steps, chosen_slope=chosen_slope, margin_slope=margin_slope, noise=noise)) == []


def test_only_the_last_window_counts():
    early = run_of(50, chosen_slope=-0.01, margin_slope=0.02, noise=0.02)
    late = [figures(step, chosen=-0.5 + 0.01 * (step - 50), margin=1.0 + 0.02 * (step - 50)) for step in range(51, 101)]
    assert raised(early + late) == []


def test_perfect_accuracy_from_the_start_is_an_alarm_once_and_only_then():
    perfect = [figures(1, accuracy=0.5)] + [figures(step, accuracy=1.0) for step in range(2, 11)]
    assert raised(perfect) == ["perfect_from_the_start"]
    assert raised(perfect[:9]) == []
    assert raised([*perfect, figures(11, accuracy=1.0)]) == []
    assert raised([*perfect[:5], figures(6, accuracy=0.99), *perfect[6:]]) == []


def test_sft_has_no_accuracy_and_no_alarm_for_it():
    assert raised([figures(step) for step in range(1, 11)]) == []


def test_a_gradient_of_exactly_zero_is_an_alarm():
    assert raised([figures(1), figures(2, grad_norm=0.0)]) == ["no_gradient"]
    assert raised([figures(1, grad_norm=0.0), figures(2, grad_norm=1e-30)]) == []


def test_a_learning_rate_of_zero_throughout_is_an_alarm_but_warm_up_is_none():
    assert raised([figures(step, learning_rate=0.0) for step in range(1, 11)]) == ["no_learning_rate"]
    assert raised([figures(step, learning_rate=1e-6 * (step - 1)) for step in range(1, 11)]) == []


@pytest.mark.parametrize(("margin", "names"), [(29.0, []), (31.0, ["exploded_margin"]), (-31.0, ["exploded_margin"])])
def test_exploding_margins_are_an_alarm(margin, names):
    assert raised([figures(1, margin=margin)]) == names


def test_an_alarm_is_not_raised_twice():
    assert alarms_at([figures(1, margin=99.0, grad_norm=0.0)], raised={"exploded_margin"})[0].name == "no_gradient"


def test_figures_come_from_the_log_by_the_names_of_trl():
    line = json.loads('{"step": 4, "loss": 0.5, "grad_norm": 2, "learning_rate": 0.1, "rewards/chosen": -1.5, "rewards/margins": 0.25, '
                      '"rewards/accuracies": 1.0}')
    assert StepFigures.of_line(line) == figures(4, grad_norm=2.0, learning_rate=0.1, chosen=-1.5, margin=0.25, accuracy=1.0)


# ---- what the page says ----

def test_the_page_names_every_alarm_and_the_losses_of_step_0():
    page = (Path(__file__).resolve().parents[2] / "docs" / "guards.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", page.partition("## Alarms")[2], re.MULTILINE) == list(RULES)
    step_0 = page.partition("**Step 0.**")[2].partition("A combination")[0]
    assert set(re.findall(r"`(\w+)`", step_0)) == LN2_LOSSES
    without = re.search(r"`(\w+)`, `(\w+)` and `(\w+)` have none", page)
    assert without is not None and set(without.groups()) == set(LOSSES) - NEEDS_REFERENCE
