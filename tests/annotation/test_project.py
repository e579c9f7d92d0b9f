"""A project on the disk: versions of its guidelines, and a ledger that a kill at any byte leaves readable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from annotation.append_only import append_entries, only_writer, read_entries
from annotation.home import Home
from annotation.project import Project, add_to_ledger, load_project, load_tasks, next_guideline, save_project, take_back
from annotation.tasks import Candidates, Task, make_task
from rlhf.errors import BackendError, ConfigError, DataError, StorageError
from rlhf.records import Message, Prompt


def project_in(folder: Path) -> Project:
    first = next_guideline((), "Be fair.", since="2026-11-01T00:00:00.000000Z")
    return Project(folder=Home(folder).project("week-48"), workspace="preferences", overlap=2, reasons=("helpful", "honest"),
                   guidelines=(first,))


def task(number: int, *, gold: tuple[int, ...] = ()) -> Task:
    prompt = Prompt(messages=(Message(role="system", content="Be brief."), Message(role="user", content=f"question \u2028 {number}")))
    return make_task(Candidates(prompt=prompt, responses=(f"a{number}", f"b{number} \N{GRINNING FACE}"), models=("m1", "m2"), gold=gold,
                                source=f"file.jsonl:{number}"), seed=0)


def test_a_project_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    project = project_in(tmp_path).with_places([4, 2, 4])
    save_project(project)
    assert load_project(Home(tmp_path), "week-48") == project
    assert [sheet.name for sheet in project.sheets()] == ["week-48-k2", "week-48-k4"]
    assert Home(tmp_path).projects() == ["week-48"]


def test_each_verdict_is_given_under_the_version_that_held_then(tmp_path: Path) -> None:
    project = project_in(tmp_path).with_guidelines("Be fair and kind.", since="2026-11-08T12:00:00.000000Z")
    first, second = (guideline.version for guideline in project.guidelines)
    assert first == "v1-3a6dbe17"    # printf "Be fair." | sha256sum
    assert second.startswith("v2-")
    times = ("2026-10-01T00:00:00.000000Z", "2026-11-08T11:59:59.999999Z", "2026-11-08T12:00:00.000000Z", "2027-01-01T00:00:00.000000Z")
    assert [project.guideline_at(time) for time in times] == [first, first, second, second]
    assert second in project.sheet(2).guidelines
    assert project.with_guidelines("Be fair and kind.", since="2026-12-01T00:00:00.000000Z") is project


def test_a_text_that_comes_back_is_a_new_version_again(tmp_path: Path) -> None:
    project = project_in(tmp_path).with_guidelines("other", since="2026-11-08T00:00:00.000000Z")
    again = project.with_guidelines("Be fair.", since="2026-11-09T00:00:00.000000Z")
    assert again.guideline.version == "v3-" + project.guidelines[0].version.removeprefix("v1-")


@pytest.mark.parametrize(("change", "said"), [
    ({"overlap": 0}, "at least 1 annotator"), ({"reasons": ("a", "a")}, "reasons must be different"), ({"reasons": ("a",)}, "is no choice"),
    ({"reasons": ("a", " ")}, "not empty"), ({"guidelines": ()}, "has no guidelines"),
])
def test_settings_that_cannot_be(tmp_path: Path, change: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(project_in(tmp_path), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "said"), [(" \n", "guidelines are empty"), ("x" * 9_901, "have 9901 characters")])
def test_guidelines_that_cannot_be_shown(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        next_guideline((), text, since="2026-11-01T00:00:00.000000Z")


def test_an_unknown_project_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    save_project(project_in(tmp_path))
    with pytest.raises(ConfigError, match=r"no project week-49 \(known: week-48\)"):
        load_project(Home(tmp_path), "week-49")
    with pytest.raises(ConfigError, match="named with letters"):
        load_project(Home(tmp_path), "../week-48")


@pytest.mark.parametrize("text", [b"", b'{"url": "http', b"[]", b"null", b"3", b"\xff\xfe", b"{}",
                                  b'{"url": 3, "api_key": "key", "workspace": "preferences", "embedded": true}'])
def test_a_connection_that_cannot_be_read_is_said_with_a_command_that_can_be_pasted(tmp_path: Path, text: bytes) -> None:
    home = Home(tmp_path / "two words")
    home.ensure()
    (home.folder / "connection.json").write_bytes(text)
    with pytest.raises(BackendError, match=r"connection\.json does not say where the server is") as caught:
        home.connection()
    assert f"`annotation serve --home '{home.folder}'`" in str(caught.value)


def test_a_project_file_that_is_none_is_said(tmp_path: Path) -> None:
    save_project(project_in(tmp_path))
    (project_in(tmp_path).folder / "project.json").write_text('{"workspace": "w"}')
    with pytest.raises(DataError, match="cannot be read as a project"):
        load_project(Home(tmp_path), "week-48")


# The ledger

@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = project_in(tmp_path)
    save_project(made)
    return made


def test_tasks_come_back_as_they_were(project: Project) -> None:
    assert load_tasks(project) == {}
    add_to_ledger(project, [task(1), task(2, gold=(1, 2))])
    add_to_ledger(project, [task(3)])
    assert load_tasks(project) == {made.id: made for made in (task(1), task(2, gold=(1, 2)), task(3))}


def test_later_lines_tell_more_or_take_back(project: Project) -> None:
    add_to_ledger(project, [task(1), task(2)])
    add_to_ledger(project, [task(1, gold=(2, 1))])
    take_back(project, {task(2).id: "refused"})
    assert load_tasks(project) == {task(1).id: task(1, gold=(2, 1))}
    add_to_ledger(project, [task(2)])
    assert set(load_tasks(project)) == {task(1).id, task(2).id}


@settings(deadline=None)
@given(st.integers(min_value=0))
def test_a_kill_at_any_byte_loses_nothing_that_was_acknowledged(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    """Whatever part of the last line reached the disk: what was there stays, and appending mends the file."""
    path = tmp_path_factory.mktemp("ledger") / "tasks.jsonl"
    append_entries(path, [{"n": 1}, {"n": 2, "text": "\u2028"}])
    whole = path.read_bytes()
    append_entries(path, [{"n": 3}])
    last = len(path.read_bytes()) - len(whole)
    kept = cut % last
    os.truncate(path, len(whole) + kept)
    assert [entry.values["n"] for entry in read_entries(path)] == [1, 2]
    assert append_entries(path, [{"n": 4}]) == kept
    assert [entry.values["n"] for entry in read_entries(path)] == [1, 2, 4]


def test_a_torn_line_longer_than_what_is_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    append_entries(path, [{"n": 1}])
    with path.open("ab") as file:
        file.write(b'{"n": "' + b"x" * 200_000)
    append_entries(path, [{"n": 2}])
    assert [entry.values["n"] for entry in read_entries(path)] == [1, 2]


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(project: Project) -> None:
    add_to_ledger(project, [task(1), task(2)])
    lines = project.tasks_file.read_bytes().splitlines(keepends=True)
    project.tasks_file.write_bytes(lines[0] + b'{"id": "x"\n' + lines[1])
    with pytest.raises(DataError, match=r"tasks\.jsonl:2 is not JSON"):
        load_tasks(project)
    project.tasks_file.write_bytes(lines[0] + b'{"schema": "task/2", "id": "x"}\n')
    with pytest.raises(DataError, match=r"tasks\.jsonl:2 is no task"):
        load_tasks(project)


def test_a_full_disk_leaves_the_ledger_as_it_was(project: Project) -> None:
    add_to_ledger(project, [task(1)])
    before = project.tasks_file.read_bytes()
    limited = (f"import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
               f"resource.setrlimit(resource.RLIMIT_FSIZE, ({len(before) + 100}, {len(before) + 100}))\n"
               f"from pathlib import Path; from annotation.append_only import append_entries\n"
               f"append_entries(Path({str(project.tasks_file)!r}), [{{'text': 'x' * 5000}}])\n")
    done = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True, check=False)
    assert "StorageError" in done.stderr
    assert "what it held before is intact" in done.stderr
    assert project.tasks_file.read_bytes() == before


def test_one_process_writes_at_a_time_and_a_killed_one_does_not_stand_in_the_way(tmp_path: Path) -> None:
    code = (f"import sys, time; from pathlib import Path; from annotation.append_only import only_writer\n"
            f"with only_writer(Path({str(tmp_path)!r})): print('held', flush=True); time.sleep(60)\n")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StorageError, match="another process is writing"), only_writer(tmp_path):
            raise AssertionError("two writers")
        holder.send_signal(signal.SIGKILL)
    with only_writer(tmp_path):
        assert (tmp_path / ".lock").is_file()
