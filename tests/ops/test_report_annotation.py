"""The report about a stage in which people annotated: figures, the truth beside them, the link to the whole page."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from report_runs import HOSTILE, write_run, write_stage
from rich.console import Console

from rlhf.evaluate.report import build_report, summary_tables
from rlhf.evaluate.run_folder import read_run


def estimate(value: float, low: float, high: float, **true: float) -> dict[str, float]:
    return {"value": value, "low": low, "high": high, **true}


def annotation(*, true: bool = True, name: str = "ada") -> dict[str, Any]:
    def figures(gold: float, first: float) -> dict[str, Any]:
        return {"gold": estimate(gold, gold - 0.1, gold + 0.05, **({"true": 0.9} if true else {})),
                "position_bias": estimate(first, first - 0.03, first + 0.03, **({"true": 0.0} if true else {}))}

    overall = {"tasks": 440, "annotators": 2, "verdicts": 1320, "alpha": estimate(0.4567, 0.41, 0.5),
               "same_choice": estimate(0.66, 0.63, 0.68)}
    rows = [{"name": name, "tasks": 277, "discarded": 7, "figures": figures(0.941, -0.004)},
            {"name": "ben", "tasks": 1278, "discarded": 0, "figures": {"gold": figures(0.7, 0)["gold"]}}]
    return {"overall": overall, "annotators": rows, "known": 3 if true else 0, "outside": ["ben: gold"] if true else [],
            "page": "agreement.html"}


def annotated_run(folder: Path, content: dict[str, Any]) -> Path:
    run = write_run(folder)
    write_stage(run / "annotate", kind="prepare", seconds=60.0, results={})
    (run / "annotate" / "annotation.json").write_text(json.dumps(content), encoding="utf-8")
    return run


def report(run: Path, output: Path) -> str:
    return build_report([run], output).read_text(encoding="utf-8")


def test_an_estimate_stands_beside_the_truth(tmp_path: Path) -> None:
    run = annotated_run(tmp_path / "run", annotation())
    page = report(run, run / "report.html")
    cells = page.replace("</td><td>", "|").replace("</th><td>", "|")
    assert "ada|277|7|94 [84, 99]|90|0 [-3, 3]|0<" in cells
    assert "ben|1,278|0|70 [60, 75]|90|–|–<" in cells
    assert "0.46 [0.41, 0.50]" in page and "66.0 % [63.0, 68.0]" in page
    assert "2 of 3 intervals hold it" in page and "outside: ben: gold" in page


def test_without_a_known_truth_nothing_is_said_about_it(tmp_path: Path) -> None:
    run = annotated_run(tmp_path / "run", annotation(true=False))
    page = report(run, run / "report.html")
    assert "simulated" not in page and ">true<" not in page
    assert "94 [84, 99]" in page


def test_the_link_leads_to_the_page_from_wherever_the_report_lies(tmp_path: Path) -> None:
    run = annotated_run(tmp_path / "run", annotation())
    (tmp_path / "reports").mkdir()
    for output in (run / "report.html", tmp_path / "reports" / "week.html"):
        (link,) = [part.partition('"')[0] for part in report(run, output).split('<a href="')[1:]]
        assert (output.parent / link).resolve() == (run / "annotate" / "agreement.html").resolve()


def test_a_name_cannot_become_markup(tmp_path: Path) -> None:
    run = annotated_run(tmp_path / "run", annotation(name=HOSTILE) | {"page": '"><script>alert(1)</script>'})
    assert "<script" not in report(run, run / "report.html")


def test_a_file_of_another_kind_is_a_note(tmp_path: Path) -> None:
    run = annotated_run(tmp_path / "run", {"overall": {}})
    assert "annotation.json lacks annotators, known, outside, page" in report(run, run / "report.html")


def test_the_terminal_shows_it_in_eighty_columns(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(*summary_tables(read_run(annotated_run(tmp_path / "run", annotation()))))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "94 [84, 99]" in text and "70 [60, 75]" in text and "dpo" in text
