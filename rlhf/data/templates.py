"""From messages to the text and the ids a model is given, and where a response begins and ends.

    chat         the tokenizer's own chat template, or TRL's training template of its family where the own one cannot serve; a response
                 ends with the template's end-of-turn token
    plain        one user message, its text as it is; a response ends with eos
    transcript   "\\n\\nHuman: ...\\n\\nAssistant:" turns, as in Anthropic's HH files; a response ends with eos

Training and generation share one rendering: `prompt_ids` is what generation is given, and every response starts where those ids
end. BOS stands once in front (from the template, or else where the tokenizer itself would put it), the end token once at the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from rlhf.config import TemplateName
from rlhf.data.rejects import RowError
from rlhf.data.trl_templates import TEMPLATE_FAULTS, with_training_template
from rlhf.errors import ModelError
from rlhf.records import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRL_STANDS_IN = "TRL's training template of this model family stands in for the tokenizer's own, which cannot serve in training"
ALTERNATIVES = "Set data.template to plain or transcript, or give the tokenizer a chat_template"
QUOTED_CHARACTERS = 8
"""A template's error that holds so much of a message is not passed on: rejects quote no text."""
# Letters only, so that no template trims them and no pair of them forms a word that a template could hold.
PROBE_QUESTION, PROBE_ANSWER = "qzjxv", "vxjzq"


class Rendering(Protocol):
    """Text in front of a response, and the response with whatever surrounds it."""

    @property
    def end(self) -> str: ...

    def prompt_text(self, prompt: Prompt) -> str: ...

    def response_text(self, response: str) -> str: ...

    def response_of(self, text: str) -> str:
        """The response inside a rendered or generated text that has lost its end token."""
        ...


@dataclass(frozen=True)
class ChatRendering:
    tokenizer: PreTrainedTokenizerBase
    before: str
    """A fixed question with its generation prompt, behind which `response_text` renders: templates may trim or rewrite an answer."""
    end: str
    lead: str
    """What the template writes between the generation prompt and the response; mostly nothing."""
    trail: str
    """What it writes between the response and the end-of-turn token; mostly nothing."""
    rest: int
    """How many characters follow the end-of-turn token, SmolLM2's "\\n" for example; they belong to the next turn and are cut."""
    left_out: frozenset[str]
    """Roles whose messages the template loses without an error."""

    def prompt_text(self, prompt: Prompt) -> str:
        roles = [message.role for message in prompt.messages]
        if roles[-1] == "assistant":
            raise RowError("prompt_ends_with_assistant", "the last message is the assistant's, so there is nothing to respond to")
        lost = sorted(self.left_out.intersection(roles))
        if lost:
            raise RowError("template_refuses", f"{'/'.join(roles)}: the chat template writes no {'/'.join(lost)} message")
        return render_chat(self.tokenizer, [(message.role, message.content) for message in prompt.messages], generate=True)

    def response_text(self, response: str) -> str:
        whole = render_chat(self.tokenizer, [("user", PROBE_QUESTION), ("assistant", response)], generate=False)
        text = whole[len(self.before):len(whole) - self.rest]
        if not (whole.startswith(self.before) and text.endswith(self.end)):
            raise RowError("template_refuses", "the chat template renders this response without its generation prompt or end of turn")
        if "".join(response.split()) not in "".join(text.split()):
            raise RowError("template_refuses", "the chat template loses a part of this response, or rewrites it")
        return text

    def response_of(self, text: str) -> str:
        return text.removeprefix(self.lead).removesuffix(self.trail)


@dataclass(frozen=True)
class PlainRendering:
    end: str

    def prompt_text(self, prompt: Prompt) -> str:
        if [message.role for message in prompt.messages] != ["user"]:
            roles = "/".join(message.role for message in prompt.messages)
            raise RowError("multi_turn", f"the plain template takes one user message, got {roles}; use chat or transcript")
        return prompt.messages[0].content

    def response_text(self, response: str) -> str:
        # Texts that were formatted elsewhere may carry their eos already; it must stand once.
        return response if response.endswith(self.end) else response + self.end

    def response_of(self, text: str) -> str:
        return text


@dataclass(frozen=True)
class TranscriptRendering:
    """Anthropic's HH layout (Bai et al. 2022, arXiv:2204.05862). Turns carry no outer whitespace: their reader has stripped it."""

    end: str

    def prompt_text(self, prompt: Prompt) -> str:
        text = ""
        for index, message in enumerate(prompt.messages):
            match message.role:
                case "user":
                    text += f"\n\nHuman: {message.content}"
                case "assistant":
                    text += f"\n\nAssistant: {message.content}"
                case "system" if index == 0:
                    text += message.content
                case role:
                    raise RowError("no_such_turn", f"a transcript has no {role} message in position {index + 1}; use chat")
        return text + "\n\nAssistant:"

    def response_text(self, response: str) -> str:
        return f" {response}{self.end}"

    def response_of(self, text: str) -> str:
        return text.strip()


