"""Responses of policies: batches, order and padding do not matter; greedy is the argmax, samples have the model's probabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_policies import prompts, tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM, TemperatureLogitsWarper, TopPLogitsWarper

from rlhf.data.templates import Template, template_for
from rlhf.errors import ConfigError, ModelError
from rlhf.progress import SilentBar
from rlhf.records import Prompt
from rlhf.rollout import Continuation, Response, continued, draw_tokens, generate_responses, number_of, sample_responses


def template() -> Template:
    return template_for(tiny_tokenizer(), "plain")


def respond(family: str, batch: int, *, count: int = 16, max_new_tokens: int = 9) -> list[Response]:
    return generate_responses(tiny_model(family), template(), prompts(count), max_new_tokens=max_new_tokens, batch=batch)


def model_that_says(logits: dict[int, float]) -> LlamaForCausalLM:
    """Whatever it is given, these are the logits of the next token; all others are -99."""
    model = tiny_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.fill_(1.0)      # every state is a vector of 64 ones
        model.lm_head.weight.fill_(-99.0 / 64)
        for token, logit in logits.items():
            model.lm_head.weight[token].fill_(logit / 64)
    return model


# ---- greedy ----

@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_one_at_a_time_or_all_at_once(family: str) -> None:
    alone = respond(family, 1)
    assert len({response.text for response in alone}) > 4
    assert respond(family, 16) == alone
    assert respond(family, 5) == alone


def test_greedy_is_the_argmax_of_each_step() -> None:
    model, plain, prompt = tiny_model("llama"), template(), prompts(4)[3]
    ids = list(plain.prompt_ids(prompt))
    start = len(ids)
    with torch.no_grad():
        while len(ids) < start + 6 and ids[-1] not in plain.stop_ids:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    (response,) = generate_responses(model, plain, [prompt], max_new_tokens=6, batch=1)
    assert response.text == plain.decode_response(ids[start:])
    assert response.tokens == len(ids) - start


def test_settings_the_model_brings_along_are_not_used() -> None:
    model, plain = tiny_model("llama"), template()
    as_it_was = generate_responses(model, plain, prompts(8), max_new_tokens=9, batch=4)
    brought = GenerationConfig(do_sample=True, temperature=5.0, repetition_penalty=9.0, eos_token_id=7)
    model.generation_config = brought
    assert generate_responses(model, plain, prompts(8), max_new_tokens=9, batch=4) == as_it_was
    assert model.generation_config is brought


def test_a_response_that_was_stopped_by_the_limit_is_unfinished() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight[0].fill_(0.0)
    never = generate_responses(model, template(), prompts(6), max_new_tokens=3, batch=3)
    assert all(response.tokens == 3 or response.finished for response in never) and not all(response.finished for response in never)


def test_an_end_token_ends_the_response_and_counts_as_one_token() -> None:
    model = model_that_says({0: 9.0})
    assert generate_responses(model, template(), prompts(3), max_new_tokens=5, batch=2) == [Response("", 1, True)] * 3


def test_a_prompt_that_leaves_no_room_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"60 tokens; with max_new_tokens=5 .* the 64 positions"):
        generate_responses(tiny_model("gpt2"), template(), [Prompt.of_text("w5 " * 60)], max_new_tokens=5, batch=1)


def test_no_prompts_no_responses() -> None:
    assert generate_responses(tiny_model("llama"), template(), [], max_new_tokens=5, batch=4) == []


# ---- samples ----

def sample(family: str, asked: Sequence[Prompt], batch: int, *, count: int = 4, temperature: float = 1.0, top_p: float = 1.0, seed: int = 0,
           max_new_tokens: int = 5) -> list[list[Response]]:
    return sample_responses(tiny_model(family), template(), asked, count=count, temperature=temperature, top_p=top_p, seed=seed,
                            max_new_tokens=max_new_tokens, batch=batch)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_sample_is_the_same_in_every_batch_and_order(family: str) -> None:
    asked = prompts(8)
    alone = sample(family, asked, 1)
    assert sample(family, asked, 8) == alone
    assert sample(family, asked, 32) == alone
    assert sample(family, asked[::-1], 7) == alone[::-1]
    assert sample(family, asked[3:4], 4) == alone[3:4]


def test_another_seed_gives_other_samples() -> None:
    asked = prompts(8)
    assert all(one != other for one, other in zip(sample("llama", asked, 32), sample("llama", asked, 32, seed=1), strict=True))


def test_more_draws_begin_with_the_same_ones() -> None:
    asked = prompts(6)
    few, many = sample("llama", asked, 32, count=2), sample("llama", asked, 32, count=6)
    assert [responses[:2] for responses in many] == few


def test_at_temperature_zero_there_is_the_greedy_response() -> None:
    greedy = respond("llama", 8, count=8)
    assert sample("llama", prompts(8), 8, temperature=0.0, max_new_tokens=9) == [[response] for response in greedy]
    cold = sample("llama", prompts(8), 8, count=1, temperature=1e-4, max_new_tokens=9)      # what it converges to
    assert cold == [[response] for response in greedy]


def test_texts_are_distinct_and_a_prompt_may_get_fewer() -> None:
    coin = model_that_says({0: 0.0, 5: 0.0})
    asked = prompts(30)
    found = sample_responses(coin, template(), asked, count=3, temperature=1.0, top_p=1.0, max_new_tokens=1, batch=64, seed=0)
    assert all({response.text for response in responses} == {"", "w5"} and len(responses) == 2 for responses in found)


def test_what_was_drawn_again_has_numbers_of_its_own() -> None:
    """Rare second text: p = 0.1. Two draws miss it in 82 % of prompts, two draws and eight rounds more of one in 0.9^10 = 35 %."""
    rare = model_that_says({0: 9.0, 5: 9.0 - 2.1972})
    asked = [Prompt.of_text(f"w{2 + row % 90} w{2 + row // 90}") for row in range(400)]
    found = sample_responses(rare, template(), asked, count=2, temperature=1.0, top_p=1.0, max_new_tokens=1, batch=128, seed=0)
    alone = sum(len(responses) == 1 for responses in found)
    assert 100 < alone < 180     # 140, standard deviation 9.5


def chi_square(found: Counter[int], expected: Tensor) -> float:
    """Pearson's statistic; cells that expect fewer than 5 are one cell."""
    rare = expected < 5
    cells = [(found[token], float(expected[token])) for token in range(len(expected)) if not rare[token]]
    cells.append((sum(found[token] for token in range(len(expected)) if rare[token]), float(expected[rare].sum())))
    return sum((seen - due) ** 2 / due for seen, due in cells if due > 0)


