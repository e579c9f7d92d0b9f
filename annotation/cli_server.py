"""Commands of `annotation`: install, serve, users, backup and restore."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from annotation.cli_options import DEFAULT_HOME, HomeFolder, Json
from annotation.home import Connection, Home
from rlhf.commands import EXIT_CODES, Outcome
from rlhf.errors import ConfigError

if TYPE_CHECKING:
    from annotation.server.users import Credentials

users = typer.Typer(name="users", help="Who may annotate. The server must be running.", no_args_is_help=True)
UserName = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    for command in (install, serve, backup, restore):
        app.command(epilog=EXIT_CODES)(command)
    app.add_typer(users)


def install(as_json: Json = False) -> Outcome:
    """Install the Argilla server into an environment of its own: once, about 600 MB, from the locked requirements.

    Interrupted, it continues when called again. The place is a folder of the user's cache, or PREFLOOP_SERVER_ENV.
    """
    console = Console(stderr=as_json)
    python = installed_python(console)
    say(console, f"the annotation server is installed in {python.parents[1]}")
    return Outcome({"ok": True, "python": python})


def installed_python(console: Console) -> Path:
    from annotation.server.install import environment_folder, install

    return install(environment_folder(os.environ), console)


def serve(
    home: HomeFolder = DEFAULT_HOME,
    host: Annotated[str, typer.Option(help="address to listen on; all but loopback ask for TLS or --behind-proxy")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free")] = 6900,
    workspace: Annotated[str, typer.Option(help="of Argilla: data sets and annotators belong to one")] = "preferences",
    database_url: Annotated[str | None, typer.Option(metavar="URL", envvar="PREFLOOP_DATABASE_URL",
                                                     help="postgresql://..., in place of SQLite in the home")] = None,
    redis_url: Annotated[str | None, typer.Option(metavar="URL", envvar="PREFLOOP_REDIS_URL",
                                                  help="redis://..., in place of jobs in the server's process")] = None,
    elasticsearch_url: Annotated[str | None, typer.Option(metavar="URL", help="in place of the search over the server's tables")] = None,
    opensearch_url: Annotated[str | None, typer.Option(metavar="URL", help="in place of the search over the server's tables")] = None,
    backend_url: Annotated[str | None, typer.Option(metavar="URL", help="an Argilla 2.x that somebody else runs: it is checked and "
                                                    "remembered, nothing is started")] = None,
    api_key_file: Annotated[Path | None, typer.Option(metavar="FILE", help="of --backend-url: owner's key; else ARGILLA_API_KEY")] = None,
    tls_certificate: Annotated[Path | None, typer.Option(metavar="PEM", help="certificate, with its chain")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="PEM", help="its private key")] = None,
    behind_proxy: Annotated[bool, typer.Option("--behind-proxy", help="a proxy in front speaks HTTPS and sets X-Forwarded-For")] = False,
    as_json: Json = False,
) -> Outcome:
    """Serve Argilla, the annotators' web page, from one command, until Ctrl-C. Installs the server on first use."""
    from annotation.server.embedded import ServerOptions, running

    console = Console(stderr=as_json)
    place = Home(home)
    if backend_url is not None:
        return use_backend(place, backend_url, api_key_file, workspace, console)
    if api_key_file is not None:
        raise ConfigError("--api-key-file belongs to --backend-url; the embedded server makes its own keys")
    options = ServerOptions(host=host, port=port, workspace=workspace, database_url=database_url, redis_url=redis_url,
                            elasticsearch_url=elasticsearch_url, opensearch_url=opensearch_url, tls_certificate=tls_certificate,
                            tls_key=tls_key, behind_proxy=behind_proxy)
    python = installed_python(console)
    with running(place, python, options, console) as server:
        say_where(console, place, server.connection)
        try:
            server.wait()
        except KeyboardInterrupt:
            say(console, "stopping; every response that was acknowledged is stored")
    return Outcome({"ok": True, "url": server.connection.url, "home": home, "stopped": True})


def say_where(console: Console, home: Home, connection: Connection) -> None:
    say(console, f"Argilla is at {connection.url}, workspace {connection.workspace}. Ctrl-C stops it.\n"
                 f"  annotators   annotation users add NAME --home {quote(str(home.folder))}\n"
                 f"  yourself     sign in as owner; the password is in {home.server / 'secrets.json'}\n"
                 f"  log          {home.server / 'server.log'}")


def use_backend(home: Home, url: str, api_key_file: Path | None, workspace: str, console: Console) -> Outcome:
    from annotation.server.external import use

    if api_key_file is not None:
        key = api_key_file.read_text(encoding="utf-8").strip()
    elif not (key := os.environ.get("ARGILLA_API_KEY", "")):
        raise ConfigError("--backend-url needs the API key of an owner: in --api-key-file FILE or in the variable ARGILLA_API_KEY")
    connection = use(home, url, key, workspace)
    say(console, f"{home.folder} uses the Argilla server at {connection.url}, workspace {workspace}")
    return Outcome({"ok": True, "url": connection.url, "home": home.folder, "stopped": False})


