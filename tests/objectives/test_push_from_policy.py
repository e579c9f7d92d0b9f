"""`annotation push --from-policy`: each prompt with different responses of a policy, and every prompt that got fewer than two named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tiny_policies import saved

from annotation.candidates import Reading
from annotation.cli_push import Sampling, sampled
from annotation.tasks import Candidates

PROMPTS = [{"prompt": f"w{number} w{number + 3}"} for number in range(2, 12)]


@pytest.fixture(scope="module")
def sampling(tmp_path_factory: pytest.TempPathFactory) -> Sampling:
    return Sampling(model=saved(tmp_path_factory.mktemp("policy")), responses=3, temperature=1.0, top_p=1.0, max_new_tokens=8,
                    template="plain", seed=0)


def answered(folder: Path, sampling: Sampling, *rows: object, limit: int | None = None) -> tuple[Reading[Candidates], str]:
    source = folder / "prompts.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    console = Console(record=True, quiet=False, width=400, file=(folder / "said.txt").open("w"))
    with console.file:
        return sampled(str(source), sampling, limit, console), console.export_text()


def test_every_prompt_gets_different_responses_signed_by_the_policy(tmp_path: Path, sampling: Sampling) -> None:
    reading, said = answered(tmp_path, sampling, *PROMPTS, PROMPTS[0])
    assert len(reading.found) == 10
    assert reading.rejects == ()
    for candidates in reading.found:
        assert len(candidates.responses) == 3
        assert candidates.models == (sampling.model,) * 3
    assert [candidates.source for candidates in reading.found] == [f"{tmp_path}/prompts.jsonl:{line}" for line in range(1, 11)]
    assert "10 of 10 prompts have responses" in said
    assert answered(tmp_path, sampling, *PROMPTS)[0].found == reading.found, "the same seed, the same tasks: pushing again adds nothing"


def test_a_policy_that_always_says_the_same_gives_nothing_to_rank(tmp_path: Path, sampling: Sampling) -> None:
    reading, said = answered(tmp_path, replace(sampling, temperature=0.0), *PROMPTS[:2])
    assert reading.found == ()
    assert [(reject.where.rsplit(":")[-1], reject.reason) for reject in reading.rejects] == [("1", "one_response"), ("2", "one_response")]
    assert "0 of 2 prompts" in said


def test_prompts_of_a_data_set_and_what_cannot_be_asked(tmp_path: Path, sampling: Sampling) -> None:
    rows = [{"prompt": "w5"}, {"text": "w6"}, {"prompt": "w7 <eos> w8"}, {"prompt": "w9"}]
    reading, _ = answered(tmp_path, replace(sampling, template="transcript"), *rows)
    assert [candidates.source.rsplit(":")[-1] for candidates in reading.found] == ["1", "4"]
    assert [(reject.where.rsplit(":")[-1], reject.reason) for reject in reading.rejects] == [("2", "missing_column"),
                                                                                            ("3", "special_token_in_text")]
    implicit = {"chosen": "Human: w5\n\nAssistant: w6", "rejected": "Human: w5\n\nAssistant: w7"}
    assert len(answered(tmp_path, sampling, implicit)[0].found) == 1