@dataclass(frozen=True)
class Template:
    """A rendering and its tokenizer. Build it with `template_for`."""

    name: TemplateName
    tokenizer: PreTrainedTokenizerBase
    """As it was given; a copy with another chat template where `replaced` says so. Save it with what was trained."""
    rendering: Rendering
    end_id: int
    """The token every whole response ends with."""
    head: tuple[int, ...]
    """What the tokenizer itself puts in front of a text: BOS, or nothing."""
    control: re.Pattern[str]
    """Special tokens spelled out in a text: tokenised, they would forge turns and endings."""
    replaced: str = ""
    """Why TRL's training template stands in for the tokenizer's own chat template; empty where the own one serves."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Generation stops at any of these."""
        eos = self.tokenizer.eos_token_id
        return frozenset({self.end_id} if eos is None else {self.end_id, eos})

    def prompt_text(self, prompt: Prompt) -> str:
        """The text in front of the response. `plain` texts may hold special tokens on purpose, elsewhere they are refused."""
        if self.name != "plain":
            for message in prompt.messages:
                self._refuse_control_tokens(message.content)
        return self.rendering.prompt_text(prompt)

    def response_text(self, response: str) -> str:
        self._refuse_control_tokens(response.removesuffix(self.rendering.end) if self.name == "plain" else response)
        return self.rendering.response_text(response)

    def prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Exactly what generation is given."""
        return self.with_head(self.encode([self.prompt_text(prompt)])[0])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of whole texts in one batched call, nothing added."""
        if not texts:
            return []
        ids: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False, padding=False, truncation=False,
                                              return_attention_mask=False, return_token_type_ids=False, verbose=False)["input_ids"]
        return ids

    def tail_of(self, prompt_text: str) -> str:
        """The prompt from its last special token on, or all of it. Tokenizers split texts at special tokens before anything else, so
        what precedes this tail cannot change the ids of a response behind it."""
        starts = [found.start() for found in self.control.finditer(prompt_text)]
        return prompt_text[starts[-1]:] if starts else prompt_text

    def with_head(self, ids: Sequence[int]) -> tuple[int, ...]:
        """A template that renders BOS has brought it already."""
        ids = tuple(ids)
        return ids if ids[:len(self.head)] == self.head else self.head + ids

    def head_length(self, prompt_ids: Sequence[int]) -> int:
        """How many ids in front must survive a cut on the left: BOS, where the prompt starts with it."""
        if self.head and tuple(prompt_ids[:len(self.head)]) == self.head:
            return len(self.head)
        bos = self.tokenizer.bos_token_id
        return int(bos is not None and bool(prompt_ids) and prompt_ids[0] == bos)

    def decode_response(self, ids: Sequence[int]) -> str:
        """The response's text, up to the first stop token. The inverse of `response_text` and tokenising."""
        end = next((index for index, token in enumerate(ids) if token in self.stop_ids), len(ids))
        text: str = self.tokenizer.decode(list(ids[:end]), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return self.rendering.response_of(text)

    def _refuse_control_tokens(self, text: str) -> None:
        found = self.control.search(text)
        if found:
            raise RowError("special_token_in_text", f"the text spells out the special token {found.group()!r}")


def template_for(tokenizer: PreTrainedTokenizerBase, name: TemplateName) -> Template:
    """Raises ModelError where the tokenizer cannot serve: no chat template, no end token, training text unlike generation text."""
    replaced = ""
    match name:
        case "chat":
            rendering: Rendering
            rendering, replaced = chat_rendering_or_trl(tokenizer)
            tokenizer = rendering.tokenizer
        case "plain":
            rendering = PlainRendering(end=required_eos(tokenizer, name))
        case "transcript":
            rendering = TranscriptRendering(end=required_eos(tokenizer, name))
    ends = tokenizer(rendering.end, add_special_tokens=False)["input_ids"]
    if len(ends) != 1:
        raise ModelError(f"the end token {rendering.end!r} becomes the {len(ends)} tokens {ends}; it must be one. Add it to the tokenizer "
                         "with add_special_tokens")
    return Template(name=name, tokenizer=tokenizer, rendering=rendering, end_id=ends[0], head=added_in_front(tokenizer),
                    control=any_of({*special_tokens(tokenizer), rendering.end}), replaced=replaced)


def chat_rendering_or_trl(tokenizer: PreTrainedTokenizerBase) -> tuple[ChatRendering, str]:
    """With the tokenizer's own chat template and "", or with TRL's training template and the reason why the own one cannot serve."""
    if tokenizer.chat_template is None:
        raise ModelError(f"the tokenizer {tokenizer.name_or_path!r} has no chat_template, but data.template is chat. {ALTERNATIVES}.")
    try:
        return chat_rendering(tokenizer), ""
    except ModelError as unusable:
        patched = with_training_template(tokenizer)
        if patched is None:
            raise
        try:
            return chat_rendering(patched), str(unusable)
        except ModelError as also_unusable:
            raise ModelError(f"{unusable}\nTRL's training template of this family cannot serve either: {also_unusable}") from unusable


def chat_rendering(tokenizer: PreTrainedTokenizerBase) -> ChatRendering:
    """Renders one question and answer to learn where the template ends a turn, and that training extends generation."""
    try:
        before = render_chat(tokenizer, [("user", PROBE_QUESTION)], generate=True)
        whole = render_chat(tokenizer, [("user", PROBE_QUESTION), ("assistant", PROBE_ANSWER)], generate=False)
    except RowError as error:
        raise ModelError(f"the chat template cannot render one user message with its answer: {error.detail}. {ALTERNATIVES}.") from error
    if not whole.startswith(before):
        raise ModelError("the chat template renders a training text that does not start with its generation prompt, so a model would be "
                         f"trained on another text than it is asked to continue.\n  generation: {before!r}\n  training:   {whole!r}\n"
                         f"With add_generation_prompt the template must open the assistant's turn as it does in training. {ALTERNATIVES}.")
    lead, found, tail = whole[len(before):].partition(PROBE_ANSWER)
    if not found:
        raise ModelError(f"the chat template does not render the assistant's message: {whole!r}. {ALTERNATIVES}.")
    end = any_of(token for token in tokenizer.get_added_vocab() if token.strip()).search(tail)
    if end is None:
        raise ModelError(f"the chat template ends an assistant's turn with {tail!r}, which holds no token of its own, so a model could "
                         f"not learn to stop. End the turn with {{{{ eos_token }}}} in the template. {ALTERNATIVES}.")
    rendering = ChatRendering(tokenizer=tokenizer, before=before, end=end.group(), lead=lead, trail=tail[:end.start()],
                              rest=len(tail) - end.end(), left_out=roles_left_out(tokenizer))
    require_same_in_later_turns(rendering)
    return rendering


def require_same_in_later_turns(rendering: ChatRendering) -> None:
    """`response_text` renders behind one question; a template that answers later questions in another way would be misread."""
    question, answer = ("user", PROBE_QUESTION), ("assistant", PROBE_ANSWER)
    try:
        before = render_chat(rendering.tokenizer, [question, answer, question], generate=True)
        whole = render_chat(rendering.tokenizer, [question, answer, question, answer], generate=False)
    except RowError:
        return      # a template for single questions: rows with more turns are rejected, each with its reason
    expected = before + rendering.response_text(PROBE_ANSWER)
    if not whole.startswith(expected):
        raise ModelError("the chat template renders the answer to a second question in another way than the first.\n"
                         f"  expected: {expected!r}\n  rendered: {whole!r}\n{ALTERNATIVES}.")


def roles_left_out(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Roles whose messages vanish (Phi-3 writes no tool messages): the model would be asked something else than the row says."""
    question, answer = ("user", PROBE_QUESTION), ("assistant", PROBE_QUESTION)
    probes = {"system": [("system", PROBE_ANSWER), question],
              "assistant": [question, ("assistant", PROBE_ANSWER), question],
              "tool": [question, answer, ("tool", PROBE_ANSWER)]}
    return frozenset(role for role, turns in probes.items() if _vanishes(PROBE_ANSWER, turns, tokenizer))


def _vanishes(text: str, turns: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerBase) -> bool:
    try:
        return text not in render_chat(tokenizer, turns, generate=True)
    except RowError:
        return False    # refused, and so will be the rows


def render_chat(tokenizer: PreTrainedTokenizerBase, turns: Sequence[tuple[str, str]], *, generate: bool) -> str:
    """Raises RowError where the template raises, on purpose or by a fault of its own."""
    try:
        text: str = tokenizer.apply_chat_template([{"role": role, "content": content} for role, content in turns], tokenize=False,
                                                  add_generation_prompt=generate)
    except TEMPLATE_FAULTS as error:
        quotes = any(content in str(error) for _, content in turns if len(content) >= QUOTED_CHARACTERS)
        found = type(error).__name__ if quotes else str(error)
        raise RowError("template_refuses", f"{'/'.join(role for role, _ in turns)}: {found}") from error
    return text


def required_eos(tokenizer: PreTrainedTokenizerBase, name: TemplateName) -> str:
    eos: str | None = tokenizer.eos_token
    if eos is None:
        raise ModelError(f"the tokenizer {tokenizer.name_or_path!r} has no eos token, and the {name} template ends a response with it. "
                         "Set tokenizer.eos_token, or use data.template=chat with a template that ends its turns.")
    return eos


def added_in_front(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """What the tokenizer puts in front of every text. What it appends is left out: the end token is the template's business."""
    # A small vocabulary may hold none of the probe's letters; then its own first words serve.
    for text in chain([PROBE_QUESTION], (tokenizer.decode([token]) for token in range(len(tokenizer)))):
        plain = tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = tokenizer(text, add_special_tokens=True)["input_ids"]
        starts = (start for start in range(len(whole) - len(plain) + 1) if whole[start:start + len(plain)] == plain)
        if plain and (start := next(starts, None)) is not None:
            return tuple(whole[:start])
    raise ModelError(f"the tokenizer {tokenizer.name_or_path!r} turns no text into tokens that it keeps when it adds special ones")


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return added | set(tokenizer.all_special_tokens)


def any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the tokens, the longest first; never, where there are none."""
    ordered = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")
