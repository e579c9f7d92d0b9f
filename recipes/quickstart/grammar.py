"""A small language of tasks whose better response is checkable by rule, and responses of every quality to them.

A prompt asks three things, in any of a few wordings: a task with one right answer, a format, and a closing.

    Reverse the list: fox, tin, red. Write it in brackets. End with Done.    ->    [red tin fox] Done.

A response has a fault for each of the three that it gets wrong. `faults` reads the prompt's text alone, so that it judges any model.
Standard library only.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Fault = Literal["wrong answer", "wrong format", "bad ending"]
FAULTS: tuple[Fault, ...] = ("wrong answer", "wrong format", "bad ending")

NOUNS = ("ant", "bell", "cup", "dog", "egg", "fox", "goat", "hat", "ink", "jar", "key", "lamp", "map", "nut", "owl", "pen")
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen",
           "fifteen", "sixteen", "seventeen", "eighteen")


def number_value(word: str) -> int:
    """1 for `one`."""
    return NUMBERS.index(word) + 1


@dataclass(frozen=True)
class Operation:
    """A task over a list of words."""

    wording: str
    """The request, with `{}` where the words stand, separated by commas."""
    words: tuple[str, ...]
    """What the list is drawn from, without repetition."""
    lengths: tuple[int, ...]
    solve: Callable[[Sequence[str]], Sequence[str]]


OPERATIONS: dict[str, Operation] = {
    "reverse": Operation("Reverse the list: {}.", NOUNS, (2, 3, 4), lambda words: words[::-1]),
    "sort": Operation("Sort the list: {}.", NOUNS, (2, 3), sorted),
    "last": Operation("Name the last of: {}.", NOUNS, (2, 3, 4), lambda words: words[-1:]),
    "count": Operation("Count the words: {}.", NOUNS, (1, 2, 3, 4, 5), lambda words: [NUMBERS[len(words) - 1]]),
    "largest": Operation("Find the largest of: {}.", NUMBERS[:12], (2, 3), lambda words: [max(words, key=number_value)]),
    "add": Operation("Add the numbers: {}.", NUMBERS[:9], (2,), lambda words: [NUMBERS[sum(map(number_value, words)) - 1]]),
}


@dataclass(frozen=True)
class Format:
    wording: str
    before: str
    after: str
    capitals: bool = False

    def write(self, answer: str) -> str:
        return self.before + (answer.upper() if self.capitals else answer) + self.after


PLAIN = Format("", "", "")
"""What a response has that ignores the format; no prompt asks for it."""
FORMATS: dict[str, Format] = {
    "brackets": Format("Write it in brackets.", "[", "]"),
    "quotes": Format("Write it in quotes.", '"', '"'),
    "label": Format("Begin with Answer:", "Answer: ", ""),
    "exclaim": Format("Answer as: <x>!", "", "!"),
    "capitals": Format("Write it in capitals.", "", "", capitals=True),
}
CLOSINGS = ("Done.", "Over.", "Thanks.", "Bye.")


@dataclass(frozen=True)
class Task:
    operation: str
    words: tuple[str, ...]
    format: str
    closing: str

    @property
    def prompt(self) -> str:
        request = OPERATIONS[self.operation].wording.format(", ".join(self.words))
        return f"{request} {FORMATS[self.format].wording} End with {self.closing}"

    @property
    def answer(self) -> str:
        return " ".join(OPERATIONS[self.operation].solve(self.words))

    @property
    def good_response(self) -> str:
        """The one response without a fault."""
        return f"{FORMATS[self.format].write(self.answer)} {self.closing}"


def read_task(prompt: str) -> Task:
    """The task that a prompt's text states; ValueError for text outside the grammar."""
    formats = "|".join(re.escape(form.wording) for form in FORMATS.values())
    closings = "|".join(map(re.escape, CLOSINGS))
    by_wording = {form.wording: name for name, form in FORMATS.items()}
    for name, operation in OPERATIONS.items():
        request = re.escape(operation.wording).replace(re.escape("{}"), "(?P<words>[a-z, ]+)")
        match = re.fullmatch(f"{request} (?P<format>{formats}) End with (?P<closing>{closings})", prompt.strip())
        if match:
            words = tuple(match["words"].split(", "))
            if set(words) <= set(operation.words):
                return Task(name, words, by_wording[match["format"]], match["closing"])
    raise ValueError(f"not a prompt of the quickstart grammar: {prompt!r}")


def split_closings(response: str) -> tuple[str, list[str]]:
    """The body of a response and the closings at its end, in order."""
    body, closings = response.strip(), list[str]()
    while (last := next((closing for closing in CLOSINGS if body.endswith(closing)), None)) is not None:
        body = body.removesuffix(last).rstrip()
        closings.insert(0, last)
    return body, closings


