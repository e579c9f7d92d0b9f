"""Checkpoints on the disk: what counts as whole, what is deleted when, and what a full disk leads to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_run import toy_run
from transformers import TrainerCallback

from rlhf.distributed import state
from rlhf.distributed.state import (
    MANIFEST,
    checkpoints_in,
    checkpoints_protected,
    content_digest,
    latest_checkpoint,
    read_manifest,
    remove_torn,
    require_same_run,
    require_space,
    rotate,
    seal,
    torn_checkpoints,
    verify_checkpoint,
)
from rlhf.errors import CheckpointError, GuardError, StorageError


def written(folder: Path, step: int, *, sealed: bool = True, finished: bool = False) -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    (checkpoint / "deep").mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(bytes([step % 256]) * 5000)
    (checkpoint / "deep" / "rng_state.pth").write_bytes(b"r" * 100)
    if sealed:
        seal(checkpoint, fingerprint={"data": "a"}, finished=finished)
    return checkpoint


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_the_latest_is_the_highest_step_by_number_not_by_name(tmp_path):
    for step in (9, 100, 20):
        written(tmp_path, step)
    (tmp_path / "checkpoint-best").mkdir()
    assert latest_checkpoint(tmp_path).name == "checkpoint-100"


def test_no_folder_and_an_empty_folder_hold_no_checkpoint(tmp_path):
    assert latest_checkpoint(tmp_path / "absent") is None
    assert latest_checkpoint(tmp_path) is None


def damage_truncate(checkpoint: Path) -> None:
    os.truncate(checkpoint / "model.safetensors", 4999)


def damage_missing(checkpoint: Path) -> None:
    (checkpoint / "deep" / "rng_state.pth").unlink()


def damage_flip(checkpoint: Path) -> None:
    (checkpoint / "deep" / "rng_state.pth").write_bytes(b"r" * 99 + b"s")


def damage_manifest(checkpoint: Path) -> None:
    os.truncate(checkpoint / MANIFEST, 60)


def damage_rename(checkpoint: Path) -> None:
    checkpoint.rename(checkpoint.with_name("checkpoint-30"))


@pytest.mark.parametrize("damage", [damage_truncate, damage_missing, damage_flip, damage_manifest, damage_rename])
def test_a_damaged_checkpoint_is_passed_over_and_kept_for_inspection(tmp_path, damage):
    written(tmp_path, 10)
    damage(written(tmp_path, 20))
    assert latest_checkpoint(tmp_path).name == "checkpoint-10"
    (damaged,) = torn_checkpoints(tmp_path)
    assert verify_checkpoint(damaged)
    assert remove_torn(tmp_path) == []
    assert damaged.exists()


def test_an_unsealed_checkpoint_is_passed_over_and_removed(tmp_path):
    written(tmp_path, 10)
    torn = written(tmp_path, 20, sealed=False)
    (torn / (MANIFEST + ".partial")).write_text("{}")
    assert latest_checkpoint(tmp_path).name == "checkpoint-10"
    assert remove_torn(tmp_path) == [torn]
    assert names(checkpoints_in(tmp_path)) == ["checkpoint-10"]


def test_a_bit_flipped_in_a_large_file_is_found_by_verify(tmp_path):
    """Choosing a checkpoint reads small files only; verify reads all."""
    checkpoint = written(tmp_path, 1, sealed=False)
    large = checkpoint / "optimizer.pt"
    large.write_bytes(bytes(2 * state.QUICK_CHECK_BYTES))
    seal(checkpoint, fingerprint={}, finished=False)
    with large.open("r+b") as file:
        file.seek(12345)
        file.write(b"\x01")
    assert latest_checkpoint(tmp_path) == checkpoint
    (problem,) = verify_checkpoint(checkpoint)
    assert problem.where == str(large)


def test_the_digest_of_a_sparse_huge_file_sees_size_first_and_last_byte(tmp_path):
    huge = tmp_path / "huge"
    size = state.WHOLE_FILE_BYTES + 3 * state.MIB + 17
    with huge.open("wb") as file:
        file.truncate(size)
    digests = {content_digest(huge)}
    for position in (0, size - 1):
        with huge.open("r+b") as file:
            file.seek(position)
            file.write(b"x")
        digests.add(content_digest(huge))
    os.truncate(huge, size + 1)
    assert len(digests | {content_digest(huge)}) == 4


def test_a_manifest_reads_back_as_what_was_sealed(tmp_path):
    checkpoint = written(tmp_path, 12, sealed=False)
    manifest = seal(checkpoint, fingerprint={"data": "ä", "seed": "1"}, finished=True)
    assert read_manifest(checkpoint) == manifest
    assert [(file.path, file.bytes) for file in manifest.files] == [("deep/rng_state.pth", 100), ("model.safetensors", 5000)]
    assert (manifest.step, manifest.bytes, manifest.finished) == (12, 5100, True)


def test_a_manifest_of_another_version_is_refused(tmp_path):
    checkpoint = written(tmp_path, 1)
    path = checkpoint / MANIFEST
    path.write_text(path.read_text().replace("checkpoint/1", "checkpoint/2"))
    with pytest.raises(CheckpointError, match="checkpoint/2"):
        read_manifest(checkpoint)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=8, unique=True), st.data())
@settings(max_examples=25, deadline=None)
def test_rotation_keeps_the_newest_the_best_and_no_more_than_asked(tmp_path_factory, steps, data):
    folder = tmp_path_factory.mktemp("rotation")
    for step in steps:
        (folder / f"checkpoint-{step}").mkdir()
    newest, best, keep = max(steps), data.draw(st.sampled_from([None, *steps])), data.draw(st.integers(1, 4))
    rotate(folder, newest=newest, best=best, keep=keep)
    left = {state.step_of(path) for path in checkpoints_in(folder)}
    assert newest in left and (best is None or best in left)
    assert len(left) == min(len(steps), max(keep, len({newest, best} - {None})))
    expendable = left - {newest, best}
    assert all(step in left or step in (newest, best) or step < min(expendable, default=10**9) for step in steps)


def test_another_run_is_refused_and_what_differs_is_named(tmp_path):
    checkpoint = written(tmp_path, 5)
    require_same_run(checkpoint, {"data": "a"})
    with pytest.raises(CheckpointError) as caught:
        require_same_run(checkpoint, {"data": "b", "optim.learning_rate": "0.1"})
    assert "data: was a, is b" in str(caught.value)
    assert "optim.learning_rate: was absent, is 0.1" in str(caught.value)


def test_an_error_of_the_training_stays_what_it_is(tmp_path):
    written(tmp_path, 1)
    for error in (RuntimeError("shapes"), GuardError("nan"), OSError(13, "permission denied")):
        with pytest.raises(type(error)) as caught, checkpoints_protected(tmp_path):
            raise error
        assert caught.value is error


# ---- a full disk: a real one, small ----

@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("a full disk is tested on a small tmpfs, which needs Linux and root to mount")
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mounted)], capture_output=True, text=True, check=False)
    if mount.returncode:
        pytest.skip(f"a full disk is tested on a small tmpfs, which cannot be mounted here: {mount.stderr.strip()}")
    yield mounted
    subprocess.run(["umount", "--lazy", str(mounted)], check=True)    # loaded weights may still be mapped


class Fill(TrainerCallback):
    """Leaves so many bytes free from a step on: after the check for space when it acts on the log line, before it on the step's begin."""

    def __init__(self, disk: Path, *, step: int, free: int, late: bool) -> None:
        self.disk, self.step, self.free, self.late = disk, step, free, late

    def fill(self) -> None:
        (self.disk / "ballast").write_bytes(bytes(shutil.disk_usage(self.disk).free - self.free))

    def on_step_begin(self, args, state, control, **_):
        if not self.late and state.global_step + 1 == self.step:
            self.fill()

    def on_log(self, args, state, control, **_):
        if self.late and state.global_step == self.step:
            self.fill()