def chi_square_limit(cells: int) -> float:
    """The 99.99 % quantile for cells - 1 degrees of freedom (Wilson & Hilferty 1931): 61.7 for 25, by table 61.6 (+-0.3 %)."""
    free = cells - 1
    return free * (1 - 2 / (9 * free) + 3.719 * (2 / (9 * free)) ** 0.5) ** 3


def first_tokens(draws: int, *, temperature: float, top_p: float) -> tuple[Counter[int], Tensor]:
    """First tokens of as many draws from one prompt, and the model's logits there."""
    model, plain = tiny_model("llama"), template()
    ids = plain.prompt_ids(prompts(4)[3])
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    rows = [Continuation(ids, f"draw {number}") for number in range(draws)]
    responses = continued(model, plain, rows, temperature=temperature, top_p=top_p, max_new_tokens=1, batch=1000, bar=SilentBar())
    tokens = Counter(0 if not response.text else plain.encode([response.text])[0][0] for response in responses)
    return tokens, logits


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_frequencies_are_the_softmax_probabilities(temperature: float) -> None:
    found, logits = first_tokens(6000, temperature=temperature, top_p=1.0)
    expected = 6000 * (logits.double() / temperature).softmax(-1)
    cells = int((expected >= 5).sum()) + 1
    assert cells > 20
    assert chi_square(found, expected) < chi_square_limit(cells)
    assert chi_square(found, expected.roll(1)) > 10 * chi_square_limit(cells)     # the test can fail


def test_with_top_p_only_the_likeliest_are_drawn_by_their_share() -> None:
    """Probabilities 1/2, 1/4, 1/8, 1/8: 0.7 keeps the first two, as 2/3 and 1/3; 0.8 keeps three of them, as 4/7, 2/7, 1/7."""
    logits = torch.tensor([[0.125, 0.25, 0.5, 0.125]], dtype=torch.float64).log()
    numbers = (torch.arange(840, dtype=torch.float64) + 0.5) / 840

    def counts(top_p: float) -> list[int]:
        return torch.bincount(draw_tokens(logits.expand(840, 4), numbers, temperature=1.0, top_p=top_p), minlength=4).tolist()

    assert counts(1.0) == [105, 210, 420, 105]
    assert counts(0.7) == [0, 280, 560, 0]
    assert counts(0.8) == [120, 240, 480, 0]
    assert counts(0.01) == [0, 0, 840, 0]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.05, 0.99), st.floats(0.3, 3.0))
def test_the_kept_tokens_are_those_of_transformers(seed: int, top_p: float, temperature: float) -> None:
    logits = 3 * torch.randn(1, 12, generator=torch.Generator().manual_seed(seed))
    warped = TopPLogitsWarper(top_p)(None, TemperatureLogitsWarper(temperature)(None, logits))
    numbers = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    drawn = torch.bincount(draw_tokens(logits.expand(20_000, 12), numbers, temperature=temperature, top_p=top_p), minlength=12) / 20_000
    torch.testing.assert_close(drawn, warped[0].softmax(-1), rtol=0, atol=1.01e-4)      # each stretch is met to within one or two numbers


def test_numbers_are_uniform_and_those_of_neighbours_unrelated() -> None:
    pairs = Counter(4 * int(4 * number_of(f"0/p/{draw}/0")) + int(4 * number_of(f"0/p/{draw}/1")) for draw in range(8000))
    assert chi_square(pairs, torch.full((16,), 500.0)) < chi_square_limit(16)


def test_the_ends_of_the_range_draw_possible_tokens() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).expand(2, 4)
    assert draw_tokens(logits, torch.tensor([0.0, 1 - 2.0**-48], dtype=torch.float64), temperature=1.0, top_p=1.0).tolist() == [1, 2]


@pytest.mark.parametrize("wrong", [{"count": 0}, {"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"got .*{next(iter(wrong))}={next(iter(wrong.values()))}"):
        sample("llama", prompts(1), 1, **wrong)  # type: ignore[arg-type]
