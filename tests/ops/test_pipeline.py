"""A whole recipe on tiny things: what is skipped, set aside, resumed and refused, and where references and models come from."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlhf.distributed.state import differing_inputs
from rlhf.errors import CheckpointError, ConfigError, DataError
from rlhf.ops.pipeline import Pipeline, run_recipe
from rlhf.ops.stage_record import path_hash, read_record
from rlhf.recipe import load_recipe
from rlhf.step_log import read_log, step_lines

PREPARE = '''
import json, pathlib, sys
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
out = pathlib.Path(sys.argv[1])
count = int(sys.argv[sys.argv.index("--pairs") + 1])
tokens = {"<eos>": 0, "<unk>": 1} | {f"w{n}": n for n in range(2, 50)}
backend = Tokenizer(models.WordLevel(tokens, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")
tokenizer.save_pretrained(out / "model")
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                             bos_token_id=None, eos_token_id=0, pad_token_id=None)).save_pretrained(out / "model")
rows = [{"prompt": f"w{2 + i % 40} w{3 + i // 40} ", "chosen": f"w{4 + i % 9} w7", "rejected": f"w{20 + i % 9}"} for i in range(count)]
(out / "pairs.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
print("made", count, "pairs")
'''

RECIPE = """
model: {name: "@prepare/model", lora: {r: 4, alpha: 8}}
stages:
  - prepare: {script: prepare.py, args: {pairs: 60}}
  - sft:
      data: {train: "@prepare/pairs.jsonl", holdout_percent: 20, template: plain, max_length: 32}
      optim: {learning_rate: 1.0e-3}
      batch: {per_step: 8, per_microbatch: 4}
      loop: {max_steps: 3, save_every: 2}
  - dpo:
      data: {train: "@prepare/pairs.jsonl", holdout_percent: 20, template: plain, max_length: 32}
      method: lora
      optim: {learning_rate: 1.0e-3}
      batch: {per_step: 8, per_microbatch: 4}
      loop: {max_steps: 3, evaluate_every: 2}
  - evaluate:
      data: {train: "@prepare/pairs.jsonl", holdout_percent: 20, template: plain, max_length: 32}
      models: [sft, dpo]
      max_new_tokens: 4
      resamples: 50
"""


class Runner:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.console = Console(file=io.StringIO(), width=200)

    def recipe(self, *overrides: str) -> Any:
        return load_recipe(self.folder / "recipe.yaml", [f"output={self.folder / 'run'}", *overrides])

    def __call__(self, *overrides: str, **options: Any) -> dict[str, Any]:
        return run_recipe(self.recipe(*overrides), console=self.console, **options)

    @property
    def run(self) -> Path:
        return self.folder / "run"


def make(folder: Path) -> Runner:
    (folder / "prepare.py").write_text(PREPARE)
    (folder / "recipe.yaml").write_text(RECIPE)
    return Runner(folder)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Runner, dict[str, Any]]:
    runner = make(tmp_path_factory.mktemp("recipe"))
    return runner, runner()


@pytest.fixture
def copied(finished: tuple[Runner, dict[str, Any]], tmp_path: Path) -> Runner:
    """A finished run of one's own, moved to another place."""
    runner, _ = finished
    shutil.copytree(runner.folder, tmp_path / "copy")
    return Runner(tmp_path / "copy")


def test_every_stage_leaves_what_the_architecture_says(finished: tuple[Runner, dict[str, Any]]) -> None:
    runner, answer = finished
    assert list(answer["stages"]) == ["prepare", "sft", "dpo", "evaluate"]
    for file in ("recipe.yaml", "environment.json", "report.html", "prepare/pairs.jsonl", "sft/model/model.safetensors",
                 "dpo/model/adapter_model.safetensors", "dpo/model/README.md", "dpo/train_log.jsonl", "dpo/rejects.jsonl", "dpo/data.json",
                 "evaluate/evaluation.json", "evaluate/stage.json"):
        assert (runner.run / file).is_file(), file
    assert not (runner.run / "prepare/.partial").exists()


