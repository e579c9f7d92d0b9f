"""Preference losses as pure functions of log-probabilities: one value a pair, never reduced, because only the caller knows the whole step.

Notation of the docstrings, for one pair with chosen response y_w and rejected y_l:

    a = log pi(y_w) - log ref(y_w)        chosen log-ratio; every log-probability is summed over the response's tokens
    b = log pi(y_l) - log ref(y_l)        rejected log-ratio
    h = a - b                             margin; |y| is the number of tokens of a response, s the logistic sigmoid

Everything is computed in float32 (float64 for float64 input), whatever the log-probabilities come in: margins of hundreds of nats are
ordinary, and half precision neither holds their products nor their differences. docs/losses.md says which loss is for what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.errors import ConfigError
from rlhf.maths.shapes import expect_shape

LOSSES: tuple[str, ...] = ("sigmoid", "robust", "hinge", "ipo", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
                           "apo_zero", "apo_down", "discopop", "sigmoid_norm", "simpo", "orpo", "sft")
NEEDS_REFERENCE: frozenset[str] = frozenset(LOSSES) - {"simpo", "orpo", "sft"}
READS_SMOOTHING: frozenset[str] = frozenset({"sigmoid", "robust", "exo_pair", "aot", "aot_unpaired"})
COUPLES_ROWS: frozenset[str] = frozenset({"aot", "aot_unpaired"})
"""Losses that sort over the pairs they are given: another split of a step into microbatches is another loss."""


class ByResponse(NamedTuple):
    chosen: Tensor    # [B]
    rejected: Tensor  # [B]


@dataclass(frozen=True, kw_only=True, eq=False)
class PairLogps:
    """What the losses read of a microbatch of B pairs. Chosen and rejected travel together."""

    policy_chosen: Tensor
    """[B] log pi(y_w), summed over the tokens of the response."""
    policy_rejected: Tensor
    chosen_tokens: Tensor
    """[B] number of tokens that `policy_chosen` sums, at least 1."""
    rejected_tokens: Tensor
    reference_chosen: Tensor | None = None
    """[B] log ref(y_w); both references are None where no loss in use reads them (NEEDS_REFERENCE)."""
    reference_rejected: Tensor | None = None
    smoothing: Tensor | float = 0.0
    """Chance that the label is wrong: one number, or [B]. A tensor is checked by value, which waits for the device once a loss."""
    chosen_tokens_per_pair: float | None = None
    """Chosen tokens of the *whole step* / pairs of the whole step; only `sft` reads it."""

    def __post_init__(self) -> None:
        expect_shape("B", policy_chosen=self.policy_chosen, policy_rejected=self.policy_rejected,
                     chosen_tokens=self.chosen_tokens, rejected_tokens=self.rejected_tokens)
        if self.reference_chosen is not None and self.reference_rejected is not None:
            expect_shape("B", policy_chosen=self.policy_chosen, reference_chosen=self.reference_chosen,
                         reference_rejected=self.reference_rejected)
        elif self.reference_chosen is not None or self.reference_rejected is not None:
            raise ConfigError("reference log-probabilities were given for one response of the pair only; give both or neither")

    def reference(self) -> ByResponse:
        if self.reference_chosen is None or self.reference_rejected is None:
            raise ConfigError("this loss compares the policy with a reference, but the batch has no reference log-probabilities; "
                              f"only {', '.join(sorted(set(LOSSES) - NEEDS_REFERENCE))} do without")
        return ByResponse(self.reference_chosen, self.reference_rejected)

    def logratios(self) -> ByResponse:
        """a and b."""
        reference = self.reference()
        policy_w, policy_l, reference_w, reference_l = _wide(policy_chosen=self.policy_chosen, policy_rejected=self.policy_rejected,
                                                             reference_chosen=reference.chosen, reference_rejected=reference.rejected)
        return ByResponse(policy_w - reference_w, policy_l - reference_l)


def preference_loss(name: str, pairs: PairLogps, *, beta: float, simpo_gamma: float, discopop_tau: float) -> Tensor:
    """The loss of that name, [B]. `simpo_gamma` and `discopop_tau` are read by the loss they are called after."""
    if beta <= 0:
        raise ConfigError(f"beta must be > 0, got {beta}")
    if name in NEEDS_REFERENCE:
        return _reference_loss(name, pairs, beta=beta, discopop_tau=discopop_tau)
    lengths = (pairs.chosen_tokens, pairs.rejected_tokens)
    match name:
        case "simpo":
            return simpo_loss(pairs.policy_chosen, pairs.policy_rejected, *lengths, beta=beta, gamma=simpo_gamma)
        case "orpo":
            return orpo_loss(pairs.policy_chosen, pairs.policy_rejected, *lengths)
        case "sft":
            if pairs.chosen_tokens_per_pair is None:
                raise ConfigError("sft is a mean over the tokens of the whole step, not over pairs; give PairLogps.chosen_tokens_per_pair")
            return sft_loss(pairs.policy_chosen, chosen_tokens_per_pair=pairs.chosen_tokens_per_pair)
        case _:
            raise ConfigError(f"loss {name!r} is none of {', '.join(LOSSES)}")


def _reference_loss(name: str, pairs: PairLogps, *, beta: float, discopop_tau: float) -> Tensor:
    a, b = pairs.logratios()
    lengths = (pairs.chosen_tokens, pairs.rejected_tokens)
    match name:
        case "sigmoid":
            return sigmoid_loss(a, b, beta=beta, smoothing=pairs.smoothing)
        case "robust":
            return robust_loss(a, b, beta=beta, smoothing=pairs.smoothing)
        case "hinge":
            return hinge_loss(a, b, beta=beta)
        case "ipo":
            return ipo_loss(a, b, *lengths, beta=beta)
        case "exo_pair":
            return exo_pair_loss(a, b, beta=beta, smoothing=pairs.smoothing)
        case "nca_pair":
            return nca_pair_loss(a, b, beta=beta)
        case "bco_pair":
            return bco_pair_loss(a, b, beta=beta)
        case "sppo_hard":
            return sppo_hard_loss(a, b, beta=beta)
        case "aot":
            return aot_loss(pairs.policy_chosen, pairs.policy_rejected, *pairs.reference(), beta=beta, smoothing=pairs.smoothing)
        case "aot_unpaired":
            return aot_unpaired_loss(a, b, beta=beta, smoothing=pairs.smoothing)
        case "apo_zero":
            return apo_zero_loss(a, b, beta=beta)
        case "apo_down":
            return apo_down_loss(a, b, beta=beta)
        case "discopop":
            return discopop_loss(a, b, beta=beta, tau=discopop_tau)
        case "sigmoid_norm":
            return sigmoid_norm_loss(a, b, *lengths, beta=beta)
        case _:
            raise AssertionError(f"{name} is listed in NEEDS_REFERENCE but has no function")


def combined(weights: Mapping[str, float], pairs: PairLogps, *, beta: float, simpo_gamma: float, discopop_tau: float) -> Tensor:
    """Sum of the named losses times their weights, [B]. Its mean over a step is the weighted sum of the losses' means."""
    if not weights:
        raise ConfigError("no loss is named; give at least one, for example {'sigmoid': 1.0}")
    terms = [weight * preference_loss(name, pairs, beta=beta, simpo_gamma=simpo_gamma, discopop_tau=discopop_tau)
             for name, weight in weights.items()]
    return torch.stack(terms).sum(0)


