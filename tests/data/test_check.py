"""`rlhf check` on files with known faults: each kind is found, with the rows that have it and something to do about it."""

from __future__ import annotations

import ast
import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import rlhf.data
from rlhf.config import DataConfig
from rlhf.data.check import ADVICE, ModelLimits, as_dict, check_data
from rlhf.data.check_page import ACTING, render
from rlhf.records import Prompt

WORDS = ["<s>", "</s>", "<unk>", "hi", "there", "you", "bye", "a", "b"]
CHAT = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"


def tokenizer(*, chat: str | None = CHAT, adds_bos: bool = False, eos: str | None = "</s>", pad: str | None = None,
              bos: str | None = "<s>") -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    if adds_bos:
        words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token=bos, eos_token=eos, unk_token="<unk>", pad_token=pad,
                                   chat_template=chat)


def written(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


GOOD = [{"prompt": f"hi {'you ' * n}", "chosen": f"bye {'a ' * n}", "rejected": "there"} for n in range(1, 9)]
FAULTS: list[dict[str, object]] = [
    {"prompt": "hi there", "chosen": "", "rejected": "bye"},                                   # row 9
    {"prompt": "hi there", "chosen": "bye", "rejected": "bye"},                                # row 10
    {"prompt": "hi there", "chosen": "a b " * 40, "rejected": "a b " * 41},                    # row 11
    {"prompt": "hi there", "chosen": "bye </s> you", "rejected": "bye"},                       # row 12
    {"prompt": "you " * 50, "chosen": "a", "rejected": "b"},                                   # row 13, cut
    {"prompt": "hi\u2028you", "chosen": "a", "rejected": "b"},                                 # row 14, kept
]


def config(train: str, **changes: object) -> DataConfig:
    return DataConfig(**({"train": train, "holdout_percent": 0.0, "max_length": 32, "max_rejected": 0.5} | changes))


def test_every_fault_is_found_with_its_row_and_advice(tmp_path):
    report = check_data(config(written(tmp_path / "pairs.jsonl", [*GOOD, *FAULTS])), tokenizer(), records="preferences")
    found = {finding.kind: [int(row.rpartition(":")[2]) for row in finding.rows] for finding in report.findings if finding.count}
    assert found == {"empty_response": [9], "identical": [10], "identical_after_cut": [11], "special_token_in_text": [12],
                     "prompts_cut": [13], "line_separators": [14]}
    assert all(finding.advice and finding.found for finding in report.findings)
    assert (report.rows, report.train, report.rejected, report.tokens["train"].kept) == (14, 12, 4, 10)
    assert report.ok


def test_too_many_rejects_and_nothing_to_train_on_are_errors(tmp_path):
    train = written(tmp_path / "pairs.jsonl", FAULTS)
    strict = check_data(config(train, max_rejected=0.05), tokenizer(), records="preferences")
    assert [finding.kind for finding in strict.findings if finding.severity == "error"] == ["too_many_rejects"]
    held_out = check_data(config(train, max_rejected=1.0, holdout_percent=99.999), tokenizer(), records="preferences")
    assert [finding.kind for finding in held_out.findings if finding.severity == "error"] == ["no_training_rows"]
    assert not strict.ok
    assert not held_out.ok


BOS_CHAT = "{{ bos_token }}" + CHAT


@pytest.mark.parametrize(("changes", "kind", "severity"), [
    ({"pad": "</s>"}, "pad_is_eos", "note"),
    ({"eos": None, "chat": CHAT.replace("eos_token", "'<unk>'")}, "no_eos", "warning"),
    ({"chat": None}, "template_unusable", "error"),
    ({"chat": CHAT + "{% if add_generation_prompt %}there{% endif %}"}, "template_unusable", "error"),
    ({"chat": "{{ bos_token }}" + BOS_CHAT}, "double_bos", "error"),
    ({"chat": BOS_CHAT, "adds_bos": True}, "bos_from_both", "note"),
    ({"adds_bos": True}, "bos_not_in_template", "note"),
    ({}, "missing_bos", "note"),
])
def test_tokenizer_problems(tmp_path, changes, kind, severity):
    report = check_data(config(written(tmp_path / "pairs.jsonl", GOOD)), tokenizer(**changes), records="preferences")
    assert [(finding.severity) for finding in report.findings if finding.kind == kind] == [severity]
    assert report.ok == (severity != "error")


@pytest.mark.parametrize("changes", [{"chat": BOS_CHAT}, {"bos": None}])
def test_a_sound_tokenizer_gives_no_findings(tmp_path, changes):
    assert check_data(config(written(tmp_path / "pairs.jsonl", GOOD)), tokenizer(**changes), records="preferences").findings == ()


@pytest.mark.parametrize(("limits", "kinds"), [
    (ModelLimits(len(WORDS), None), []), (ModelLimits(len(WORDS) - 1, None), ["vocabulary_too_large"]),
    (ModelLimits(len(WORDS), 20), []), (ModelLimits(len(WORDS), 19), ["beyond_positions"])])
def test_every_token_needs_an_embedding_and_every_row_a_position(tmp_path, limits, kinds):
    """The longest row: hi, 8 you, end; bye, 8 a, end."""
    train = written(tmp_path / "pairs.jsonl", GOOD)
    report = check_data(config(train), tokenizer(), records="preferences", limits=limits)
    assert [finding.kind for finding in report.findings if finding.severity == "error"] == kinds


def test_demonstrations_without_a_tokenizer_are_counted(tmp_path):
    report = check_data(config(written(tmp_path / "pairs.jsonl", GOOD)), None, records="demonstrations")
    assert (report.train, report.tokens, report.preview) == (8, {}, None)


def test_the_preview_colours_what_is_trained_on_and_shows_special_tokens(tmp_path):
    report = check_data(config(written(tmp_path / "pairs.jsonl", GOOD)), tokenizer(chat=BOS_CHAT), records="preferences")
    page = io.StringIO()
    render(report, Console(file=page, width=160, force_terminal=True, color_system="standard"))
    dim, dim_reverse, green, green_reverse = "\x1b[2m", "\x1b[2;7m", "\x1b[32m", "\x1b[7;32m"
    row = "".join(f"{style}{text}\x1b[0m" for style, text in (
        (dim_reverse, "<s>"), (dim, "hi you"), (dim_reverse, "</s>"), (green, "bye a"), (green_reverse, "</s>")))
    assert row in page.getvalue()


def test_rows_that_the_tokenizer_refuses_leave_nothing_to_train_on(tmp_path):
    train = written(tmp_path / "pairs.jsonl", [{"prompt": "hi", "chosen": "bye </s> you", "rejected": "bye"}])
    report = check_data(config(train, max_rejected=1.0), tokenizer(), records="preferences")
    assert [finding.kind for finding in report.findings if finding.severity == "error"] == ["no_training_rows"]


def test_of_a_ranking_each_pair_counts_as_a_row(tmp_path):
    """Three of the six pairs of one ranking hold the long response: 3 of 6 + 4 rows, not 3 of 5."""
    ranking = {"prompt": "hi", "responses": ["a", "b", "you", "bye " * 40], "ranks": [1, 2, 3, 4]}
    pairs = [{"prompt": f"hi {'you ' * n}", "responses": ["a", "b"], "ranks": [1, 2]} for n in range(4)]
    train = written(tmp_path / "ranked.jsonl", [ranking, *pairs])
    allowed = {share: check_data(config(train, max_rejected=share, on_long="reject"), tokenizer(), records="preferences")
               for share in (0.29, 0.3)}
    assert {share: (report.rejected, report.ok) for share, report in allowed.items()} == {0.29: (3, False), 0.3: (3, True)}
    found = next(finding.found for finding in allowed[0.29].findings if finding.kind == "too_many_rejects")
    assert found == "30.0% of 10 rows; 29.0% may be"


def test_prompts_that_look_the_same_on_both_sides_of_the_split_are_named(tmp_path):
    rows = [{"prompt": f"{'hi ' * n}caf\u00e9", "chosen": "a", "rejected": "b"} for n in range(1, 40)]
    twins = [row | {"prompt": f" {row['prompt'].upper()}".replace("\u00c9", "E\u0301")} for row in rows]
    report = check_data(config(written(tmp_path / "pairs.jsonl", [*rows, *twins]), holdout_percent=50, max_length=256), None,
                        records="preferences")
    split = {row["prompt"]: Prompt.of_text(row["prompt"]).split(holdout_percent=50) for row in [*rows, *twins]}
    apart = sum(split[row["prompt"]] != split[twin["prompt"]] for row, twin in zip(rows, twins, strict=True))
    assert 0 < apart < 39
    assert [(finding.severity, finding.count) for finding in report.findings if finding.kind == "held_out_twins"] == [("warning", apart)]


def test_nothing_held_out_is_said(tmp_path):
    train = written(tmp_path / "pairs.jsonl", GOOD[:1])
    held_out = Prompt.of_text(GOOD[0]["prompt"]).split(holdout_percent=0.01) == "holdout"
    kinds = {percent: [finding.kind for finding in check_data(config(train, holdout_percent=percent), None, records="preferences").findings]
             for percent in (0, 0.01, 99.99)}
    assert not held_out
    assert kinds == {0: [], 0.01: ["no_holdout_rows"], 99.99: ["no_training_rows"]}


def test_a_stage_that_only_measures_needs_held_out_rows(tmp_path):
    train = written(tmp_path / "pairs.jsonl", GOOD)
    reports = {percent: check_data(config(train, holdout_percent=percent), tokenizer(), records="preferences", trains=False)
               for percent in (0, 99.999)}
    errors = {percent: [finding.kind for finding in report.findings if finding.severity == "error"] for percent, report in reports.items()}
    assert errors == {0: ["no_holdout_rows"], 99.999: []}


def test_nothing_in_the_data_moves_the_cursor_or_turns_a_line_around(tmp_path):
    train = written(tmp_path / "pairs\u202e.jsonl", [{"prompt": "\x1b[2Jhi\u202e", "chosen": "\x07", "rejected": "b", "more\x1b": None}])
    report = check_data(config(train), tokenizer(), records="preferences")
    page = io.StringIO()
    render(report, Console(file=page, width=300))
    assert "pairs\\u202e.jsonl" in page.getvalue()
    assert not ACTING.search(page.getvalue().replace("\n", ""))


@pytest.mark.parametrize("width", [80, 100])
def test_the_page_fits_and_cuts_nothing(tmp_path, width):
    folder = tmp_path / ("a_long_name_of_a_folder" * 4)
    folder.mkdir()
    train = written(folder / "preferences_of_week_37.jsonl", [*GOOD, *FAULTS])
    page = io.StringIO()
    render(check_data(config(train), tokenizer(), records="preferences"), Console(file=page, width=width))
    text = page.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "special_token_in_text  1 (preferences_of_week_37.jsonl: 12)" in text
    assert "…" not in text


def test_details_say_nothing_of_the_text(tmp_path):
    secrets = [{"prompt": "zebra" if n else "\u200b", "chosen": "\u200b", "rejected": "zebra", "n": n} for n in range(2)]
    ignored = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "zebra": 2}, unk_token="<s>"))
    ignored.normalizer = normalizers.Replace("\u200b", "")
    report = check_data(config(written(tmp_path / "pairs.jsonl", secrets), template="plain"),
                        PreTrainedTokenizerFast(tokenizer_object=ignored, eos_token="</s>"), records="preferences")
    found = {finding.kind: finding.found for finding in report.findings if finding.rows}
    assert set(found) == {"empty_prompt_tokens", "empty_response_tokens"}
    assert not any("zebra" in text or "\u200b" in text for text in found.values())


