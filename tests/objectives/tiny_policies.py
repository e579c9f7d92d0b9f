"""Tiny models with a tokenizer, saved as a user would have them, for the tests of this folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rlhf.config import Method, ModelConfig
from rlhf.models.loading import Policy, load_policy
from rlhf.records import Prompt

VOCABULARY = 96


def tiny_tokenizer(words: int = VOCABULARY) -> PreTrainedTokenizerFast:
    vocabulary = {"<eos>": 0, "<unk>": 1} | {f"w{number}": number for number in range(2, words)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} <eos> {% endfor %}"
    return tokenizer


def tiny_model(family: str, *, seed: int = 0) -> PreTrainedModel:
    """Weights large enough for logits to differ; hidden size 64, the least that NF4 takes."""
    shape = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if family == "gpt2":
            model: PreTrainedModel = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=64,
                                                                initializer_range=0.1, bos_token_id=None, eos_token_id=0))
        elif family == "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True))
        else:
            model = LlamaForCausalLM(LlamaConfig(**shape))
    return model.eval()


def saved(folder: Path, family: str = "llama", *, seed: int = 0) -> str:
    tiny_model(family, seed=seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def load(name: str, method: Method = "lora", *, start: str | None = None, seed: int = 0, **settings: object) -> Policy:
    return load_policy(ModelConfig(name=name, method=method, **settings), method=method, start=start, seed=seed)  # type: ignore[arg-type]


def prompts(count: int) -> list[Prompt]:
    """Lengths 1 to 7, in no order."""
    return [Prompt.of_text(" ".join(f"w{2 + (7 * row + 3 * place) % 90}" for place in range(1 + 5 * row % 7))) for row in range(count)]


TOKENS = torch.tensor([[5, 17, 40, 2, 91, 33, 8, 60], [71, 3, 3, 28, 54, 19, 88, 7]])


@torch.no_grad()
def logits_of(model: PreTrainedModel) -> Tensor:
    training = model.training
    logits: Tensor = model.eval()(input_ids=TOKENS, use_cache=False).logits
    model.train(training)
    return logits


def step(model: PreTrainedModel, *, learning_rate: float = 1e-2, steps: int = 1) -> None:
    """Optimizer steps on the next-token loss of TOKENS."""
    model.train()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=learning_rate, weight_decay=0.0)
    for _ in range(steps):
        model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def run_python(code: str, *arguments: str) -> str:
    """Run a script in a new process; returns what it printed."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
