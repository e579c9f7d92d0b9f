"""`annotation agreement` from a project's folder to its answer, its exit code, and a page in which nothing of others is markup."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from exported_projects import task, verdict

from annotation.cli import main
from annotation.home import Home
from annotation.project import Guideline, Project, add_to_ledger, save_project
from annotation.verdicts import VerdictLog

SCRIPT = "<script>alert('x')</script>"
EVE = f"eve{SCRIPT}[bold]"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A project of twelve tasks, some disputed: alpha is 0.56 or so. Texts and a name try to become markup."""
    home = Home(tmp_path / "home")
    project = Project(folder=home.project("week-48"), workspace="team", overlap=3, places=(2,),
                      guidelines=(Guideline(version="v1-aa", since="2026-11-01T00:00:00.000000Z", text="The more helpful one."),))
    save_project(project)
    tasks = [task(f"secret question {number} {SCRIPT}", f"secret answer a {SCRIPT}", "secret answer b") for number in range(12)]
    add_to_ledger(project, tasks)
    said = [verdict(item, name, (1, 2) if number % 2 else (2, 1)) for number, item in enumerate(tasks) for name in ("ada", "ben")]
    said += [verdict(item, EVE, (1, 2) if (number % 2) ^ (number < 4) else (2, 1)) for number, item in enumerate(tasks)]
    VerdictLog(project.verdicts_file).append(replace(one, at=f"2026-11-02T09:{number:02}:00.000000Z", response_id=str(number))
                                             for number, one in enumerate(said))
    return home


def run(home: Home, *options: str) -> int:
    return main(["agreement", "week-48", "--home", str(home.folder), *options])


def test_the_answer_is_one_object_with_every_figure(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(home, "--json") == 0
    answer = json.loads(capfd.readouterr().out)
    # D_o = 4 of 12 tasks with two of three pairs apart = 2/9; 18 of 36 ratings are the first, so D_e = 18 / 35
    assert answer["overall"]["alpha"]["value"] == pytest.approx(1 - (2 / 9) / (18 / 35))
    assert [one["name"] for one in answer["annotators"]] == ["ada", "ben", EVE]
    assert answer["by_guideline"]["v1"]["tasks"] == 12
    assert len(answer["disputed"]) == 4
    assert answer["page"] == str(home.project("week-48") / "agreement.html")


@pytest.mark.parametrize(("least", "code", "said"), [("0.5", 0, "alpha 0.568 reaches 0.5"), ("0.6", 1, "alpha 0.568 is below 0.6")])
def test_the_gate(home: Home, capfd: pytest.CaptureFixture[str], least: str, code: int, said: str) -> None:
    assert run(home, "--min-alpha", least) == code
    assert said in capfd.readouterr().out


def test_alpha_that_cannot_be_told_does_not_pass(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    home = Home(tmp_path)
    save_project(Project(folder=home.project("week-48"), workspace="team", overlap=3,
                         guidelines=(Guideline(version="v1-aa", since="", text="x"),)))
    assert run(home, "--min-alpha", "-1") == 1
    assert "cannot be told" in capfd.readouterr().out
    assert run(home) == 0


def test_names_are_shown_as_they_are_written(home: Home, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    assert run(home) == 0
    assert EVE in capfd.readouterr().out


def test_the_page_has_no_texts_unless_asked_and_never_markup(home: Home, tmp_path: Path) -> None:
    assert run(home) == 0
    assert run(home, "--show-texts", "--output", str(tmp_path / "new" / "with.html")) == 0
    without = (home.project("week-48") / "agreement.html").read_text(encoding="utf-8")
    with_texts = (tmp_path / "new" / "with.html").read_text(encoding="utf-8")
    assert "secret" not in without
    assert f"secret question 0 {SCRIPT}" in unescape(with_texts)
    for page in (without, with_texts):
        assert "<script" not in page and EVE in unescape(page)
        assert re.findall(r"(?:src|href)=[\"'](?!data:image/png;base64,)", page) == []      # nothing is loaded from anywhere
        assert "default-src 'none'" in page


def test_an_unknown_project_is_named(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["agreement", "week-49", "--home", str(home.folder)]) == 2
    assert "no project week-49 (known: week-48)" in capfd.readouterr().err
