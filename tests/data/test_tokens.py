"""Records to ids: golden rows by hand, the boundary, and what a cut may and may not take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rlhf.data.rejects import Reject
from rlhf.data.templates import template_for
from rlhf.data.tokens import LEAST_PROMPT, Lengths, fit, tokenise
from rlhf.errors import DataError
from rlhf.records import Demonstration, PreferenceRecord, Prompt, RankedRecord, TokenRun

VOCABULARY = ["<s>", "</s>", "<unk>", "<user>", "<bot>", "hi", "there", "you", "bye", "a", "b", "c"]
BOS, EOS, UNK, USER, BOT, HI, THERE, YOU, BYE, A, B, C = range(12)
CHAT = "{{ bos_token }}{% for m in messages %}" \
       "{{ '<user>' if m.role == 'user' else '<bot>' }}{{ m.content + eos_token + '\n' }}{% endfor %}" \
       "{% if add_generation_prompt %}<bot>{% endif %}"


def word_tokenizer(*, adds_bos: bool = True) -> PreTrainedTokenizerFast:
    """Drops the letter ø, and has no pad token."""
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    words.pre_tokenizer, words.normalizer = pre_tokenizers.Whitespace(), normalizers.Replace("ø", "")
    if adds_bos:
        words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
                                   additional_special_tokens=["<user>", "<bot>"], chat_template=CHAT)


def money_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level; " $" and two line breaks are one token each, so that a prompt ending in one half merges with a response
    beginning with the other. BOS, EOS and pad are one token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.train_from_iterator(["Answer: $46\n\nx"] * 20, trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>", "<user>", "<bot>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    chat = CHAT.replace("{{ bos_token }}", "").replace("<user>", "<user>\n").replace("<bot>", "<bot>\n")
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<eos>", bos_token="<eos>",
                                   additional_special_tokens=["<user>", "<bot>"], chat_template=chat)


def pair(prompt: str, chosen: str, rejected: str, *, agreement: float = 1.0, source: str = "") -> PreferenceRecord:
    return PreferenceRecord(prompt=Prompt.of_text(prompt), chosen=chosen, rejected=rejected, agreement=agreement, source=source)


def test_a_pair_by_hand():
    record = pair("hi you", "bye", "hi there", agreement=0.75)
    tokens = tokenise([record], template_for(word_tokenizer(), "chat"), max_length=32, on_long="reject")
    assert tokens.runs == (TokenRun(id=record.content_id, prompt=(BOS, USER, HI, YOU, EOS, BOT),
                                    responses=((BYE, EOS), (HI, THERE, EOS)), smoothing=0.25),)
    report = tokens.report
    assert (report.rows, report.kept, report.prompt_tokens, report.response_tokens) == (1, 1, 6, 5)
    assert (report.packed_tokens, report.padded_tokens) == (11, 18)


def test_a_demonstration_and_a_ranking_by_hand():
    template = template_for(word_tokenizer(), "plain")
    ranking = RankedRecord(prompt=Prompt.of_text("hi"), responses=("a", "b", "c"), ranks=(2, 1, 1), agreement=0.875)
    runs = tokenise([Demonstration(prompt=Prompt.of_text("hi"), response="bye"), ranking], template, max_length=32, on_long="reject").runs
    assert [run.prompt for run in runs] == [(BOS, HI), (BOS, HI)]
    assert [run.responses for run in runs] == [((BYE, EOS),), ((A, EOS), (B, EOS), (C, EOS))]
    assert [run.smoothing for run in runs] == [0.0, 0.125]


def test_a_smoothing_of_the_record_goes_before_its_agreement():
    records = [replace(pair("hi", "a", "b", agreement=0.75), smoothing=smoothing) for smoothing in (None, 0.0, 0.0625)]
    runs = tokenise(records, template_for(word_tokenizer(), "plain"), max_length=32, on_long="reject").runs
    assert [run.smoothing for run in runs] == [0.25, 0.0, 0.0625]


def test_a_boundary_merge_keeps_the_prompt_that_generation_sees():
    tokenizer = money_tokenizer()
    template = template_for(tokenizer, "plain")
    prompt = Prompt.of_text("Answer: ")
    assert tokenizer("Answer: $46")["input_ids"][:len(template.prompt_ids(prompt))] != list(template.prompt_ids(prompt))
    records = [pair("Answer: ", "$46", "46", source="a:7"), pair("Answer:", " $46", "46")]
    tokens = tokenise(records, template, max_length=32, on_long="reject")
    run = tokens.runs[0]
    assert [tokenizer.decode(ids) for ids in (run.prompt, *run.responses)] == ["Answer: ", "$46<eos>", "46<eos>"]
    assert run.prompt == template.prompt_ids(prompt)
    assert tokens.report.boundary_merges == 1
    assert tokens.report.first_rows["boundary_merges"] == ("a:7",)


TEXT = st.text(st.sampled_from("Answer: $46\n\u2028é") | st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
MONEY = money_tokenizer()


@settings(max_examples=80, deadline=None)
@given(question=TEXT, response=TEXT, name=st.sampled_from(["chat", "plain", "transcript"]))
@example(question="x", response="\nAnswer", name="chat")
@example(question="Answer: ", response="$46", name="plain")
def test_prompt_is_generations_and_response_is_the_rest_of_the_joint_text(question, response, name):
    if not response.strip():
        return
    template = template_for(MONEY, name)
    record = Demonstration(prompt=Prompt.of_text(question), response=response)
    run = tokenise([record], template, max_length=4096, on_long="reject").runs[0]
    joint = MONEY(template.prompt_text(record.prompt) + template.response_text(response))["input_ids"]
    assert run.prompt == template.prompt_ids(record.prompt)
    if joint[:len(run.prompt)] == list(run.prompt):
        assert [*run.prompt, *run.responses[0]] == joint
    assert MONEY.decode([*run.prompt, *run.responses[0]]) == template.prompt_text(record.prompt) + template.response_text(response)


def test_many_rows_at_once_are_each_row_alone():
    template = template_for(MONEY, "chat")
    records = [pair(f"Answer {index % 40}: ", f"${index}", f" {index}é") for index in range(2100)]
    runs = tokenise(records, template, max_length=64, on_long="reject").runs
    alone = [tokenise([record], template, max_length=64, on_long="reject").runs[0] for record in (*records[:50], *records[-60:])]
    assert [*runs[:50], *runs[-60:]] == alone


@st.composite
def token_runs(draw: st.DrawFn) -> TokenRun:
    """Every id once, except that the responses may be beginnings of one another."""
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=3, unique=True))
    starts = [2000 + (100 * index if draw(st.booleans()) else 0) for index in range(len(lengths))]
    return TokenRun(id="x", prompt=tuple(range(1000, 1000 + draw(st.integers(1, 60)))), smoothing=0.2,
                    responses=tuple(tuple(range(start, start + length)) for start, length in zip(starts, lengths, strict=True)))


@settings(max_examples=300, deadline=None)
@given(run=token_runs(), head=st.integers(0, 1), max_length=st.integers(3, 80))
def test_a_cut_takes_the_left_of_the_prompt_first_and_the_end_of_a_response_last(run, head, max_length):
    result = fit(run, "row", head=head, max_length=max_length, on_long="cut_prompt")
    longest = max(map(len, run.responses))
    if isinstance(result, Reject):
        assert result.reason == "identical_after_cut"
        assert longest > max_length - LEAST_PROMPT
        return
    assert len(result.prompt) + max(map(len, result.responses)) <= max_length
    assert len(result.responses) == len(run.responses)
    assert all(result.responses)
    assert all(before[:len(after)] == after for before, after in zip(run.responses, result.responses, strict=True))
    assert result.prompt[:head] == run.prompt[:head]
    assert result.prompt[head:] == run.prompt[len(run.prompt) - len(result.prompt) + head:]
    assert (result.id, result.smoothing) == (run.id, run.smoothing)
    if longest + LEAST_PROMPT <= max_length:
        assert result.responses == run.responses
    if result.responses != run.responses:
        assert len(result.prompt) <= LEAST_PROMPT
    if result.prompt != run.prompt:
        assert len(result.prompt) > head    # BOS alone says nothing
        assert len(result.prompt) + max(map(len, result.responses)) == max_length


def test_bos_survives_a_cut_on_the_left_and_the_generation_prompt_stays():
    template = template_for(word_tokenizer(), "chat")
    record = pair(" ".join(["hi"] * 50), "bye", "you")
    tokens = tokenise([record], template, max_length=12, on_long="cut_prompt")
    assert tokens.runs[0].prompt == (BOS, *[HI] * 7, EOS, BOT)
    assert tokens.runs[0].responses == ((BYE, EOS), (YOU, EOS))
    assert (tokens.report.prompts_cut, tokens.report.responses_cut) == (1, 0)
    assert tokens.report.sequence_lengths.longest == 56      # before the cut


def test_a_response_that_does_not_fit_alone_loses_its_end_and_is_counted():
    tokens = tokenise([pair("hi", "a " * 40, "b")], template_for(word_tokenizer(), "plain"), max_length=16, on_long="cut_prompt")
    assert tokens.runs[0].prompt == (BOS, HI)
    assert tokens.runs[0].responses == ((A,) * 14, (B, EOS))
    assert (tokens.report.prompts_cut, tokens.report.responses_cut) == (0, 1)


@pytest.mark.parametrize(("record", "reason"), [
    (pair("hi", "a " * 40 + "b", "a " * 40 + "c"), "identical_after_cut"),
    (pair("hi", "lorem", "ipsum"), "identical_tokens"),
    (pair("ø", "a", "b"), "empty_prompt_tokens"),
    (pair("hi", "a", "ø"), "empty_response_tokens"),
    (pair("hi", "a \ud800", "b"), "lone_surrogate"),
    (pair("hi", "a </s> b", "b"), "special_token_in_text"),
])
def test_rows_that_cannot_be_trained_on_are_named_and_the_others_stay(record, reason):
    good = pair("hi", "a", "b", source="pairs.jsonl:1")
    tokens = tokenise([good, replace(record, source="pairs.jsonl:2"), good], template_for(word_tokenizer(adds_bos=False), "plain"),
                      max_length=16, on_long="cut_prompt")
    assert [(reject.where, reject.reason) for reject in tokens.rejects] == [("pairs.jsonl:2", reason)]
    assert tokens.report.rejected == {reason: 1}
    assert (tokens.report.rows, tokens.report.kept) == (3, 2)
    assert [run.id for run in tokens.runs] == [good.content_id] * 2


def test_long_rows_can_be_rejected_instead():
    records = [pair("hi " * 20, "a", "b"), pair("hi", "a", "b")]
    tokens = tokenise(records, template_for(word_tokenizer(), "plain"), max_length=16, on_long="reject")
    assert [(reject.where, reject.reason) for reject in tokens.rejects] == [("record 1", "too_long")]
    assert len(tokens.runs) == 1


def test_a_limit_that_leaves_no_room_is_refused():
    with pytest.raises(DataError, match="max_length is 2"):
        tokenise([], template_for(word_tokenizer(), "plain"), max_length=2, on_long="reject")


def test_percentiles_by_nearest_rank_and_powers_of_two():
    assert Lengths.of([100, 1, 3, 2, 4]) == Lengths(p50=3, p90=100, p99=100, longest=100, histogram=(1, 2, 1, 0, 0, 0, 1))
    assert Lengths.of([]).longest == 0
