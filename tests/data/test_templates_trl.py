"""Chat templates of well-known families: those that serve as they are, those that TRL's training template stands in for, and neither."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.chat_template_utils import (
    deepseekv3_chat_template,
    glm4moe_chat_template,
    glm4moe_training_chat_template,
    llama3_chat_template,
    phi3_chat_template,
    qwen3_chat_template,
)

from rlhf import sft
from rlhf.config import BatchConfig, DataConfig, LoopConfig, ModelConfig, OptimConfig, SftConfig
from rlhf.data.rejects import RowError
from rlhf.data.templates import chat_rendering, template_for
from rlhf.errors import ModelError
from rlhf.fitting import Site
from rlhf.records import Message, Prompt

SPECIAL = ["<eos>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", "<|im_start|>", "<|im_end|>",
           "<|end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]


def tokenizer(chat_template: str | dict[str, str]) -> PreTrainedTokenizerFast:
    """A byte a token, and the special tokens of the families."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    characters = Tokenizer(models.BPE(vocab={sign: index for index, sign in enumerate(alphabet)}, merges=[]))
    characters.pre_tokenizer, characters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=characters, bos_token="<sop>", eos_token="<eos>", additional_special_tokens=SPECIAL[1:],
                                   chat_template=chat_template)


def conversation(*turns: tuple[str, str]) -> Prompt:
    return Prompt(messages=tuple(Message(role=role, content=text) for role, text in turns))


TALK = conversation(("system", "Be kind."), ("user", "hi"), ("assistant", "hello"), ("user", "and?"))
GLM_PROMPT = "[gMASK]<sop><|system|>\nBe kind.<|user|>\nhi<|assistant|>\n<think></think>\nhello<|user|>\nand?<|assistant|>"


def test_qwen3_serves_as_it_is_and_its_empty_thoughts_are_trained_on():
    template = template_for(tokenizer(qwen3_chat_template), "chat")
    assert template.replaced == ""
    assert template.prompt_text(TALK) == ("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
                                          "<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n")
    assert template.response_text("bye") == "<think>\n\n</think>\n\nbye<|im_end|>"
    assert template.decode_response(template.encode([template.response_text("bye")])[0]) == "bye"
    assert template.response_text("<think>\nso\n</think>\n\nbye") == "<think>\nso\n</think>\n\nbye<|im_end|>"


def test_glm_ends_no_turn_of_its_own_and_trl_ends_it():
    own = tokenizer(glm4moe_chat_template)
    with pytest.raises(ModelError, match="could not learn to stop"):
        chat_rendering(own)
    template = template_for(own, "chat")
    assert "could not learn to stop" in template.replaced
    assert template.prompt_text(TALK) == GLM_PROMPT
    assert template.response_text("bye") == "\n<think></think>\nbye<|user|>"
    assert template.end_id == own.convert_tokens_to_ids("<|user|>")
    assert template.decode_response([*template.encode([template.response_text("bye")])[0], 3]) == "bye"
    assert own.chat_template == glm4moe_chat_template
    assert template.tokenizer.chat_template == glm4moe_training_chat_template


def test_the_other_templates_of_a_tokenizer_stay():
    own = tokenizer({"default": glm4moe_chat_template, "tool_use": "{{ messages }}"})
    assert template_for(own, "chat").tokenizer.chat_template == {"default": glm4moe_training_chat_template, "tool_use": "{{ messages }}"}


def test_what_is_saved_generates_as_it_was_trained(tmp_path):
    start = tmp_path / "start"
    own = tokenizer(glm4moe_chat_template)
    config = LlamaConfig(vocab_size=len(own), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    LlamaForCausalLM(config).save_pretrained(start)
    own.save_pretrained(start)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"hi {n}", "response": "bye"}) + "\n" for n in range(4)), encoding="utf-8")
    page = io.StringIO()
    site = Site(folder=tmp_path / "sft", name="sft", model=ModelConfig(name=str(start)), seed=0, start=None, inputs={},
                console=Console(file=page, width=200))
    site.folder.mkdir()
    sft.train(SftConfig(data=DataConfig(train=str(rows), holdout_percent=0), optim=OptimConfig(learning_rate=1e-3),
                        batch=BatchConfig(per_step=2, per_microbatch=2), loop=LoopConfig(max_steps=1)), site)
    assert "TRL's training template of this model family stands in" in page.getvalue()
    assert "could not learn to stop" in json.loads((site.folder / "data.json").read_text())["chat_template_replaced"]
    saved = template_for(AutoTokenizer.from_pretrained(site.folder / "model"), "chat")
    assert (saved.replaced, saved.prompt_ids(TALK)) == ("", template_for(own, "chat").prompt_ids(TALK))
    assert AutoTokenizer.from_pretrained(start).chat_template == glm4moe_chat_template


@pytest.mark.parametrize(("chat_template", "message"), [
    ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "could not learn to stop"),
    ("{% for m in messages %}{{ m.content + 1 }}{% endfor %}", "can only concatenate"),
    ("{% for m in messages %}{{ m.content[7000] }}", "cannot render"),
    ({"tool_use": "{{ messages }}"}, "cannot render"),
    (deepseekv3_chat_template, r"does not start with its generation prompt.*TRL's training template of this family cannot serve either"),
])
def test_templates_that_nobody_can_help_are_refused_for_their_own_fault(chat_template, message):
    with pytest.raises(ModelError, match=f"(?s){message}"):
        template_for(tokenizer(chat_template), "chat")


@pytest.mark.parametrize(("chat_template", "prompt", "lost"), [
    (phi3_chat_template, conversation(("user", "hi"), ("assistant", "hello"), ("tool", "42")), "tool"),
    ("{% for m in messages if m.role != 'system' %}{{ m.content }}<eos>{% endfor %}", TALK, "system"),
    ("{% for m in messages %}{{ m.content + '<eos>' if m.role != 'assistant' or loop.last }}{% endfor %}", TALK, "assistant"),
])
def test_a_message_that_the_template_would_lose_rejects_the_row(chat_template, prompt, lost):
    with pytest.raises(RowError, match=f"template_refuses.*writes no {lost} message"):
        template_for(tokenizer(chat_template), "chat").prompt_text(prompt)


@pytest.mark.parametrize("chat", [
    "{% for m in messages %}{{ m.content.split('</think>')[-1] }}<eos>{% endfor %}",
    "{% for m in messages %}{{ raise_exception('no thoughts') if '</think>' in m.content else m.content }}<eos>{% endfor %}"])
def test_a_response_that_the_template_would_cut_or_refuse_rejects_the_row(chat):
    template = template_for(tokenizer(chat), "chat")
    assert template.response_text("bye") == "bye<eos>"
    with pytest.raises(RowError, match="template_refuses"):
        template.response_text("so</think>bye")


def test_an_error_of_the_template_that_quotes_the_row_is_not_passed_on():
    chat = "{% for m in messages %}{{ raise_exception('odd: ' + m.content) if '?!' in m.content else m.content }}<eos>{% endfor %}"
    with pytest.raises(RowError, match="template_refuses: user: TemplateError") as refused:
        template_for(tokenizer(chat), "chat").prompt_text(conversation(("user", "zebracorn?!")))
    assert "zebracorn" not in str(refused.value)


def test_tool_results_that_a_template_writes_as_json_are_no_loss():
    template = template_for(tokenizer(llama3_chat_template), "chat")
    assert template.replaced == ""
    assert "4\"2" in template.prompt_text(conversation(("user", "hi"), ("assistant", "hello"), ("tool", "4\"2")))