def test_dpo_starts_from_the_sft_model_and_is_its_own_reference(finished: tuple[Runner, dict[str, Any]]) -> None:
    runner, answer = finished
    adapter = json.loads((runner.run / "dpo/model/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str((runner.run / "sft/model").resolve())
    before = answer["stages"]["dpo"]["before"]
    assert before["eval_loss"] == pytest.approx(0.6931472, abs=1e-6)
    assert before["eval_rewards/margins"] == 0.0
    assert before["eval_rewards/accuracies"] == 0.5
    assert answer["stages"]["dpo"]["after"]["eval_loss"] < before["eval_loss"]


def test_held_out_prompts_are_the_same_in_every_stage_and_never_trained_on(finished: tuple[Runner, dict[str, Any]]) -> None:
    runner, _ = finished
    counts = [json.loads((runner.run / stage / "data.json").read_text()) for stage in ("sft", "dpo")]
    assert counts[0]["train"] == counts[1]["train"] > 0
    assert counts[0]["holdout"] == counts[1]["holdout"] > 0
    assert counts[0]["train"] + counts[0]["holdout"] == 60


def test_a_second_run_skips_every_stage(finished: tuple[Runner, dict[str, Any]]) -> None:
    runner, answer = finished
    stamps = {path: path.stat().st_mtime_ns for path in runner.run.rglob("*") if path.name == "stage.json"}
    again = runner()
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert again["stages"] == answer["stages"]


def test_a_changed_setting_runs_its_stage_and_those_after_it_and_keeps_the_old_ones(copied: Runner) -> None:
    before = read_record(copied.run / "sft")
    copied("dpo.beta=0.2")
    assert read_record(copied.run / "sft") == before
    assert json.loads(read_record(copied.run / "dpo").inputs["configuration"])["beta"] == 0.2
    assert sorted(path.name for path in (copied.run / "replaced").iterdir()) == ["dpo-1", "evaluate-1"]


def test_a_run_that_was_moved_is_as_finished_as_before(copied: Runner) -> None:
    stamps = {path: path.stat().st_mtime_ns for path in copied.run.rglob("*") if path.name == "stage.json"}
    copied()
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert not (copied.run / "replaced").exists()


def test_a_recipe_that_was_refused_does_not_take_the_place_of_the_one_that_made_the_run(copied: Runner) -> None:
    path = copied.run / "dpo/stage.json"
    path.write_text(path.read_text().replace('"finished"', '"running"'))
    before = (copied.run / "recipe.yaml").read_text()
    with pytest.raises(CheckpointError):
        copied("dpo.beta=0.2")
    assert (copied.run / "recipe.yaml").read_text() == before


def test_an_interrupted_stage_is_not_continued_with_other_inputs(copied: Runner) -> None:
    path = copied.run / "dpo/stage.json"
    path.write_text(path.read_text().replace('"finished"', '"running"'))
    with pytest.raises(CheckpointError, match=r"interrupted run that was given other inputs \(configuration\)"):
        copied("dpo.beta=0.2")
    assert copied()["stages"]["dpo"]["steps"] == 3                # with the old inputs it goes on
    assert len(step_lines(read_log(copied.run / "dpo/train_log.jsonl").lines)) == 3


def test_a_folder_that_is_no_stage_is_never_touched(tmp_path: Path) -> None:
    runner = make(tmp_path)
    (runner.run / "prepare").mkdir(parents=True)
    (runner.run / "prepare/thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="is not empty and no stage of a run"):
        runner(fresh=True)
    assert (runner.run / "prepare/thesis.txt").read_text() == "years of work"


def test_a_failing_script_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    runner = make(tmp_path)
    (tmp_path / "prepare.py").write_text("import pathlib, sys\npathlib.Path(sys.argv[1], 'half').write_text('x')\nsys.exit('no space')")
    with pytest.raises(DataError, match=r"prepare\.py ended with exit code 1"):
        runner()
    assert not (runner.run / "prepare/half").exists()
    assert read_record(runner.run / "prepare").status == "running"


def test_an_unknown_stage_name_is_refused_with_the_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no stage named 'dp'; it has prepare, sft, dpo, evaluate"):
        make(tmp_path)(only="dp")


def test_start_of_dpo_is_the_training_stage_before_it_unless_it_says_otherwise(tmp_path: Path) -> None:
    runner = make(tmp_path)
    pipeline = Pipeline(runner.recipe(), runner.console)
    stages = {config.name: config for _, config in pipeline.recipe.stages}
    assert pipeline.start_of(stages["sft"]) is None
    assert pipeline.start_of(stages["dpo"]) == str(runner.run / "sft/model")
    other = Pipeline(runner.recipe("dpo.start=@prepare/model"), runner.console)
    assert other.start_of(other.recipe.stages[2][1]) == str(runner.run / "prepare/model")


def test_a_changed_file_behind_a_glob_is_another_input(tmp_path: Path) -> None:
    runner = make(tmp_path)
    for name in ("rows-1.jsonl", "rows-2.jsonl"):
        (tmp_path / name).write_text('{"prompt": "w2", "chosen": "w3", "rejected": "w4"}\n')

    def inputs() -> dict[str, str]:
        pipeline = Pipeline(runner.recipe("sft.data.train=rows-*.jsonl"), runner.console)
        return pipeline.inputs_of("sft", pipeline.recipe.stages[1][1])

    before = inputs()
    (tmp_path / "rows-2.jsonl").write_text('{"prompt": "w2", "chosen": "w3", "rejected": "w5"}\n')
    assert differing_inputs(before, inputs()) == [f"data {tmp_path / 'rows-2.jsonl'}"]
    (tmp_path / "rows-3.jsonl").touch()
    assert f"data {tmp_path / 'rows-3.jsonl'}" in differing_inputs(before, inputs())


def test_one_byte_of_a_large_data_file_is_another_input(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    with file.open("wb") as stream:
        stream.truncate(70 * 2**20)      # more than what is hashed whole of a model's file
    before = path_hash(file)
    with file.open("r+b") as stream:
        stream.seek(1_100_000)      # between two of the blocks that are looked at of a model's file
        stream.write(b"x")
    assert path_hash(file) != before


def test_a_stage_that_stopped_before_its_first_checkpoint_takes_other_inputs(copied: Runner) -> None:
    """A recipe that was refused at the start is mended and run again; there is nothing to continue, and what there is is kept."""
    path = copied.run / "dpo/stage.json"
    path.write_text(path.read_text().replace('"finished"', '"running"'))
    shutil.rmtree(copied.run / "dpo/checkpoints")
    copied("dpo.beta=0.2")
    assert read_record(copied.run / "dpo").status == "finished"
    assert (copied.run / "replaced/dpo-1/train_log.jsonl").is_file()
