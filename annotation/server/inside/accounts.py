"""Runs inside the server's environment: the owner and the workspace at every start, and new API keys, for which upstream has no call."""

from __future__ import annotations

import secrets
from typing import Annotated
from uuid import UUID

from argilla_server.api.policies.v1 import UserPolicy, authorize
from argilla_server.api.schemas.v1.users import User as UserSchema
from argilla_server.contexts import accounts
from argilla_server.database import AsyncSessionLocal, async_engine, get_async_db
from argilla_server.enums import UserRole
from argilla_server.models import User, Workspace
from argilla_server.security import auth
from fastapi import Depends, FastAPI, Security
from sqlalchemy.ext.asyncio import AsyncSession

from .settings import ServerSettings

KEY_BYTES = 48
"""Of randomness, as in upstream's own keys."""


async def ensure_owner_and_workspace(settings: ServerSettings) -> None:
    """As the settings say, also where a restored database says something else."""
    async with AsyncSessionLocal() as session:
        if await Workspace.get_by(session, name=settings.workspace) is None:
            await accounts.create_workspace(session, {"name": settings.workspace})
        owner = await User.get_by(session, username=settings.owner_name)
        if owner is None:
            owner = await accounts.create_user(session, {
                "first_name": settings.owner_name, "last_name": None, "username": settings.owner_name, "role": UserRole.owner,
                "password": settings.owner_password})
        if owner.api_key != settings.owner_api_key:
            await accounts.update_user(session, owner, {"api_key": settings.owner_api_key, "password": settings.owner_password})
    await async_engine.dispose()    # its connections belong to the event loop of this call


def add_key_rotation(api: FastAPI) -> None:
    """`POST /users/{id}/api-key`, for owners."""
    api.add_api_route("/users/{user_id}/api-key", rotate_api_key, methods=["POST"], response_model=UserSchema, tags=["users"])


async def rotate_api_key(user_id: UUID, db: Annotated[AsyncSession, Depends(get_async_db)],
                         current_user: Annotated[User, Security(auth.get_current_user)]) -> User:
    """A new random key in place of the old one, which is refused from then on."""
    await authorize(current_user, UserPolicy.update)
    user = await User.get_or_raise(db, user_id)
    return await user.update(db, api_key=secrets.token_urlsafe(KEY_BYTES))
