"""Runs inside the server's environment: upstream's search engine over the server's own tables, so that no search server is needed.

Filters, sorts, progress and metrics are queries on the tables in which records, responses and suggestions are anyway: there is no second
copy to keep in step, and most of upstream's calls about changes have nothing to do. Only words are indexed, see `search_dialect`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any
from uuid import UUID

import numpy as np
from argilla_server.database import AsyncSessionLocal, async_engine
from argilla_server.enums import MetadataPropertyType, SimilarityOrder
from argilla_server.models import Dataset, MetadataProperty, Record, Response, Suggestion, User, Vector, VectorSettings
from argilla_server.search_engine.base import (
    Filter,
    FloatMetadataMetrics,
    IntegerMetadataMetrics,
    MetadataMetrics,
    Order,
    SearchEngine,
    SearchResponseItem,
    SearchResponses,
    TermsMetrics,
    TextQuery,
)
from sqlalchemy import ColumnElement, false, func, literal, select, text, true
from sqlalchemy.ext.asyncio import AsyncSession

from .record_status import settle
from .search_dialect import INDEXES, Dialect, text_fields
from .search_filters import Filters
from .search_postgresql import Postgresql
from .search_query import parse
from .search_sqlite import Sqlite
from .surroundings import SEARCH_ENGINE

LOG = logging.getLogger("uvicorn.error")
DIALECTS: dict[str, type[Dialect]] = {"sqlite": Sqlite, "postgresql": Postgresql}
MOST_TERMS = 2**14
"""In the metrics of a metadata property, as upstream's."""
AT_ONCE = 500
"""Records indexed in one transaction when an index is completed."""


def dialect() -> Dialect:
    return DIALECTS[async_engine.dialect.name]()


async def bootstrap() -> None:
    """Before the server answers: tables, and what a crash left undone between upstream's commit and what follows from it."""
    async with AsyncSessionLocal() as db:
        await dialect().prepare(db)
        for statement in INDEXES:
            await db.execute(text(statement))
        await db.commit()
        indexed, settled = await heal(db)
        if indexed or settled:
            LOG.warning("a crash had left %d records without their words and %d with a wrong status; they are right now", indexed, settled)
        await dialect().analyse(db)
        await db.commit()


async def heal(db: AsyncSession) -> tuple[int, int]:
    """Index the records that are not, and give every record the status that follows from its responses. How many of each."""
    for dataset_id in (await db.scalars(select(Dataset.id).where(Dataset.status == "ready"))).all():
        await dialect().add_dataset(db, dataset_id)
    indexed = dialect().indexed
    missing = (await db.execute(select(Record.dataset_id, Record.id).join(Dataset).outerjoin(indexed.table, indexed == Record.id)
                                .where(Dataset.status == "ready", indexed.is_(None)).order_by(Record.dataset_id))).all()
    for dataset_id, rows in groupby(missing, key=lambda row: row.dataset_id):
        ids = [row.id for row in rows]
        for start in range(0, len(ids), AT_ONCE):
            records = (await db.scalars(select(Record).where(Record.id.in_(ids[start:start + AT_ONCE])))).all()
            await dialect().write(db, dataset_id, records)
            await db.commit()
            db.expunge_all()
    settled = await settle(db)
    await db.commit()
    return len(missing), settled


