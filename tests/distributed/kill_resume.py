"""Kill `rlhf sft` and `rlhf dpo` at random moments, start them again, and compare with a run that was left alone, bit for bit.

    python tests/distributed/kill_resume.py --kills 20                 # sft and dpo
    python tests/distributed/kill_resume.py --kills 20 --stages dpo --seed 7 --folder /tmp/kill-resume

Shuffled, with dropout, gradient accumulation and evaluations, ending in mid-epoch. Compared: every figure of every line
of train_log.jsonl but times and memory, and every byte of the saved weights. Ends with 1 when anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhf.distributed.state import latest_checkpoint, unsealed_checkpoints
from rlhf.step_log import exact_figures, read_log, step_lines

WORDS = 60
METHOD = {"sft": "", "dpo": ", method: lora, lora: {r: 4, dropout: 0.1}"}
RLHF = Path(sys.executable).with_name("rlhf")

RECIPE = """
name: kill-resume
seed: 11
model: {{name: {model}{method}}}
output: {output}
stages:
  - {stage}:
      data: {{train: {data}, holdout_percent: 20, template: plain, max_length: 32}}
      optim: {{learning_rate: 3.0e-3}}
      batch: {{per_step: 8, per_microbatch: 4}}
      loop: {{epochs: {epochs}, save_every: 5, evaluate_every: 7, dropout: true}}
"""


class Kill(NamedTuple):
    steps_logged: int
    latest: str
    torn: int


def write_inputs(folder: Path, *, rows: int, hidden: int = 16) -> None:
    """A model whose attention drops out, its tokenizer, and preferences over its words."""
    tokens = {"<eos>": 0, "<unk>": 1} | {f"w{number}": number for number in range(2, WORDS)}
    backend = Tokenizer(models.WordLevel(tokens, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder / "model")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=WORDS, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2, num_attention_heads=2,
        attention_dropout=0.1, bos_token_id=None, eos_token_id=0, pad_token_id=None)).save_pretrained(folder / "model")
    draw = random.Random(5)

    def text(words: int) -> str:
        return " ".join(f"w{draw.randrange(2, WORDS)}" for _ in range(words))

    lines = [{"prompt": text(draw.randint(2, 6)) + " ", "chosen": text(draw.randint(2, 9)), "rejected": text(draw.randint(2, 9))}
             for _ in range(rows)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@dataclass(frozen=True)
class Site:
    """One run of one stage in a folder of its own."""

    inputs: Path
    stage: str
    name: str
    epochs: float

    @property
    def folder(self) -> Path:
        return self.inputs / f"{self.stage}-{self.name}" / self.stage

    @property
    def log(self) -> Path:
        return self.folder / "train_log.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def start(self) -> subprocess.Popen[bytes]:
        recipe = self.inputs / f"{self.stage}-{self.name}.yaml"
        recipe.write_text(RECIPE.format(model=self.inputs / "model", data=self.inputs / "pairs.jsonl", output=self.folder.parent,
                                        stage=self.stage, method=METHOD[self.stage], epochs=self.epochs))
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
        with (self.inputs / f"{self.stage}-{self.name}.txt").open("ab") as output:
            return subprocess.Popen([str(RLHF), self.stage, str(recipe)], env=environment, stdout=output, stderr=output)

    def run(self) -> None:
        process = self.start()
        if process.wait() != 0:
            raise SystemExit(f"{self.stage}-{self.name} ended with {process.returncode}; see {self.inputs}/{self.stage}-{self.name}.txt")

    def figures(self) -> list[dict[str, float | int | str]]:
        return [exact_figures(line) for line in read_log(self.log).lines]

    def training_seconds(self) -> float:
        return sum(float(line["seconds"]) for line in step_lines(read_log(self.log).lines))

    def weights(self) -> dict[str, str]:
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((self.folder / "model").glob("*.safetensors"))}

    def written(self) -> int:
        return self.log.stat().st_mtime_ns if self.log.exists() else 0


def kill_once(site: Site, *, after: float) -> Kill | None:
    """Start, wait until training goes on, then kill after so many seconds. None: it ended before."""
    before = site.written()
    process = site.start()
    while site.written() == before and process.poll() is None:
        time.sleep(0.005)
    deadline = time.monotonic() + after
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.001)
    if process.poll() is not None:
        if process.returncode != 0:
            raise SystemExit(f"{site.stage}-{site.name} ended with {process.returncode} before it was killed; "
                             f"see {site.inputs}/{site.stage}-{site.name}.txt")
        return None
    process.send_signal(signal.SIGKILL)
    process.wait()
    latest = latest_checkpoint(site.checkpoints)
    return Kill(len(step_lines(read_log(site.log).lines)), latest.name if latest else "none", len(unsealed_checkpoints(site.checkpoints)))


def differences(whole: Site, killed: Site) -> list[str]:
    expected, found = whole.figures(), killed.figures()
    faults = [f"line {number}: {a} became {b}" for number, (a, b) in enumerate(zip(expected, found, strict=False), start=1) if a != b]
    if len(expected) != len(found):
        faults.append(f"{len(expected)} lines became {len(found)}")
    if whole.weights() != killed.weights() or not whole.weights():
        faults.append(f"weights {whole.weights()} became {killed.weights()}")
    return faults


def kill_and_compare(inputs: Path, stage: str, *, kills: int, seed: int, epochs: float) -> tuple[list[Kill], list[str]]:
    """The kills that hit a running job, and what differs from the run that was left alone."""
    whole, killed = Site(inputs, stage, "whole", epochs), Site(inputs, stage, "killed", epochs)
    whole.run()
    longest = 2 * whole.training_seconds() / (kills + 1)
    draw = random.Random(seed)
    hits: list[Kill] = []
    while len(hits) < kills:
        hit = kill_once(killed, after=draw.uniform(0, longest))
        if hit is None:
            break
        hits.append(hit)
        print(f"{stage}: kill {len(hits)} after {hit.steps_logged} steps, latest {hit.latest}, {hit.torn} torn", flush=True)
    killed.run()
    return hits, differences(whole, killed)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=20)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--stages", nargs="+", default=["sft", "dpo"], choices=["sft", "dpo"])
    options.add_argument("--epochs", type=float, default=12.5)
    options.add_argument("--folder", type=Path, default=None)
    chosen = options.parse_args()
    folder = (chosen.folder or Path(tempfile.mkdtemp(prefix="kill-resume-"))).resolve()
    write_inputs(folder, rows=100)
    failed = False
    for stage in chosen.stages:
        hits, faults = kill_and_compare(folder, stage, kills=chosen.kills, seed=chosen.seed, epochs=chosen.epochs)
        print(f"{stage}: {len(hits)} kills, {'equal bit for bit' if not faults else 'DIFFERENT'}", *faults[:10], sep="\n  ")
        failed |= bool(faults)
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
