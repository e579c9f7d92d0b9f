"""Rows longer than the positions of the model are refused before the first step, by the check and by the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from tiny_policies import saved
from transformers import BloomConfig, GPT2Config, LlamaConfig, MambaConfig

from rlhf import sft
from rlhf.config import BatchConfig, DataConfig, LoopConfig, ModelConfig, OptimConfig, SftConfig
from rlhf.errors import ModelError
from rlhf.fitting import Site
from rlhf.models.loading import find_source, positions_of
from rlhf.ops.check_inputs import model_limits


@pytest.mark.parametrize(("config", "positions"), [
    (GPT2Config(n_positions=32), 32), (LlamaConfig(max_position_embeddings=16), 16), (BloomConfig(), None), (MambaConfig(), None)])
def test_positions_of_a_configuration(config, positions):
    assert positions_of(config) == positions


def test_a_run_with_a_row_too_long_for_the_model_does_not_start(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", "gpt2")
    assert model_limits(find_source(model)).positions == 64
    rows = [{"prompt": "w1 w2", "response": "w3 " * length} for length in (5, 90)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    site = Site(folder=tmp_path, name="sft", model=ModelConfig(name=model), seed=0, start=None, inputs={}, console=Console(quiet=True))
    config = SftConfig(data=DataConfig(train=str(tmp_path / "rows.jsonl"), template="plain", max_length=512, holdout_percent=0),
                       optim=OptimConfig(learning_rate=1e-3), batch=BatchConfig(per_step=1, per_microbatch=1), loop=LoopConfig(max_steps=1))
    with pytest.raises(ModelError, match=r"the longest row has 93 tokens, .*model has 64 positions\. Lower data\.max_length to 64"):
        sft.train(config, site)
