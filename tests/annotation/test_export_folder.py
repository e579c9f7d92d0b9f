"""An export on the disk: whole or not there, never over another one, the same bytes again, and read by rlhf without a reject."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from exported_projects import exported, pandalm, squality, task, verdict, votes

from annotation.export import SIDES, Export, ExportSettings
from annotation.export_folder import MANIFEST, new_folder, origin_of, write_export
from annotation.tasks import Task
from annotation.verdicts import Verdict
from rlhf.data.formats import Reading, read
from rlhf.errors import ConfigError, DataError, StorageError
from rlhf.records import PreferenceRecord, RankedRecord

ORIGIN = {"project": "week-48"}


def simulated(*, policy: str = "majority", seed: int = 0, percent: float = 30.0) -> Export:
    """40 tasks of two to four responses, ranked by three people who often agree; texts with every kind of line end and letter."""
    drawn = random.Random(seed)
    tasks = [task(f"prompt {number // 2} \u2028 é\r\n", *(f"{letter}\n{number} \U0001f600" for letter in "abcd"[:2 + number % 3]))
             for number in range(40)]
    verdicts = [said for item in tasks for said in votes(item, *([index if drawn.random() < 0.8 else drawn.randint(1, 3)
                                                                  for index in range(1, len(item.responses) + 1)] for _ in range(3)))]
    return exported(tasks, verdicts, policy, min_votes=3, holdout_percent=percent)


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def as_read(record: PreferenceRecord | RankedRecord) -> PreferenceRecord | RankedRecord:
    """Readers take a strict ranking of two for what it is, a preference."""
    return next(record.pairs()) if isinstance(record, RankedRecord) and record.ranks == (1, 2) else record


def read_without_reject(path: Path) -> Reading:
    reading = read([str(path)])
    assert reading.rejects == () and reading.rows == len(reading.records)
    return reading


@pytest.mark.parametrize("policy", ["majority", "unanimous", "all"])
def test_every_file_is_read_back_as_the_records_it_was_made_of(tmp_path, policy) -> None:
    export = simulated(policy=policy)
    write_export(export, tmp_path / "out", origin=ORIGIN)
    for name in SIDES:
        side = export.sides[name]
        assert side.rankings and side.pairs
        for file, records in (("rankings", side.rankings), ("pairs", side.pairs), ("ties", side.ties)):
            if records:
                found = read_without_reject(tmp_path / f"out/{name}/{file}.jsonl").records
                assert [replace(record, source="") for record in found] == [replace(as_read(record), source="") for record in records]


def test_rlhf_check_accepts_the_files(tmp_path, capfd) -> None:
    from rlhf.cli import main

    write_export(simulated(), tmp_path / "out", origin=ORIGIN)
    for name in ("train/pairs.jsonl", "train/rankings.jsonl", "holdout/pairs.jsonl"):
        code = main(["check", str(tmp_path / "out" / name), "--json"])
        answer = json.loads(capfd.readouterr().out)
        assert (code, answer["ok"]) == (0, True), answer


def test_what_a_stage_trains_on_are_the_pairs_of_the_rankings(tmp_path) -> None:
    """Majority of three without ties decides every pair, so that both files say the same, each in its way."""
    from rlhf.data.formats import as_preferences

    tasks, verdicts = squality()
    write_export(exported(tasks, verdicts, min_votes=3), tmp_path / "out", origin=ORIGIN)
    given = {name: as_preferences(read_without_reject(tmp_path / f"out/train/{name}.jsonl")) for name in ("rankings", "pairs")}
    assert {pair.content_id for pair in given["rankings"].kept} == {pair.content_id for pair in given["pairs"].kept}
    assert given["rankings"].rejects == given["pairs"].rejects == []


def test_the_same_verdicts_give_the_same_bytes_and_only_the_manifest_knows_the_time(tmp_path) -> None:
    export = simulated()
    for name, when in (("one", "2026-01-01"), ("two", "2026-01-02")):
        write_export(export if name == "one" else simulated(), tmp_path / name, origin=ORIGIN | {"made_at": when})
    one, two = content(tmp_path / "one"), content(tmp_path / "two")
    manifests = [json.loads(files.pop(MANIFEST)) for files in (one, two)]
    assert one == two
    assert manifests[0].pop("made_at") != manifests[1].pop("made_at")
    assert manifests[0] == manifests[1]


def test_the_manifest_names_every_file_by_its_bytes_and_adds_up(tmp_path) -> None:
    export = simulated()
    manifest = write_export(export, tmp_path / "out", origin=ORIGIN)
    files = content(tmp_path / "out")
    assert json.loads(files.pop(MANIFEST)) == json.loads(json.dumps(manifest))
    assert {name: file["sha256"] for name, file in manifest["files"].items()} == \
        {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    assert {name: file["rows"] for name, file in manifest["files"].items()} == {name: data.count(b"\n") for name, data in files.items()}
    for counts in (manifest["tasks"], manifest["pairs"], manifest["verdicts"]):
        assert sum(counts.values()) == 2 * counts["all"]
    assert (manifest["tasks"]["all"], manifest["verdicts"]["all"]) == (40, 120)
    assert sum(manifest["annotators"].values()) == sum(manifest["guidelines"].values()) == manifest["verdicts"]["used"]
    assert sum(manifest["files"][f"{side}/rankings.jsonl"]["rows"] for side in SIDES) == manifest["tasks"]["ranking"]
    assert sum(manifest["files"][f"{side}/pairs.jsonl"]["rows"] for side in SIDES) == manifest["pairs"]["strict"]


def test_the_manifest_has_the_alpha_that_comes_with_the_data(tmp_path) -> None:
    tasks, verdicts = pandalm()
    assert write_export(exported(tasks, verdicts), tmp_path / "out", origin=ORIGIN)["alpha"] == pytest.approx(0.8642, abs=5e-5)


def test_records_have_one_id_whatever_the_votes_were_and_another_when_a_judgement_changes(tmp_path) -> None:
    first, second = task("p", "a", "b"), task("q", "c", "d")
    ballots = {"base": [(1, 2), (1, 2), (1, 2)], "same judgement": [(1, 2), (1, 2), (2, 1)], "another": [(2, 1), (2, 1), (1, 2)]}
    manifests = {name: write_export(exported([first, second], [*votes(first, *given), *votes(second, (1, 2))], holdout_percent=0),
                                    tmp_path / name, origin=ORIGIN) for name, given in ballots.items()}
    ids = {name: manifest["files"]["train/pairs.jsonl"]["records"] for name, manifest in manifests.items()}
    assert ids["base"] == ids["same judgement"] != ids["another"]
    assert len({manifest["content_id"] for manifest in manifests.values()}) == 3


def test_disputes_hold_what_is_needed_to_look_into_them(tmp_path) -> None:
    decided, split = task("p", "a", "b"), task("q", "c", "d")
    said = [verdict(split, "zoe", (1, 2)), verdict(split, "abe", (2, 1))]
    export = exported([decided, split], [*votes(decided, (1, 2)), *said])
    write_export(export, tmp_path / "out", origin=ORIGIN)
    row, = (json.loads(line) for line in (tmp_path / "out/disputes.jsonl").read_text(encoding="utf-8").splitlines())
    assert (row["task"], row["kind"], row["responses"]) == (split.id, "undecided", ["c", "d"])
    assert [(vote["annotator"], vote["ranks"]) for vote in row["verdicts"]] == [("abe", [2, 1]), ("zoe", [1, 2])]
    assert row["pairs"] == [{"responses": [0, 1], "first": 1, "second": 1, "tie": 0}]


def test_the_origin_tells_one_log_from_another() -> None:
    settings = ExportSettings(policy="majority", min_votes=1)
    item: Task = task("p", "a", "b")
    said: list[Verdict] = votes(item, (1, 2), (2, 1))
    ids: list[Any] = [origin_of("week-48", settings, log)["verdicts_id"] for log in (said, said[::-1], said[:1])]
    assert ids[0] == ids[1] != ids[2]


# Nothing is overwritten, nothing is half there

def test_what_is_there_is_never_overwritten(tmp_path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("file", "empty", "dangling"):
        with pytest.raises(ConfigError, match=f"{name} is there already"):
            write_export(simulated(), tmp_path / name, origin=ORIGIN)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "empty", "file"]
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


def test_nothing_to_write_is_an_error_that_says_what_there_is(tmp_path) -> None:
    item = task("p", "a", "b")
    with pytest.raises(DataError, match=r"no task gave a record \(1 too_few_votes\)"):
        write_export(exported([item], votes(item, (1, 2)), min_votes=2), tmp_path / "out", origin=ORIGIN)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_nothing_behind(tmp_path) -> None:
    with pytest.raises(StorageError, match="Nothing was left behind"), new_folder(tmp_path / "out") as folder:
        (folder / "one").write_text("1", encoding="utf-8")
        raise OSError(28, os.strerror(28))
    assert list(tmp_path.iterdir()) == []


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_export_folder import ORIGIN, simulated
from annotation.export_folder import write_export
export = simulated()
for number in range(1000):
    if number == 1:
        print("ready", flush=True)
    write_export(export, Path(sys.argv[2]) / str(number), origin=ORIGIN)
"""


def test_a_killed_export_is_whole_or_not_there(tmp_path) -> None:
    write_export(simulated(), tmp_path / "whole", origin=ORIGIN)
    expected, drawn, unfinished = content(tmp_path / "whole"), random.Random(3), 0
    for attempt in range(3):
        folder = tmp_path / f"attempt {attempt}"
        folder.mkdir()
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(Path(__file__).parent), str(folder)], stdout=subprocess.PIPE,
                                   text=True)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(drawn.uniform(0.005, 0.1))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        found = list(folder.iterdir())
        whole = [path for path in found if not path.name.startswith(".")]
        assert whole and all(content(path) == expected for path in whole)
        unfinished += len(found) - len(whole)
    assert unfinished, "no kill fell into a write"
