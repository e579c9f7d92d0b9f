"""Real human judgements, whole: what docs/data.md says of each file is what the reader finds."""

from __future__ import annotations

from collections import Counter

import pytest

from rlhf.data.formats import Reading, as_demonstrations, as_preferences, read
from rlhf.data.rejects import count_reasons
from rlhf.errors import DataError
from rlhf.records import RankedRecord

COUNTS = [      # file, layout, rows, records, rejects, preferences, demonstrations
    ("hh_harmless_base_test/test.jsonl.gz", "transcript", 2312, 2270,
     {"role_in_response": 32, "empty_response": 4, "same_role_run": 4, "prompt_in_response": 2}, 2270, 2270),
    ("llmbar/LLMBar_Natural.json.gz", "llmbar", 100, 100, {}, 100, 100),
    ("llmbar/LLMBar_Adversarial_GPTInst.json.gz", "llmbar", 92, 92, {}, 92, 92),
    ("llmbar/LLMBar_Adversarial_GPTOut.json.gz", "llmbar", 47, 47, {}, 47, 47),
    ("llmbar/LLMBar_Adversarial_Manual.json.gz", "llmbar", 46, 46, {}, 46, 46),
    ("llmbar/LLMBar_Adversarial_Neighbor.json.gz", "llmbar", 134, 134, {}, 134, 134),
    ("llmbar/Processed_FairEval.json.gz", "llmbar", 66, 66, {}, 66, 66),
    ("llmbar/Processed_LLMEval2.json.gz", "llmbar", 200, 198, {"identical": 1, "empty_response": 1}, 198, 198),
    ("llmbar/Processed_MT-Bench.json.gz", "llmbar", 200, 195, {"duplicate": 5}, 195, 167),
    ("oasst_en100_trees/en_100_tree.jsonl.gz", "oasst", 258, 251, {"null_rank": 6, "role_in_response": 1}, 748, 251),
    ("pandalm_testset/testset-v1.json.gz", "pandalm", 999, 837, {"duplicate": 102, "empty_response": 54, "not_text": 6}, 760, 432),
    ("squality_human_eval/rankings_with_question.jsonl.gz", "squality", 100, 100, {}, 298, 100),
]


def reading_of(shared_data, name: str, **options) -> Reading:
    return read([str(shared_data / name)], **options)


@pytest.mark.parametrize(("name", "layout", "rows", "records", "rejects", "preferences", "demonstrations"), COUNTS)
def test_a_public_file_reads_to_the_documented_counts(shared_data, name, layout, rows, records, rejects, preferences, demonstrations):
    reading = reading_of(shared_data, name)
    assert list(reading.layouts.values()) == [layout]
    assert (reading.rows, len(reading.records), count_reasons(reading.rejects)) == (rows, records, rejects)
    assert (len(as_preferences(reading)[0]), len(as_demonstrations(reading)[0])) == (preferences, demonstrations)


@pytest.mark.parametrize("name", [
    "mtbench_votes/human.jsonl.gz", "mtbench_votes/gpt4_pair.jsonl.gz", "mtbench_votes/question.jsonl",
    "squality_human_eval/all-responses.jsonl.gz", "pandalm_testset/gpt-3.5-turbo-testset-v1.json.gz",
    "pandalm_testset/pandalm-7b-testset-v1.json.gz"])
def test_a_public_file_without_prompts_or_responses_is_refused_by_its_columns(shared_data, name):
    with pytest.raises(DataError, match="no layout has these columns"):
        reading_of(shared_data, name)


def test_repairs_bring_back_what_they_say(shared_data):
    repaired = reading_of(shared_data, "hh_harmless_base_test/test.jsonl.gz", repair=["merge_same_role"])
    assert "same_role_run" not in count_reasons(repaired.rejects)


def test_pandalm_votes_are_those_of_its_paper(shared_data):
    """879 of 999 rows are unanimous, 120 two to one (data set's README); without the unusable rows the shares stay."""
    reading = reading_of(shared_data, "pandalm_testset/testset-v1.json.gz")
    assert Counter(round(record.agreement, 2) for record in reading.records) == {1.0: 736, 0.67: 101}
    assert sum(isinstance(record, RankedRecord) for record in reading.records) == 77


def test_squality_pairs_follow_at_least_two_of_three_workers(shared_data):
    """With three workers and three systems, a better mean rank needs two votes of three; 300 pairs, two of them with equal means."""
    reading = reading_of(shared_data, "squality_human_eval/rankings_with_question.jsonl.gz")
    assert {record.votes for record in reading.records} == {3}
    assert min(record.agreement for record in reading.records) >= 2 / 3
    assert 300 - len(as_preferences(reading)[0]) == 2
