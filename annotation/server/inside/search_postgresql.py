"""Runs inside the server's environment: search on PostgreSQL.

`prefloop_words` has one tsvector for each record, in which a word carries the number of its field: 2:river is `river` in the third field.
So one index answers for all fields and for a single one, and a phrase cannot begin in one field and end in the next. The vectors are
written word by word, without PostgreSQL's own splitting, which would leave out HTML tags and split addresses differently from SQLite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from argilla_server.models import Dataset, Record
from sqlalchemy import (
    Column,
    ColumnElement,
    Float,
    ForeignKey,
    Index,
    MetaData,
    String,
    Table,
    Text,
    Uuid,
    bindparam,
    case,
    cast,
    delete,
    func,
    insert,
    literal_column,
    select,
)
from sqlalchemy.dialects.postgresql import JSONB, TSQUERY, TSVECTOR
from sqlalchemy.ext.asyncio import AsyncSession

from .search_dialect import Elements, Fields, field_words, text_fields
from .search_query import AllOf, Not, Query, Words

WORDS = Table(
    "prefloop_words", MetaData(),
    Column("record_id", Uuid, ForeignKey(Record.id, ondelete="CASCADE"), primary_key=True),
    Column("dataset_id", Uuid, nullable=False, index=True),
    Column("words", TSVECTOR, nullable=False),
)
Index("prefloop_words_index", WORDS.c.words, postgresql_using="gin")
MOST_BYTES = 1_000_000
"""Of a tsvector, which may have 1 MiB: a longer record is found by its first words."""
MOST_POSITIONS = 256
"""That PostgreSQL keeps for one word."""


class Postgresql:
    """See `Dialect`."""

    indexed = WORDS.c.record_id

    async def prepare(self, db: AsyncSession) -> None:
        connection = await db.connection()
        await connection.run_sync(WORDS.metadata.create_all)
        await db.execute(delete(WORDS).where(WORDS.c.dataset_id.not_in(select(Dataset.id))))

    async def analyse(self, db: AsyncSession) -> None:
        """Nothing to do: PostgreSQL keeps its own statistics."""

    async def add_dataset(self, db: AsyncSession, dataset_id: UUID) -> None:
        """Nothing to do: all data sets share a table."""

    async def drop_dataset(self, db: AsyncSession, dataset_id: UUID) -> None:
        """Nothing to do: the rows went with the records."""

    async def write(self, db: AsyncSession, dataset_id: UUID, records: Sequence[Record]) -> None:
        fields = await text_fields(db, dataset_id)
        await db.execute(delete(WORDS).where(WORDS.c.record_id.in_([record.id for record in records])))
        statement = insert(WORDS).values(words=cast(cast(bindparam("vector", type_=String), Text), TSVECTOR))
        await db.execute(statement, [{"record_id": record.id, "dataset_id": dataset_id, "vector": vector_of(record, fields)}
                                     for record in records])

    def contains(self, dataset_id: UUID, fields: Fields, query: Query) -> ColumnElement[bool]:
        found = WORDS.c.words.bool_op("@@")(cast(cast(tsquery(query, list(fields)), Text), TSQUERY))
        return Record.id.in_(select(WORDS.c.record_id).where(WORDS.c.dataset_id == dataset_id, found))

    def elements(self, json: ColumnElement[Any], path: Sequence[str]) -> Elements:
        node = func.jsonb_extract_path(cast(json, JSONB), *path, type_=JSONB) if path else cast(json, JSONB)
        items = case((func.jsonb_typeof(node) == "array", node), else_=func.jsonb_build_array(node))
        each = func.jsonb_array_elements(items).table_valued(Column("value", JSONB), name="element")
        kind = func.jsonb_typeof(each.c.value)
        letters = literal_column("element.value #>> '{}'", Text)
        return Elements(rows=each, present=kind != "null", text=letters, number=case((kind == "number", cast(letters, Float))),
                        value=each.c.value)

    def shuffled(self, user_id: UUID) -> ColumnElement[Any]:
        return func.hashtextextended(cast(Record.id, Text), user_id.int % 2**62)


def vector_of(record: Record, fields: Fields) -> str:
    """A tsvector as text, with as many of the record's words as it can have."""
    positions: dict[str, list[int]] = {}
    size = 0
    for number, field in fields.items():
        for position, word in enumerate(field_words(field, record), 1):
            lexeme = f"{number}:{word}"
            known = positions.setdefault(lexeme, [])
            size += 2 if known else len(lexeme.encode()) + 6
            if size > MOST_BYTES:
                return written(positions)
            if len(known) < MOST_POSITIONS:
                known.append(position)
    return written(positions)


def written(positions: Mapping[str, Sequence[int]]) -> str:
    return " ".join(f"'{lexeme}':{','.join(map(str, places))}" for lexeme, places in positions.items() if places)


def tsquery(query: Query, numbers: Sequence[int]) -> str:
    """A tsquery as text. A word contains no quotation mark and no backslash, so nothing can leave the quotation marks it is put in."""
    if isinstance(query, Not):
        return f"!({tsquery(query.part, numbers)})"
    if isinstance(query, Words):
        return "(" + " | ".join(phrase(query, number) for number in numbers) + ")"
    joint = " & " if isinstance(query, AllOf) else " | "
    return "(" + joint.join(tsquery(part, numbers) for part in query.parts) + ")"


def phrase(query: Words, number: int) -> str:
    """Next to each other in the field of this number."""
    lexemes = " <-> ".join(f"'{number}:{word}'" for word in query.words)
    return f"({lexemes}{':*' if query.prefix else ''})"
