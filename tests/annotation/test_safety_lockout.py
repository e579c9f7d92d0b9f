"""How long somebody has to wait after being wrong, with a clock that the tests turn."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from annotation.server.inside import lockout
from annotation.server.inside.lockout import FORGOTTEN_AFTER, LONGEST_WAIT, Lockout, who_counts


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_fifth_failure_waits_a_minute_the_sixth_two() -> None:
    clock = Clock()
    guesses = Lockout(after=5, first_wait=60.0, clock=clock)
    waits = []
    for _ in range(8):
        guesses.failed("ann")
        waits.append(guesses.seconds_left("ann"))
    assert waits == [0, 0, 0, 0, 60, 120, 240, 480]
    clock.now = 100.0
    assert guesses.seconds_left("ann") == 380
    assert guesses.seconds_left("bob") == 0


def test_no_wait_is_longer_than_the_longest() -> None:
    guesses = Lockout(after=1, first_wait=60.0, clock=Clock())
    for _ in range(2000):
        guesses.failed("ann")
    assert guesses.seconds_left("ann") == LONGEST_WAIT


def test_being_right_wipes_the_slate() -> None:
    guesses = Lockout(after=2, first_wait=60.0, clock=Clock())
    guesses.failed("ann")
    guesses.succeeded("ann")
    guesses.failed("ann")
    assert guesses.seconds_left("ann") == 0


def test_after_a_quiet_hour_counting_begins_anew() -> None:
    clock = Clock()
    guesses = Lockout(after=2, first_wait=60.0, clock=clock)
    for _ in range(2):
        guesses.failed("ann")
    clock.now = 60.0 + FORGOTTEN_AFTER + 1
    guesses.failed("ann")
    assert guesses.seconds_left("ann") == 0


def test_memory_is_bounded_and_the_busy_one_is_kept() -> None:
    guesses = Lockout(after=2, first_wait=60.0, clock=Clock())
    for number in range(2 * lockout.REMEMBERED):
        guesses.failed(number)
        guesses.failed("busy")
    assert len(guesses.failures) == lockout.REMEMBERED
    assert guesses.seconds_left("busy") == LONGEST_WAIT


@given(pauses=st.lists(st.floats(0, 5000), max_size=200))
def test_a_guesser_who_never_waits_in_vain_gets_few_guesses_a_day(pauses: list[float]) -> None:
    """Whatever the rhythm: after the free ones, guesses are as far apart as the waits say, a minute at the least."""
    clock = Clock()
    guesses = Lockout(after=5, first_wait=60.0, clock=clock)
    times = []
    for pause in pauses:
        clock.now += pause
        if guesses.seconds_left("ann") == 0:
            guesses.failed("ann")
            times.append(clock.now)
    for early, late in zip(times, times[5:], strict=False):
        assert late - early >= 60.0


@pytest.mark.parametrize(("host", "counts"), [
    ("198.51.100.7", "198.51.100.7"),
    ("198.51.100.7:61034", "198.51.100.7"),              # some proxies give the client's port, another one for each connection
    ("::ffff:198.51.100.7", "198.51.100.7"),             # else all of IPv4 would be one address
    ("[::ffff:198.51.100.7]:61034", "198.51.100.7"),
    ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
    ("[2001:db8:1:2::9]:443", "2001:db8:1:2::/64"),
    ("[2001:db8:1:2::9]", "2001:db8:1:2::/64"),
    ("fe80::1%eth0", "fe80::/64"),
    ("unix", "unix"),
    ("", ""),
])
def test_who_counts_as_one_address(host: str, counts: str) -> None:
    assert who_counts(host) == counts
