"""Layouts of pairs and demonstrations: a row of columns -> drafts. docs/data.md shows each with an example."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rlhf.data.drafts import Draft, Turn, Turns
from rlhf.data.files import Row
from rlhf.data.rejects import RowError
from rlhf.errors import DataError
from rlhf.records import Role

Drafts = Iterator[Draft | RowError]
STRICT_PAIR = (1.0, 2.0)

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "prompt": ("question", "query", "instruction", "input", "text", "context"),
    "chosen": ("preferred", "winner", "accepted", "better", "positive", "response_j", "chosen_response"),
    "rejected": ("dispreferred", "loser", "worse", "negative", "response_k", "rejected_response"),
    "response": ("output", "answer", "target", "completion", "reply"),
    "output": ("response", "answer", "target", "completion"),
    "messages": ("conversation", "conversations", "dialog", "dialogue", "chat"),
    "conversations": ("conversation", "messages", "dialog"),
    "responses": ("answers", "outputs", "candidates", "completions"),
    "ranks": ("rank", "ranking"),
    "scores": ("score", "ratings", "rating"),
}

_ROLES: dict[str, Role] = {"user": "user", "human": "user", "prompter": "user",
                           "assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant", "chatgpt": "assistant",
                           "system": "system", "tool": "tool", "observation": "tool"}
BEYOND_TEXT = ("tool_calls", "function_call", "reasoning_content", "images", "audio", "videos")
"""Keys of a message that say more than its text; dropped, the model would learn to answer without it."""
NAMES_SHOWN = 12
_TRANSCRIPT_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant): ?")


# Columns

def other_name(column: str, columns: Sequence[str]) -> str | None:
    """A well-known other name of a column, or the name itself in another spelling (" Chosen"), among those that are there."""
    names = (column, *OTHER_NAMES.get(column, ()))
    return next((found for name in names for found in columns if found != column and found.strip().casefold() == name), None)


def missing(column: str, columns: Sequence[str]) -> str:
    """What to say of a column that is not there."""
    other = other_name(column, columns)
    hint = f"; did you mean {other!r}? Rename it to {column!r}" if other else ""
    return f"no column {column!r}; found: {listed(columns)}{hint}"


def listed(names: Iterable[object]) -> str:
    """Names of columns or keys, on one line: the first few, without characters that a terminal would act on."""
    shown = [repr(str(name)[:40])[1:-1] for name in names]
    return ", ".join(shown[:NAMES_SHOWN]) + (f" and {len(shown) - NAMES_SHOWN} more" if len(shown) > NAMES_SHOWN else "") or "none"


def value_of(row: Row, column: str) -> object:
    if column not in row:
        raise RowError("missing_column", missing(column, list(row)))
    if row[column] is None:
        raise RowError("null_field", f"{column} is null")
    return row[column]


def text_of(row: Row, column: str) -> str:
    value = value_of(row, column)
    if not isinstance(value, str):
        raise RowError("not_text", f"{column} is {described(value)}, not text")
    return value


def optional_text(row: Row, column: str) -> str:
    return "" if column not in row or row[column] is None else text_of(row, column)


def list_of(row: Row, column: str) -> list[object]:
    value = value_of(row, column)
    if not isinstance(value, list):
        raise RowError("not_a_list", f"{column} is {described(value)}, not a list")
    return value


def described(value: object) -> str:
    """Type, and the value itself only where it is a number of a usual length."""
    if isinstance(value, bool | int | float) and len(str(value)) <= 24:
        return f"{type(value).__name__} {value}"
    return f"{'an' if type(value).__name__[0] in 'aeiou' else 'a'} {type(value).__name__}"


def texts_of(row: Row, column: str) -> list[str]:
    return [text_of({f"{column}[{i}]": item}, f"{column}[{i}]") for i, item in enumerate(list_of(row, column))]


# Messages

def turn_of(message: object, where: str) -> Turn:
    """{role, content}, ShareGPT's {from, value}, or OASST's {role, text}."""
    if not isinstance(message, Mapping):
        raise RowError("not_a_message", f"{where} is {described(message)}, not a message")
    fields = {key: value for key, value in message.items() if value is not None}
    role_key = "role" if "role" in fields else "from"
    text_key = next((key for key in ("content", "value", "text") if key in fields), "content")
    if role_key not in fields or text_key not in message:
        raise RowError("not_a_message", f"{where} has the keys {listed(message)}; role and content (or from and value) are needed")
    more = [key for key in BEYOND_TEXT if fields.get(key)]
    if more:
        raise RowError("beyond_text", f"{where} has {more[0]}, which no template here is given")
    role = fields[role_key]
    if not isinstance(role, str) or role not in _ROLES:
        raise RowError("bad_role", f"{where} has a role that is none of {', '.join(_ROLES)}")
    return Turn(_ROLES[role], text_of({f"{where}.{text_key}": message[text_key]}, f"{where}.{text_key}"))


def _conversation(value: object, where: str) -> Turns:
    """A list of messages, one message, or {"messages": [...]}."""
    if isinstance(value, Mapping) and "messages" in value:
        value = value["messages"]
    if isinstance(value, Mapping):
        return (turn_of(value, where),)
    if not isinstance(value, list):
        raise RowError("not_a_list", f"{where} is {described(value)}, not a list of messages")
    return tuple(turn_of(message, f"{where}[{index}]") for index, message in enumerate(value))


def prompt_turns(row: Row, column: str = "prompt") -> Turns:
    value = value_of(row, column)
    if isinstance(value, list | Mapping):
        turns = _conversation(value, column)
        if not turns:
            raise RowError("empty_prompt", f"{column} is an empty list")
        return turns
    return (Turn("user", text_of(row, column)),)


def response_turns(row: Row, column: str) -> Turns:
    value = value_of(row, column)
    return _conversation(value, column) if isinstance(value, list | Mapping) else (Turn("assistant", text_of(row, column)),)


def user_turn(prompt: str) -> Turns:
    return (Turn("user", prompt),)


def assistant_turns(texts: Sequence[str]) -> tuple[Turns, ...]:
    return tuple((Turn("assistant", text),) for text in texts)


# Pairs

def _is_whole_conversation(turns: Turns) -> bool:
    return bool(turns) and turns[0].role != "assistant"


def read_preference(row: Row) -> Drafts:
    prompt, chosen, rejected = prompt_turns(row), response_turns(row, "chosen"), response_turns(row, "rejected")
    if isinstance(row["prompt"], str) and _is_whole_conversation(chosen) and _is_whole_conversation(rejected):
        if prompt[0] not in chosen:     # UltraFeedback-binarized: the prompt column repeats a user message of both conversations
            raise RowError("prompt_mismatch", "chosen is a whole conversation, and no user message of it is the prompt")
        yield Draft(None, (chosen, rejected), STRICT_PAIR)
    else:
        yield Draft(prompt, (chosen, rejected), STRICT_PAIR)


def read_implicit(row: Row) -> Drafts:
    chosen, rejected = value_of(row, "chosen"), value_of(row, "rejected")
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise RowError("mixed_types", f"chosen is {described(chosen)}, rejected is {described(rejected)}")
    if isinstance(chosen, list):
        yield Draft(None, (_conversation(chosen, "chosen"), _conversation(rejected, "rejected")), STRICT_PAIR)
    else:
        prompt, texts = split_texts(text_of(row, "chosen"), text_of(row, "rejected"))
        yield Draft(user_turn(prompt), assistant_turns(texts), STRICT_PAIR)


def split_texts(chosen: str, rejected: str) -> tuple[str, tuple[str, str]]:
    """The shared beginning, cut back to a whole word, and the rests; the white space between them belongs to neither."""
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        if not text.strip():
            raise RowError("empty_response", f"{name} is empty")
    if chosen == rejected:
        raise RowError("identical", "chosen and rejected are the same text")
    cut = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), min(len(chosen), len(rejected)))
    if not any(text[cut:cut + 1].isspace() for text in (chosen, rejected)):
        while cut and not chosen[cut - 1].isspace():
            cut -= 1
    prompt = chosen[:cut].rstrip()
    if not prompt:
        raise RowError("empty_prompt", "chosen and rejected do not begin with the same word, so there is no prompt")
    return prompt, (chosen[cut:].lstrip(), rejected[cut:].lstrip())


def read_transcript(row: Row) -> Drafts:
    """Anthropic's HH-RLHF. With a prompt column, chosen and rejected are the last turns only."""
    if "prompt" not in row:
        conversations = tuple(transcript_turns(text_of(row, name), name) for name in ("chosen", "rejected"))
        yield Draft(None, conversations, STRICT_PAIR)
        return
    prompt = transcript_turns(text_of(row, "prompt"), "prompt")
    if prompt[-1] == Turn("assistant", ""):     # "...\n\nAssistant:" only opens the turn of the response
        prompt = prompt[:-1]
    yield Draft(prompt, assistant_turns([text_of(row, name).removeprefix(" ") for name in ("chosen", "rejected")]), STRICT_PAIR)


