"""What a model holds: which weights train, which never moved, which were not saved, and a fingerprint of them all."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from bitsandbytes.nn import Params4bit
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from rlhf.models.adapters import TRAINED, adapter_tensors


class ParameterRow(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class TrainableReport:
    rows: tuple[ParameterRow, ...]

    @property
    def total(self) -> int:
        return sum(row.size for row in self.rows)

    @property
    def trainable(self) -> int:
        return sum(row.size for row in self.rows if row.trainable)


def whole_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape before 4-bit packing."""
    if isinstance(parameter, Params4bit) and parameter.quant_state is not None:
        return tuple(parameter.quant_state.shape)
    return tuple(parameter.shape)


def trainable_report(model: nn.Module, shape_of: Callable[[nn.Parameter], tuple[int, ...]] = whole_shape) -> TrainableReport:
    """A row a parameter, tied ones once. Where parameters are sharded over devices, `shape_of` gives the gathered shape."""
    return TrainableReport(tuple(
        ParameterRow(name, tuple(shape_of(parameter)), str(parameter.dtype).removeprefix("torch."), parameter.requires_grad)
        for name, parameter in model.named_parameters()))


def untrained_adapters(model: nn.Module) -> list[str]:
    """Modules whose trained adapter changes nothing, because the factor that starts at zero is zero still."""
    def factors(module: LoraLayer) -> list[Tensor]:
        if TRAINED in module.lora_B:
            return [module.lora_B[TRAINED].weight]
        return [module.lora_embedding_A[TRAINED]] if TRAINED in module.lora_embedding_A else []
    return [name for name, module in model.named_modules()
            if isinstance(module, LoraLayer) and any(not factor.any() for factor in factors(module))]


def missing_from_save(model: nn.Module, folder: Path) -> list[str]:
    """Trained parameters of which the folder's safetensors files hold nothing; a tied one is there under any of its names."""
    saved: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            saved.update(tensors.keys())
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(id(parameter), []).append(name)
    return [tied[0] for tied in names.values() if not any(name_in_file(name) in saved for name in tied)]


def name_in_file(name: str) -> str:
    """PEFT leaves the adapter's own name out of the names in its files, and for DoRA's magnitudes what comes after it."""
    plain = name.replace(f".modules_to_save.{TRAINED}", "").replace(f".lora_magnitude_vector.{TRAINED}.weight", ".lora_magnitude_vector")
    return plain.replace(f".{TRAINED}", "")


def model_fingerprint(model: PreTrainedModel | PeftModel, *, adapter: str | None = None) -> str:
    """SHA-256 of the function that the model computes with `adapter` on, or with none: configuration, base weights, adapter weights.

    A tensor at a time passes through the CPU. The same weights have the same fingerprint inside an adapter's wrapping and without it,
    so the adapter-off reference of LoRA and the frozen copy of full fine-tuning share cached scores.
    """
    digest = hashlib.sha256(_function_settings(model.config).encode())
    tensors = sorted(_base_tensors(model).items())
    if adapter is not None:
        settings = model.peft_config[adapter]
        scaling = [settings.r, settings.lora_alpha, settings.use_rslora, settings.use_dora,
                   sorted(settings.rank_pattern.items()), sorted(settings.alpha_pattern.items())]
        digest.update(json.dumps(scaling).encode())
        tensors += sorted(adapter_tensors(model, adapter).items())
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _function_settings(config: PretrainedConfig) -> str:
    """The configuration without what leaves the function as it is: origin, version, and how attention is computed."""
    settings = config.to_dict()
    for name in ("_name_or_path", "transformers_version", "use_cache", "_attn_implementation", "attn_implementation"):
        settings.pop(name, None)
    return json.dumps(settings, sort_keys=True, default=str)


_ADAPTER_PARTS = {"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "modules_to_save"}
_WRAPPING = {"base_layer", "original_module"}


def _base_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state without adapters, by the names it has without them; quantisation constants are part of it."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        parts = name.removeprefix("base_model.model.").split(".")
        if not _ADAPTER_PARTS & set(parts):
            tensors[".".join(part for part in parts if part not in _WRAPPING)] = tensor
    return tensors
