"""LoRA and DoRA adapters: made, continued, copied, and never loaded by half.

The weights of adapters are float32 whatever the base is: at learning rates of 1e-5 an update of a bfloat16 weight rounds to nothing.
"""

from __future__ import annotations

import copy
import hashlib
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from pickle import UnpicklingError

import torch
from peft import (
    LoraConfig as PeftLoraConfig,
)
from peft import (
    PeftConfig,
    PeftModel,
    TaskType,
    get_peft_model,
    get_peft_model_state_dict,
    load_peft_weights,
    set_peft_model_state_dict,
)
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf.config import LoraConfig
from rlhf.errors import ModelError

TRAINED = "default"
"""Name of the adapter that is trained and saved."""
ALL_LINEAR = "all-linear"
CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")


@contextmanager
def undisturbed_rng() -> Iterator[None]:
    """Random draws inside leave the global generators (CPU, current GPU) as they were."""
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
        yield


def target_modules(model: PreTrainedModel, targets: str | tuple[str, ...]) -> list[str]:
    """Full names of the modules that `targets` of a recipe means.

    "all-linear" is every linear layer except the output head; a name means each module of that name, or the one of that full name.
    """
    head = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding | Conv1D)}
    if targets == ALL_LINEAR:
        return [name for name, module in linear.items() if module is not head and not isinstance(module, nn.Embedding)]
    chosen: list[str] = []
    for target in (targets,) if isinstance(targets, str) else targets:
        found = [name for name in linear if name == target or name.endswith(f".{target}")]
        if not found:
            known = sorted({name.rsplit(".", 1)[-1] for name in linear})
            close = get_close_matches(target, known, n=3) or known
            raise ModelError(f"lora.targets: {type(model).__name__} has no linear layer named {target!r}; did you mean {', '.join(close)}?")
        chosen.extend(found)
    if head is not None and model.get_input_embeddings().weight is head.weight and any(linear[name] is head for name in chosen):
        raise ModelError("lora.targets: the output head shares its weights with the input embedding, so an adapter on the head could not "
                         "be merged without changing the embedding. Leave the head out of lora.targets.")
    return chosen


def new_adapter(model: PreTrainedModel, config: LoraConfig, *, dora: bool, seed: int) -> PeftModel:
    """Wrap the model with a fresh adapter that changes nothing yet. Its weights depend on the seed and the modules' names only."""
    chosen = target_modules(model, config.targets)
    targets = [config.targets] if isinstance(config.targets, str) and config.targets != ALL_LINEAR else config.targets
    settings = PeftLoraConfig(
        task_type=TaskType.CAUSAL_LM, r=config.r, lora_alpha=config.alpha, lora_dropout=config.dropout, use_dora=dora,
        target_modules=targets if isinstance(targets, str) else list(targets),
        fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in chosen),
    )
    try:
        adapted = _wrap(model, settings)
    except (ValueError, TypeError) as error:
        raise ModelError(f"lora.targets {config.targets!r} of {type(model).__name__}: {error}") from error
    _draw_weights(adapted, seed)
    return adapted


def _wrap(model: PreTrainedModel, settings: PeftLoraConfig) -> PeftModel:
    with undisturbed_rng(), warnings.catch_warnings():
        # PEFT 0.21 asks for a property under the name that transformers 5 renamed; nothing a user could do about it.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        return get_peft_model(model, settings)


def _draw_weights(model: PeftModel, seed: int) -> None:
    """The factor that PEFT draws at random, drawn again from a generator of the module's own; the other factor stays zero."""
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1)
        with torch.no_grad():
            if TRAINED in module.lora_A:
                weight = module.lora_A[TRAINED].weight
                weight.copy_(nn.init.kaiming_uniform_(torch.empty(weight.shape), a=math.sqrt(5), generator=generator))
            else:
                weight = module.lora_embedding_B[TRAINED]
                weight.copy_(torch.randn(weight.shape, generator=generator))


def read_adapter_config(folder: Path) -> PeftLoraConfig:
    """The adapter's own settings; a ModelError where this is not a LoRA or DoRA adapter of a language model with a named base."""
    try:
        settings = PeftConfig.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder / CONFIG_FILE} cannot be read: {error}") from error
    if not isinstance(settings, PeftLoraConfig):
        raise ModelError(f"{folder} holds a {settings.peft_type} adapter; only LoRA and DoRA adapters can be continued or merged")
    if settings.task_type not in (None, TaskType.CAUSAL_LM):
        raise ModelError(f"{folder} holds an adapter for {settings.task_type}, not for a causal language model")
    if not settings.base_model_name_or_path:
        raise ModelError(f"{folder / CONFIG_FILE} does not say which base the adapter belongs to; set base_model_name_or_path in it")
    return settings


