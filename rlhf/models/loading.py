"""Load what is trained, save what came out: full models, LoRA and DoRA adapters, LoRA on a 4-bit base.

A start is a model folder, a hub name, or a folder with a PEFT adapter; the adapter's own base is loaded then. Nothing is repaired in
silence: a weight missing from a checkpoint, an adapter that fits by half or a tokenizer larger than the embedding is a ModelError.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from pydantic import TypeAdapter
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.pytorch_utils import Conv1D

from rlhf.config import Dtype, Method, ModelConfig
from rlhf.errors import ModelError
from rlhf.models.adapters import (
    CONFIG_FILE,
    TRAINED,
    adapter_tensors,
    load_adapter,
    new_adapter,
    read_adapter_config,
    undisturbed_rng,
)
from rlhf.models.folders import replacing_folder
from rlhf.models.precision import DTYPES

GENERIC_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")
NOTE_FILE = "policy.json"
"""Beside an adapter: the model section it was trained with. PEFT's own file does not say that the base was 4-bit."""


class Source(NamedTuple):
    """Where weights come from: a base, and an adapter on it or None."""

    base: str
    """Absolute folder, or hub name."""
    revision: str | None
    adapter: Path | None


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A model to train with its tokenizer, and where it came from."""

    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    method: Method
    config: ModelConfig
    source: Source

    @property
    def base(self) -> str:
        """Absolute folder or hub name of the base."""
        return self.source.base

    @property
    def continues_adapter(self) -> bool:
        """The trained adapter was loaded, not made: what it was at the start is part of the reference."""
        return self.method != "full" and self.source.adapter is not None


def find_source(name: str, revision: str | None = None) -> Source:
    """What a folder or hub name stands for. An adapter's base is the one its adapter_config.json names."""
    folder = Path(name).expanduser()
    if not (folder / CONFIG_FILE).is_file():
        return Source(_placed(name), revision, None)
    settings = read_adapter_config(folder)
    base = str(settings.base_model_name_or_path)
    if _is_path(base) and not Path(base).is_dir():
        raise ModelError(f"{folder / CONFIG_FILE} names the base {base}, which does not exist. If it was moved, set "
                         "base_model_name_or_path there to where it is now.")
    return Source(_placed(base), settings.revision, folder.resolve())


def _is_path(name: str) -> bool:
    """Not a hub name: those are NAME or OWNER/NAME."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def _placed(name: str) -> str:
    """An absolute path for a model folder, so that it means the same from every working directory; a hub name as it is."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        _require_model(folder)
        return str(folder.resolve())
    if _is_path(name):
        raise ModelError(f"{name}: there is no such folder")
    return name


def load_policy(config: ModelConfig, *, method: Method, start: str | None, seed: int, to_train: bool = True) -> Policy:
    """The model that a stage trains, in evaluation mode, on the current GPU where there is one.

    start: None (config.name), a model folder or hub name, or an adapter's folder. lora, qlora and dora continue an adapter, full merges
    it first. The seed makes new adapters; the global random generators are left alone. Weights that train are float32, whatever the
    dtype of the recipe: an update of 1e-6 of a bfloat16 weight rounds to nothing. `to_train=False`: all weights in the recipe's dtype.
    """
    source = find_source(start or config.name, None if start else config.revision)
    tokenizer = load_tokenizer(source)
    dtype = torch.float32 if method == "full" and to_train else DTYPES[config.dtype]
    with undisturbed_rng():
        model: PreTrainedModel | PeftModel
        if method == "full":
            model = load_base(source, dtype=dtype) if source.adapter is None else load_merged(source, dtype=dtype)
        else:
            base = load_base(source, dtype=dtype, quantisation=nf4(config) if method == "qlora" else None)
            if source.adapter is None:
                model = new_adapter(base, config.lora, dora=method == "dora", seed=seed)
            else:
                model = load_adapter(base, source.adapter, recipe=config.lora, dora=method == "dora")
    require_room_for(tokenizer, model)
    if config.activation_checkpointing:
        # Without re-entrance no input has to require gradients, so frozen embeddings stay out of the graph.
        model.activation_checkpointing_enable({"use_reentrant": False})
    model.config.use_cache = False
    if torch.cuda.is_available() and method != "qlora":
        model.to("cuda")
    return Policy(model=model.eval(), tokenizer=tokenizer, method=method, config=config, source=source)


