"""Runs inside the server's environment: who signs in, how often they may be wrong, and how long a session lasts.

A session is a signed token that upstream honours until it expires, whatever happens to the account. Here it also names the credentials that
it was given for: with a new password or a new key it is over at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import secrets
from typing import Annotated

from argilla_server.api.schemas.v1.oauth2 import Token
from argilla_server.constants import API_KEY_HEADER_NAME
from argilla_server.contexts import accounts
from argilla_server.database import get_async_db
from argilla_server.errors import UnauthorizedError
from argilla_server.models import User
from argilla_server.security import auth
from argilla_server.security.authentication.jwt import JWT
from argilla_server.security.authentication.userinfo import UserInfo
from fastapi import Depends, FastAPI, Form, HTTPException, Request
from fastapi.security import SecurityScopes
from sqlalchemy.ext.asyncio import AsyncSession

from . import roles
from .lockout import Lockout, who_counts
from .settings import ServerSettings

TEAM = 10
"""So many times the limit of one name at one address is the limit of an address with all its names, and of a name at all its addresses: a
whole team may sit behind one address, and somebody far away must not keep a name out by being wrong five times."""
NOBODYS_HASH = accounts.hash_password(secrets.token_urlsafe())
"""Checked where there is no such user, so that the answer takes as long."""


class SignIn:
    """The route that gives sessions, and the check that every request passes."""

    def __init__(self, settings: ServerSettings) -> None:
        def after(failures: int) -> Lockout:
            return Lockout(after=failures, first_wait=settings.lockout_seconds)

        self.by_person = after(settings.lockout_after)
        self.by_name = after(settings.lockout_after * TEAM)
        self.by_address = after(settings.lockout_after * TEAM)
        self.by_key = after(settings.lockout_after * TEAM)

    async def create_token(self, request: Request, db: Annotated[AsyncSession, Depends(get_async_db)],
                           username: Annotated[str, Form(max_length=200)], password: Annotated[str, Form(max_length=1000)]) -> Token:
        """`POST /token`. The same answer, after the same time, for a wrong password and for a name that does not exist."""
        address = address_of(request)
        refuse_while(max(self.by_person.seconds_left((username, address)), self.by_name.seconds_left(username),
                         self.by_address.seconds_left(address)))
        user = await accounts.get_user_by_username(db, username)
        right = await asyncio.to_thread(accounts.verify_password, password, NOBODYS_HASH if user is None else user.password_hash)
        if user is None or not right:
            self.by_person.failed((username, address))
            self.by_name.failed(username)
            self.by_address.failed(address)
            raise UnauthorizedError()
        self.by_person.succeeded((username, address))
        self.by_name.succeeded(username)    # not the address: one good account there is no excuse for guessing at others
        return Token(access_token=session_of(user))

    async def current_user(self, scopes: SecurityScopes, request: Request, db: Annotated[AsyncSession, Depends(get_async_db)]) -> User:
        """Upstream's answer to who asks, with guesses at keys limited, outlived sessions refused, and annotators held to what they need."""
        key, address = request.headers.get(API_KEY_HEADER_NAME), address_of(request)
        if key:
            refuse_while(self.by_key.seconds_left(address))
        try:
            user: User = await auth.get_current_user(scopes, request, db)
        except UnauthorizedError:
            if key:
                self.by_key.failed(address)
            raise
        if key != user.api_key and not lasts(session_token(request), user):
            raise UnauthorizedError()
        roles.require(user, request.method, request.scope["route"].path)
        return user


def session_of(user: User) -> str:
    token: str = JWT.create(UserInfo(identity=str(user.id), name=user.first_name, username=user.username, role=user.role,
                                   credentials=fingerprint(user)))
    return token


def session_token(request: Request) -> str:
    authorisation: str = request.headers.get("authorization", "")
    return authorisation.partition(" ")[2].strip()


def lasts(token: str, user: User) -> bool:
    """Whether the session was given for the credentials that the user has now."""
    return secrets.compare_digest(str(JWT.decode(token).get("credentials")), fingerprint(user))


def fingerprint(user: User) -> str:
    return hashlib.sha256(f"{user.id} {user.password_hash} {user.api_key}".encode()).hexdigest()


def address_of(request: Request) -> str:
    return who_counts(request.client.host if request.client else "")


def refuse_while(seconds: float) -> None:
    if seconds > 0:
        raise HTTPException(status_code=429, headers={"Retry-After": str(math.ceil(seconds))},
                            detail=f"Too many failed attempts. Try again in {math.ceil(seconds)} seconds.")


def install(api: FastAPI, settings: ServerSettings) -> None:
    sign_in = SignIn(settings)
    api.router.routes[:] = [route for route in api.router.routes if route.path != "/token"]
    api.add_api_route("/token", sign_in.create_token, methods=["POST"], status_code=201, response_model=Token)
    api.dependency_overrides[auth.get_current_user] = sign_in.current_user
    accounts.generate_user_token = session_of    # what OAuth providers sign in with
