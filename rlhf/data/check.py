"""The data half of `rlhf check`: what the files hold, what a stage would train on, and every kind of problem with its rows.

Nothing is changed or written. `check_data` gives a report, `check_page.render` prints it, `as_dict` is its JSON form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal, NamedTuple
from unicodedata import normalize

from rlhf.config import DataConfig
from rlhf.data.formats import DataSet, load_demonstrations, load_preferences
from rlhf.data.rejects import Reject, counted_rows
from rlhf.data.templates import PROBE_QUESTION, TRL_STANDS_IN, Template, special_tokens, template_for
from rlhf.data.tokens import ROWS_NAMED, TokenReport, Tokens, responses_of, tokenise
from rlhf.errors import ModelError
from rlhf.records import Demonstration, PreferenceRecord, Prompt, Record, TokenRun

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Severity = Literal["error", "warning", "note"]

REPAIR = "name the repair in data.repair: {}"
ADVICE: dict[str, str] = {
    "assistant_first": REPAIR.format("drop_leading_assistant"),
    "bad_csv": "quote cells that hold commas or line breaks, or save as JSONL",
    "bad_encoding": "save the file as UTF-8",
    "bad_json": "one JSON object a line; repair the line or remove it",
    "bad_rank": "ranks are whole numbers from 1 (best)",
    "bad_role": "roles are system, user, assistant and tool",
    "bad_schema": "write the record with the schema this version reads",
    "bad_transcript": "a transcript alternates '\\n\\nHuman:' and '\\n\\nAssistant:' turns and ends with the assistant",
    "bad_vote": "give each vote one of the values docs/data.md lists for this layout",
    "beyond_text": "leave these keys out where the text alone is meant; tools, images and separate reasoning are not trained on here",
    "deleted": "nothing: the data set marks these as removed",
    "disputed": "nothing, or collect more votes: the annotators contradict the ranking",
    "duplicate": REPAIR.format("drop_duplicates"),
    "empty_prompt": "give these rows a prompt, or remove them",
    "empty_prompt_tokens": "the tokenizer drops all of the prompt; look at its normaliser, or remove the row",
    "empty_response": "remove them, or look for a renamed column",
    "empty_response_tokens": "the tokenizer drops all of the response; look at its normaliser, or remove the row",
    "empty_turn": REPAIR.format("drop_empty_history"),
    "identical": "remove them: equal responses hold no preference",
    "identical_after_cut": "raise data.max_length: the responses differ only after the cut",
    "identical_tokens": "remove them: the tokenizer sees no difference between the responses",
    "in_holdout": "nothing: rows whose prompt is held out are not trained on",
    "lone_surrogate": REPAIR.format("replace_surrogates"),
    "missing_column": "name the layout in data.format, or rename the columns",
    "mixed_types": "write all responses of a row in one form, text or messages",
    "multi_turn": "set data.template to chat or transcript: plain takes one user message",
    "no_majority": "nothing, or collect more votes",
    "no_preference": "use these rows for SFT; a preference needs two responses",
    "no_response": "the response must be the assistant's message",
    "no_such_turn": "set data.template to chat: a transcript has Human and Assistant turns, and a system text only in front",
    "not_a_list": "write the column as a JSON list",
    "not_a_message": 'write messages as {"role": ..., "content": ...}',
    "not_an_object": "every row is an object with named columns",
    "not_text": "prompts and responses are text; a number or a boolean is not taken for one",
    "null_field": "fill the field or remove the row",
    "null_rank": "drop discarded responses before export, or rank them",
    "prompt_ends_with_assistant": "end the prompt with a user message",
    "prompt_in_response": REPAIR.format("strip_prompt_from_response"),
    "prompt_mismatch": "the responses of a row must answer one prompt",
    "role_in_response": "cut the response before the marker of the next turn",
    "same_role_run": REPAIR.format("merge_same_role"),
    "special_token_in_text": "remove the special token from the text, or use data.template=plain where prompts are rendered already",
    "system_not_first": "move the system message to the front",
    "template_refuses": "the tokenizer's chat template does not take such turns; use another template or model",
    "tie": "nothing: ties train reward models, DPO takes strict preferences",
    "too_few_responses": "a comparison needs at least two responses",
    "too_long": "raise data.max_length, or set data.on_long to cut_prompt",
    "prompts_cut": "raise data.max_length if the start of long prompts matters (the end is kept)",
    "responses_cut": "raise data.max_length: these responses do not end, and a model may learn not to",
    "boundary_merges": "end prompts without a space where a response follows directly; such responses are tokenised alone",
    "held_out_twins": "write these prompts in one way, or name a separate data.holdout",
    "line_separators": "nothing: U+2028, U+2029 and U+0085 stay as they are",
    "byte_order_mark": "remove U+FEFF from the texts: it is invisible and takes tokens",
}
"""What to do about each kind of problem in the rows."""


@dataclass(frozen=True, slots=True)
class Finding:
    severity: Severity
    kind: str
    count: int
    """Rows, or for prompts and responses their number; 0 where the finding is about the tokenizer."""
    rows: tuple[str, ...]
    """Where the first few are."""
    found: str
    advice: str


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    special: bool


@dataclass(frozen=True, slots=True)
class Preview:
    """One short row as it is trained on: nothing of the prompt is learnt, all of a response is."""

    prompt: tuple[Piece, ...]
    responses: tuple[tuple[Piece, ...], ...]


@dataclass(frozen=True, slots=True)
class CheckReport:
    files: dict[str, str]
    layouts: dict[str, str]
    rows: int
    train: int
    """Records before tokenising; a ranking gives several."""
    holdout: int
    rejected: int
    """By the readers and by the tokenizer."""
    repaired: dict[str, int]
    tokens: dict[str, TokenReport]
    """`train` and `holdout`; empty without a usable tokenizer."""
    preview: Preview | None
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return all(finding.severity != "error" for finding in self.findings)


class ModelLimits(NamedTuple):
    embedding_rows: int
    positions: int | None
    """Of the longest row; None: any."""


def check_data(config: DataConfig, tokenizer: PreTrainedTokenizerBase | None, *, records: Literal["preferences", "demonstrations"],
               limits: ModelLimits | None = None, trains: bool = True) -> CheckReport:
    """Reads and tokenises everything. `limits`: of the model, to see whether every token has a vector and every row fits. `trains`: the
    stage needs rows to train on; else it needs held-out ones.

    A file that cannot be read at all raises DataError.
    """
    data = load_preferences(config) if records == "preferences" else load_demonstrations(config)
    return check_set(data, config, tokenizer, limits=limits, trains=trains)


def check_set(data: DataSet[PreferenceRecord] | DataSet[Demonstration], config: DataConfig, tokenizer: PreTrainedTokenizerBase | None, *,
              limits: ModelLimits | None, trains: bool) -> CheckReport:
    findings: list[Finding] = []
    sides: dict[str, Tokens] = {}
    preview = None
    if tokenizer is not None:
        findings += tokenizer_findings(tokenizer, None if limits is None else limits.embedding_rows)
        try:
            template = template_for(tokenizer, config.template)
        except ModelError as error:
            findings.append(Finding("error", "template_unusable", 0, (), str(error), "repair the tokenizer or set data.template"))
        else:
            findings += template_findings(template)
            sides = {name: tokenise(side, template, max_length=config.max_length, on_long=config.on_long)
                     for name, side in (("train", data.train), ("holdout", data.holdout))}
            runs = sides["train"].runs or sides["holdout"].runs
            findings += length_findings([*sides["train"].runs, *sides["holdout"].runs], limits)
            preview = preview_of(min(runs, key=lambda run: run.packed_tokens), tokenizer) if runs else None
    rejects = [*data.rejects, *(reject for side in sides.values() for reject in side.rejects)]
    kept = {"train": len(data.train), "holdout": len(data.holdout)} | {name: len(side.runs) for name, side in sides.items()}
    findings += limit_findings(len(rejects), config, rows=data.rows, trains=trains, **kept)
    findings += reject_findings(rejects)
    findings += cut_findings([side.report for side in sides.values()])
    findings += twin_findings(data.train, data.holdout)
    findings += character_findings([*data.train, *data.holdout])
    order: tuple[Severity, ...] = ("error", "warning", "note")
    return CheckReport(files=data.files, layouts=data.layouts, rows=data.rows, train=len(data.train), holdout=len(data.holdout),
                       rejected=len(rejects), repaired=data.repaired, tokens={name: side.report for name, side in sides.items()},
                       preview=preview, findings=tuple(sorted(findings, key=lambda finding: order.index(finding.severity))))


def about_tokenizer(severity: Severity, kind: str, found: str, advice: str) -> Finding:
    return Finding(severity, kind, 0, (), found, advice)


def tokenizer_findings(tokenizer: PreTrainedTokenizerBase, embedding_rows: int | None) -> Iterator[Finding]:
    """What is wrong or unusual whatever the template."""
    if tokenizer.eos_token_id is None:
        yield about_tokenizer("warning", "no_eos", "the tokenizer has no eos token",
                              "set tokenizer.eos_token; until then only the chat template's end-of-turn token stops generation")
    elif tokenizer.pad_token_id == tokenizer.eos_token_id:
        yield about_tokenizer("note", "pad_is_eos", f"pad and eos are both {tokenizer.eos_token!r}",
                              "nothing here: masks follow from lengths, and eos is trained on; other software may mask it by its id")
    needed = max(tokenizer.get_vocab().values()) + 1
    if embedding_rows is not None and needed > embedding_rows:
        yield about_tokenizer("error", "vocabulary_too_large", f"ids go up to {needed - 1}, the model has {embedding_rows} embeddings",
                              "use the model's own tokenizer, or resize its embeddings before training")


def template_findings(template: Template) -> Iterator[Finding]:
    if template.replaced:
        yield about_tokenizer("note", "chat_template_replaced", f"{TRL_STANDS_IN}: {template.replaced.partition('. ')[0]}",
                              "nothing: it is used for training and generation, and saved with the model")
    yield from bos_findings(template)


def bos_findings(template: Template) -> Iterator[Finding]:
    """BOS must stand once in front. Only a chat template can still double it; the notes are for those who serve the model elsewhere."""
    bos, name = template.tokenizer.bos_token_id, template.tokenizer.bos_token
    if bos is None:
        return
    question = Prompt.of_text(PROBE_QUESTION)
    ids = template.prompt_ids(question)
    rendered = template.encode([template.prompt_text(question)])[0][:1] == [bos]
    if ids[:2] == (bos, bos):
        yield about_tokenizer("error", "double_bos", f"the chat template renders {name!r} twice", "remove one from the template")
    elif rendered and bos in template.head:
        yield about_tokenizer("note", "bos_from_both", f"the chat template and the tokenizer both bring {name!r}; here it stands once",
                              "elsewhere, tokenise rendered chats with add_special_tokens=False")
    elif bos in template.head and template.name == "chat":
        yield about_tokenizer("note", "bos_not_in_template", f"the tokenizer brings {name!r}, the chat template does not; it is added",
                              "servers that tokenise chats without special tokens leave it out: put {{ bos_token }} into the template")
    elif bos not in ids[:1] and bos != template.tokenizer.eos_token_id:
        yield about_tokenizer("note", "missing_bos", f"neither template nor tokenizer puts {name!r} in front",
                              "nothing, if the model was trained without it")


def limit_findings(rejected: int, config: DataConfig, *, rows: int, train: int, holdout: int, trains: bool) -> Iterator[Finding]:
    """What would stop a stage before its work, and a training without anything to measure it on."""
    counted = counted_rows(rejected, rows=rows, kept=train + holdout)
    share = rejected / max(1, counted)
    if share > config.max_rejected:
        yield Finding("error", "too_many_rejects", rejected, (), f"{share:.1%} of {counted:,} rows; {config.max_rejected:.1%} may be",
                      "see the kinds below; repair the data or raise data.max_rejected")
    if trains and not train:
        yield Finding("error", "no_training_rows", 0, (), f"no row is left to train on ({holdout:,} are held out)",
                      "see the kinds below, and data.holdout_percent")
    elif not trains and not holdout:
        yield Finding("error", "no_holdout_rows", 0, (), "no row is held out, and this stage works on held-out rows only",
                      "name data.holdout, give more rows, or raise data.holdout_percent")
    elif not holdout and (config.holdout is not None or config.holdout_percent > 0):
        yield Finding("note", "no_holdout_rows", 0, (), "no row is held out, so that nothing measures the training",
                      "give more rows, or raise data.holdout_percent")


def length_findings(runs: Sequence[TokenRun], limits: ModelLimits | None) -> Iterator[Finding]:
    if limits is None or limits.positions is None:
        return
    beyond = sum(run.longest > limits.positions for run in runs)
    if beyond:
        yield Finding("error", "beyond_positions", beyond, (), f"rows longer than the model's {limits.positions:,} positions",
                      f"set data.max_length to {limits.positions} or less")


def reject_findings(rejects: Sequence[Reject]) -> Iterator[Finding]:
    kinds: dict[str, list[Reject]] = {}
    for reject in rejects:
        kinds.setdefault(reject.reason, []).append(reject)
    for kind, found in sorted(kinds.items(), key=lambda item: -len(item[1])):
        yield Finding("warning", kind, len(found), tuple(reject.where for reject in found[:ROWS_NAMED]),
                      found[0].detail.partition("; repair: ")[0], ADVICE[kind])


def cut_findings(reports: Sequence[TokenReport]) -> Iterator[Finding]:
    kinds: tuple[tuple[str, Severity, int, str], ...] = (
        ("prompts_cut", "note", sum(report.prompts_cut for report in reports), "prompts lose tokens on the left"),
        ("responses_cut", "warning", sum(report.responses_cut for report in reports), "responses lose their end"),
        ("boundary_merges", "note", sum(report.boundary_merges for report in reports), "responses begin inside the prompt's last token"))
    for kind, severity, count, found in kinds:
        if count:
            rows = [row for report in reports for row in report.first_rows[kind]]
            yield Finding(severity, kind, count, tuple(rows[:ROWS_NAMED]), found, ADVICE[kind])


def twin_findings(train: Sequence[Record], holdout: Sequence[Record]) -> Iterator[Finding]:
    """The split goes by the exact text of a prompt; to a model, these are the prompts it is measured on."""
    held_out = {look_of(record.prompt) for record in holdout}
    rows = list(dict.fromkeys(record.source for record in train if look_of(record.prompt) in held_out))
    if rows:
        yield Finding("warning", "held_out_twins", len(rows), tuple(rows[:ROWS_NAMED]),
                      "prompts differ from a held-out one in white space, case or Unicode form only", ADVICE["held_out_twins"])


def look_of(prompt: Prompt) -> tuple[tuple[str, str], ...]:
    return tuple((message.role, " ".join(normalize("NFKC", message.content).casefold().split())) for message in prompt.messages)


def character_findings(records: Sequence[Record]) -> Iterator[Finding]:
    """Characters that other readers split lines at, or that nobody sees."""
    for kind, characters in (("line_separators", "\u2028\u2029\u0085"), ("byte_order_mark", "\ufeff")):
        rows = list(dict.fromkeys(record.source for record in records if any(
            character in text for text in (*(message.content for message in record.prompt.messages), *responses_of(record))
            for character in characters)))
        if rows:
            names = " or ".join(f"U+{ord(character):04X}" for character in characters)
            yield Finding("note", kind, len(rows), tuple(rows[:ROWS_NAMED]), f"texts hold {names}", ADVICE[kind])


def preview_of(run: TokenRun, tokenizer: PreTrainedTokenizerBase) -> Preview:
    return Preview(pieces(run.prompt, tokenizer), tuple(pieces(response, tokenizer) for response in run.responses))


def pieces(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> tuple[Piece, ...]:
    """Text between special tokens in one piece, since a single id may hold half a character; special tokens one by one."""
    special = set(tokenizer.convert_tokens_to_ids(sorted(special_tokens(tokenizer))))
    parts = [(is_special, part) for is_special, group in groupby(ids, key=special.__contains__)
             for part in ([[token] for token in group] if is_special else [list(group)])]
    return tuple(Piece(tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False), is_special)
                 for is_special, part in parts)


def as_dict(report: CheckReport) -> dict[str, object]:
    """For `--json`."""
    return {"ok": report.ok, **asdict(report)}
