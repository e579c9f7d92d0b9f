"""Blinding: ids that do not depend on order, orders that say nothing, and the way back."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from annotation.tasks import Candidates, make_task, shuffled
from rlhf.errors import DataError
from rlhf.records import Prompt

QUESTION = Prompt.of_text("What is the capital of France?")
texts = st.lists(st.text(min_size=1).filter(str.strip), min_size=2, max_size=8, unique=True)


def candidates(*responses: str, models: tuple[str, ...] = (), gold: tuple[int, ...] = ()) -> Candidates:
    return Candidates(prompt=QUESTION, responses=responses, models=models, gold=gold)


def test_ids_are_promises_to_servers_that_hold_them() -> None:
    """An id that changed with a version of this program would push every task a second time; another order would misread verdicts."""
    assert candidates("Paris", "Lyon").task_id == "13dbe16776583e9e"
    assert make_task(candidates("Paris", "Lyon", "Nice"), seed=0).order == (1, 0, 2)


@settings(deadline=None)
@given(texts, st.randoms(use_true_random=False))
def test_the_order_in_a_file_leaves_no_trace(responses: list[str], rng: object) -> None:
    mixed = sorted(responses, key=lambda _: rng.random())  # type: ignore[attr-defined]
    one, other = make_task(candidates(*responses), seed=3), make_task(candidates(*mixed), seed=3)
    assert one.shown() == other.shown()


@settings(deadline=None)
@given(texts, st.data())
def test_ranks_find_back_to_the_responses_they_were_given_to(responses: list[str], data: st.DataObject) -> None:
    task = make_task(candidates(*responses), seed=0)
    by_place = data.draw(st.lists(st.integers(1, 8), min_size=len(responses), max_size=len(responses)))
    said = dict(zip(task.shown().responses, by_place, strict=True))
    assert dict(zip(task.responses, task.unblind(by_place), strict=True)) == said


def test_every_order_is_equally_likely() -> None:
    seen = Counter(shuffled(f"task {number}", 3, seed=0) for number in range(6000))
    assert set(seen) == set(permutations(range(3)))
    assert sum((count - 1000) ** 2 / 1000 for count in seen.values()) < 20.5    # chi-square, 5 degrees of freedom, p = 0.001


def test_the_first_candidate_is_shown_first_half_of_the_time() -> None:
    """Whoever writes the files puts the new model first; annotators must not be able to learn that."""
    tasks = [make_task(Candidates(prompt=Prompt.of_text(f"question {number}"), responses=(f"new {number}", f"old {number}")), seed=0)
             for number in range(4000)]
    first = sum(task.order[0] == 0 for task in tasks)
    assert abs(first - 2000) < 4 * 31.7    # four standard deviations


def test_what_is_shown_says_nothing_about_origin() -> None:
    shown = make_task(candidates("Paris", "Lyon", models=("secret-model", "other-model"), gold=(1, 2)), seed=0).shown()
    assert "model" not in repr(shown)
    assert not {"models", "gold", "source", "order"} & set(type(shown).__slots__)


@pytest.mark.parametrize(("given_parts", "said"), [
    ({"responses": ("one",)}, "1 responses; a ranking task has 2 to 8"),
    ({"responses": tuple("abcdefghi")}, "9 responses"),
    ({"responses": ("same", "same")}, "the same text"),
    ({"responses": ("a", " \n")}, "a response is empty"),
    ({"responses": ("a", "b"), "models": ("m",)}, "2 responses but 1 models"),
    ({"responses": ("a", "b"), "gold": (1, 2, 3)}, "2 responses but 3 gold"),
    ({"responses": ("a", "b"), "gold": (0, 1)}, "whole numbers from 1"),
    ({"responses": ("a", "b"), "gold": (True, 1)}, "whole numbers from 1"),
])
def test_what_nobody_could_rank_is_refused(given_parts: dict[str, tuple[object, ...]], said: str) -> None:
    with pytest.raises(DataError, match=said):
        Candidates(prompt=QUESTION, **given_parts)  # type: ignore[arg-type]


def test_ranks_for_another_number_of_places_are_refused() -> None:
    with pytest.raises(DataError, match="shows 2 responses but was answered with 3 ranks"):
        make_task(candidates("a", "b"), seed=0).unblind((1, 2, 3))
