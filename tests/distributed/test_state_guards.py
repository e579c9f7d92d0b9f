"""Guards inside a real Trainer: the weights are untouched, and the message says where to look and where to go on from."""

from __future__ import annotations

import json

import pytest
import torch
from toy_run import FINGERPRINT, toy_run, toy_trainer
from transformers import TrainerCallback

from rlhf.distributed.state import latest_checkpoint, read_manifest
from rlhf.errors import GuardError
from rlhf.step_log import StepLog, read_log


def new_log(folder):
    return StepLog(folder / "train_log.jsonl", tokens_of=lambda _: 24, resume_step=0)


class SpoilGradient(TrainerCallback):
    """Puts an infinity into one gradient element after clipping; the loss stays finite."""

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        if state.global_step == 4:
            model.lm_head.weight.grad[3, 2] = float("inf")


class SpoilWeights(TrainerCallback):
    def on_optimizer_step(self, args, state, control, model, **_):
        if state.global_step == 5:
            model.lm_head.weight.data[3, 2] = float("nan")


def test_a_nan_loss_is_stopped_before_the_weights_move(tmp_path):
    with new_log(tmp_path) as log:
        trainer = toy_trainer(tmp_path, log, poison_step=5)
        before_step = {}

        class Watch(TrainerCallback):
            def on_step_begin(self, args, state, control, model, **_):
                before_step.update({name: weight.clone() for name, weight in model.state_dict().items()})

        trainer.add_callback(Watch())
        with pytest.raises(GuardError) as caught:
            trainer.train()
    message = str(caught.value)
    assert "step 5 was not taken: the loss is nan" in message
    assert "row-" in message and "checkpoint-3" in message
    assert all(torch.equal(weight, before_step[name]) for name, weight in trainer.model.state_dict().items())
    assert [line["step"] for line in read_log(tmp_path / "train_log.jsonl").lines] == [1, 2, 3, 4]


def test_a_run_goes_on_from_the_last_good_checkpoint_once_the_cause_is_gone(tmp_path):
    with pytest.raises(GuardError):
        toy_run(tmp_path, poison_step=5)
    toy_run(tmp_path)
    whole = tmp_path / "whole"
    toy_run(whole)
    losses = [[line["loss"] for line in read_log(folder / "train_log.jsonl").lines] for folder in (tmp_path, whole)]
    assert losses[0] == losses[1]


def test_a_gradient_that_is_not_finite_is_named(tmp_path):
    with new_log(tmp_path) as log:
        trainer = toy_trainer(tmp_path, log)
        trainer.callback_handler.callbacks.insert(0, SpoilGradient())
        with pytest.raises(GuardError, match=r"step 5 was not taken: the gradient is not finite in lm_head\.weight"):
            trainer.train()
    assert all(bool(weight.isfinite().all()) for weight in trainer.model.parameters())


def test_weights_that_are_not_finite_reach_no_checkpoint(tmp_path):
    with pytest.raises(GuardError, match=r"after step 6 the weights are not finite in lm_head\.weight; they are not saved"):
        toy_run(tmp_path, extra=(SpoilWeights(),))
    assert latest_checkpoint(tmp_path / "checkpoints").name == "checkpoint-3"


def test_a_loss_of_exactly_zero_stops_the_run_unless_the_objective_may_reach_it(tmp_path):
    for legal in (False, True):
        folder = tmp_path / str(legal)
        folder.mkdir()
        with new_log(folder) as log:
            trainer = toy_trainer(folder, log, num_train_epochs=1)
            trainer.guards.zero_is_legal = legal
            trainer.loss_factor = 0.0
            if legal:
                assert trainer.train().global_step == 4
            else:
                with pytest.raises(GuardError, match="the loss is exactly 0"):
                    trainer.train()


def test_the_trainer_may_not_hide_a_nan(tmp_path):
    with pytest.raises(GuardError, match="logging_nan_inf_filter"):
        toy_run(tmp_path, logging_nan_inf_filter=True)


def test_an_alarm_is_written_once_and_survives_a_new_start(tmp_path):
    with new_log(tmp_path) as log:
        trainer = toy_trainer(tmp_path, log, num_train_epochs=1)
        trainer.guards.zero_is_legal, trainer.loss_factor = True, 0.0
        trainer.train()
        assert [(alarm.step, alarm.name) for alarm in trainer.guards.alarms] == [(1, "no_gradient")]
    lines = (tmp_path / "train_log.jsonl").read_text().splitlines()
    assert [json.loads(line)["alarm"] for line in lines if "alarm" in line] == ["no_gradient"]
    again = toy_run(tmp_path, num_train_epochs=1)
    assert [(alarm.step, alarm.name) for alarm in again.guards.alarms] == [(1, "no_gradient")]


def test_the_manifest_holds_the_fingerprint_of_the_run(tmp_path):
    toy_run(tmp_path)
    assert read_manifest(latest_checkpoint(tmp_path / "checkpoints")).fingerprint == FINGERPRINT
