"""Runs inside the server's environment: responses by the time at which they were stored, for which upstream has no call.

Without it, whoever wants to know what is new must read every record of a data set with all of its texts.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import UUID

from argilla_server.api.policies.v1 import DatasetPolicy, authorize
from argilla_server.database import get_async_db
from argilla_server.errors.future import UnprocessableEntityError
from argilla_server.models import Dataset, Record, Response, User
from argilla_server.security import auth
from fastapi import Depends, FastAPI, Query, Security
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

MOST = 1000
"""Responses in one answer."""


def add_to(api: FastAPI) -> None:
    """`GET /datasets/{id}/responses?after=TIME`, for those who may read everybody's responses."""
    api.add_api_route("/datasets/{dataset_id}/responses", responses_after, methods=["GET"], tags=["datasets"])


async def responses_after(
    dataset_id: UUID, after: datetime, db: Annotated[AsyncSession, Depends(get_async_db)],
    current_user: Annotated[User, Security(auth.get_current_user)], limit: Annotated[int, Query(ge=1, le=MOST)] = MOST,
) -> dict[str, Any]:
    """Those stored at that time or later, oldest first. Where there are more than `limit`, the last one's time is where to go on."""
    dataset = await Dataset.get_or_raise(db, dataset_id)
    await authorize(current_user, DatasetPolicy.list_records_with_all_responses(dataset))
    try:
        moment = after.astimezone(UTC).replace(tzinfo=None) if after.tzinfo else after    # the tables hold UTC without saying so
    except OverflowError:
        raise UnprocessableEntityError(f"`after` is {after.isoformat()}, which has no equal in UTC") from None
    rows = await db.execute(
        select(Response, Record.external_id).join(Record, Record.id == Response.record_id)
        .where(Record.dataset_id == dataset.id, Response.updated_at >= moment)
        .order_by(Response.updated_at, Response.id).limit(limit))
    return {"items": [{"record": {"id": response.record_id, "external_id": external_id},
                       "response": {"id": response.id, "user_id": response.user_id, "status": response.status, "values": response.values,
                                    "inserted_at": response.inserted_at, "updated_at": response.updated_at}}
                      for response, external_id in rows]}
