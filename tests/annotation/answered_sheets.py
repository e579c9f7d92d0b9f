"""Annotators at a real server: what its page sends when somebody ranks, drafts, discards or takes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from server_api import ask

from annotation.argilla import RANKING, response_field
from annotation.backend import Status


def records_of(owner: httpx.Client, workspace: str, name: str) -> dict[str, str]:
    """Task id -> the server's id of its record, in one data set."""
    places = {item["name"]: item["id"] for item in ask(owner, "GET", "/me/workspaces")["items"]}
    datasets = ask(owner, "GET", "/me/datasets", params={"workspace_id": places[workspace]})["items"]
    dataset = next(item["id"] for item in datasets if item["name"] == name)
    return {record["external_id"]: record["id"]
            for record in ask(owner, "GET", f"/datasets/{dataset}/records", params={"limit": 1000})["items"]}


@dataclass(frozen=True)
class AtWork:
    """An annotator, signed in."""

    api: httpx.Client

    def answer(self, record: str, ranks: Sequence[int] = (), status: Status = "submitted") -> str:
        """A new response; its id."""
        return str(ask(self.api, "POST", f"/records/{record}/responses", json=body_of(ranks, status))["id"])

    def change(self, response: str, ranks: Sequence[int] = (), status: Status = "submitted") -> None:
        ask(self.api, "PUT", f"/responses/{response}", json=body_of(ranks, status))

    def delete(self, response: str) -> None:
        ask(self.api, "DELETE", f"/responses/{response}")


def body_of(ranks: Sequence[int], status: Status) -> dict[str, Any]:
    options = [{"value": response_field(place), "rank": rank} for place, rank in enumerate(ranks)]
    return {"status": status, "values": {RANKING: {"value": options}} if options else None}
