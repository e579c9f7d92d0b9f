"""Candidates from JSONL: what is read, and that each line which cannot be used is named with its number and reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from annotation.candidates import Rejected, candidates_of, of_records, read_candidates, read_prompts
from rlhf.errors import DataError
from rlhf.records import Demonstration, Message, PreferenceRecord, Prompt, RankedRecord

GOOD = {"prompt": "p", "responses": ["a", "b"]}


def written(folder: Path, *rows: object, name: str = "candidates.jsonl") -> Path:
    path = folder / name
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return path


def test_the_forms_of_a_row() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    read = candidates_of({"prompt": messages, "responses": [{"text": "a", "model": "m1"}, {"content": "b", "model": "m2"}], "week": 48},
                         source="f:1")
    assert read.prompt == Prompt(messages=(Message(role="system", content="Be brief."), Message(role="user", content="Hi")))
    assert (read.responses, read.models, read.gold, read.source) == (("a", "b"), ("m1", "m2"), (), "f:1")
    assert candidates_of(GOOD | {"models": ["x", "y"], "gold": [2, 1]}, source="").gold == (2, 1)


def test_ranks_are_gold_only_where_gold_is_asked_for() -> None:
    row = GOOD | {"ranks": [2, 1]}
    assert candidates_of(row, source="").gold == ()
    assert candidates_of(row, source="", gold=True).gold == (2, 1)
    with pytest.raises(Rejected, match="bad_gold: ranks must be a list of ranks"):
        candidates_of(GOOD, source="", gold=True)


@pytest.mark.parametrize(("row", "reason", "said"), [
    (b"{", "bad_json", "not JSON"),
    (b"[1]", "bad_json", "not an object but a list"),
    (b'{"prompt": "caf\xe9"}', "bad_encoding", "not UTF-8 at byte 15"),
    (b"[" * 100_000, "bad_json", "not JSON"),
    ({"responses": ["a", "b"]}, "missing_column", "no column 'prompt'; found: 'responses'"),
    ({"prompt": "p", "chosen": "a"}, "missing_column", "no column 'responses'"),
    (GOOD | {"prompt": "  "}, "bad_prompt", "prompt is empty"),
    (GOOD | {"prompt": []}, "bad_prompt", "prompt is empty"),
    (GOOD | {"prompt": None}, "bad_prompt", "prompt is null"),
    (GOOD | {"prompt": [{"role": "user"}]}, "bad_prompt", "message 1 of the prompt is an object with 'role'"),
    (GOOD | {"prompt": [{"role": "boss", "content": "x"}]}, "bad_prompt", "role must be one of"),
    (GOOD | {"prompt": [{"role": ["user"], "content": "x"}]}, "bad_prompt", "message 1 of the prompt"),
    (GOOD | {"prompt": [{"role": "user", "content": 5}]}, "bad_prompt", "message content must be text"),
    (GOOD | {"prompt": [{"role": "user", "content": ""}]}, "bad_prompt", "message 1 of the prompt is empty"),
    (GOOD | {"responses": "a"}, "bad_responses", "responses is text, not a list"),
    (GOOD | {"responses": ["a", 5]}, "bad_responses", "response 2 is a number"),
    (GOOD | {"responses": ["a", {"answer": "b"}]}, "bad_responses", "response 2 is an object with 'answer'"),
    (GOOD | {"responses": ["a"]}, "not_rankable", "1 responses; a ranking task has 2 to 8"),
    (GOOD | {"responses": ["a", "a"]}, "not_rankable", "the same text"),
    (GOOD | {"responses": ["a", ""]}, "not_rankable", "a response is empty"),
    (GOOD | {"responses": [{"text": "a", "model": "m"}, "b"]}, "bad_models", "1 of 2 responses name their model"),
    (GOOD | {"models": ["m"]}, "not_rankable", "2 responses but 1 models"),
    (GOOD | {"models": ["m", None]}, "bad_models", "model 2 is null"),
    (GOOD | {"gold": [1, 2.5]}, "bad_gold", "whole numbers"),
    (GOOD | {"gold": [1]}, "not_rankable", "2 responses but 1 gold"),
    (GOOD | {"responses": ["a", "\ud83d"]}, "bad_text", "response 2 holds U+D83D"),
])
def test_a_bad_line_is_named_and_the_others_are_used(tmp_path: Path, row: object, reason: str, said: str) -> None:
    path = written(tmp_path, GOOD, row, GOOD)
    reading = read_candidates(path)
    assert [found.source for found in reading.found] == [f"{path}:1", f"{path}:3"]
    (reject,) = reading.rejects
    assert (reject.where, reject.reason) == (f"{path}:2", reason)
    assert said in reject.detail
    assert len(reject.detail) < 300


def test_lines_end_at_line_feeds_only_and_a_byte_order_mark_is_none_of_the_text(tmp_path: Path) -> None:
    odd = {"prompt": "p\u2028q\u0085r", "responses": ["a\u2029", "b"]}
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(odd, ensure_ascii=False).encode() + b"\r\n\n" + json.dumps(GOOD).encode())
    reading = read_candidates(path)
    assert [found.source for found in reading.found] == [f"{path}:1", f"{path}:3"]
    assert reading.found[0].prompt == Prompt.of_text("p\u2028q\u0085r")
    assert reading.rejects == ()


def test_a_limit_is_of_rows_good_or_bad(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, b"{", GOOD, GOOD)
    reading = read_candidates(path, limit=3)
    assert (len(reading.found), len(reading.rejects)) == (2, 1)


def test_prompts_alone(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "p"}, {"question": "q"}, {"prompt": [{"role": "user", "content": "r"}], "chosen": "a"})
    reading = read_prompts(path)
    assert [(asked.prompt.messages[0].content, asked.source) for asked in reading.found] == [("p", f"{path}:1"), ("r", f"{path}:3")]
    assert [reject.where for reject in reading.rejects] == [f"{path}:2"]


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_candidates(tmp_path / "none.jsonl")


def test_records_become_candidates_without_their_ranks() -> None:
    one, two = Prompt.of_text("one"), Prompt.of_text("two")
    records = [PreferenceRecord(prompt=one, chosen="good", rejected="bad", source="f:1"),
               RankedRecord(prompt=two, responses=("x", "y", "z"), ranks=(2, 1, 2), source="f:2"),
               Demonstration(prompt=one, response="d1", source="f:3"), Demonstration(prompt=two, response="alone", source="f:4"),
               Demonstration(prompt=one, response="d2", source="f:5")]
    reading = of_records(records)
    assert [(found.responses, found.gold) for found in reading.found] == [(("good", "bad"), ()), (("x", "y", "z"), ()), (("d1", "d2"), ())]
    assert [(reject.where, reject.reason) for reject in reading.rejects] == [("f:4", "not_rankable")]
    assert [found.gold for found in of_records(records[:2], gold=True).found] == [(1, 2), (2, 1, 2)]


json_values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(),
                           lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["prompt", "responses", "models", "gold", "ranks"]), json_values), st.booleans())
def test_any_row_is_candidates_or_named(row: dict[str, object], gold: bool) -> None:
    try:
        found = candidates_of(row, source="f:1", gold=gold)
    except Rejected as error:
        assert error.reason
    else:
        assert 2 <= len(found.responses) <= 8