def implicit_rewards(pairs: PairLogps, *, beta: float) -> ByResponse:
    """Rewards for the metrics, detached: beta a and beta b (Rafailov et al. 2023, arXiv:2305.18290, Eq. 5 up to log Z).

    Without a reference the length-normalised ones, beta / |y| log pi(y) (Meng et al. 2024, arXiv:2405.14734, Eq. 4).
    """
    if pairs.reference_chosen is None:
        a, b = _per_token(pairs.policy_chosen, pairs.policy_rejected, pairs.chosen_tokens, pairs.rejected_tokens)
    else:
        a, b = pairs.logratios()
    return ByResponse(beta * a.detach(), beta * b.detach())


def wins(margins: Tensor) -> Tensor:
    """1 for a positive margin, 1/2 for a tie, 0 otherwise: [B] float64. Their mean is the accuracy."""
    return (margins > 0).double() + 0.5 * (margins == 0)


def sigmoid_loss(chosen_logratios: Tensor, rejected_logratios: Tensor, *, beta: float, smoothing: float | Tensor = 0.0) -> Tensor:
    """DPO. Rafailov et al. 2023, arXiv:2305.18290, Eq. 7; with smoothing e > 0 cDPO, Mitchell 2023, ericmitchell.ai/cdpo.pdf, Eq. 3.

    loss = -(1 - e) log s(beta h) - e log s(-beta h)

    The smoothing is the chance, in [0, 1/2], that the label of a pair is wrong: one number, or one a pair, [B].
    """
    a, b = _wide(chosen_logratios=chosen_logratios, rejected_logratios=rejected_logratios)
    return _smoothed_logistic(beta * (a - b), _checked_smoothing("sigmoid", smoothing, a))


