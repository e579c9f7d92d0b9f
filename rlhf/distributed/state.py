"""Checkpoints that are whole or do not count, and everything that decides which of them a run continues from.

The Trainer writes `checkpoint-N` file by file; a kill may fall between any two of them. A checkpoint therefore counts only once
`manifest.json` lies in it, which is written last, after every other file has reached the disk. Old checkpoints are deleted after the
new one is sealed, never before. How a resumed run comes to the same bits: docs/resume.md.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed
from safetensors import SafetensorError
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from rlhf.errors import CheckpointError, GuardError, Problem, StorageError
from rlhf.whole_files import replace_file, sync_to_disk

MANIFEST = "manifest.json"
SCHEMA = "checkpoint/1"
PREFIX = "checkpoint-"

MIB = 2**20
WHOLE_FILE_BYTES = 64 * MIB
"""Files up to this size are hashed whole; of larger ones `SAMPLED_BLOCKS` blocks of 1 MiB are, so that sealing 500 GB takes no hour."""
SAMPLED_BLOCKS = 64
QUICK_CHECK_BYTES = MIB
"""Files up to this size are hashed again whenever a checkpoint is chosen."""


@dataclass(frozen=True, slots=True)
class SealedFile:
    path: str
    """Relative to the checkpoint, with forward slashes."""
    bytes: int
    sha256: str
    """`content_digest` of the file."""


@dataclass(frozen=True, slots=True)
class Manifest:
    step: int
    finished: bool
    """True when training had ended at this step: by its length, or because patience ran out."""
    fingerprint: dict[str, str]
    """By name: what must be the same for the run to continue (recipe, data, starting weights)."""
    files: tuple[SealedFile, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def content_digest(path: Path, *, whole_up_to: float = WHOLE_FILE_BYTES) -> str:
    """SHA-256 of the size and the content; of a file over `whole_up_to` bytes, of 64 blocks spread evenly from first byte to last."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode("ascii"))
    with path.open("rb") as file:
        if size <= whole_up_to:
            while block := file.read(MIB):
                digest.update(block)
        else:
            for number in range(SAMPLED_BLOCKS):
                file.seek((size - MIB) * number // (SAMPLED_BLOCKS - 1))
                digest.update(file.read(MIB))
    return digest.hexdigest()


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(PREFIX))


def checkpoints_in(folder: Path) -> list[Path]:
    """Every folder that looks like a checkpoint, sealed or not, oldest step first."""
    found = [path for path in folder.glob(f"{PREFIX}*") if path.is_dir() and path.name.removeprefix(PREFIX).isdigit()]
    return sorted(found, key=step_of)


def seal(checkpoint: Path, *, fingerprint: Mapping[str, str], finished: bool) -> Manifest:
    """Bring every file of a checkpoint to the disk, then declare it whole."""
    paths = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name not in (MANIFEST, MANIFEST + ".partial"))
    for path in paths:
        sync_to_disk(path)
    for folder in [checkpoint, *(path for path in checkpoint.rglob("*") if path.is_dir())]:
        sync_to_disk(folder)
    files = tuple(SealedFile(path.relative_to(checkpoint).as_posix(), path.stat().st_size, content_digest(path)) for path in paths)
    manifest = Manifest(step=step_of(checkpoint), finished=finished, fingerprint=dict(fingerprint), files=files)
    replace_file(checkpoint / MANIFEST, json.dumps({"schema": SCHEMA, **asdict(manifest)}, indent=1) + "\n")
    sync_to_disk(checkpoint.parent)
    return manifest


def read_manifest(checkpoint: Path) -> Manifest:
    path = checkpoint / MANIFEST
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        schema = fields.pop("schema")
        if schema != SCHEMA:
            raise CheckpointError(f"{path} has schema {schema!r}, this version reads {SCHEMA!r}; continue with the version that wrote it")
        return Manifest(**{**fields, "files": tuple(SealedFile(**file) for file in fields["files"])})
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint} has no {MANIFEST}: it was not written to its end. Use an earlier checkpoint.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); use an earlier checkpoint") from error


