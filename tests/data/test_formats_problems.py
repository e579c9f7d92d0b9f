"""Every kind of bad row is named, and mended only by the repair that the recipe names."""

from __future__ import annotations

import json
from itertools import product

import pytest

from rlhf.data.drafts import REPAIRS
from rlhf.data.formats import as_preferences, read
from rlhf.errors import ConfigError, DataError
from rlhf.records import PreferenceRecord, RankedRecord

GOOD = {"prompt": "a good question", "chosen": "good", "rejected": "bad"}
NAN = float("nan")


def say(role: object, content: object) -> dict[str, object]:
    return {"role": role, "content": content}


U, A = say("user", "q"), say("assistant", "a")
PAIR = {"chosen": "good", "rejected": "bad"}
JUDGED = {"schema": "preference/1", "prompt": "p", **PAIR, "votes": 1, "agreement": 1.0, "guideline": ""}
TREE_REPLY = {"text": "a", "role": "assistant", "rank": 0}
TREE = {"text": "q", "role": "prompter"}
VOTED = {"instruction": "i", "input": "", "response1": "a", "response2": "b"}

PROBLEMS: list[tuple[str, dict[str, object], str]] = [
    ("preference", {"prompt": "p", "chosen": "c"}, "missing_column"),
    ("preference", GOOD | {"chosen": None}, "null_field"),
    ("preference", GOOD | {"prompt": None}, "null_field"),
    ("preference", GOOD | {"chosen": True}, "not_text"),
    ("preference", GOOD | {"prompt": 3}, "not_text"),
    ("preference", GOOD | {"prompt": ""}, "empty_prompt"),
    ("preference", GOOD | {"prompt": " \n\u2028"}, "empty_prompt"),
    ("preference", GOOD | {"prompt": []}, "empty_prompt"),
    ("preference", GOOD | {"rejected": ""}, "empty_response"),
    ("preference", GOOD | {"chosen": []}, "empty_response"),
    ("preference", GOOD | {"chosen": "bad"}, "identical"),
    ("preference", GOOD | {"chosen": "a good question good"}, "prompt_in_response"),
    ("preference", {"prompt": [U], "chosen": [U, A], "rejected": [U, say("assistant", "b")]}, "prompt_in_response"),
    ("preference", {"prompt": "another", "chosen": [U, A], "rejected": [U, say("assistant", "b")]}, "prompt_mismatch"),
    ("preference", GOOD | {"chosen": "good \ud83d"}, "lone_surrogate"),
    ("preference", GOOD | {"prompt": "half \udc00"}, "lone_surrogate"),
    *[("preference", GOOD | {"chosen": f"good{marker}"}, "role_in_response")
      for marker in ("\n\nHuman: and?", "\n\nAssistant: x", "<|im_end|>", "<|im_start|>user", "<end_of_turn>", "[/INST]", "<|user|>",
                     "\n### Response:")],
    ("preference", GOOD | {"chosen": "Assistant: good"}, "role_in_response"),
    ("preference", GOOD | {"chosen": [A, U, A]}, "role_in_response"),
    ("preference", GOOD | {"prompt": [U, say("user", "r")]}, "same_role_run"),
    ("preference", GOOD | {"prompt": [U, A]}, "same_role_run"),
    ("preference", GOOD | {"prompt": [U, say("system", "s"), U]}, "system_not_first"),
    ("preference", GOOD | {"prompt": [say("system", "s")]}, "empty_prompt"),
    ("preference", GOOD | {"prompt": [A, U]}, "assistant_first"),
    ("preference", GOOD | {"prompt": [U, say("assistant", " "), U]}, "empty_turn"),
    ("preference", GOOD | {"prompt": [say("narrator", "q")]}, "bad_role"),
    ("preference", GOOD | {"prompt": [say(["user"], "q")]}, "bad_role"),
    ("preference", GOOD | {"prompt": [say("user", None)]}, "null_field"),
    ("preference", GOOD | {"prompt": [say("user", 7)]}, "not_text"),
    ("preference", GOOD | {"prompt": [{"role": "user"}]}, "not_a_message"),
    ("preference", GOOD | {"prompt": ["q"]}, "not_a_message"),
    ("implicit", {"chosen": "same", "rejected": "same"}, "identical"),
    ("implicit", {"chosen": "one", "rejected": "other"}, "empty_prompt"),
    ("implicit", {"chosen": "shared good", "rejected": [U, A]}, "mixed_types"),
    ("implicit", {"chosen": [U, A], "rejected": [U, A]}, "identical"),
    ("implicit", {"chosen": [U, A], "rejected": [say("user", "r"), A]}, "empty_prompt"),
    ("implicit", {"chosen": [U, A, U, A], "rejected": [U, say("assistant", "b"), U, A]}, "role_in_response"),
    ("implicit", {"chosen": [], "rejected": [U, A]}, "empty_response"),
    ("transcript", {"chosen": "Good day\n\nHuman: q", "rejected": "\n\nHuman: q\n\nAssistant: a"}, "bad_transcript"),
    ("transcript", {"chosen": "\n\nHuman: q\n\nAssistant: ", "rejected": "\n\nHuman: q\n\nAssistant: a"}, "empty_response"),
    ("transcript", {name: f"\n\nHuman: q\n\nAssistant: a\n\nHuman: {name}" for name in ("chosen", "rejected")}, "no_response"),
    ("messages", {"messages": [U, A, U]}, "no_response"),
    ("messages", {"messages": [A]}, "empty_prompt"),
    ("messages", {"messages": "q"}, "not_a_list"),
    ("alpaca", {"instruction": "i", "output": "o", "history": [["only a question"]]}, "not_a_message"),
    ("ranked", {"prompt": "p", "responses": ["a", "b"], "ranks": [1]}, "bad_rank"),
    ("ranked", {"prompt": "p", "responses": ["a", "b"], "ranks": [0, 1]}, "bad_rank"),
    ("ranked", {"prompt": "p", "responses": ["a", "b"], "ranks": [1, 1.5]}, "bad_rank"),
    ("ranked", {"prompt": "p", "responses": ["a"], "ranks": [1]}, "too_few_responses"),
    ("ranked", {"prompt": "p", "responses": ["a", "b", "a"], "ranks": [1, 2, 3]}, "identical"),
    ("ranked", {"prompt": "p", "responses": ["a", True], "ranks": [1, 2]}, "not_text"),
    ("scored", {"prompt": "p", "responses": ["a", "b"], "scores": [1.0, NAN]}, "bad_score"),
    ("scored", {"prompt": "p", "responses": ["a", "b"], "scores": [True, 2]}, "bad_score"),
    ("scored", {"prompt": "p", "responses": ["a", "b"], "scores": ["7", 2]}, "bad_score"),
    ("ultrafeedback_overall", {"instruction": "i", "completions": [{"response": "a", "overall_score": None}] * 2}, "null_field"),
    ("llmbar", {"input": "i", "output_1": "a", "output_2": "b", "label": 3}, "bad_vote"),
    ("pandalm", VOTED | {"annotator1": 0, "annotator2": 1, "annotator3": 2}, "no_majority"),
    ("pandalm", VOTED | {"annotator1": 1, "annotator2": 1, "annotator3": 9}, "bad_vote"),
    ("pandalm", VOTED | {"annotator1": 1, "annotator2": 1, "annotator3": None}, "null_field"),
    ("squality", {"question_text": "q", "responses": {"x": "a", "y": "b"}, "reviews": [
        {"system": "x", "worker_id": "1", "overall-rank": 1}]}, "bad_vote"),
    ("squality", {"question_text": "q", "responses": {"x": "a"}, "reviews": [
        {"system": "x", "worker_id": "1", "overall-rank": 1}]}, "too_few_responses"),
    ("scored", {"prompt": "p", "responses": [], "scores": []}, "too_few_responses"),
    ("oasst", {"message_tree_id": "t", "prompt": TREE | {"replies": []}}, "no_response"),
    ("oasst", {"message_tree_id": "t", "prompt": TREE | {"replies": [TREE_REPLY | {"deleted": True}]}}, "deleted"),
    ("records", JUDGED | {"votes": 0}, "bad_vote"),
    ("records", JUDGED | {"smoothing": 0.6}, "bad_vote"),
    ("records", JUDGED | {"smoothing": 0.1, "agreement": 0}, "bad_vote"),
    ("records", JUDGED | {"schema": "preference/9"}, "bad_schema"),
]


