"""The packed layout: written out by hand, and equal to one plain forward per response whatever the neighbours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM

from rlhf.errors import ModelError, ShapeError
from rlhf.models.attention import PREFIX_SHARED
from rlhf.models.packing import PackedBatch, RunShape, causal_lm, pack, response_logps
from rlhf.records import TokenRun

VOCABULARY = 61


def run_of(prompt: int, *responses: int, seed: int = 0) -> TokenRun:
    draw = torch.Generator().manual_seed(1000 * seed + prompt)
    ids = [tuple(torch.randint(1, VOCABULARY, (length,), generator=draw).tolist()) for length in (prompt, *responses)]
    return TokenRun(id=f"{seed}/{prompt}/{responses}", prompt=ids[0], responses=tuple(ids[1:]))


@pytest.fixture
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=1024, initializer_range=0.3))
    model.set_attn_implementation(PREFIX_SHARED)
    return model


TWO = TokenRun(id="a", prompt=(11, 12, 13), responses=((21, 22), (31,)), smoothing=0.25)
ONE = TokenRun(id="b", prompt=(14,), responses=((41, 42, 43),))


def test_the_packed_row_written_out_by_hand():
    batch = pack([TWO, ONE], layout="packed")
    assert batch.input_ids.tolist() == [[11, 12, 13, 21, 22, 31, 14, 41, 42, 43]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1, 2, 3]]
    assert batch.attention_mask is None
    assert batch.runs == (RunShape(3, (2, 1)), RunShape(1, (3,)))
    assert batch.targets.tolist() == [21, 22, 31, 41, 42, 43]
    assert batch.source.tolist() == [2, 3, 2, 6, 7, 8]       # token 2 ends the prompt: it predicts 21 and 31
    assert batch.response.tolist() == [0, 0, 1, 2, 2, 2]
    assert batch.lengths.tolist() == [2, 1, 3]
    assert (batch.tokens, batch.responses, batch.ids) == (10, 3, ("a", "b"))
    assert batch.smoothing.tolist() == [0.25, 0.0]


def test_the_padded_rows_written_out_by_hand():
    batch = pack([TWO, ONE], layout="padded")
    assert batch.input_ids.tolist() == [[11, 12, 13, 21, 22], [11, 12, 13, 31, 0], [14, 41, 42, 43, 0]]
    assert batch.attention_mask is not None
    assert batch.attention_mask.sum(1).tolist() == [5, 4, 4]
    assert batch.source.tolist() == [2, 3, 7, 10, 11, 12]
    assert batch.targets.tolist() == [21, 22, 31, 41, 42, 43]
    assert batch.tokens == 15


def test_who_sees_whom_written_out_by_hand():
    layout = pack([TWO, ONE], layout="packed").prefix_layout
    assert layout is not None
    index = torch.arange(10)
    rows = ["".join(".x"[seen] for seen in row) for row in layout.visible(index[:, None], index[None, :], None).tolist()]
    assert rows == ["x.........", "xx........", "xxx.......",      # prompt 11 12 13
                    "xxxx......", "xxxxx.....",                    # 21 22
                    "xxx..x....",                                  # 31 sees the prompt and itself, not 21 22
                    "......x...", "......xx..", "......xxx.", "......xxxx"]
    windowed = ["".join(".x"[seen] for seen in row) for row in layout.visible(index[:, None], index[None, :], 2).tolist()]
    assert windowed[4] == "...xx....."
    assert windowed[5] == "..x..x...."                             # by position: 31 comes right after 13


def test_nothing_to_pack_is_an_error():
    with pytest.raises(ShapeError, match="at least one run"):
        pack([], layout="packed")


def logps_of(model: LlamaForCausalLM, *runs: TokenRun) -> tuple[Tensor, ...]:
    """Summed log-probs of the responses of each run."""
    with torch.no_grad():
        logps = response_logps(model, pack(runs, layout="packed")).logps
    return torch.split(logps, [len(run.responses) for run in runs])


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_response_logps_are_those_of_a_plain_forward(llama, layout):
    runs = [run_of(5, 4, 7), run_of(1, 1), run_of(9, 2, 3, 6)]
    with torch.no_grad():
        result = response_logps(llama, pack(runs, layout=layout))
        plain = []
        for run in runs:
            for response in run.responses:
                logps = llama(input_ids=torch.tensor([run.prompt + response])).logits[0].log_softmax(-1)
                plain.append(logps[torch.arange(len(run.prompt) - 1, len(run.prompt) + len(response) - 1), torch.tensor(response)])
    torch.testing.assert_close(result.token_logps, torch.cat(plain), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.logps, torch.stack([part.sum() for part in plain]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", range(1, 10))
def test_packed_is_padded_for_one_to_nine_responses(llama, k):
    runs = [run_of(6, *range(1, k + 1)), run_of(3, *range(k, 0, -1))]
    with torch.no_grad():
        packed, padded = (response_logps(llama, pack(runs, layout=layout)) for layout in ("packed", "padded"))
    torch.testing.assert_close(packed.token_logps, padded.token_logps, rtol=1e-5, atol=1e-5)


def test_packed_is_padded_for_long_runs_which_take_two_calls(llama):
    runs = [run_of(200, 150, 70), run_of(150, 90, 120, 80), run_of(300, 200)]
    with torch.no_grad():
        packed, padded = (response_logps(llama, pack(runs, layout=layout)) for layout in ("packed", "padded"))
    torch.testing.assert_close(packed.token_logps, padded.token_logps, rtol=1e-4, atol=1e-4)


def test_a_run_has_the_same_logps_alone_and_in_any_microbatch(llama):
    runs = [run_of(prompt, 3, prompt, seed=prompt) for prompt in range(2, 10)]
    together = logps_of(llama, *runs)
    for run, logps in zip(runs, together, strict=True):
        torch.testing.assert_close(logps_of(llama, run)[0], logps, rtol=1e-6, atol=1e-6)
    pairs = [logps for i in range(0, 8, 2) for logps in logps_of(llama, *runs[i:i + 2])]
    torch.testing.assert_close(torch.cat(pairs), torch.cat(together), rtol=1e-6, atol=1e-6)


def test_changing_one_response_leaves_every_other_alone(llama):
    runs = [run_of(5, 4, 6, 3), run_of(7, 2, 2)]
    first = runs[0]
    changed = TokenRun(id="changed", prompt=first.prompt, responses=(first.responses[0], (7,) * 6, first.responses[2]))
    before, after = torch.cat(logps_of(llama, *runs)), torch.cat(logps_of(llama, changed, runs[1]))
    assert before[1] != after[1]
    assert torch.equal(before[[0, 2, 3, 4]], after[[0, 2, 3, 4]])


def test_padding_ids_are_never_read(llama):
    batch = pack([run_of(5, 4, 9), run_of(2, 1)], layout="padded")
    assert batch.attention_mask is not None
    poisoned = batch.input_ids.masked_fill(~batch.attention_mask, 17)
    with torch.no_grad():
        clean = response_logps(llama, batch).token_logps
        batch.input_ids.copy_(poisoned)
        assert torch.equal(response_logps(llama, batch).token_logps, clean)


def gradients(model: torch.nn.Module, batch: PackedBatch, **options: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs, and the gradient of a sum in which every response has another weight."""
    model.zero_grad()
    logps = response_logps(model, batch, **options).logps
    (logps * torch.linspace(-1, 2, len(logps))).sum().backward()
    return logps.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("frozen_head", [False, True])