def nf4(config: ModelConfig) -> BitsAndBytesConfig:
    """Dettmers et al. 2023, arXiv:2305.14314: 4-bit normal float, computing in the recipe's dtype."""
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=config.double_quant,
                              bnb_4bit_compute_dtype=DTYPES[config.dtype])


def load_base(source: Source, *, dtype: torch.dtype, quantisation: BitsAndBytesConfig | None = None) -> PreTrainedModel:
    """The causal language model of `source.base`, complete: no tensor made up, none of the checkpoint's left over."""
    name = source.base
    try:
        settings = AutoConfig.from_pretrained(name, revision=source.revision)
        if settings.to_dict().get("quantization_config") is not None:
            raise ModelError(f"{name} is quantised already; name the 16- or 32-bit model it was made from (method: qlora quantises it)")
        model, report = AutoModelForCausalLM.from_pretrained(name, revision=source.revision, dtype=dtype, quantization_config=quantisation,
                                                             output_loading_info=True)
    except ModelError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"{name} cannot be loaded as a causal language model: {error}") from error
    wrong = {what: sorted(map(str, report[what])) for what in ("missing_keys", "unexpected_keys", "mismatched_keys") if report[what]}
    if wrong:
        found = "; ".join(f"{len(keys)} {what.replace('_', ' ')}, for example {keys[0]}" for what, keys in wrong.items())
        raise ModelError(f"the weights in {name} are not those of a {type(model).__name__}: {found}. Missing ones would start at random, "
                         "unexpected ones would be lost; is it another kind of model (a reward model, one with a value head)?")
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ModelError(f"{name} on the hub is an adapter; download it and give its folder")
    return model


def _require_model(folder: Path) -> None:
    if (folder / "config.json").is_file():
        return
    gguf = sorted(folder.glob("*.gguf"))
    if gguf:
        raise ModelError(f"{folder} holds {gguf[0].name} and no config.json. GGUF files are for inference; convert it once: "
                         f"AutoModelForCausalLM.from_pretrained({str(folder)!r}, gguf_file={gguf[0].name!r}, "
                         "quantization_config=GgufConfig(dequantize=True)).save_pretrained(NEW_FOLDER). "
                         "Save its tokenizer there too (AutoTokenizer takes the same gguf_file) and name NEW_FOLDER.")
    raise ModelError(f"{folder} has neither config.json nor {CONFIG_FILE}: it is no model and no adapter")


def load_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """The adapter's tokenizer where it has one, else the base's.

    A missing pad token is left missing: masks come from lengths, and generation takes `generation_pad_id`.
    """
    own = source.adapter if source.adapter is not None and (source.adapter / "tokenizer_config.json").is_file() else None
    place, revision = (str(own), None) if own is not None else (source.base, source.revision)
    try:
        # A generic tokenizer is asked for by its class: AutoTokenizer goes by the model's family instead where that has a class of its
        # own (qwen2), which takes nothing from a tokenizer.json it did not expect and encodes every text to no tokens.
        generic = get_tokenizer_config(place, revision=revision).get("tokenizer_class") in GENERIC_TOKENIZERS
        return (PreTrainedTokenizerFast if generic else AutoTokenizer).from_pretrained(place, revision=revision)
    except Exception as error:      # the tokenizers library raises plain ones
        raise ModelError(f"{place} has no tokenizer that can be loaded: {error}. Save the tokenizer into the folder.") from error