def say(console: Console, text: str, *, style: str = "") -> None:
    """Text with names and paths in it: nothing of it is markup, and lines are as long as they are."""
    console.print(text, markup=False, highlight=False, soft_wrap=True, style=style)


def show_credentials(console: Console, given: Sequence[Credentials]) -> None:
    """Passwords, on a terminal. Keys are for programs: --json shows them, and each person's settings page shows one's own."""
    table = Table("name", "password")
    for person in given:
        table.add_row(person.name, person.password)
    console.print(table)
    say(console, "shown once, and kept nowhere on this side; --json shows API keys, too")


@users.command(epilog=EXIT_CODES)
def add(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", show_default=False)],
    role: Annotated[Literal["annotator", "admin"], typer.Option(help="an admin may make data sets in the workspace, and sees everybody's "
                                                                "responses")] = "annotator",
    home: HomeFolder = DEFAULT_HOME, as_json: Json = False,
) -> Outcome:
    """Make accounts and show their passwords and API keys, once."""
    from annotation.server.users import administration

    with administration(Home(home).connection()) as people:
        given = people.add(names, role=role)
    if not as_json:
        show_credentials(Console(), given)
    return Outcome({"ok": True, "users": [asdict(person) for person in given]})


@users.command("list", epilog=EXIT_CODES)
def list_users(home: HomeFolder = DEFAULT_HOME, as_json: Json = False) -> Outcome:
    """Everybody the server knows."""
    from annotation.server.users import administration

    with administration(Home(home).connection()) as people:
        accounts = people.accounts()
    table = Table("name", "role", "since", "may annotate")
    for account in accounts:
        table.add_row(account.name, account.role, account.since[:10], "yes" if account.active else "no")
    Console(stderr=as_json).print(table)
    return Outcome({"ok": True, "users": [asdict(account) for account in accounts]})


@users.command(epilog=EXIT_CODES)
def rotate(name: UserName, home: HomeFolder = DEFAULT_HOME, as_json: Json = False) -> Outcome:
    """A new password and a new API key; the old ones, and sessions signed in with them, are refused from now on."""
    from annotation.server.users import administration

    with administration(Home(home).connection()) as people:
        given = people.rotate(name)
    if not as_json:
        show_credentials(Console(), [given])
    if not given.key_is_new:
        say(Console(stderr=as_json), "this server cannot replace API keys: the old key stays valid. Only its operator can change that.",
            style="yellow")
    return Outcome({"ok": True, "users": [asdict(given)]})


@users.command(epilog=EXIT_CODES)
def remove(name: UserName, home: HomeFolder = DEFAULT_HOME, as_json: Json = False) -> Outcome:
    """Bar somebody from the server. The name and every response stay: Argilla deletes a person's responses with the person."""
    from annotation.server.users import administration

    console = Console(stderr=as_json)
    with administration(Home(home).connection()) as people:
        key_is_dead = people.remove(name).key_is_new
    say(console, f"{name} can no longer sign in and is in no workspace; the responses are kept")
    if not key_is_dead:
        say(console, "this server cannot replace API keys: the old key still answers who it belongs to, and opens no data set.",
            style="yellow")
    return Outcome({"ok": True, "removed": name, "responses_kept": True, "key_is_dead": key_is_dead})


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False, help="to be made, for example annotation-2026-12-01.zip")],
    home: HomeFolder = DEFAULT_HOME,
    without_database: Annotated[bool, typer.Option("--without-database", help="where PostgreSQL or another server holds the responses: the "
                                                   "rest of the home")] = False,
    as_json: Json = False,
) -> Outcome:
    """Everything of a home in one file: database, secrets, projects, verdicts. The server may go on running."""
    from annotation.server.backup import backup as make

    console = Console(stderr=as_json)
    made = make(Home(home), file, without_database=without_database, console=console)
    say(console, f"{file}: {made.files} files, {made.bytes / 1e6:.1f} MB. It holds the server's secrets and everybody's API keys: keep it "
                 "as one keeps a password.")
    if made.database != "sqlite":
        say(console, f"not in it: the responses, which are in {made.database}", style="yellow")
    return Outcome({"ok": True, "file": file, **asdict(made)})


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False, help="made by `annotation backup`")],
    home: HomeFolder = DEFAULT_HOME,
    force: Annotated[bool, typer.Option("--force", help="also into a home that is not empty, which is moved aside")] = False,
    as_json: Json = False,
) -> Outcome:
    """A home as it was backed up. Every hash is checked before anything is put in place."""
    from annotation.server.backup import restore as put_back

    console = Console(stderr=as_json)
    restored, aside = put_back(Home(home), file, force=force, console=console)
    say(console, f"{home} is as it was at {restored.made_at}: {restored.files} files")
    if aside is not None:
        say(console, f"what was there is now {aside}")
    return Outcome({"ok": True, "home": home, "moved_aside": aside, **asdict(restored)})
