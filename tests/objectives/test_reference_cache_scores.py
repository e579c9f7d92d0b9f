"""Cached reference scores: found again whatever surrounds them, never mixed up, never torn, and without touching training."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny_policies import saved

from rlhf.config import LoraConfig, ModelConfig
from rlhf.errors import DataError, GuardError, StorageError
from rlhf.models.loading import load_policy
from rlhf.models.reference_cache import ReferenceScores, Scores
from rlhf.models.roles import reference_for
from rlhf.records import TokenRun


def run(prompt: Sequence[int], *responses: Sequence[int]) -> TokenRun:
    return TokenRun(id="-".join(map(str, prompt)), prompt=tuple(prompt), responses=tuple(map(tuple, responses)))


def cache(folder: Path, *, fingerprint: str = "a" * 64, dtype: str = "float32") -> ReferenceScores:
    return ReferenceScores(folder, fingerprint=fingerprint, dtype=dtype)


A, B = run([1, 2], [3], [4, 5]), run([6], [7, 8], [9])


def test_scores_come_back_from_disk_as_they_were(tmp_path: Path) -> None:
    exact = (-1.1754943508222875e-38, -123.456789012345678)
    cache(tmp_path).store([A, B], [exact, (-0.0, -3.0)])
    assert cache(tmp_path).lookup([B, A]) == [(0.0, -3.0), exact]


def test_a_subset_a_superset_and_a_regrouping_find_what_is_there(tmp_path: Path) -> None:
    cache(tmp_path).store([A, B], [(-1.0, -2.0), (-3.0, -4.0)])
    again = cache(tmp_path)
    assert again.lookup([run([6], [9])]) == [(-4.0,)]
    assert again.lookup([run([1, 2], [4, 5], [3])]) == [(-2.0, -1.0)]           # swapped chosen and rejected
    assert again.lookup([run([1, 2], [3], [10])]) == [None]                     # one response is new


@pytest.mark.parametrize("other", [run([1], [2, 3], [4, 5]), run([1, 2, 3], [3], [4, 5]), run([2, 1], [3], [4, 5])])
def test_any_other_prompt_or_boundary_is_another_entry(tmp_path: Path, other: TokenRun) -> None:
    scores = cache(tmp_path)
    scores.store([A], [(-1.0, -2.0)])
    assert scores.lookup([other]) == [None]


def test_another_reference_or_precision_shares_nothing(tmp_path: Path) -> None:
    cache(tmp_path).store([A], [(-1.0, -2.0)])
    assert cache(tmp_path, fingerprint="b" * 64).lookup([A]) == [None]
    assert cache(tmp_path, dtype="bfloat16").lookup([A]) == [None]


def test_only_what_is_missing_is_scored_and_each_run_once(tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def score(runs: Sequence[TokenRun]) -> list[Scores]:
        asked.append([one.id for one in runs])
        return [tuple(-float(sum(response)) for response in one.responses) for one in runs]

    first = cache(tmp_path)
    assert first.complete([A, A], score) == [(-3.0, -9.0), (-3.0, -9.0)]
    c = run([11], [12])
    assert cache(tmp_path).complete([A, B, c, B], score, chunk=1) == [(-3.0, -9.0), (-15.0, -9.0), (-12.0,), (-15.0, -9.0)]
    assert asked == [["1-2"], ["6"], ["11"]]
    assert cache(tmp_path).complete([c, A], lambda _: pytest.fail("everything is there")) == [(-12.0,), (-3.0, -9.0)]


def test_what_was_scored_before_an_interruption_is_kept(tmp_path: Path) -> None:
    def score(runs: Sequence[TokenRun]) -> list[Scores]:
        if runs[0] is B:
            raise KeyboardInterrupt
        return [(-1.0, -2.0)]
    with pytest.raises(KeyboardInterrupt):
        cache(tmp_path).complete([A, B], score, chunk=1)
    assert cache(tmp_path).lookup([A, B]) == [(-1.0, -2.0), None]


def test_many_writers_lose_nothing(tmp_path: Path) -> None:
    runs = [run([number], [number + 1]) for number in range(64)]

    def write(part: list[TokenRun]) -> None:
        cache(tmp_path).store(part, [(-float(one.prompt[0]),) for one in part])
    writers = [threading.Thread(target=write, args=(runs[first : first + 16],)) for first in range(0, 56, 8)]   # they overlap
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert cache(tmp_path).lookup(runs) == [(-float(number),) for number in range(64)]
    assert not list(tmp_path.rglob("*.partial"))


def test_a_damaged_file_is_named_and_a_half_written_one_ignored(tmp_path: Path) -> None:
    scores = cache(tmp_path)
    scores.store([A], [(-1.0, -2.0)])
    (scores.folder / "tmp.partial").write_bytes(b"PK")                           # what a kill leaves
    assert cache(tmp_path).lookup([A]) == [(-1.0, -2.0)]
    (path,) = scores.folder.glob("*.npz")
    content = bytearray(path.read_bytes())
    position = content.index(b"\x00\x00\x00\x00\x00\x00\xf0\xbf")                # -1.0
    content[position] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path.name} of the reference cache is damaged"):
        cache(tmp_path)


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match="could not be written"):
        cache(tmp_path / "cache").store([A], [(-1.0, -2.0)])


def test_a_score_that_is_no_number_is_never_cached(tmp_path: Path) -> None:
    scores = cache(tmp_path)
    with pytest.raises(GuardError, match=r"row 1-2: .* log-probability nan"):
        scores.store([B, A], [(-1.0, -1.0), (-1.0, float("nan"))])
    assert cache(tmp_path).lookup([B]) == [None]


def test_scoring_through_the_cache_leaves_random_state_modes_and_dropout_alone(tmp_path: Path) -> None:
    policy = load_policy(ModelConfig(name=saved(tmp_path / "base"), lora=LoraConfig(dropout=0.5)), method="lora", start=None, seed=0)
    reference = reference_for(policy)
    policy.model.train()

    def score(runs: Sequence[TokenRun]) -> list[Scores]:
        with reference.scoring() as module:
            return [tuple(_summed(module, one.prompt, response) for response in one.responses) for one in runs]

    torch.manual_seed(4)
    before = torch.get_rng_state()
    scores = ReferenceScores(tmp_path / "cache", fingerprint=reference.fingerprint(), dtype="float32")
    values = scores.complete([A, B], score)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in policy.model.modules())
    assert values == score([A, B])


def _summed(module: torch.nn.Module, prompt: tuple[int, ...], response: tuple[int, ...]) -> float:
    ids = torch.tensor([prompt + response])
    logps = module(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
    return float(logps[len(prompt) - 1 :].sum())
