"""The reference of DPO: what the policy was before its first step, in the cheapest form that is exactly that.

    full fine-tuning                     FrozenCopy      a copy of the loaded model, not of the folder it came from
    a new adapter on a base              AdapterOff      the same model with its adapter switched off; no memory
    an adapter continued (SFT -> DPO)    FrozenAdapter   a frozen copy of that adapter on the same base; switching it off would give the
                                                         base, which is not what the policy starts from

A reference is an object of its own, never the policy: its module is only had inside `scoring()`, which switches the policy's own function
away and restores it, whatever happens inside.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel

from rlhf.models.adapters import copy_adapter
from rlhf.models.inspection import model_fingerprint
from rlhf.models.loading import Policy

REFERENCE = "reference"
"""Name of the frozen copy of a continued adapter."""


class Reference(Protocol):
    def scoring(self) -> AbstractContextManager[nn.Module]:
        """The module to forward, in evaluation mode and without gradients; valid inside the block only."""

    def fingerprint(self) -> str:
        """SHA-256 of everything the reference's function depends on. Equal at the start and the end of a run, or the run is void."""


@dataclass(frozen=True)
class FrozenCopy:
    model: PreTrainedModel
    policy: PreTrainedModel
    """Whose device and attention implementation the copy takes on: the loop chooses both after the reference is made."""

    @contextmanager
    def scoring(self) -> Iterator[nn.Module]:
        if self.model.device != self.policy.device:
            self.model.to(self.policy.device)
        if self.model.config._attn_implementation != self.policy.config._attn_implementation:
            self.model.set_attn_implementation(self.policy.config._attn_implementation)
        with torch.no_grad():
            yield self.model

    def fingerprint(self) -> str:
        return model_fingerprint(self.model)


class Switches(NamedTuple):
    """What scoring switches in a policy with adapters, listed once: walking a large model takes longer than switching it."""

    modules: tuple[nn.Module, ...]
    layers: tuple[BaseTunerLayer | AuxiliaryTrainingWrapper, ...]
    """Layers with an adapter, heads trained beside it included."""
    weights: tuple[nn.Parameter, ...]

    @classmethod
    def of(cls, model: PeftModel) -> Switches:
        modules = tuple(model.modules())
        return cls(modules, tuple(module for module in modules if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)),
                   tuple(model.parameters()))


@dataclass(frozen=True)
class AdapterOff:
    policy: PeftModel
    switches: Switches

    @contextmanager
    def scoring(self) -> Iterator[nn.Module]:
        with _kept_as_it_is(self.switches):
            on = [layer for layer in self.switches.layers if not layer.disable_adapters]
            try:
                for layer in on:
                    layer.enable_adapters(False)
                yield self.policy
            finally:
                for layer in on:
                    layer.enable_adapters(True)

    def fingerprint(self) -> str:
        return model_fingerprint(self.policy)


@dataclass(frozen=True)
class FrozenAdapter:
    policy: PeftModel
    switches: Switches

    @contextmanager
    def scoring(self) -> Iterator[nn.Module]:
        with _kept_as_it_is(self.switches):
            active = [list(layer.active_adapters) for layer in self.switches.layers]
            try:
                for layer in self.switches.layers:
                    layer.set_adapter([REFERENCE], inference_mode=True)
                yield self.policy
            finally:
                for layer, names in zip(self.switches.layers, active, strict=True):
                    layer.set_adapter(names)

    def fingerprint(self) -> str:
        return model_fingerprint(self.policy, adapter=REFERENCE)


def reference_for(policy: Policy) -> Reference:
    """The policy as it is now, frozen. Call it after loading and before anything is trained or resumed."""
    if policy.method == "full":
        return FrozenCopy(copy.deepcopy(policy.model).requires_grad_(False).eval(), policy.model)
    if policy.continues_adapter:
        copy_adapter(policy.model, REFERENCE)
        return FrozenAdapter(policy.model, Switches.of(policy.model))
    return AdapterOff(policy.model, Switches.of(policy.model))


@contextmanager
def _kept_as_it_is(switches: Switches) -> Iterator[None]:
    """Evaluation mode without gradients; on the way out every module's mode and every parameter's trainability are what they were.

    PEFT's switches make the adapters that they switch on trainable, so they must be used inside.
    """
    training = [module for module in switches.modules if module.training]
    flags = [weight.requires_grad for weight in switches.weights]
    try:
        _set_mode(training, training=False)
        with torch.no_grad():
            yield
    finally:
        _set_mode(training, training=True)
        for weight, flag in zip(switches.weights, flags, strict=True):
            weight.requires_grad_(flag)


def _set_mode(modules: list[nn.Module], *, training: bool) -> None:
    """What train() and eval() do, without the look-up of parameters and buffers that setting an attribute of a module starts."""
    for module in modules:
        vars(module)["training"] = training
