"""Every route of the server, asked as everybody. A route that upstream adds is missing in the table, and the test says so."""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_under_test import ServerUnderTest

from annotation.server.reachable import ask, client_of

NOBODY = str(uuid.uuid4())
"""An id that does not exist."""
TABLE = """
GET /datasets/{dataset_id}                                      401      403      200      403      200      200
GET /datasets/{dataset_id}/fields                               401      403      200      403      200      200
GET /datasets/{dataset_id}/progress                             401      403      200      403      200      200
GET /datasets/{dataset_id}/questions                            401      403      200      403      200      200
GET /datasets/{dataset_id}/records                              401      403      403      403      200      200
GET /datasets/{dataset_id}/records/search/suggestions/options     401      403      200      403      200      200
GET /datasets/{dataset_id}/users/progress                       401      403      403      403      200      200
GET /datasets/{dataset_id}/vectors-settings                     401      403      200      403      200      200
GET /docs                                                       404      404      404      404      404      404
GET /docs/oauth2-redirect                                       404      404      404      404      404      404
GET /jobs/{job_id}                                              401      403      403      404      404      404
GET /me                                                         401      200      200      200      200      200
GET /me/datasets                                                401      200      200      200      200      200
GET /me/datasets/{dataset_id}/metadata-properties               401      403      200      403      200      200
GET /me/datasets/{dataset_id}/metrics                           401      403      200      403      200      200
GET /me/workspaces                                              401      200      200      200      200      200
GET /metadata-properties/{metadata_property_id}/metrics         401      403      403      403      200      200
GET /oauth2/providers                                           200      200      200      200      200      200
GET /oauth2/providers/{provider}/access-token                   404      404      404      404      404      404
GET /oauth2/providers/{provider}/authentication                 404      404      404      404      404      404
GET /openapi.json                                               404      404      404      404      404      404
GET /records/{record_id}                                        401      403      403      403      200      200
GET /records/{record_id}/suggestions                            401      403      403      403      200      200
GET /redoc                                                      404      404      404      404      404      404
GET /settings                                                   200      200      200      200      200      200
GET /status                                                     404      404      404      404      404      404
GET /users                                                      401      403      403      403      403      200
GET /users/{user_id}                                            401      403      403      403      403      200
GET /users/{user_id}/workspaces                                 401      403      403      403      403      200
GET /version                                                    200      200      200      200      200      200
GET /webhooks                                                   401      403      403      403      403      200
GET /workspaces/{workspace_id}                                  401      403      200      403      200      200
GET /workspaces/{workspace_id}/users                            401      403      403      403      200      200
PATCH /datasets/{dataset_id}                                    401      403      403      403      200      200
PATCH /fields/{field_id}                                        401      403      403      403      200      200
PATCH /metadata-properties/{metadata_property_id}               401      403      403      403      200      200
PATCH /questions/{question_id}                                  401      403      403      403      200      200
PATCH /records/{record_id}                                      401      403      403      403      200      200
PATCH /users/{user_id}                                          401      403      403      403      403      200
PATCH /vectors-settings/{vector_settings_id}                    401      403      403      403      200      200
PATCH /webhooks/{webhook_id}                                    401      403      403      403      403      200
POST /datasets                                                  401      403      403      403      201      409
POST /datasets/{dataset_id}/export                              404      404      404      404      404      404
POST /datasets/{dataset_id}/fields                              401      403      403      403      422      422
POST /datasets/{dataset_id}/import                              404      404      404      404      404      404
POST /datasets/{dataset_id}/metadata-properties                 401      403      403      403      201      409
POST /datasets/{dataset_id}/questions                           401      403      403      403      422      422
POST /datasets/{dataset_id}/records/bulk                        401      403      403      403      201      201
POST /datasets/{dataset_id}/records/search                      401      403      403      403      200      200
POST /datasets/{dataset_id}/vectors-settings                    401      403      403      403      201      409
POST /me/datasets/{dataset_id}/records/search                   401      403      200      403      200      200
POST /me/responses/bulk                                         401      200      200      200      200      200
POST /records/{record_id}/responses                             401      403      409      403      409      409
POST /token                                                     422      422      422      422      422      422
POST /users                                                     401      403      403      403      403      201
POST /users/{user_id}/api-key                                   401      403      403      403      403      404
POST /webhooks                                                  401      403      403      403      403      201
POST /webhooks/{webhook_id}/ping                                401      403      403      403      403      404
POST /workspaces                                                401      403      403      403      403      201
POST /workspaces/{workspace_id}/users                           401      403      403      403      403      409
PUT /datasets/{dataset_id}/publish                              401      403      403      403      422      422
PUT /datasets/{dataset_id}/records/bulk                         401      403      403      403      200      200
PUT /records/{record_id}/suggestions                            401      403      403      403      200      200
PUT /responses/{response_id}                                    401      403      403      403      200      200
DELETE /datasets/{dataset_id}                                   401      403      403      403      404      404
DELETE /datasets/{dataset_id}/records                           401      403      403      403      404      404
DELETE /fields/{field_id}                                       401      403      403      403      404      404
DELETE /metadata-properties/{metadata_property_id}              401      403      403      403      404      404
DELETE /questions/{question_id}                                 401      403      403      403      404      404
DELETE /records/{record_id}                                     401      403      403      403      404      404
DELETE /records/{record_id}/suggestions                         401      403      403      403      404      404
DELETE /responses/{response_id}                                 401      403      403      403      404      404
DELETE /suggestions/{suggestion_id}                             401      403      403      403      404      404
DELETE /users/{user_id}                                         401      403      403      403      403      404
DELETE /vectors-settings/{vector_settings_id}                   401      403      403      403      404      404
DELETE /webhooks/{webhook_id}                                   401      403      403      403      403      404
DELETE /workspaces/{workspace_id}                               401      403      403      403      403      404
DELETE /workspaces/{workspace_id}/users/{user_id}               401      403      403      403      200      404
"""
"""Status by route and role, in the order of ROLES: 404 for everybody where a route is shut, or where the one who may is asked to use what
does not exist; 409 and 422 where a request got past the question who may ask."""
ROLES = ("nobody", "outsider", "annotator", "admin-elsewhere", "admin", "owner")
"""outsider: an annotator of another workspace."""
EXPECTED = {" ".join(row.split()[:2]): tuple(map(int, row.split()[2:])) for row in TABLE.strip().splitlines()}
RANKING = {"rank": {"value": [{"value": "a", "rank": 2}, {"value": "b", "rank": 1}]}}
SUGGESTION = {"value": RANKING["rank"]["value"], "agent": "secret-agent", "score": [0.9, 0.1]}


