"""Direct preference optimisation: raise the margin of chosen over rejected responses against a frozen reference.

Rafailov et al. 2023, arXiv:2305.18290, and the losses of docs/losses.md. Supports full, LoRA, QLoRA and DoRA; the prefix-shared, unpadded
layout and a padded one; live or precomputed reference scores. The reference is what the policy starts from: the loaded model, or the SFT
adapter it continues. Raises DataError, ModelError and ConfigError before the first step, GuardError when a running job is going wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlhf.config import DpoConfig, Dtype
from rlhf.data.formats import load_preferences
from rlhf.data.prepared import prepare
from rlhf.fitting import FitResult, Site, fit, with_template
from rlhf.guards import ZERO_IS_LEGAL_LOSSES, expect_step_0
from rlhf.maths.losses import NEEDS_REFERENCE, PairLogps, combined, implicit_rewards, wins
from rlhf.models.attention import choose_layout, evaluating
from rlhf.models.loading import load_policy
from rlhf.models.packing import PackedBatch, response_logps
from rlhf.models.precision import computing_in
from rlhf.models.roles import Reference, reference_for
from rlhf.reference_scores import precomputed_scores
from rlhf.step_plan import StepTotals
from rlhf.training import Mean, ObjectiveTerms


@dataclass(frozen=True)
class DpoObjective:
    config: DpoConfig
    reference: Reference | None
    """None when no loss of the recipe needs one."""
    scores: Mapping[str, tuple[float, ...]] | None = None
    """Reference log-probs of (chosen, rejected) by record id, computed before; None: the reference is forwarded with each microbatch."""

    def loss(self, model: nn.Module, batch: PackedBatch, totals: StepTotals) -> ObjectiveTerms:
        pairs = self.pairs(model, batch, chosen_tokens_per_pair=totals.first_response_tokens / totals.rows)
        losses = combined(self.config.losses(), pairs, beta=self.config.beta, simpo_gamma=self.config.simpo_gamma,
                          discopop_tau=self.config.discopop_tau)
        return ObjectiveTerms(losses.sum() / totals.rows, pair_metrics(pairs, beta=self.config.beta))

    def pairs(self, model: nn.Module, batch: PackedBatch, *, chosen_tokens_per_pair: float) -> PairLogps:
        policy = response_logps(model, batch).logps.view(-1, 2)                 # [pairs, (chosen, rejected)]
        reference = self.reference_logps(batch)
        lengths = batch.lengths.view(-1, 2)
        return PairLogps(
            policy_chosen=policy[:, 0], policy_rejected=policy[:, 1], chosen_tokens=lengths[:, 0], rejected_tokens=lengths[:, 1],
            reference_chosen=None if reference is None else reference[:, 0],
            reference_rejected=None if reference is None else reference[:, 1],
            smoothing=self.smoothing(batch), chosen_tokens_per_pair=chosen_tokens_per_pair)

    def smoothing(self, batch: PackedBatch) -> Tensor | float:
        """The recipe's label smoothing; or one a pair, [pairs]: the annotators' disagreement where that is larger."""
        if not self.config.smoothing_from_votes:
            return self.config.label_smoothing
        return batch.smoothing.clamp_min(self.config.label_smoothing)

    def reference_logps(self, batch: PackedBatch) -> Tensor | None:
        """[pairs, (chosen, rejected)]"""
        if self.reference is None:
            return None
        if self.scores is not None:
            return torch.tensor([self.scores[id] for id in batch.ids], dtype=torch.float32, device=batch.lengths.device)
        with self.reference.scoring() as module:
            return response_logps(module, batch).logps.view(-1, 2)

    @torch.no_grad()
    def check_start(self, model: nn.Module, batch: PackedBatch, *, dtype: Dtype) -> None:
        """Before the first step the policy must be the reference. Raises GuardError."""
        if self.reference is None:
            return
        device = next(model.parameters()).device
        with evaluating(model), computing_in(dtype, device):
            pairs = self.pairs(model, batch.to(device), chosen_tokens_per_pair=1.0)
        compared = {name: weight for name, weight in self.config.losses().items() if name in NEEDS_REFERENCE}
        loss = combined(compared, pairs, beta=self.config.beta, simpo_gamma=self.config.simpo_gamma, discopop_tau=self.config.discopop_tau)
        chosen, rejected = implicit_rewards(pairs, beta=self.config.beta)
        expect_step_0(loss=float(loss.mean()), largest_margin=float((chosen - rejected).abs().max()), losses=compared, dtype=dtype)


def pair_metrics(pairs: PairLogps, *, beta: float) -> dict[str, Mean]:
    """TRL's names. rewards = beta * (log pi - log ref); a pair with equal rewards counts half in the accuracy."""
    chosen, rejected = implicit_rewards(pairs, beta=beta)
    margins = chosen - rejected
    columns = {"rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/margins": margins, "rewards/accuracies": wins(margins),
               "logps/chosen": pairs.policy_chosen.detach(), "logps/rejected": pairs.policy_rejected.detach()}
    return {name: Mean(values.sum(), len(values)) for name, values in columns.items()}


def train(config: DpoConfig, site: Site) -> FitResult:
    """Run the stage in its folder: policy, data, reference, loop, guards, saved model."""
    policy = load_policy(site.model, method=config.method or site.model.method, start=site.start, seed=site.seed)
    policy, template = with_template(policy, config.data.template, site.console)
    data = prepare(load_preferences(config.data), config.data, template, site.folder)
    layout = choose_layout(policy.model, config.layout)
    reference = reference_for(policy) if set(config.losses()) & NEEDS_REFERENCE else None
    fingerprint = "" if reference is None else reference.fingerprint()
    scores = None
    if reference is not None and config.precompute_reference:
        scores = precomputed_scores(reference, [*data.train, *data.holdout], fingerprint=fingerprint, batch=config.batch, layout=layout[0],
                                    site=site)
    if config.smoothing_from_votes and not any(run.smoothing for run in data.train):
        site.console.print("[yellow]smoothing_from_votes: no pair of the data has votes that disagree, so none is smoothed by them")
    objective = DpoObjective(config, reference, scores)
    return fit(policy, objective, data, optim=config.optim, batch=config.batch, loop=config.loop, site=site, layout=layout,
               reference=reference, reference_fingerprint=fingerprint, zero_loss_is_legal=bool(set(config.losses()) & ZERO_IS_LEGAL_LOSSES),
               check_start=lambda model, batch: objective.check_start(model, batch, dtype=site.model.dtype))
