"""The page as an annotator uses it: what is clicked and typed, and nothing behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from playwright.sync_api import Locator, Page, Response

from annotation.server.users import Credentials

Ranks = Sequence[int]
MOVED_ON = "before => document.activeElement.id !== before || !document.querySelector('.draggable__rank-card--unranked')"


@dataclass(frozen=True)
class AnnotatorsPage:
    page: Page
    url: str

    def sign_in(self, name: str, password: str) -> None:
        self.page.goto(f"{self.url}/sign-in")
        inputs = self.page.locator("input")
        inputs.nth(1).wait_for()
        inputs.nth(0).fill(name)
        inputs.nth(1).fill(password)
        self.page.get_by_role("button", name="Sign in").click()

    def enter(self, credentials: Credentials) -> None:
        self.sign_in(credentials.name, credentials.password)
        self.page.wait_for_url(f"{self.url}/")

    def open(self, dataset: str) -> None:
        """From the list of data sets."""
        self.page.get_by_text(dataset, exact=True).first.click()
        self.wait_for_task()

    def show(self, status: str) -> None:
        """pending, draft, discarded or submitted, as the address says."""
        self.page.goto(f"{self.page.url.split('?')[0]}?page=1&status={status}")
        self.wait_for_task()

    def search(self, text: str) -> None:
        self.page.locator("[class*=search]").first.click()
        self.page.keyboard.type(text)
        with self.page.expect_response(lambda response: response.url.split("?")[0].endswith("/records/search")):
            self.page.keyboard.press("Enter")
        self.wait_for_task()

    def wait_for_task(self) -> None:
        self.places.first.wait_for()
        self.page.locator("#response_1").focus()

    @property
    def places(self) -> Locator:
        """What is ranked: Response 1, Response 2, ..."""
        return self.page.locator(".draggable [id^=response_]:not([id*='-'])")

    def ranked(self) -> list[str]:
        """What lies on each rank."""
        return [" ".join(slot.inner_text().split()) for slot in self.page.locator(".draggable__slot-box").all()]

    def field(self, index: int) -> Locator:
        """The content of a field of the task that is shown."""
        return self.page.locator("[id^=fields-content-]").nth(index)

    def prompt(self) -> str:
        """The last message of the conversation."""
        return self.page.locator(".chat__bubble").last.inner_text().strip()

    def rank_by_keyboard(self, ranks: Ranks) -> None:
        """As fast as the keys can be pressed: the focus moves on by itself."""
        self.page.locator("#response_1").focus()
        for rank in ranks:
            focused = self.page.evaluate("document.activeElement.id")
            self.page.keyboard.press(str(rank))
            self.page.wait_for_function(MOVED_ON, arg=focused)

    def rank_by_mouse(self, ranks: Ranks) -> None:
        for place, rank in enumerate(ranks, 1):
            self.drag(f"#response_{place}", self.page.locator(".draggable__slot-box").nth(rank - 1))

    def drag(self, response: str, rank: Locator) -> None:
        """Ranks that are passed on the way make room and push the others down: the hand follows, and looks where it has let go."""
        for _ in range(5):
            self.page.locator(f"{response} .draggable__rank-card__title").hover()
            self.page.mouse.down()
            for _ in range(4):
                box = rank.bounding_box()
                assert box is not None
                self.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=8)
                self.page.wait_for_timeout(50)
            self.page.mouse.up()
            if rank.locator(response).count():
                return
        raise AssertionError(f"{response} cannot be dragged there: {self.ranked()}")

    def press(self, button: str) -> Response:
        """Submit, Discard or Save as draft, with the mouse; waits for the server's answer."""
        with self.page.expect_response(is_stored) as stored:
            self.page.locator(".footer-form").get_by_role("button", name=button).click()
        return stored.value

    def key(self, key: str) -> Response:
        """Enter, Backspace or Control+s."""
        with self.page.expect_response(is_stored) as stored:
            self.page.keyboard.press(key)
        return stored.value


def is_stored(response: Response) -> bool:
    path = urlsplit(response.url).path
    return response.request.method in ("POST", "PUT") and "/responses" in path
