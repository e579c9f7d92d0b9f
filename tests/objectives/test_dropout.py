"""Wherever an architecture keeps its dropout, it is off inside the block and as it was after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    GPT2Config,
    GPTNeoConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    PretrainedConfig,
)

from rlhf.config import LoraConfig
from rlhf.models.adapters import new_adapter
from rlhf.models.dropout import without_dropout

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
NOISY = {
    "modules (gpt2)": GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0.3, embd_pdrop=0.3,
                                 attn_pdrop=0.3),
    "numbers of layers (llama)": LlamaConfig(**SMALL, intermediate_size=32, attention_dropout=0.3),
    "numbers of layers (opt)": OPTConfig(**SMALL, ffn_dim=32, word_embed_proj_dim=16, dropout=0.3, attention_dropout=0.3, layerdrop=0.5),
    "numbers of layers (bloom)": BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2, hidden_dropout=0.3, attention_dropout=0.3),
    "configuration (falcon)": FalconConfig(**SMALL, hidden_dropout=0.3, attention_dropout=0.3),
    "configuration (gpt-neo)": GPTNeoConfig(vocab_size=64, hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global"], 2]],
                                            resid_dropout=0.3, embed_dropout=0.3, attention_dropout=0.3),
    "router noise (mixtral)": MixtralConfig(**SMALL, intermediate_size=32, num_key_value_heads=2, router_jitter_noise=0.3),
}
TOKENS = torch.arange(2, 14)[None]


def logits(model: nn.Module, *, training: bool) -> torch.Tensor:
    torch.manual_seed(1)
    with torch.no_grad():
        return model.train(training)(input_ids=TOKENS, use_cache=False).logits


@pytest.mark.parametrize("config", NOISY.values(), ids=NOISY)
def test_training_mode_says_what_evaluation_mode_says(config: PretrainedConfig) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    settings = model.config.to_dict()
    exact = logits(model, training=False)
    assert not torch.allclose(logits(model, training=True), exact)     # the noise is really there
    noisy = logits(model, training=True)
    with without_dropout(model):
        assert torch.equal(logits(model, training=True), exact)
    assert torch.equal(logits(model, training=True), noisy)
    assert model.config.to_dict() == settings                          # what is saved has the configuration that was loaded


def test_dropout_of_adapters_is_kept() -> None:
    """It was asked for in the recipe; with B = 0 an adapter says nothing, so B is set."""
    base = AutoModelForCausalLM.from_config(NOISY["numbers of layers (llama)"])
    model = new_adapter(base, LoraConfig(r=2, dropout=0.5), dora=False, seed=0)
    for name, weight in model.named_parameters():
        if ".lora_B." in name:
            nn.init.ones_(weight)
    with without_dropout(model):
        assert not torch.allclose(logits(model, training=True), logits(model, training=False))


def test_rates_come_back_after_an_error() -> None:
    model = AutoModelForCausalLM.from_config(NOISY["numbers of layers (opt)"])
    with pytest.raises(RuntimeError), without_dropout(model):
        raise RuntimeError
    assert model.model.decoder.layers[0].dropout == 0.3
