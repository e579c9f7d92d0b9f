"""The same content gives the same record, whatever layout and container it is written in."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.data.files import Line, _lines_of_hub
from rlhf.data.formats import read
from rlhf.errors import DataError
from rlhf.records import Demonstration, Message, PreferenceRecord, Prompt, RankedRecord, Record

Rows = dict[str, list[dict[str, object]]]
CONTAINERS = ("jsonl", "jsonl.gz", "json", "json.gz", "csv", "csv.gz", "parquet", "parquet.gz")
NUMBERS = count()

# What line- and quote-minded readers trip over; without colons and brackets, so that no role marker arises.
ODD = st.sampled_from("\u2028\u2029\u0085\r\n\t\",';\\ é\u0301😀\x00\x1f")
TEXT = st.text(ODD | st.characters(exclude_categories=["Cs"], exclude_characters=":[<#"), max_size=12)


def say(role: str, text: str) -> dict[str, object]:
    return {"role": role, "content": text}


def said(who: str, text: str) -> dict[str, object]:
    return {"from": who, "value": text}


def one_turn(prompt: str, chosen: str, rejected: str) -> Rows:
    """One pair with a one-message prompt, in every layout that can hold a pair."""
    question, good, bad = say("user", prompt), say("assistant", chosen), say("assistant", rejected)
    tree = {"text": prompt, "role": "prompter", "replies": [{"text": rejected, "role": "assistant", "rank": 1},
                                                            {"text": chosen, "role": "assistant", "rank": 0}]}
    reviews = [{"system": system, "worker_id": worker, "overall-rank": rank} for worker in "123" for system, rank in (("a", 2), ("b", 1))]
    record = PreferenceRecord(prompt=Prompt.of_text(prompt), chosen=chosen, rejected=rejected)
    return {name: [row] for name, row in {
        "preference": {"prompt": prompt, "chosen": chosen, "rejected": rejected},
        "preference, messages": {"prompt": [question], "chosen": [good], "rejected": [bad]},
        "preference, messages and text": {"prompt": [question], "chosen": chosen, "rejected": rejected},
        "preference, text and conversations": {"prompt": prompt, "chosen": [question, good], "rejected": [question, bad]},
        "implicit": {"chosen": f"{prompt}\n{chosen}", "rejected": f"{prompt}\n{rejected}"},
        "implicit, messages": {"chosen": [question, good], "rejected": [question, bad]},
        "transcript": {name: f"\n\nHuman: {prompt}\n\nAssistant: {text}" for name, text in (("chosen", chosen), ("rejected", rejected))},
        "transcript, prompt": {"prompt": f"\n\nHuman: {prompt}\n\nAssistant:", "chosen": f" {chosen}", "rejected": f" {rejected}"},
        "ranked": {"prompt": prompt, "responses": [rejected, chosen], "ranks": [3, 1]},
        "scored": {"prompt": prompt, "responses": [rejected, chosen], "scores": [-0.5, 7.25]},
        "ultrafeedback_overall": {"instruction": prompt, "completions": [{"response": rejected, "overall_score": 2.0},
                                                                         {"response": chosen, "overall_score": 8.5}]},
        "ultrafeedback_fine": {"instruction": prompt, "completions": [{"response": chosen, "fine-grained_score": 4.75},
                                                                      {"response": rejected, "fine-grained_score": 4.5}]},
        "llmbar": {"input": prompt, "output_1": rejected, "output_2": chosen, "label": 2},
        "pandalm": {"instruction": prompt, "input": "", "response1": rejected, "response2": chosen,
                    "annotator1": 2, "annotator2": 2, "annotator3": 2},
        "squality": {"question_text": prompt, "responses": {"a": rejected, "b": chosen}, "reviews": reviews},
        "oasst": {"message_tree_id": "t", "prompt": tree},
        "alpaca": {"instruction": prompt, "input": "", "chosen": chosen, "rejected": rejected},
        "sharegpt": {"conversations": [said("human", prompt)], "chosen": said("gpt", chosen), "rejected": said("gpt", rejected)},
        "records": asdict(record),
    }.items()}


def without_votes(record: Record) -> Record:
    record = replace(record, source="")
    return record if isinstance(record, Demonstration) else replace(record, votes=1, agreement=1.0)


@pytest.mark.parametrize("container", CONTAINERS)
@settings(max_examples=8, deadline=None)
@given(prompt=TEXT, chosen=TEXT, rejected=TEXT)
def test_one_pair_is_one_record_in_every_layout_and_container(write, tmp_path_factory, container, prompt, chosen, rejected):
    prompt, chosen, rejected = f"Q {prompt}?", f"yes{chosen}.", f"no{rejected}."
    expected = PreferenceRecord(prompt=Prompt.of_text(prompt), chosen=chosen, rejected=rejected)
    folder = tmp_path_factory.getbasetemp()
    for name, rows in one_turn(prompt, chosen, rejected).items():
        reading = read([write(folder / f"{next(NUMBERS)}.{container}", rows)])
        assert [without_votes(record) for record in reading.records] == [expected], name
        assert reading.records[0].content_id == expected.content_id
        assert (list(reading.layouts.values()), reading.rows, reading.rejects) == ([name.partition(",")[0]], 1, ())


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_long_conversation_is_one_record_in_every_layout_that_can_hold_it(write, tmp_path, container):
    history = [("system", "Be short."), ("user", "2+2?"), ("assistant", "4"), ("user", "And 3+3?")]
    prompt = Prompt(messages=tuple(Message(role=role, content=text) for role, text in history))
    expected = PreferenceRecord(prompt=prompt, chosen="6", rejected="7")
    turns, names = [say(*turn) for turn in history], {"system": "system", "user": "human", "assistant": "gpt"}
    good, bad = say("assistant", "6"), say("assistant", "7")
    rows: dict[str, dict[str, object]] = {
        "preference": {"prompt": turns, "chosen": [good], "rejected": [bad]},
        "implicit": {"chosen": [*turns, good], "rejected": [*turns, bad]},
        "sharegpt": {"conversations": [said(names[role], text) for role, text in history[1:]], "system": "Be short.",
                     "chosen": said("gpt", "6"), "rejected": said("gpt", "7")},
        "alpaca": {"instruction": "And 3+3?", "system": "Be short.", "history": [["2+2?", "4"]], "chosen": "6", "rejected": "7"},
        "ranked": {"prompt": turns, "responses": ["7", "6"], "ranks": [2, 1]},
        "records": asdict(expected)}
    for name, row in rows.items():
        record, = read([write(tmp_path / f"{name}.{container}", [row])]).records
        assert replace(record, source="") == expected, name


@pytest.mark.parametrize("container", CONTAINERS)
def test_one_demonstration_is_one_record_in_every_layout(write, tmp_path, container):
    expected = Demonstration(prompt=Prompt.of_text("Add.\n\n2 and 2"), response="4")
    rows: dict[str, dict[str, object]] = {
        "completion": {"prompt": "Add.\n\n2 and 2", "completion": "4"},
        "completion, response": {"prompt": [say("user", "Add.\n\n2 and 2")], "response": [say("assistant", "4")]},
        "messages": {"messages": [say("user", "Add.\n\n2 and 2"), say("assistant", "4")]},
        "sharegpt": {"conversations": [said("human", "Add.\n\n2 and 2"), said("gpt", "4")]},
        "alpaca": {"instruction": "Add.", "input": "2 and 2", "output": "4"},
        "oasst": {"message_tree_id": "t", "prompt": {"text": "Add.\n\n2 and 2", "role": "prompter", "replies": [
            {"text": "4", "role": "assistant", "rank": None}]}},
        "records": asdict(expected)}
    for name, row in rows.items():
        record, = read([write(tmp_path / f"{name}.{container}", [row])]).records
        assert replace(record, source="") == expected, name


def test_a_ranking_with_ties_is_one_record_whatever_scale_it_was_judged_on(write, tmp_path):
    expected = RankedRecord(prompt=Prompt.of_text("Which?"), responses=("b", "a", "c"), ranks=(1, 2, 2))
    prompt, responses = "Which?", ["a", "b", "c"]
    rows: dict[str, dict[str, object]] = {
        "competition ranks": {"prompt": prompt, "responses": responses, "ranks": [2, 1, 2]},
        "ranks with gaps": {"prompt": prompt, "responses": responses, "ranks": [5, 3, 5]},
        "scores": {"prompt": prompt, "responses": responses, "scores": [0.5, 0.9, 0.5]},
        "tree": {"message_tree_id": "t", "prompt": {"role": "prompter", "text": prompt, "replies": [
            {"role": "assistant", "text": text, "rank": rank} for text, rank in zip(responses, (1, 0, 1), strict=True)]}},
        "record": asdict(expected)}
    for name, row in rows.items():
        record, = read([write(tmp_path / f"{name}.jsonl", [row])]).records
        assert replace(record, source="") == expected, name


def test_records_survive_a_round_trip_with_their_votes(write, tmp_path):
    judged = {"votes": 3, "agreement": 2 / 3, "smoothing": 0.125, "guideline": "v7"}
    pair = PreferenceRecord(prompt=Prompt.of_text("p"), chosen="a", rejected="b", **judged)
    ranking = RankedRecord(prompt=Prompt.of_text("p"), responses=("a", "b", "c"), ranks=(1, 1, 2), **judged)
    pairs = read([write(tmp_path / "pairs.jsonl", [asdict(pair)])])
    rankings = read([write(tmp_path / "rankings.parquet", [asdict(ranking)])])
    assert [replace(record, source="") for record in (*pairs.records, *rankings.records)] == [pair, ranking]


def test_precomposed_and_decomposed_letters_stay_different(write, tmp_path):
    rows = [{"prompt": "p", "response": "caf\u00e9"}, {"prompt": "p", "response": "cafe\u0301"}]
    first, second = read([write(tmp_path / "twins.jsonl", rows)]).records
    assert first.content_id != second.content_id


def test_messages_split_where_trl_splits_them(write, tmp_path):
    from trl import extract_prompt

    history = [say("user", "a"), say("assistant", "b"), say("user", "c")]
    row = {"chosen": [*history, say("assistant", "d")], "rejected": [*history, say("assistant", "e")]}
    theirs = extract_prompt(row)
    record, = read([write(tmp_path / "pairs.jsonl", [row])]).records
    assert [say(m.role, m.content) for m in record.prompt.messages] == theirs["prompt"]
    assert [[say("assistant", record.chosen)], [say("assistant", record.rejected)]] == [theirs["chosen"], theirs["rejected"]]


@pytest.mark.parametrize(("chosen", "rejected", "split"), [
    ("Sky colour: it is blue", "Sky colour: it is black", ("Sky colour: it is", "blue", "black")),      # not inside a word
    ("Sky? blue", "Sky? black and white", ("Sky?", "blue", "black and white")),
    ("One two", "One twofold", ("One", "two", "twofold")),
    ("One two.\n\nyes", "One two.\n\nno", ("One two.", "yes", "no"))])
def test_texts_that_share_a_beginning_split_at_a_whole_word(write, tmp_path, chosen, rejected, split):
    record, = read([write(tmp_path / "pairs.jsonl", [{"chosen": chosen, "rejected": rejected}])]).records
    assert (record.prompt.messages[0].content, record.chosen, record.rejected) == split


def test_bom_crlf_blank_lines_and_missing_last_newline_are_read(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "p", "response": "a"}\r\n\r\n{"prompt": "p", "response": "b"}')
    reading = read([str(path)])
    assert [(record.response, record.source.rpartition(":")[2]) for record in reading.records] == [("a", "1"), ("b", "3")]
    table = tmp_path / "windows.csv"
    table.write_bytes(b'\xef\xbb\xbfprompt,response\r\np,"a\r\nb"\r\n')
    assert [record.response for record in read([str(table)]).records] == ["a\r\nb"]


def test_a_json_file_with_a_row_a_line_and_a_gz_name_without_gzip_inside(tmp_path):
    lines = tmp_path / "lines.json"
    lines.write_text('{"prompt": "p", "response": "a"}\n{"prompt": "p", "response": "b"}\n')
    unpacked = tmp_path / "unpacked.jsonl.gz"
    unpacked.write_text('{"prompt": "p", "response": "c"}\n')
    assert [record.response for record in read([str(lines), str(unpacked)]).records] == ["a", "b", "c"]


def test_csv_text_that_looks_like_json_stays_text(write, tmp_path):
    rows = [{"prompt": '["not", "messages"]', "response": "{}"}, {"prompt": "[", "response": '{"answer": 1}'}]
    records = read([write(tmp_path / "json.csv", rows)]).records
    assert [{"prompt": record.prompt.messages[0].content, "response": record.response} for record in records] == rows


def test_a_csv_cell_longer_than_the_csv_module_likes(write, tmp_path):
    before = csv.field_size_limit()
    record, = read([write(tmp_path / "long.csv", [{"prompt": "p", "response": "x" * 200_000}])]).records
    assert len(record.response) == 200_000 and csv.field_size_limit() == before


def test_sources_are_read_in_order_hashed_and_limited_together(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, responses in (("b.jsonl", "12"), ("a.jsonl.gz", "345"), ("c.csv", "67")):
        write(Path(name), [{"prompt": "p", "response": response} for response in responses])
    reading = read(["b.jsonl", "a*.gz", "c.csv"])
    assert "".join(record.response for record in reading.records) == "1234567"
    assert reading.files["a.jsonl.gz"] == hashlib.sha256(Path("a.jsonl.gz").read_bytes()).hexdigest()
    assert reading.records[3].source == "a.jsonl.gz:2"
    limited = read(["b.jsonl", "a*.gz", "c.csv"], limit=3)
    assert [record.response for record in limited.records] == ["1", "2", "3"]
    assert (limited.rows, set(limited.files)) == (3, {"b.jsonl", "a.jsonl.gz"})


def test_a_hub_data_set_is_read_by_datasets(write, tmp_path):
    """`datasets.load_dataset` takes a folder where it takes a hub name; the same rows give the same hash."""
    rows = [{"prompt": "p", "chosen": f"good {i}", "rejected": "bad"} for i in range(3)]
    write(tmp_path / "train.jsonl", rows)
    chunks: list[bytes] = []
    lines = list(_lines_of_hub("org/name", str(tmp_path), {"split": "train"}, chunks.append))
    assert lines == [Line(i, row) for i, row in enumerate(rows, 1)]
    assert json.loads(chunks[0]) == rows[0]


@pytest.mark.parametrize(("make", "message"), [
    (lambda folder: folder / "absent.jsonl", "no such file"),
    (lambda folder: folder / "*.parquet", "no file matches"),
    (lambda folder: folder, "is a folder"),
    (lambda folder: _file(folder, "data.txt", b"x"), "rename it"),
    (lambda folder: _file(folder, "empty.jsonl", b"\n"), "holds no rows"),
    (lambda folder: _file(folder, "wide.jsonl", '{"prompt": "p"}'.encode("utf-16")), "UTF-16"),
    (lambda folder: _file(folder, "cut.jsonl.gz", gzip.compress(b'{"prompt": "p", "response": "r"}\n' * 999)[:-9]), "cut or damaged"),
    (lambda folder: _file(folder, "torn.csv", b'prompt,response\np,"r\n'), "bad_csv"),
    (lambda folder: _file(folder, "twice.csv", b"prompt,prompt\np,r\n"), "appears twice"),
    (lambda folder: _file(folder, "one.json", b'{\n"prompt": "p"}'), "holds one object"),
    (lambda folder: _file(folder, "torn.json", b'[{"prompt": "p"},\n{"prom'), "bad_json.*line 2"),
    (lambda folder: _file(folder, "latin.json", b'[\n{"prompt": "caf\xe9"}]'), r"latin.json:2: bad_encoding"),
    (lambda folder: _file(folder, "notes.parquet", b"PAR?"), "not readable as Parquet"),
    (lambda folder: _file(folder, "bad.jsonl", b"{\n[\n"), "none of its 2 rows"),
    ])
def test_a_file_that_cannot_be_read_says_why(tmp_path, make, message):
    with pytest.raises(DataError, match=message):
        read([str(make(tmp_path))])


@pytest.mark.parametrize(("name", "message"), [
    ("nobody/nothing", "cannot be loaded"),
    ("nobody/nothing?split=test&data_dir=part", "cannot be loaded"),
    ("nobody/nothing?shard=1", "unknown option shard; known: split, config, data_dir, revision")])
def test_a_hub_data_set_that_cannot_be_had_says_why(name, message):
    with pytest.raises(DataError, match=message):
        read([name])


def _file(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def test_the_same_file_cannot_be_named_twice(write, tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "p", "response": "r"}])
    with pytest.raises(DataError, match="named twice"):
        read([path, str(tmp_path / "*.jsonl")])
    with pytest.raises(DataError, match="no data source"):
        read([])
