"""Exact resume of the real training functions, where checkpoints hold different things: adapters, a second one, 4-bit bases, patience.

A kill right after a save leaves the folder as it is with the later checkpoints, the later lines and the model taken away.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kill_resume import write_inputs
from rich.console import Console
from safetensors.torch import load_file

from rlhf import dpo, sft
from rlhf.config import BatchConfig, DataConfig, DpoConfig, LoopConfig, LoraConfig, ModelConfig, OptimConfig, SftConfig
from rlhf.distributed.state import checkpoints_in, delete_checkpoint, step_of
from rlhf.fitting import Site
from rlhf.step_log import exact_figures, read_log, step_lines


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder, rows=40, hidden=64)    # the least that NF4 takes
    return folder


def site(inputs: Path, folder: Path, *, method: str, start: str | None = None) -> Site:
    folder.mkdir(parents=True, exist_ok=True)
    model = ModelConfig(name=str(inputs / "model"), method=method, lora=LoraConfig(r=4, dropout=0.1))
    return Site(folder=folder, name=folder.name, model=model, seed=1, start=start, inputs={"seed": "1"}, console=Console(quiet=True))


def sections(inputs: Path, **loop) -> dict:
    return {"data": DataConfig(train=(str(inputs / "pairs.jsonl"),), holdout_percent=20, template="plain", max_length=32),
            "optim": OptimConfig(learning_rate=3e-3), "batch": BatchConfig(per_step=8, per_microbatch=4),
            "loop": LoopConfig(**{"epochs": 2.5, "save_every": 3, "save_total_limit": 9, "dropout": True, **loop})}


def outcome(folder: Path) -> tuple[list[dict], dict[str, bytes]]:
    figures = [exact_figures(line) for line in read_log(folder / "train_log.jsonl").lines]
    return figures, {path.name: path.read_bytes() for path in (folder / "model").glob("*.safetensors")}


def killed_after(folder: Path, step: int) -> None:
    for checkpoint in checkpoints_in(folder / "checkpoints"):
        if step_of(checkpoint) > step:
            delete_checkpoint(checkpoint)
    shutil.rmtree(folder / "model")


def lines_until(folder: Path, step: int) -> list[dict]:
    return [line for line in read_log(folder / "train_log.jsonl").lines if line["step"] <= step]


def continues_to(whole, train, config, place: Site, *, step: int) -> None:
    """Continues, and does not begin anew: the lines before the kill keep their times."""
    killed_after(place.folder, step)
    before = lines_until(place.folder, step)
    train(config, place)
    assert lines_until(place.folder, step) == before
    assert outcome(place.folder) == whole


def resumed_equals_whole(train, config, place: Site, *, step: int) -> None:
    train(config, place)
    whole = outcome(place.folder)
    assert whole[1]
    continues_to(whole, train, config, place, step=step)


@pytest.mark.parametrize("method", ["full", "qlora", "dora"])
def test_sft_resumes_exactly(inputs, tmp_path, method):
    resumed_equals_whole(sft.train, SftConfig(**sections(inputs)), site(inputs, tmp_path, method=method), step=6)


def test_dpo_on_an_sft_adapter_resumes_exactly(inputs, tmp_path):
    """Two adapters on one base: the policy's, which is restored, and the frozen reference, which must not be."""
    sft.train(SftConfig(**sections(inputs)), site(inputs, tmp_path / "sft", method="lora"))
    place = site(inputs, tmp_path / "dpo", method="lora", start=str(tmp_path / "sft" / "model"))
    resumed_equals_whole(dpo.train, DpoConfig(**sections(inputs)), place, step=6)


def test_dpo_of_a_whole_model_resumes_exactly(inputs, tmp_path):
    resumed_equals_whole(dpo.train, DpoConfig(**sections(inputs)), site(inputs, tmp_path, method="full"), step=6)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_patience_resumes_exactly_and_ends_with_the_best_model(inputs, tmp_path, method):
    """So high a learning rate soon makes the held-out loss rise."""
    config = SftConfig(**sections(inputs, epochs=40.0, evaluate_every=1, patience=3))
    config = replace(config, optim=replace(config.optim, learning_rate=0.05))
    place = site(inputs, tmp_path, method=method)
    result = sft.train(config, place)
    losses = {line["step"]: line["eval_loss"] for line in read_log(tmp_path / "train_log.jsonl").lines if "eval_loss" in line}
    assert result.after["eval_loss"] == losses[result.kept_step] == min(losses.values())
    assert result.kept_step == result.steps - 3 > 0
    assert result.tokens == sum(line["tokens"] for line in step_lines(read_log(tmp_path / "train_log.jsonl").lines))
    best = tmp_path / "checkpoints" / f"checkpoint-{result.kept_step}"
    (name,) = (path.name for path in (tmp_path / "model").glob("*.safetensors"))
    kept, saved = load_file(best / name), load_file(tmp_path / "model" / name)
    assert kept.keys() == saved.keys()
    assert all(torch.equal(kept[key], saved[key]) for key in kept)
    whole = outcome(tmp_path)
    for step in (result.steps, result.steps - 2):
        continues_to(whole, sft.train, config, place, step=step)
