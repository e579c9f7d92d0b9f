"""Layout detection, and what a stage trains on: demonstrations or preferences, with the holdout apart."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from rlhf.config import DataConfig, FormatName, RepairName
from rlhf.data.detect import NAMES
from rlhf.data.drafts import REPAIRS
from rlhf.data.formats import as_demonstrations, as_preferences, load_demonstrations, load_preferences, read
from rlhf.data.rejects import count_reasons
from rlhf.errors import DataError

DOCS = Path(__file__).resolve().parents[2] / "docs/data.md"
PAIR = {"prompt": "p", "chosen": "c", "rejected": "r"}
TIED = {"prompt": "p", "responses": ["c", "r", "s"], "ranks": [1, 2, 2]}
ONLY_TIES = {"prompt": "t", "responses": ["c", "r"], "ranks": [1, 1]}


def say(role: str, content: str) -> dict[str, object]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(("row", "layout"), [
    (PAIR | {"margin": 0.5, "model": None, "messages": [say("user", "p"), say("assistant", "c")]}, "preference"),     # extra columns
    ({"prompt": "p", "prompt_id": "x", "messages": [say("user", "p"), say("assistant", "c")]}, "messages"),
    ({"instruction": "i", "input": "", "output": "o", "text": "..."}, "alpaca"),
    (PAIR | {"schema": "preference/1", "votes": 1, "agreement": 1.0, "guideline": ""}, "records"),
    (PAIR | {"schema": "somebody else's"}, "preference")])
def test_the_layout_follows_from_the_columns_and_extra_ones_are_ignored(write, tmp_path, row, layout):
    reading = read([write(tmp_path / "rows.jsonl", [row])])
    assert (list(reading.layouts.values()), len(reading.records)) == ([layout], 1)


@pytest.mark.parametrize(("rows", "message"), [
    ([TIED | {"scores": [1, 2, 3]}], r"more than one way: ranked .*; scored"),
    ([PAIR | {"instruction": "i"}], r"more than one way: preference .*; alpaca"),
    ([{"prompt": "p", "response": "a", "completion": "b"}], "more than one way: completion .*; completion"),
    ([{"prompt": "p", "completion": "a", "label": True}], "unpaired preferences"),
    ([PAIR | {"prompt": "\n\nHuman: p\n\nAssistant:"}, PAIR], "1 of the first 2 rows begin with 'Human:'"),
    ([{"instruction": "i", "completions": [{"response": "a", "overall_score": 1.0, "fine-grained_score": 2.0}]}],
     "ultrafeedback_overall or ultrafeedback_fine"),
    ([{"question": "p", "response_j": "c", "response_k": "r"}],
     r"no layout has these columns: question, response_j, response_k.*preference.*'chosen' \(did you mean 'response_j'\?\)"),
    ([{"instruction": "i", "response": "o"}], r"alpaca, which needs 'output' \(did you mean 'response'\?\)"),
    ([{"judge": "x", "winner_side": 1}], r"no layout has these columns: judge, winner_side\. Rename")])
def test_what_cannot_be_told_is_refused_with_the_choices(write, tmp_path, rows, message):
    with pytest.raises(DataError, match=re.compile(message, re.DOTALL)):
        read([write(tmp_path / "rows.jsonl", rows)])


def test_a_named_layout_settles_it(write, tmp_path):
    path = write(tmp_path / "rows.jsonl", [TIED | {"scores": [1, 2, 3]}])
    best = {name: as_demonstrations(read([path], layout=name))[0][0].response for name in ("ranked", "scored")}
    assert best == {"ranked": "c", "scored": "s"}


def test_the_docs_name_every_layout_repair_and_reason():
    documented = set(re.findall(r"^\| `([a-z_]+)`", DOCS.read_text(encoding="utf-8"), re.MULTILINE))
    sources = [path.read_text(encoding="utf-8") for path in (DOCS.parents[1] / "rlhf/data").glob("*.py")]
    reasons = {reason for text in sources for reason in re.findall(r'(?:RowError\(|Reject\([\w.]+, )"([a-z_]+)"', text)}
    assert len(reasons) > 25
    assert documented >= reasons | set(NAMES) | set(REPAIRS)


def test_a_recipe_knows_every_layout_and_repair():
    assert set(get_args(FormatName)) == {"auto", *NAMES}
    assert set(get_args(RepairName)) == set(REPAIRS)


def test_a_stage_takes_what_it_can_use_and_counts_the_rest(write, tmp_path):
    files = [write(tmp_path / "pairs.jsonl", [PAIR, PAIR | {"rejected": "z"}]), write(tmp_path / "ranked.jsonl", [TIED, ONLY_TIES]),
             write(tmp_path / "sft.jsonl", [{"prompt": "d", "response": "e"}])]
    reading = read(files)
    pairs, rejects, merged = as_preferences(reading)
    assert [(pair.chosen, pair.rejected) for pair in pairs] == [("c", "r"), ("c", "z"), ("c", "s")]     # (c, r) was in pairs.jsonl
    assert (count_reasons(rejects), merged) == ({"tie": 1, "no_preference": 1}, {"merged_pairs": 1})
    demonstrations, rejects, merged = as_demonstrations(reading)
    assert [(d.prompt.messages[0].content, d.response) for d in demonstrations] == [("p", "c"), ("t", "c"), ("d", "e")]
    assert (rejects, merged) == ([], {"merged_demonstrations": 2})
    loaded = load_demonstrations(DataConfig(train=tuple(files), holdout_percent=0))
    assert (len(loaded.train), loaded.rows, loaded.repaired) == (3, 5, {"merged_demonstrations": 2})


def test_the_holdout_by_hash_is_the_same_in_a_later_export_and_shares_no_prompt(write, tmp_path):
    rows = [{"prompt": f"p{i % 40}", "chosen": f"c{i}", "rejected": "r"} for i in range(80)]
    early = load_preferences(DataConfig(train=write(tmp_path / "early.jsonl", rows[:60]), holdout_percent=30))
    late = load_preferences(DataConfig(train=write(tmp_path / "late.csv", rows[::-1]), holdout_percent=30))
    assert len(early.train) + len(early.holdout) == 60 and 0 < len(early.holdout) < 60
    assert not {record.prompt for record in late.train} & {record.prompt for record in late.holdout}
    assert {record.content_id for record in early.holdout} <= {record.content_id for record in late.holdout}
    assert {record.content_id for record in early.train} <= {record.content_id for record in late.train}


def test_prompts_of_a_holdout_file_never_stay_in_train(write, tmp_path):
    train = write(tmp_path / "train.jsonl", [PAIR, PAIR | {"prompt": "q"}, PAIR | {"prompt": "", "chosen": "d"}])
    holdout = write(tmp_path / "holdout.jsonl", [PAIR | {"chosen": "another"}])
    data = load_preferences(DataConfig(train=train, holdout=holdout))
    assert [record.prompt.messages[0].content for record in data.train] == ["q"]
    assert [record.chosen for record in data.holdout] == ["another"]
    assert (count_reasons(data.rejects), data.rows, set(data.files)) == ({"empty_prompt": 1, "in_holdout": 1}, 4, {train, holdout})


def test_the_holdout_is_another_file_whatever_it_is_called(write, tmp_path):
    train, copy = write(tmp_path / "train.jsonl", [PAIR]), write(tmp_path / "copy.jsonl", [PAIR])
    for holdout in (train, copy):
        with pytest.raises(DataError, match=r"train\.jsonl is the same file as one of holdout"):
            load_preferences(DataConfig(train=train, holdout=holdout))
