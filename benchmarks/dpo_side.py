"""One side of the DPO comparison in a process of its own, so that its peak memory is its own. Prints one JSON line.

    python -m benchmarks.dpo_side ours|trl FOLDER --order random|sorted --method full|lora --steps 12 --batch 8
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LEARNING_RATE = 1e-4
MAX_LENGTH = 1024
SEED = 1


def ours(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    from rich.console import Console

    from rlhf import dpo
    from rlhf.config import BatchConfig, DataConfig, DpoConfig, LoopConfig, ModelConfig, OptimConfig
    from rlhf.fitting import Site, log_path
    from rlhf.step_log import read_log, step_lines

    config = DpoConfig(
        data=DataConfig(train=(str(options.folder / f"{options.order}.jsonl"),), template="transcript", max_length=MAX_LENGTH,
                        holdout_percent=0, max_rejected=0),
        optim=OptimConfig(learning_rate=LEARNING_RATE, schedule="constant", warmup_fraction=0),
        batch=BatchConfig(per_step=options.batch, per_microbatch=options.batch, shuffle=False),
        loop=LoopConfig(max_steps=options.steps, save_every=None))
    site = Site(folder=out, name="dpo", model=ModelConfig(name=str(options.folder / "model"), method=options.method), seed=SEED, start=None,
                inputs={}, console=Console(stderr=True))
    result = dpo.train(config, site)
    losses = [line["loss"] for line in step_lines(read_log(log_path(site)).lines)]
    return {"wall_s": result.seconds, "losses": losses, "tokens": result.tokens, "padded_tokens": result.padded_tokens}


def trl(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    pairs = json.loads((options.folder / f"{options.order}.texts.json").read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(options.folder / "model", dtype=torch.float32)
    torch.manual_seed(0)
    trainer = DPOTrainer(
        model, train_dataset=Dataset.from_list(pairs), processing_class=AutoTokenizer.from_pretrained(options.folder / "model"),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if options.method == "lora" else None,
        args=DPOConfig(
            output_dir=str(out), per_device_train_batch_size=options.batch, max_steps=options.steps, logging_steps=1, report_to=[],
            save_strategy="no", bf16=False, use_cpu=True, seed=SEED, activation_checkpointing=False, learning_rate=LEARNING_RATE,
            max_length=MAX_LENGTH, disable_tqdm=True, lr_scheduler_type="constant", train_sampling_strategy="sequential"))
    if options.method == "lora":
        start_from_our_adapter(trainer.model, options.folder / "model")
    clock = time.perf_counter()
    trainer.train()
    return {"wall_s": time.perf_counter() - clock, "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}


def start_from_our_adapter(model: Any, base: Path) -> None:
    """A is random: both sides must draw the same one for their losses to be comparable."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    from rlhf.config import LoraConfig
    from rlhf.models.adapters import new_adapter

    drawn = new_adapter(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), LoraConfig(), dora=False, seed=SEED)
    set_peft_model_state_dict(model, get_peft_model_state_dict(drawn))


def main() -> None:
    sides: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {"ours": ours, "trl": trl}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=sides)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--order", choices=["random", "sorted"], default="random")
    parser.add_argument("--method", choices=["full", "lora"], default="lora")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(2)
    out = options.folder / f"out-{options.side}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    cpu = time.process_time()
    result = sides[options.side](options, out)
    print(json.dumps({**result, "cpu_s": time.process_time() - cpu, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


if __name__ == "__main__":
    main()