def transcript_turns(text: str, where: str) -> Turns:
    """"\\n\\nHuman: ...\\n\\nAssistant: ..."; the one space after the colon belongs to the layout, all other white space to the text."""
    before, *parts = _TRANSCRIPT_TURN.split(text)
    if before or not parts:
        raise RowError("bad_transcript", f"{where} does not begin with 'Human:' or 'Assistant:'")
    return tuple(Turn("user" if who == "Human" else "assistant", said) for who, said in zip(parts[::2], parts[1::2], strict=True))


def is_transcript(rows: Sequence[Row]) -> bool:
    column = "prompt" if all("prompt" in row for row in rows) else "chosen"
    texts = [row.get(column) for row in rows]
    begins = [isinstance(text, str) and _TRANSCRIPT_TURN.match(text) is not None for text in texts]
    if any(begins) and not all(begins):
        raise DataError(f"{sum(begins)} of the first {len(begins)} rows begin with 'Human:' or 'Assistant:' in {column!r}, the others "
                        "do not. Say which is meant: format: transcript, preference or implicit")
    return all(begins)


# Demonstrations, and the pairs of their families

def read_completion(row: Row) -> Drafts:
    yield Draft(prompt_turns(row), (response_turns(row, "completion" if "completion" in row else "response"),))


