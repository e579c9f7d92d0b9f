"""A round of annotation with the real server: `annotate.py FOLDER --policy MODEL --prompts prompts.jsonl --gold gold.jsonl`.

Responses sampled from the policy are ranked by simulated annotators (simulate.py), each through the server's REST API. What a team would
type is what runs here, and it is printed:

    home/             the round itself: server data, tasks, verdicts. `annotation serve --home HOME` shows it in a browser
    agreement.html    how far the annotators agree, and how good each is
    annotation.json   the same in short, beside the truth, which is known of simulated annotators; for the report
    export/           records for DPO: train/, holdout/, ties, disputes, and a manifest
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

from at_work import answer_everything
from grammar import faults
from rich.console import Console
from simulate import TEAM

from annotation.cli_server import installed_python
from annotation.home import Home
from annotation.project import load_project, load_tasks
from annotation.server.embedded import serving
from annotation.tasks import Task
from rlhf.progress import progress

PROJECT = "quickstart"
GUIDELINES = Path(__file__).with_name("guidelines.md")
LONGEST_RESPONSE = 24
"""Tokens."""


def true_ranks(prompt: str, responses: Sequence[str]) -> list[int]:
    """1 for the fewest faults; the same rank for the same number."""
    counts = [len(faults(prompt, response)) for response in responses]
    order = sorted(set(counts))
    return [order.index(count) + 1 for count in counts]


def say(console: Console, *words: str | Path | int) -> None:
    console.print("$", shlex.join(["annotation", *map(str, words)]), style="bold", markup=False, highlight=False, soft_wrap=True)


def run(console: Console, *words: str | Path | int) -> dict[str, Any]:
    """An `annotation` command as a team would type it, with its answer. Raises CalledProcessError where it fails; it has said why."""
    say(console, *words)
    done = subprocess.run([sys.executable, "-m", "annotation.cli", *map(str, words), "--json"], stdout=subprocess.PIPE, check=True,
                          env={**os.environ, "COLUMNS": str(console.width)})
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def tied_share(tasks: Sequence[Task]) -> float:
    """Share of the pairs of responses that are equally good."""
    pairs = tied = 0
    for task in tasks:
        ranks = true_ranks(task.prompt.messages[-1].content, task.responses)
        pairs += len(ranks) * (len(ranks) - 1) // 2
        tied += sum(ranks[:place].count(rank) for place, rank in enumerate(ranks))
    return tied / pairs


def beside_the_truth(found: Mapping[str, Any], tasks: Sequence[Task]) -> dict[str, Any]:
    """What annotation.json holds: estimates of `annotation agreement` with, for each annotator, what they should be.

    Each interval holds its true value with a chance of 95 %. For all m of them to do so at once they are stretched to 1 - 5 %/m each
    (Bonferroni), by the ratio of the normal quantiles; `outside` names those that do not even so.
    """
    tied, team = tied_share(tasks), {annotator.name: annotator for annotator in TEAM}
    rows, known = [], []
    for row in found["annotators"]:
        person = team[row["name"]]
        truth = {"gold": person.accuracy(tied=0), "skill": person.accuracy(tied=tied),
                 "position_bias": person.preference_for_the_first_place(tied=tied)}
        estimates = {figure: {**{end: row[figure][end] for end in ("value", "low", "high")}, "true": true}
                     for figure, true in truth.items() if row[figure] is not None}
        known += [(person.name, figure, estimate) for figure, estimate in estimates.items()]
        rows.append({"name": person.name, "tasks": row["tasks"], "discarded": row["discarded"], "figures": estimates})
    stretch = NormalDist().inv_cdf(1 - 0.025 / len(known)) / NormalDist().inv_cdf(0.975)
    outside = [f"{name}: {figure}" for name, figure, estimate in known
               if not stretch * (estimate["low"] - estimate["value"]) <= estimate["true"] - estimate["value"]
               <= stretch * (estimate["high"] - estimate["value"])]
    return {"overall": found["overall"], "annotators": rows, "known": len(known), "outside": outside, "page": "agreement.html"}


def annotate(home: Home, options: argparse.Namespace, console: Console) -> None:
    """Serve, add annotators, push tasks, let everybody work, pull what they said; the server has stopped afterwards."""
    at = ("--home", home.folder)
    say(console, "serve", *at)
    with serving(home, installed_python(console), console=console) as connection:
        accounts = run(console, "users", "add", *(annotator.name for annotator in TEAM), *at)["users"]
        run(console, "push", PROJECT, options.prompts, "--from-policy", options.policy, "--responses", options.responses,
            "--max-new-tokens", LONGEST_RESPONSE, "--seed", options.seed, "--gold", options.gold, "--overlap", options.overlap,
            "--guidelines", GUIDELINES, *at)
        tasks = load_tasks(load_project(home, PROJECT))
        keys = {account["name"]: account["api_key"] for account in accounts}
        with progress(console, f"{len(TEAM)} annotators", options.overlap * len(tasks)) as bar:
            done = answer_everything(connection.url, {annotator: keys[annotator.name] for annotator in TEAM}, PROJECT, true_ranks,
                                     seed=options.seed, bar=bar)
        console.print(f"{done['submitted']} responses submitted, {done['discarded']} tasks discarded, {done['draft']} left as drafts",
                      highlight=False)
        run(console, "pull", PROJECT, *at)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="an existing folder, where the files go")
    parser.add_argument("--policy", type=Path, required=True, help="folder of the model whose responses are ranked")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with a prompt a line")
    parser.add_argument("--gold", type=Path, required=True, help="JSONL with prompt, responses, ranks: mixed in, to measure annotators")
    parser.add_argument("--responses", type=int, default=4, help="sampled for each prompt")
    parser.add_argument("--overlap", type=int, default=3, help="annotators that rank each prompt's responses")
    parser.add_argument("--seed", type=int, default=0, help="fixes the samples, the places and what an annotator says to a task")
    options = parser.parse_args()

    console = Console(width=140)
    home = Home(options.folder / "home")
    annotate(home, options, console)
    at = ("--home", home.folder)
    found = run(console, "agreement", PROJECT, "--output", options.folder / "agreement.html", *at)
    run(console, "export", PROJECT, options.folder / "export", *at)
    content = beside_the_truth(found, list(load_tasks(load_project(home, PROJECT)).values()))
    (options.folder / "annotation.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    console.print(f"{content['known'] - len(content['outside'])} of {content['known']} estimates of the annotators hold the true value in "
                  "their intervals, stretched to 95 % for all at once", *content["outside"], sep="; ", highlight=False)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:    # the command has said why
        sys.exit(error.returncode)