@SearchEngine.register(SEARCH_ENGINE)
class SqlSearchEngine(SearchEngine):    # type: ignore[misc]
    def __init__(self) -> None:
        self.dialect = dialect()

    @classmethod
    async def new_instance(cls) -> SqlSearchEngine:
        return cls()

    async def close(self) -> None:
        """Nothing is held."""

    async def ping(self) -> bool:
        async with AsyncSessionLocal() as db:
            return bool(await db.scalar(select(literal(True))))

    async def info(self) -> dict[str, str]:
        return {"engine": SEARCH_ENGINE, "database": async_engine.dialect.name}

    async def create_index(self, dataset: Dataset) -> None:
        async with AsyncSessionLocal() as db:
            await self.dialect.add_dataset(db, dataset.id)
            await db.commit()

    async def delete_index(self, dataset: Dataset) -> None:
        async with AsyncSessionLocal() as db:
            await self.dialect.drop_dataset(db, dataset.id)
            await db.commit()

    async def index_records(self, dataset: Dataset, records: Iterable[Record]) -> None:
        async with AsyncSessionLocal() as db:
            await self.dialect.write(db, dataset.id, list(records))
            await db.commit()

    async def configure_metadata_property(self, dataset: Dataset, metadata_property: MetadataProperty) -> None:
        """Nothing to do here and below: search reads the tables that upstream has just written."""

    async def configure_index_vectors(self, vector_settings: VectorSettings) -> None: ...

    async def partial_record_update(self, record: Record, **update: object) -> None: ...

    async def delete_records(self, dataset: Dataset, records: Iterable[Record]) -> None: ...

    async def update_record_response(self, response: Response) -> None: ...

    async def delete_record_response(self, response: Response) -> None: ...

    async def update_record_suggestion(self, suggestion: Suggestion) -> None: ...

    async def delete_record_suggestion(self, suggestion: Suggestion) -> None: ...

    async def get_dataset_progress(self, dataset: Dataset) -> dict[str, int]:
        if dataset.is_draft:
            return {}
        return await count_by(Record.status, select(Record.status, func.count()).where(Record.dataset_id == dataset.id))

    async def get_dataset_user_progress(self, dataset: Dataset, user: User) -> dict[str, int]:
        if dataset.is_draft:
            return {}
        return await count_by(Response.status, select(Response.status, func.count()).join(Record).where(
            Record.dataset_id == dataset.id, Response.user_id == user.id))

    async def search(self, dataset: Dataset, query: TextQuery | str | None = None, filter: Filter | None = None,
                     sort: Sequence[Order] | None = None, offset: int = 0, limit: int = 100,
                     user_id: UUID | None = None) -> SearchResponses:
        """A page of the records that match, and how many match. Without a sort order an annotator gets the records in an order of their
        own, anybody else in that of their insertion. `user_id` is not in upstream's interface, but its handlers give it.
        """
        async with AsyncSessionLocal() as db:
            conditions = await self.conditions(db, dataset, query, filter)
            keys = [Filters(self.dialect, dataset.id).sort_key(order) for order in sort or ()]
            if not keys and user_id is not None:
                keys = [self.dialect.shuffled(user_id)]
            counted = literal(0) if query is None else func.count().over()    # words are dear to look up: once for both
            page = (await db.execute(select(Record.id, counted).where(*conditions).order_by(*keys, Record.inserted_at, Record.id)
                                     .offset(offset).limit(limit))).all()
            if query is not None and page:
                total = page[0][1]
            elif offset == 0 and len(page) < limit:
                total = len(page)
            else:
                total = await db.scalar(select(func.count()).select_from(Record).where(*conditions))
        return SearchResponses(items=[SearchResponseItem(record_id=row.id) for row in page], total=total)

    async def compute_metrics_for(self, metadata_property: MetadataProperty) -> MetadataMetrics:
        elements = self.dialect.elements(Record.metadata_, [metadata_property.name])
        of_dataset = (Record.dataset_id == metadata_property.dataset_id, elements.present)
        async with AsyncSessionLocal() as db:
            if metadata_property.type == MetadataPropertyType.terms:
                rows = (await db.execute(
                    select(elements.text, func.count()).select_from(Record).join(elements.rows, true()).where(*of_dataset)
                    .group_by(elements.text).order_by(func.count().desc(), elements.text))).all()
                return TermsMetrics(total=sum(count for _, count in rows),
                                    values=[TermsMetrics.TermCount(term=term, count=count) for term, count in rows[:MOST_TERMS]])
            smallest, largest = (await db.execute(select(func.min(elements.number), func.max(elements.number)).select_from(Record)
                                                  .join(elements.rows, true()).where(*of_dataset))).one()
        if metadata_property.type == MetadataPropertyType.float:
            return FloatMetadataMetrics(min=smallest, max=largest)
        whole = [None if number is None else int(number) for number in (smallest, largest)]
        return IntegerMetadataMetrics(min=whole[0], max=whole[1])

    async def similarity_search(self, dataset: Dataset, vector_settings: VectorSettings, value: list[float] | None = None,
                                record: Record | None = None, query: TextQuery | str | None = None, filter: Filter | None = None,
                                max_results: int = 100, order: SimilarityOrder = SimilarityOrder.most_similar,
                                threshold: float | None = None) -> SearchResponses:
        """By comparing with every vector: a second at some tens of thousands. The score is (1 + cosine) / 2, as in Elasticsearch."""
        wanted = value or (record.vector_value_by_vector_settings(vector_settings) if record else None)
        if not wanted:
            raise ValueError("a similarity search needs a vector, or a record that has one")
        async with AsyncSessionLocal() as db:
            rows = (await db.execute(select(Vector.record_id, Vector.value).join(Record).where(
                Vector.vector_settings_id == vector_settings.id, *await self.conditions(db, dataset, query, filter),
                *([Record.id != record.id] if record else [])))).all()
        if not rows:
            return SearchResponses(items=[], total=0)
        vectors, target = np.array([row.value for row in rows]), np.array(wanted)
        lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(target)
        cosines = np.divide(vectors @ target, lengths, out=np.zeros(len(rows)), where=lengths > 0)
        scores = (1 + (cosines if order == SimilarityOrder.most_similar else -cosines)) / 2
        items = [SearchResponseItem(record_id=rows[index].record_id, score=float(scores[index]))
                 for index in np.argsort(-scores, kind="stable")[:max_results] if threshold is None or scores[index] >= threshold]
        return SearchResponses(items=items, total=len(items))

    async def conditions(self, db: AsyncSession, dataset: Dataset, query: TextQuery | str | None,
                         filter: Filter | None) -> list[ColumnElement[bool]]:
        """What must hold of the records that are searched for. Raises QueryError, which the server answers with 422."""
        conditions: list[Any] = [Record.dataset_id == dataset.id]
        if query is not None:
            asked = TextQuery(q=query) if isinstance(query, str) else query
            parsed = parse(asked.q)
            fields = {number: field for number, field in (await text_fields(db, dataset.id)).items() if asked.field in (None, field.name)}
            conditions.append(self.dialect.contains(dataset.id, fields, parsed) if parsed and fields else false())
        if filter is not None:
            conditions.append(Filters(self.dialect, dataset.id).condition(filter))
        return conditions


async def count_by(column: ColumnElement[Any], counts: Any) -> dict[str, int]:
    """{total: n, each value: n}"""
    async with AsyncSessionLocal() as db:
        rows = (await db.execute(counts.group_by(column))).all()
    return {"total": sum(count for _, count in rows), **{str(value): count for value, count in rows}}