def is_completion(rows: Sequence[Row]) -> bool:
    if any(isinstance(row.get("label"), bool) for row in rows):
        raise DataError("a true/false column 'label' beside responses marks some of them as bad (unpaired preferences), which no reader "
                        "takes. Keep the good rows, or say format: completion to read every row as a demonstration")
    return True


def read_messages(row: Row) -> Drafts:
    yield Draft(None, (_conversation(value_of(row, "messages"), "messages"),))


def read_sharegpt(row: Row) -> Drafts:
    conversation = _conversation(value_of(row, "conversations"), "conversations")
    system = optional_text(row, "system")
    opening = (Turn("system", system),) if system else ()
    if "chosen" in row or "rejected" in row:
        yield Draft(opening + conversation, (response_turns(row, "chosen"), response_turns(row, "rejected")), STRICT_PAIR)
    else:
        yield Draft(None, (opening + conversation,))


def instruction_text(row: Row) -> str:
    instruction, more = text_of(row, "instruction"), optional_text(row, "input")
    return f"{instruction}\n\n{more}" if more else instruction


def read_alpaca(row: Row) -> Drafts:
    system, turns = optional_text(row, "system"), []
    if system:
        turns.append(Turn("system", system))
    for index, exchange in enumerate(list_of(row, "history") if row.get("history") else ()):
        if not isinstance(exchange, list) or len(exchange) != 2:
            raise RowError("not_a_message", f"history[{index}] is not a pair of question and answer")
        question, answer = texts_of({f"history[{index}]": exchange}, f"history[{index}]")
        turns += [Turn("user", question), Turn("assistant", answer)]
    prompt = (*turns, Turn("user", instruction_text(row)))
    if "chosen" in row or "rejected" in row:
        yield Draft(prompt, (response_turns(row, "chosen"), response_turns(row, "rejected")), STRICT_PAIR)
    else:
        yield Draft(prompt, assistant_turns([text_of(row, "output")]))