def _file_problems(checkpoint: Path, files: tuple[SealedFile, ...], *, hash_up_to: float) -> Iterator[Problem]:
    for file in files:
        path = checkpoint / file.path
        if not path.is_file():
            yield Problem(str(path), "is in the manifest but not on the disk")
        elif (size := path.stat().st_size) != file.bytes:
            yield Problem(str(path), f"has {size} bytes, the manifest says {file.bytes}")
        elif size <= hash_up_to and content_digest(path) != file.sha256:
            yield Problem(str(path), "has another content than when the checkpoint was sealed")


def _problems(checkpoint: Path, *, hash_up_to: float) -> list[Problem]:
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointError as error:
        return [Problem(str(checkpoint), str(error))]
    if manifest.step != step_of(checkpoint):
        return [Problem(str(checkpoint), f"its manifest is of step {manifest.step}: the folder was renamed or mixed with another")]
    return list(_file_problems(checkpoint, manifest.files, hash_up_to=hash_up_to))


def verify_checkpoint(checkpoint: Path) -> list[Problem]:
    """Everything wrong with a checkpoint: every file is read and hashed again. Empty means whole."""
    return _problems(checkpoint, hash_up_to=float("inf"))


def latest_checkpoint(folder: Path) -> Path | None:
    """The highest step with a valid manifest: sizes of all files and the content of small ones agree with it. None: start anew."""
    for checkpoint in reversed(checkpoints_in(folder)):
        if not _problems(checkpoint, hash_up_to=QUICK_CHECK_BYTES):
            return checkpoint
    return None


def torn_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints that are never chosen: not sealed, or no longer what was sealed."""
    return [checkpoint for checkpoint in checkpoints_in(folder) if _problems(checkpoint, hash_up_to=QUICK_CHECK_BYTES)]


def delete_checkpoint(checkpoint: Path) -> None:
    """The manifest goes first: a kill halfway leaves a torn checkpoint, not one that looks whole."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def unsealed_checkpoints(folder: Path) -> list[Path]:
    return [checkpoint for checkpoint in checkpoints_in(folder) if not (checkpoint / MANIFEST).exists()]


def remove_torn(folder: Path) -> list[Path]:
    """Delete what a kill left half written; called before a run starts. Sealed checkpoints that were damaged later stay for inspection."""
    torn = unsealed_checkpoints(folder)
    for checkpoint in torn:
        delete_checkpoint(checkpoint)
    return torn


def rotate(folder: Path, *, newest: int, best: int | None, keep: int) -> list[Path]:
    """Delete the oldest checkpoints until `keep` are left; those of steps `newest` and `best` always stay."""
    found = checkpoints_in(folder)
    expendable = [checkpoint for checkpoint in found if step_of(checkpoint) not in (newest, best)]
    surplus = expendable[: max(0, len(found) - keep)]
    for checkpoint in surplus:
        delete_checkpoint(checkpoint)
    return surplus


