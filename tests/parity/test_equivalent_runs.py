"""Runs that must be one and the same: other microbatches, layouts and reference forms, one loss curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_stage import run_dpo, write_model, write_pairs

from rlhf.config import BatchConfig


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("equivalent")
    write_pairs(folder)
    return folder, write_model(folder, "llama")


def curve(lines: list[dict[str, Any]], name: str = "loss") -> list[float]:
    return [line[name] for line in lines]


@pytest.fixture(scope="module")
def whole(inputs: tuple[Path, Path]) -> list[dict[str, Any]]:
    """Steps of 8 pairs in one microbatch: what the others must equal."""
    return run_dpo(*inputs, "whole", batch=BatchConfig(per_step=8, per_microbatch=8))[1]


@pytest.mark.parametrize(("name", "settings"), [
    ("eight of one", {"batch": BatchConfig(per_step=8, per_microbatch=1)}),
    ("two of four", {"batch": BatchConfig(per_step=8, per_microbatch=4)}),
    ("by tokens", {"batch": BatchConfig(per_step=8, per_microbatch=8, tokens_per_microbatch=60)}),
    ("padded", {"batch": BatchConfig(per_step=8, per_microbatch=4), "layout": "padded"}),
    ("precomputed reference", {"batch": BatchConfig(per_step=8, per_microbatch=4), "precompute_reference": True}),
])
def test_one_loss_curve(name: str, settings: dict[str, Any], inputs: tuple[Path, Path], whole: list[dict[str, Any]]) -> None:
    _, lines = run_dpo(*inputs, name.replace(" ", "-"), **settings)
    assert curve(lines) == pytest.approx(curve(whole), abs=1e-5)
    assert curve(lines, "grad_norm") == pytest.approx(curve(whole, "grad_norm"), rel=1e-4)
    assert curve(lines, "rewards/margins") == pytest.approx(curve(whole, "rewards/margins"), abs=1e-5)


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_a_combination_with_sft_does_not_depend_on_the_microbatches(cut: int, inputs: tuple[Path, Path]) -> None:
    losses = {"sigmoid": 1.0, "sft": 0.5}
    _, whole = run_dpo(*inputs, f"sft-whole-{cut}", loss=losses, batch=BatchConfig(per_step=4, per_microbatch=4))
    _, parts = run_dpo(*inputs, f"sft-parts-{cut}", loss=losses, batch=BatchConfig(per_step=4, per_microbatch=cut))
    assert curve(parts) == pytest.approx(curve(whole), abs=1e-5)


def test_a_second_run_finds_its_reference_scores_and_has_the_same_losses(inputs: tuple[Path, Path]) -> None:
    settings: dict[str, Any] = {"batch": BatchConfig(per_step=8, per_microbatch=4), "precompute_reference": True}
    _, first = run_dpo(*inputs, "scores-first", **settings)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (inputs[0] / "reference_scores").rglob("*.npz"))
    _, second = run_dpo(*inputs, "scores-second", **settings)
    assert before
    assert sorted((path.name, path.stat().st_mtime_ns) for path in (inputs[0] / "reference_scores").rglob("*.npz")) == before
    assert curve(first) == curve(second)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_reference_scores_of_bfloat16_are_those_of_the_loop(method: str, inputs: tuple[Path, Path]) -> None:
    """Both are taken under the same autocast: what is left is the order of additions in other microbatches."""
    settings: dict[str, Any] = {"batch": BatchConfig(per_step=8, per_microbatch=8, shuffle=False), "dtype": "bfloat16", "method": method}
    _, live = run_dpo(*inputs, f"bf16-live-{method}", **settings)
    _, scored = run_dpo(*inputs, f"bf16-scored-{method}", precompute_reference=True, **settings)
    assert curve(live)[0] == pytest.approx(0.6931472, abs=1e-6)
    assert curve(scored) == pytest.approx(curve(live), abs=2e-3)


def test_an_epoch_has_a_partial_last_step(inputs: tuple[Path, Path]) -> None:
    result, lines = run_dpo(*inputs, "partial", steps=None, batch=BatchConfig(per_step=6, per_microbatch=4))
    assert result.steps == 3                                   # 16 pairs: 6 + 6 + 4
    assert [line["epoch"] for line in lines] == pytest.approx([6 / 16, 12 / 16, 1.0])
