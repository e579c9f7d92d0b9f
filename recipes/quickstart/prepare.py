"""Make the quickstart's data, tokenizer and untrained model: `prepare.py FOLDER --seed 0`. The same seed gives the same files.

    sft.jsonl       demonstrations by writers with bad habits: about half of them have a fault
    prompts.jsonl   prompts whose responses annotators will rank
    gold.jsonl      four responses a prompt with 0 to 3 faults and their ranks: annotators are measured on these
    test.jsonl      two to four responses a prompt, ranked by their number of faults, equal numbers tied: models are measured on these
    model/          a Llama-shaped model with random weights, and a byte-level BPE tokenizer trained on the texts

No prompt is in two files.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

import torch
from grammar import FAULTS, Habits, Task, answered_well, draw_distinct_tasks, ranked_responses, respond
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, END, ROLES = "<|pad|>", "<|end|>", ("system", "user", "assistant")
CHAT_TEMPLATE = ("{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
                 "{% if add_generation_prompt %}<|assistant|>{% endif %}")


def demonstrations(tasks: Iterable[Task], habits: Habits, rng: random.Random) -> list[dict[str, object]]:
    """One response a task, with the habits' faults."""
    return [{"prompt": task.prompt, "response": respond(task, habits.draw_faults(task, rng), rng)} for task in tasks]


def rankings(tasks: Iterable[Task], habits: Habits, rng: random.Random) -> list[dict[str, object]]:
    """Two to four responses a task with their ranks."""
    rows: list[dict[str, object]] = []
    for task in tasks:
        ranked = ranked_responses(task, rng.choice((2, 3, 4)), habits, rng)
        rows.append({"prompt": task.prompt, "responses": [response for response, _ in ranked], "ranks": [rank for _, rank in ranked]})
    return rows


def gold_items(tasks: Iterable[Task], rng: random.Random) -> list[dict[str, object]]:
    """Responses with 0, 1, 2 and 3 faults, best first: every pair of them has a right answer."""
    return [{"prompt": task.prompt, "responses": [respond(task, set(rng.sample(FAULTS, count)), rng) for count in range(len(FAULTS) + 1)],
             "ranks": list(range(1, len(FAULTS) + 2))} for task in tasks]


def write_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def train_tokenizer(texts: Iterable[str], *, vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text can be encoded, and frequent words are one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [PAD, END, *(f"<|{role}|>" for role in ROLES)]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, show_progress=False,
                                                             initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, chat_template=CHAT_TEMPLATE,
                                   additional_special_tokens=special[2:], clean_up_tokenization_spaces=False)


def new_model(tokenizer: PreTrainedTokenizerFast, *, hidden: int, layers: int, seed: int) -> LlamaForCausalLM:
    """Random weights. Their spread and the rotary base suit so small a model and such short texts: with Llama's 0.02 and 10,000 it
    needs several times as many steps before it copies words from the prompt."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=8 * hidden // 3, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.08,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0}, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="an existing folder, where the files go")
    parser.add_argument("--seed", type=int, default=0, help="fixes data and weights")
    parser.add_argument("--prompts", type=int, default=8000, help="prompts with a demonstration")
    parser.add_argument("--unranked", type=int, default=400, help="other prompts, for annotators")
    parser.add_argument("--gold", type=int, default=60, help="other prompts, with responses of known order for annotators")
    parser.add_argument("--test", type=int, default=400, help="other prompts, with ranked responses for the evaluation")
    parser.add_argument("--vocabulary", type=int, default=512, help="tokens")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model")
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()

    rng, habits = random.Random(options.seed), Habits()
    tasks = iter(draw_distinct_tasks(rng, options.prompts + options.unranked + options.gold + options.test))
    shown = demonstrations(islice(tasks, options.prompts), habits, rng)
    write_lines(options.folder / "sft.jsonl", shown)
    write_lines(options.folder / "prompts.jsonl", [{"prompt": task.prompt} for task in islice(tasks, options.unranked)])
    write_lines(options.folder / "gold.jsonl", gold_items(islice(tasks, options.gold), rng))
    write_lines(options.folder / "test.jsonl", rankings(tasks, habits, rng))
    tokenizer = train_tokenizer((f"{row['prompt']} {row['response']}" for row in shown), vocabulary=options.vocabulary)
    model = new_model(tokenizer, hidden=options.hidden, layers=options.layers, seed=options.seed)
    model.save_pretrained(options.folder / "model")
    tokenizer.save_pretrained(options.folder / "model")

    good = sum(answered_well(str(row["prompt"]), str(row["response"])) for row in shown)
    print(f"{len(shown)} demonstrations, {good / len(shown):.0%} of them without a fault; {options.unranked} prompts and {options.gold} "
          f"gold items for annotators; {options.test} prompts for the evaluation; "
          f"a model of {sum(weight.numel() for weight in model.parameters()):,} weights with {len(tokenizer)} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