NEIGHBOURS: dict[str, dict[str, object]] = {
    "preference": {"prompt": "hi", "chosen": "x", "rejected": "y"},
    "implicit": {"chosen": "a shared good", "rejected": "a shared bad"},
    "transcript": {"chosen": "\n\nHuman: hi\n\nAssistant: good", "rejected": "\n\nHuman: hi\n\nAssistant: bad"},
    "messages": {"messages": [U, A]},
    "alpaca": {"instruction": "i", "output": "o"},
    "ranked": {"prompt": "p", "responses": ["x", "y"], "ranks": [1, 2]},
    "scored": {"prompt": "p", "responses": ["x", "y"], "scores": [1, 2]},
    "ultrafeedback_overall": {"instruction": "i", "completions": [{"response": r, "overall_score": s} for r, s in (("x", 1), ("y", 2))]},
    "llmbar": {"input": "i", "output_1": "x", "output_2": "y", "label": 1},
    "pandalm": VOTED | {"annotator1": 0, "annotator2": 0, "annotator3": 2},
    "squality": {"question_text": "q", "responses": {"x": "x", "y": "y"}, "reviews": [
        {"system": system, "worker_id": 1, "overall-rank": rank} for system, rank in (("x", 1), ("y", 2))]},
    "oasst": {"message_tree_id": "t", "prompt": TREE | {"replies": [TREE_REPLY]}},
    "records": {"schema": "demonstration/1", "prompt": "p", "response": "r"},
}