def test_a_save_that_cannot_fit_is_not_begun(small_disk):
    with pytest.raises(StorageError) as caught:
        toy_run(small_disk, extra=(Fill(small_disk, step=6, free=50_000, late=False),))
    needed = read_manifest(small_disk / "checkpoints" / "checkpoint-3").bytes
    assert f"{needed:,} bytes" in str(caught.value) and "checkpoint-3 is whole" in str(caught.value)
    assert names(checkpoints_in(small_disk / "checkpoints")) == ["checkpoint-3"]


@pytest.mark.parametrize("free", [2_000, 40_000, 80_000])
def test_a_save_that_breaks_off_keeps_the_last_good_checkpoint(small_disk, free):
    """The disk fills up while the weights, or the optimizer, are being written."""
    with pytest.raises(StorageError) as caught:
        toy_run(small_disk, extra=(Fill(small_disk, step=6, free=free, late=True),))
    checkpoints = small_disk / "checkpoints"
    assert "checkpoint-6 could not be written" in str(caught.value) and "checkpoint-3 is whole" in str(caught.value)
    assert names(checkpoints_in(checkpoints)) == ["checkpoint-3"]
    assert verify_checkpoint(checkpoints / "checkpoint-3") == []
    (small_disk / "ballast").unlink()
    assert toy_run(small_disk).state.global_step == 10


def test_a_first_save_that_breaks_off_says_that_nothing_is_left(small_disk):
    with pytest.raises(StorageError, match="No checkpoint is left"):
        toy_run(small_disk, extra=(Fill(small_disk, step=3, free=20_000, late=True),))


def test_a_log_that_cannot_grow_stops_the_run(small_disk):
    with pytest.raises(StorageError, match=r"train_log\.jsonl"):
        toy_run(small_disk, extra=(Fill(small_disk, step=4, free=0, late=True),), save_steps=100, num_train_epochs=10)


def test_enough_space_is_no_complaint(tmp_path):
    written(tmp_path, 1)
    require_space(tmp_path)


def test_a_checkpoint_whose_seal_cannot_be_written_is_removed(tmp_path):
    written(tmp_path, 3)
    with pytest.raises(StorageError, match=r"checkpoint-6 could not be written: .*manifest\.json .*checkpoint-3 is whole"), \
            checkpoints_protected(tmp_path):
        (tmp_path / "checkpoint-6" / "manifest.json.partial").mkdir(parents=True)
        seal(tmp_path / "checkpoint-6", fingerprint={}, finished=False)
    assert names(checkpoints_in(tmp_path)) == ["checkpoint-3"]