@dataclass(frozen=True)
class World:
    """A workspace with a data set that one colleague has answered, and one person of each kind."""

    clients: dict[str, httpx.Client]
    ids: dict[str, str]
    """What stands for a path's parameters: everything in the workspace. `response_id` is the colleague's."""
    own: dict[str, str]
    """Ids of the annotator's own things."""


@contextmanager
def person(server: ServerUnderTest, owner: httpx.Client, name: str, role: str, workspace: str) -> Iterator[tuple[httpx.Client, str]]:
    user = ask(owner, "POST", "/users", json={"username": name, "first_name": name, "role": role, "password": "a long password"})
    ask(owner, "POST", f"/workspaces/{workspace}/users", json={"user_id": user["id"]})
    headers = {"X-Argilla-Api-Key": user["api_key"]}
    with httpx.Client(base_url=f"{server.connection.url}/api/v1", headers=headers, timeout=30) as client:
        yield client, user["id"]


def make_dataset(owner: httpx.Client, workspace: str) -> dict[str, str]:
    """A data set of one record with a hidden metadata property and a suggestion; ids by the names that paths give them."""
    dataset = ask(owner, "POST", "/datasets", json={"name": f"roles-{NOBODY[:8]}", "workspace_id": workspace,
                                                    "distribution": {"strategy": "overlap", "min_submitted": 3}})["id"]
    field = ask(owner, "POST", f"/datasets/{dataset}/fields", json={
        "name": "text", "title": "Text", "required": True, "settings": {"type": "text", "use_markdown": False}})["id"]
    question = ask(owner, "POST", f"/datasets/{dataset}/questions", json={
        "name": "rank", "title": "Rank", "required": True,
        "settings": {"type": "ranking", "options": [{"value": value, "text": value} for value in ("a", "b")]}})["id"]
    hidden = ask(owner, "POST", f"/datasets/{dataset}/metadata-properties", json={
        "name": "model", "title": "Model", "settings": {"type": "terms"}, "visible_for_annotators": False})["id"]
    vectors = ask(owner, "POST", f"/datasets/{dataset}/vectors-settings", json={"name": "v", "title": "v", "dimensions": 2})["id"]
    ask(owner, "PUT", f"/datasets/{dataset}/publish")
    record = ask(owner, "POST", f"/datasets/{dataset}/records/bulk", json={"items": [{
        "fields": {"text": "x"}, "metadata": {"model": "secret-model"},
        "suggestions": [{"question_id": question, **SUGGESTION}],
    }]})["items"][0]["id"]
    webhook = ask(owner, "POST", "/webhooks", json={"url": "http://localhost:9/", "events": ["dataset.deleted"]})["id"]
    suggestion = ask(owner, "GET", f"/records/{record}/suggestions")["items"][0]["id"]
    return {"dataset_id": dataset, "field_id": field, "question_id": question, "metadata_property_id": hidden, "suggestion_id": suggestion,
            "vector_settings_id": vectors, "record_id": record, "webhook_id": webhook, "job_id": NOBODY, "provider": "huggingface"}


