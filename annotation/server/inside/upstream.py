"""Runs inside the server's environment: upstream's version, and every name of it that is replaced or relied on, checked at the start.

A newer Argilla could rename a function that is replaced here, and the replacement would then do nothing, in silence.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

VERSION = "2.8.0"


class UpstreamChanged(RuntimeError):
    """The server does not start."""


@dataclass(frozen=True)
class Name:
    """`module`, and what it has under `path`; of a function also its parameters, as far as they are relied on."""

    module: str
    path: str
    parameters: tuple[str, ...] | None = None

    def difference(self) -> str | None:
        """What is not as it is expected to be."""
        try:
            found: Any = importlib.import_module(f"argilla_server.{self.module}")
            for part in self.path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            return f"argilla_server.{self.module} has no {self.path}"
        if self.parameters is None:
            return None
        parameters = tuple(inspect.signature(found).parameters)
        if parameters == self.parameters:
            return None
        return f"argilla_server.{self.module}.{self.path} takes ({', '.join(parameters)}) instead of ({', '.join(self.parameters)})"


SEARCH = {    # what upstream calls of a search engine
    "new_instance": (), "close": ("self",), "ping": ("self",), "info": ("self",),
    "create_index": ("self", "dataset"), "delete_index": ("self", "dataset"), "index_records": ("self", "dataset", "records"),
    "delete_records": ("self", "dataset", "records"), "partial_record_update": ("self", "record", "update"),
    "configure_metadata_property": ("self", "dataset", "metadata_property"), "configure_index_vectors": ("self", "vector_settings"),
    "update_record_response": ("self", "response"), "delete_record_response": ("self", "response"),
    "update_record_suggestion": ("self", "suggestion"), "delete_record_suggestion": ("self", "suggestion"),
    "get_dataset_progress": ("self", "dataset"), "get_dataset_user_progress": ("self", "dataset", "user"),
    "search": ("self", "dataset", "query", "filter", "sort", "offset", "limit"), "compute_metrics_for": ("self", "metadata_property"),
    "similarity_search": ("self", "dataset", "vector_settings", "value", "record", "query", "filter", "max_results", "order", "threshold"),
}
NAMES = (
    *(Name("search_engine.base", f"SearchEngine.{method}", parameters) for method, parameters in SEARCH.items()),
    Name("search_engine.base", "SearchEngine.register", ("engine_name",)),
    Name("api.handlers.v1.datasets.records", "_get_search_responses"),    # gives search() the user_id
    Name("settings", "Settings.database_engine_args"),
    Name("settings", "Settings.database_is_sqlite"),
    Name("settings", "settings"),
    Name("database", "async_engine"),
    Name("database", "AsyncSessionLocal"),
    Name("database", "get_async_db", ()),
    Name("database", "ALEMBIC_CONFIG_FILE"),
    Name("_app", "app"),
    Name("_app", "REDIS_CONNECTION"),
    Name("api.routes", "api_v1"),
    Name("jobs.queues", "DEFAULT_QUEUE.enqueue_call"),
    Name("jobs.queues", "HIGH_QUEUE.enqueue_call"),
    Name("jobs.queues", "REDIS_CONNECTION"),
    Name("jobs.webhook_jobs", "notify_event_job", ("webhook_id", "event", "timestamp", "data")),
    Name("api.handlers.v1.jobs", "_get_job", ("job_id",)),
    Name("webhooks.v1.commons", "notify_event", ("webhook", "event", "timestamp", "data")),
    Name("webhooks.v1.records", "build_record_event", ("db", "record_event", "record")),
    Name("webhooks.v1.responses", "build_response_event", ("db", "response_event", "response")),
    Name("webhooks.v1.datasets", "build_dataset_event", ("db", "dataset_event", "dataset")),
    Name("contexts.distribution", "update_record_status", ("search_engine", "record_id")),
    Name("contexts.accounts", "get_user_by_api_key", ("db", "api_key")),
    Name("contexts.accounts", "get_user_by_username", ("db", "username")),
    Name("contexts.accounts", "create_user", ("db", "user_attrs", "workspaces")),
    Name("contexts.accounts", "update_user", ("db", "user", "user_attrs")),
    Name("contexts.accounts", "create_workspace", ("db", "workspace_attrs")),
    Name("contexts.accounts", "generate_user_token", ("user",)),
    Name("contexts.accounts", "hash_password", ("password",)),
    Name("contexts.accounts", "verify_password", ("password", "password_hash")),
    Name("models", "User.is_member", ("self", "workspace_id")),
    Name("models", "Dataset.distribution"),
    Name("models", "Webhook.enabled"),
    Name("models.database", "TypeAdapter"),
    Name("api.policies.v1", "UserPolicy.update"),
    Name("api.policies.v1", "DatasetPolicy.list_records_with_all_responses", ("dataset",)),
    Name("models", "Response.record_id"),
    Name("models", "MetadataProperty.allowed_roles"),
    Name("security", "auth"),
    Name("security.authentication.provider", "AuthenticationProvider.get_current_user",
         ("self", "security_scopes", "request", "db", "_api_key", "_bearer")),
    Name("security.authentication.jwt", "JWT.create", ("user",)),
    Name("security.authentication.jwt", "JWT.decode", ("token",)),
    Name("security.authentication.userinfo", "UserInfo"),
    Name("constants", "API_KEY_HEADER_NAME"),
    Name("api.handlers.v1.datasets.records", "search_current_user_dataset_records"),
    Name("api.schemas.v1.suggestions", "SuggestionFilterScope"),
    Name("errors", "UnauthorizedError"),
    Name("errors", "ForbiddenOperationError"),
    Name("errors.future", "NotFoundError"),
    Name("errors.future", "UnprocessableEntityError"),
    Name("api.schemas.v1.users", "User"),
    Name("api.schemas.v1.users", "Users"),
)


def check() -> None:
    """Raises UpstreamChanged, which names all that differs."""
    from argilla_server._version import __version__

    differences = [difference for name in NAMES if (difference := name.difference()) is not None]
    if __version__ != VERSION:
        differences.insert(0, f"its version is {__version__}")
    if differences:
        raise UpstreamChanged("\n  ".join([f"this Prefloop serves argilla-server {VERSION}, but what is installed differs:", *differences])
                              + "\nRun `annotation install`, which installs the right one.")
