"""Argilla as the backend, and the only file that imports its package.

The package makes data sets and their settings. Records and responses go over its authenticated HTTP client: its response objects return
rankings in the order of the options and drop the ranks, so that B > A reads as A > B. A record holds what annotators may see and nothing
else: no metadata, no suggestions, an external id that is a hash.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import argilla as rg
import httpx
from argilla._exceptions import ArgillaError

from annotation.backend import Added, Answer, Refused, Sheet, SheetProgress, Status, utc
from annotation.escape import shown_message, shown_text
from annotation.home import Connection
from annotation.rest import RestApi, decoded, said
from annotation.tasks import ShownTask
from rlhf.errors import BackendError, ConfigError

PROMPT, RANKING, CONFIDENCE, REASON, COMMENT = "prompt", "ranking", "confidence", "reason", "comment"
"""Names of the prompt's field and of the questions."""
SURENESS = [1, 2, 3, 4, 5]
TIMEOUT = 60
BATCH_TASKS, BATCH_CHARACTERS = 250, 4_000_000
"""What one request brings at most; the server takes 500 records."""
PAGE = 500
"""Records read at a time; the server gives 1,000."""
DELETED_AT_ONCE = 100
"""The server's limit."""
READINGS = 3
"""How often a data set is read again because records went away meanwhile."""
ALREADY_THERE = "found records with same external ids"
"""How the server begins to list ids that it will not add twice."""
STATUSES: tuple[Status, ...] = ("submitted", "draft", "discarded")


def response_field(place: int) -> str:
    """Name of the field at a place, and of its option in the ranking: response_1 is shown first (place 0)."""
    return f"response_{place + 1}"


class Sent(NamedTuple):
    new: list[str]
    present: int
    refused: list[Refused]


