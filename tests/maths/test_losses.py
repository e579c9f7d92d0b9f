"""Golden values by hand, properties, limits and refusals of every preference loss."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from rlhf.config import LossName
from rlhf.errors import ConfigError, ShapeError
from rlhf.maths import losses
from rlhf.maths.losses import COUPLES_ROWS, LOSSES, NEEDS_REFERENCE, READS_SMOOTHING, PairLogps, combined, implicit_rewards, preference_loss

LN2 = math.log(2)
COUNTS = {"chosen_tokens": torch.tensor([4]), "rejected_tokens": torch.tensor([5])}

# a = -8 - -10 = 2, b = -13 - -12 = -1, h = 3; with beta = 0.5: beta a = 1, beta b = -0.5, beta h = 1.5; a / 4 = 0.5, b / 5 = -0.2
PAIR = PairLogps(policy_chosen=torch.tensor([-8.0]), policy_rejected=torch.tensor([-13.0]), reference_chosen=torch.tensor([-10.0]),
                 reference_rejected=torch.tensor([-12.0]), smoothing=0.1, chosen_tokens_per_pair=4.0, **COUNTS)


def loss_of(name: str, pairs: PairLogps, *, beta: float = 0.5, gamma: float = 0.5, tau: float = 0.5) -> Tensor:
    return preference_loss(name, pairs, beta=beta, simpo_gamma=gamma, discopop_tau=tau)


def random_pairs(rows: int, *, seed: int = 0, dtype: torch.dtype = torch.float32, smoothing: float | Tensor = 0.1) -> PairLogps:
    draws = -20 + 6 * torch.randn(4, rows, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return PairLogps(policy_chosen=draws[0], policy_rejected=draws[1], reference_chosen=draws[2], reference_rejected=draws[3],
                     chosen_tokens=torch.arange(3, 3 + rows), rejected_tokens=torch.arange(9, 9 + rows), smoothing=smoothing,
                     chosen_tokens_per_pair=5.5)


def row(pairs: PairLogps, index: int) -> PairLogps:
    def one(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[index:index + 1]
    return replace(pairs, **{name: one(getattr(pairs, name)) for name in (
        "policy_chosen", "policy_rejected", "reference_chosen", "reference_rejected", "chosen_tokens", "rejected_tokens")})


def swapped(pairs: PairLogps) -> PairLogps:
    return replace(pairs, policy_chosen=pairs.policy_rejected, policy_rejected=pairs.policy_chosen,
                   reference_chosen=pairs.reference_rejected, reference_rejected=pairs.reference_chosen,
                   chosen_tokens=pairs.rejected_tokens, rejected_tokens=pairs.chosen_tokens)


@pytest.mark.parametrize(("name", "expected"), [
    ("sigmoid", 0.3514133),        # -log s(1.5) = ln(1 + e^-1.5) = 0.2014133, -log s(-1.5) = 1.7014133: 0.9 * 0.2014133 + 0.1 * 1.7014133
    ("robust", 0.0139133),         # (0.9 * 0.2014133 - 0.1 * 1.7014133) / 0.8 = 0.0111306 / 0.8
    ("hinge", 0.0),                # max(0, 1 - 1.5)
    ("ipo", 0.09),                 # (0.5 + 0.2 - 1 / (2 * 0.5))^2 = (-0.3)^2
    ("exo_pair", 0.0311388),       # q = s(1.5) = 0.8175745: q (-0.2014133 - ln 0.9) + (1 - q) (-1.7014133 - ln 0.1) = -0.07853 + 0.10967
    ("nca_pair", 1.2069310),       # ln(1 + e^-1) + 0.5 ln(1 + e) + 0.5 ln(1 + e^-0.5) = 0.3132617 + 0.6566308 + 0.2370385
    ("bco_pair", 0.7873387),       # ln(1 + e^-1) + ln(1 + e^-0.5) = 0.3132617 + 0.4740770
    ("sppo_hard", 1.0),            # (2 - 1)^2 + (-1 + 1)^2
    ("apo_zero", 0.6464821),       # 1 - s(1) + s(-0.5) = 0.2689414 + 0.3775407
    ("apo_down", 0.9134841),       # s(1) + 1 - s(1.5) = 0.7310586 + 0.1824255
    ("discopop", 0.2221002),       # m = s(1.5 / 0.5) = 0.9525741: 0.0474259 * 0.2014133 + 0.9525741 * e^-1.5
    ("sigmoid_norm", 0.5333824),   # ln(1 + e^-(0.5 * 0.7)) = ln 1.7046881
    ("simpo", 0.7981389),          # 0.5 (-2 + 2.6) - 0.5 = -0.2: ln(1 + e^0.2)
    ("orpo", 0.4138378),           # odds 0.1353353 / 0.8646647 and 0.0742736 / 0.9257264; their ratio 1.9507936: ln(1 + 1 / 1.9507936)
    ("sft", 2.0),                  # 8 nats / 4 tokens
])
def test_golden_value(name: str, expected: float) -> None:
    torch.testing.assert_close(loss_of(name, PAIR), torch.tensor([expected]), atol=2e-6, rtol=0)


def test_golden_hinge_inside_the_margin() -> None:
    torch.testing.assert_close(loss_of("hinge", PAIR, beta=0.2), torch.tensor([0.4]))    # 1 - 0.2 * 3


def test_golden_aot_sorts_policy_and_reference_margins_apart() -> None:
    pairs = PairLogps(policy_chosen=torch.tensor([-8.0, -9.0]), policy_rejected=torch.tensor([-13.0, -10.0]),      # margins 5, 1
                      reference_chosen=torch.tensor([-10.0, -9.0]), reference_rejected=torch.tensor([-12.0, -12.0]),  # margins 2, 3
                      chosen_tokens=torch.tensor([4, 4]), rejected_tokens=torch.tensor([5, 5]))
    # 1 - 2 = -1 and 5 - 3 = 2; times 0.5: ln(1 + e^0.5) = 0.9740770, ln(1 + e^-1) = 0.3132617
    torch.testing.assert_close(loss_of("aot", pairs), torch.tensor([0.9740770, 0.3132617]))


def test_golden_aot_unpaired_sorts_chosen_and_rejected_apart() -> None:
    # a sorted 0, 2; b sorted -1, 3; differences 1, -1; times 0.5: ln(1 + e^-0.5) = 0.4740770, ln(1 + e^0.5) = 0.9740770
    values = losses.aot_unpaired_loss(torch.tensor([2.0, 0.0]), torch.tensor([-1.0, 3.0]), beta=0.5)
    torch.testing.assert_close(values, torch.tensor([0.4740770, 0.9740770]))


@pytest.mark.parametrize("name", ["sigmoid", "robust", "aot", "aot_unpaired", "sigmoid_norm"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2, 0.49])
def test_ln_two_where_the_policy_is_the_reference_whatever_the_smoothing(name: str, smoothing: float) -> None:
    pairs = random_pairs(6, smoothing=smoothing)
    at_reference = replace(pairs, policy_chosen=pairs.reference_chosen, policy_rejected=pairs.reference_rejected)
    torch.testing.assert_close(loss_of(name, at_reference), torch.full((6,), LN2))


@pytest.mark.parametrize("name", ["sigmoid", "sigmoid_norm"])
def test_swapping_the_responses_turns_the_probability_round(name: str) -> None:
    pairs = random_pairs(16, smoothing=0.0)
    there, back = loss_of(name, pairs), loss_of(name, swapped(pairs))
    torch.testing.assert_close(torch.exp(-there) + torch.exp(-back), torch.ones(16))


@pytest.mark.parametrize("name", ["robust", "aot", "aot_unpaired"])
def test_without_smoothing_the_noise_aware_losses_are_the_plain_logistic(name: str) -> None:
    one = row(random_pairs(3, smoothing=0.0), 1)              # one row: nothing to sort
    torch.testing.assert_close(loss_of(name, one), loss_of("sigmoid", one))


def test_half_smoothing_knows_no_direction() -> None:
    pairs = random_pairs(8, smoothing=0.5)
    torch.testing.assert_close(loss_of("sigmoid", pairs), loss_of("sigmoid", swapped(pairs)))


def test_smoothed_loss_grows_again_as_the_margin_grows() -> None:
    margins = torch.tensor([2.0, 20.0, 200.0])
    values = losses.sigmoid_loss(margins, torch.zeros(3), beta=1.0, smoothing=0.1)
    assert values[0] < values[1] < values[2]
    # its minimum is where the odds are (1 - e) / e: s(x) = 0.9 at x = ln 9
    nearby = math.log(9) + torch.tensor([-0.1, 0.0, 0.1])
    assert losses.sigmoid_loss(nearby, torch.zeros(3), beta=1.0, smoothing=0.1).argmin() == 1


def test_robust_loss_is_unbiased_under_flipped_labels_and_may_be_negative() -> None:
    pairs, flip = random_pairs(32, smoothing=0.2), 0.2
    expectation = (1 - flip) * loss_of("robust", pairs) + flip * loss_of("robust", swapped(pairs))
    torch.testing.assert_close(expectation, loss_of("sigmoid", replace(pairs, smoothing=0.0)))
    assert losses.robust_loss(torch.tensor([30.0]), torch.tensor([-30.0]), beta=0.5, smoothing=0.2) < 0


def test_exo_is_zero_where_the_policy_has_the_labels_odds() -> None:
    margin = torch.tensor([math.log(0.9 / 0.1)])
    torch.testing.assert_close(losses.exo_pair_loss(margin, torch.zeros(1), beta=1.0, smoothing=0.1), torch.zeros(1), atol=1e-6, rtol=0)


def test_ipo_and_sppo_have_their_minimum_at_the_papers_target() -> None:
    tokens = torch.tensor([4])
    assert losses.ipo_loss(torch.tensor([4 * 5.0]), torch.zeros(1), tokens, tokens, beta=0.1).item() == pytest.approx(0, abs=1e-6)
    assert losses.sppo_hard_loss(torch.tensor([5.0]), torch.tensor([-5.0]), beta=0.1).item() == pytest.approx(0, abs=1e-6)


def test_sppo_and_simpo_ignore_what_they_should() -> None:
    pairs = random_pairs(4)
    shifted = replace(pairs, reference_chosen=None, reference_rejected=None)
    torch.testing.assert_close(loss_of("simpo", shifted), loss_of("simpo", pairs))
    torch.testing.assert_close(loss_of("orpo", shifted, beta=0.1), loss_of("orpo", pairs, beta=3.0))


def test_smoothing_per_pair_is_each_pair_with_its_own() -> None:
    own = torch.tensor([0.0, 0.1, 0.3, 0.45])
    for name in ("sigmoid", "robust"):
        pairs = random_pairs(4, smoothing=own)
        alone = torch.cat([loss_of(name, replace(row(pairs, i), smoothing=own[i].item())) for i in range(4)])
        torch.testing.assert_close(loss_of(name, pairs), alone)


def test_the_losses_are_those_of_the_recipe() -> None:
    assert set(LOSSES) == set(get_args(LossName))


@pytest.mark.parametrize("name", LOSSES)
def test_the_sets_say_what_the_losses_do(name: str) -> None:
    pairs, alone = random_pairs(5), replace(random_pairs(5), reference_chosen=None, reference_rejected=None)
    if name in NEEDS_REFERENCE:
        with pytest.raises(ConfigError, match="no reference"):
            loss_of(name, alone)
    else:
        assert loss_of(name, alone).shape == (5,)
    reads = not torch.equal(loss_of(name, pairs), loss_of(name, replace(pairs, smoothing=0.3)))
    assert reads == (name in READS_SMOOTHING)
    rows_alone = torch.cat([loss_of(name, row(pairs, i)) for i in range(5)])
    assert torch.allclose(rows_alone, loss_of(name, pairs), atol=1e-6) == (name not in COUPLES_ROWS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gap", [-2000.0, -200.0, 0.0, 200.0, 2000.0])
@pytest.mark.parametrize("name", LOSSES)
def test_finite_at_any_gap_in_any_precision(name: str, gap: float, dtype: torch.dtype) -> None:
    chosen = torch.tensor([-4000.0 + gap, -4000.0, -4000.0], dtype=dtype, requires_grad=True)
    rejected = torch.tensor([-4000.0, -4000.0 + gap, -4000.0 - gap], dtype=dtype, requires_grad=True)
    level = torch.full((3,), -4000.0, dtype=dtype)
    pairs = PairLogps(policy_chosen=chosen, policy_rejected=rejected, reference_chosen=level, reference_rejected=level, smoothing=0.1,
                      chosen_tokens=torch.tensor([1, 7, 300]), rejected_tokens=torch.tensor([300, 1, 7]), chosen_tokens_per_pair=100.0)
    values = preference_loss(name, pairs, beta=1.0, simpo_gamma=0.5, discopop_tau=0.05)
    assert values.dtype == torch.float32
    values.sum().backward()
    for what, tensor in (("loss", values), ("chosen", chosen.grad), ("rejected", rejected.grad)):
        assert tensor is None or torch.isfinite(tensor).all(), f"{what}: {tensor}"


def test_orpo_is_finite_for_a_certain_policy() -> None:
    certain = torch.zeros(2, requires_grad=True)
    values = losses.orpo_loss(certain, torch.tensor([-5.0, 0.0]), torch.tensor([3, 3]), torch.tensor([3, 3]))
    values.sum().backward()
    assert torch.isfinite(values).all() and torch.isfinite(certain.grad).all()


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    pairs = random_pairs(5, dtype=torch.float64)
    def of_policy(chosen: Tensor, rejected: Tensor) -> Tensor:
        return loss_of(name, replace(pairs, policy_chosen=chosen, policy_rejected=rejected), beta=0.3)
    leaves = [tensor.clone().requires_grad_() for tensor in (pairs.policy_chosen, pairs.policy_rejected)]
    used = [i for i, grad in enumerate(torch.autograd.grad(of_policy(*leaves).sum(), leaves, allow_unused=True)) if grad is not None]
    assert used == ([0] if name == "sft" else [0, 1])
    assert torch.autograd.gradcheck(of_policy, tuple(leaves))


def test_sft_rows_average_to_the_mean_over_the_tokens_of_the_step() -> None:
    token_logps = [torch.tensor([-1.0, -3.0]), torch.tensor([-2.0]), torch.tensor([-4.0, -1.0, -1.0, -2.0])]
    step = torch.cat(token_logps)                                             # 14 nats over 7 tokens
    rows = [losses.sft_loss(logps.sum()[None], chosen_tokens_per_pair=7 / 3) for logps in token_logps]   # each its own microbatch
    torch.testing.assert_close(torch.cat(rows).sum() / 3, -step.mean())


def test_a_combination_is_the_weighted_sum_of_its_losses() -> None:
    pairs = random_pairs(6)
    value = combined({"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}, pairs, beta=0.1, simpo_gamma=0.5, discopop_tau=0.05)
    expected = sum(weight * loss_of(name, pairs, beta=0.1) for name, weight in (("sigmoid", 0.8), ("bco_pair", 0.2), ("sft", 1.0)))
    torch.testing.assert_close(value, expected)


def test_implicit_rewards_are_detached_log_ratios_or_token_means() -> None:
    policy = torch.tensor([-8.0], requires_grad=True)
    rewards = implicit_rewards(replace(PAIR, policy_chosen=policy), beta=0.5)
    assert (rewards.chosen.item(), rewards.rejected.item()) == (1.0, -0.5) and not rewards.chosen.requires_grad
    free = implicit_rewards(replace(PAIR, reference_chosen=None, reference_rejected=None), beta=0.5)
    torch.testing.assert_close(torch.cat(free), torch.tensor([-1.0, -1.3]))        # 0.5 * -8 / 4, 0.5 * -13 / 5


@pytest.mark.parametrize(("attempt", "message"), [
    (lambda: loss_of("dpo", PAIR), "'dpo' is none of sigmoid"),
    (lambda: loss_of("sigmoid", PAIR, beta=0.0), "beta must be > 0, got 0"),
    (lambda: loss_of("sigmoid", replace(PAIR, smoothing=0.6)), r"sigmoid: label smoothing must be in \[0, 0.5\], got 0.6"),
    (lambda: loss_of("sigmoid", replace(PAIR, smoothing=torch.tensor([float("nan")]))), "got nan"),
    (lambda: loss_of("robust", replace(PAIR, smoothing=0.5)), r"robust: .* \[0, 0.5\), got 0.5"),
    (lambda: loss_of("exo_pair", replace(PAIR, smoothing=0.0)), r"exo_pair: .* \(0, 0.5\], got 0"),
    (lambda: loss_of("exo_pair", random_pairs(2, smoothing=torch.tensor([0.1, 0.0]))), "got 0 to 0.1"),
    (lambda: loss_of("aot", random_pairs(2, smoothing=torch.tensor([0.1, 0.2]))), "cannot take a smoothing per pair"),
    (lambda: loss_of("discopop", PAIR, tau=2.0), r"discopop_tau must be in \(0, 1\]"),
    (lambda: loss_of("sft", replace(PAIR, chosen_tokens_per_pair=None)), "chosen_tokens_per_pair"),
    (lambda: loss_of("sft", replace(PAIR, chosen_tokens_per_pair=0.0)), "must be > 0"),
    (lambda: replace(PAIR, reference_rejected=None), "both or neither"),
    (lambda: combined({}, PAIR, beta=0.1, simpo_gamma=0.5, discopop_tau=0.05), "no loss is named"),
])
def test_refusals_say_what_was_found(attempt: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        attempt()


@pytest.mark.parametrize(("attempt", "message"), [
    (lambda: losses.sigmoid_loss(torch.zeros(3), torch.zeros(2), beta=0.1), "rejected_logratios has B=2, but chosen_logratios has B=3"),
    (lambda: losses.sigmoid_loss(torch.zeros(3, 1), torch.zeros(3, 1), beta=0.1), r"must be \[B\], got shape \(3, 1\)"),
    (lambda: losses.sigmoid_loss(torch.zeros(3), torch.zeros(3), beta=0.1, smoothing=torch.zeros(2)), "smoothing has B=2"),
    (lambda: replace(PAIR, chosen_tokens=torch.tensor([4, 4])), "chosen_tokens has B=2"),
    (lambda: replace(PAIR, reference_chosen=torch.zeros(1, 1)), "reference_chosen must be"),
])
def test_shape_errors_name_the_tensor(attempt: Callable[[], object], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        attempt()


def test_the_table_of_the_documentation_is_complete_and_true() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "losses.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in page.splitlines() if re.match(r"\| `\w+` \|", line)]
    documented = {cells[0].strip("`"): cells for cells in rows}
    assert list(documented) == list(LOSSES)
    for name, cells in documented.items():
        assert loss_of(name, random_pairs(3)).shape == (3,)
        assert (cells[3], cells[4]) == ("yes" if name in READS_SMOOTHING else "no", "yes" if name in NEEDS_REFERENCE else "no"), name
