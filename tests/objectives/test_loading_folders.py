"""A model is saved whole or not at all."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_policies import load, logits_of, saved, step
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf.errors import ModelError, StorageError
from rlhf.models.folders import replacing_folder
from rlhf.models.loading import save_policy


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 700 KiB: one tiny model fits, a second beside it does not."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(folder)], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_keeps_the_model_that_was_there(tmp_path: Path, small_disk: Path) -> None:
    policy = load(saved(tmp_path / "base"), "full")
    save_policy(policy, small_disk / "model")
    before = logits_of(policy.model)
    step(policy.model)
    with pytest.raises(StorageError, match=r"No space left on device.*What was there before is intact"):
        save_policy(policy, small_disk / "model")
    assert [path.name for path in small_disk.iterdir()] == ["model"]
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(small_disk / "model")), before)
    assert AutoTokenizer.from_pretrained(small_disk / "model").chat_template == policy.tokenizer.chat_template


def test_a_second_save_replaces_the_first_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    base = saved(tmp_path / "base")
    save_policy(load(base, "full"), tmp_path / "out" / "model")
    save_policy(load(base, "lora"), tmp_path / "out" / "model")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]
    assert sorted(path.name for path in (tmp_path / "out" / "model").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "policy.json", "tokenizer.json", "tokenizer_config.json"]


def test_an_error_while_writing_leaves_the_old_folder(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").touch()

    def write_half() -> None:
        with replacing_folder(tmp_path / "model") as partial:
            (partial / "new").touch()
            raise ModelError("no")
    with pytest.raises(ModelError, match="no"):
        write_half()
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["model", "model/old"]


def test_a_kill_between_the_renames_is_mended_by_the_next_save(tmp_path: Path) -> None:
    (tmp_path / ".model.old").mkdir()
    (tmp_path / ".model.old" / "old").touch()
    (tmp_path / ".model.partial").mkdir()
    with pytest.raises(ModelError), replacing_folder(tmp_path / "model"):
        raise ModelError("stopped again")
    assert [path.name for path in tmp_path.iterdir()] == ["model"] and (tmp_path / "model" / "old").exists()
