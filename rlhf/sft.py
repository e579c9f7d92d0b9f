"""Supervised fine-tuning: raise the likelihood of demonstrated responses.

Supports full, LoRA, QLoRA and DoRA; packed (unpadded) and padded layouts; demonstrations, or the best responses of preferences and
rankings. The loss is the mean over all response tokens of a step; prompts carry none. Raises DataError when too many rows are rejected,
ModelError when the model cannot be trained that way, GuardError when a running job is going wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from rlhf.config import SftConfig
from rlhf.data.formats import load_demonstrations
from rlhf.data.prepared import prepare
from rlhf.fitting import FitResult, Site, fit, with_template
from rlhf.models.attention import choose_layout
from rlhf.models.loading import load_policy
from rlhf.models.packing import PackedBatch, response_logps
from rlhf.step_plan import StepTotals
from rlhf.training import Mean, ObjectiveTerms


@dataclass(frozen=True)
class SftObjective:
    """loss = - sum over response tokens of log p(token | before) / response tokens of the step."""

    def loss(self, model: nn.Module, batch: PackedBatch, totals: StepTotals) -> ObjectiveTerms:
        scored = response_logps(model, batch)
        loss = -scored.token_logps.sum() / totals.response_tokens
        return ObjectiveTerms(loss, {"logps/response": Mean(scored.logps.detach().sum(), len(batch.lengths))})


def train(config: SftConfig, site: Site) -> FitResult:
    """Run the stage in its folder: data, model, loop, guards, saved model."""
    policy = load_policy(site.model, method=config.method or site.model.method, start=site.start, seed=site.seed)
    policy, template = with_template(policy, config.data.template, site.console)
    data = prepare(load_demonstrations(config.data), config.data, template, site.folder)
    return fit(policy, SftObjective(), data, optim=config.optim, batch=config.batch, loop=config.loop, site=site,
               layout=choose_layout(policy.model, config.layout))