def test_the_page_survives_markup_in_the_data(tmp_path):
    rows = [*GOOD, {"prompt": "[/bold] hi", "chosen": "[red]", "rejected": "[/]"}, {"prompt": "[/x]", "chosen": None, "rejected": "[/y]"}]
    report = check_data(config(written(tmp_path / "pairs[1].jsonl", rows)), tokenizer(), records="preferences")
    page = io.StringIO()
    render(report, Console(file=page, width=200))
    assert "null_field" in page.getvalue()
    assert "ready" in page.getvalue()


def test_the_json_form_holds_all_of_it(tmp_path):
    report = check_data(config(written(tmp_path / "pairs.jsonl", [*GOOD, *FAULTS])), tokenizer(), records="preferences")
    again = json.loads(json.dumps(as_dict(report)))
    assert again["ok"] is True
    assert again["tokens"]["train"]["sequence_lengths"]["longest"] == report.tokens["train"].sequence_lengths.longest
    assert {finding["kind"] for finding in again["findings"]} == {finding.kind for finding in report.findings}


def test_every_reason_for_a_reject_has_advice():
    folder = Path(next(iter(rlhf.data.__path__)))
    calls = [node for path in folder.rglob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
             if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"Reject", "RowError"}]
    texts = {argument.value for call in calls for argument in call.args[:2] if isinstance(argument, ast.Constant)}
    reasons = {text for text in texts if isinstance(text, str) and text.replace("_", "").isalpha() and text.islower()}
    assert len(reasons) > 30
    assert reasons <= ADVICE.keys()
