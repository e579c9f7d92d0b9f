"""Progress: a bar in a terminal, a line every ten seconds elsewhere, nothing where nobody watches."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rlhf.progress import clock_time, progress


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def plain_lines(*, total: int, seconds_each: float, n: int = 1, done: int = 0, **fields: float) -> list[str]:
    """What a loop that takes so long for each of its items prints where there is no terminal."""
    output, clock = io.StringIO(), Clock()
    with progress(Console(file=output, width=40), "score", total, done=done, now=clock) as bar:
        for _ in range(done, total, n):
            clock.seconds += seconds_each
            bar.advance(n, **fields)
    return output.getvalue().splitlines()


def test_a_line_every_ten_seconds_with_the_time_that_is_left():
    assert plain_lines(total=10, seconds_each=4.0) == [
        "score 3/10 (30%), 0:28 left", "score 6/10 (60%), 0:16 left", "score 9/10 (90%), 0:04 left", "score 10/10 in 0:40"]


def test_what_is_over_in_two_seconds_leaves_no_line():
    assert plain_lines(total=19, seconds_each=0.1) == []
    assert plain_lines(total=20, seconds_each=0.11) == ["score 20/20 in 0:02"]


def test_what_an_earlier_start_had_done_is_no_speed():
    """80 of 100 were done; the other 20 take 5 s each, 2 at a time."""
    assert plain_lines(total=100, done=80, seconds_each=10.0, n=2)[0] == "score 82/100 (82%), 1:30 left"


def test_fields_are_shown_and_long_lines_are_not_wrapped():
    (line, _) = plain_lines(total=1, seconds_each=3661.0, loss=0.693147, rewards=1234.5)
    assert line == "score 1/1 (100%), 0:00 left  loss 0.6931  rewards 1234"


def test_a_title_is_text_not_markup():
    output, clock = io.StringIO(), Clock()
    with progress(Console(file=output), "[red]x[/red]", 1, now=clock) as bar:
        clock.seconds += 11
        bar.advance()
    assert output.getvalue().startswith("[red]x[/red] 1/1")


def test_nobody_watches_nothing_is_written(capfd):
    with progress(None, "score", 3) as bar:
        bar.advance(3, loss=1.0)
    assert capfd.readouterr() == ("", "")


def test_bars_may_be_nested_in_a_terminal_and_leave_it_free_after_an_error():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    for _ in range(2):      # a bar that was left behind would make the second round fail
        with pytest.raises(ZeroDivisionError), progress(console, "train", 2) as outer:
            with progress(console, "evaluate", 3) as inner:
                inner.advance(3, loss=0.5)
            outer.advance()
            raise ZeroDivisionError
    text = console.file.getvalue()
    assert "train" in text and "evaluate" in text and "3/3" in text and "loss 0.5" in text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (7.4, "0:07"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03")])
def test_times(seconds, text):
    assert clock_time(seconds) == text