@pytest.mark.parametrize(("layout", "row", "reason"), PROBLEMS)
def test_a_bad_row_is_rejected_by_name_and_row_while_its_neighbour_is_read(tmp_path, layout, row, reason):
    path = tmp_path / "rows.jsonl"
    path.write_text("not json\n" + json.dumps(NEIGHBOURS[layout]) + "\n" + json.dumps(row) + "\n")
    reading = read([str(path)], layout=layout)
    assert [(reject.where, reject.reason) for reject in reading.rejects] == [(f"{path}:1", "bad_json"), (f"{path}:3", reason)]
    assert ([record.source for record in reading.records], reading.rows) == ([f"{path}:2"], 3)


def test_a_reject_never_quotes_the_text(tmp_path):
    secret = "quaint"
    rows = [{"prompt": f"{secret} question", "chosen": f"{secret} question {secret}\n\nHuman: {secret}", "rejected": rejected}
            for rejected in (f"{secret}", "", None, f"{secret}\ud800", [f"{secret}"])]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    reading = read([str(path)])
    assert len(reading.rejects) == 5
    assert not any(secret in reject.detail for reject in reading.rejects)


@pytest.mark.parametrize(("line", "reason"), [
    (b'{"prompt": "p", "response": "caf\xe9"}', "bad_encoding"),
    (b'{"prompt": "p", "response": "r"', "bad_json"),
    (b'{"prompt": "p", "response": "r", "response": "s"}', "bad_json"),
    (b'{"n": ' + b"9" * 5000 + b"}", "bad_json"),
    (b"[" * 100_000, "bad_json"),
    (b'["p", "r"]', "not_an_object")])
def test_a_line_that_is_no_row_is_rejected_with_its_number(tmp_path, line, reason):
    path = tmp_path / "rows.jsonl"
    good = b'{"prompt": "p", "response": "r"}\n'
    path.write_bytes(good + line + b"\n" + good.replace(b'"r"', b'"s"'))
    reading = read([str(path)])
    assert [(reject.where, reject.reason) for reject in reading.rejects] == [(f"{path}:2", reason)]
    assert [record.source for record in reading.records] == [f"{path}:1", f"{path}:3"]


def test_rows_of_a_csv_file_that_do_not_fit_are_rejected(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b"prompt,response\np,r\np\np,caf\xe9\n")
    rejects = read([str(path)]).rejects
    assert [(reject.where, reject.reason) for reject in rejects] == [(f"{path}:2", "bad_csv"), (f"{path}:3", "bad_encoding")]


def test_duplicates_are_found_across_files_and_layouts(write, tmp_path):
    first = write(tmp_path / "a.jsonl", [GOOD])
    again = write(tmp_path / "b.csv", [{"prompt": GOOD["prompt"], "responses": ["bad", "good"], "ranks": [2, 1]}])
    reading = read([first, again])
    assert [(reject.where, reject.reason) for reject in reading.rejects] == [(f"{again}:1", "duplicate")]
    dropped = read([first, again], repair=["drop_duplicates"])
    assert (len(dropped.records), dropped.rejects, dropped.rows, dropped.repaired) == (1, (), 2, {"drop_duplicates": 1})


