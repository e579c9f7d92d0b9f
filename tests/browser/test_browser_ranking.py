"""What is ranked with keys and mouse in a real browser is what the server gives back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from annotators_page import AnnotatorsPage, Ranks
from playwright.sync_api import Browser, expect

from annotation.argilla import ArgillaBackend
from annotation.backend import Answer, Sheet
from annotation.server.embedded import RunningServer
from annotation.server.users import Credentials, administration
from annotation.tasks import ShownTask
from rlhf.records import Message, Prompt

SHEET = Sheet(name="ranking-k2", places=2, workspace="preferences", guidelines="# Which is better?\n\nRank the *best* first.",
              min_submitted=20, confidence=True, reasons=("correct", "clear"), comment=True)
PAIRS: list[Ranks] = [(1, 2), (2, 1), (1, 1)]
FOURS: list[Ranks] = [(1, 2, 3, 4), (4, 3, 2, 1), (2, 4, 1, 3), (1, 1, 2, 2), (3, 1, 3, 3)]


def task(places: int, number: int) -> ShownTask:
    return ShownTask(id=f"k{places}-{number:02}", prompt=Prompt(messages=(
        Message(role="system", content="Be brief."), Message(role="user", content=f"question {places}{number:02}"))),
        responses=tuple(f"Response number {place} to {number}." for place in range(places)))


@pytest.fixture(scope="module")
def backend(server: RunningServer) -> Iterator[ArgillaBackend]:
    backend = ArgillaBackend(server.connection)
    for places in (2, 4):
        sheet = replace(SHEET, name=f"ranking-k{places}", places=places)
        backend.ensure_sheet(sheet)
        assert len(backend.add(sheet, [task(places, number) for number in range(12)]).new) == 12
    yield backend
    backend.close()


def annotator(server: RunningServer, name: str) -> Credentials:
    with administration(server.connection) as users:
        return users.add([name])[0]


def opened(chromium: Browser, server: RunningServer, name: str, dataset: str) -> AnnotatorsPage:
    """A new annotator in a new window, in front of the first task."""
    page = AnnotatorsPage(chromium.new_page(viewport={"width": 1440, "height": 900}), server.connection.url)
    page.enter(annotator(server, name))
    page.open(dataset)
    return page


def answers(backend: ArgillaBackend, places: int, name: str) -> dict[str, Answer]:
    """By task."""
    sheet = replace(SHEET, name=f"ranking-k{places}", places=places)
    return {answer.task_id: answer for answer in backend.answers(sheet) if answer.annotator == name}


def shown_id(page: AnnotatorsPage, places: int) -> str:
    return f"k{places}-{page.prompt().removeprefix(f'question {places}')}"


@pytest.mark.parametrize("by", ["keyboard", "mouse"])
@pytest.mark.parametrize("orders", [PAIRS, FOURS], ids=["2 responses", "4 responses"])
def test_each_ranking_comes_back_as_it_was_given(
        chromium: Browser, server: RunningServer, backend: ArgillaBackend, orders: list[Ranks], by: str) -> None:
    places = len(orders[0])
    name = f"{by}-{places}"
    page, given = opened(chromium, server, name, f"ranking-k{places}"), {}
    for ranks in orders:
        given[shown_id(page, places)] = tuple(ranks)
        before = page.prompt()
        if by == "keyboard":
            page.rank_by_keyboard(ranks)
            assert page.key("Enter").status == 201
        else:
            page.rank_by_mouse(ranks)
            assert page.press("Submit").status == 201
        expect(page.page.locator(".chat__bubble").last).not_to_have_text(before)    # the next task has come by itself
        page.wait_for_task()
    assert len(given) == len(orders)
    assert {task: answer.ranks for task, answer in answers(backend, places, name).items()} == given
    assert {answer.status for answer in answers(backend, places, name).values()} == {"submitted"}


def test_a_draft_a_discard_and_a_change_of_mind(chromium: Browser, server: RunningServer, backend: ArgillaBackend) -> None:
    page = opened(chromium, server, "undecided", "ranking-k2")
    drafted = shown_id(page, 2)
    page.page.keyboard.press("2")
    assert page.key("Control+s").status == 201
    page.show("pending")
    discarded = shown_id(page, 2)
    assert page.key("Backspace").status == 201
    page.show("pending")
    changed = shown_id(page, 2)
    page.rank_by_keyboard((1, 2))
    page.page.get_by_role("radiogroup").first.get_by_text("4", exact=True).click()
    page.key("Enter")
    stored = answers(backend, 2, "undecided")
    assert {task: (answer.status, answer.ranks, answer.confidence) for task, answer in stored.items()} == {
        drafted: ("draft", (), None), discarded: ("discarded", (), None), changed: ("submitted", (1, 2), 4)}

    page.show("submitted")
    assert shown_id(page, 2) == changed
    assert page.ranked() == ["Response 1", "Response 2"]
    page.rank_by_mouse((2, 1))
    assert page.press("Submit").status == 200
    page.show("draft")
    assert page.ranked() == ["", "Response 1"]
    again = answers(backend, 2, "undecided")
    assert again[changed].ranks == (2, 1)
    assert again[changed].response_id == stored[changed].response_id
    assert again[changed].updated_at > stored[changed].updated_at


def test_a_search_finds_the_task(chromium: Browser, server: RunningServer, backend: ArgillaBackend) -> None:
    page = opened(chromium, server, "searcher", "ranking-k4")
    page.search("question 407")
    expect(page.page.locator(".chat__bubble").last).to_have_text("question 407")
    assert page.page.get_by_text("1 of 1").is_visible()


def test_guidelines_and_names_of_responses_are_there(chromium: Browser, server: RunningServer, backend: ArgillaBackend) -> None:
    page = opened(chromium, server, "reader", "ranking-k4")
    assert [place.inner_text().strip() for place in page.places.all()] == [f"Response {number}" for number in range(1, 5)]
    titles = [title.inner_text() for title in page.page.locator(".text_field_component__title-content").all()]
    assert titles == [f"Response {number}" for number in range(1, 5)]
    page.page.get_by_text("Guidelines").first.click()
    expect(page.page.get_by_role("heading", name="Which is better?")).to_be_visible()


def test_a_wrong_password_is_said_and_so_is_the_wait(chromium: Browser, server: RunningServer) -> None:
    annotator(server, "forgetful")
    page = AnnotatorsPage(chromium.new_page(), server.connection.url)
    page.sign_in("forgetful", "wrong")
    expect(page.page.get_by_text("Wrong username or password").first).to_be_visible()
    for _ in range(5):
        page.sign_in("forgetful", "wrong")
        page.page.wait_for_load_state("networkidle")
    expect(page.page.get_by_text("Too many failed attempts").first).to_be_visible()
