"""Runs inside the server's environment: filters and sort orders of the API as conditions and keys over the server's own tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from argilla_server.enums import RecordStatus, ResponseStatus, ResponseStatusFilter, SortOrder, SuggestionType
from argilla_server.models import Question, Record, Response, Suggestion
from argilla_server.search_engine.base import (
    AndFilter,
    Filter,
    MetadataFilterScope,
    Order,
    RangeFilter,
    RecordFilterScope,
    ResponseFilterScope,
    SuggestionFilterScope,
    TermsFilter,
)
from sqlalchemy import ColumnElement, Enum, Text, and_, cast, exists, false, func, or_, select, true

from .search_dialect import Dialect
from .search_query import QueryError


def moment(value: str | float) -> datetime:
    """ISO 8601, or milliseconds since 1970, as in Elasticsearch; without a zone, UTC. The database keeps UTC without saying so."""
    if isinstance(value, str):
        told = datetime.fromisoformat(value)
        return (told if told.tzinfo is None else told.astimezone(UTC)).replace(tzinfo=None)
    return datetime.fromtimestamp(value / 1000, UTC).replace(tzinfo=None)


@dataclass(frozen=True)
class Property:
    """A plain column that can be filtered and sorted by."""

    column: ColumnElement[Any]
    parse: Callable[[Any], object]
    """From what the request says; ValueError where the column cannot have such a value."""

    @property
    def sorted_by(self) -> ColumnElement[Any]:
        """PostgreSQL sorts an enumeration as it was declared, SQLite and Elasticsearch by its letters."""
        return cast(self.column, Text) if isinstance(self.column.type, Enum) else self.column


RECORD_PROPERTIES = {
    "id": Property(Record.id, lambda value: UUID(str(value))),
    "external_id": Property(Record.external_id, str),
    "status": Property(Record.status, RecordStatus),
    "inserted_at": Property(Record.inserted_at, moment),
    "updated_at": Property(Record.updated_at, moment),
}
SUGGESTION_PROPERTIES = {
    "agent": Property(Suggestion.agent, str),
    "type": Property(Suggestion.type, SuggestionType),
}
JSON_OF_SUGGESTION = {"value": Suggestion.value, "score": Suggestion.score}


@dataclass(frozen=True)
class Filters:
    """Translates for one data set."""

    dialect: Dialect
    dataset_id: UUID

    def condition(self, filter: Filter) -> ColumnElement[bool]:
        """What must hold of a record. Raises QueryError for what cannot be compared."""
        if isinstance(filter, AndFilter):
            return and_(true(), *map(self.condition, filter.filters))
        scope = filter.scope
        if isinstance(scope, RecordFilterScope):
            return compare(RECORD_PROPERTIES[scope.property], filter)
        if isinstance(scope, MetadataFilterScope):
            return self.compare_json(Record.metadata_, [scope.metadata_property], filter)
        if isinstance(scope, SuggestionFilterScope):
            of_record = (Suggestion.record_id == Record.id, Suggestion.question_id == self.question_id(scope.question))
            if scope.property in SUGGESTION_PROPERTIES:
                return exists().where(*of_record, compare(SUGGESTION_PROPERTIES[scope.property], filter))
            return exists().where(*of_record, self.compare_json(JSON_OF_SUGGESTION[scope.property], [], filter))
        if scope.question:
            return exists().where(Response.record_id == Record.id, *of_user(scope),
                                  self.compare_json(Response.values, [scope.question, "value"], filter))
        return response_status(scope, filter)

    def sort_key(self, order: Order) -> ColumnElement[Any]:
        """Records without the value come last, in either direction."""
        descending = order.order == SortOrder.desc
        key = self.sorted_value(order.scope, descending=descending)
        return (key.desc() if descending else key.asc()).nulls_last()

    def sorted_value(self, scope: Any, *, descending: bool) -> ColumnElement[Any]:
        if isinstance(scope, RecordFilterScope):
            return RECORD_PROPERTIES[scope.property].sorted_by
        if isinstance(scope, MetadataFilterScope):
            return self.first_element(Record.metadata_, [scope.metadata_property], descending=descending)
        if isinstance(scope, SuggestionFilterScope):
            value = (SUGGESTION_PROPERTIES[scope.property].sorted_by if scope.property in SUGGESTION_PROPERTIES
                     else self.first_element(JSON_OF_SUGGESTION[scope.property], [], descending=descending))
            return (select(value).where(Suggestion.record_id == Record.id, Suggestion.question_id == self.question_id(scope.question))
                    .scalar_subquery())
        if scope.question:
            elements = self.dialect.elements(Response.values, [scope.question, "value"])
            return (select(func.avg(elements.number)).select_from(Response).join(elements.rows, true())
                    .where(Response.record_id == Record.id, *of_user(scope)).scalar_subquery())
        return select(func.min(cast(Response.status, Text))).where(Response.record_id == Record.id, *of_user(scope)).scalar_subquery()

    def compare_json(self, column: ColumnElement[Any], path: Sequence[str], filter: TermsFilter | RangeFilter) -> ColumnElement[bool]:
        """Whether the value, or an element of the list that it is, is among the terms or within the range."""
        elements = self.dialect.elements(column, path)
        if isinstance(filter, TermsFilter):
            wanted = or_(elements.text.in_(filter.values), elements.number.in_(possible(filter.values, float)))    # 3 and 3.0 are one
        else:
            wanted = between(elements.number, filter, parse=float)
        return exists(select(1).select_from(elements.rows).where(elements.present, wanted))

    def first_element(self, column: ColumnElement[Any], path: Sequence[str], *, descending: bool) -> ColumnElement[Any]:
        """The value; of a list its smallest element, or its largest for a descending order."""
        elements = self.dialect.elements(column, path)
        order = elements.value.desc() if descending else elements.value.asc()
        return select(elements.value).select_from(elements.rows).where(elements.present).order_by(order).limit(1).scalar_subquery()

    def question_id(self, name: str) -> ColumnElement[UUID]:
        return select(Question.id).where(Question.dataset_id == self.dataset_id, Question.name == name).scalar_subquery()


def of_user(scope: ResponseFilterScope) -> tuple[ColumnElement[bool], ...]:
    """Everybody's responses where the request does not name a user."""
    return (Response.user_id == scope.user.id,) if scope.user else ()


