"""Files and rows that nobody writes on purpose: each ends as a record, a counted reject or an error that names the file."""

from __future__ import annotations

import gzip
import json
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.data.detect import LAYOUTS, NAMES
from rlhf.data.drafts import REPAIRS
from rlhf.data.formats import as_demonstrations, as_preferences, read
from rlhf.errors import DataError

GOOD = {"prompt": "a good question", "chosen": "good", "rejected": "bad"}
SCORED = {"prompt": "q", "responses": ["a", "b"], "scores": [1, 2]}
SECRET = "zebracorn"


def lines(*rows: object) -> bytes:
    return b"".join((row if isinstance(row, str) else json.dumps(row)).encode("utf-8", "surrogatepass") + b"\n" for row in rows)


def reading_of(path, content: bytes, **options):
    path.write_bytes(content)
    reading = read([str(path)], **options)
    assert reading.rows == len(reading.records) + len(reading.rejects) + reading.repaired.get("drop_duplicates", 0)
    return reading


NESTED = '{"messages":' * 700 + '"x"' + "}" * 700
ODD_ROWS: list[tuple[str, bytes, str]] = [
    ("huge number", lines(SCORED, SCORED | {"scores": [1, 10**400]}), "bad_score"),
    ("NaN", lines(SCORED, SCORED | {"scores": [1, float("nan")]}), "bad_score"),
    ("5,000 digits", lines(SCORED, '{"prompt": "q", "responses": ["a", "b"], "scores": [1, ' + "9" * 5000 + "]}"), "bad_json"),
    ("deep JSON", lines(GOOD, '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + ', "chosen": "a", "rejected": "b"}'), "bad_json"),
    ("messages in messages", lines(GOOD, f'{{"prompt": {NESTED}, "chosen": "a", "rejected": "b"}}'), "not_a_message"),
    ("key twice", lines(GOOD, '{"prompt": "p", "prompt": "q", "chosen": "a", "rejected": "b"}'), "bad_json"),
    ("schema that is a list", lines(GOOD | {"schema": []}, GOOD | {"schema": [], "chosen": ""}), "empty_response"),
    ("tool calls", lines(GOOD, GOOD | {"chosen": [{"role": "assistant", "content": "a", "tool_calls": [{"id": 1}]}]}), "beyond_text"),
    ("image part", lines(GOOD, GOOD | {"prompt": [{"role": "user", "content": [{"type": "image_url"}]}]}), "not_text"),
    ("only a system message", lines(GOOD, GOOD | {"prompt": [{"role": "system", "content": "Be kind."}]}), "empty_prompt"),
]


@pytest.mark.parametrize(("content", "reason"), [(content, reason) for _, content, reason in ODD_ROWS], ids=[name for name, *_ in ODD_ROWS])
def test_an_odd_row_is_rejected_and_the_others_are_read(tmp_path, content, reason):
    reading = reading_of(tmp_path / "rows.jsonl", content)
    assert ([reject.reason for reject in reading.rejects], len(reading.records)) == ([reason], 1)
    assert reading.rejects[0].where.endswith(":2")
    assert len(reading.rejects[0].detail) < 300


@pytest.mark.parametrize(("name", "content", "message"), [
    ("empty.jsonl", b"", "holds no rows"), ("empty.json", b"", "holds no rows"), ("empty.csv", b"", "holds no rows"),
    ("blank.jsonl", b"\n \n\t\n", "holds no rows"), ("none.json", b"[]", "holds no rows"), ("one.json", b"3", "an array of rows is needed"),
    ("empty.parquet", b"", "not readable as Parquet"), ("torn.parquet", b"PAR1garbagePAR1", "not readable as Parquet"),
    ("cut.jsonl.gz", gzip.compress(lines(GOOD) * 9)[:-9], "cut or damaged after row 9"),
    ("more.jsonl.gz", gzip.compress(lines(GOOD)) + b"more", "cut or damaged after row 1"),
    ("semicolons.csv", b"prompt;chosen;rejected\na;b;c\n", r"separated by ';'"),
    ("tabs.csv", b"prompt\tchosen\trejected\na\tb\tc\n", r"separated by '\\t'"),
    ("spaces.csv", b"prompt, chosen, rejected\na,b,c\n", "did you mean ' chosen'"),
    ("mac.csv", b"prompt,chosen,rejected\ra,b,c\r", "line ends"),
    ("twice.csv", b"prompt,chosen,chosen\na,b,c\n", "appears twice: prompt, chosen, chosen"),
    ("control.jsonl", lines({"\x1b[2J\ud83d": 1}), r"columns: \\x1b\[2J\\ud83d\."),
])
def test_a_file_that_cannot_be_read_is_one_error_with_its_name(tmp_path, name, content, message):
    with pytest.raises(DataError, match=message) as refused:
        reading_of(tmp_path / name, content)
    assert name in str(refused.value)


@pytest.mark.parametrize(("table", "message"), [
    (pyarrow.table({"prompt": pyarrow.Array.from_buffers(pyarrow.string(), 1, [
        None, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"\xff\xfe")]), "chosen": ["a"], "rejected": ["b"]}), "utf-8"),
    (pyarrow.Table.from_arrays([pyarrow.array([text]) for text in "qab"], names=["prompt", "chosen", "chosen"]), "appears twice"),
    (pyarrow.table({"prompt": ["q"], "chosen": ["a"], "rejected": ["b"], "when": pyarrow.array([2**62], pyarrow.timestamp("us"))}),
     "date value out of range"),
])
def test_parquet_that_python_cannot_hold(tmp_path, table, message):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(DataError, match=rf"rows\.parquet.*{message}"):
        read([str(path)])