REPAIRED: list[tuple[str, str, dict[str, object], tuple[list[str], str, str]]] = [
    ("replace_surrogates", "preference", GOOD | {"chosen": "good \ud83d"}, (["a good question"], "good \ufffd", "bad")),
    ("strip_whitespace", "preference", GOOD | {"prompt": " a good question\n", "rejected": "\tbad "},
     (["a good question"], "good", "bad")),
    ("drop_empty_history", "preference", GOOD | {"prompt": [say("system", ""), U]}, (["q"], "good", "bad")),
    ("drop_leading_assistant", "preference", GOOD | {"prompt": [A, U]}, (["q"], "good", "bad")),
    ("merge_same_role", "preference", GOOD | {"prompt": [U, say("user", "r")]}, (["q\n\nr"], "good", "bad")),
    ("merge_same_role", "transcript", {"chosen": "\n\nHuman: q\n\nAssistant: a\n\nAssistant: b",
                                       "rejected": "\n\nHuman: q\n\nAssistant: c"}, (["q"], "a\n\nb", "c")),
    ("strip_prompt_from_response", "preference", GOOD | {"chosen": "a good question\ngood"}, (["a good question"], "good", "bad")),
    ("strip_prompt_from_response", "preference", {"prompt": [U], "chosen": [U, A], "rejected": [U, say("assistant", "b")]},
     (["q"], "a", "b")),
]


@pytest.mark.parametrize(("repair", "layout", "row", "expected"), REPAIRED)
def test_a_named_repair_mends_the_row_is_counted_and_touches_no_other(tmp_path, repair, layout, row, expected):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(NEIGHBOURS[layout]) + "\n" + json.dumps(row))
    untouched, mended = read([str(path)], layout=layout, repair=[repair]).records
    assert ([message.content for message in mended.prompt.messages], mended.chosen, mended.rejected) == expected
    assert untouched == read([str(path)], layout=layout).records[0]
    assert read([str(path)], layout=layout, repair=[repair]).repaired == {repair: 1}


def test_every_repair_is_tested_above_or_is_drop_duplicates():
    assert {repair for repair, *_ in REPAIRED} | {"drop_duplicates"} == set(REPAIRS)


def test_a_short_prompt_that_the_answer_echoes_is_not_a_repeated_prompt(write, tmp_path):
    record, = read([write(tmp_path / "rows.jsonl", [{"prompt": "Hello", "chosen": "Hello there", "rejected": "Go"}])]).records
    assert record.chosen == "Hello there"


def test_unknown_names_of_repairs_and_layouts_list_the_known_ones():
    with pytest.raises(ConfigError, match=r"'fix_all' is none of .*merge_same_role"):
        read(["rows.jsonl"], repair=["fix_all"])
    with pytest.raises(ConfigError, match=r"'hh' is none of auto, .*transcript"):
        read(["rows.jsonl"], layout="hh")


def test_a_column_that_no_row_has_is_one_error_that_names_what_is_there(write, tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "p", "chosen": f"c{i}", "response_k": "r"} for i in range(100)])
    with pytest.raises(DataError, match=r"no column 'rejected'; found: prompt, chosen, response_k; did you mean 'response_k'"):
        read([path], layout="preference")


def test_pandalm_votes_become_a_majority_with_its_share(write, tmp_path):
    row = {"instruction": "i", "input": "", "response1": "a", "response2": "b"}
    votes = list(product((0, 1, 2), repeat=3))
    found = {}
    for a, b, c in votes:
        path = write(tmp_path / "votes.jsonl", [row | {"annotator1": a, "annotator2": b, "annotator3": c}])
        reading = read([path])
        found[a, b, c] = reading.records[0] if reading.records else reading.rejects[0].reason
    assert isinstance(found[0, 1, 0], RankedRecord) and found[0, 1, 0].ranks == (1, 1)
    assert isinstance(found[2, 1, 2], PreferenceRecord) and (found[2, 1, 2].chosen, found[2, 1, 2].votes) == ("b", 3)
    assert found[2, 1, 2].agreement == pytest.approx(2 / 3) and found[1, 1, 1].agreement == 1
    assert sum(record == "no_majority" for record in found.values()) == 6