def differing_inputs(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Names of the inputs of a run that changed, appeared or went."""
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def require_same_run(checkpoint: Path, fingerprint: Mapping[str, str]) -> None:
    """Refuse to continue a checkpoint with another recipe, model or data, and say what differs."""
    sealed = read_manifest(checkpoint).fingerprint
    differing = differing_inputs(sealed, fingerprint)
    if differing:
        lines = [f"  {name}: was {sealed.get(name, 'absent')}, is {fingerprint.get(name, 'absent')}" for name in differing]
        raise CheckpointError("\n".join([
            f"{checkpoint} belongs to another run:", *lines,
            "Put these back to continue it, or give the new run a folder of its own.",
        ]))


def require_space(folder: Path) -> None:
    """Stop before a save that cannot fit: the next checkpoint is taken to be as large as the last one."""
    last = latest_checkpoint(folder)
    if last is None:
        return
    needed, free = read_manifest(last).bytes, shutil.disk_usage(folder).free
    if free < needed:
        raise StorageError(f"{folder}: a checkpoint takes {needed:,} bytes and {free:,} are free. {last.name} is whole; "
                           "free some space and start again to continue from it.")


@contextmanager
def checkpoints_protected(folder: Path) -> Iterator[None]:
    """Train inside: what an earlier kill left half written is removed first, and a save that fails becomes a StorageError.

    torch and safetensors report a full disk as RuntimeError and SafetensorError without an errno. They are told from errors of the
    training by what lies on the disk: a checkpoint without a manifest exists only while one is being saved.
    """
    remove_torn(folder)
    try:
        yield
    except (CheckpointError, GuardError):
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        disk_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        torn = remove_torn(folder)
        if not torn and not disk_full:
            raise
        last, free = latest_checkpoint(folder), shutil.disk_usage(folder).free
        what = f"{torn[-1].name} could not be written" if torn else "writing failed"
        rest = f"{last.name} is whole; start again to continue from it." if last else "No checkpoint is left; a new start begins at step 0."
        raise StorageError(f"{folder}: {what}: {error}. {free:,} bytes are free, now that the partial files are removed. "
                           f"Free some space. {rest}") from error


class CheckpointSeal(TrainerCallback):  # type: ignore[misc]
    """Seals each checkpoint after the Trainer wrote it, keeps the newest and the best, and stops before a save that cannot fit.

    Needs `save_total_limit=None` (the Trainer would delete before the seal) and `restore_callback_states_from_checkpoint=True`
    (patience counts on). A resumed run that had finished takes no further step, if the trainer's `get_batch_samples` returns nothing
    while `control.should_training_stop` is set.
    """

    def __init__(self, folder: Path, *, fingerprint: Mapping[str, str], keep: int) -> None:
        self.folder, self.fingerprint, self.keep = folder, dict(fingerprint), keep

    @override
    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> TrainerControl:
        if args.save_total_limit is not None or not args.restore_callback_states_from_checkpoint:
            raise CheckpointError("TrainingArguments must have save_total_limit=None and restore_callback_states_from_checkpoint=True, got "
                                  f"{args.save_total_limit} and {args.restore_callback_states_from_checkpoint}")
        self._clear_ahead(state.global_step)
        if state.best_global_step is not None:     # a path from before the run folder was moved would be ignored, and the best lost
            best = self.folder / f"{PREFIX}{state.best_global_step}"
            state.best_model_checkpoint = str(best) if best.is_dir() else None
        if state.global_step > 0 and read_manifest(self.folder / f"{PREFIX}{state.global_step}").finished:
            control.should_training_stop = True
            control.should_save = control.should_log = control.should_evaluate = False
        return control

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if control.should_save and state.is_world_process_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            require_space(self.folder)

    @override
    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.barrier()     # every process has written its random state
        if state.is_world_process_zero:
            seal(self.folder / f"{PREFIX}{state.global_step}", fingerprint=self.fingerprint, finished=control.should_training_stop)
            rotate(self.folder, newest=state.global_step, best=state.best_global_step, keep=self.keep)

    def _clear_ahead(self, step: int) -> None:
        """Damaged checkpoints of steps yet to come are deleted: new files under their manifests could pass for whole. Whole ones
        are somebody's work, and mean that this start should have continued from them."""
        torn = torn_checkpoints(self.folder)
        for checkpoint in checkpoints_in(self.folder):
            if step_of(checkpoint) > step and checkpoint not in torn:
                raise CheckpointError(f"{checkpoint} is whole, but this run starts at step {step}; continue from it or take a new folder")
            if step_of(checkpoint) > step:
                delete_checkpoint(checkpoint)
