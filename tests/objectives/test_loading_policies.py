"""Loading and saving: each method trains what it should, comes back from disk as it was, and half-fitting starts are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import IA3Config, PeftModel, get_peft_model
from peft import LoraConfig as PeftLoraConfig
from safetensors.torch import load_file, save_file
from tiny_policies import TOKENS, VOCABULARY, load, logits_of, run_python, saved, step, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification, PreTrainedModel

from rlhf.config import LoraConfig, Method
from rlhf.errors import ModelError
from rlhf.models.inspection import trainable_report, untrained_adapters
from rlhf.models.loading import find_source, generation_pad_id, load_tokenizer, save_policy

METHODS: tuple[Method, ...] = ("full", "lora", "qlora", "dora")
ADAPTERS: tuple[Method, ...] = ("lora", "qlora", "dora")
OLD_NAME_IN_PEFT = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def state(model: PreTrainedModel | PeftModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
@pytest.mark.parametrize("method", METHODS)
def test_a_step_moves_every_trainable_tensor_and_nothing_else(tmp_path: Path, family: str, method: Method) -> None:
    policy = load(saved(tmp_path / "base", family), method)
    trainable = {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    before = state(policy.model)
    step(policy.model, steps=2)     # the first step of an adapter leaves A where it is, because B is zero
    after = state(policy.model)
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    if method == "full":
        untied = {name for name, _ in policy.model.named_parameters()}
        assert trainable == untied and moved & untied == untied
    else:
        assert moved == trainable
        assert all(".lora_" in name for name in trainable)
        assert untrained_adapters(policy.model) == []


@pytest.mark.parametrize("method", ADAPTERS)
def test_all_linear_reaches_each_linear_layer_but_the_head(tmp_path: Path, method: Method) -> None:
    model = load(saved(tmp_path / "base"), method).model
    adapted = {name.split(".lora_A.")[0].removeprefix("base_model.model.") for name, _ in model.named_parameters() if ".lora_A." in name}
    attention = {f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qkvo"}
    assert adapted == attention | {f"model.layers.{layer}.mlp.{name}_proj" for layer in (0, 1) for name in ("gate", "up", "down")}


def test_a_head_that_is_targeted_is_trained_and_saved(tmp_path: Path) -> None:
    policy = load(saved(tmp_path / "base"), lora=LoraConfig(targets=("q_proj", "lm_head")))
    step(policy.model)
    save_policy(policy, tmp_path / "adapter")
    assert load_file(tmp_path / "adapter" / "adapter_model.safetensors")["base_model.model.lm_head.lora_B.weight"].abs().max() > 0


def test_a_new_adapter_changes_nothing_and_depends_on_the_seed_alone(tmp_path: Path) -> None:
    base = saved(tmp_path / "base")
    torch.manual_seed(11)
    first = load(base, seed=3).model
    torch.manual_seed(12)
    again, other = load(base, seed=3).model, load(base, seed=4).model
    assert torch.equal(logits_of(first), logits_of(tiny_model("llama")))
    factors = [{name: parameter for name, parameter in model.named_parameters() if ".lora_A." in name} for model in (first, again, other)]
    assert all(torch.equal(factors[0][name], factors[1][name]) for name in factors[0])
    assert not any(torch.equal(factors[0][name], factors[2][name]) for name in factors[0])
    assert len({tuple(tensor.flatten()[:4].tolist()) for tensor in factors[0].values()}) == len(factors[0])     # no two modules alike


@pytest.mark.parametrize("method", METHODS)
def test_loading_leaves_the_global_random_state_alone(tmp_path: Path, method: Method) -> None:
    base = saved(tmp_path / "base")
    before = torch.get_rng_state()
    load(base, method)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_new_process_gets_the_same_logits_from_each_saved_folder(tmp_path: Path) -> None:
    """Full models with plain transformers, adapters with plain PEFT; the 4-bit base of QLoRA is quantised again the same way."""
    for family in ("llama", "gpt2", "qwen2"):
        base = saved(tmp_path / family, family)
        for method in METHODS:
            policy = load(base, method)
            step(policy.model)
            out = tmp_path / f"{family}-{method}"
            save_policy(policy, out)
            torch.save(logits_of(policy.model), out / "logits.pt")
            assert (logits_of(policy.model) - logits_of(tiny_model(family))).abs().max() > 1e-3     # the step was worth saving
    torch.save(TOKENS, tmp_path / "tokens.pt")
    report = run_python("""if True:
        import sys, torch
        from pathlib import Path
        from peft import AutoPeftModelForCausalLM
        from transformers import AutoModelForCausalLM
        from rlhf.config import ModelConfig
        from rlhf.models.loading import load_policy
        folder = Path(sys.argv[1])
        for out in sorted(path.parent for path in folder.glob("*/logits.pt")):
            if out.name.endswith("full"):
                model = AutoModelForCausalLM.from_pretrained(out)
            elif out.name.endswith("qlora"):
                model = load_policy(ModelConfig(name=str(out)), method="qlora", start=None, seed=99).model
            else:
                model = AutoPeftModelForCausalLM.from_pretrained(out)
            with torch.no_grad():
                logits = model.eval()(input_ids=torch.load(folder / "tokens.pt")).logits
            print(out.name, (logits - torch.load(out / "logits.pt")).abs().max().item())
        """, str(tmp_path))
    differences = {line.split()[0]: float(line.split()[1]) for line in report.splitlines()}
    assert len(differences) == 12
    assert {name: difference for name, difference in differences.items() if difference > 1e-6} == {}


@pytest.mark.parametrize("method", ADAPTERS)
def test_a_saved_adapter_is_continued_and_stays_trainable(tmp_path: Path, method: Method) -> None:
    base = saved(tmp_path / "base")
    policy = load(base, method)
    step(policy.model)
    save_policy(policy, tmp_path / "sft")
    continued = load("unused", method, start=str(tmp_path / "sft"), seed=5)
    assert torch.equal(logits_of(continued.model), logits_of(policy.model))
    assert continued.base == str(Path(base).resolve()) and continued.continues_adapter
    assert trainable_report(continued.model).trainable == trainable_report(policy.model).trainable > 0
    step(continued.model)
    assert not torch.equal(logits_of(continued.model), logits_of(policy.model))


@pytest.mark.parametrize("method", ADAPTERS)
def test_full_training_starts_from_the_merged_adapter(tmp_path: Path, method: Method) -> None:
    policy = load(saved(tmp_path / "base"), method)
    step(policy.model)
    save_policy(policy, tmp_path / "sft")
    merged = load("unused", "full", start=str(tmp_path / "sft"))
    torch.testing.assert_close(logits_of(merged.model), logits_of(policy.model), atol=1e-4, rtol=0)
    assert not any("lora" in name for name, _ in merged.model.named_parameters())
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in merged.model.parameters())
    save_policy(merged, tmp_path / "full")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "full")
    torch.testing.assert_close(logits_of(reloaded), logits_of(merged.model), atol=1e-6, rtol=0)


def test_adapters_are_float32_on_a_half_precision_base_that_stays_as_it_is(tmp_path: Path) -> None:
    for method in ADAPTERS:
        model = load(saved(tmp_path / method), method, dtype="bfloat16").model
        dtypes = {(".lora_" in row.name, row.dtype) for row in trainable_report(model).rows}
        assert dtypes == {(True, "float32"), (False, "bfloat16")} | ({(False, "uint8")} if method == "qlora" else set())


def test_activation_checkpointing_changes_memory_not_gradients(tmp_path: Path) -> None:
    base = saved(tmp_path / "base")
    gradients = []
    for checkpointing in (False, True):
        model = load(base, "qlora", activation_checkpointing=checkpointing).model.train()
        counter = _count_calls(model)
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad})
        assert counter == [2 if checkpointing else 1]
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def _count_calls(model: PeftModel) -> list[int]:
    calls = [0]

    def count(*_: object) -> None:
        calls[0] += 1
    model.get_base_model().model.layers[0].mlp.register_forward_pre_hook(count)
    return calls


def test_a_report_counts_packed_weights_as_the_weights_they_stand_for(tmp_path: Path) -> None:
    base = saved(tmp_path / "base")
    frozen = trainable_report(load(base, "full").model)
    packed = trainable_report(load(base, "qlora").model)
    assert frozen.trainable == frozen.total == sum(parameter.numel() for parameter in tiny_model("llama").parameters())
    # rank 16: an adapter has 16 * (in + out) weights; two layers with q, o, k, v and gate, up, down
    assert packed.trainable == 2 * 16 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    assert packed.total == frozen.total + packed.trainable


def test_the_cache_is_off_in_training_and_on_in_what_is_saved(tmp_path: Path) -> None:
    policy = load(saved(tmp_path / "base"), "full")
    assert policy.model.config.use_cache is False
    save_policy(policy, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["use_cache"] is True


# --- starts that must be refused ---------------------------------------------------------------------------------------------------


def adapter(folder: Path, base: str, method: Method = "lora") -> Path:
    policy = load(base, method)
    step(policy.model)
    save_policy(policy, folder)
    return folder


def edit_weights(folder: Path, change: object) -> None:
    path = folder / "adapter_model.safetensors"
    save_file(change({name: tensor.clone() for name, tensor in load_file(path).items()}), path)    # type: ignore[operator]


@pytest.mark.parametrize(("change", "message"), [
    (lambda weights: {f"other.{name}": tensor for name, tensor in weights.items()}, "0 of 28 tensors would be loaded"),
    (lambda weights: dict(list(weights.items())[1:]), "1 missing"),
    (lambda weights: {**weights, "base_model.model.score.weight": torch.ones(1, 64)}, "1 unexpected, for example base_model.model.score"),
    (lambda weights: {name: torch.empty(0) for name in weights}, "28 tensors have another shape"),
])
def test_an_adapter_that_fits_by_half_is_refused(tmp_path: Path, change: object, message: str) -> None:
    folder = adapter(tmp_path / "sft", saved(tmp_path / "base"))
    edit_weights(folder, change)
    for method in ("lora", "full"):
        with pytest.raises(ModelError, match=message):
            load("unused", method, start=str(folder))   # type: ignore[arg-type]


def test_an_adapter_on_a_base_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "sft", saved(tmp_path / "base"))
    wide = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
                                                        num_attention_heads=4, num_key_value_heads=2))
    wide.save_pretrained(tmp_path / "base")
    with pytest.raises(ModelError, match=r"down_proj.lora_B.weight is \[64, 16\], the base needs \[128, 16\]"):
        load("unused", start=str(folder))


def test_an_adapter_whose_base_or_weights_are_gone_is_refused(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "sft", saved(tmp_path / "base"))
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(ModelError, match=r"names the base .*base, which does not exist"):
        load("unused", start=str(folder))
    (tmp_path / "moved").rename(tmp_path / "base")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match="weights are missing"):
        load("unused", start=str(folder))
    (folder / "adapter_model.safetensors").write_bytes(b"\x10torn")
    with pytest.raises(ModelError, match="cannot be read"):
        load("unused", start=str(folder))


@pytest.mark.parametrize(("method", "lora", "message"), [
    ("lora", LoraConfig(r=8), "lora.r is 8, the adapter has 16"),
    ("lora", LoraConfig(alpha=16), "lora.alpha is 16, the adapter has 32"),
    ("dora", LoraConfig(), "method is dora, the adapter has lora or qlora"),
    ("lora", LoraConfig(targets=("q_proj",)), "means other modules"),
])
def test_a_continued_adapter_and_the_recipe_must_agree(tmp_path: Path, method: Method, lora: LoraConfig, message: str) -> None:
    folder = adapter(tmp_path / "sft", saved(tmp_path / "base"))
    with pytest.raises(ModelError, match=message):
        load("unused", method, start=str(folder), lora=lora)


def test_the_dropout_of_a_continued_adapter_is_the_recipes(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "sft", saved(tmp_path / "base"))
    model = load("unused", start=str(folder), lora=LoraConfig(dropout=0.25)).model
    assert {module.p for name, module in model.named_modules() if name.endswith("lora_dropout.default")} == {0.25}


def test_an_unknown_target_is_named_with_those_that_come_close(tmp_path: Path) -> None:
    base = saved(tmp_path / "base")
    with pytest.raises(ModelError, match=r"no linear layer named 'q_porj'; did you mean .*q_proj"):
        load(base, lora=LoraConfig(targets=("k_proj", "q_porj")))
    with pytest.raises(ModelError, match="shares its weights with the input embedding"):
        load(saved(tmp_path / "tied", "qwen2"), lora=LoraConfig(targets=("lm_head",)))


def test_a_checkpoint_of_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    """A reward model has no language-model head: transformers would start one at random, and lose the score head."""
    config = LlamaConfig.from_pretrained(saved(tmp_path / "base"), num_labels=1)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "reward")
    tiny_tokenizer().save_pretrained(tmp_path / "reward")
    with pytest.raises(ModelError, match=r"1 missing keys, for example lm_head.weight; 1 unexpected keys, for example score.weight"):
        load(str(tmp_path / "reward"), "full")


def test_a_quantised_base_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="is quantised already"):
        load(str(tmp_path / "base"), "full")


def test_folders_that_hold_no_model_say_what_they_hold(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no such folder"):
        load(str(tmp_path / "nowhere"))
    (tmp_path / "gguf").mkdir()
    with pytest.raises(ModelError, match="is no model and no adapter"):
        load(str(tmp_path / "gguf"))
    (tmp_path / "gguf" / "small.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"holds small.gguf .*gguf_file='small.gguf'"):
        load(str(tmp_path / "gguf"))


def test_the_embedding_is_never_resized_for_a_larger_tokenizer(tmp_path: Path) -> None:
    base = saved(tmp_path / "base")
    tiny_tokenizer(words=VOCABULARY + 1).save_pretrained(base)
    with pytest.raises(ModelError, match=f"ids up to {VOCABULARY}, the embedding of .* has {VOCABULARY} rows"):
        load(base, "full")
    tiny_tokenizer(words=VOCABULARY - 10).save_pretrained(base)     # rows to spare are usual
    assert load(base, "full").model.get_input_embeddings().weight.shape[0] == VOCABULARY


@OLD_NAME_IN_PEFT
def test_an_adapter_of_another_kind_is_refused(tmp_path: Path) -> None:
    model = get_peft_model(tiny_model("llama"), IA3Config(task_type="CAUSAL_LM"))
    model.peft_config["default"].base_model_name_or_path = saved(tmp_path / "base")
    model.save_pretrained(tmp_path / "ia3")
    with pytest.raises(ModelError, match="IA3 adapter"):
        load("unused", start=str(tmp_path / "ia3"))


@OLD_NAME_IN_PEFT
def test_an_adapter_made_by_plain_peft_is_continued(tmp_path: Path) -> None:
    base = saved(tmp_path / "base")
    settings = PeftLoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj"])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    step(model)
    model.save_pretrained(tmp_path / "peft")
    policy = load("unused", start=str(tmp_path / "peft"), lora=LoraConfig(r=4, alpha=8, targets="q_proj"))
    assert torch.equal(logits_of(policy.model), logits_of(model))
    assert policy.tokenizer.chat_template == tiny_tokenizer().chat_template     # the base's: this folder has none


@pytest.mark.parametrize(("trained_as", "continued_as"), [("qlora", "lora"), ("lora", "qlora")])
def test_an_adapter_moves_between_4_bit_and_transposed_layers(tmp_path: Path, trained_as: Method, continued_as: Method) -> None:
    """GPT-2's layers hold their weights transposed, the 4-bit ones that stand for them do not."""
    policy = load(saved(tmp_path / "base", "gpt2"), trained_as)
    step(policy.model, steps=3)
    save_policy(policy, tmp_path / "sft")
    other = logits_of(load("unused", continued_as, start=str(tmp_path / "sft")).model)
    quantisation_error = (other - logits_of(policy.model)).abs().mean()
    assert quantisation_error < 0.3 * (logits_of(tiny_model("gpt2")) - logits_of(policy.model)).abs().mean()


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_the_tokenizer_in_the_folder_is_the_one_that_is_used(tmp_path: Path, family: str) -> None:
    """AutoTokenizer would put the qwen2 family's own class over it, which turns every text into no tokens and adds a pad token."""
    tokenizer = load_tokenizer(find_source(saved(tmp_path / "base", family)))
    assert tokenizer("w5 w17")["input_ids"] == [5, 17] and len(tokenizer) == VOCABULARY


def test_a_missing_pad_token_stays_missing_and_generation_fills_with_the_end_token(tmp_path: Path) -> None:
    tokenizer = load(saved(tmp_path / "base")).tokenizer
    assert tokenizer.pad_token_id is None and generation_pad_id(tokenizer) == 0
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="neither a pad nor an end-of-sequence token"):
        generation_pad_id(tokenizer)


def test_a_relative_base_is_found_from_another_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "runs" / "sft" / "model")
    monkeypatch.chdir(tmp_path)
    save_policy(load("runs/sft/model"), Path("runs/dpo/model"))
    monkeypatch.chdir("/")
    assert find_source(str(tmp_path / "runs/dpo/model")).base == str((tmp_path / "runs/sft/model").resolve())
