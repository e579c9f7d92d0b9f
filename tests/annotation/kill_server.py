"""Kills the server with SIGKILL while annotators submit and records are pushed, starts it again, and looks for everything it acknowledged.

    python tests/annotation/kill_server.py --rounds 20
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.console import Console

from annotation.home import Connection, Home
from annotation.server.embedded import ServerOptions, running
from annotation.server.install import environment_folder, install
from annotation.server.reachable import ask, client_of
from annotation.server.users import administration
from rlhf.progress import progress

ANNOTATORS = [f"killed-{index}" for index in range(6)]
PUSHED_AT_ONCE = 20
RANKED = 120
"""Records that the annotators choose from; more are pushed meanwhile."""
WORD = "zebra"
"""In every record: a search for it must find them all."""
QUESTION = "preference"
Ranks = tuple[int, int]


@dataclass
class Acknowledged:
    """What the server answered with 2xx, over all rounds. Each annotator's thread writes to keys of its own."""

    ranks: dict[tuple[str, str], Ranks] = field(default_factory=dict)
    """By (record, annotator)."""
    ids: dict[tuple[str, str], str] = field(default_factory=dict)
    """Of the responses, to change them."""
    in_doubt: dict[tuple[str, str], Ranks] = field(default_factory=dict)
    """Sent, but the answer did not come: whether it is stored or not is both right."""
    records: set[str] = field(default_factory=set)
    """Their external ids."""
    answers: int = 0
    """Of submissions, changes included."""
    refused: list[str] = field(default_factory=list)
    """Answers that are not 2xx."""


@dataclass(frozen=True)
class Lost:
    """What a restarted server lacks."""

    responses: list[str]
    records: list[str]
    not_found_by_search: int
    integrity: str

    @property
    def nothing(self) -> bool:
        return not self.responses and not self.records and self.not_found_by_search == 0 and self.integrity == "ok"


def make_sheet(client: httpx.Client, workspace: str, name: str) -> str:
    """A published data set with two responses to rank; its id."""
    place = next(item["id"] for item in ask(client, "GET", "/me/workspaces")["items"] if item["name"] == workspace)
    overlap = {"strategy": "overlap", "min_submitted": len(ANNOTATORS)}
    sheet = str(ask(client, "POST", "/datasets", json={"name": name, "workspace_id": place, "distribution": overlap})["id"])
    for title in ("prompt", "first", "second"):
        ask(client, "POST", f"/datasets/{sheet}/fields",
            json={"name": title, "title": title, "required": True, "settings": {"type": "text", "use_markdown": False}})
    options = [{"value": value, "text": value} for value in ("first", "second")]
    ask(client, "POST", f"/datasets/{sheet}/questions",
        json={"name": QUESTION, "title": "Rank", "required": True, "settings": {"type": "ranking", "options": options}})
    ask(client, "PUT", f"/datasets/{sheet}/publish")
    return sheet


def rows(start: int, count: int) -> list[dict[str, Any]]:
    return [{"external_id": f"r{number}", "fields": {"prompt": f"{WORD} {number}", "first": "a", "second": "b"}}
            for number in range(start, start + count)]


def answer(ranks: Ranks) -> dict[str, Any]:
    value = [{"value": "first", "rank": ranks[0]}, {"value": "second", "rank": ranks[1]}]
    return {"status": "submitted", "values": {QUESTION: {"value": value}}}


def submit_until_the_end(connection: Connection, name: str, records: list[str], seen: Acknowledged, choose: random.Random) -> None:
    """One annotator without pause: new responses, and other answers to those that were given before."""
    with client_of(connection) as client:
        while True:
            key = (choose.choice(records), name)
            ranks = choose.choice([(1, 2), (2, 1), (1, 1)])
            if key in seen.in_doubt:
                continue
            try:
                if key in seen.ids:
                    got = client.put(f"/responses/{seen.ids[key]}", json=answer(ranks))
                else:
                    got = client.post(f"/records/{key[0]}/responses", json=answer(ranks))
            except httpx.TransportError:
                seen.in_doubt[key] = ranks
                return
            if got.is_success:
                seen.ids[key], seen.ranks[key] = got.json()["id"], ranks
                seen.answers += 1
            else:
                seen.refused.append(f"{got.status_code} {got.text[:200]}")


def push_until_the_end(connection: Connection, sheet: str, seen: Acknowledged) -> None:
    with client_of(connection) as client:
        start = int(time.time() * 1000)
        while True:
            items = rows(start, PUSHED_AT_ONCE)
            try:
                got = client.post(f"/datasets/{sheet}/records/bulk", json={"items": items})
            except httpx.TransportError:
                return
            if got.is_success:
                seen.records |= {item["external_id"] for item in items}
            else:
                seen.refused.append(f"{got.status_code} {got.text[:200]}")
            start += PUSHED_AT_ONCE


