"""A stage's data: what is left of the rows, what is written down about the others, and when the run stops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf.config import DataConfig
from rlhf.data.formats import DataSet, load_preferences
from rlhf.data.prepared import PreparedData, prepare
from rlhf.data.templates import Template, template_for
from rlhf.errors import DataError
from rlhf.records import PreferenceRecord

WORDS = ["<eos>", "<unk>", *(f"w{number}" for number in range(40))]


def template() -> Template:
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return template_for(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>"), "plain")


def twenty() -> list[dict[str, str]]:
    """Pairs: row 4 has no chosen response, the prompt of row 8 has 30 tokens."""
    rows = [{"prompt": f"w{i} w5 ", "chosen": f"w{i % 7} w8", "rejected": "w9"} for i in range(20)]
    rows[3]["chosen"] = ""
    rows[7]["prompt"] = "w1 " * 30
    return rows


def prepared(folder: Path, *, rows: list[dict[str, str]] | None = None, **settings: Any) -> PreparedData:
    rows = twenty() if rows is None else rows
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = DataConfig(**{"train": str(folder / "pairs.jsonl"), "template": "plain", "max_length": 16, "holdout_percent": 0,
                           "max_rejected": 0.2, **settings})
    return prepare(load_preferences(config), config, template(), folder)


def rejects(folder: Path) -> list[tuple[str, str]]:
    rows = map(json.loads, (folder / "rejects.jsonl").read_text(encoding="utf-8").splitlines())
    return [(row["where"].rpartition(":")[2], row["reason"]) for row in rows]


@pytest.mark.parametrize(("on_long", "left_out", "longest"), [("cut_prompt", [("4", "empty_response")], 16),
                                                              ("reject", [("4", "empty_response"), ("8", "too_long")], 5)])
def test_every_row_is_a_run_or_a_line_of_the_rejects(tmp_path: Path, on_long: str, left_out: list[tuple[str, str]], longest: int) -> None:
    data = prepared(tmp_path, on_long=on_long)
    assert rejects(tmp_path) == left_out
    assert len(data.train) + len(left_out) == 20
    assert max(len(run.prompt) + max(map(len, run.responses)) for run in data.train) == longest
    summary = json.loads((tmp_path / "data.json").read_text(encoding="utf-8"))
    assert (summary["rows"], summary["train"], sum(summary["rejected"].values())) == (20, len(data.train), len(left_out))


def test_more_rejects_than_allowed_stop_the_run_after_they_were_written_down(tmp_path: Path) -> None:
    prepared(tmp_path, max_rejected=0.05)
    with pytest.raises(DataError, match=r"1 of 20 rows .* \(5\.0%, the recipe allows 4\.9%\): 1 empty_response\..*rejects\.jsonl"):
        prepared(tmp_path, max_rejected=0.049)
    assert rejects(tmp_path) == [("4", "empty_response")]


def test_nothing_to_train_on_says_what_became_of_the_rows(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is left to train on \(4 read, 0 held out\)\. Repair what .*rejects\.jsonl lists"):
        prepared(tmp_path, rows=[{"prompt": "w1 " * 30, "chosen": f"w{i}", "rejected": "w9"} for i in range(4)], on_long="reject",
                 max_rejected=1.0)
    assert [reason for _, reason in rejects(tmp_path)] == ["too_long"] * 4


def test_format_repair_and_limit_of_a_recipe_are_obeyed(tmp_path: Path) -> None:
    rows = [{"prompt": f"w{i}", "responses": ["w1", "w2"], "ranks": [1, 2], "scores": [1, 2]} for i in (3, 3, 4, 5)]
    (tmp_path / "both.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def load(**settings: Any) -> DataSet[PreferenceRecord]:
        return load_preferences(DataConfig(train=str(tmp_path / "both.jsonl"), holdout_percent=0, **settings))

    with pytest.raises(DataError, match="more than one way"):
        load()
    assert {record.chosen for record in load(format="ranked").train} == {"w1"}
    assert {record.chosen for record in load(format="scored").train} == {"w2"}
    assert [reject.reason for reject in load(format="ranked").rejects] == ["duplicate"]
    assert load(format="ranked", repair=("drop_duplicates",)).rejects == ()
    assert [record.prompt.messages[0].content for record in load(format="ranked", limit=3).train] == ["w3", "w4"]
