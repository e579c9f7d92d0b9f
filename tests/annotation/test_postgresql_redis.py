"""The whole of it with nothing embedded but the search: PostgreSQL, Redis, and a worker; and all of it is there after a restart."""

from __future__ import annotations

import random
from pathlib import Path

import httpx
import own_services
import server_api
from server_api import ask, search

from annotation.home import Home
from annotation.server.embedded import ServerOptions, serving
from annotation.server.users import administration

COUNT = 1000
WORDS = ("river", "mountain", "recipe", "quantum", "garden", "python")


def answer(client: httpx.Client, records: list[str], status: str) -> None:
    for record in records:
        ask(client, "POST", f"/records/{record}/responses", json={"status": status, "values": server_api.ranking(2, 1)})


def test_everything_works_on_postgresql_and_redis_and_lasts(server_python: Path, tmp_path: Path) -> None:
    draw = random.Random(3)
    texts = [" ".join(draw.choices(WORDS, k=3)) for _ in range(COUNT)]
    sources = [draw.choice(["sft", "dpo"]) for _ in range(COUNT)]
    home = Home(tmp_path / "home")
    with own_services.postgresql() as database_url, own_services.redis() as redis_url:
        options = ServerOptions(database_url=database_url, redis_url=redis_url)
        with serving(home, server_python, options) as connection:
            with administration(connection) as users:
                anna, ben = (person.api_key for person in users.add(["anna", "ben"]))
            with (server_api.client(connection.url, connection.api_key) as owner, server_api.client(connection.url, anna) as first,
                  server_api.client(connection.url, ben) as second):
                dataset = server_api.make_dataset(owner, connection.workspace, "pairs", fields={"text": server_api.TEXT},
                                                  questions={"ranking": server_api.RANKING}, metadata={"source": server_api.TERMS},
                                                  min_submitted=2)
                ids = server_api.push(owner, dataset, [{"fields": {"text": text}, "metadata": {"source": source}}
                                                       for text, source in zip(texts, sources, strict=True)])
                answer(first, ids[:3], "submitted")
                answer(second, ids[1:4], "submitted")
                answer(second, ids[4:5], "discarded")
                queue, left = search(first, dataset, mine=True, filters=[
                    {"type": "terms", "scope": {"entity": "response", "property": "status"}, "values": ["pending"]},
                    {"type": "terms", "scope": {"entity": "record", "property": "status"}, "values": ["pending"]}])
                assert left == COUNT - 3 and not set(queue) & set(ids[:3])
        assert not (home.server / "argilla.db").exists()
        with serving(home, server_python, options) as connection, server_api.client(connection.url, connection.api_key) as owner:
            assert search(owner, dataset, text="quantum -recipe")[1] == sum("quantum" in text and "recipe" not in text for text in texts)
            assert search(owner, dataset, text='"river mountain"')[1] == sum("river mountain" in text for text in texts)
            of_dpo = {"type": "terms", "scope": {"entity": "metadata", "metadata_property": "source"}, "values": ["dpo"]}
            wanted = {id for id, source in zip(ids, sources, strict=True) if source == "dpo"}
            assert set(search(owner, dataset, filters=[of_dpo])[0]) == wanted
            completed = {"type": "terms", "scope": {"entity": "record", "property": "status"}, "values": ["completed"]}
            assert set(search(owner, dataset, filters=[completed])[0]) == set(ids[1:3])
            kept = ask(owner, "GET", f"/records/{ids[0]}")["responses"]
            assert [response["values"] for response in kept] == [server_api.ranking(2, 1)]
