"""What a stage gives the Trainer, and what it refuses before the first step."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_policies import saved

from rlhf import sft
from rlhf.config import BatchConfig, DataConfig, LoopConfig, ModelConfig, OptimConfig, SftConfig
from rlhf.errors import ConfigError
from rlhf.fitting import Site, training_arguments
from rlhf.records import TokenRun
from rlhf.step_log import read_log, step_lines
from rlhf.step_plan import StepPlan


@pytest.fixture
def site(tmp_path: Path) -> Site:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "w{i} w3", "response": "w{i + 9} w{i + 2}"}}\n' for i in range(2, 40)))
    (tmp_path / "run/sft").mkdir(parents=True)
    return Site(folder=tmp_path / "run/sft", name="sft", model=ModelConfig(name=saved(tmp_path / "base")), seed=0, start=None, inputs={},
                console=Console(file=io.StringIO(), width=200))


def config(site: Site, loop: LoopConfig, *, holdout_percent: float) -> SftConfig:
    rows = str(site.folder.parents[1] / "rows.jsonl")
    return SftConfig(data=DataConfig(train=rows, holdout_percent=holdout_percent, template="plain", max_length=16, max_rejected=0),
                     optim=OptimConfig(learning_rate=1e-3), batch=BatchConfig(per_step=8, per_microbatch=4), loop=loop)


def test_a_plan_for_other_processes_than_were_started_is_refused(site: Site) -> None:
    plan = StepPlan(runs=[TokenRun(id="a", prompt=(1,), responses=((2,),))], batch=BatchConfig(per_step=2, per_microbatch=1), seed=0,
                    epochs=1, max_steps=1, world_size=2)
    with pytest.raises(ConfigError, match=r"planned for 2 process\(es\), but 1 were started"):
        training_arguments(optim=OptimConfig(learning_rate=1e-3), loop=LoopConfig(), plan=plan, site=site, evaluate=False, resuming=False)


def test_tensorboard_has_every_step_in_a_folder_of_its_own(site: Site) -> None:
    sft.train(config(site, LoopConfig(max_steps=3, trackers=("tensorboard",), save_every=None), holdout_percent=20), site)
    events = EventAccumulator(str(site.folder / "tensorboard"))
    events.Reload()
    logged = step_lines(read_log(site.folder / "train_log.jsonl").lines)
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (line["step"], pytest.approx(line["loss"])) for line in logged]
    assert not (site.folder / "checkpoints/runs").exists()


def test_patience_without_held_out_rows_is_refused_and_evaluations_are_left_out_aloud(site: Site) -> None:
    """That the split leaves nothing is known once the data are read."""
    with pytest.raises(ConfigError, match="none of the 38 rows is held out"):
        sft.train(config(site, LoopConfig(max_steps=2, evaluate_every=1, patience=1), holdout_percent=0), site)
    result = sft.train(config(site, LoopConfig(max_steps=2, evaluate_every=1), holdout_percent=0), site)
    assert (result.steps, result.kept_step, result.before, result.after) == (2, 2, {}, {})
    assert isinstance(site.console.file, io.StringIO)
    assert "nothing to evaluate on" in site.console.file.getvalue()
