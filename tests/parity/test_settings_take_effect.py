"""Each setting of a training stage does what it says, in whole runs: by a figure worked out by hand, or by what lies in the folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tiny_stage import words, write_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf import dpo, sft
from rlhf.config import BatchConfig, DataConfig, DpoConfig, LoopConfig, LossName, Method, ModelConfig, OptimConfig, SftConfig
from rlhf.data.formats import load_preferences
from rlhf.data.prepared import prepare
from rlhf.data.templates import template_for
from rlhf.distributed.state import checkpoints_in
from rlhf.dpo import DpoObjective
from rlhf.errors import CheckpointError, GuardError
from rlhf.fitting import FitResult, Site, fit, log_path
from rlhf.models.attention import choose_layout
from rlhf.models.loading import Policy, find_source, load_policy, load_tokenizer
from rlhf.models.roles import FrozenCopy, Reference
from rlhf.step_log import read_log, step_lines

PAIRS, RATE = 20, 1e-3
Run = Callable[..., tuple[FitResult, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pairs.jsonl with an agreement of 0.8, llama/ without dropout, noisy/ with it."""
    folder = tmp_path_factory.mktemp("settings")
    rows = [{"schema": "preference/1", "prompt": words(i, 2 + i % 5), "chosen": " " + words(2 * i + 1, 1 + i % 8),
             "rejected": " " + words(3 * i + 2, 1 + (5 * i) % 7), "votes": 5, "agreement": 0.8, "guideline": "g"} for i in range(PAIRS)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    write_model(folder, "llama")
    config = folder / "llama" / "config.json"
    before = config.read_text(encoding="utf-8")
    config.write_text(json.dumps(json.loads(before) | {"attention_dropout": 0.5}), encoding="utf-8")
    (folder / "llama").rename(folder / "noisy")
    write_model(folder, "llama")
    return folder


@pytest.fixture
def run(inputs: Path, tmp_path: Path) -> Run:
    """Trains in a folder of its own, in the order of the file; returns the result and the step lines of the log."""
    def training(kind: type[SftConfig | DpoConfig] = DpoConfig, *, name: str = "a", model: str = "llama", method: str = "full",
                 seed: int = 3, data: dict[str, Any] | None = None, optim: dict[str, Any] | None = None,
                 loop: dict[str, Any] | None = None, batch: BatchConfig | None = None, depends_on: str = "", **settings: Any) -> Any:
        config = kind(
            data=DataConfig(**{"train": str(inputs / "pairs.jsonl"), "template": "plain", "max_length": 64, "holdout_percent": 0,
                               **(data or {})}),
            optim=OptimConfig(**{"learning_rate": RATE, "schedule": "constant", "warmup_fraction": 0.0, **(optim or {})}),
            loop=LoopConfig(**{"max_steps": 1, "save_every": None, **(loop or {})}),
            batch=batch or BatchConfig(per_step=4, per_microbatch=4, shuffle=False), **settings)
        site = Site(folder=tmp_path / "run" / name, name=name, model=ModelConfig(name=str(inputs / model), method=method), seed=seed,
                    start=None, inputs={"recipe": depends_on}, console=Console(quiet=True))
        site.folder.mkdir(parents=True, exist_ok=True)
        result = sft.train(config, site) if isinstance(config, SftConfig) else dpo.train(config, site)
        return result, step_lines(read_log(log_path(site)).lines)
    return training


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


# ---- losses ----

def test_the_loss_of_sft_is_the_mean_over_the_tokens_of_the_step(run: Run, inputs: Path) -> None:
    """Also in microbatches of one, and for a model with dropout, which is off unless asked for."""
    tokenizer = load_tokenizer(find_source(str(inputs / "llama")))
    model = AutoModelForCausalLM.from_pretrained(inputs / "llama").eval()
    losses: list[float] = []
    for row in map(json.loads, (inputs / "pairs.jsonl").read_text(encoding="utf-8").splitlines()[:4]):
        prompt, whole = (tokenizer(text)["input_ids"] for text in (row["prompt"], row["prompt"] + row["chosen"] + "<eos>"))
        with torch.no_grad():
            logps = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        losses += [-float(logps[place - 1, whole[place]]) for place in range(len(prompt), len(whole))]
    expected = sum(losses) / len(losses)
    for number, (cut, name) in enumerate([(4, "llama"), (1, "llama"), (4, "noisy")]):
        _, (line,) = run(SftConfig, name=str(number), model=name, batch=BatchConfig(per_step=4, per_microbatch=cut, shuffle=False))
        assert line["loss"] == pytest.approx(expected, rel=1e-5)
    _, (line,) = run(SftConfig, name="dropout", model="noisy", loop={"dropout": True})
    assert abs(line["loss"] - expected) > 1e-3


@pytest.mark.parametrize(("settings", "factor"), [
    # At the reference h = 0, and the slope of the sigmoid loss is -beta (1 - 2 e) / 2.
    ({"beta": 0.3}, 3.0), ({"label_smoothing": 0.25}, 0.5), ({"smoothing_from_votes": True}, 0.6),
    ({"smoothing_from_votes": True, "label_smoothing": 0.3}, 0.4), ({"smoothing_from_votes": True, "label_smoothing": 0.1}, 0.6),
    ({"loss": {"sigmoid": 0.7}}, 0.7), ({"loss": "hinge"}, 2.0),
    # With m = s(x / tau): d loss / dx = (1 - ln 2) / (4 tau) - 3/4.
    ({"loss": "discopop", "discopop_tau": 0.05}, abs((1 - math.log(2)) / 0.2 - 0.75) * 2),
    ({"loss": "discopop", "discopop_tau": 1.0}, abs((1 - math.log(2)) / 4 - 0.75) * 2)])
def test_the_first_gradient_has_the_slope_of_the_loss(run: Run, settings: dict[str, Any], factor: float) -> None:
    _, (plain,) = run(name="plain")
    _, (line,) = run(name="changed", **settings)
    assert line["grad_norm"] == pytest.approx(factor * plain["grad_norm"], rel=1e-4)


def test_rewards_are_beta_times_the_log_ratios(run: Run) -> None:
    """Adam's first update does not depend on the size of the gradient, so that both policies are the same after it."""
    _, few = run(name="small", loop={"max_steps": 2})
    _, many = run(name="large", loop={"max_steps": 2}, beta=0.4)
    assert abs(few[1]["rewards/chosen"]) > 1e-4
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins"):
        assert many[1][name] == pytest.approx(4 * few[1][name], rel=1e-2)


def test_the_sft_loss_of_dpo_is_that_of_sft_on_the_chosen_responses(run: Run) -> None:
    _, (imitated,) = run(SftConfig, name="sft")
    for number, cut in enumerate((4, 1)):
        _, (line,) = run(name=str(number), loss="sft", batch=BatchConfig(per_step=4, per_microbatch=cut, shuffle=False))
        assert line["loss"] == pytest.approx(imitated["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(imitated["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("gamma", [0.5, 1.25])
def test_simpo_aims_at_its_margin(run: Run, gamma: float) -> None:
    _, (line,) = run(loss="simpo", beta=2.0, simpo_gamma=gamma, batch=BatchConfig(per_step=1, per_microbatch=1, shuffle=False))
    assert line["loss"] == pytest.approx(math.log1p(math.exp(gamma - line["rewards/margins"])), rel=1e-5)


def test_a_loss_of_exactly_zero_is_legal_for_hinge_only(run: Run) -> None:
    """Weights so small that float32 holds nothing of the loss."""
    result, _ = run(name="hinge", loss={"hinge": 1e-60})
    assert [alarm.name for alarm in result.alarms] == ["no_gradient"]
    with pytest.raises(GuardError, match="the loss is exactly 0"):
        run(name="ipo", loss={"ipo": 1e-60})


def test_scores_that_are_not_those_of_the_policy_stop_the_run_before_its_first_step(run: Run, tmp_path: Path) -> None:
    run(name="scored", precompute_reference=True)
    (cache,) = (tmp_path / "run" / "reference_scores").rglob("*.npz")
    with np.load(cache) as arrays:
        keys, values = arrays["keys"], arrays["values"]
    np.savez(cache, keys=keys, values=values + np.arange(len(values)))
    with pytest.raises(GuardError, match="step 0: a reward margin is"):
        run(name="again", precompute_reference=True)
    assert step_lines(read_log(tmp_path / "run" / "again" / "train_log.jsonl").lines) == []


# ---- optimizer ----

@pytest.mark.parametrize(("optim", "rates"), [
    ({"schedule": "constant"}, [1.0, 1.0, 1.0, 1.0]), ({"schedule": "linear"}, [1.0, 0.75, 0.5, 0.25]),
    ({"schedule": "cosine"}, [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
    ({"schedule": "linear", "warmup_fraction": 0.5}, [0.0, 0.5, 1.0, 0.5]),
    ({"schedule": "constant", "warmup_fraction": 1.0}, [0.0, 0.25, 0.5, 0.75])])
def test_learning_rates_of_four_steps(run: Run, optim: dict[str, Any], rates: list[float]) -> None:
    _, lines = run(SftConfig, optim=optim, loop={"max_steps": 4})
    assert [line["learning_rate"] for line in lines] == pytest.approx([RATE * rate for rate in rates], rel=1e-6, abs=1e-12)


def test_weight_decay_pulls_matrices_to_zero_and_leaves_norms(run: Run, inputs: Path, tmp_path: Path) -> None:
    """Decoupled: after one step w differs by rate * decay * w_0."""
    for name, decay in (("without", 0.0), ("with", 0.5)):
        run(SftConfig, name=name, optim={"weight_decay": decay})
    runs = tmp_path / "run"
    start, without, decayed = (weights(folder) for folder in (inputs / "llama", runs / "without/model", runs / "with/model"))
    for name, tensor in start.items():
        decay = 0.0 if "norm" in name else 0.5
        torch.testing.assert_close(decayed[name], without[name] - RATE * decay * tensor, rtol=0, atol=1e-7)


def test_gradients_are_clipped_to_the_norm(run: Run, inputs: Path, tmp_path: Path) -> None:
    """Far below Adam's epsilon of 1e-8 nothing is left of an update; the norm in the log is the one before clipping."""
    _, (free,) = run(SftConfig, name="free", optim={"max_grad_norm": 1e3})
    _, (clipped,) = run(SftConfig, name="clipped", optim={"max_grad_norm": 1e-12})
    assert free["grad_norm"] == clipped["grad_norm"] > 0.01
    start = weights(inputs / "llama")
    moved = {name: max(float((tensor - start[key]).abs().max()) for key, tensor in weights(tmp_path / "run" / name / "model").items())
             for name in ("free", "clipped")}
    assert moved["free"] > 0.5 * RATE
    assert moved["clipped"] < 1e-3 * RATE


@pytest.mark.parametrize(("optimizer", "moment"), [("adamw_torch", "exp_avg"), ("adamw_8bit", "__bnb_optimizer_quant_state__")])
def test_the_optimizer_is_the_one_asked_for(run: Run, tmp_path: Path, optimizer: str, moment: str) -> None:
    run(SftConfig, optim={"optimizer": optimizer}, loop={"save_every": 1})
    state = torch.load(tmp_path / "run/a/checkpoints/checkpoint-1/optimizer.pt", weights_only=True)["state"]
    assert all(moment in moments for moments in state.values())


def test_an_adapter_that_never_moved_is_an_error_and_not_a_model(run: Run, tmp_path: Path) -> None:
    with pytest.raises(GuardError, match="adapters whose B is still zero"):
        run(SftConfig, method="lora", optim={"learning_rate": 1e-60})      # less than float32 can hold
    assert not (tmp_path / "run/a/model").exists()


def fit_by_hand(inputs: Path, folder: Path, *, method: Method, loss: LossName, wire: Callable[[Policy], Reference | None]) -> None:
    """What dpo.train does, with roles of one's own."""
    folder.mkdir()
    model = ModelConfig(name=str(inputs / "llama"), method=method)
    config = DpoConfig(data=DataConfig(train=str(inputs / "pairs.jsonl"), template="plain", max_length=64, holdout_percent=0),
                       optim=OptimConfig(learning_rate=RATE), loop=LoopConfig(max_steps=1, save_every=None), loss=loss)
    policy = load_policy(model, method=method, start=None, seed=0)
    data = prepare(load_preferences(config.data), config.data, template_for(policy.tokenizer, "plain"), folder)
    layout = choose_layout(policy.model, "auto")
    reference = wire(policy)
    fit(policy, DpoObjective(config, reference), data, optim=config.optim, batch=config.batch, loop=config.loop, layout=layout,
        reference=reference, site=Site(folder=folder, name="dpo", model=model, seed=0, start=None, inputs={}, console=Console(quiet=True)))


def test_a_reference_that_learns_with_the_policy_voids_the_run(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(GuardError, match="the reference changed while training"):
        fit_by_hand(inputs, tmp_path / "a", method="full", loss="sigmoid", wire=lambda policy: FrozenCopy(policy.model, policy.model))


def test_what_was_trained_beside_an_adapter_and_is_not_in_its_files_is_an_error(inputs: Path, tmp_path: Path) -> None:
    def train_embedding_too(policy: Policy) -> None:
        policy.model.get_input_embeddings().weight.requires_grad_(True)

    with pytest.raises(GuardError, match=r"trained, but not in the saved files: .*embed_tokens"):
        fit_by_hand(inputs, tmp_path / "a", method="lora", loss="simpo", wire=train_embedding_too)


# ---- loop ----

@pytest.mark.parametrize(("loop", "kept"), [
    ({"save_every": 2, "save_total_limit": 1}, [6]), ({"save_every": 2, "save_total_limit": 3}, [2, 4, 6]),
    ({"save_every": 4, "save_total_limit": 3}, [4, 6]), ({"save_every": None}, [])])
def test_checkpoints_are_written_and_kept_as_asked_for(run: Run, tmp_path: Path, loop: dict[str, Any], kept: list[int]) -> None:
    run(SftConfig, loop={"max_steps": 6, **loop})
    assert [path.name for path in checkpoints_in(tmp_path / "run/a/checkpoints")] == [f"checkpoint-{step}" for step in kept]


@pytest.mark.parametrize(("every", "steps"), [(None, [0, 4]), (2, [0, 2, 4]), (3, [0, 3, 4])])
def test_evaluations_before_along_and_after(run: Run, tmp_path: Path, every: int | None, steps: list[int]) -> None:
    run(data={"holdout_percent": 40}, loop={"max_steps": 4, "evaluate_every": every})
    assert [line["step"] for line in read_log(tmp_path / "run/a/train_log.jsonl").lines if "eval_loss" in line] == steps


def test_held_out_figures_are_means_over_rows_whatever_the_batches(run: Run) -> None:
    """Batches of three leave a smaller one at the end: a mean of means would weigh its rows more."""
    ones, threes = (run(name=str(cut), data={"holdout_percent": 60}, batch=BatchConfig(per_step=3, per_microbatch=cut))[0]
                    for cut in (1, 3))
    for when in ("before", "after"):
        figures = getattr(ones, when)
        assert getattr(threes, when) == pytest.approx(figures, rel=1e-4, abs=1e-6)
        assert figures["eval_logps/chosen"] < -1


def test_a_checkpoint_of_other_inputs_is_never_continued(run: Run) -> None:
    run(SftConfig, loop={"save_every": 1}, depends_on="this")
    with pytest.raises(CheckpointError, match="recipe: was this, is that"):
        run(SftConfig, loop={"save_every": 1, "max_steps": 2}, depends_on="that")


def test_length_is_epochs_unless_steps_are_given(run: Run) -> None:
    assert run(SftConfig, name="epochs", loop={"max_steps": None, "epochs": 1.5})[0].steps == math.ceil(1.5 * PAIRS / 4)
    assert run(SftConfig, name="steps", loop={"max_steps": 2, "epochs": 1.5})[0].steps == 2


def test_the_seed_fixes_order_adapters_and_dropout(run: Run) -> None:
    shuffled = BatchConfig(per_step=4, per_microbatch=4)
    cases: dict[str, dict[str, Any]] = {"order": {"batch": shuffled}, "adapter": {"method": "lora"},
                                        "dropout": {"model": "noisy", "loop": {"dropout": True}}}
    for case, settings in cases.items():
        first, again, other = (run(name=f"{case}{number}", seed=seed, **settings)[1][0]["grad_norm"]
                               for number, seed in enumerate((1, 1, 2)))
        assert first == again != other, case


@pytest.mark.parametrize("kind", [SftConfig, DpoConfig])
def test_layout_and_method_of_the_stage_come_first(run: Run, tmp_path: Path, kind: type[SftConfig | DpoConfig]) -> None:
    assert run(kind, layout="padded", method="full")[0].layout == "padded"
    assert run(kind, name="b")[0].layout == "packed"
    assert (tmp_path / "run/b/model/model.safetensors").is_file()


def test_a_tracker_gets_the_figures(run: Run, tmp_path: Path) -> None:
    run(SftConfig, loop={"trackers": ("tensorboard",)})
    assert list((tmp_path / "run/a").rglob("events.out.tfevents.*"))
