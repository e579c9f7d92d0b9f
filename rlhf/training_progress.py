"""The bar of a training run, in place of what the Trainer prints."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack

from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from rlhf.progress import Bar, SilentBar, progress


class TrainingProgress(TrainerCallback):  # type: ignore[misc]
    """The bar of a training run, instead of the Trainer's tqdm and printed dictionaries. Process 0 only.

    Leave the bar with the run, whether it ends well or not: `with TrainingProgress(console, "dpo") as display: trainer.train()`.
    """

    def __init__(self, console: Console | None, title: str) -> None:
        self.console, self.title = console, title
        self._stack = ExitStack()
        self._bar: Bar = SilentBar()

    def __enter__(self) -> TrainingProgress:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def evaluation(self, total: int) -> AbstractContextManager[Bar]:
        """A second bar, for an evaluation of so many batches."""
        return progress(self.console, f"{self.title} evaluation", total)

    @override
    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if not state.is_world_process_zero:
            self.console = None
        self._bar = self._stack.enter_context(progress(self.console, self.title, state.max_steps, done=state.global_step))

    @override
    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Mapping[str, float], **_: object) -> None:
        """One line a logged step. Every step is logged: train_log.jsonl needs it."""
        if "loss" in logs:
            self._bar.advance(1, loss=logs["loss"])

    @override
    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self._stack.close()
