"""`annotation export` as it is typed: what it writes, says and answers, and its exit codes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from exported_projects import task, verdict, votes

from annotation.cli import main
from annotation.home import Home
from annotation.project import Guideline, Project, add_to_ledger, save_project
from annotation.tasks import Task
from annotation.verdicts import Verdict, VerdictLog

A, B, TIE = (1, 2), (2, 1), (1, 1)


def home_with(folder: Path, tasks: list[Task], verdicts: list[Verdict], *, overlap: int = 2) -> Path:
    """A home with the project week-48, as push and pull leave it."""
    home = Home(folder / "home")
    project = Project(folder=home.project("week-48"), workspace="w", overlap=overlap, places=(2,),
                      guidelines=(Guideline(version="v1-abc", since="2026-01-01T00:00:00.000000", text="Be fair."),))
    save_project(project)
    add_to_ledger(project, tasks)
    VerdictLog(project.verdicts_file).append(verdicts)
    return home.folder


def export(capfd: pytest.CaptureFixture[str], home: Path, out: Path, *options: str) -> tuple[int, dict[str, object], str]:
    """Exit code, answer, and what was said."""
    code = main(["export", "week-48", str(out), "--home", str(home), "--json", *options])
    captured = capfd.readouterr()
    return code, json.loads(captured.out), captured.err


@pytest.fixture
def home(tmp_path: Path) -> Path:
    clear, split, early = task("clear [red]", "a", "b"), task("split", "a", "b"), task("early", "a", "b")
    changed = [replace(said, at="2026-01-02") for said in votes(clear, A, A)]
    earlier = [replace(said, ranks=B, at="2026-01-01") for said in changed]
    return home_with(tmp_path, [clear, split, early], [*earlier, *changed, *votes(split, A, B), verdict(early, "ann0", TIE)])


def test_a_project_becomes_a_folder_and_an_answer_that_is_its_manifest(home, tmp_path, capfd) -> None:
    code, answer, said = export(capfd, home, tmp_path / "out", "--holdout-percent", "0")
    manifest = json.loads((tmp_path / "out/manifest.json").read_text(encoding="utf-8"))
    assert (code, answer["ok"], answer["folder"]) == (0, True, str(tmp_path / "out"))
    assert {name: value for name, value in answer.items() if name not in ("ok", "folder", "warnings")} == manifest
    counts = {kind: count for kind, count in manifest["tasks"].items() if count}
    assert counts == {"all": 3, "ranking": 1, "undecided": 1, "too_few_votes": 1}
    assert manifest["settings"] == {"policy": "majority", "min_votes": 2, "min_posterior": 0.8, "holdout_percent": 0.0, "annotators": [],
                                    "without": [], "guideline": None}
    pair, = (json.loads(line) for line in (tmp_path / "out/train/pairs.jsonl").read_text(encoding="utf-8").splitlines())
    assert (pair["chosen"], pair["rejected"], pair["votes"], pair["agreement"]) == ("a", "b", 2, 1.0)
    for count in ("undecided", "too_few_votes", "rankings.jsonl", manifest["content_id"]):
        assert count in said
    disputed, like_coins, no_holdout = answer["warnings"]
    assert "1 of 2 judged tasks (50%) are disputed" in disputed
    assert "only 1 of 2 pairs of strict votes agree, no more than coins would" in like_coins
    assert "nothing is held out" in no_holdout


def test_the_same_again_is_the_same_content(home, tmp_path, capfd) -> None:
    answers = [export(capfd, home, tmp_path / name)[1] for name in ("one", "two")]
    assert answers[0]["content_id"] == answers[1]["content_id"]
    assert answers[0]["files"] == answers[1]["files"]
    assert answers[0]["verdicts_id"] == answers[1]["verdicts_id"]


@pytest.mark.parametrize(("policy", "overlap", "asked"), [("majority", 3, 3), ("unanimous", 1, 2), ("unanimous", 4, 4), ("all", 3, 1)])
def test_without_min_votes_a_task_needs_what_its_policy_makes_sense_with(tmp_path, capfd, policy, overlap, asked) -> None:
    item = task("p", "a", "b")
    home = home_with(tmp_path, [item], votes(item, A, A, A, A), overlap=overlap)
    assert export(capfd, home, tmp_path / "out", "--policy", policy)[1]["settings"]["min_votes"] == asked


def test_people_and_versions_are_chosen_by_options(tmp_path, capfd) -> None:
    item = task("p", "a", "b")
    home = home_with(tmp_path, [item], [verdict(item, "ann", A), verdict(item, "bob", B), verdict(item, "cem", B, guideline="v2-5e")])
    code, answer, _ = export(capfd, home, tmp_path / "one", "--min-votes", "1", "--without", "bob", "--without", "cem")
    assert (code, answer["annotators"]) == (0, {"ann": 1})
    code, answer, _ = export(capfd, home, tmp_path / "two", "--min-votes", "1", "--annotators", "bob", "--annotators", "cem")
    assert (code, answer["annotators"], answer["guidelines"]) == (0, {"bob": 1, "cem": 1}, {"v1": 1, "v2-5e": 1})
    code, answer, _ = export(capfd, home, tmp_path / "three", "--min-votes", "1", "--guideline", "v2")
    assert (code, answer["annotators"]) == (0, {"cem": 1})


@pytest.mark.parametrize(("options", "message"), [
    (("--min-votes", "3"), r"no task gave a record \(3 too_few_votes\)"),
    (("--without", "nobody"), "no verdict is of annotator nobody"),
    (("--policy", "unanimous", "--min-votes", "1"), "unanimous needs at least 2"),
    (("--policy", "plurality"), "plurality"),
])
def test_what_cannot_be_exported_says_why_and_leaves_nothing(home, tmp_path, capfd, options, message) -> None:
    code, answer, said = export(capfd, home, tmp_path / "out", *options)
    assert (code, answer["ok"]) == (2, False)
    assert re.search(message, str(answer["error"]) + str(answer["problems"])) and str(answer["error"]).splitlines()[0] in said
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_and_a_project_that_is_not_are_refused(home, tmp_path, capfd) -> None:
    (tmp_path / "out").mkdir()
    assert "is there already" in str(export(capfd, home, tmp_path / "out")[1]["error"])
    assert main(["export", "week-49", str(tmp_path / "new"), "--home", str(home)]) == 2
    assert "has no project week-49" in capfd.readouterr().err