def load_adapter(model: PreTrainedModel, folder: Path, *, recipe: LoraConfig | None = None, dora: bool = False) -> PeftModel:
    """Wrap the base with the adapter of a folder: trainable where `recipe` is given, else frozen.

    The recipe must agree with the adapter's rank, alpha, kind and targets; its dropout replaces the adapter's, which is no weight.
    """
    settings = read_adapter_config(folder)
    settings.base_model_name_or_path = model.name_or_path
    settings.inference_mode = recipe is None
    settings.fan_in_fan_out = any(isinstance(module, Conv1D) for module in model.modules())     # of this base; 4-bit ones have none
    settings.lora_dropout = recipe.dropout if recipe is not None else 0.0
    wanted = None if recipe is None else set(target_modules(model, recipe.targets))
    try:
        adapted = _wrap(model, settings)
    except (ValueError, TypeError) as error:
        raise ModelError(f"the adapter in {folder} does not fit its base {model.name_or_path}: {error}") from error
    if recipe is not None and wanted is not None:
        differences = [*_differences(settings, recipe, dora=dora), *_other_targets(adapted, recipe, wanted)]
        if differences:
            raise ModelError(f"the adapter in {folder} cannot be continued with this recipe: {'; '.join(differences)}. Make the recipe "
                             "agree with the adapter, or merge the adapter first (rlhf export) and start a new one.")
    _fill(adapted, TRAINED, _read_weights(folder), source=str(folder))
    return adapted


def _differences(settings: PeftLoraConfig, recipe: LoraConfig, *, dora: bool) -> list[str]:
    def kind(is_dora: bool) -> str:
        return "dora" if is_dora else "lora or qlora"
    compared = (("lora.r", recipe.r, settings.r), ("lora.alpha", recipe.alpha, settings.lora_alpha),
                ("method", kind(dora), kind(settings.use_dora)))
    return [f"{key} is {ours}, the adapter has {theirs}" for key, ours, theirs in compared if ours != theirs]


def _other_targets(model: PeftModel, recipe: LoraConfig, wanted: set[str]) -> list[str]:
    found = {name.removeprefix("base_model.model.") for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    differing = sorted(found ^ wanted)
    return [f"lora.targets {recipe.targets!r} means other modules than the adapter has, for example {differing[0]}"] if differing else []


def _read_weights(folder: Path) -> dict[str, Tensor]:
    if not any((folder / name).is_file() for name in WEIGHT_FILES):
        raise ModelError(f"{folder} has {CONFIG_FILE} but none of {', '.join(WEIGHT_FILES)}: the adapter's weights are missing")
    try:
        weights: dict[str, Tensor] = load_peft_weights(str(folder), device="cpu")
    except (OSError, SafetensorError, RuntimeError, UnpicklingError) as error:
        raise ModelError(f"the adapter's weights in {folder} cannot be read: {error}") from error
    broken = [name for name, tensor in weights.items() if not tensor.isfinite().all()]
    if broken:
        raise ModelError(f"the adapter in {folder} holds infinities or NaNs in {len(broken)} tensors, for example {broken[0]}; its "
                         "training broke. Take an earlier checkpoint.")
    return weights


def adapter_tensors(model: PeftModel, name: str) -> dict[str, Tensor]:
    """What belongs to one adapter, heads trained with it included, by the names of an adapter file. Not the base's embeddings."""
    tensors: dict[str, Tensor] = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    return tensors


def _fill(model: PeftModel, name: str, weights: dict[str, Tensor], *, source: str) -> None:
    """Set every tensor of the adapter; ModelError unless the weights name exactly the adapter's tensors and fit them."""
    expected = adapter_tensors(model, name)
    missing, unexpected = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing or unexpected:
        counted = (("missing", missing), ("unexpected", unexpected))
        found = "; ".join(f"{len(keys)} {what}, for example {keys[0]}" for what, keys in counted if keys)
        raise ModelError(f"the adapter in {source} does not fit the base {model.name_or_path}: {len(expected.keys() & weights.keys())} of "
                         f"{len(expected)} tensors would be loaded ({found}). It belongs to another base, or its file is incomplete.")
    wrong = [f"{key} is {list(weights[key].shape)}, the base needs {list(tensor.shape)}" for key, tensor in sorted(expected.items())
             if weights[key].shape != tensor.shape]
    if wrong:
        raise ModelError(f"the adapter in {source} does not fit the base {model.name_or_path}: {len(wrong)} tensors have another shape, "
                         f"for example {wrong[0]}. Load it on the base it was trained on.")
    set_peft_model_state_dict(model, weights, adapter_name=name)
    unequal = [key for key, tensor in adapter_tensors(model, name).items() if not torch.equal(tensor, weights[key].to(tensor))]
    if unequal:
        raise ModelError(f"{len(unequal)} tensors of the adapter in {source} were not loaded, for example {unequal[0]}")


def copy_adapter(model: PeftModel, name: str) -> None:
    """Put a frozen, inactive copy of the trained adapter beside it."""
    settings = copy.deepcopy(model.peft_config[TRAINED])
    settings.inference_mode = True
    settings.lora_dropout = 0.0
    with undisturbed_rng():
        model.add_adapter(name, settings)
    _fill(model, name, {key: tensor.clone() for key, tensor in adapter_tensors(model, TRAINED).items()}, source=f"adapter {TRAINED!r}")
    model.set_requires_grad(name, requires_grad=False)
