"""train_log.jsonl: exact, cut where a run continues, readable after a kill."""

from __future__ import annotations

import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.errors import GuardError
from rlhf.step_log import StepLog, exact_figures, first_evaluation, read_log, step_lines


def log_at(path, *, resume_step=0):
    return StepLog(path, tokens_of=lambda _: 7, resume_step=resume_step)


def write_steps(path, steps):
    with log_at(path) as log:
        for step in steps:
            log.write({"step": step, "loss": 1 / step})


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_bit_of_a_float_survives(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("log") / "train_log.jsonl"
    with log_at(path) as log:
        log.write({"step": 1, "loss": value})
    (line,) = read_log(path).lines
    assert struct.pack("<d", line["loss"]) == struct.pack("<d", value)


def test_a_line_is_on_the_disk_before_the_log_is_closed(tmp_path):
    log = log_at(tmp_path / "log")
    log.write({"step": 1, "loss": 0.5})
    assert read_log(tmp_path / "log") == ([{"step": 1, "loss": 0.5}], 0)
    log.close()


@pytest.mark.parametrize("tail", ['{"step": 4, "lo', '{"step": 4', "\x00\x00\x00", '{"step"', "4", '"text"'])
def test_a_torn_last_line_is_counted_not_read(tmp_path, tail):
    path = tmp_path / "log"
    write_steps(path, [1, 2, 3])
    with path.open("a") as file:
        file.write(tail)
    lines, torn = read_log(path)
    assert ([line["step"] for line in lines], torn) == ([1, 2, 3], 1)


@pytest.mark.parametrize("tail", ["", '{"step": 6, "loss": 0.1666'])
def test_a_run_that_continues_cuts_what_came_after_its_checkpoint(tmp_path, tail):
    path = tmp_path / "log"
    write_steps(path, range(1, 6))
    with path.open("a") as file:
        file.write('{"step": 5, "eval_loss": 1.0}\n{"step": 5, "alarm": "no_gradient", "text": "zero"}\n' + tail)
    with log_at(path, resume_step=3) as log:
        assert [line["step"] for line in log.earlier] == [1, 2, 3]
        log.write({"step": 4, "loss": 0.25})
    assert path.read_text() == '{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 0.5}\n{"step": 3, "loss": 0.3333333333333333}\n' \
                               '{"step": 4, "loss": 0.25}\n'


def test_a_new_run_starts_with_an_empty_log_even_of_step_0(tmp_path):
    """The evaluation before the first step is done again."""
    path = tmp_path / "log"
    path.write_text('{"step": 0, "eval_loss": 2.0}\n{"step": 1, "loss": 1.0}\n')
    log_at(path).close()
    assert path.read_bytes() == b""


def test_a_log_that_needs_no_cut_is_left_as_it_is(tmp_path):
    path = tmp_path / "log"
    write_steps(path, [1, 2])
    before = path.stat().st_ino
    log_at(path, resume_step=2).close()
    assert path.stat().st_ino == before     # a rewritten file would be another one


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_figure_that_is_not_finite_stops_the_run_and_is_not_written(tmp_path, value):
    path = tmp_path / "log"
    with log_at(path) as log, pytest.raises(GuardError, match="step 3: eval_loss is"):
        log.write({"step": 3, "eval_loss": value})
    assert path.read_bytes() == b""


def test_other_processes_write_nothing(tmp_path):
    with StepLog(None, tokens_of=lambda _: 0, resume_step=0) as log:
        log.write({"step": 1, "loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_times_and_memory_are_not_compared_between_runs():
    line = {"step": 1, "loss": 0.1, "tokens": 9, "seconds": 1.0, "tokens_per_second": 9.0, "eta_seconds": 3.0, "memory_mb": 1.5}
    assert exact_figures(line) == {"step": 1, "loss": 0.1, "tokens": 9}


def test_kinds_of_lines_are_told_apart(tmp_path):
    before, step, after = {"step": 0, "eval_loss": 2.0}, {"step": 1, "loss": 1.0}, {"step": 1, "eval_loss": 1.5}
    alarm = {"step": 1, "alarm": "no_gradient", "text": "zero"}
    path = tmp_path / "log"
    path.write_text("".join(json.dumps(line) + "\n" for line in (before, step, alarm, after)))
    lines = read_log(path).lines
    assert step_lines(lines) == [step]
    assert first_evaluation(lines) == before
    assert first_evaluation(lines[1:]) == {}


def test_a_log_that_does_not_exist_has_no_lines(tmp_path):
    assert read_log(tmp_path / "absent") == ([], 0)
