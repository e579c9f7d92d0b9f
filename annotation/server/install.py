"""The server's own environment: a virtual environment made from requirements.lock, because argilla-server's pins fight the training stack.

Packages are installed a few at a time, each download checked against the hashes in the lock file, and what is installed is noted.
Killed at any moment and called again, it continues; it counts as an environment only when everything is noted.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

from rich.console import Console

from rlhf.errors import BackendError, ConfigError
from rlhf.progress import progress
from rlhf.whole_files import replace_file

LOCK_FILE = Path(__file__).with_name("requirements.lock")
NOTES, IN_PROGRESS = "prefloop-installed.json", "prefloop-install.lock"
OLDEST, NEWEST = (3, 11), (3, 13)
"""Versions of Python for which every locked package has wheels."""
AT_ONCE = 6
"""Packages in one call of pip: a call costs about a second, and what a killed call had done is done again."""
BYTES_NEEDED = 900_000_000
"""The environment takes 600 MB, downloads in progress the rest."""
OPTIONS_OF_PIP = ("--disable-pip-version-check", "--no-input", "--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:",
                "--ignore-installed")
"""--ignore-installed: half of a package, which a killed call left, is written over instead of being taken for the whole."""


def environment_folder(environ: Mapping[str, str]) -> Path:
    """Where the environment lies: PREFLOOP_SERVER_ENV, or a folder of the user's cache that is named after the lock file and Python."""
    if chosen := environ.get("PREFLOOP_SERVER_ENV"):
        return Path(chosen).expanduser().absolute()
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "prefloop" / f"argilla-server-py{sys.version_info.major}.{sys.version_info.minor}-{hash_of(LOCK_FILE)[:12]}"


def hash_of(lock_file: Path) -> str:
    return hashlib.sha256(lock_file.read_bytes()).hexdigest()


def requirements(text: str) -> list[str]:
    """The entries of a lock file, each with its marker and hashes as it stands there."""
    entries: list[str] = []
    for line in text.splitlines():
        if line and not line.startswith(("#", " ", "\t")):
            entries.append(line)
        elif entries and line.strip().startswith("--hash="):
            entries[-1] += "\n" + line
    return entries


@dataclass(frozen=True)
class Environment:
    """A folder in which what a lock file lists is, or is to be, installed."""

    folder: Path
    lock_file: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def installed(self) -> list[str]:
        """The entries of this lock file that are there; none where the folder was made from another one, or by another Python."""
        if not (self.folder / NOTES).is_file() or not self.python.is_file():
            return []
        notes = json.loads((self.folder / NOTES).read_text(encoding="utf-8"))
        return list(notes["installed"]) if notes["lock"] == hash_of(self.lock_file) else []

    def missing(self) -> list[str]:
        """The entries that are still to be installed."""
        done = self.installed()
        return [entry for entry in requirements(self.lock_file.read_text(encoding="utf-8")) if name_of(entry) not in done]

    def note(self, installed: Sequence[str]) -> None:
        replace_file(self.folder / NOTES, json.dumps({"lock": hash_of(self.lock_file), "installed": list(installed)}))


def name_of(requirement: str) -> str:
    """`numpy==2.2.6 ; python_version >= '3.11' \\ ...` -> `numpy==2.2.6`, with its marker where the same package has several."""
    return requirement.splitlines()[0].removesuffix("\\").strip()


def environment(folder: Path, lock_file: Path = LOCK_FILE) -> Path | None:
    """The Python of a complete environment, or None."""
    place = Environment(folder, lock_file)
    return None if place.missing() else place.python


def install(folder: Path, console: Console | None, lock_file: Path = LOCK_FILE) -> Path:
    """Make the environment, or finish it, and return its Python; at once where it is complete. Two callers wait for each other.

    Raises ConfigError for another Python or a folder of somebody else's, BackendError where packages cannot be had.
    """
    if python := environment(folder, lock_file):
        return python
    require_python(sys.version_info[:2])
    require_ours(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with only_installer_in(folder, console):
        if python := environment(folder, lock_file):    # the one that was waited for has made it
            return python
        place = Environment(folder, lock_file)
        require_room(folder, BYTES_NEEDED * len(place.missing()) // len(requirements(lock_file.read_text(encoding="utf-8"))))
        if not place.installed():
            make_virtual_environment(place)
        install_packages(place, console)
    return place.python


def require_python(version: tuple[int, int]) -> None:
    if not OLDEST <= version <= NEWEST:
        raise ConfigError(f"the annotation server runs on Python {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, this is {version[0]}."
                          f"{version[1]}. Install Prefloop with one of those, for example: make PYTHON=python3.12 quickstart")


def require_ours(folder: Path) -> None:
    """A folder that holds something else would be emptied: it is refused."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / IN_PROGRESS).is_file():
        raise ConfigError(f"{folder} is not empty and holds no server environment. Name an empty folder, or one that does not exist yet, "
                          "in PREFLOOP_SERVER_ENV.")


def require_room(folder: Path, needed: int) -> None:
    if (free := shutil.disk_usage(folder).free) < needed:
        raise BackendError(f"the annotation server's environment needs {needed / 1e6:.0f} MB, {folder} has {free / 1e6:.0f} MB free. "
                           "Free some space, or name a folder on another disk in PREFLOOP_SERVER_ENV.")


@contextmanager
def only_installer_in(folder: Path, console: Console | None) -> Iterator[None]:
    """Wait for another installer. The system lets go of the lock when a process ends, however it ends."""
    with (folder / IN_PROGRESS).open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if console is not None:
                console.print(f"another process installs the annotation server in {folder}; waiting for it", markup=False)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make_virtual_environment(place: Environment) -> None:
    """An empty one. Only what a virtual environment consists of is removed before: the lock lies in the same folder."""
    for name in ("bin", "include", "lib", "lib64", "share", "pyvenv.cfg", NOTES):
        path = place.folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    try:
        venv.EnvBuilder(with_pip=True, symlinks=True).create(place.folder)
    except subprocess.CalledProcessError as error:
        raise BackendError(f"{sys.executable} cannot make a virtual environment with pip in {place.folder}: {error}. On Debian and Ubuntu "
                           "the package python3-venv is missing.") from error
    place.note([])


def install_packages(place: Environment, console: Console | None) -> None:
    done, missing = place.installed(), place.missing()
    with progress(console, "install the annotation server", len(done) + len(missing), done=len(done)) as bar:
        for start in range(0, len(missing), AT_ONCE):
            batch = missing[start:start + AT_ONCE]
            install_batch(place, batch)
            done += [name_of(entry) for entry in batch]
            place.note(done)
            bar.advance(len(batch))


def install_batch(place: Environment, batch: Sequence[str]) -> None:
    with NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write("\n".join(batch) + "\n")
        file.flush()
        ran = subprocess.run([place.python, "-m", "pip", "install", *OPTIONS_OF_PIP, "-r", file.name], capture_output=True, text=True,
                             check=False)
    if ran.returncode:
        said = "\n".join(line for line in ran.stderr.splitlines() if line.startswith("ERROR"))
        raise BackendError(f"pip could not install {', '.join(map(name_of, batch))} into {place.folder}:\n{said or ran.stderr[-2000:]}\n"
                           "What is installed stays; `annotation install` continues. A network or a package index that pip can reach is "
                           "needed once.")