def response_status(scope: ResponseFilterScope, filter: TermsFilter | RangeFilter) -> ColumnElement[bool]:
    """`pending` is no response's status: it means that there is none. The subqueries do not depend on the record, so that they are made
    once and not for each record: at 100,000 records that is 0.1 s against 36.
    """
    if not isinstance(filter, TermsFilter):
        raise QueryError("the status of a response is filtered by terms, not by a range")
    statuses = [ResponseStatus(value) for value in filter.values if value in set(ResponseStatus)]
    conditions = [Record.id.in_(select(Response.record_id).where(*of_user(scope), Response.status.in_(statuses)))] if statuses else []
    if ResponseStatusFilter.pending in filter.values:
        conditions.append(Record.id.not_in(select(Response.record_id).where(*of_user(scope))))
    return or_(false(), *conditions)


def compare(compared: Property, filter: TermsFilter | RangeFilter) -> ColumnElement[bool]:
    if isinstance(filter, RangeFilter):
        return between(compared.column, filter, parse=compared.parse)
    return compared.column.in_(possible(filter.values, compared.parse))


def between(column: ColumnElement[Any], filter: RangeFilter, *, parse: Callable[[Any], object]) -> ColumnElement[bool]:
    """ge <= column <= le, as far as they are given. Raises QueryError for a bound that the column cannot be compared with."""
    try:
        return and_(*([column >= parse(filter.ge)] if filter.ge is not None else []),
                    *([column <= parse(filter.le)] if filter.le is not None else []))
    except (ValueError, OverflowError) as error:
        raise QueryError(f"a bound of the range {filter.ge!r} to {filter.le!r} cannot be compared here: {error}") from error


def possible(values: Sequence[str], parse: Callable[[Any], object]) -> list[object]:
    """Terms come as text. One that the column cannot have is no error: it is found nowhere."""
    def parsed(value: str) -> list[object]:
        try:
            return [parse(value)]
        except ValueError:
            return []

    return [term for value in values for term in parsed(value)]
