"""Packed and padded give the same log-probs and the same gradients in every family, sliding windows and soft-capping included."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from rlhf.errors import ModelError
from rlhf.models.attention import (
    PREFIX_SHARED,
    block_mask,
    choose_layout,
    layout_disagreement,
    packing_obstacle,
    prefix_shared_attention,
)
from rlhf.models.packing import pack, response_logps
from rlhf.records import TokenRun

OLD_NAME_IN_PEFT = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
VOCABULARY, WINDOW = 61, 4
SHARED: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                          "max_position_embeddings": 64, "initializer_range": 0.25, "pad_token_id": None, "bos_token_id": None,
                          "eos_token_id": None}
GROUPED = SHARED | {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.25,
        "bos_token_id": None, "eos_token_id": None}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**GROUPED),
    "qwen2": Qwen2Config(**GROUPED),
    "qwen2 with a window in its second layer": Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": Qwen3Config(**GROUPED),
    "gemma2": Gemma2Config(**GROUPED, sliding_window=WINDOW, attn_logit_softcapping=2.0, final_logit_softcapping=5.0),
    "gemma3": Gemma3TextConfig(**GROUPED, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]),
    "gpt2": GPT2Config(**GPT2, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0),
    "mistral": MistralConfig(**GROUPED, sliding_window=WINDOW),
    "phi3": Phi3Config(**GROUPED),
}


def run_of(prompt: int, *responses: int) -> TokenRun:
    draw = torch.Generator().manual_seed(prompt)
    ids = [tuple(torch.randint(VOCABULARY, (length,), generator=draw).tolist()) for length in (prompt, *responses)]
    return TokenRun(id=str(prompt), prompt=ids[0], responses=tuple(ids[1:]))


RUNS = [run_of(5, 6, 3), run_of(9, 2, 7, 4), run_of(2, 8)]


def model_of(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config))


def logps_and_gradients(model: nn.Module, layout: str) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    result = response_logps(model, pack(RUNS, layout=layout))
    (result.logps * torch.linspace(-1, 2, len(result.logps))).sum().backward()
    return result.token_logps.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_layouts_agree(model: nn.Module) -> None:
    packed, found = logps_and_gradients(model, "packed")
    padded, wanted = logps_and_gradients(model, "padded")
    torch.testing.assert_close(packed, padded, rtol=1e-5, atol=1e-5)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7, name


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_is_padded_in_logps_and_gradients(family):
    model = model_of(FAMILIES[family]).train()
    assert choose_layout(model, "packed")[0] == "packed"
    assert_layouts_agree(model)
    assert layout_disagreement(model) < 1e-4


def test_the_window_of_the_families_above_bites():
    """Else the families with windows would prove nothing."""
    narrow, wide = model_of(FAMILIES["mistral"]), model_of(MistralConfig(**GROUPED, sliding_window=None))
    batch = pack(RUNS, layout="padded")
    assert (response_logps(narrow, batch).logps - response_logps(wide, batch).logps).abs().max() > 0.1


@OLD_NAME_IN_PEFT
@pytest.mark.parametrize("use_dora", [False, True])
def test_adapters_on_and_off(use_dora):
    adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, use_dora=use_dora)
    model = get_peft_model(model_of(FAMILIES["llama"]), adapter)
    base = response_logps(model_of(FAMILIES["llama"]), pack(RUNS, layout="padded")).logps
    assert choose_layout(model, "packed")[0] == "packed"
    assert_layouts_agree(model)
    with model.disable_adapter():
        off = response_logps(model, pack(RUNS, layout="packed")).logps
    torch.testing.assert_close(off, base, rtol=1e-5, atol=1e-5)
    assert (response_logps(model, pack(RUNS, layout="packed")).logps - base).abs().max() > 0.1


@OLD_NAME_IN_PEFT
def test_an_adapter_on_the_head_is_scored():
    model = get_peft_model(model_of(FAMILIES["llama"]), LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False))
    choose_layout(model, "packed")
    batch = pack(RUNS, layout="packed")
    whole, chunked = response_logps(model, batch).logps, response_logps(model, batch, logits_at_once=7 * VOCABULARY).logps
    torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-5)
    with model.disable_adapter():
        assert (response_logps(model, batch, logits_at_once=1).logps - whole).abs().max() > 0.1


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(family, use_reentrant):
    model = model_of(FAMILIES[family]).train()
    choose_layout(model, "packed")
    logps, wanted = logps_and_gradients(model, "packed")
    model.enable_input_require_grads()
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    recomputed, found = logps_and_gradients(model, "packed")
    assert torch.equal(recomputed, logps)
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "mistral"])
def test_generation_and_plain_forwards_are_what_they_were(family):
    model = model_of(FAMILIES[family]).eval()
    ids, mask = torch.randint(VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1)), torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0                                            # padded on the left, as for generation
    settings = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    before, logits = model.generate(ids, **settings), model(input_ids=ids).logits
    choose_layout(model, "packed")
    assert torch.equal(model.generate(ids, **settings), before)
    torch.testing.assert_close(model(input_ids=ids).logits, logits, rtol=1e-4, atol=1e-4)


def test_a_saved_model_does_not_ask_for_this_attention(tmp_path):
    model = model_of(FAMILIES["llama"])
    choose_layout(model, "packed")
    model.save_pretrained(tmp_path)
    assert PREFIX_SHARED not in (tmp_path / "config.json").read_text()


def test_dropout_inside_attention_is_drawn_and_seeded():
    model = model_of(GPT2Config(**GPT2, attn_pdrop=0.4, resid_pdrop=0.0, embd_pdrop=0.0))
    choose_layout(model, "packed")
    batch = pack(RUNS, layout="packed")

    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return response_logps(model.train(), batch).logps

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    many = torch.stack([drawn(seed) for seed in range(200)]).mean(0)
    assert (many - response_logps(model.eval(), batch).logps).abs().max() < 6


def test_sixteen_bits_stay_near_thirty_two():
    model = model_of(FAMILIES["llama"]).eval()
    exact = response_logps(model, pack(RUNS, layout="padded")).token_logps
    model.bfloat16()
    assert choose_layout(model, "packed")[0] == "packed"
    rough = response_logps(model, pack(RUNS, layout="packed")).token_logps
    assert rough.dtype == torch.float32
    assert (rough - exact).abs().mean() < 0.1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 3])
@torch.no_grad()
def test_the_block_mask_for_gpus_gives_what_the_calls_by_run_give(window):
    """FlexAttention trains on a GPU only; its forward runs anywhere. 400 tokens are several blocks of 128."""
    layout = pack([*RUNS, run_of(90, 120, 60), run_of(40, 50)], layout="packed").prefix_layout
    assert layout is not None
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, len(layout.positions), 16, generator=draw) for heads in (4, 2, 2))
    by_run, _ = prefix_shared_attention(nn.Module(), query, key, value, None, sliding_window=window, prefix_layout=layout)
    by_block = flex_attention(query, key, value, block_mask=block_mask(layout, window), enable_gqa=True)
    torch.testing.assert_close(by_block.transpose(1, 2), by_run, rtol=1e-5, atol=1e-5)


def test_attention_with_sinks_is_refused():
    query = torch.randn(1, 2, 3, 8)
    with pytest.raises(ModelError, match="s_aux"):
        prefix_shared_attention(nn.Module(), query, query, query, None, s_aux=torch.zeros(2))


@pytest.mark.parametrize(("config", "reason"), [
    (MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, state_size=4), "recurrent"),
    (GptOssConfig(**GROUPED, num_local_experts=2), "sinks"),
    (BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4), "AttentionInterface"),
    (LlamaConfig(**GROUPED, layer_types=["full_attention", "chunked_attention"]), "chunked_attention"),
])
def test_models_that_cannot_be_packed_fall_back_aloud(config, reason, caplog):
    model = model_of(config)
    before = model.config._attn_implementation
    assert reason in (packing_obstacle(model) or "")
    with caplog.at_level("WARNING"):
        layout, why = choose_layout(model, "auto")
    assert layout == "padded"
    assert reason in why
    assert reason in caplog.text
    with pytest.raises(ModelError, match="layout: packed was asked for"):
        choose_layout(model, "packed")
    assert model.config._attn_implementation == before


def test_a_recurrent_model_is_scored_row_by_row():
    """The fall-back itself: padding on the right does not reach back."""
    model = model_of(MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, state_size=4)).eval()
    with torch.no_grad():
        together = response_logps(model, pack(RUNS, layout="padded")).logps
        alone = torch.cat([response_logps(model, pack([run], layout="padded")).logps for run in RUNS])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


@OLD_NAME_IN_PEFT
def test_prompt_learning_cannot_be_packed():
    model = get_peft_model(model_of(FAMILIES["llama"]), PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    assert "virtual tokens" in (packing_obstacle(model) or "")


def test_a_model_that_loses_the_layout_on_the_way_is_found_out():
    class Forgetful(type(model_of(FAMILIES["llama"]))):
        def forward(self, prefix_layout=None, **inputs):
            return super().forward(**inputs)

    model = Forgetful(copy.deepcopy(FAMILIES["llama"]))
    layout, why = choose_layout(model, "auto")
    assert layout == "padded"
    assert "cannot run it" in why
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_packs_wrongly_is_found_out():
    class Displaced(type(model_of(FAMILIES["llama"]))):
        def forward(self, position_ids=None, **inputs):
            return super().forward(**inputs)                   # positions run on through the row

    torch.manual_seed(0)
    layout, why = choose_layout(Displaced(copy.deepcopy(FAMILIES["llama"])), "auto")
    assert layout == "padded"
    assert "differ" in why


def test_a_window_that_attention_does_not_speak_of_is_found_out():
    """Tiny runs never fill a window of thousands of tokens, so agreement on them proves nothing here."""
    config = LlamaConfig(**GROUPED, sliding_window=4096)
    assert "sliding window of 4096" in choose_layout(model_of(config), "auto")[1]


def test_asked_for_padding_is_given_without_a_look():
    model = model_of(FAMILIES["llama"])
    assert choose_layout(model, "padded") == ("padded", "asked for")
    assert model.config._attn_implementation == "sdpa"
