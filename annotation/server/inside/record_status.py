"""Runs inside the server's environment: when a record is completed, in one statement."""

from __future__ import annotations

from argilla_server.enums import RecordStatus, ResponseStatus
from argilla_server.models import Dataset, Record, Response
from sqlalchemy import ColumnElement, case, func, literal, select, update
from sqlalchemy.ext.asyncio import AsyncSession


async def settle(db: AsyncSession, *records: ColumnElement[bool]) -> int:
    """Complete those of the records that have the submitted responses they need, and reopen the others. How many changed.

    The rule is upstream's: `min_submitted` of the data set's distribution. Whoever calls it commits.
    """
    submitted = select(func.count()).where(Response.record_id == Record.id, Response.status == ResponseStatus.submitted).scalar_subquery()
    needed = select(Dataset.distribution["min_submitted"].as_integer()).where(Dataset.id == Record.dataset_id).scalar_subquery()
    completed, pending = (literal(status, Record.status.type) for status in (RecordStatus.completed, RecordStatus.pending))
    status = case((submitted >= needed, completed), else_=pending)
    changed = await db.execute(update(Record).where(*records, Record.status != status).values(status=status)
                               .execution_options(synchronize_session=False))
    return int(changed.rowcount)
