"""`annotation push` with a real server: killed at any moment, refused in part, and with the sources that it takes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_under_test import ServerUnderTest

from annotation.cli import main
from annotation.project import load_project, load_tasks
from annotation.server.reachable import ask, client_of

MANY = 1_200


def written(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def on_server(server: ServerUnderTest, name: str) -> Counter[str]:
    """External ids of a data set."""
    with client_of(server.connection) as client:
        dataset = next((found["id"] for found in ask(client, "GET", "/me/datasets")["items"] if found["name"] == name), None)
        ids: Counter[str] = Counter()
        while dataset is not None:
            page = ask(client, "GET", f"/datasets/{dataset}/records?limit=1000&offset={ids.total()}")["items"]
            if not page:
                break
            ids.update(record["external_id"] for record in page)
        return ids


def pushed(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    capfd.readouterr()
    code = main(["push", *words, "--json"])
    return code, json.loads(capfd.readouterr().out)


@pytest.mark.slow
def test_killed_at_any_moment_and_pushed_again_everything_is_there_once(argilla_server: ServerUnderTest, tmp_path: Path) -> None:
    source = written(tmp_path / "many.jsonl", [{"prompt": f"question {number}", "responses": [f"a{number}" * 40, f"b{number}" * 40]}
                                               for number in range(MANY)])
    words = [sys.executable, "-m", "annotation.cli", "push", "killed", str(source), "--home", str(argilla_server.home.folder), "--json"]
    reached: list[int] = []
    for least in (0, 1, 500):
        with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            tasks = argilla_server.home.project("killed") / "tasks.jsonl"
            while process.poll() is None and (not tasks.exists() or on_server(argilla_server, "killed-k2").total() < least):
                time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
        there = on_server(argilla_server, "killed-k2")
        reached.append(there.total())
        assert set(there) <= set(load_tasks(load_project(argilla_server.home, "killed")))
    assert reached[0] < MANY, "never killed in the middle"
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert answer["new"] + answer["present"] == MANY
    there = on_server(argilla_server, "killed-k2")
    assert set(there.values()) == {1}
    assert set(there) == set(load_tasks(load_project(argilla_server.home, "killed")))


def test_one_bad_row_is_named_or_stops_all(argilla_server: ServerUnderTest, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"question {number}", "responses": ["a", "b", "c"]} for number in range(300)]
    rows[123]["prompt"] = [{"role": "user", "content": "x"}] * 501    # more messages than the server takes, which only it knows
    source = written(tmp_path / "rows.jsonl", rows)
    home = str(argilla_server.home.folder)
    code, answer = pushed(capfd, "whole", str(source), "--home", home, "--atomic")
    assert (code, answer["ok"]) == (2, False)
    assert f"{source}:124: refused" in answer["error"]
    assert on_server(argilla_server, "whole-k3").total() == 0
    assert load_tasks(load_project(argilla_server.home, "whole")) == {}
    code, answer = pushed(capfd, "whole", str(source), "--home", home)
    assert (code, answer["new"], [reject["where"] for reject in answer["rejects"]]) == (0, 299, [f"{source}:124"])
    assert on_server(argilla_server, "whole-k3").total() == 299


def test_gold_items_and_data_sets_together(argilla_server: ServerUnderTest, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pairs = written(tmp_path / "pairs.jsonl", [{"prompt": f"p{number}", "chosen": "good", "rejected": "bad"} for number in range(6)])
    gold = written(tmp_path / "gold.jsonl", [{"prompt": "g", "responses": ["right", "wrong"], "ranks": [1, 2]}])
    guidelines = tmp_path / "guidelines.md"
    guidelines.write_text("# Be fair")
    words = ("sources", str(pairs), "--gold", str(gold), "--home", str(argilla_server.home.folder))
    code, answer = pushed(capfd, *words, "--guidelines", str(guidelines), "--limit", "4", "--overlap", "2", "--reasons", "helpful, honest",
                          "--confidence", "--comment")
    assert (code, answer["new"], answer["gold"], answer["rejects"]) == (0, 5, 1, [])
    tasks = load_tasks(load_project(argilla_server.home, "sources"))
    assert sorted((task.gold, task.responses) for task in tasks.values())[-1] == ((1, 2), ("right", "wrong"))
    assert sum(bool(task.gold) for task in tasks.values()) == 1, "ranks of a data set are nobody's gold"
    guidelines.write_text("# Be fair and kind")
    code, answer = pushed(capfd, *words, "--guidelines", str(guidelines))
    assert (code, answer["new"], answer["present"], len(answer["changes"])) == (0, 2, 5, 1)
    with httpx.Client(headers={"X-Argilla-Api-Key": argilla_server.connection.api_key}, trust_env=False) as owner:
        datasets = owner.get(f"{argilla_server.connection.url}/api/v1/me/datasets").json()["items"]
    shown = next(found for found in datasets if found["name"] == "sources-k2")
    assert shown["guidelines"].startswith("# Be fair and kind")
    assert answer["guideline"] in shown["guidelines"]
    code, answer = pushed(capfd, *words, "--reasons", "speed,beauty")
    assert (code, [problem["where"] for problem in answer["problems"]]) == (2, ["--reasons"])


@pytest.mark.parametrize(("words", "said"), [
    (("--temperature", "0.5", "--max-new-tokens", "8"), "--temperature, --max-new-tokens: of no effect without --from-policy"),
    (("--guidelines", "none.md"), "--guidelines none.md cannot be read (No such file or directory)"),
    ((), "nothing to push"),
])
def test_options_that_would_be_ignored_are_refused(argilla_server: ServerUnderTest, capfd: pytest.CaptureFixture[str],
                                                   words: tuple[str, ...], said: str) -> None:
    code, answer = pushed(capfd, "refused", *words, "--home", str(argilla_server.home.folder))
    assert code == 2
    assert said in answer["error"]
    assert "refused" not in argilla_server.home.projects()


def test_without_a_server_the_way_to_one_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, answer = pushed(capfd, "any", "candidates.jsonl", "--home", str(tmp_path / "home"))
    assert code == 2
    assert "annotation serve" in answer["error"]
