"""Runs inside the server's environment: what the two databases do in their own ways, behind one interface.

A text index holds the words of the records' fields; it is the only copy of data that search keeps. Filters, sorts and progress are
plain queries on the server's own tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias
from uuid import UUID

from argilla_server.models import Field, Record
from sqlalchemy import Column, ColumnElement, FromClause, select
from sqlalchemy.ext.asyncio import AsyncSession

from .search_query import Query
from .search_words import words_of

INDEXES = (
    "CREATE INDEX IF NOT EXISTS prefloop_records_queue ON records (dataset_id, status, id, inserted_at)",
    "CREATE INDEX IF NOT EXISTS prefloop_records_order ON records (dataset_id, inserted_at, id)",
    "CREATE INDEX IF NOT EXISTS prefloop_responses_user ON responses (user_id, record_id, status)",
    "CREATE INDEX IF NOT EXISTS prefloop_responses_time ON responses (updated_at, id)",
)
"""On upstream's own tables, for the queues of annotators and for what is new: upstream indexes one column at a time."""
Fields: TypeAlias = Mapping[int, Field]
"""Fields by their number within the data set."""


@dataclass(frozen=True)
class Elements:
    """A JSON value as rows: one for each element where it is a list, else one."""

    rows: FromClause
    present: ColumnElement[bool]
    """False for null."""
    text: ColumnElement[str]
    number: ColumnElement[float]
    """Null where the element is no number."""
    value: ColumnElement[Any]
    """For sorting: numbers by size, texts by their letters."""


class Dialect(Protocol):
    indexed: Column[UUID]
    """Ids of the records whose words are in the text index."""

    async def prepare(self, db: AsyncSession) -> None:
        """Make the tables that are missing, and drop what belongs to data sets that are gone."""

    async def analyse(self, db: AsyncSession) -> None:
        """Let the database look at how its values are spread, where it does not by itself."""

    async def add_dataset(self, db: AsyncSession, dataset_id: UUID) -> None:
        """Make room for the words of a data set; nothing where it is there."""

    async def drop_dataset(self, db: AsyncSession, dataset_id: UUID) -> None:
        """Forget the words of a data set that has been deleted."""

    async def write(self, db: AsyncSession, dataset_id: UUID, records: Sequence[Record]) -> None:
        """The words of these records in place of what was there."""

    def contains(self, dataset_id: UUID, fields: Fields, query: Query) -> ColumnElement[bool]:
        """Whether a record of the data set matches the query in these of its fields."""

    def elements(self, json: ColumnElement[Any], path: Sequence[str]) -> Elements:
        """The JSON value under a path of keys."""

    def shuffled(self, user_id: UUID) -> ColumnElement[Any]:
        """A sort key: always the same order for one annotator, another one for the next."""


async def text_fields(db: AsyncSession, dataset_id: UUID) -> Fields:
    """The fields of a data set that can be searched. They are fixed when it is published, and so are their numbers."""
    fields = await db.scalars(select(Field).where(Field.dataset_id == dataset_id).order_by(Field.inserted_at, Field.id))
    return {number: field for number, field in enumerate(fields) if not field.is_image}


def field_words(field: Field, record: Record) -> list[str]:
    """The words of one field of a record; of a chat or a custom field those of every text in it, without the roles of a chat."""
    return words_of("\n".join(texts_of(record.fields.get(field.name), chat=field.is_chat)))


def texts_of(value: object, *, chat: bool) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from texts_of(item, chat=chat)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not (chat and key == "role"):
                yield from texts_of(item, chat=chat)
    elif value is not None:
        yield str(value)
