"""The schema of a recipe: frozen, strict, validated before anything heavy is imported.

Every field carries a `Key`: what it does, its unit, and where its default comes from; `rlhf COMMAND --help` prints them. Values that
cannot stand together are reported by `conflicts()`, a method of the class that owns the fields; `rlhf.recipe` gathers them all.
No default lives anywhere but here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from pydantic import ConfigDict

from rlhf.errors import ConfigError, Problem

STRICT = ConfigDict(extra="forbid", strict=False, allow_inf_nan=False)


class Key(NamedTuple):
    """What `--help` says about a field."""

    text: str
    unit: str = "-"
    source: str = "this project"


def exact_div(total: int, part: int, what: str) -> int:
    """total / part without a remainder, else ConfigError: batch sizes are never rounded in silence."""
    quotient, rest = divmod(total, part)
    if rest:
        raise ConfigError(f"{what}: {total} does not divide by {part} (remainder {rest})")
    return quotient


Method = Literal["full", "lora", "qlora", "dora"]
Layout = Literal["auto", "packed", "padded"]
Dtype = Literal["float32", "bfloat16", "float16"]
TemplateName = Literal["chat", "plain", "transcript"]
FormatName = Literal["auto", "records", "preference", "implicit", "transcript", "ranked", "scored", "ultrafeedback_overall",
                     "ultrafeedback_fine", "llmbar", "pandalm", "squality", "oasst", "alpaca", "sharegpt", "messages", "completion"]
RepairName = Literal["replace_surrogates", "strip_whitespace", "drop_empty_history", "drop_leading_assistant", "merge_same_role",
                     "strip_prompt_from_response", "drop_duplicates"]
Tracker = Literal["tensorboard", "wandb", "trackio", "mlflow"]
LossName = Literal["sigmoid", "robust", "hinge", "ipo", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
                   "apo_zero", "apo_down", "discopop", "sigmoid_norm", "simpo", "orpo", "sft"]


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    __pydantic_config__ = STRICT
    r: Annotated[int, Key("rank of the adapters", "rank", "Hu et al. 2021, arXiv:2106.09685")] = 16
    alpha: Annotated[float, Key("the update is scaled by alpha / r", "-", "2 r, Hu et al. 2021")] = 32.0
    dropout: Annotated[float, Key("dropout in front of the adapters", "share, 0 to <1", "QLoRA used 0.05-0.1; 0 is exact and faster")] = 0.0
    targets: Annotated[str | tuple[str, ...], Key("'all-linear', or names of modules", "-", "Dettmers et al. 2023, arXiv:2305.14314")] = "all-linear"

    def conflicts(self) -> Iterator[Problem]:
        if self.r < 1:
            yield Problem("r", f"must be at least 1, got {self.r}")
        if self.alpha <= 0:
            yield Problem("alpha", f"must be > 0, got {self.alpha}: at 0 an adapter changes nothing, below it learning is reversed")
        if not 0 <= self.dropout < 1:
            yield Problem("dropout", f"must be in [0, 1), got {self.dropout}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    __pydantic_config__ = STRICT
    name: Annotated[str, Key("folder, hub name, or @STAGE/FOLDER of an earlier stage")]
    method: Annotated[Method, Key("what is trained: all weights, LoRA, LoRA on a 4-bit base, or DoRA")] = "full"
    lora: Annotated[LoraConfig, Key("adapters of lora, qlora and dora")] = field(default_factory=LoraConfig)
    dtype: Annotated[Dtype, Key("what is computed in, and the precision of frozen weights; weights that train are float32", "-", "bfloat16 on GPUs that have it")] = "float32"
    double_quant: Annotated[bool, Key("qlora: quantise the quantisation constants too", "-", "Dettmers et al. 2023")] = True
    activation_checkpointing: Annotated[bool, Key("recompute activations in the backward pass: less memory, about a third more time")] = False
    revision: Annotated[str | None, Key("commit, tag or branch of a hub model")] = None

    def conflicts(self) -> Iterator[Problem]:
        if not self.name.strip():
            yield Problem("name", "is empty; give a folder or a hub name")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    __pydantic_config__ = STRICT
    train: Annotated[str | tuple[str, ...], Key("files, globs, hub names, or @STAGE/FILE of an earlier stage")]
    holdout: Annotated[str | tuple[str, ...] | None, Key("separate evaluation files; without them a share of the prompts is held out by hash")] = None
    format: Annotated[FormatName, Key("'auto', or the name of a reader (see docs/data.md)")] = "auto"
    holdout_percent: Annotated[float, Key("prompts held out by hash, the same ones in every run", "% of prompts")] = 5.0
    template: Annotated[TemplateName, Key("chat: the tokenizer's template; plain: text as it is; transcript: Human/Assistant turns")] = "chat"
    max_length: Annotated[int, Key("longest prompt + response", "tokens")] = 1024
    on_long: Annotated[Literal["cut_prompt", "reject"], Key("what happens to longer rows; a cut keeps the end of the prompt and the whole response where it fits")] = "cut_prompt"
    max_rejected: Annotated[float, Key("stop when more rows than this are rejected", "share of rows")] = 0.05
    repair: Annotated[tuple[RepairName, ...], Key("named repairs to apply (see docs/data.md); without them such rows are rejected")] = ()
    limit: Annotated[int | None, Key("read only the first rows", "rows")] = None

    def conflicts(self) -> Iterator[Problem]:
        if not 0 <= self.holdout_percent < 100:
            yield Problem("holdout_percent", f"must be in [0, 100), got {self.holdout_percent}")
        if self.holdout is not None and self.holdout_percent != 5.0:
            yield Problem("holdout_percent", "is set beside holdout; with separate files no prompts are held out by hash. Remove one of them")
        if self.max_length < 8:
            yield Problem("max_length", f"must be at least 8 tokens, got {self.max_length}")
        if not 0 <= self.max_rejected <= 1:
            yield Problem("max_rejected", f"is a share and must be in [0, 1], got {self.max_rejected}")
        if self.limit is not None and self.limit < 1:
            yield Problem("limit", f"must be at least 1 row, got {self.limit}")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    __pydantic_config__ = STRICT
    learning_rate: Annotated[float, Key("peak, after warm-up", "-", "5e-7 for DPO on a full model, 1e-5 to 1e-4 with LoRA")]
    schedule: Annotated[Literal["linear", "cosine", "constant"], Key("shape after warm-up")] = "cosine"
    warmup_fraction: Annotated[float, Key("linear warm-up", "share of steps")] = 0.1
    weight_decay: Annotated[float, Key("decoupled weight decay", "-", "Loshchilov & Hutter 2017, arXiv:1711.05101")] = 0.0
    max_grad_norm: Annotated[float, Key("gradients are scaled down to this norm", "-", "the usual 1.0")] = 1.0
    optimizer: Annotated[Literal["adamw_torch", "adamw_8bit", "paged_adamw_8bit"], Key("8-bit and paged ones come from bitsandbytes")] = "adamw_torch"

    def conflicts(self) -> Iterator[Problem]:
        if self.learning_rate <= 0:
            yield Problem("learning_rate", f"must be > 0, got {self.learning_rate}")
        if not 0 <= self.warmup_fraction <= 1:
            yield Problem("warmup_fraction", f"must be in [0, 1], got {self.warmup_fraction}")
        if self.max_grad_norm <= 0:
            yield Problem("max_grad_norm", f"must be > 0, got {self.max_grad_norm}")
        if self.weight_decay < 0:
            yield Problem("weight_decay", f"must be >= 0, got {self.weight_decay}")


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    __pydantic_config__ = STRICT
    per_step: Annotated[int, Key("rows of one optimizer step, over all devices", "rows")] = 32
    per_microbatch: Annotated[int, Key("at most so many rows in one forward on one device", "rows")] = 8
    tokens_per_microbatch: Annotated[int | None, Key("and at most so many tokens; rows are balanced over the microbatches of a step", "tokens")] = None
    shuffle: Annotated[bool, Key("a new order each epoch, fixed by the seed; false keeps the order of the files")] = True

    def conflicts(self) -> Iterator[Problem]:
        for name in ("per_step", "per_microbatch"):
            if getattr(self, name) < 1:
                yield Problem(name, f"must be at least 1, got {getattr(self, name)}")
        if self.tokens_per_microbatch is not None and self.tokens_per_microbatch < 1:
            yield Problem("tokens_per_microbatch", f"must be at least 1, got {self.tokens_per_microbatch}")
        if self.per_microbatch > self.per_step:
            yield Problem("per_microbatch", f"is {self.per_microbatch}, more than per_step {self.per_step}; lower it or raise per_step")


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How long to train, and what happens along the way."""

    __pydantic_config__ = STRICT
    epochs: Annotated[float, Key("passes over the training rows", "epochs")] = 1.0
    max_steps: Annotated[int | None, Key("stop after so many steps, whatever epochs says", "steps")] = None
    evaluate_every: Annotated[int | None, Key("evaluate on the held-out rows; None: only before and after", "steps")] = None
    save_every: Annotated[int | None, Key("write a checkpoint to continue from, with patience at every evaluation; None: never (the model is saved at the end all the same)", "steps")] = 100
    save_total_limit: Annotated[int, Key("checkpoints kept, the newest and the best", "checkpoints")] = 2
    patience: Annotated[int | None, Key("stop after so many evaluations without a better eval_loss, and keep the best", "evaluations")] = None
    trackers: Annotated[tuple[Tracker, ...], Key("where metrics go besides train_log.jsonl")] = ()
    dropout: Annotated[bool, Key("keep the model's own dropout (DPO peers switch it off)")] = False

    def conflicts(self) -> Iterator[Problem]:
        if self.epochs <= 0:
            yield Problem("epochs", f"must be > 0, got {self.epochs}")
        for name in ("max_steps", "evaluate_every", "save_every", "patience", "save_total_limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield Problem(name, f"must be at least 1, got {value}")
        if self.patience is not None and self.evaluate_every is None:
            yield Problem("patience", "needs evaluate_every: without evaluations nothing can be compared")


def unevaluated(data: DataConfig, loop: LoopConfig) -> Iterator[Problem]:
    """Settings of the loop that evaluate, where the data hold nothing out."""
    for name in ("evaluate_every", "patience"):
        if getattr(loop, name) is not None and data.holdout is None and data.holdout_percent == 0:
            yield Problem(f"loop.{name}", "is set, but data.holdout_percent is 0: there is nothing to evaluate on. Hold some prompts out, "
                          "or remove it")


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    __pydantic_config__ = STRICT
    data: Annotated[DataConfig, Key("demonstrations; of preferences and rankings the best response is taken")]
    optim: Annotated[OptimConfig, Key("optimizer")]
    name: Annotated[str, Key("name of the stage, for @NAME")] = "sft"
    start: Annotated[str | None, Key("model or adapter to start from; None: model.name")] = None
    method: Annotated[Method | None, Key("instead of model.method")] = None
    batch: Annotated[BatchConfig, Key("rows and tokens of a step")] = field(default_factory=BatchConfig)
    loop: Annotated[LoopConfig, Key("length, evaluation, checkpoints")] = field(default_factory=LoopConfig)
    layout: Annotated[Layout, Key("packed: unpadded rows; padded: one row a sequence; auto: packed where the model can")] = "auto"

    def conflicts(self) -> Iterator[Problem]:
        yield from unevaluated(self.data, self.loop)


@dataclass(frozen=True, kw_only=True)
class DpoConfig:
    __pydantic_config__ = STRICT
    data: Annotated[DataConfig, Key("preferences; of rankings every strictly ordered pair is taken")]
    optim: Annotated[OptimConfig, Key("optimizer")]
    name: Annotated[str, Key("name of the stage, for @NAME")] = "dpo"
    start: Annotated[str | None, Key("model or adapter to start from; it is the reference too; None: the training stage before, else model.name")] = None
    method: Annotated[Method | None, Key("instead of model.method")] = None
    batch: Annotated[BatchConfig, Key("pairs and tokens of a step")] = field(default_factory=BatchConfig)
    loop: Annotated[LoopConfig, Key("length, evaluation, checkpoints")] = field(default_factory=LoopConfig)
    layout: Annotated[Layout, Key("packed: the prompt is forwarded once, nothing is padded; auto: packed where the model can")] = "auto"
    beta: Annotated[float, Key("larger keeps the policy nearer the reference; usual 0.01 to 0.5", "1/nat", "Rafailov et al. 2023, arXiv:2305.18290")] = 0.1
    loss: Annotated[LossName | dict[LossName, float], Key("one loss, or several with weights: {sigmoid: 1.0, sft: 0.2}", "-", "docs/losses.md cites each")] = "sigmoid"
    label_smoothing: Annotated[float, Key("chance that a label is wrong: sigmoid (cDPO), robust, exo_pair, aot", "share, 0 to 0.5", "Mitchell 2023, cDPO")] = 0.0
    smoothing_from_votes: Annotated[bool, Key("per pair: its smoothing, or 1 - agreement of its annotators; at least label_smoothing")] = False
    simpo_gamma: Annotated[float, Key("simpo: target margin of the length-normalised rewards", "nats", "Meng et al. 2024, arXiv:2405.14734")] = 0.5
    discopop_tau: Annotated[float, Key("discopop: temperature of the blend", "-", "Lu et al. 2024, arXiv:2406.08414")] = 0.05
    precompute_reference: Annotated[bool, Key("score the reference once, before training, and cache it on disk")] = False

    def losses(self) -> dict[str, float]:
        """Weights by name."""
        return {str(name): weight for name, weight in self.loss.items()} if isinstance(self.loss, dict) else {self.loss: 1.0}

    def conflicts(self) -> Iterator[Problem]:
        yield from unevaluated(self.data, self.loop)
        yield from self._wrong_losses()
        if self.beta <= 0:
            yield Problem("beta", f"must be > 0, got {self.beta}")
        if not 0 <= self.label_smoothing <= 0.5:
            yield Problem("label_smoothing", f"must be in [0, 0.5], got {self.label_smoothing}")
        if self.label_smoothing == 0.5 and "robust" in self.losses():
            yield Problem("label_smoothing", "robust divides by 1 - 2 * label_smoothing; it must be < 0.5")
        if self.label_smoothing == 0 and "exo_pair" in self.losses():
            yield Problem("label_smoothing", "exo_pair takes its logarithm; it must be > 0 (the paper uses 1e-3)")
        smoothed = {"sigmoid", "robust", "exo_pair", "aot", "aot_unpaired"} & set(self.losses())
        coupled = sorted({"aot", "aot_unpaired"} & set(self.losses()))
        if self.smoothing_from_votes and coupled:
            yield Problem("smoothing_from_votes", f"gives each pair its own smoothing, but {coupled[0]} sorts the pairs; use label_smoothing")
        if coupled and (self.batch.per_microbatch != self.batch.per_step or self.batch.tokens_per_microbatch is not None):
            yield Problem("loss", f"{coupled[0]} sorts all pairs of a step, so a step must be one microbatch: set batch.per_microbatch to "
                          f"per_step ({self.batch.per_step}) and no tokens_per_microbatch")
        for name, loss, default in (("simpo_gamma", "simpo", 0.5), ("discopop_tau", "discopop", 0.05)):
            if getattr(self, name) != default and loss not in self.losses():
                yield Problem(name, f"is set, but no loss of {sorted(self.losses())} reads it; use {loss}, or remove it")
        if not 0 < self.discopop_tau <= 1:
            yield Problem("discopop_tau", f"must be in (0, 1], got {self.discopop_tau}")
        if (self.label_smoothing or self.smoothing_from_votes) and not smoothed:
            yield Problem("label_smoothing", f"no loss of {sorted(self.losses())} reads it; use sigmoid, robust, exo_pair or aot, or remove it")

    def _wrong_losses(self) -> Iterator[Problem]:
        if not self.losses():
            yield Problem("loss", "names no loss")
        for name, weight in self.losses().items():
            if weight <= 0:
                yield Problem("loss", f"the weight of {name} must be > 0, got {weight}: a negative one would raise what it should lower")
        if self.precompute_reference and set(self.losses()) <= {"simpo", "orpo", "sft"}:
            yield Problem("precompute_reference", f"is set, but no loss of {sorted(self.losses())} has a reference; remove it")


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Run a Python script that writes files for later stages into the folder it is given."""

    __pydantic_config__ = STRICT
    script: Annotated[str, Key("Python file, relative to the recipe; called as SCRIPT OUTPUT_FOLDER --key value ...")]
    args: Annotated[dict[str, str | int | float | bool], Key("its options; @STAGE and @STAGE/FILE become paths")] = field(default_factory=dict)
    name: Annotated[str, Key("name of the stage, for @NAME")] = "prepare"


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    __pydantic_config__ = STRICT
    data: Annotated[DataConfig, Key("prompts or preferences; only the held-out side is used")]
    name: Annotated[str, Key("name of the stage")] = "evaluate"
    models: Annotated[tuple[str, ...], Key("'base', stage names, or folders; the first is what the others are compared with")] = ("base",)
    scorer: Annotated[str | None, Key("FILE.py:FUNCTION(prompt, response) -> bool, relative to the recipe; scores greedy responses by rule")] = None
    preferences: Annotated[bool, Key("implicit-reward accuracy of each model against the first one, on held-out pairs")] = True
    samples: Annotated[int, Key("responses shown in the report for each model", "responses")] = 4
    max_new_tokens: Annotated[int, Key("longest response", "tokens")] = 128
    batch: Annotated[int, Key("prompts or pairs at a time", "rows")] = 16
    limit: Annotated[int | None, Key("evaluate the first so many held-out prompts", "prompts")] = None
    resamples: Annotated[int, Key("bootstrap resamples behind each interval", "resamples", "Efron & Tibshirani 1993")] = 2000

    def conflicts(self) -> Iterator[Problem]:
        if not self.models:
            yield Problem("models", "names no model")
        if self.scorer is not None and ":" not in self.scorer:
            yield Problem("scorer", f"must be FILE.py:FUNCTION, got {self.scorer!r}")
        for name in ("samples", "max_new_tokens", "batch", "resamples"):
            if getattr(self, name) < (0 if name == "samples" else 1):
                yield Problem(name, f"is too small: {getattr(self, name)}")
        if self.limit is not None and self.limit < 1:
            yield Problem("limit", f"must be at least 1 prompt, got {self.limit}")


StageKind = Literal["prepare", "sft", "dpo", "evaluate"]
StageConfig = PrepareConfig | SftConfig | DpoConfig | EvaluateConfig
STAGES: dict[StageKind, type[StageConfig]] = {"prepare": PrepareConfig, "sft": SftConfig, "dpo": DpoConfig, "evaluate": EvaluateConfig}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One file drives a pipeline. `stages` is a list of one-key mappings: `- sft: {...}`."""

    __pydantic_config__ = STRICT
    name: Annotated[str, Key("name of the run", "-", "the recipe's file, or its folder where the file is called recipe.yaml")]
    model: Annotated[ModelConfig, Key("the base model, and how it is trained")]
    stages: Annotated[tuple[tuple[StageKind, StageConfig], ...], Key("what to do, in this order; one key each: prepare, sft, dpo or evaluate")]
    output: Annotated[str, Key("run folder, relative to the working directory", "-", "runs/NAME")]
    seed: Annotated[int, Key("fixes shuffling, initial adapters and dropout")] = 0
    folder: Annotated[str, Key("where relative scripts and files are looked for first", "-", "the folder of the recipe file")]

    def conflicts(self) -> Iterator[Problem]:
        if not 0 <= self.seed < 2**32:
            yield Problem("seed", f"must be in [0, 2**32), got {self.seed}")
