"""Every loss of stock trl.DPOTrainer: value and gradient of all parameters on a batch of its own collator equal ours.

Ours are computed from plain logits of the same ids, so the trainer's fused head, masks, shifting and reference are checked too.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.maths.likelihood import segment_sums, target_logps
from rlhf.maths.losses import PairLogps, combined

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

# trl 1.16 reads the old name of a property that transformers 5.24 renamed
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

BETA, TAU = 0.3, 0.05
WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "red", "big", "slow", "very", "so", "and", "then", "it"]
CASES: dict[str, tuple[dict[str, float], float]] = {     # losses with weights, label smoothing
    "sigmoid": ({"sigmoid": 1.0}, 0.0),                  # TRL's sigmoid does not read label_smoothing
    **{name: ({name: 1.0}, 0.1) for name in ("robust", "exo_pair", "aot", "aot_unpaired")},
    **{name: ({name: 1.0}, 0.0) for name in ("hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop", "sft",
                                             "sigmoid_norm")},
    "combination": ({"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}, 0.0),
}


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def make_model(seed: int, vocabulary: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.12, tie_word_embeddings=False,
                         pad_token_id=0, bos_token_id=None, eos_token_id=1)
    return LlamaForCausalLM(config).eval()


def make_pairs() -> Any:
    """Prompts and responses of unlike lengths, so that padding, masks and normalisation by length all matter."""
    def words(start: int, count: int) -> str:
        return " ".join(WORDS[(start + 5 * i) % len(WORDS)] for i in range(count))
    return datasets.Dataset.from_list([
        {"prompt": words(i, 2 + i), "chosen": " " + words(2 * i + 1, 3 + 2 * i), "rejected": " " + words(3 * i + 2, 9 - i)}
        for i in range(6)])


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """tokenizer, policy, reference, pairs and a folder, shared by the cases; each case trains a copy."""
    tokenizer = make_tokenizer()
    return (tokenizer, make_model(0, len(tokenizer)), make_model(1, len(tokenizer)), make_pairs(), tmp_path_factory.mktemp("trl"))


def trl_loss_and_gradients(stage: Any, losses: Mapping[str, float], smoothing: float) -> tuple[Any, Tensor, dict[str, Tensor]]:
    tokenizer, policy, reference, pairs, folder = stage
    arguments = trl.DPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, per_device_train_batch_size=len(pairs),
        activation_checkpointing=False, max_length=None, loss_type=list(losses), loss_weights=list(losses.values()), beta=BETA,
        label_smoothing=smoothing, discopop_tau=TAU)
    trainer = trl.DPOTrainer(model=copy.deepcopy(policy), ref_model=copy.deepcopy(reference), args=arguments, train_dataset=pairs,
                             processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return batch, loss.detach(), {name: parameter.grad for name, parameter in trainer.model.named_parameters()}


def response_logps(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Summed log-probability of each response and its number of tokens, from plain logits: [2 B], chosen first."""
    ids, mask = batch["input_ids"], batch["completion_mask"].bool()[:, 1:]
    logits = model(input_ids=ids, attention_mask=batch["attention_mask"], use_cache=False).logits[:, :-1]
    row = torch.arange(len(ids))[:, None].expand_as(mask)[mask]
    return segment_sums(target_logps(logits[mask], ids[:, 1:][mask]), row, len(ids)), mask.sum(-1)


def our_loss(policy: Any, reference: Any, batch: Mapping[str, Tensor], losses: Mapping[str, float], smoothing: float) -> Tensor:
    with torch.no_grad():
        reference_logps, _ = response_logps(reference, batch)
    logps, tokens = response_logps(policy, batch)
    (chosen, rejected), (reference_chosen, reference_rejected), (chosen_tokens, rejected_tokens) = (
        values.chunk(2) for values in (logps, reference_logps, tokens))
    pairs = PairLogps(policy_chosen=chosen, policy_rejected=rejected, reference_chosen=reference_chosen,
                      reference_rejected=reference_rejected, chosen_tokens=chosen_tokens, rejected_tokens=rejected_tokens,
                      smoothing=smoothing, chosen_tokens_per_pair=chosen_tokens.sum().item() / len(chosen_tokens))
    return combined(losses, pairs, beta=BETA, simpo_gamma=0.5, discopop_tau=TAU).mean()


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_stock_trl(case: str, stage: Any) -> None:
    losses, smoothing = CASES[case]
    _, policy, reference, _, _ = stage
    batch, expected, expected_gradients = trl_loss_and_gradients(stage, losses, smoothing)
    model = copy.deepcopy(policy)
    value = our_loss(model, reference, batch, losses, smoothing)
    value.backward()
    torch.testing.assert_close(value.detach(), expected, atol=1e-5, rtol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected_gradients[name], atol=1e-5, rtol=1e-5,
                                   msg=lambda text, name=name: f"{name}: {text}")


def test_the_reference_differs_so_that_no_logratio_is_zero(stage: Any) -> None:
    _, policy, reference, _, _ = stage
    batch, loss, _ = trl_loss_and_gradients(stage, {"sigmoid": 1.0}, 0.0)
    with torch.no_grad():
        gaps = (response_logps(policy, batch)[0] - response_logps(reference, batch)[0]).abs()
    assert gaps.min() > 0.05 and abs(loss.item() - 0.6931472) > 0.01


def test_every_loss_of_trl_is_compared() -> None:
    """A release that brings a loss fails here until it is compared."""
    source = Path(inspect.getfile(trl.DPOTrainer)).read_text(encoding="utf-8")
    assert set(re.findall(r'if loss_type == "(\w+)"', source)) == set(CASES) - {"combination"}
