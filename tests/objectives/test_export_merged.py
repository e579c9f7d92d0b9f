"""An exported model is the adapter's function in a folder that needs neither peft nor bitsandbytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_policies import TOKENS, logits_of, run_python, saved, step, tiny_model
from transformers import AutoModelForCausalLM

from rlhf.config import Dtype, Method, ModelConfig
from rlhf.errors import ModelError, StorageError
from rlhf.models.export import export_merged
from rlhf.models.loading import Policy, load_policy, save_policy


def trained(folder: Path, method: Method, *, family: str = "llama", dtype: Dtype = "float32") -> Policy:
    policy = load_policy(ModelConfig(name=saved(folder / "base", family), dtype=dtype), method=method, start=None, seed=0)
    step(policy.model, steps=3)
    save_policy(policy, folder / "adapter")
    return policy


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
@pytest.mark.parametrize("method", ["lora", "dora", "qlora"])
def test_the_exported_model_says_what_base_and_adapter_said(tmp_path: Path, family: str, method: Method) -> None:
    policy = trained(tmp_path, method, family=family)
    report = export_merged(tmp_path / "adapter", tmp_path / "merged")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    change = (logits_of(exported) - logits_of(policy.model)).abs().max().item()
    moved = (logits_of(policy.model) - logits_of(tiny_model(family))).abs().max().item()
    assert change < 1e-4 < 0.1 < moved
    assert report.mean_logit_change <= report.largest_logit_change < 1e-4
    assert report.dequantised == (method == "qlora") and report.dtype == "float32"
    assert exported.config.to_dict().get("quantization_config") is None and exported.config.use_cache


def test_a_qlora_adapter_is_not_merged_into_weights_it_never_saw(tmp_path: Path) -> None:
    """Merging into the original base instead of the dequantised one is off by the quantisation error, which the bound catches."""
    trained(tmp_path, "qlora")
    note = tmp_path / "adapter" / "policy.json"
    settings = json.loads(note.read_text())
    right = export_merged(tmp_path / "adapter", tmp_path / "right")
    note.write_text(json.dumps(settings | {"method": "lora"}))
    export_merged(tmp_path / "adapter", tmp_path / "wrong")
    right_logits, wrong_logits = (logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / name)) for name in ("right", "wrong"))
    assert right.largest_logit_change < 1e-4 < 0.05 < (right_logits - wrong_logits).abs().max()


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_half_precision_is_reported_and_bounded(tmp_path: Path, method: Method) -> None:
    trained(tmp_path, method, dtype="bfloat16")
    report = export_merged(tmp_path / "adapter", tmp_path / "merged")
    assert report.dtype == "bfloat16" and 0 < report.largest_logit_change < 0.2 < report.bound
    assert {tensor.dtype for tensor in load_file(tmp_path / "merged" / "model.safetensors").values()} == {torch.bfloat16}
    whole = export_merged(tmp_path / "adapter", tmp_path / "whole", dtype="float32")
    assert {tensor.dtype for tensor in load_file(tmp_path / "whole" / "model.safetensors").values()} == {torch.float32}
    assert whole.largest_logit_change < report.largest_logit_change or method == "qlora"


def test_above_the_bound_nothing_is_written(tmp_path: Path) -> None:
    trained(tmp_path, "lora", dtype="bfloat16")
    with pytest.raises(ModelError, match=r"changes a logit by .* allowed is 1e-09"):
        export_merged(tmp_path / "adapter", tmp_path / "out" / "merged", max_change=1e-9)
    assert list((tmp_path / "out").iterdir()) == []


def test_an_adapter_that_gives_no_numbers_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, "lora")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    weights = load_file(path)
    first = next(iter(weights))
    save_file(weights | {first: torch.full_like(weights[first], float("nan"))}, path)
    with pytest.raises(ModelError, match=r"infinities or NaNs in 1 tensors, for example .*lora_"):
        export_merged(tmp_path / "adapter", tmp_path / "merged")


def test_only_an_adapter_is_exported_and_only_into_a_new_folder(tmp_path: Path) -> None:
    trained(tmp_path, "lora")
    with pytest.raises(ModelError, match="is a model, not an adapter"):
        export_merged(tmp_path / "base", tmp_path / "merged")
    with pytest.raises(StorageError, match="exists already"):
        export_merged(tmp_path / "adapter", tmp_path / "base")
    with pytest.raises(ModelError, match="there is no such folder"):
        export_merged(tmp_path / "nowhere", tmp_path / "merged")


def test_the_export_loads_where_peft_and_bitsandbytes_cannot_be_imported(tmp_path: Path) -> None:
    trained(tmp_path, "qlora")
    export_merged(tmp_path / "adapter", tmp_path / "merged")
    torch.save(TOKENS, tmp_path / "tokens.pt")
    run_python("""if True:
        import sys, torch
        from pathlib import Path
        sys.modules["peft"] = sys.modules["bitsandbytes"] = None      # importing either raises
        from transformers import AutoModelForCausalLM, AutoTokenizer
        folder = Path(sys.argv[1])
        model = AutoModelForCausalLM.from_pretrained(folder / "merged").eval()
        with torch.no_grad():
            torch.save(model(input_ids=torch.load(folder / "tokens.pt")).logits, folder / "logits.pt")
        assert AutoTokenizer.from_pretrained(folder / "merged").chat_template
        """, str(tmp_path))
    exported = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), exported, atol=1e-6, rtol=0)