def robust_loss(chosen_logratios: Tensor, rejected_logratios: Tensor, *, beta: float, smoothing: float | Tensor = 0.0) -> Tensor:
    """Robust DPO (rDPO). Chowdhury et al. 2024, arXiv:2403.00409: the unbiased estimate under labels flipped with chance e < 1/2.

    loss = (-(1 - e) log s(beta h) + e log s(-beta h)) / (1 - 2 e)

    It has no lower bound: a well separated pair goes below 0.
    """
    a, b = _wide(chosen_logratios=chosen_logratios, rejected_logratios=rejected_logratios)
    e = _checked_smoothing("robust", smoothing, a, half=False)
    margins = beta * (a - b)
    return (-(1 - e) * F.logsigmoid(margins) + e * F.logsigmoid(-margins)) / (1 - 2 * e)


def hinge_loss(chosen_logratios: Tensor, rejected_logratios: Tensor, *, beta: float) -> Tensor:
    """SLiC's hinge on log-ratios. Zhao et al. 2023, arXiv:2305.10425; in this form Liu et al. 2023 (RSO), arXiv:2309.06657.

    loss = max(0, 1 - beta h); the margin aimed at is 1 / beta.
    """
    a, b = _wide(chosen_logratios=chosen_logratios, rejected_logratios=rejected_logratios)
    return F.relu(1 - beta * (a - b))


def ipo_loss(chosen_logratios: Tensor, rejected_logratios: Tensor, chosen_tokens: Tensor, rejected_tokens: Tensor,
             *, beta: float) -> Tensor:
    """IPO. Azar et al. 2023, arXiv:2310.12036, Eq. 17, with tau = beta.

    loss = (a / |y_w| - b / |y_l| - 1 / (2 beta))^2

    Log-ratios are means over tokens, as in TRL, whose authors had this confirmed by the paper's: sums would make the
    target of 1 / (2 beta) nats depend on the length.
    """
    a, b = _per_token(chosen_logratios, rejected_logratios, chosen_tokens, rejected_tokens)
    return (a - b - 1 / (2 * beta)) ** 2


