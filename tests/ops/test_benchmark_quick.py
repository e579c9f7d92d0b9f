"""The two sides of the DPO benchmark train the same thing, and its report says which bars hold. Speed is no matter for a test."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.bars import Bar, finish
from benchmarks.dpo_side import ours, trl
from benchmarks.hh_workdir import build

STEPS, BATCH = 2, 2
# trl 1.16 reads the old name of a property that transformers 5.24 renamed
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def words(start: int, count: int) -> str:
    return " ".join(f"word{(start + 7 * i) % 50}" for i in range(count))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the benchmark builds, of transcripts of unlike lengths instead of HH-RLHF's."""
    place = tmp_path_factory.mktemp("benchmark")
    rows = [{name: f"\n\nHuman: {words(i, 3 + 4 * (i % 5))}\n\nAssistant: {words(start, 2 + (3 * start) % 17)}"
             for name, start in (("chosen", 2 * i), ("rejected", 2 * i + 1))} for i in range(12)]
    (place / "hh.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    build(place, str(place / "hh.jsonl"), pairs=STEPS * BATCH)
    return place


@pytest.mark.parametrize("method", ["full", "lora"])
def test_both_sides_have_the_same_losses(folder: Path, tmp_path: Path, method: str) -> None:
    options = argparse.Namespace(folder=folder, order="sorted", method=method, steps=STEPS, batch=BATCH)
    for side in ("ours", "trl"):
        (tmp_path / side).mkdir()
    mine, theirs = ours(options, tmp_path / "ours"), trl(options, tmp_path / "trl")
    assert len(mine["losses"]) == len(theirs["losses"]) == STEPS
    assert mine["losses"] == pytest.approx(theirs["losses"], abs=1e-4)
    assert mine["losses"][0] == pytest.approx(0.693147, abs=1e-5) != mine["losses"][1]
    assert 0 < mine["tokens"] < mine["padded_tokens"]


def test_the_two_orders_hold_the_same_pairs_and_one_is_sorted(folder: Path) -> None:
    texts = {order: json.loads((folder / f"{order}.texts.json").read_text(encoding="utf-8")) for order in ("random", "sorted")}
    lengths = [len(row["prompt"]) + max(len(row["chosen"]), len(row["rejected"])) for row in texts["sorted"]]
    assert lengths == sorted(lengths)
    assert sorted(texts["random"], key=str) == sorted(texts["sorted"], key=str) and len(lengths) == STEPS * BATCH


@pytest.mark.parametrize(("bars", "code"), [
    ([Bar("speed", 5.5, 5.5), Bar("gap", 1e-5, 1e-4, "at most")], 0), ([Bar("speed", 5.4, 5.5)], 1),
    ([Bar("gap", 2e-4, 1e-4, "at most")], 1)])
def test_a_bar_that_does_not_hold_is_the_exit_code(bars: list[Bar], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert finish(bars, as_json=True, extra={"rounds": 3}) == code
    answer = json.loads(capsys.readouterr().out)
    assert answer["rounds"] == 3
    assert [set(bar) for bar in answer["bars"]] == [{"name", "value", "bar", "sense", "holds"}] * len(bars)
    assert all(bar["holds"] for bar in answer["bars"]) == (code == 0)
