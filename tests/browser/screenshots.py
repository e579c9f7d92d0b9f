"""Pictures of the real page, for README.md and docs/annotating.md: `python tests/browser/screenshots.py docs/images`."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from annotators_page import AnnotatorsPage
from playwright.sync_api import sync_playwright

from annotation.argilla import ArgillaBackend
from annotation.backend import Sheet
from annotation.home import Connection, Home
from annotation.server.embedded import serving
from annotation.server.install import environment, environment_folder
from annotation.server.users import Credentials, administration
from annotation.tasks import ShownTask
from rlhf.records import Message, Prompt

ROOT = Path(__file__).resolve().parents[2]
PROMPT = Prompt(messages=(
    Message(role="system", content="You help with Python. Answer briefly."),
    Message(role="user", content="How do I read a CSV file into a list of dicts?"),
    Message(role="assistant", content="With csv.DictReader. Shall I show it?"),
    Message(role="user", content="Yes, and skip rows without an <id>."),
))
RESPONSES = (
    "import csv\n\nwith open(\"rows.csv\", newline=\"\") as file:\n    rows = [row for row in csv.DictReader(file) if row[\"<id>\"]]",
    "You can use pandas for that.",
    "import csv\n\nrows = []\nfor row in csv.reader(open(\"rows.csv\")):\n    if row[0] != \"\":\n        rows.append(row)",
    "with open(\"rows.csv\") as file:\n    rows = [dict(line.split(\",\")) for line in file]",
)


def fill(connection: Connection) -> Credentials:
    """Two data sets and an annotator."""
    guidelines = (ROOT / "annotation/guidelines.md").read_text(encoding="utf-8")
    backend = ArgillaBackend(connection)
    for places in (2, 4):
        sheet = Sheet(name=f"week-48-k{places}", places=places, workspace="preferences", guidelines=guidelines, min_submitted=3,
                      confidence=True, reasons=("correct", "harmless", "complete", "clear"), comment=True)
        backend.ensure_sheet(sheet)
        backend.add(sheet, [ShownTask(id=f"task-{places}-{number}", prompt=PROMPT, responses=RESPONSES[:places]) for number in range(12)])
    backend.close()
    with administration(connection) as users:
        return users.add(["anna"])[0]


def take(page: AnnotatorsPage, annotator: Credentials, folder: Path) -> None:
    def picture(name: str) -> None:
        page.page.wait_for_timeout(600)    # until what moves has come to rest
        page.page.screenshot(path=folder / f"{name}.png")

    page.enter(annotator)
    page.page.get_by_text("week-48-k4").first.wait_for()
    picture("annotating-datasets")
    page.open("week-48-k4")
    picture("annotating-task")
    page.rank_by_keyboard((1, 3, 1, 3))
    page.page.get_by_role("radiogroup").first.get_by_text("4", exact=True).click()
    page.page.locator(".text_field_component").first.scroll_into_view_if_needed()
    picture("annotating-ranked")
    page.key("Enter")
    page.show("submitted")
    picture("annotating-submitted")
    page.page.get_by_text("Guidelines").first.click()
    picture("annotating-guidelines")


def main(folder: Path) -> None:
    python = environment(environment_folder(os.environ))
    chromium = shutil.which("chromium")
    if python is None or chromium is None:
        sys.exit("needs the annotation server (`annotation install`) and the Debian package chromium")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home, serving(Home(Path(home)), python) as connection, sync_playwright() as playwright:
        annotator = fill(connection)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        take(AnnotatorsPage(browser.new_page(viewport={"width": 1200, "height": 760}), connection.url), annotator, folder)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
