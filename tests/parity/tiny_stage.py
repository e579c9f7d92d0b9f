"""A tiny preference set and models of several families, run as stages: what the parity and equivalence tests share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from rlhf import dpo
from rlhf.config import BatchConfig, DataConfig, DpoConfig, LoopConfig, ModelConfig, OptimConfig
from rlhf.fitting import Site, log_path
from rlhf.step_log import read_log, step_lines

WORDS = 40
VOCABULARY = 320
LEARNING_RATE = 3e-3
PAIRS = 16

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.12, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 1,
}
HEADS = {"head_dim": 8}
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, **HEADS),
    "gemma2": Gemma2Config(**SHAPE, **HEADS, sliding_window=6, query_pre_attn_scalar=8, final_logit_softcapping=5.0,
                           attn_logit_softcapping=2.0),
    "gemma3": Gemma3TextConfig(**SHAPE, **HEADS, sliding_window=6, query_pre_attn_scalar=8,
                               layer_types=["sliding_attention", "full_attention"]),
    "mistral": MistralConfig(**SHAPE, sliding_window=6),
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.12, pad_token_id=0,
                       bos_token_id=None, eos_token_id=1),
}


def words(start: int, count: int) -> str:
    return " ".join(f"w{(start + 7 * i) % WORDS}" for i in range(count))


def write_pairs(folder: Path, *, count: int = PAIRS) -> list[dict[str, str]]:
    """Pairs of unlike lengths in pairs.jsonl; prompts of one user message. Responses begin with the space, so that no token spans both."""
    rows = [{"prompt": words(i, 2 + i % 7), "chosen": " " + words(2 * i + 1, 1 + (3 * i) % 8),
             "rejected": " " + words(3 * i + 2, 1 + (5 * i) % 7)} for i in range(count)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return rows


def write_model(folder: Path, family: str) -> Path:
    """A random model in folder/FAMILY, with a byte-level tokenizer, the kind that every family's tokenizer class can load."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator([words(0, WORDS)], trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<pad>", "<eos>"], show_progress=False, initial_alphabet=alphabet))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[family]).save_pretrained(folder / family)
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder / family)
    return folder / family


def run_dpo(folder: Path, model: Path, out: str, *, method: str = "full", steps: int = 3, layout: str = "auto", dtype: str = "float32",
            batch: BatchConfig, **settings: Any) -> tuple[dpo.FitResult, list[dict[str, Any]]]:
    """Train on folder/pairs.jsonl in the order of the file; returns the result and the step lines of the log."""
    config = DpoConfig(
        data=DataConfig(train=(str(folder / "pairs.jsonl"),), template="plain", max_length=64, holdout_percent=0, max_rejected=0),
        optim=OptimConfig(learning_rate=LEARNING_RATE, schedule="constant", warmup_fraction=0), batch=batch,
        loop=LoopConfig(max_steps=steps, save_every=None), layout=layout, **settings)
    section = ModelConfig(name=str(model), method=method, dtype=dtype)
    site = Site(folder=folder / out, name="dpo", model=section, seed=5, start=None, inputs={}, console=Console(quiet=True))
    site.folder.mkdir()
    result = dpo.train(config, site)
    return result, step_lines(read_log(log_path(site)).lines)