def test_parquet_categories_lists_and_structs(tmp_path):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({
        "prompt": pyarrow.array(["q"]).dictionary_encode(), "chosen": [[{"role": "assistant", "content": "a"}]],
        "rejected": [[{"role": "assistant", "content": "b"}]]}), path)
    assert [(record.chosen, record.rejected) for record in read([str(path)]).records] == [("a", "b")]


def test_messages_that_pandas_printed_into_a_csv_file_are_no_text(tmp_path):
    printed = "\"[{'role': 'assistant', 'content': 'a'}]\""
    reading = reading_of(tmp_path / "rows.csv", f"prompt,chosen,rejected,more\nq,{printed},b,\nq,a,b,{printed}\n".encode())
    assert [(reject.where[-1], reject.reason) for reject in reading.rejects] == [("1", "bad_csv")]
    assert [record.chosen for record in reading.records] == ["a"]


@pytest.mark.parametrize(("source", "message"), [
    ("", "no name"), ("x" * 5000, "no name of a file"), ("~nobody-here/x.jsonl", "no name of a file"), ("a\0b.jsonl", "no such file"),
    ("data/**.jsonl", "no pattern"), ("no*thing.jsonl", "no file matches"), (".", "is a folder")])
def test_names_that_are_no_files(source, message):
    with pytest.raises(DataError, match=message):
        read([source])


def test_one_file_under_two_names_is_named_twice_and_a_dead_link_is_no_file(tmp_path):
    rows, link, dead = tmp_path / "rows.jsonl", tmp_path / "link.jsonl", tmp_path / "dead.jsonl"
    rows.write_bytes(lines(GOOD))
    link.symlink_to(rows)
    with pytest.raises(DataError, match=r"link\.jsonl are one file"):
        read([str(rows), str(link)])
    link.unlink()
    dead.symlink_to(tmp_path / "gone.jsonl")
    with pytest.raises(DataError, match=r"dead\.jsonl is a link to a file that is not there"):
        read([str(tmp_path / "*.jsonl")])


def test_the_records_do_not_depend_on_the_order_of_the_files(write, tmp_path):
    files = [write(tmp_path / f"{name}.jsonl", [GOOD | {"chosen": text} for text in texts]) for name, texts in (("a", "xyz"), ("b", "zuv"))]
    forward, backward, again = read(files), read(files[::-1]), read(files)
    assert forward == again
    assert {record.content_id for record in forward.records} == {record.content_id for record in backward.records}
    assert (len(forward.records), [reject.reason for reject in backward.rejects]) == (5, ["duplicate"])


def test_a_long_line_and_a_long_row_of_columns(tmp_path):
    long = reading_of(tmp_path / "long.jsonl", lines(GOOD | {"chosen": "word " * 2_000_000}))
    assert len(long.records[0].chosen) == 10_000_000
    wide = reading_of(tmp_path / "wide.jsonl", lines(GOOD, {f"column {i}": i for i in range(5000)}))
    assert [reject.reason for reject in wide.rejects] == ["missing_column"]
    assert wide.rejects[0].detail.endswith("and 4988 more")


SCALARS = st.sampled_from([None, True, 0, 1, 2, -1, 1.5, 10**400, 1e308, float("nan"), float("inf"), SECRET, f"a {SECRET}",
                           f"{SECRET} b", "", " ", f"\n\nHuman: {SECRET}\n\nAssistant: b",
                           f"\ud83d{SECRET}", "\u2028", "\0", "e\u0301", "\u00e9"])
MESSAGES = st.fixed_dictionaries({
    "role": st.sampled_from(["user", "assistant", "system", "tool", SECRET, None, ["user"]]), "content": SCALARS}, optional={
    "rank": SCALARS, "deleted": SCALARS, "message_id": SCALARS, "tool_calls": SCALARS})
VALUES = st.recursive(SCALARS | MESSAGES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    st.sampled_from(["role", "content", "messages", "replies", "system", "worker_id", "overall-rank", "response", "overall_score"]), inner,
    max_size=3), max_leaves=8)
ROWS = st.sampled_from([signature for layout in LAYOUTS for signature in layout.signatures]).flatmap(
    lambda signature: st.fixed_dictionaries(dict.fromkeys(sorted(signature), VALUES)))


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(ROWS | VALUES, min_size=1, max_size=4), layout=st.sampled_from(("auto", *NAMES)), repair=st.sets(st.sampled_from(
    sorted(REPAIRS))), twice=st.booleans())
def test_whatever_a_row_holds_it_is_counted_once_and_never_quoted(tmp_path_factory, rows, layout, repair, twice):
    path = tmp_path_factory.getbasetemp() / "rows.jsonl"
    try:
        reading = reading_of(path, lines(*rows, *(rows if twice else ())), layout=layout, repair=tuple(repair))
    except DataError as refused:
        assert type(refused) is DataError
        assert SECRET not in str(refused)
        return
    assert [reject for reject in reading.rejects if SECRET in reject.detail] == []
    assert max(Counter(record.content_id for record in reading.records).values(), default=1) == 1
    demonstrations, refused_pairs = as_demonstrations(reading), as_preferences(reading).rejects
    assert len(demonstrations.kept) + sum(demonstrations.merged.values()) == len(reading.records)
    assert [reject for reject in refused_pairs if SECRET in reject.detail] == []
