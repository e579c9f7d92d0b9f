"""A run that was interrupted anywhere and started again is the run that was not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from toy_run import STEPS, toy_run, toy_trainer
from transformers import TrainerCallback

from rlhf.distributed.state import checkpoints_in, latest_checkpoint, read_manifest, step_of, unsealed_checkpoints, verify_checkpoint
from rlhf.errors import CheckpointError
from rlhf.step_log import StepLog, exact_figures, read_log, step_lines


class Interrupted(Exception):
    pass


class StopAfter(TrainerCallback):
    """Breaks off after a step, past its log line and its save."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.step:
            raise Interrupted


def figures(folder: Path) -> list[dict]:
    """Every line, without times; the stock Trainer puts some among its evaluation metrics."""
    timing = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
    lines = read_log(folder / "train_log.jsonl").lines
    return [{name: value for name, value in exact_figures(line).items() if name not in timing} for line in lines]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    trainer = toy_run(folder)
    return folder, {name: weight.clone() for name, weight in trainer.model.state_dict().items()}


def test_the_toy_run_is_shuffled_has_dropout_and_ends_in_mid_epoch(uninterrupted):
    folder, _ = uninterrupted
    lines = step_lines(read_log(folder / "train_log.jsonl").lines)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1]["epoch"] == pytest.approx(2.5, abs=0.1)
    assert len({line["loss"] for line in lines}) == STEPS


@pytest.mark.parametrize("step", [1, 3, 4, 5, 7, 9])
def test_losses_and_weights_after_an_interruption_are_bit_equal(uninterrupted, tmp_path, step):
    with pytest.raises(Interrupted):
        toy_run(tmp_path, extra=(StopAfter(step),))
    latest = latest_checkpoint(tmp_path / "checkpoints")
    assert (step_of(latest) if latest else 0) == step // 3 * 3      # saved every 3 steps
    trainer = toy_run(tmp_path)
    folder, weights = uninterrupted
    assert figures(tmp_path) == figures(folder)
    assert all(torch.equal(weight, weights[name]) for name, weight in trainer.model.state_dict().items())


def test_many_interruptions_are_as_good_as_one(uninterrupted, tmp_path):
    for step in (2, 4, 5, 6, 8, 9):
        with pytest.raises(Interrupted):
            toy_run(tmp_path, extra=(StopAfter(step),), save_steps=1)
    toy_run(tmp_path, save_steps=1)
    assert figures(tmp_path) == figures(uninterrupted[0])


def test_a_finished_run_started_again_takes_no_step(uninterrupted, tmp_path):
    """The Trainer alone would take one more: 2.5 epochs end in the middle of a loop over an epoch."""
    toy_run(tmp_path)
    assert read_manifest(latest_checkpoint(tmp_path / "checkpoints")).finished
    trainer = toy_run(tmp_path)
    assert trainer.state.global_step == STEPS
    assert figures(tmp_path) == figures(uninterrupted[0])
    assert all(torch.equal(weight, uninterrupted[1][name]) for name, weight in trainer.model.state_dict().items())


def test_patience_and_the_best_model_survive_an_interruption(tmp_path):
    """At this learning rate the held-out loss is best after a few steps, then rises until patience runs out."""
    options = {"patience": 3, "learning_rate": 0.1, "num_train_epochs": 20}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = toy_run(whole, **options)
    stopped, best = expected.state.global_step, expected.state.best_global_step
    assert stopped == best + 3 < 80
    for step in (best, stopped - 1):
        with pytest.raises(Interrupted):
            toy_run(broken, extra=(StopAfter(step),), **options)
    trainer = toy_run(broken, **options)
    assert figures(broken) == figures(whole)
    assert (trainer.state.global_step, trainer.state.best_global_step) == (stopped, best)
    weights = expected.model.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in trainer.model.state_dict().items())
    assert {step_of(path) for path in checkpoints_in(broken / "checkpoints")} == {best, stopped}


def test_a_run_that_patience_stopped_does_not_go_on_when_started_again(tmp_path):
    options = {"patience": 3, "learning_rate": 0.1, "num_train_epochs": 20}
    stopped = toy_run(tmp_path, **options).state.global_step
    before = figures(tmp_path)
    assert toy_run(tmp_path, **options).state.global_step == stopped
    assert figures(tmp_path) == before


def test_the_best_model_is_found_after_the_run_folder_was_moved(tmp_path):
    options = {"patience": 3, "learning_rate": 0.1, "num_train_epochs": 20}
    best = toy_run(tmp_path / "whole", **options).state.best_global_step
    with pytest.raises(Interrupted):
        toy_run(tmp_path / "here", extra=(StopAfter(best + 1),), **options)
    (tmp_path / "here").rename(tmp_path / "there")
    trainer = toy_run(tmp_path / "there", **options)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "there" / "checkpoints" / f"checkpoint-{best}")


def test_whole_checkpoints_are_never_trained_over(uninterrupted, tmp_path):
    toy_run(tmp_path)
    with StepLog(None, tokens_of=lambda _: 0, resume_step=0) as log, pytest.raises(CheckpointError, match="is whole"):
        toy_trainer(tmp_path, log).train()


def test_the_trainer_may_not_rotate_by_itself(tmp_path):
    with pytest.raises(CheckpointError, match="save_total_limit"):
        toy_run(tmp_path, save_total_limit=2)


def start(folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-W", "error", str(Path(__file__).with_name("toy_run.py")), str(folder)], env=environment)


def kill_when(process: subprocess.Popen[bytes], ready: Callable[[], bool]) -> None:
    while not ready():
        assert process.poll() is None, "the run ended before the moment it was to be killed at"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_killed_during_a_save_the_torn_checkpoint_is_not_chosen(uninterrupted, tmp_path):
    with pytest.raises(Interrupted):
        toy_run(tmp_path, extra=(StopAfter(4),))
    (tmp_path / "slow_save").touch()
    kill_when(start(tmp_path), (tmp_path / "saving").exists)
    checkpoints = tmp_path / "checkpoints"
    assert [path.name for path in unsealed_checkpoints(checkpoints)] == ["checkpoint-6"]
    assert (checkpoints / "checkpoint-6" / "model.safetensors").exists()
    assert latest_checkpoint(checkpoints).name == "checkpoint-3"
    (tmp_path / "slow_save").unlink()
    toy_run(tmp_path)
    assert figures(tmp_path) == figures(uninterrupted[0])
    assert all(verify_checkpoint(path) == [] for path in checkpoints_in(checkpoints))