def exo_pair_loss(chosen_logratios: Tensor, rejected_logratios: Tensor, *, beta: float, smoothing: float | Tensor) -> Tensor:
    """EXO for pairs: the reverse KL to the label distribution (1 - e, e). Ji et al. 2024, arXiv:2402.00856, Eq. 16.

    loss = q (log q - log(1 - e)) + (1 - q) (log(1 - q) - log e),  q = s(beta h)

    e must be > 0; the paper uses 1e-3. It is bounded by -log e, so a hopeless pair has almost no gradient.
    """
    a, b = _wide(chosen_logratios=chosen_logratios, rejected_logratios=rejected_logratios)
    e = _checked_smoothing("exo_pair", smoothing, a, zero=False)
    margins = beta * (a - b)
    return (torch.sigmoid(margins) * (F.logsigmoid(margins) - torch.log1p(-e))
            + torch.sigmoid(-margins) * (F.logsigmoid(-margins) - torch.log(e)))


def nca_pair_loss(chosen_logratios: Tensor, rejected_logratios: Tensor, *, beta: float) -> Tensor:
    """NCA for pairs. Chen et al. 2024, arXiv:2402.05369 (noise contrastive alignment, two responses, hard preference).

    loss = -log s(beta a) - 1/2 log s(-beta a) - 1/2 log s(-beta b)
    """
    a, b = _wide(chosen_logratios=chosen_logratios, rejected_logratios=rejected_logratios)
    return -F.logsigmoid(beta * a) - 0.5 * F.logsigmoid(-beta * a) - 0.5 * F.logsigmoid(-beta * b)


def bco_pair_loss(chosen_logratios: Tensor, rejected_logratios: Tensor, *, beta: float) -> Tensor:
    """BCO for pairs. Jung et al. 2024, arXiv:2404.04656, without the reward shift of the unpaired form, as in TRL 1.16.

    loss = -log s(beta a) - log s(-beta b)
    """
    a, b = _wide(chosen_logratios=chosen_logratios, rejected_logratios=rejected_logratios)
    return -F.logsigmoid(beta * a) - F.logsigmoid(-beta * b)


def sppo_hard_loss(chosen_logratios: Tensor, rejected_logratios: Tensor, *, beta: float) -> Tensor:
    """SPPO with win rates 1 and 0. Wu et al. 2024, arXiv:2405.00675, Eq. 4.7, with eta = 1 / beta.

    loss = (a - 1 / (2 beta))^2 + (b + 1 / (2 beta))^2
    """
    a, b = _wide(chosen_logratios=chosen_logratios, rejected_logratios=rejected_logratios)
    return (a - 0.5 / beta) ** 2 + (b + 0.5 / beta) ** 2


def aot_loss(policy_chosen: Tensor, policy_rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor,
             *, beta: float, smoothing: float | Tensor = 0.0) -> Tensor:
    """AOT for paired data: the policy's margins shall dominate the reference's. Melnyk et al. 2024, arXiv:2406.05882.

    loss_k = -(1 - e) log s(beta d_k) - e log s(-beta d_k),
    d_k = k-th smallest of (log pi(y_w) - log pi(y_l)) - k-th smallest of (log ref(y_w) - log ref(y_l))

    Sorted over the pairs given, so entry k belongs to a quantile and not to a pair, pairs of one call depend on each other, and the
    smoothing must be one number.
    """
    policy_w, policy_l, reference_w, reference_l = _wide(policy_chosen=policy_chosen, policy_rejected=policy_rejected,
                                                         reference_chosen=reference_chosen, reference_rejected=reference_rejected)
    quantile_margins = _sorted(policy_w - policy_l) - _sorted(reference_w - reference_l)
    return _smoothed_logistic(beta * quantile_margins, _one_smoothing("aot", smoothing, policy_w))


def aot_unpaired_loss(chosen_logratios: Tensor, rejected_logratios: Tensor, *, beta: float, smoothing: float | Tensor = 0.0) -> Tensor:
    """AOT for unpaired data: chosen log-ratios shall dominate rejected ones. Melnyk et al. 2024, arXiv:2406.05882.

    As `aot_loss`, with d_k = k-th smallest a - k-th smallest b; what is said there of sorting holds here.
    """
    a, b = _wide(chosen_logratios=chosen_logratios, rejected_logratios=rejected_logratios)
    return _smoothed_logistic(beta * (_sorted(a) - _sorted(b)), _one_smoothing("aot_unpaired", smoothing, a))