@pytest.fixture(scope="module")
def world(argilla_server: ServerUnderTest) -> Iterator[World]:
    with client_of(argilla_server.connection) as owner:
        workspace = ask(owner, "POST", "/workspaces", json={"name": "roles"})["id"]
        elsewhere = ask(owner, "POST", "/workspaces", json={"name": "roles-elsewhere"})["id"]
        ids = {"workspace_id": workspace, **make_dataset(owner, workspace)}
        with (person(argilla_server, owner, "roles-outsider", "annotator", elsewhere) as (outsider, _),
              person(argilla_server, owner, "roles-annotator", "annotator", workspace) as (annotator, _),
              person(argilla_server, owner, "roles-colleague", "annotator", workspace) as (colleague, colleague_id),
              person(argilla_server, owner, "roles-admin-elsewhere", "admin", elsewhere) as (admin_elsewhere, _),
              person(argilla_server, owner, "roles-admin", "admin", workspace) as (admin, _),
              httpx.Client(base_url=f"{argilla_server.connection.url}/api/v1", timeout=30) as nobody):
            def answer(client: httpx.Client) -> str:
                return str(ask(client, "POST", f"/records/{ids['record_id']}/responses",
                               json={"status": "submitted", "values": RANKING})["id"])
            ids |= {"response_id": answer(colleague), "user_id": colleague_id}
            yield World({"nobody": nobody, "outsider": outsider, "annotator": annotator, "admin-elsewhere": admin_elsewhere,
                         "admin": admin, "owner": owner}, ids, {"response_id": answer(annotator)})


def bodies(ids: dict[str, str]) -> dict[str, Any]:
    """What a request needs to get as far as the question who may ask."""
    search = {"query": {"text": {"q": "x"}}}
    record = {"fields": {"text": "y"}}
    return {
        "POST /me/datasets/{dataset_id}/records/search": search,
        "POST /datasets/{dataset_id}/records/search": search,
        "POST /records/{record_id}/responses": {"status": "draft", "values": RANKING},
        "PUT /responses/{response_id}": {"status": "submitted", "values": RANKING},
        "POST /me/responses/bulk": {"items": [{"record_id": ids["record_id"], "status": "draft", "values": RANKING}]},
        "PUT /records/{record_id}/suggestions": {"question_id": ids["question_id"], **SUGGESTION},
        "POST /datasets/{dataset_id}/fields": {"name": "f", "title": "f", "settings": {"type": "text"}},
        "POST /datasets/{dataset_id}/questions": {"name": "q", "title": "q", "settings": {"type": "text"}},
        "POST /datasets/{dataset_id}/metadata-properties": {"name": "m", "title": "m", "settings": {"type": "terms"}},
        "POST /datasets/{dataset_id}/vectors-settings": {"name": "w", "title": "w", "dimensions": 2},
        "POST /datasets/{dataset_id}/records/bulk": {"items": [record]},
        "PUT /datasets/{dataset_id}/records/bulk": {"items": [record]},
        "POST /datasets": {"name": "d", "workspace_id": ids["workspace_id"]},
        "POST /workspaces/{workspace_id}/users": {"user_id": ids["user_id"]},
        "PATCH /vectors-settings/{vector_settings_id}": {"title": "w"},
        "POST /users": {"username": "roles-another", "first_name": "another", "role": "owner", "password": "a long password"},
        "POST /workspaces": {"name": "roles-another"},
        "POST /webhooks": {"url": "http://localhost:9/", "events": ["response.created"]},
    }


