"""The set that trainers are compared on: HH-RLHF harmless pairs, an 8,192-token BPE trained on them, and a random 7M-parameter Llama."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from rlhf.data.formats import as_preferences, read
from rlhf.data.templates import template_for

LOCAL_DATA = Path(__file__).resolve().parents[2] / "shared/data/hh_harmless_base_test/test.jsonl.gz"
VOCABULARY = 8192


def build(folder: Path, data: str, *, pairs: int) -> None:
    """Write `folder/model` (with the tokenizer), and two orders of the same pairs, `random` and `sorted`, in two forms each: `*.jsonl` with
    messages, and `*.texts.json` with the strings that the transcript template makes of them."""
    records = as_preferences(read([data]))[0]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.train_from_iterator((" ".join([*(m.content for m in record.prompt.messages), record.chosen]) for record in records),
                            trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<pad>", "<eos>"], show_progress=False,
                                                initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                         vocab_size=VOCABULARY, max_position_embeddings=2048, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")

    template = template_for(tokenizer, "transcript")
    orders = {"random": records[:pairs]}
    orders["sorted"] = sorted(orders["random"], key=lambda r: len(template.prompt_text(r.prompt)) + max(len(r.chosen), len(r.rejected)))
    for order, chosen in orders.items():
        rows = [{"prompt": [{"role": m.role, "content": m.content} for m in r.prompt.messages], "chosen": r.chosen, "rejected": r.rejected}
                for r in chosen]
        (folder / f"{order}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        texts = [{"prompt": template.prompt_text(r.prompt), "chosen": template.response_text(r.chosen),
                  "rejected": template.response_text(r.rejected)} for r in chosen]
        (folder / f"{order}.texts.json").write_text(json.dumps(texts), encoding="utf-8")
