"""`rlhf check` sees data through the tokenizer that training would use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_policies import VOCABULARY, saved

from rlhf.config import ModelConfig
from rlhf.models.loading import find_source, load_policy
from rlhf.ops.check_inputs import check_stages, model_limits
from rlhf.recipe import load_recipe

RECIPE = """
model: {{name: {model}}}
stages:
  - dpo:
      data: {{train: pairs.jsonl, template: plain, max_length: 32, holdout_percent: 0}}
      optim: {{learning_rate: 1.0e-5}}
"""


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_rows_are_counted_with_the_tokenizer_of_the_policy(tmp_path: Path, family: str) -> None:
    """AutoTokenizer alone would put the qwen2 family's own class over the file, which turns every text into no tokens."""
    model = saved(tmp_path / "model", family)
    (tmp_path / "pairs.jsonl").write_text("".join(
        json.dumps({"prompt": f"w{2 + row} w3 ", "chosen": "w4 w5", "rejected": "w6"}) + "\n" for row in range(10)), encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(model=model), encoding="utf-8")
    (stage,) = check_stages(load_recipe(tmp_path / "recipe.yaml"))
    assert stage.report is not None, stage.error
    assert (stage.ok, stage.report.tokens["train"].kept) == (True, 10)
    assert stage.report.tokens["train"].response_tokens == 10 * (3 + 2)      # each response and its end
    policy = load_policy(ModelConfig(name=model), method="full", start=None, seed=0)
    assert model_limits(find_source(model)).embedding_rows == VOCABULARY == len(policy.model.get_input_embeddings().weight)
