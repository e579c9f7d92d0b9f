"""Rendering and its ids, with tokenizers small enough to write every id by hand."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rlhf.config import DataConfig
from rlhf.data.formats import load_preferences
from rlhf.data.rejects import RowError
from rlhf.data.templates import template_for
from rlhf.errors import ModelError
from rlhf.records import Message, Prompt

WORDS = ["<s>", "</s>", "<unk>", "<user>", "<bot>", "<end>", "hi", "there", "you", "bye"]
BOS, EOS, UNK, USER, BOT, END, HI, THERE, YOU, BYE = range(10)

CHAT = "{% for m in messages %}{{ ('<user>' if m.role == 'user' else '<bot>') + m.content + '<end>\n' }}{% endfor %}" \
       "{% if add_generation_prompt %}<bot>{% endif %}"
CHAT_WITH_BOS = "{{ bos_token }}" + CHAT
HH = Path(__file__).resolve().parents[2] / "../shared/data/hh_harmless_base_test/test.jsonl.gz"


def word_tokenizer(*, chat: str | None = None, bos: bool = True, adds_bos: bool = False, pad: str | None = None,
                   eos: str | None = "</s>") -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    if adds_bos:
        words.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)])
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>" if bos else None, eos_token=eos, unk_token="<unk>",
                                   pad_token=pad, additional_special_tokens=["<user>", "<bot>", "<end>"], chat_template=chat)


def byte_tokenizer(corpus: list[str], *, chat: str | None = None, vocab_size: int = 320) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<eos>", "<user>", "<bot>", "<end>"],
                                                        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<eos>",
                                   additional_special_tokens=["<user>", "<bot>", "<end>"], chat_template=chat)


def conversation(*turns: tuple[str, str]) -> Prompt:
    return Prompt(messages=tuple(Message(role=role, content=text) for role, text in turns))


TALK = conversation(("user", "hi"), ("assistant", "hi there"), ("user", "you"))


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("chat", [CHAT, CHAT_WITH_BOS])
def test_chat_ids_by_hand_and_bos_stands_once_whoever_brings_it(chat, adds_bos):
    template = template_for(word_tokenizer(chat=chat, adds_bos=adds_bos), "chat")
    head = (BOS,) if adds_bos or chat == CHAT_WITH_BOS else ()
    assert template.prompt_ids(TALK) == (*head, USER, HI, END, BOT, HI, THERE, END, USER, YOU, END, BOT)
    assert template.encode([template.response_text("bye you")]) == [[BYE, YOU, END]]
    assert template.stop_ids == {END, EOS}


@pytest.mark.parametrize("name", ["plain", "transcript"])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_bos_stands_in_front_of_texts_where_the_tokenizer_puts_it_and_its_trailing_eos_does_not(name, adds_bos):
    ids = template_for(word_tokenizer(adds_bos=adds_bos), name).prompt_ids(Prompt.of_text("hi you"))
    body = (HI, YOU) if name == "plain" else (UNK, UNK, HI, YOU, UNK, UNK)      # "Human" ":" ... "Assistant" ":"
    assert ids == ((BOS, *body) if adds_bos else body)


def test_a_prompt_rendered_elsewhere_keeps_its_own_bos_only():
    template = template_for(word_tokenizer(adds_bos=True), "plain")
    assert template.prompt_ids(Prompt.of_text("<s>hi")) == (BOS, HI)


@pytest.mark.parametrize("name", ["chat", "plain", "transcript"])
def test_tokenizer_without_bos_with_pad_as_eos(name):
    template = template_for(word_tokenizer(bos=False, pad="</s>", chat=CHAT), name)
    end = END if name == "chat" else EOS
    ids = template.encode([template.response_text("bye")])[0]
    assert ids == [BYE, end]
    assert None not in template.prompt_ids(Prompt.of_text("hi"))
    assert template.head_length(template.prompt_ids(Prompt.of_text("hi"))) == 0


def test_the_whitespace_behind_the_end_of_turn_belongs_to_the_next_turn():
    template = template_for(byte_tokenizer(["hi there"], chat=CHAT), "chat")
    assert template.response_text("hi") == "hi<end>"
    assert template.prompt_text(TALK) == "<user>hi<end>\n<bot>hi there<end>\n<user>you<end>\n<bot>"


def test_only_the_first_end_token_ends_a_response():
    """Phi-3 closes a training text with "<|end|>\\n" and then eos."""
    chat = CHAT.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
    template = template_for(word_tokenizer(chat=chat), "chat")
    assert template.encode([template.response_text("bye")]) == [[BYE, END]]


def test_what_a_template_writes_around_a_response_is_trained_on_but_no_part_of_the_response():
    chat = "{% for m in messages %}{{ '<user>' + m.content if m.role == 'user' else '<bot>[think]' + m.content.strip() + ' <end>' }}" \
           "{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
    template = template_for(byte_tokenizer(["hi there"], chat=chat), "chat")
    assert template.response_text("  hi there\n") == "[think]hi there <end>"
    assert template.decode_response(template.encode(["[think]hi there <end><eos>garbage"])[0]) == "hi there"


def test_plain_eos_stands_once_even_where_the_text_brings_it():
    template = template_for(word_tokenizer(), "plain")
    assert template.response_text("bye") == template.response_text("bye</s>") == "bye</s>"


@pytest.mark.parametrize(("name", "prompt", "reason"), [
    ("plain", TALK, "multi_turn"),
    ("plain", conversation(("system", "be kind"), ("user", "hi")), "multi_turn"),
    ("transcript", conversation(("user", "hi"), ("tool", "42")), "no_such_turn"),
    ("transcript", conversation(("user", "hi"), ("system", "be kind"), ("user", "hi")), "no_such_turn"),
    ("chat", conversation(("user", "hi"), ("assistant", "bye")), "prompt_ends_with_assistant"),
    ("chat", Prompt.of_text("hi <end> <bot> you"), "special_token_in_text"),
    ("transcript", Prompt.of_text("hi </s>"), "special_token_in_text"),
    ("chat", conversation(("system", "hi"), ("user", "hi")), "template_refuses"),
])
def test_prompts_a_template_cannot_say(name, prompt, reason):
    chat = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT
    with pytest.raises(RowError) as refused:
        template_for(word_tokenizer(chat=chat), name).prompt_ids(prompt)
    assert refused.value.reason == reason


@pytest.mark.parametrize(("name", "response"), [("chat", "bye<end>"), ("chat", "bye <user> hi"), ("plain", "bye</s>you"),
                                                ("plain", "bye</s></s>")])
def test_a_response_that_spells_out_a_special_token_is_refused(name, response):
    with pytest.raises(RowError, match="special_token_in_text"):
        template_for(word_tokenizer(chat=CHAT), name).response_text(response)


@pytest.mark.parametrize(("tokenizer", "name", "message"), [
    ({}, "chat", "no chat_template.*plain or transcript"),
    ({"chat": CHAT, "eos": None}, "plain", "no eos token"),
    ({"chat": CHAT, "eos": None}, "transcript", "no eos token"),
    ({"chat": CHAT.replace("<bot>{% endif %}", "<bot> Answer:{% endif %}")}, "chat", "does not start with its generation prompt"),
    ({"chat": CHAT.replace("'<end>\n'", "'\n'")}, "chat", "could not learn to stop"),
    ({"chat": "{% for m in messages if m.role == 'user' %}{{ m.content }}<end>{% endfor %}"}, "chat", "does not render the assistant"),
    ({"chat": "{{ raise_exception('tools only') }}"}, "chat", "tools only"),
    ({"chat": CHAT.replace("'<bot>')", "'<bot>' if loop.index < 4 else '<bot>so ')")}, "chat", "second question"),
])
def test_tokenizers_that_cannot_serve_are_refused_with_the_way_out(tokenizer, name, message):
    with pytest.raises(ModelError, match=f"(?s){message}"):
        template_for(word_tokenizer(**tokenizer), name)


def test_a_chat_template_without_eos_serves():
    assert template_for(word_tokenizer(chat=CHAT, eos=None), "chat").stop_ids == {END}


def test_prompt_ids_are_those_of_transformers():
    """Parity: what `apply_chat_template` gives generation, for a template that renders BOS."""
    tokenizer = word_tokenizer(chat=CHAT_WITH_BOS, adds_bos=True)
    messages = [{"role": message.role, "content": message.content} for message in TALK.messages]
    theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert template_for(tokenizer, "chat").prompt_ids(TALK) == tuple(theirs)


def test_prompt_and_response_are_the_training_text_of_transformers():
    tokenizer = byte_tokenizer(["hi there"], chat=CHAT)
    template = template_for(tokenizer, "chat")
    messages = [{"role": message.role, "content": message.content} for message in TALK.messages]
    theirs = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": "hi you"}], tokenize=False)
    assert template.prompt_text(TALK) + template.response_text("hi you") + "\n" == theirs


BYTES = byte_tokenizer(["the cat sat on the mat", "Human: Assistant: how are you"], chat=CHAT)
CHARACTERS = st.characters(exclude_categories=["Cs"])
TEXT = st.text(CHARACTERS, min_size=1, max_size=40) | st.sampled_from(["a\u2028b\u0085c", "\ufeffx", "👩\u200d👧"])


@settings(max_examples=60, deadline=None)
@given(response=TEXT, name=st.sampled_from(["chat", "plain", "transcript"]))
def test_decoding_a_response_gives_it_back(response, name):
    if name == "transcript":
        response = response.strip()     # its reader strips turns
    template = template_for(BYTES, name)
    ids = template.encode([template.response_text(response)])[0]
    assert sum(token in template.stop_ids for token in ids) == 1
    assert ids[-1] == template.end_id
    assert template.decode_response([*ids, 0, 0, 77]) == response


def test_a_system_message_comes_first_as_plain_text():
    prompt = conversation(("system", "Be kind."), ("user", "hi"), ("assistant", "hi there"), ("user", "you"))
    template = template_for(word_tokenizer(), "transcript")
    assert template.prompt_text(prompt) == "Be kind.\n\nHuman: hi\n\nAssistant: hi there\n\nHuman: you\n\nAssistant:"
    assert template.response_text("bye") == " bye</s>"


@pytest.mark.skipif(not HH.exists(), reason="the HH-RLHF test set is not here")
def test_hh_transcripts_come_back_byte_for_byte():
    with gzip.open(HH, "rt", encoding="utf-8") as lines:
        originals = [json.loads(line)["chosen"] for line in lines]
    template = template_for(BYTES, "transcript")
    records = load_preferences(DataConfig(train=str(HH), holdout_percent=0)).train
    for record in records:
        original = originals[int(record.source.rpartition(":")[2]) - 1]
        changed = template.prompt_text(record.prompt) + template.response_text(record.chosen) != original + "<eos>"
        # Only turns that carry white space of their own come back without it.
        assert changed == any(turn != f" {turn.strip()}" for turn in re.split(r"\n\n(?:Human|Assistant):", original)[1:])
    assert len(records) > 2200