def apo_zero_loss(chosen_logratios: Tensor, rejected_logratios: Tensor, *, beta: float) -> Tensor:
    """APO-zero: chosen up, rejected down. D'Oosterlinck et al. 2024, arXiv:2408.06266, Eq. 7.

    loss = 1 - s(beta a) + s(beta b)
    """
    a, b = _wide(chosen_logratios=chosen_logratios, rejected_logratios=rejected_logratios)
    return torch.sigmoid(-beta * a) + torch.sigmoid(beta * b)


def apo_down_loss(chosen_logratios: Tensor, rejected_logratios: Tensor, *, beta: float) -> Tensor:
    """APO-down: both down, rejected further. D'Oosterlinck et al. 2024, arXiv:2408.06266, Eq. 8.

    loss = s(beta a) + 1 - s(beta h)
    """
    a, b = _wide(chosen_logratios=chosen_logratios, rejected_logratios=rejected_logratios)
    return torch.sigmoid(beta * a) + torch.sigmoid(-beta * (a - b))


def discopop_loss(chosen_logratios: Tensor, rejected_logratios: Tensor, *, beta: float, tau: float) -> Tensor:
    """DiscoPOP, the log-ratio modulated loss. Lu et al. 2024, arXiv:2406.08414, Eq. 5; tau in (0, 1], 0.05 in the paper.

    loss = (1 - m) * -log s(x) + m * exp(-x),  x = beta h,  m = s(x / tau)

    m exp(-x) is computed as exp(log m - x): where exp(-x) overflows, m has long underflowed, and 0 * inf is NaN. Above
    tau = 1 the product itself grows without bound.
    """
    a, b = _wide(chosen_logratios=chosen_logratios, rejected_logratios=rejected_logratios)
    if not 0 < tau <= 1:
        raise ConfigError(f"discopop_tau must be in (0, 1], got {tau}; above 1 the loss of a wrongly ordered pair grows exponentially")
    margins = beta * (a - b)
    return torch.sigmoid(-margins / tau) * -F.logsigmoid(margins) + torch.exp(F.logsigmoid(margins / tau) - margins)


def sigmoid_norm_loss(chosen_logratios: Tensor, rejected_logratios: Tensor, chosen_tokens: Tensor, rejected_tokens: Tensor,
                      *, beta: float) -> Tensor:
    """Length-normalised DPO. Lambert et al. 2024 (Tulu 3), arXiv:2411.15124.

    loss = -log s(beta (a / |y_w| - b / |y_l|)); beta is 5 or more here, because the log-ratios are means.
    """
    a, b = _per_token(chosen_logratios, rejected_logratios, chosen_tokens, rejected_tokens)
    return -F.logsigmoid(beta * (a - b))


def simpo_loss(policy_chosen: Tensor, policy_rejected: Tensor, chosen_tokens: Tensor, rejected_tokens: Tensor,
               *, beta: float, gamma: float) -> Tensor:
    """SimPO, without a reference. Meng et al. 2024, arXiv:2405.14734, Eq. 6.

    loss = -log s(beta log pi(y_w) / |y_w| - beta log pi(y_l) / |y_l| - gamma)
    """
    chosen, rejected = _per_token(policy_chosen, policy_rejected, chosen_tokens, rejected_tokens)
    return -F.logsigmoid(beta * (chosen - rejected) - gamma)