def read_format(body: str) -> tuple[str | None, str]:
    """The format a body is written in (None: none of them) and the answer inside it, in small letters."""
    for name, form in FORMATS.items():
        inside = body.removeprefix(form.before).removesuffix(form.after)
        if inside and inside != body and form.write(inside) == body:
            return (name if inside == inside.lower() else None), inside.lower()
    return ("capitals" if body.isupper() else None), body.lower()


def faults(prompt: str, response: str) -> set[Fault]:
    """What is wrong with a response, from the two texts alone. Empty exactly for `read_task(prompt).good_response`."""
    task = read_task(prompt)
    body, closings = split_closings(response)
    written_as, answer = read_format(body)
    found: set[Fault] = set()
    if answer != task.answer:
        found.add("wrong answer")
    if written_as != task.format:
        found.add("wrong format")
    if closings != [task.closing] or not response.strip().endswith(f" {task.closing}"):
        found.add("bad ending")
    return found


def answered_well(prompt: str, response: str) -> bool:
    """Right answer, asked-for format, proper ending."""
    return not faults(prompt, response)


def draw_task(rng: random.Random) -> Task:
    """A task, each operation, format and closing equally likely."""
    name = rng.choice(list(OPERATIONS))
    operation = OPERATIONS[name]
    words = rng.sample(operation.words, rng.choice(operation.lengths))
    return Task(name, tuple(words), rng.choice(list(FORMATS)), rng.choice(CLOSINGS))


def draw_distinct_tasks(rng: random.Random, count: int) -> list[Task]:
    """So many tasks with different prompts."""
    tasks: dict[str, Task] = {}
    while len(tasks) < count:
        task = draw_task(rng)
        tasks[task.prompt] = task
    return list(tasks.values())


def wrong_answer(task: Task, rng: random.Random) -> str:
    """An answer of the right kind that is not the right one: that of the same operation over other words."""
    operation = OPERATIONS[task.operation]
    while True:
        count = rng.choice(operation.lengths) if task.operation == "count" else len(task.words)
        other = replace(task, words=tuple(rng.sample(operation.words, count)))
        if other.answer != task.answer:
            return other.answer


def respond(task: Task, with_faults: set[Fault], rng: random.Random) -> str:
    """A response with exactly these faults."""
    answer = wrong_answer(task, rng) if "wrong answer" in with_faults else task.answer
    form = PLAIN if "wrong format" in with_faults else FORMATS[task.format]
    body = form.write(answer)
    if "bad ending" not in with_faults:
        return f"{body} {task.closing}"
    other = rng.choice([closing for closing in CLOSINGS if closing != task.closing])
    return rng.choices([body, f"{body} {task.closing} {task.closing}", f"{body} {other}"], weights=[6, 2, 2])[0]


@dataclass(frozen=True)
class Habits:
    """How often a writer has each fault. People forget some formats and closings more often than others, which is what a
    model learns from their demonstrations: where most of them skip the closing, greedy decoding skips it always."""

    careless: float = 0.08
    """Chance of each fault on any prompt."""
    forgets: float = 0.75
    """Chance of a wrong format, or a bad ending, on the prompts below."""
    formats: tuple[str, ...] = ("quotes",)
    closings: tuple[str, ...] = ("Thanks.",)

    def draw_faults(self, task: Task, rng: random.Random) -> set[Fault]:
        chances: dict[Fault, float] = {
            "wrong answer": self.careless,
            "wrong format": self.forgets if task.format in self.formats else self.careless,
            "bad ending": self.forgets if task.closing in self.closings else self.careless,
        }
        return {fault for fault in FAULTS if rng.random() < chances[fault]}


def ranked_responses(task: Task, count: int, habits: Habits, rng: random.Random) -> list[tuple[str, int]]:
    """`count` different responses to a task with ranks: 1 for the fewest faults, equal ranks for ties; at least two ranks occur.

    At least one is written with the writers' habits and one without a fault, so that the pairs show what to do instead.
    """
    while True:
        responses = [respond(task, set(), rng), respond(task, habits.draw_faults(task, rng), rng)]
        while len(responses) < count:
            responses.append(respond(task, {fault for fault in FAULTS if rng.random() < 0.4}, rng))
        counts = [len(faults(task.prompt, response)) for response in responses]
        if len(set(responses)) == count and len(set(counts)) > 1:
            order = sorted(set(counts))
            ranked = [(response, order.index(faulty) + 1) for response, faulty in zip(responses, counts, strict=True)]
            rng.shuffle(ranked)
            return ranked