def test_squality_ranks_by_the_mean_and_counts_the_pairwise_votes_that_agree(write, tmp_path):
    """Ranks (x, y, z) of three workers: (1,2,3), (1,3,2), (2,1,3): sums 4, 6, 8. Agreeing: x<y 2, x<z 3, y<z 2 of 3 each: 7/9."""
    ballots = {"w1": (1, 2, 3), "w2": (1, 3, 2), "w3": (2, 1, 3)}
    row = {"question_text": "q", "responses": {"x": "X", "y": "Y", "z": "Z"}, "reviews": [
        {"system": system, "worker_id": worker, "overall-rank": rank, "overall-rating": 100 - rank}
        for worker, ranks in ballots.items() for system, rank in zip("xyz", ranks, strict=True)]}
    record, = read([write(tmp_path / "rows.jsonl", [row])]).records
    assert (record.responses, record.ranks, record.votes) == (("X", "Y", "Z"), (1, 2, 3), 3)
    assert record.agreement == pytest.approx(7 / 9)


def test_a_tree_gives_a_ranking_a_pair_and_a_demonstration_and_counts_what_it_leaves_out(write, tmp_path):
    def reply(text: str, rank: int | None, *replies: dict[str, object]) -> dict[str, object]:
        return {"message_id": f"id-{text}", "text": text, "role": "assistant", "rank": rank, "replies": list(replies)}

    def ask(text: str, *replies: dict[str, object]) -> dict[str, object]:
        return {"message_id": f"id-{text}", "text": text, "role": "prompter", "rank": None, "replies": list(replies)}

    tree = ask("q", reply("b", 1), reply("a", 0, ask("r", reply("d", 1), reply("c", 0)), ask("s", reply("e", None))), reply("x", None))
    reading = read([write(tmp_path / "trees.jsonl", [{"message_tree_id": "t", "prompt": tree}])])
    top, after_r, after_s = reading.records
    assert (top.chosen, top.rejected, [m.content for m in top.prompt.messages]) == ("a", "b", ["q"])
    assert (after_r.chosen, after_r.rejected, [m.content for m in after_r.prompt.messages]) == ("c", "d", ["q", "a", "r"])
    assert (after_s.response, [m.role for m in after_s.prompt.messages]) == ("e", ["user", "assistant", "user"])
    assert [(reject.reason, "id-x" in reject.detail) for reject in reading.rejects] == [("null_rank", True)]
    assert reading.rows == 4


def test_the_same_exchange_twice_in_one_tree_is_a_duplicate(write, tmp_path):
    def asked(answer: dict[str, object]) -> dict[str, object]:
        return {"text": "q", "role": "prompter", "replies": [answer]}

    tree = asked(TREE_REPLY | {"replies": [asked({"text": "b", "role": "assistant"}), asked({"text": "b", "role": "assistant"})]})
    reading = read([write(tmp_path / "trees.jsonl", [{"message_tree_id": "t", "prompt": tree}])])
    assert ([record.response for record in reading.records], [reject.reason for reject in reading.rejects]) == (["a", "b"], ["duplicate"])


def test_a_ranking_that_most_votes_dispute_gives_no_pairs(write, tmp_path):
    row = {"schema": "ranked/1", "prompt": "p", "responses": ["a", "b"], "ranks": [1, 2], "votes": 4, "agreement": 0.5, "guideline": ""}
    pairs, rejects, _ = as_preferences(read([write(tmp_path / "rows.jsonl", [row])]))
    assert (pairs, [reject.reason for reject in rejects]) == ([], ["disputed"])


def test_a_smoothing_says_how_far_to_trust_a_pair_that_most_votes_dispute(write, tmp_path):
    row = {"schema": "ranked/1", "prompt": "p", "responses": ["a", "b"], "ranks": [2, 1], "votes": 3, "agreement": 1 / 3, "smoothing": 0.2,
           "guideline": ""}
    (pair,), rejects, _ = as_preferences(read([write(tmp_path / "rows.jsonl", [row])]))
    assert (pair.chosen, pair.rejected, pair.smoothing, rejects) == ("b", "a", 0.2, [])