def test_the_head_in_chunks_is_the_head_at_once(llama, layout, frozen_head):
    llama.lm_head.weight.requires_grad_(not frozen_head)
    batch = pack([run_of(5, 4, 7), run_of(9, 2, 3, 6)], layout=layout)
    logps, wanted = gradients(llama, batch)
    chunked, found = gradients(llama, batch, logits_at_once=5 * VOCABULARY)
    torch.testing.assert_close(chunked, logps, rtol=1e-5, atol=1e-5)
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-4, atol=1e-5)


GRANITE = GraniteConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                        num_key_value_heads=2, initializer_range=0.3, logits_scaling=3.0)


def test_chunks_follow_a_model_that_scales_its_logits():
    model, batch = GraniteForCausalLM(GRANITE), pack([run_of(5, 4, 7)], layout="padded")
    torch.testing.assert_close(gradients(model, batch, logits_at_once=4 * VOCABULARY)[0], gradients(model, batch)[0], rtol=1e-5, atol=1e-5)


def test_chunks_refuse_a_model_that_changes_its_logits_in_an_unknown_way():
    class Tilted(GraniteForCausalLM):
        def forward(self, **inputs):
            output = super().forward(**inputs)
            output.logits = output.logits + torch.arange(VOCABULARY)
            return output

    with pytest.raises(ModelError, match="cannot be scored in chunks"):
        response_logps(Tilted(GRANITE), pack([run_of(5, 4, 7)], layout="padded"), logits_at_once=1)


def test_no_tensor_of_all_logits_is_alive_when_the_head_is_chunked(llama):
    batch = pack([run_of(8, 40, 40), run_of(8, 40, 40)], layout="packed")
    largest = 0

    class Widest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.ndim and result.shape[-1] == VOCABULARY:
                largest = max(largest, result.numel())
            return result

    with Widest():
        gradients(llama, batch, logits_at_once=16 * VOCABULARY)
    assert largest < 160 * VOCABULARY, "a tensor of R x V appeared"
    assert largest >= 16 * VOCABULARY


def test_the_call_goes_through_the_outermost_module(llama):
    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.calls = llama, 0

        def forward(self, **inputs):
            self.calls += 1
            return self.module(**inputs)

    wrapper, batch = Wrapper(), pack([run_of(5, 4, 7)], layout="packed")
    assert torch.equal(response_logps(wrapper, batch).logps, response_logps(llama, batch).logps)
    assert wrapper.calls == 1
    assert causal_lm(wrapper) is llama


def test_a_module_without_a_head_is_refused():
    with pytest.raises(ModelError, match="AutoModelForCausalLM"):
        causal_lm(torch.nn.Linear(2, 2))


def test_a_batch_moves_as_a_whole():
    batch = pack([TWO, ONE], layout="packed")
    assert batch.prefix_layout is not None
    batch.prefix_layout.masks["kept"] = "from the old device"
    moved = batch.to("meta")
    assert moved.prefix_layout is not None
    tensors = (moved.input_ids, moved.position_ids, moved.source, moved.targets, moved.response, moved.lengths, moved.smoothing,
               moved.prefix_layout.run_of, moved.prefix_layout.segment_of, moved.prefix_layout.positions)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.prefix_layout.masks == {}
    assert moved.runs == batch.runs
    assert pack([TWO], layout="padded").to("meta").attention_mask.device.type == "meta"
