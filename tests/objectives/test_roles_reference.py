"""The reference is what the policy was at the start, whatever the policy does, and asking for it leaves no trace on the policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from tiny_policies import TOKENS, logits_of, saved, step, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf.config import LoraConfig, Method, ModelConfig
from rlhf.models.adapters import load_adapter
from rlhf.models.inspection import missing_from_save, model_fingerprint, untrained_adapters
from rlhf.models.loading import Policy, find_source, load_base, load_policy, save_policy
from rlhf.models.roles import AdapterOff, FrozenAdapter, FrozenCopy, Reference, reference_for

ADAPTERS: tuple[Method, ...] = ("lora", "qlora", "dora")


def fresh(folder: Path, method: Method, **settings: object) -> Policy:
    return load_policy(ModelConfig(name=saved(folder / "base"), **settings), method=method, start=None, seed=0)  # type: ignore[arg-type]


def after_sft(folder: Path, method: Method, **settings: object) -> Policy:
    """A policy that continues an adapter trained before."""
    sft = fresh(folder, method)
    step(sft.model, steps=3)
    save_policy(sft, folder / "sft")
    return load_policy(ModelConfig(name="unused", **settings), method=method, start=str(folder / "sft"), seed=1)  # type: ignore[arg-type]


Start = Callable[..., Policy]
CASES: list[tuple[Method, Start]] = [("full", fresh), *[(method, start) for method in ADAPTERS for start in (fresh, after_sft)]]
every_case = pytest.mark.parametrize(("method", "start"), CASES, ids=[f"{method}-{start.__name__}" for method, start in CASES])


def scored(reference: Reference) -> Tensor:
    with reference.scoring() as module:
        return module(input_ids=TOKENS, use_cache=False).logits


@every_case
def test_both_start_bit_equal_and_only_the_policy_moves(tmp_path: Path, method: Method, start: Start) -> None:
    policy = start(tmp_path, method)
    before = logits_of(policy.model)
    reference = reference_for(policy)
    fingerprint = reference.fingerprint()
    assert torch.equal(scored(reference), before)
    step(policy.model, steps=2)
    assert torch.equal(scored(reference), before)
    assert (logits_of(policy.model) - before).abs().max() > 1e-3
    assert reference.fingerprint() == fingerprint
    assert untrained_adapters(policy.model) == []


@pytest.mark.parametrize("method", ADAPTERS)
def test_after_sft_the_reference_is_the_sft_model_and_not_the_base(tmp_path: Path, method: Method) -> None:
    reference = reference_for(after_sft(tmp_path, method))
    assert (scored(reference) - logits_of(tiny_model("llama"))).abs().max() > 0.1
    assert isinstance(reference, FrozenAdapter)


def test_a_full_reference_is_the_loaded_model_and_not_the_folder_it_came_from(tmp_path: Path) -> None:
    after_sft(tmp_path, "lora")
    policy = load_policy(ModelConfig(name="unused"), method="full", start=str(tmp_path / "sft"), seed=0)
    reference = reference_for(policy)
    assert isinstance(reference, FrozenCopy)
    assert torch.equal(scored(reference), logits_of(policy.model))
    assert (scored(reference) - logits_of(tiny_model("llama"))).abs().max() > 0.1
    assert not {id(parameter) for parameter in reference.model.parameters()} & {id(parameter) for parameter in policy.model.parameters()}


def snapshot(policy: Policy) -> tuple[object, ...]:
    return ({name: module.training for name, module in policy.model.named_modules()},
            {name: parameter.requires_grad for name, parameter in policy.model.named_parameters()},
            policy.method != "full" and list(policy.model.active_adapters), torch.get_rng_state().tolist(), torch.is_grad_enabled())


@every_case
@pytest.mark.parametrize("fails", [False, True])
def test_scoring_leaves_no_trace(tmp_path: Path, method: Method, start: Start, fails: bool) -> None:
    policy = start(tmp_path, method, **({} if method == "full" else {"lora": LoraConfig(dropout=0.5)}))
    reference = reference_for(policy)
    policy.model.train()
    first = next(parameter for parameter in policy.model.parameters() if parameter.requires_grad)
    first.requires_grad_(False)                                           # flags somebody else chose
    next(policy.model.children()).train(False)
    before = snapshot(policy)
    with_dropout_off = scored(reference)
    assert torch.equal(scored(reference), with_dropout_off) and not with_dropout_off.requires_grad
    if fails:
        with pytest.raises(RuntimeError, match="out of memory"), reference.scoring():
            raise RuntimeError("out of memory")
    assert snapshot(policy) == before


@every_case
def test_scoring_between_forward_and_backward_does_not_reach_the_gradient(tmp_path: Path, method: Method, start: Start) -> None:
    policy = start(tmp_path, method, activation_checkpointing=True)       # the backward pass runs the layers again
    reference = reference_for(policy)
    gradients = []
    for scores in (False, True):
        policy.model.train()
        loss = policy.model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
        if scores:
            scored(reference)
        loss.backward()
        gradients.append({name: weight.grad.clone() for name, weight in policy.model.named_parameters() if weight.grad is not None})
        policy.model.zero_grad()
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 20
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


def test_the_frozen_copy_takes_on_the_attention_that_the_loop_chooses_later(tmp_path: Path) -> None:
    policy = fresh(tmp_path, "full")
    reference = reference_for(policy)
    policy.model.set_attn_implementation("eager")
    with reference.scoring() as module:
        assert module.config._attn_implementation == "eager"


def test_the_frozen_adapter_is_neither_trained_nor_saved(tmp_path: Path) -> None:
    policy = after_sft(tmp_path, "lora")
    trainable = {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    reference_for(policy)
    assert {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad} == trainable
    save_policy(policy, tmp_path / "dpo")
    assert (tmp_path / "dpo" / "adapter_model.safetensors").read_bytes() == (tmp_path / "sft" / "adapter_model.safetensors").read_bytes()
    assert not (tmp_path / "dpo" / "reference").exists()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_head_trained_whole_with_the_adapter_belongs_to_the_reference(tmp_path: Path) -> None:
    """modules_to_save: PEFT trains a full copy of the head beside the adapter."""
    base = AutoModelForCausalLM.from_pretrained(saved(tmp_path / "base"))
    settings = PeftLoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj"], modules_to_save=["lm_head"])
    sft = get_peft_model(base, settings)
    step(sft, steps=2)
    sft.save_pretrained(tmp_path / "sft")
    recipe = ModelConfig(name="unused", lora=LoraConfig(r=4, alpha=8, targets="q_proj"))
    policy = load_policy(recipe, method="lora", start=str(tmp_path / "sft"), seed=0)
    reference = reference_for(policy)
    assert torch.equal(logits_of(policy.model), logits_of(sft)) and torch.equal(scored(reference), logits_of(sft))
    step(policy.model)
    assert torch.equal(scored(reference), logits_of(sft))
    save_policy(policy, tmp_path / "dpo")
    again = load_policy(recipe, method="lora", start=str(tmp_path / "dpo"), seed=0)
    assert torch.equal(logits_of(again.model), logits_of(policy.model))


# --- fingerprints ------------------------------------------------------------------------------------------------------------------


def test_the_same_function_has_the_same_fingerprint_in_every_form(tmp_path: Path) -> None:
    full, lora = fresh(tmp_path, "full"), fresh(tmp_path, "lora")
    assert isinstance(reference_for(lora), AdapterOff)
    assert reference_for(full).fingerprint() == reference_for(lora).fingerprint()
    continued = after_sft(tmp_path, "dora")
    on_disk = load_adapter(load_base(find_source(str(tmp_path / "sft")), dtype=torch.float32), tmp_path / "sft")
    assert reference_for(continued).fingerprint() == model_fingerprint(on_disk, adapter="default")


def test_any_changed_weight_or_setting_changes_the_fingerprint(tmp_path: Path) -> None:
    model = tiny_model("llama")
    seen = {model_fingerprint(model)}
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.view(-1)[-1] += 1e-3
        seen.add(model_fingerprint(model))
    model.config.rms_norm_eps *= 2
    seen.add(model_fingerprint(model))
    seen.add(model_fingerprint(model.to(torch.bfloat16)))
    assert len(seen) == len(list(model.parameters())) + 3


def test_quantisation_constants_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    policy = fresh(tmp_path, "qlora")
    before = reference_for(policy).fingerprint()
    assert before != reference_for(fresh(tmp_path, "lora")).fingerprint()
    state = policy.model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.quant_state
    state.absmax[0] += 1
    assert reference_for(policy).fingerprint() != before


def test_the_scaling_of_an_adapter_is_part_of_its_fingerprint(tmp_path: Path) -> None:
    policy = after_sft(tmp_path, "lora")
    reference = reference_for(policy)
    before = reference.fingerprint()
    policy.model.peft_config["reference"] = replace(policy.model.peft_config["reference"], lora_alpha=64)
    assert reference.fingerprint() != before


def test_an_adapter_that_never_moved_is_named(tmp_path: Path) -> None:
    policy = fresh(tmp_path, "lora")
    assert len(untrained_adapters(policy.model)) == 14
    policy.model.get_base_model().model.layers[0].mlp.up_proj.requires_grad_(False)
    step(policy.model)
    assert untrained_adapters(policy.model) == ["base_model.model.model.layers.0.mlp.up_proj"]


@pytest.mark.parametrize("method", ["full", *ADAPTERS])
def test_a_trained_tensor_that_the_files_lack_is_named(tmp_path: Path, method: Method) -> None:
    policy = fresh(tmp_path, method)
    save_policy(policy, tmp_path / "saved")
    assert missing_from_save(policy.model, tmp_path / "saved") == []
    (file,) = (tmp_path / "saved").glob("*.safetensors")
    tensors = load_file(file)
    lost = sorted(tensors)[-1]
    del tensors[lost]
    save_file(tensors, file)
    (named,) = missing_from_save(policy.model, tmp_path / "saved")
    assert named.replace(".default", "").removesuffix(".weight") == lost.removesuffix(".weight")


def test_a_tied_head_is_saved_under_the_name_of_the_embedding(tmp_path: Path) -> None:
    policy = load_policy(ModelConfig(name=saved(tmp_path / "tied", "qwen2")), method="full", start=None, seed=0)
    save_policy(policy, tmp_path / "saved")
    assert missing_from_save(policy.model, tmp_path / "saved") == []
