"""In half precision the weights that train stay float32: at the learning rates of preference tuning nothing else would move."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tiny_policies import TOKENS, load, saved

from rlhf import sft
from rlhf.config import BatchConfig, DataConfig, LoopConfig, Method, ModelConfig, OptimConfig, SftConfig
from rlhf.fitting import Site
from rlhf.models.loading import load_policy
from rlhf.models.packing import pack, response_logps
from rlhf.models.precision import computing_in
from rlhf.records import TokenRun


@pytest.mark.parametrize("method", ["full", "lora", "qlora", "dora"])
def test_what_trains_is_float32_and_the_base_is_not(tmp_path: Path, method: Method) -> None:
    model = load(saved(tmp_path / "base"), method, dtype="bfloat16").model
    assert {weight.dtype for weight in model.parameters() if weight.requires_grad} == {torch.float32}
    frozen = {weight.dtype for weight in model.parameters() if not weight.requires_grad and weight.dtype != torch.uint8}
    assert frozen == (set() if method == "full" else {torch.bfloat16})


def test_a_model_that_is_only_read_is_loaded_in_the_dtype_of_the_recipe(tmp_path: Path) -> None:
    config = ModelConfig(name=saved(tmp_path / "base"), dtype="bfloat16")
    assert load_policy(config, method="full", start=None, seed=0, to_train=False).model.dtype == torch.bfloat16


def test_a_small_learning_rate_reaches_every_weight_in_bfloat16(tmp_path: Path) -> None:
    """2e-6 is below the spacing of bfloat16 at any weight over 2**-10: added to a bfloat16 weight it would be lost."""
    base = Path(saved(tmp_path / "base"))
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "w{i} w3", "response": "w{i + 9} w{i + 2}"}}\n' for i in range(2, 40)))
    config = SftConfig(
        data=DataConfig(train=str(tmp_path / "rows.jsonl"), holdout_percent=0, template="plain", max_length=16, max_rejected=0),
        optim=OptimConfig(learning_rate=2e-6, warmup_fraction=0, schedule="constant"), batch=BatchConfig(per_step=8, per_microbatch=8),
        loop=LoopConfig(max_steps=1, save_every=None))
    site = Site(folder=tmp_path / "run", name="sft", model=ModelConfig(name=str(base), dtype="bfloat16"), seed=0, start=None, inputs={},
                console=Console(quiet=True))
    site.folder.mkdir()
    sft.train(config, site)
    before, after = load_file(base / "model.safetensors"), load_file(site.folder / "model/model.safetensors")
    moved = {name: (after[name] != before[name]).float().mean().item() for name in before if "layers" in name}
    assert {after[name].dtype for name in after} == {torch.float32}
    assert min(moved.values()) > 0.9, moved


def test_scores_taken_outside_the_trainer_are_computed_as_inside_it() -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    with computing_in("bfloat16", torch.device("cpu")):
        assert (a @ b).dtype == torch.bfloat16
    with computing_in("float32", torch.device("cpu")):
        assert (a @ b).dtype == torch.float32


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_a_head_in_chunks_computes_as_the_model_does(tmp_path: Path, method: Method) -> None:
    """Also in the backward, which runs after the block has been left."""
    model = load(saved(tmp_path / "base"), method, dtype="bfloat16").model
    batch = pack([TokenRun(id="a", prompt=tuple(TOKENS[0, :3].tolist()), responses=(tuple(TOKENS[1].tolist()),))], layout="padded")
    gradients = []
    for logits_at_once in (2**20, 96 * 3):
        model.zero_grad()
        with computing_in("bfloat16", torch.device("cpu")):
            scored = response_logps(model, batch, logits_at_once=logits_at_once)
        scored.logps.sum().backward()
        slopes = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
        gradients.append((scored.logps.item(), torch.cat(slopes)))
    (whole, slope), (chunked, slope_in_chunks) = gradients
    assert chunked == pytest.approx(whole, abs=1e-3)
    assert torch.allclose(slope, slope_in_chunks, atol=0.02 * slope.abs().max().item())