def load_and_kill(connection: Connection, pid: int, keys: Mapping[str, str], sheet: str, records: list[str], seen: Acknowledged,
                  choose: random.Random) -> None:
    """Everybody works for half a second to two; then the server is gone."""
    people = [threading.Thread(target=submit_until_the_end, args=(replace(connection, api_key=key), name, records, seen,
                                                                  random.Random(choose.random()))) for name, key in keys.items()]
    pusher = threading.Thread(target=push_until_the_end, args=(connection, sheet, seen))
    for thread in [*people, pusher]:
        thread.start()
    time.sleep(choose.uniform(0.5, 2.0))
    os.kill(pid, signal.SIGKILL)
    for thread in [*people, pusher]:
        thread.join()


class Stored(NamedTuple):
    id: str
    ranks: Ranks


def stored(client: httpx.Client, sheet: str) -> tuple[dict[tuple[str, str], Stored], set[str]]:
    """Responses by (record, annotator), and external ids of all records, from the API."""
    names = {user["id"]: user["username"] for user in ask(client, "GET", "/users")["items"]}
    responses: dict[tuple[str, str], Stored] = {}
    records: set[str] = set()
    while page := ask(client, "GET", f"/datasets/{sheet}/records?include=responses&limit=500&offset={len(records)}")["items"]:
        for record in page:
            records.add(record["external_id"])
            for response in record["responses"]:
                given = {option["value"]: option["rank"] for option in response["values"][QUESTION]["value"]}
                responses[record["id"], names[response["user_id"]]] = Stored(response["id"], (given["first"], given["second"]))
    return responses, records


def look_for(connection: Connection, database: Path, sheet: str, seen: Acknowledged) -> Lost:
    """Compare a restarted server with what was acknowledged before. What was in doubt is not afterwards: what is stored counts."""
    with closing(sqlite3.connect(database)) as tables:
        integrity = str(tables.execute("PRAGMA integrity_check").fetchone()[0])
    with client_of(connection) as client:
        responses, records = stored(client, sheet)
        found = ask(client, "POST", f"/datasets/{sheet}/records/search?limit=1", json={"query": {"text": {"q": WORD}}})["total"]
    missing = [f"{key}: {ranks} was acknowledged, {responses.get(key)} is stored" for key, ranks in seen.ranks.items()
               if key not in responses or responses[key].ranks not in (ranks, seen.in_doubt.get(key, ranks))]
    for key in [key for key in seen.in_doubt if key in responses]:
        seen.ids[key], seen.ranks[key] = responses[key]
    seen.in_doubt.clear()
    return Lost(missing, sorted(seen.records - records), len(records) - found, integrity)


def survive(home: Home, python: Path, rounds: int, console: Console | None) -> tuple[Acknowledged, list[Lost]]:
    """Kill and restart so many times; what was acknowledged in all, and what each restart lacked."""
    choose = random.Random(rounds)
    seen, losses = Acknowledged(), list[Lost]()
    with running(home, python, ServerOptions(), None) as server, administration(server.connection) as people:
        keys = {person.name: person.api_key for person in people.add(ANNOTATORS)}
        with client_of(server.connection) as client:
            sheet = make_sheet(client, server.connection.workspace, "killed")
            made = ask(client, "POST", f"/datasets/{sheet}/records/bulk", json={"items": rows(0, RANKED)})["items"]
        records = [record["id"] for record in made]
        load_and_kill(server.connection, server.pid, keys, sheet, records, seen, choose)
    with progress(console, "kill and restart", rounds) as bar:
        for number in range(rounds):
            with running(home, python, ServerOptions(), None) as server:
                losses.append(look_for(server.connection, home.server / "argilla.db", sheet, seen))
                if number + 1 < rounds:
                    load_and_kill(server.connection, server.pid, keys, sheet, records, seen, choose)
            bar.advance(1, acknowledged=str(seen.answers), records=str(len(seen.records)))
    return seen, losses


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    console = Console(stderr=True)
    python = install(environment_folder(os.environ), console)
    with tempfile.TemporaryDirectory() as folder:
        seen, losses = survive(Home(Path(folder) / "home"), python, rounds, console)
    bad = [loss for loss in losses if not loss.nothing]
    print(f"{rounds} kills: {seen.answers} submissions of {len(seen.ranks)} responses and {len(seen.records)} records were acknowledged, "
          f"{len(seen.refused)} requests refused")
    for text in [*map(str, bad), *seen.refused[:10]]:
        print(text)
    print("nothing was lost" if not bad else f"{len(bad)} restarts lacked something")
    return 1 if bad or seen.refused else 0


if __name__ == "__main__":
    sys.exit(main())
