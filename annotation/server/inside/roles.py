"""Runs inside the server's environment: what annotators may ask for. Everything that is not named here is refused to them.

Upstream lets annotators read everybody's responses and all metadata of a record by its id, the progress of their colleagues by name, who
suggested what with which score, and lets them find records by metadata that they cannot see. Admins and owners run the project; upstream's
own rules hold them to their workspaces.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from uuid import UUID

from argilla_server.api.schemas.v1.records import MetadataFilterScope, SearchRecordsQuery
from argilla_server.api.schemas.v1.suggestions import SuggestionFilterScope
from argilla_server.api.schemas.v1.users import User as UserSchema
from argilla_server.api.schemas.v1.users import Users
from argilla_server.errors import ForbiddenOperationError
from argilla_server.models import MetadataProperty, User
from fastapi import FastAPI
from fastapi.routing import APIRoute
from sqlalchemy.ext.asyncio import AsyncSession

Endpoint = Callable[..., Awaitable[Any]]
SEARCH = "/me/datasets/{dataset_id}/records/search"
SUGGESTION_AGENTS = "/datasets/{dataset_id}/records/search/suggestions/options"
FOR_ANNOTATORS = {    # method and path: what the page needs to show a queue and to send one's own responses
    ("GET", "/me"),
    ("GET", "/me/workspaces"),
    ("GET", "/me/datasets"),
    ("GET", "/me/datasets/{dataset_id}/metrics"),
    ("GET", "/me/datasets/{dataset_id}/metadata-properties"),
    ("POST", "/me/responses/bulk"),
    ("GET", "/workspaces/{workspace_id}"),
    ("GET", "/datasets/{dataset_id}"),
    ("GET", "/datasets/{dataset_id}/fields"),
    ("GET", "/datasets/{dataset_id}/questions"),
    ("GET", "/datasets/{dataset_id}/vectors-settings"),
    ("GET", "/datasets/{dataset_id}/progress"),
    ("GET", "/metadata-properties/{metadata_property_id}/metrics"),
    ("POST", "/records/{record_id}/responses"),
    ("PUT", "/responses/{response_id}"),
    ("DELETE", "/responses/{response_id}"),
    ("POST", SEARCH),
    ("GET", SUGGESTION_AGENTS),
}


def require(user: User, method: str, path: str) -> None:
    """Raises ForbiddenOperationError where an annotator asks for what is not named above. `path` is that of the route."""
    if user.is_annotator and (method, path) not in FOR_ANNOTATORS:
        raise ForbiddenOperationError()


def install(api: FastAPI) -> None:
    """Some routes are needed and say too much."""
    for route in [route for route in api.router.routes if isinstance(route, APIRoute)]:
        if route.path == SEARCH:
            wrap(api, route, without_hidden_metadata_and_authors)
        elif route.path == SUGGESTION_AGENTS:
            wrap(api, route, without_agents)
        elif route.response_model in (UserSchema, Users):
            wrap(api, route, without_keys_of_others)


def wrap(api: FastAPI, route: APIRoute, wrapper: Callable[[Endpoint], Endpoint]) -> None:
    """The same route, in the same place, with another endpoint."""
    place = api.router.routes.index(route)
    endpoint: Any = wrapper(route.endpoint)
    endpoint.__signature__ = inspect.signature(route.endpoint, eval_str=True)    # what is written as text has a meaning where it stands
    api.add_api_route(route.path, endpoint, methods=sorted(route.methods), response_model=route.response_model,
                      response_model_exclude_unset=route.response_model_exclude_unset, status_code=route.status_code)
    api.router.routes[place] = api.router.routes.pop()


def without_keys_of_others(endpoint: Endpoint) -> Endpoint:
    """Upstream shows everybody's API key to whoever may list the members of a workspace; with one, an admin would rank as a colleague."""
    @functools.wraps(endpoint)
    async def answered(*, current_user: User, **others: Any) -> Any:
        result = await endpoint(current_user=current_user, **others)
        if current_user.is_owner:
            return result
        shown = Users(items=result.items) if isinstance(result, Users) else Users(items=[result])    # copies: the tables keep the keys
        for user in shown.items:
            if user.id != current_user.id:
                user.api_key = ""
        return shown if isinstance(result, Users) else shown.items[0]

    return answered


def without_hidden_metadata_and_authors(search: Endpoint) -> Endpoint:
    """The values of suggestions stay, if the lead gave any; who made them and with which score does not get to annotators."""
    @functools.wraps(search)    # FastAPI reads the parameters off the function that is wrapped
    async def searched(*, db: AsyncSession, dataset_id: UUID, body: SearchRecordsQuery, current_user: User, **others: Any) -> Any:
        if current_user.is_annotator:
            await require_visible(db, dataset_id, scopes_of(body))
        result = await search(db=db, dataset_id=dataset_id, body=body, current_user=current_user, **others)
        if current_user.is_annotator:
            for item in result.items:
                for suggestion in item.record.suggestions or ():
                    suggestion.agent = suggestion.score = None
        return result

    return searched


def without_agents(options: Endpoint) -> Endpoint:
    @functools.wraps(options)
    async def listed(*, current_user: User, **others: Any) -> Any:
        result = await options(current_user=current_user, **others)
        if current_user.is_annotator:
            for item in result.items:
                item.agents = []
        return result

    return listed


def scopes_of(query: SearchRecordsQuery) -> list[Any]:
    """What a search filters by and sorts by."""
    filters = query.filters.and_ if query.filters else []
    return [condition.scope for condition in [*filters, *(query.sort or [])]]


async def require_visible(db: AsyncSession, dataset_id: UUID, scopes: Iterable[Any]) -> None:
    """A filter or an order tells as much as the value itself. Raises ForbiddenOperationError."""
    for scope in scopes:
        if isinstance(scope, SuggestionFilterScope) and scope.property != "value":
            raise ForbiddenOperationError()
        if isinstance(scope, MetadataFilterScope):
            known = await MetadataProperty.get_by(db, dataset_id=dataset_id, name=scope.metadata_property)
            if known is not None and "annotator" not in known.allowed_roles:
                raise ForbiddenOperationError()
