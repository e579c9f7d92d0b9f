"""DPO on the prefix-shared, unpadded layout against stock trl.DPOTrainer: same model, pairs, batches, seed and optimizer, in turn.

    python -m benchmarks.dpo_vs_trl [--json] [--quick] [--data FILE]

`random` feeds the pairs in the order of the file, `sorted` by length (the best that a user of TRL can do against padding). Ratios are of
the wall time of `train()`, the median over rounds in which both sides run back to back. Bars and figures: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.bars import Bar, finish
from benchmarks.hh_workdir import LOCAL_DATA, build

METHODS = ("full", "lora")
SPEED_BARS = {"random": 5.5, "sorted": 3.0}
QUIET = {"HF_HUB_OFFLINE": "1", "TRL_TELEMETRY": "0", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false",
         "PYTHONWARNINGS": "ignore"}


def run_side(side: str, folder: Path, *, order: str, method: str, steps: int, batch: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.dpo_side", side, str(folder), "--order", order, "--method", method, "--steps", str(steps),
               "--batch", str(batch)]
    done = subprocess.run(command, env={**os.environ, **QUIET}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{order:7} {method:5} {side:5} {result['wall_s']:7.2f} s  cpu {result['cpu_s']:7.2f} s  peak {result['peak_mb']:6.0f} MB",
          file=sys.stderr, flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--quick", action="store_true", help="one round of 3 steps with LoRA: a first look")
    parser.add_argument("--data", default=str(LOCAL_DATA), help="HH-RLHF pairs: a file, or a hub name")
    options = parser.parse_args()
    rounds, steps, methods = (1, 3, ("lora",)) if options.quick else (3, 12, METHODS)
    bars: list[Bar] = []
    details: dict[str, object] = {"rounds": rounds, "steps": steps}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder, options.data, pairs=steps * 8)
        for order, wanted in SPEED_BARS.items():
            for method in methods:
                pairs = [(run_side("ours", folder, order=order, method=method, steps=steps, batch=8),
                          run_side("trl", folder, order=order, method=method, steps=steps, batch=8)) for _ in range(rounds)]
                ratios = [theirs["wall_s"] / mine["wall_s"] for mine, theirs in pairs]
                mine, theirs = pairs[0]
                gap = max(abs(a - b) for a, b in zip(mine["losses"], theirs["losses"], strict=True))
                label = f"{order} {method}"
                memory = statistics.median(mine["peak_mb"] / theirs["peak_mb"] for mine, theirs in pairs)
                bars += [Bar(f"{label}: times as fast", statistics.median(ratios), wanted),
                         Bar(f"{label}: largest loss difference", gap, 1e-4, "at most"),
                         Bar(f"{label}: peak memory, share of TRL's", memory, 1.0, "at most")]
                details[label] = {"ratios": ratios, "token_ratio": mine["padded_tokens"] / mine["tokens"], "ours": mine, "trl": theirs}
    return finish(bars, as_json=options.json, extra=details)


if __name__ == "__main__":
    sys.exit(main())