def orpo_loss(policy_chosen: Tensor, policy_rejected: Tensor, chosen_tokens: Tensor, rejected_tokens: Tensor) -> Tensor:
    """The odds-ratio term of ORPO, without a reference. Hong et al. 2024, arXiv:2403.07691, Eqs. 3, 4 and 7.

    loss = -log s(log odds(y_w) - log odds(y_l)),  odds(y) = p / (1 - p),  log p = log pi(y) / |y|

    ORPO itself (Eq. 6) is sft + lambda * orpo, so lambda is the weight: {sft: 1.0, orpo: 0.1}. beta is not read. log p is held
    at -1e-6 or below: at p = 1 the odds are infinite.
    """
    chosen, rejected = _per_token(policy_chosen, policy_rejected, chosen_tokens, rejected_tokens)
    return -F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def sft_loss(policy_chosen: Tensor, *, chosen_tokens_per_pair: float) -> Tensor:
    """Negative log-likelihood of the chosen responses, scaled so that its mean over the *pairs* of a step is the mean over their *tokens*.

    loss = -log pi(y_w) / (chosen tokens of the step / pairs of the step)

    So sum over rows / pairs = sum of log-likelihoods / tokens, for every split of the step into microbatches. This is TRL's `sft` for a
    step of one microbatch; with several, TRL averages the microbatches' means, which weighs tokens of short ones more.
    """
    if chosen_tokens_per_pair <= 0:
        raise ConfigError(f"chosen_tokens_per_pair must be > 0, got {chosen_tokens_per_pair}")
    (chosen,) = _wide(policy_chosen=policy_chosen)
    return -chosen / chosen_tokens_per_pair


def _smoothed_logistic(margins: Tensor, e: Tensor) -> Tensor:
    return -(1 - e) * F.logsigmoid(margins) - e * F.logsigmoid(-margins)


def _checked_smoothing(loss: str, smoothing: float | Tensor, like: Tensor, *, zero: bool = True, half: bool = True) -> Tensor:
    """The smoothing as a tensor, a scalar or [B], in [0, 1/2]; `zero` and `half` say whether the loss can take that end."""
    if isinstance(smoothing, Tensor):
        expect_shape("B", logps=like, smoothing=smoothing)
        lowest, highest = smoothing.min().item(), smoothing.max().item()
    else:
        lowest = highest = smoothing
    if not (lowest > 0 or (zero and lowest == 0)) or not (highest < 0.5 or (half and highest == 0.5)):
        ends = f"{'[' if zero else '('}0, 0.5{']' if half else ')'}"
        raise ConfigError(f"{loss}: label smoothing must be in {ends}, got {lowest:g}" + (f" to {highest:g}" if highest != lowest else ""))
    return torch.as_tensor(smoothing, dtype=like.dtype, device=like.device)


def _one_smoothing(loss: str, smoothing: float | Tensor, like: Tensor) -> Tensor:
    """After sorting a row is a quantile, and no pair's own smoothing belongs to it."""
    e = _checked_smoothing(loss, smoothing, like)
    if e.ndim and not bool((e == e[0]).all()):
        raise ConfigError(f"{loss} sorts the pairs, so it cannot take a smoothing per pair; give one for all, or use sigmoid or robust")
    return e


def _log_odds(mean_logps: Tensor) -> Tensor:
    held = mean_logps.clamp_max(-1e-6)
    return held - torch.log(-torch.expm1(held))


def _per_token(chosen: Tensor, rejected: Tensor, chosen_tokens: Tensor, rejected_tokens: Tensor) -> ByResponse:
    chosen, rejected, chosen_tokens, rejected_tokens = _wide(chosen=chosen, rejected=rejected, chosen_tokens=chosen_tokens,
                                                             rejected_tokens=rejected_tokens)
    return ByResponse(chosen / chosen_tokens, rejected / rejected_tokens)


def _sorted(values: Tensor) -> Tensor:
    return values.sort().values


def _wide(**tensors: Tensor) -> tuple[Tensor, ...]:
    """All [B], and at least float32."""
    expect_shape("B", **tensors)
    return tuple(tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors.values())