def require_room_for(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Every id of the tokenizer has a row in the embedding; it is never resized in silence."""
    highest, rows = max(tokenizer.get_vocab().values()), model.get_input_embeddings().weight.shape[0]
    if highest >= rows:
        raise ModelError(f"the tokenizer has ids up to {highest}, the embedding of {model.name_or_path} has {rows} rows. Resize the model "
                         "(resize_token_embeddings) and save it with its tokenizer first; training does not do it for you.")


def positions_of(config: PretrainedConfig) -> int | None:
    """The longest row that a model of this configuration has positions for; None where it needs none (Mamba, ALiBi)."""
    text, key = config.get_text_config(), "max_position_embeddings"
    positions: int | None = text.to_dict().get(text.attribute_map.get(key, key))     # GPT-2 has its own name for it
    return positions


def require_positions(model: PreTrainedModel, *, longest: int) -> None:
    """A row beyond the last position is an index error in the middle of a run, or trained where the model has never been."""
    positions = positions_of(model.config)
    if positions is not None and longest > positions:
        raise ModelError(f"the longest row has {longest} tokens, {model.name_or_path} has {positions} positions. Lower data.max_length "
                         f"to {positions} or less.")


def generation_pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """What fills short rows of a generated batch: the pad token, else the end-of-sequence token. Never counted as text."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    raise ModelError("the tokenizer has neither a pad nor an end-of-sequence token, so batches cannot be generated; set its eos_token")


class AdapterBase(NamedTuple):
    model: PreTrainedModel
    quantised: bool


def base_as_trained(source: Source, *, dtype: torch.dtype) -> AdapterBase:
    """The base as the adapter saw it in training: 4-bit for a QLoRA adapter, else in `dtype` (also for adapters from elsewhere)."""
    settings = training_settings(source)
    if settings is None or settings.method != "qlora":
        return AdapterBase(load_base(source, dtype=dtype), quantised=False)
    return AdapterBase(load_base(source, dtype=DTYPES[settings.dtype], quantisation=nf4(settings)), quantised=True)


def training_settings(source: Source) -> ModelConfig | None:
    """The model section that the adapter was trained with; None where it comes from elsewhere."""
    note = adapter_folder(source) / NOTE_FILE
    if not note.is_file():
        return None
    try:
        return TypeAdapter(ModelConfig).validate_python(json.loads(note.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ModelError(f"{note} cannot be read: {error}. Restore it, or delete it if the base was not quantised.") from error


def stored_dtype(source: Source) -> Dtype:
    """The precision that the adapter's base had in training, else the one its files are in."""
    settings = training_settings(source)
    if settings is not None:
        return settings.dtype
    stored = AutoConfig.from_pretrained(source.base, revision=source.revision).dtype
    return next((name for name, dtype in DTYPES.items() if dtype == stored), "float32")


def load_merged(source: Source, *, dtype: torch.dtype) -> PreTrainedModel:
    """The adapter merged into its base: a plain model in `dtype`, all of it trainable.

    A QLoRA adapter is merged into its dequantised base, whose rounding it was trained against; merging into the 4-bit weights would
    round again and change the text.
    """
    base, quantised = base_as_trained(source, dtype=dtype)
    plain = dequantised(base).to(dtype) if quantised else base
    try:
        merged: PreTrainedModel = load_adapter(plain, adapter_folder(source)).merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise ModelError(f"the adapter in {source.adapter} cannot be merged: {error}") from error
    return merged.requires_grad_(True)


def dequantised(model: PreTrainedModel) -> PreTrainedModel:
    """The values that a 4-bit model computes with, as a plain model of the layers that its class is made of.

    Quantising turns the transposed layers of GPT-2 (Conv1D) into linear ones; without turning them back, the files would hold
    transposed weights.
    """
    plain: PreTrainedModel = model.dequantize()
    with torch.device("meta"):
        blank = type(plain)(plain.config)
    for name, module in blank.named_modules():
        if isinstance(module, Conv1D):
            linear = plain.get_submodule(name)
            module.weight, module.bias = nn.Parameter(linear.weight.T.contiguous()), linear.bias
            plain.set_submodule(name, module)
    return plain


def adapter_folder(source: Source) -> Path:
    if source.adapter is None:
        raise ModelError(f"{source.base} is a model, not an adapter (it has no {CONFIG_FILE})")
    return source.adapter


def save_policy(policy: Policy, folder: Path) -> None:
    """Write the model and its tokenizer, whole or not at all: plain transformers layout, or PEFT's for an adapter.

    adapter_config.json names the base by absolute folder or hub name, so that plain PEFT finds it from anywhere. Raises StorageError.
    """
    with replacing_folder(folder) as partial:
        if policy.method == "full":
            save_plain(policy.model, partial)
        else:
            _save_adapter(policy, partial)
        policy.tokenizer.save_pretrained(partial)


def save_plain(model: PreTrainedModel, folder: Path) -> None:
    """As transformers saves it, with the key-value cache switched on again: it is off in training only."""
    trained_with = model.config.use_cache
    model.config.use_cache = True
    try:
        model.save_pretrained(folder)
    finally:
        model.config.use_cache = trained_with


def _save_adapter(policy: Policy, folder: Path) -> None:
    tensors = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in adapter_tensors(policy.model, TRAINED).items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings: dict[str, Any] = policy.model.peft_config[TRAINED].to_dict()
    settings |= {"base_model_name_or_path": policy.base, "revision": policy.source.revision, "inference_mode": True}
    _write_json(folder / CONFIG_FILE, {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()})
    as_trained = replace(policy.config, name=policy.base, revision=policy.source.revision, method=policy.method)
    _write_json(folder / NOTE_FILE, asdict(as_trained))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
