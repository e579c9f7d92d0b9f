"""Figures of policies: pairs are scored as the bare model does, small ones by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_policies import prompts, saved, tiny_model, tiny_tokenizer

from rlhf.config import DataConfig, EvaluateConfig, ModelConfig
from rlhf.data.templates import Template, template_for
from rlhf.errors import ConfigError, DataError
from rlhf.evaluate.policy import EvaluationResult, answered_well, evaluate_policies, load_scorer, pair_logps, preference_figures
from rlhf.models.loading import Policy, load_policy
from rlhf.records import TokenRun


def template() -> Template:
    return template_for(tiny_tokenizer(), "plain")


# ---- pairs ----

def runs() -> list[TokenRun]:
    return [TokenRun(id=str(row), prompt=tuple(range(3, 4 + row)), responses=(tuple(range(20, 22 + row)), (9, 8 + row, 0)))
            for row in range(7)]


def test_pair_logps_are_those_of_the_bare_model_one_response_at_a_time() -> None:
    model = tiny_model("llama")
    expected = []
    with torch.no_grad():
        for run in runs():
            for response in run.responses:
                logps = model(torch.tensor([[*run.prompt, *response]])).logits[0].log_softmax(-1)
                start = len(run.prompt) - 1
                expected.append(sum(float(logps[start + place, token]) for place, token in enumerate(response)))
    for batch in (1, 3, 16):
        found = pair_logps(model, runs(), batch=batch, layout="padded")
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64).view(-1, 2), rtol=0, atol=2e-5)


def test_preference_figures_by_hand() -> None:
    # Prompt 0 has two pairs, prompt 1 one. Own margins 2, 0, -1: a win, a tie, a loss. Over the first model: 1, 1, 0.
    logps = torch.tensor([[-1.0, -3.0], [-2.0, -2.0], [-5.0, -4.0]], dtype=torch.float64)
    first = torch.tensor([[-2.0, -3.0], [-3.0, -2.0], [-6.0, -5.0]], dtype=torch.float64)
    figures = preference_figures(logps, first, torch.tensor([0, 0, 1]), resamples=200)
    assert (figures.pairs, figures.prompts) == (3, 2)
    assert figures.logps_accuracy.mean == pytest.approx(0.5)
    assert figures.accuracy is not None and figures.accuracy.mean == pytest.approx(2.5 / 3)
    assert figures.margin is not None and figures.margin.mean == pytest.approx(2 / 3)
    # Only whole prompts are drawn: prompt 0 alone has accuracy 1, prompt 1 alone 1/2.
    assert (figures.accuracy.low, figures.accuracy.high) == (pytest.approx(0.5), pytest.approx(1.0))


def test_pairs_of_one_prompt_are_drawn_together() -> None:
    # Ten pairs of a prompt are won by 1 nat, ten of another lost by 1: a resample holds both prompts, or one of them twice (1 in 4 each).
    logps = torch.tensor([[-1.0, -2.0]] * 10 + [[-2.0, -1.0]] * 10, dtype=torch.float64)
    figures = preference_figures(logps, torch.zeros(20, 2, dtype=torch.float64), torch.tensor([0] * 10 + [1] * 10), resamples=200)
    assert figures.logps_accuracy == figures.accuracy == (0.5, 0.0, 1.0)
    assert figures.margin == (0.0, -1.0, 1.0)


def test_gain_is_paired() -> None:
    # One prompt more of a hundred: by the pairs the gain is 1/100 and never negative, which independent samples could not show.
    first = [True] * 50 + [False] * 50
    better = [True] * 51 + [False] * 49
    found = answered_well(better, first, resamples=1000)
    assert found.gain is not None and found.gain.mean == pytest.approx(0.01) and found.gain.low == 0.0 and found.gain.high <= 0.04
    assert (found.good, found.prompts, found.share.mean) == (51, 100, pytest.approx(0.51))
    assert answered_well(first, None, resamples=10).gain is None


# ---- the whole evaluation ----

def loader(folder: Path, *, seed: int) -> Callable[[], Policy]:
    return partial(load_policy, ModelConfig(name=saved(folder, seed=seed)), method="full", start=None, seed=0)


def evaluate(folder: Path, *, limit: int | None = None, scorer: str = "def even(prompt, response):\n    return len(response) % 2 == 0\n",
             preferences: bool = True, batch: int = 4) -> EvaluationResult:
    folder.mkdir()
    (folder / "scorer.py").write_text(scorer, encoding="utf-8")
    rows = [{"prompt": prompt.messages[0].content, "chosen": f"w{3 + row % 80} w9", "rejected": f"w{4 + row % 80}"}
            for row, prompt in enumerate(prompts(60))]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = EvaluateConfig(
        data=DataConfig(train=str(folder / "pairs.jsonl"), holdout_percent=50.0, template="plain", max_rejected=1.0),
        models=("one", "two"), scorer=f"{folder / 'scorer.py'}:even", preferences=preferences, limit=limit, batch=batch, max_new_tokens=6,
        samples=3, resamples=200)
    return evaluate_policies(config, {"one": loader(folder / "one", seed=1), "two": loader(folder / "two", seed=2)}, folder=folder)


def test_figures_agree_with_the_file_and_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    result, again = evaluate(tmp_path / "a"), evaluate(tmp_path / "b", batch=1)
    assert result.as_json() == json.loads((tmp_path / "a" / "evaluation.json").read_text())
    first, second = result.models
    assert [first.name, second.name] == ["one", "two"]
    assert first.answered_well is not None and second.answered_well is not None and first.answered_well.gain is None
    assert second.answered_well.gain is not None
    assert second.answered_well.gain.mean == pytest.approx(second.answered_well.share.mean - first.answered_well.share.mean)
    assert first.preferences is not None and first.preferences.accuracy is None and first.preferences.pairs >= 20
    assert second.preferences is not None and second.preferences.accuracy is not None
    for one, other in zip(result.models, again.models, strict=True):
        assert one.answered_well == other.answered_well
    assert [len(sample.responses) for sample in result.samples] == [2, 2, 2]


def test_limit_counts_prompts(tmp_path: Path) -> None:
    result = evaluate(tmp_path / "a", limit=5)
    assert result.models[0].answered_well is not None and result.models[0].answered_well.prompts == 5
    assert result.models[0].preferences is not None and result.models[0].preferences.prompts == 5


def test_a_model_against_itself_gains_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    evaluate(folder)
    config = EvaluateConfig(data=DataConfig(train=str(folder / "pairs.jsonl"), holdout_percent=50.0, template="plain", max_rejected=1.0),
                            max_new_tokens=4, resamples=50, models=("one", "copy"))
    load = partial(load_policy, ModelConfig(name=str(folder / "one")), method="full", start=None, seed=0)
    copy = evaluate_policies(config, {"one": load, "copy": load}, folder=folder).models[1]
    assert copy.answered_well is None and copy.generated == config.samples
    assert copy.preferences is not None and copy.preferences.accuracy == (0.5, 0.5, 0.5) and copy.preferences.margin == (0.0, 0.0, 0.0)


def test_demonstrations_can_be_evaluated_without_preferences(tmp_path: Path) -> None:
    result = evaluate(tmp_path / "a", preferences=False)
    assert result.models[0].preferences is None and result.models[0].answered_well is not None


def test_nothing_held_out_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "w5", "chosen": "w6", "rejected": "w7"}\n', encoding="utf-8")
    config = EvaluateConfig(data=DataConfig(train=str(tmp_path / "pairs.jsonl"), holdout_percent=0.0))
    with pytest.raises(DataError, match=r"none of the 1 rows of .* is held out"):
        evaluate_policies(config, {"one": loader(tmp_path / "one", seed=1)}, folder=tmp_path)


@pytest.mark.parametrize(("name", "message"), [("scorer.py:absent", "no function 'absent'"), ("other.py:even", "no Python file")])
def test_a_scorer_that_is_not_there(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "scorer.py").write_text("even = 3\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_scorer(str(tmp_path / name))
