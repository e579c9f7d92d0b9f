"""Recipes: what is loaded, and that everything wrong is named at once, by path."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.config import DataConfig, DpoConfig, OptimConfig, PrepareConfig, SftConfig
from rlhf.errors import ConfigError
from rlhf.maths.losses import COUPLES_ROWS, LOSSES, READS_SMOOTHING
from rlhf.recipe import load_recipe, problems_of, resolve, resolve_data, to_yaml

GOOD = """
model: {name: some/model, method: lora}
stages:
  - sft:
      data: {train: rows.jsonl}
      optim: {learning_rate: 1e-4}
  - dpo:
      data: {train: "@sft/pairs.jsonl"}
      optim: {learning_rate: 5e-7}
  - evaluate:
      data: {train: rows.jsonl}
      models: [base, sft, dpo]
"""


def written(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    file = folder / name
    file.write_text(dedent(text), encoding="utf-8")
    return file


def found(file: Path | None, *overrides: str) -> dict[str, str]:
    return {problem.where: problem.what for problem in problems_of(file, overrides)}


def test_a_good_recipe(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, GOOD))
    assert [kind for kind, _ in recipe.stages] == ["sft", "dpo", "evaluate"]
    assert (recipe.name, recipe.output, recipe.seed, recipe.folder) == (tmp_path.name, f"runs/{tmp_path.name}", 0, str(tmp_path))
    dpo = recipe.stages[1][1]
    assert isinstance(dpo, DpoConfig)
    assert dpo.optim.learning_rate == 5e-7    # PyYAML reads 5e-7 as text
    assert dpo.beta == 0.1


def test_a_recipe_is_named_after_its_file(tmp_path: Path) -> None:
    assert load_recipe(written(tmp_path, GOOD, "tiny.yaml")).output == "runs/tiny"
    assert load_recipe(written(tmp_path, GOOD, "tiny.yaml"), ["name=big"]).output == "runs/big"


def test_everything_wrong_is_named_at_once(tmp_path: Path) -> None:
    problems = found(written(tmp_path, """
        modle: 3
        model: {name: some/model, methd: lora, lora: {r: true}}
        seed: -1
        stages:
          - sft:
              data: {train: 5, max_length: 4}
              optim: {learning_rate: fast, schedule: cosin}
          - dpo:
              data: {train: pairs.jsonl}
              loss: {sigmod: 1.0}
              learning_rate: 1e-6
          - evaluat: {}
        """))
    assert problems["modle"] == "is no key of a recipe; did you mean model?"
    assert problems["model.methd"] == "is no key of a recipe; did you mean method?"
    assert problems["sft.optim.schedule"] == "must be one of linear, cosine, constant, got 'cosin'; did you mean cosine?"
    assert problems["dpo.learning_rate"] == "is no key of a recipe; did you mean optim.learning_rate?"
    assert problems["model.lora.r"] == "must be a whole number, got True"
    assert problems["sft.data.train"] == "must be text or a list of text, got 5"
    assert problems["sft.optim.learning_rate"] == "must be a number, got 'fast'"
    assert problems["sft.data.max_length"].startswith("must be at least 8")     # a conflict beside a wrong type in the same section
    assert problems["dpo.optim.learning_rate"].startswith("is missing: peak")
    assert problems["dpo.loss"].endswith("got {'sigmod': 1.0}; did you mean sigmoid?")
    assert problems["seed"].startswith("must be in [0, 2**32)")
    assert problems["stages[2]"] == "'evaluat' is no kind of stage; did you mean evaluate?"
    assert len(problems) == 12


def test_a_conflict_that_needs_a_wrong_field_is_not_guessed(tmp_path: Path) -> None:
    """per_microbatch 64 is more than the default of per_step; what per_step should have been is unknown."""
    problems = found(written(tmp_path, GOOD), "sft.batch.per_step=many", "sft.batch.per_microbatch=64", "sft.batch.tokens_per_microbatch=0")
    assert set(problems) == {"sft.batch.per_step", "sft.batch.tokens_per_microbatch"}
    assert set(found(written(tmp_path, GOOD), "sft.batch.per_microbatch=64")) == {"sft.batch.per_microbatch"}


@pytest.mark.parametrize(("override", "where"), [
    ("dpo.batch.shuffle=1", "dpo.batch.shuffle"), ("dpo.batch.per_step=true", "dpo.batch.per_step"),
    ("dpo.loss={sigmoid: true}", "dpo.loss"), ("dpo.beta=.nan", "dpo.beta"), ("dpo.beta=.inf", "dpo.beta"),
    ("dpo.batch.per_step=2.5", "dpo.batch.per_step"), ("dpo.data.repair=drop_duplicates", "dpo.data.repair"),
    ("dpo.data.repair=[drop_twins]", "dpo.data.repair"), ("dpo.data.format=pairs", "dpo.data.format"),
    ("dpo.optim=3", "dpo.optim"), ("dpo.name=5", "5.name"), ("name=2024-01-01", "name")])
def test_values_of_another_kind_are_refused(tmp_path: Path, override: str, where: str) -> None:
    assert found(written(tmp_path, GOOD), override)[where].startswith("must be ")


@pytest.mark.parametrize(("override", "said"), [
    ("dpo.betta=1", "did you mean beta?"), ("dpoo.beta=1", "did you mean dpo?"), ("sft=1", "did you mean sft.KEY=...?"),
    ("sed=1", "did you mean seed?"), ("dpo.beta", "written key.path=value"), ("dpo..beta=1", "written key.path=value"),
    ("dpo.beta.x=1", "must be a number"), ("dpo.loss.sft=0.1", "not a mapping"), ("dpo.beta=[1", "is not YAML"),
    ("zzz=1", "starts with one of")])
def test_an_override_that_matches_nothing_says_so(tmp_path: Path, override: str, said: str) -> None:
    problems = found(written(tmp_path, GOOD.replace("- dpo:", "- dpo:\n      loss: sigmoid")), override)
    assert len(problems) == 1
    assert said in " ".join(problems.values())


def test_overrides_address_stages_by_name(tmp_path: Path) -> None:
    renamed = GOOD.replace("- sft:", "- sft:\n      name: warmup").replace("@sft", "@warmup").replace("base, sft", "base, warmup")
    file = written(tmp_path, renamed)
    recipe = load_recipe(file, ["warmup.loop.max_steps=5", "dpo.data.train=@warmup", "seed=7", "model.revision=",
                                "dpo.data.repair=[merge_same_role, drop_duplicates]"])
    sft, dpo = recipe.stages[0][1], recipe.stages[1][1]
    assert isinstance(sft, SftConfig)
    assert isinstance(dpo, DpoConfig)
    assert (sft.loop.max_steps, dpo.data.train, recipe.seed) == (5, "@warmup", 7)
    assert dpo.data.repair == ("merge_same_role", "drop_duplicates")
    assert set(found(file, "sft.loop.max_steps=5")) == {"sft.loop.max_steps"}


def test_one_stage_in_a_file_or_on_the_command_line(tmp_path: Path) -> None:
    file = written(tmp_path, "model: {name: m}\nsft:\n  data: {train: rows.jsonl}\n  optim: {learning_rate: 1e-4}\n", "one.yaml")
    assert load_recipe(file, stage="sft").stages[0][0] == "sft"
    alone = load_recipe(None, ["model.name=m", "dpo.data.train=*.jsonl", "dpo.optim.learning_rate=1e-5"], stage="dpo")
    assert (alone.name, alone.output, alone.stages[0][1].name) == ("dpo", "runs/dpo", "dpo")
    assert {problem.where for problem in problems_of(None, [], stage="dpo")} == {"model.name", "dpo.data.train", "dpo.optim.learning_rate"}
    assert {problem.where: problem.what for problem in problems_of(file, stage="dpo")} == {"stages": "has no dpo stage, only sft"}


@pytest.mark.parametrize(("text", "where", "said"), [
    ("model: {name: a\n", "recipe.yaml:2", "is not YAML"),
    ("model: {name: m}\nstages:\n  - sft: {start: @sft}\n", "recipe.yaml:3", 'must stand in quotes: "@sft"'),
    ("seed: 1\nmodel: {name: m}\nseed: 2\n", "recipe.yaml:3", "'seed' is written twice; the first is in line 1"),
    ("", "recipe.yaml", "got nothing"), ("- sft: {}\n", "recipe.yaml", "got list"), ("a: &x [*x]\n", "recipe.yaml", "levels deep"),
    ("a: 1\n---\nb: 2\n", "recipe.yaml:2", "is not YAML")])
def test_bad_yaml_is_named_with_its_line(tmp_path: Path, text: str, where: str, said: str) -> None:
    problems = found(written(tmp_path, text))
    assert said in problems[str(tmp_path / where)]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes("name: café\n".encode("latin-1"))
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert found(tmp_path / "nowhere.yaml") == {str(tmp_path / "nowhere.yaml"): "there is no such file"}
    assert "is a folder" in found(tmp_path)[str(tmp_path)]
    assert "not UTF-8" in found(tmp_path / "latin.yaml")[str(tmp_path / "latin.yaml")]
    assert found(tmp_path / "bom.yaml") == {}


@pytest.mark.parametrize(("override", "where", "said"), [
    ("sft.start=@dpo", "sft.start", "comes later"), ("dpo.start=@dpo/model", "dpo.start", "or is this stage itself"),
    ("dpo.start=@sfft", "dpo.start", "does not exist; did you mean sft?"), ("model.name=@sft", "model.name", "comes later"),
    ("dpo.data.holdout=[a.jsonl, '@nobody/b.jsonl']", "dpo.data.holdout", "does not exist"),
    ("evaluate.models=[base, sfft]", "evaluate.models", "did you mean sft?"),
    ("evaluate.models=[evaluate]", "evaluate.models", "no training stage"),
    ("evaluate.scorer=missing.py:good", "evaluate.scorer", "there is no file"),
    ("dpo.name=sft", "stages[1]", "is named 'sft' like stages[0]"), ("dpo.name=model", "stages[1].name", "another meaning"),
    ("dpo.name=../up", "stages[1].name", "names a folder")])
def test_what_stages_say_about_each_other(tmp_path: Path, override: str, where: str, said: str) -> None:
    assert said in found(written(tmp_path, GOOD), override)[where]


def test_adapter_settings_that_no_stage_reads(tmp_path: Path) -> None:
    file = written(tmp_path, GOOD.replace("method: lora", "lora: {r: 8}"))
    assert set(found(file)) == {"model.lora.r"}
    assert found(file, "dpo.method=dora") == {}
    assert set(found(file, "model.lora.r=16", "model.double_quant=false")) == {"model.double_quant"}
    assert found(file, "model.method=qlora", "model.double_quant=false") == {}


def test_yaml_aliases_are_copies(tmp_path: Path) -> None:
    file = written(tmp_path, """
        model: {name: m}
        stages:
          - sft: {data: &data {train: a.jsonl}, optim: &optim {learning_rate: 1}}
          - dpo: {data: *data, optim: {<<: *optim, weight_decay: 0.1}}
        """)
    sft, dpo = (config for _, config in load_recipe(file, ["dpo.data.max_length=64"]).stages)
    assert isinstance(sft, SftConfig)
    assert isinstance(dpo, DpoConfig)
    assert (sft.data.max_length, dpo.data.max_length, dpo.optim.learning_rate) == (1024, 64, 1.0)


def test_where_texts_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "rows-1.jsonl").touch()
    (tmp_path / "below.jsonl").touch()
    recipe = load_recipe(written(tmp_path / "recipes", GOOD))
    places = {"@sft": "runs/recipes/sft/model", "@sft/a/b.jsonl": "runs/recipes/sft/a/b.jsonl", "below.jsonl": "below.jsonl",
              "rows-1.jsonl": f"{tmp_path}/recipes/rows-1.jsonl", "rows-*.jsonl": f"{tmp_path}/recipes/rows-*.jsonl",
              "owner/name": "owner/name", str(tmp_path / "x"): str(tmp_path / "x")}
    assert {text: str(resolve(recipe, text)) for text in places} == places
    with pytest.raises(ConfigError, match="did you mean sft"):
        resolve(recipe, "@sfft/x")
    sft = recipe.stages[0][1]
    assert isinstance(sft, SftConfig)
    assert resolve_data(recipe, replace(sft.data, train=("@sft/x", "o/n"))).train == ("runs/recipes/sft/x", "o/n")


@settings(deadline=None)    # other processes share the cores
@given(args=st.dictionaries(st.from_regex(r"[a-z]+", fullmatch=True),
                            st.one_of(st.booleans(), st.integers(-10**9, 10**9), st.floats(allow_nan=False, allow_infinity=False),
                                      st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
                                      .filter(lambda text: not text.startswith("@"))), max_size=4))
def test_a_resolved_recipe_loads_back_equal(tmp_path_factory: pytest.TempPathFactory, args: dict[str, str | int | float | bool]) -> None:
    """Options of a script keep value and type: 1 is not true, "1" is not 1, "no" is text."""
    folder = tmp_path_factory.getbasetemp()
    (folder / "make.py").touch()
    recipe = load_recipe(written(folder, GOOD.replace("stages:\n", "stages:\n  - prepare: {script: make.py}\n"), "with_script.yaml"))
    recipe = replace(recipe, stages=(("prepare", PrepareConfig(script="make.py", args=args)), *recipe.stages[1:]))
    again = load_recipe(written(folder, to_yaml(recipe), "resolved.yaml"))
    assert again == recipe
    prepare = again.stages[0][1]
    assert isinstance(prepare, PrepareConfig)
    assert [type(value) for value in prepare.args.values()] == [type(value) for value in args.values()]


def test_a_wrong_recipe_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    code = dedent("""
        import sys
        from rlhf.cli import main
        code = main(["run", sys.argv[1], "dpo.betta=2"])
        print(code, "torch" in sys.modules, "transformers" in sys.modules)
        """)
    done = subprocess.run([sys.executable, "-c", code, str(written(tmp_path, GOOD))], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False", "False"]
    assert "dpo.betta: is no key of a recipe; did you mean beta?" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", LOSSES)
def test_settings_of_losses_are_refused_where_the_losses_do_not_read_them(name: str) -> None:
    """The recipe is checked without torch, so it knows by itself what the loss functions read."""
    def refused(**settings: Any) -> set[str]:
        config = DpoConfig(data=DataConfig(train="x"), optim=OptimConfig(learning_rate=1e-5), loss=name, **settings)  # type: ignore[arg-type]
        return {problem.where for problem in config.conflicts()}

    assert ("label_smoothing" in refused(label_smoothing=0.1)) == (name not in READS_SMOOTHING)
    assert ("smoothing_from_votes" in refused(label_smoothing=0.1, smoothing_from_votes=True)) == (name in COUPLES_ROWS)
    assert ("simpo_gamma" in refused(simpo_gamma=0.7)) == (name != "simpo")
    assert ("discopop_tau" in refused(discopop_tau=0.1)) == (name != "discopop")


def test_evaluating_without_held_out_rows_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, GOOD)
    problems = found(file, "sft.data.holdout_percent=0", "sft.loop.evaluate_every=5", "sft.loop.patience=2")
    assert set(problems) == {"sft.loop.evaluate_every", "sft.loop.patience"}
    assert not found(file, "sft.data.holdout_percent=0")
    assert not found(file, "sft.data.holdout=held.jsonl", "sft.loop.evaluate_every=5")


@pytest.mark.parametrize(("override", "where"), [
    ("dpo.loss={sigmoid: 1, sft: -0.2}", "dpo.loss"), ("dpo.loss={sigmoid: 0}", "dpo.loss"), ("model.lora.alpha=0", "model.lora.alpha"),
    ("evaluate.limit=0", "evaluate.limit"), ("dpo.loss=aot", "dpo.loss")])
def test_values_that_undo_what_is_asked_for(override: str, where: str, tmp_path: Path) -> None:
    assert where in found(written(tmp_path, GOOD), override)


def test_a_loss_that_sorts_the_pairs_of_a_step_needs_them_in_one_microbatch(tmp_path: Path) -> None:
    file = written(tmp_path, GOOD)
    whole = ("dpo.loss=aot", "dpo.batch.per_step=8", "dpo.batch.per_microbatch=8")
    assert not found(file, *whole)
    assert "dpo.loss" in found(file, *whole, "dpo.batch.tokens_per_microbatch=512")


def test_a_reference_that_no_loss_reads_is_not_scored(tmp_path: Path) -> None:
    file = written(tmp_path, GOOD)
    assert "dpo.precompute_reference" in found(file, "dpo.precompute_reference=true", "dpo.loss={simpo: 1, sft: 0.1}")
    assert not found(file, "dpo.precompute_reference=true")
