"""Every error this project raises on purpose.

    RlhfError
    |- ConfigError(ValueError)       a recipe or an override is wrong; nothing was started
    |- DataError(ValueError)         a row, a file or a share of rejects is wrong
    |- ShapeError(ValueError)        a tensor does not have the axes its function needs
    |- ModelError(ValueError)        a model, an adapter or a tokenizer cannot serve the role it was given
    |- CheckpointError(RuntimeError) a checkpoint is missing, torn or belongs to another run
    |- BackendError(RuntimeError)    the annotation server cannot be reached, refuses, or is not the one that is needed
    |- GuardError(RuntimeError)      a running job stopped itself: non-finite values, an untrained adapter, a changed reference
    `- StorageError(OSError)         a file could not be written; what was there before is intact

Each message says where, what, what it got, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class RlhfError(Exception):
    """Base of all errors below; the command line turns it into a message and exit code 2."""


class Problem(NamedTuple):
    """One thing wrong with a recipe or an input."""

    where: str
    """Field path (`dpo.beta`), or file and row (`train.jsonl:17`)."""
    what: str
    """What is wrong, what was found, and what to do."""


class ConfigError(RlhfError, ValueError):
    """A recipe is wrong. `problems` lists every finding, not only the first."""

    def __init__(self, message: str, problems: Sequence[Problem] = ()) -> None:
        self.problems = tuple(problems)
        lines = [f"  {problem.where}: {problem.what}" for problem in self.problems]
        super().__init__("\n".join([message, *lines]))


class DataError(RlhfError, ValueError):
    """Input data cannot be used as they are."""


class ShapeError(RlhfError, ValueError):
    """A tensor has the wrong axes or sizes."""


class ModelError(RlhfError, ValueError):
    """A model, adapter or tokenizer cannot do what it is asked to."""


class CheckpointError(RlhfError, RuntimeError):
    """A checkpoint cannot be used."""


class BackendError(RlhfError, RuntimeError):
    """The annotation server cannot be used."""


class GuardError(RlhfError, RuntimeError):
    """A run stopped itself before it could do harm."""


class StorageError(RlhfError, OSError):
    """Writing failed; the previous version of the file is untouched."""
