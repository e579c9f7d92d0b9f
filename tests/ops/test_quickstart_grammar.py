"""The rule that judges the quickstart's responses: golden cases, and that every drawn response has exactly the faults it was given."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "quickstart"


def load_grammar() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart_grammar", RECIPE / "grammar.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


grammar = load_grammar()
REVERSE = "Reverse the list: fox, hat, map. Write it in brackets. End with Done."
CAPITALS = "Sort the list: owl, ant. Write it in capitals. End with Bye."
EXCLAIM = "Add the numbers: seven, nine. Answer as: <x>! End with Thanks."
LABEL = "Find the largest of: four, eleven, nine. Begin with Answer: End with Over."
QUOTES = "Count the words: key. Write it in quotes. End with Done."


@pytest.mark.parametrize(("prompt", "response"), [
    (REVERSE, "[map hat fox] Done."), (CAPITALS, "ANT OWL Bye."), (EXCLAIM, "sixteen! Thanks."), (LABEL, "Answer: eleven Over."),
    (QUOTES, '"one" Done.'), ("Name the last of: ink, jar. Write it in brackets. End with Done.", "[jar] Done.")])
def test_the_good_response_by_hand(prompt: str, response: str) -> None:
    assert grammar.answered_well(prompt, response)
    assert grammar.faults(prompt, response) == set()


@pytest.mark.parametrize(("prompt", "response", "found"), [
    (REVERSE, "[fox hat map] Done.", {"wrong answer"}),
    (REVERSE, "map hat fox Done.", {"wrong format"}),
    (REVERSE, '"map hat fox" Done.', {"wrong format"}),
    (REVERSE, "[MAP HAT FOX] Done.", {"wrong format"}),
    (REVERSE, "[map hat fox]", {"bad ending"}),
    (REVERSE, "[map hat fox] Over.", {"bad ending"}),
    (REVERSE, "[map hat fox] Done. Done.", {"bad ending"}),
    (REVERSE, "[map hat fox]Done.", {"bad ending"}),
    (REVERSE, "[map hat fox] Done. And more", {"wrong answer", "wrong format", "bad ending"}),
    (CAPITALS, "ant owl Bye.", {"wrong format"}),
    (CAPITALS, "OWL ANT Bye.", {"wrong answer"}),
    (CAPITALS, "Ant Owl Bye.", {"wrong format"}),
    (EXCLAIM, "sixteen!! Thanks.", {"wrong answer"}),
    (EXCLAIM, "", {"wrong answer", "wrong format", "bad ending"}),
    (LABEL, "eleven Over.", {"wrong format"}),
    (LABEL, "Answer: Over.", {"wrong answer", "wrong format"})])
def test_faults_by_hand(prompt: str, response: str, found: set[str]) -> None:
    assert grammar.faults(prompt, response) == found
    assert not grammar.answered_well(prompt, response)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), wanted=st.sets(st.sampled_from(grammar.FAULTS)))
def test_a_drawn_response_has_the_faults_it_was_given(seed: int, wanted: set[str]) -> None:
    rng = random.Random(seed)
    task = grammar.draw_task(rng)
    assert grammar.read_task(task.prompt) == task
    assert grammar.faults(task.prompt, grammar.respond(task, wanted, rng)) == wanted


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), response=st.text(alphabet='antoneDone. []"!A:', max_size=24))
def test_only_one_response_is_without_a_fault(seed: int, response: str) -> None:
    task = grammar.draw_task(random.Random(seed))
    assert grammar.answered_well(task.prompt, response) == (response.strip() == task.good_response)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(2, 4))
def test_ranks_follow_the_number_of_faults(seed: int, count: int) -> None:
    rng = random.Random(seed)
    task = grammar.draw_task(rng)
    ranked = grammar.ranked_responses(task, count, grammar.Habits(), rng)
    by_rank = defaultdict(set)
    for response, rank in ranked:
        by_rank[rank].add(len(grammar.faults(task.prompt, response)))
    ordered = [by_rank[rank] for rank in range(1, len(by_rank) + 1)]
    assert len(ranked) == count and len(ordered) > 1
    assert all(len(numbers) == 1 for numbers in ordered)
    assert [min(numbers) for numbers in ordered] == sorted({min(numbers) for numbers in ordered})
    assert ordered[0] == {0}


def test_text_outside_the_grammar_is_refused() -> None:
    with pytest.raises(ValueError, match="not a prompt of the quickstart grammar"):
        grammar.faults("Reverse the list: fox, dragon. Write it in brackets. End with Done.", "[dragon fox] Done.")


def test_prepare_writes_the_same_files_for_the_same_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPE))
    prepare = importlib.import_module("prepare")
    written = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setattr(sys, "argv", ["prepare.py", str(folder), "--seed", str(seed), "--prompts", "300", "--unranked", "30",
                                          "--gold", "20", "--test", "40", "--hidden", "16", "--layers", "1"])
        with torch.random.fork_rng():
            prepare.main()
        written.append({path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()})
    for module in ("prepare", "grammar"):
        monkeypatch.delitem(sys.modules, module)
    assert written[0] == written[1]
    assert written[0].keys() == written[2].keys() and written[0] != written[2]
    shown = [json.loads(line) for line in (tmp_path / "a" / "sft.jsonl").read_text().splitlines()]
    others = {name: [json.loads(line) for line in (tmp_path / "a" / f"{name}.jsonl").read_text().splitlines()]
              for name in ("prompts", "gold", "test")}
    assert {name: len(rows) for name, rows in others.items()} == {"prompts": 30, "gold": 20, "test": 40}
    assert len({row["prompt"] for rows in (shown, *others.values()) for row in rows}) == 300 + 30 + 20 + 40      # none in two files
    for row in others["gold"]:
        assert [len(grammar.faults(row["prompt"], response)) for response in row["responses"]] == [0, 1, 2, 3]
        assert row["ranks"] == [1, 2, 3, 4]
    good = sum(grammar.answered_well(row["prompt"], row["response"]) for row in shown) / len(shown)
    assert 0.45 < good < 0.65
