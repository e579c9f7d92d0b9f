"""Runs inside the server's environment: search on SQLite.

Each data set has a table of FTS5 with a column for each field. It is contentless: it knows in which documents a word is, not the
documents. A document is a number that belongs to one version of a record, in `prefloop_documents`; a changed record gets a new one, and
its row goes with the record. Postings of a number that has no row are dead, and never found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from argilla_server.models import Dataset, Record
from sqlalchemy import (
    Column,
    ColumnElement,
    Float,
    ForeignKey,
    Integer,
    MetaData,
    Table,
    Text,
    Uuid,
    and_,
    case,
    cast,
    column,
    delete,
    func,
    insert,
    literal_column,
    not_,
    or_,
    select,
    table,
    text,
)
from sqlalchemy.ext.asyncio import AsyncSession

from .search_dialect import Elements, Fields, field_words, text_fields
from .search_query import AllOf, AnyOf, Not, Query, Words

DOCUMENTS = Table(
    "prefloop_documents", MetaData(),
    Column("number", Integer, primary_key=True),
    Column("record_id", Uuid, ForeignKey(Record.id, ondelete="CASCADE"), nullable=False, unique=True),
    sqlite_autoincrement=True,    # a number is never used twice
)
PREFIX = "prefloop_words_"
PRIME = 2**31 - 1


def table_of(dataset_id: UUID) -> str:
    return PREFIX + dataset_id.hex


class Sqlite:
    """See `Dialect`."""

    indexed = DOCUMENTS.c.record_id

    async def prepare(self, db: AsyncSession) -> None:
        connection = await db.connection()
        await connection.run_sync(DOCUMENTS.metadata.create_all)
        datasets = {dataset_id.hex for dataset_id in await db.scalars(select(Dataset.id))}
        tables = await db.scalars(text("SELECT name FROM sqlite_master WHERE name GLOB :name").bindparams(name=PREFIX + "?" * 32))
        for name in tables.all():
            if name.removeprefix(PREFIX) not in datasets:
                await db.execute(text(f"DROP TABLE {name}"))

    async def analyse(self, db: AsyncSession) -> None:
        """Without statistics the planner takes the wrong index at 100,000 records."""
        await db.execute(text("PRAGMA analysis_limit = 1000"))
        await db.execute(text("ANALYZE"))

    async def add_dataset(self, db: AsyncSession, dataset_id: UUID) -> None:
        """Columns are numbered: a name that people gave could be a word of FTS5's own, such as rank."""
        columns = ", ".join(f"f{number}" for number in await text_fields(db, dataset_id)) or "empty"
        await db.execute(text(f"CREATE VIRTUAL TABLE IF NOT EXISTS {table_of(dataset_id)} USING fts5({columns}, content = '', "
                              "tokenize = 'ascii tokenchars _')"))    # the words come split and folded: only spaces are left to do

    async def drop_dataset(self, db: AsyncSession, dataset_id: UUID) -> None:
        await db.execute(text(f"DROP TABLE IF EXISTS {table_of(dataset_id)}"))

    async def write(self, db: AsyncSession, dataset_id: UUID, records: Sequence[Record]) -> None:
        ids = [record.id for record in records]
        await db.execute(delete(DOCUMENTS).where(DOCUMENTS.c.record_id.in_(ids)))
        added = await db.execute(insert(DOCUMENTS).returning(DOCUMENTS.c.record_id, DOCUMENTS.c.number), [{"record_id": id} for id in ids])
        numbers = {row.record_id: row.number for row in added}
        fields = await text_fields(db, dataset_id)
        columns = ["rowid", *(f"f{number}" for number in fields)]
        rows = [{"rowid": numbers[record.id]} | {f"f{number}": " ".join(field_words(field, record)) for number, field in fields.items()}
                for record in records]
        await db.execute(text(f"INSERT INTO {table_of(dataset_id)} ({', '.join(columns)}) VALUES (:{', :'.join(columns)})"), rows)

    def contains(self, dataset_id: UUID, fields: Fields, query: Query) -> ColumnElement[bool]:
        if isinstance(query, Not):
            return not_(self.contains(dataset_id, fields, query.part))
        if negates(query) and isinstance(query, AnyOf):
            return or_(*(self.contains(dataset_id, fields, part) for part in query.parts))
        if negates(query) and isinstance(query, AllOf):    # one look-up for all the parts that the index can answer together
            plain = tuple(part for part in query.parts if not negates(part))
            rest = [self.contains(dataset_id, fields, part) for part in query.parts if negates(part)]
            return and_(*([self.contains(dataset_id, fields, AllOf(plain))] if plain else []), *rest)
        words = table(table_of(dataset_id), column("rowid", Integer))
        columns = " ".join(f"f{number}" for number in fields)
        matching = literal_column(words.name).bool_op("MATCH")(f"{{{columns}}} : ({fts5(query)})")
        return Record.id.in_(select(DOCUMENTS.c.record_id).join_from(DOCUMENTS, words, DOCUMENTS.c.number == words.c.rowid).where(matching))

    def elements(self, json: ColumnElement[Any], path: Sequence[str]) -> Elements:
        each = func.json_each(json, "$" + "".join(f'."{key}"' for key in path)).table_valued("value", "type", name="element")
        number = case((each.c.type.in_(("integer", "real")), cast(each.c.value, Float)))
        return Elements(rows=each, present=each.c.type != "null", text=cast(each.c.value, Text), number=number, value=each.c.value)

    def shuffled(self, user_id: UUID) -> ColumnElement[Any]:
        """(factor * row + shift)^5 modulo a prime: no record is read, and no two rows are alike, because 5 does not divide prime - 1.
        Without the power, the order would be that of insertion or its reverse for one annotator in a hundred.
        """
        factor, shift = user_id.int % (PRIME - 1) + 1, (user_id.int >> 64) % PRIME
        moved = (literal_column("records.rowid", Integer) * factor + shift) % PRIME
        squared = moved * moved % PRIME    # every product is below 2^62: SQLite goes on with floating point beyond 2^63
        return squared * squared % PRIME * moved % PRIME


def negates(query: Query) -> bool:
    return isinstance(query, Not) or (isinstance(query, AllOf | AnyOf) and any(map(negates, query.parts)))


def fts5(query: Query) -> str:
    """An expression of FTS5. A word contains no quotation mark, so nothing can leave the quotation marks it is put in."""
    if isinstance(query, Words):
        return f'"{" ".join(query.words)}"' + (" *" if query.prefix else "")
    assert not isinstance(query, Not)
    joint = " AND " if isinstance(query, AllOf) else " OR "
    return "(" + joint.join(map(fts5, query.parts)) + ")"
