"""The report of a run: what it says is what the files say, nothing that a model wrote becomes markup, and a broken run still renders."""

from __future__ import annotations

import base64
import io
import json
import re
import struct
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_runs import HOSTILE, dpo_log, write_run, write_stage
from rich.console import Console

from rlhf.errors import DataError
from rlhf.evaluate.plots import moving_average
from rlhf.evaluate.report import build_report, summary_tables
from rlhf.evaluate.run_folder import read_run


class Page(HTMLParser):
    """What a browser would make of the page: its elements, its pictures, its tables, its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            return
        self.text += data
        if "td" in self._open or "th" in self._open:
            self.rows[-1][-1] += data

    def row(self, first: str) -> list[str]:
        (found,) = [row[1:] for row in self.rows if row and row[0] == first]
        return found

    def pictures(self) -> list[bytes]:
        sources = [value for name, value in self.attributes if name == "src" and value]
        return [base64.b64decode(source.removeprefix("data:image/png;base64,")) for source in sources]


def page_of(*runs: Path, output: Path) -> Page:
    return Page(build_report(runs, output))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with its report, which nobody changes."""
    folder = write_run(tmp_path_factory.mktemp("finished") / "run")
    build_report([folder], folder / "report.html")
    return folder


def active_elements(page: Page) -> set[str]:
    return set(page.tags) & {"script", "iframe", "object", "embed", "link", "form", "svg"}


def test_nothing_a_model_wrote_becomes_markup(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", response=HOSTILE)
    log = run / "dpo" / "train_log.jsonl"
    log.write_text(log.read_text() + json.dumps({"step": 60, "alarm": HOSTILE, "text": HOSTILE}) + "\n", encoding="utf-8")
    page = page_of(run, output=tmp_path / "report.html")
    assert not active_elements(page)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.text.count(HOSTILE) == 5                # the response, the alarm twice, and a reject of each training stage
    assert page.tags.count("img") == len(page.pictures())
    assert all(value is not None and value.startswith("data:image/png;base64,") for name, value in page.attributes if name == "src")


def test_the_page_needs_no_other_file(run: Path) -> None:
    text = (run / "report.html").read_text(encoding="utf-8")
    assert "http://" not in text and "https://" not in text and "url(" not in text and "@import" not in text
    assert "default-src 'none'" in text


def test_figures_are_those_of_the_files(run: Path) -> None:
    page = Page(run / "report.html")
    assert page.row("sft") == ["56.5 % [50.5, 62.5]", "–", "–", "–", "61.3 % [58.2, 64.2]", "200, 512", "3 of 200"]
    assert page.row("dpo") == ["83.6 % [77.6, 89.6]", "27.1 % [22.1, 32.1]", "93.8 % [91.8, 95.8]", "4.56 [4.16, 4.96]",
                               "61.3 % [58.2, 64.2]", "200, 512", "3 of 200"]
    assert page.row("rewards/margins") == ["0", f"{2 * 50 / 60:.4g}"]       # the last evaluation of 60 steps was at step 50
    assert page.row("loss")[0] == "0.6931"
    for label, figure in (("rejected: empty_response", "12"), ("prompts cut", "4"), ("packed tokens", "13,120")):
        assert [row[1] for row in page.rows if row and row[0] == label] == [figure, figure]     # once for sft, once for dpo
    assert page.row("torch") == ["2.13.0"]
    assert "learning_rate: 0.0005" in page.text


def test_every_picture_is_a_png_with_the_size_of_a_plot(run: Path) -> None:
    pictures = Page(run / "report.html").pictures()
    # 3 of the evaluation; loss, learning rate and speed of sft; all eight panels of dpo
    assert len(pictures) == 3 + 3 + 8
    for picture in pictures:
        assert picture.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", picture[16:24])
        assert width > 400 and height > 100
    assert len({*pictures}) == len(pictures)


def test_several_runs_are_compared_by_what_differs(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", beta=0.3, gain=0.1)
    page = page_of(one, two, output=tmp_path / "report.html")
    assert page.row("dpo.beta") == ["0.1", "0.3"]
    assert page.row("evaluate: dpo answered well") == ["83.6 % [77.6, 89.6]", "66.5 % [60.5, 72.5]"]
    assert not [row for row in page.rows if row and row[0] in ("dpo.optim.learning_rate", "seed", "name", "output")]
    assert page.row("two / dpo")[0] == "66.5 % [60.5, 72.5]"


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / parent / "quickstart") for parent in ("monday", "tuesday")]
    page = page_of(*runs, output=tmp_path / "report.html")
    assert page.row("monday/quickstart / dpo") == page.row("tuesday/quickstart / dpo")


def test_a_run_in_progress_renders_with_notes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for name in ("evaluate", "dpo"):
        for path in (run / name).iterdir():
            path.unlink()
        (run / name).rmdir()
    write_stage(run / "dpo", kind="dpo", seconds=0.0, results={}, status="running")
    lines = "".join(json.dumps(line) + "\n" for line in dpo_log(7))
    (run / "dpo" / "train_log.jsonl").write_text(lines + '{"step": 8, "lo', encoding="utf-8")
    page = page_of(run, output=tmp_path / "report.html")
    assert "in progress or interrupted; 7 steps so far" in page.text
    assert "1 line of train_log.jsonl could not be read" in page.text
    assert "not started yet" in page.text


def test_damaged_files_are_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for name in ("environment.json", "dpo/data.json", "evaluate/evaluation.json", "sft/stage.json", "sft/rejects.jsonl"):
        (run / name).write_text('{"torn', encoding="utf-8")
    (run / "recipe.yaml").unlink()
    page = page_of(run, output=tmp_path / "report.html")
    for name in ("environment.json", "data.json", "evaluation.json", "stage.json", "rejects.jsonl"):
        assert f"{name} cannot be read" in page.text
    assert "recipe.yaml is missing" in page.text
    assert page.row("loss")[0] == "0.6931"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no run folder"):
        build_report([tmp_path], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_the_same_run_gives_the_same_page(run: Path, tmp_path: Path) -> None:
    assert build_report([run], tmp_path / "again.html").read_bytes() == (run / "report.html").read_bytes()


def test_terminal_summary_fits_eighty_columns(run: Path) -> None:
    console = Console(width=80, file=io.StringIO())
    with console.capture() as captured:
        console.print(*summary_tables(read_run(run)))
    text = captured.get()
    assert re.search(r"answered well +│ 56\.5 % \[50\.5, 62\.5\] │ 83\.6 % \[77\.6, 89\.6\]", text)


def test_moving_average_by_hand() -> None:
    assert moving_average([3.0, 5.0, 7.0, 1.0, 9.0], 1) == [3.0, 5.0, 13 / 3, 17 / 3, 9.0]
    assert moving_average([1.0, 2.0, 3.0, 4.0, 5.0], 2) == [1.0, 2.0, 3.0, 4.0, 5.0]       # a straight line stays where it is
    assert moving_average([3.0, 5.0], 9) == [3.0, 5.0]