class ArgillaBackend:
    """Implements annotation.backend.Backend."""

    def __init__(self, connection: Connection) -> None:
        """Raises BackendError where no Argilla 2 answers under the address, or it refuses the key."""
        self.connection = connection
        require_argilla(connection)
        try:
            self._argilla = rg.Argilla(api_url=connection.url, api_key=connection.api_key, timeout=TIMEOUT, retries=0, headers={},
                                       verify=connection.verify(), **_direct(connection))
        except (ArgillaError, httpx.HTTPError) as error:
            raise BackendError(f"{connection.url} does not take the argilla package's client: {error}") from error
        self._rest = RestApi(self._argilla.http_client)
        self._ids: dict[str, str] = {}

    def close(self) -> None:
        self._argilla.http_client.close()

    def ensure_sheet(self, sheet: Sheet) -> None:
        dataset = self._find(sheet)
        if dataset is not None and dataset["status"] != "ready":    # its making was interrupted: it was never shown and holds nothing
            self._rest.ask("DELETE", f"/datasets/{dataset['id']}")
            dataset = None
        if dataset is None:
            self._create(sheet)
            return
        self._require_same_form(sheet, dataset["id"])
        wanted = {"guidelines": sheet.guidelines, "distribution": {"strategy": "overlap", "min_submitted": sheet.min_submitted}}
        changed = {name: value for name, value in wanted.items() if dataset[name] != value}
        if changed:
            self._rest.ask("PATCH", f"/datasets/{dataset['id']}", json=changed)

    def add(self, sheet: Sheet, tasks: Sequence[ShownTask]) -> Added:
        path = f"/datasets/{self._id_of(sheet)}/records/bulk"
        new: list[str] = []
        refused: list[Refused] = []
        present = 0
        for batch in batches([record_of(task) for task in tasks]):
            sent = self._send(path, batch)
            new += sent.new
            refused += sent.refused
            present += sent.present
        return Added(new=tuple(new), present=present, refused=tuple(refused))

    def remove(self, sheet: Sheet, task_ids: Sequence[str]) -> int:
        dataset, wanted = self._id_of(sheet), set(task_ids)
        found = [record["id"] for record in self._records(dataset) if record["external_id"] in wanted]
        for start in range(0, len(found), DELETED_AT_ONCE):
            self._rest.ask("DELETE", f"/datasets/{dataset}/records", params={"ids": ",".join(found[start:start + DELETED_AT_ONCE])})
        return len(found)

    def answers(self, sheet: Sheet, *, after: str | None = None) -> Iterator[Answer]:
        """The embedded server lists responses by time. Upstream cannot: where nothing at all happened after `after`, nothing is read, else
        everything is.
        """
        dataset = self._id_of(sheet)
        if after is not None and self.connection.embedded:
            stored = self._responses_after(dataset, after)
        elif after is not None and self._last_activity(dataset) < after:
            return
        else:
            stored = ((record, response) for record in self._records(dataset, include="responses") for response in record["responses"])
        names = self._names()
        for record, response in stored:
            if response["user_id"] not in names:    # an account made a moment ago, or deleted
                names = {response["user_id"]: f"removed-{response['user_id']}"} | self._names()
            yield answer_of(record, response, sheet.places, annotator=names[response["user_id"]])

    def progress(self, sheet: Sheet) -> SheetProgress:
        dataset = self._id_of(sheet)
        whole = self._rest.ask("GET", f"/datasets/{dataset}/progress")
        people = self._rest.ask("GET", f"/datasets/{dataset}/users/progress")["users"]
        return SheetProgress(tasks=whole["total"], completed=whole["completed"],
                             by_annotator={person["username"]: _counts(person) for person in people})

    def _last_activity(self, dataset: str) -> str:
        """When anything was last stored in a data set; the end of time where the server does not say."""
        last = self._rest.ask("GET", f"/datasets/{dataset}")["last_activity_at"]
        return _utc(last) if last else "9999"

    def _names(self) -> dict[str, str]:
        """User id -> name."""
        return {user["id"]: user["username"] for user in self._rest.ask("GET", "/users")["items"]}

    def _responses_after(self, dataset: str, after: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Records and responses: every response that was stored then or later, once for each state in which it is met."""
        met: set[tuple[str, str]] = set()
        while True:
            page = self._rest.ask("GET", f"/datasets/{dataset}/responses", params={"after": after, "limit": PAGE})["items"]
            new = [item for item in page if (item["response"]["id"], item["response"]["updated_at"]) not in met]
            met |= {(item["response"]["id"], item["response"]["updated_at"]) for item in new}
            yield from ((item["record"], item["response"]) for item in new)
            if len(page) < PAGE:
                return
            if not new:
                raise BackendError(f"{self.connection.url} has {PAGE} responses of one moment, {after}. Run `annotation pull --full`.")
            after = _utc(page[-1]["response"]["updated_at"])

    def _find(self, sheet: Sheet) -> dict[str, Any] | None:
        """The data set of that name in the workspace. Raises BackendError where the workspace is missing."""
        workspaces = {workspace["name"]: workspace["id"] for workspace in self._rest.ask("GET", "/me/workspaces")["items"]}
        if sheet.workspace not in workspaces:
            known = ", ".join(sorted(workspaces)) or "none"
            raise BackendError(f"{self.connection.url} has no workspace {sheet.workspace!r} (it has {known}). Name another one with "
                               "--workspace, or let the server's owner make it.")
        found = self._rest.ask("GET", "/me/datasets", params={"workspace_id": workspaces[sheet.workspace]})["items"]
        return next((dataset for dataset in found if dataset["name"] == sheet.name), None)

    def _id_of(self, sheet: Sheet) -> str:
        key = f"{sheet.workspace}/{sheet.name}"
        if key not in self._ids:
            dataset = self._find(sheet)
            if dataset is None:
                raise BackendError(f"{self.connection.url} has no data set {sheet.name} in workspace {sheet.workspace}. It was deleted "
                                   "there, or the home is served by another server; `annotation push` makes it again.")
            self._ids[key] = dataset["id"]
        return self._ids[key]

    def _create(self, sheet: Sheet) -> None:
        try:
            rg.Dataset(name=sheet.name, workspace=sheet.workspace, settings=form_of(sheet), client=self._argilla).create()
        except (ArgillaError, httpx.HTTPError) as error:
            raise BackendError(f"{self.connection.url} does not make the data set {sheet.name}: {error} {error.__cause__ or ''}") from error

    def _require_same_form(self, sheet: Sheet, dataset: str) -> None:
        """Fields and questions cannot be changed once there are records."""
        there = [part for kind in ("fields", "questions") for part in self._rest.ask("GET", f"/datasets/{dataset}/{kind}")["items"]]
        wanted = form_of(sheet)
        here = [part.api_model().model_dump(mode="json") for part in (*wanted.fields, *wanted.questions)]
        shapes_there, shapes_here = set(map(shape_of, there)), set(map(shape_of, here))
        if shapes_there != shapes_here:
            raise ConfigError(f"the data set {sheet.name} of {self.connection.url} has other fields or questions than this project: only "
                              f"there {sorted(shapes_there - shapes_here)}, only here {sorted(shapes_here - shapes_there)}. Name the "
                              "project differently, or delete the data set in Argilla.")

    def _send(self, path: str, records: Sequence[dict[str, Any]]) -> Sent:
        """What the server refuses is halved until each refused record is alone and named."""
        if not records:
            return Sent([], 0, [])
        answer = self._rest.answer("POST", path, json={"items": records}, expected=(422,))
        if answer.is_success:
            return Sent([record["external_id"] for record in records], 0, [])
        if ALREADY_THERE in answer.text and any(record["external_id"] in answer.text for record in records):
            others = [record for record in records if record["external_id"] not in answer.text]
            sent = self._send(path, others)
            return Sent(sent.new, sent.present + len(records) - len(others), sent.refused)
        if len(records) == 1:
            return Sent([], 0, [Refused(records[0]["external_id"], said(answer))])
        middle = len(records) // 2
        first, second = self._send(path, records[:middle]), self._send(path, records[middle:])
        return Sent(first.new + second.new, first.present + second.present, first.refused + second.refused)

    def _records(self, dataset: str, *, include: str | None = None) -> Iterator[dict[str, Any]]:
        """Every record once. Pages are cut by position: where records went away while they were read, others moved up and were missed,
        and all pages are read again. Raises BackendError where they keep changing.
        """
        seen: set[str] = set()
        for _ in range(READINGS):
            offset, most = 0, 0
            while True:
                params: dict[str, str | int] = {"limit": PAGE, "offset": offset}
                page = self._rest.ask("GET", f"/datasets/{dataset}/records", params=params | ({"include": include} if include else {}))
                for record in page["items"]:
                    if record["id"] not in seen:
                        seen.add(record["id"])
                        yield record
                most, offset = max(most, page["total"]), offset + len(page["items"])
                if not page["items"]:
                    break
            if len(seen) >= most:
                return
        raise BackendError(f"{self.connection.url} holds {most} records in data set {dataset}, but only {len(seen)} could be read, because "
                           "they change all the time. Try again when nobody is deleting records.")


def require_argilla(connection: Connection) -> None:
    """Raises BackendError unless an Argilla 2 says that it is one, and knows the key."""
    with httpx.Client(base_url=connection.url, headers={"X-Argilla-Api-Key": connection.api_key}, timeout=TIMEOUT,
                      verify=connection.verify(), **_direct(connection)) as client:
        rest = RestApi(client)
        about = decoded(rest.answer("GET", "/version", expected=(404,)))
        version = about["version"] if isinstance(about, dict) and "version" in about else None
        if not isinstance(version, str) or not version.startswith("2."):
            raise BackendError(f"{connection.url} answers, but is no Argilla 2 server (it calls itself {version!r}). Check the address; "
                               "`annotation serve` starts one.")
        rest.ask("GET", "/me")


def _direct(connection: Connection) -> dict[str, Any]:
    """Arguments of an HTTP client: proxies named in the environment are left out for a server on this machine."""
    return {"mounts": {"http://": None, "https://": None, "all://": None}} if connection.embedded else {}


def form_of(sheet: Sheet) -> rg.Settings:
    """Fields and questions as annotators see them. Texts are plain: what a response contains is shown, never rendered."""
    places = [response_field(place) for place in range(sheet.places)]
    titles = {name: f"Response {place}" for place, name in enumerate(places, 1)}
    questions = [rg.RankingQuestion(name=RANKING, title="Rank the responses, best first; equal ones may share a rank", values=titles)]
    if sheet.confidence:
        questions.append(rg.RatingQuestion(name=CONFIDENCE, title="How sure are you? (5: entirely)", values=SURENESS, required=False))
    if sheet.reasons:
        questions.append(rg.LabelQuestion(name=REASON, title="What decided it?", labels=list(sheet.reasons), required=False))
    if sheet.comment:
        questions.append(rg.TextQuestion(name=COMMENT, title="Anything else?", required=False))
    return rg.Settings(guidelines=sheet.guidelines, allow_extra_metadata=False,
                       fields=[rg.ChatField(name=PROMPT, title="Conversation", use_markdown=False),
                               *(rg.TextField(name=name, title=title, use_markdown=False) for name, title in titles.items())],
                       questions=questions, distribution=rg.TaskDistribution(min_submitted=sheet.min_submitted))


def shape_of(part: dict[str, Any]) -> tuple[str, str, tuple[str, ...]]:
    """Name, type, and what can be chosen, of a field or a question as the API writes it."""
    settings = part["settings"]
    return part["name"], settings["type"], tuple(sorted(str(option["value"]) for option in settings.get("options") or ()))


def record_of(task: ShownTask) -> dict[str, Any]:
    responses = {response_field(place): shown_text(response) for place, response in enumerate(task.responses)}
    messages = [shown_message(message.role, message.content) for message in task.prompt.messages]
    return {"fields": {PROMPT: messages, **responses}, "external_id": task.id}


def batches(records: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Cut by number and by size, so that long responses do not make a request that no server takes."""
    batch: list[dict[str, Any]] = []
    size = 0
    for record in records:
        length = len(json.dumps(record))
        if batch and (len(batch) == BATCH_TASKS or size + length > BATCH_CHARACTERS):
            yield batch
            batch, size = [], 0
        batch.append(record)
        size += length
    if batch:
        yield batch


def answer_of(record: dict[str, Any], response: dict[str, Any], places: int, *, annotator: str) -> Answer:
    """A response as the API writes it. Drafts may lack any value, discards may have none at all."""
    values = {name: value["value"] for name, value in (response["values"] or {}).items()}
    return Answer(response_id=response["id"], task_id=record["external_id"] or record["id"], annotator=annotator, status=response["status"],
                  ranks=ranks_of(values.get(RANKING, []), places), confidence=values.get(CONFIDENCE), reason=values.get(REASON),
                  comment=values.get(COMMENT), inserted_at=_utc(response["inserted_at"]), updated_at=_utc(response["updated_at"]))


def ranks_of(stored: Sequence[dict[str, Any]], places: int) -> tuple[int, ...]:
    """[{"value": "response_2", "rank": 1}, ...] -> ranks by place; empty unless every place has one."""
    ranks = {item["value"]: item["rank"] for item in stored if item["rank"] is not None}
    fields = [response_field(place) for place in range(places)]
    return tuple(ranks[field] for field in fields) if ranks.keys() == set(fields) else ()


def _counts(person: dict[str, Any]) -> dict[Status, int]:
    by_status = [person[record_status] for record_status in ("completed", "pending") if person.get(record_status)]
    return {status: sum(counts.get(status, 0) for counts in by_status) for status in STATUSES}


def _utc(text: str) -> str:
    """The server writes UTC without saying so."""
    moment = datetime.fromisoformat(text)
    return utc(moment if moment.tzinfo else moment.replace(tzinfo=UTC))