def routes_of(python: Path) -> list[str]:
    """Method and path of every route of the application, with our own."""
    script = ("import json, sys; sys.path.insert(0, sys.argv[1]); from argilla_server.api.routes import api_v1; "
              "from inside import accounts; accounts.add_key_rotation(api_v1); "
              "print(json.dumps([f'{method} {route.path}' for route in api_v1.router.routes for method in route.methods]))")
    folder = Path(__file__).resolve().parents[2] / "annotation/server"
    told = subprocess.run([python, "-c", script, folder], capture_output=True, text=True, check=True)
    return [route for route in json.loads(told.stdout) if not route.startswith("HEAD ")]


def status(world: World, role: str, route: str) -> int:
    """Of one request. Who may delete is asked to delete what does not exist, so that the world lasts."""
    method, path = route.split(" ")
    may = role == "owner" or (role == "admin" and not path.startswith(("/users", "/workspaces", "/webhooks")))
    ids = dict.fromkeys(world.ids, NOBODY) if may and (method == "DELETE" or path.endswith(("/api-key", "/ping"))) else world.ids
    for name, value in ids.items():
        path = path.replace(f"{{{name}}}", value)
    params = {"ids": ids["record_id"]} if method == "DELETE" and path.endswith(("/records", "/suggestions")) else None
    body = bodies(world.ids).get(route, {}) if method in ("POST", "PUT", "PATCH") else None
    return world.clients[role].request(method, path, json=body, params=params).status_code


def test_the_table_has_every_route(server_python: Path) -> None:
    assert sorted(EXPECTED) == sorted(routes_of(server_python))


@pytest.mark.slow
def test_everybody_may_do_what_the_table_says_and_nothing_else(world: World) -> None:
    found = {route: tuple(status(world, role, route) for role in ROLES) for route in EXPECTED}
    assert {route: statuses for route, statuses in found.items() if statuses != EXPECTED[route]} == {}


def search(world: World, role: str, body: Any, **params: Any) -> httpx.Response:
    return world.clients[role].post(f"/me/datasets/{world.ids['dataset_id']}/records/search", json=body, params=params)


def test_an_annotator_finds_own_responses_only_and_no_authors(world: World) -> None:
    found = search(world, "annotator", {}, include=["responses", "suggestions", "vectors"])
    (item,) = [item for item in found.json()["items"] if item["record"]["id"] == world.ids["record_id"]]
    assert [response["id"] for response in item["record"]["responses"]] == [world.own["response_id"]]
    assert item["record"]["metadata"] == {}
    assert item["record"]["suggestions"][0]["value"] == RANKING["rank"]["value"]
    assert "secret" not in found.text
    assert item["record"]["suggestions"][0]["score"] is None
    agents = world.clients["annotator"].get(f"/datasets/{world.ids['dataset_id']}/records/search/suggestions/options")
    assert "secret" not in agents.text
    whole = world.clients["admin"].get(f"/records/{world.ids['record_id']}").text
    assert "secret-model" in whole    # it is there to be found
    assert "secret-agent" in whole


HIDDEN: list[dict[str, Any]] = [
    {"filters": {"and": [{"type": "terms", "scope": {"entity": "metadata", "metadata_property": "model"}, "values": ["secret-model"]}]}},
    {"sort": [{"scope": {"entity": "metadata", "metadata_property": "model"}, "order": "asc"}]},
    {"filters": {"and": [{"type": "terms", "scope": {"entity": "suggestion", "question": "rank", "property": "agent"}, "values": ["x"]}]}},
    {"sort": [{"scope": {"entity": "suggestion", "question": "rank", "property": "score"}, "order": "asc"}]},
]


@pytest.mark.parametrize("query", HIDDEN)
def test_what_is_hidden_cannot_be_searched_for_either(world: World, query: dict[str, Any]) -> None:
    assert search(world, "annotator", query).status_code == 403
    assert search(world, "admin", query).status_code == 200


def test_an_outsider_stores_nothing_in_bulk(world: World) -> None:
    body = {"items": [{"record_id": world.ids["record_id"], "status": "submitted", "values": RANKING}]}
    (item,) = world.clients["outsider"].post("/me/responses/bulk", json=body).json()["items"]
    assert item["item"] is None
    assert "not allowed" in item["error"]["detail"]


def test_nobody_changes_the_response_of_a_colleague(world: World) -> None:
    path = f"/responses/{world.ids['response_id']}"
    before = world.clients["owner"].get(f"/records/{world.ids['record_id']}").json()["responses"]
    assert world.clients["annotator"].put(path, json={"status": "draft", "values": {}}).status_code == 403
    assert world.clients["annotator"].delete(path).status_code == 403
    assert world.clients["owner"].get(f"/records/{world.ids['record_id']}").json()["responses"] == before
