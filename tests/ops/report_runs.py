"""Run folders as a pipeline leaves them, for the tests of the report."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import yaml

HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)> & "quoted" {{ 7 * 7 }}'


def interval(mean: float, half: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - half, "high": mean + half}


def evaluation(*, gain: float = 0.271, response: str = "[red fox] Done.") -> dict[str, Any]:
    def model(name: str, share: float, compared: bool) -> dict[str, Any]:
        return {"name": name, "generated": 200, "unfinished": 3,
                "answered_well": {"good": round(200 * share), "prompts": 200, "share": interval(share, 0.06),
                                  "gain": interval(gain, 0.05) if compared else None},
                "preferences": {"pairs": 512, "prompts": 200, "logps_accuracy": interval(0.6125, 0.03),
                                "margin": interval(4.56, 0.4) if compared else None,
                                "accuracy": interval(0.9375, 0.02) if compared else None}}

    answers = [{"model": "sft", "text": "red fox Done.", "good": False}, {"model": "dpo", "text": response, "good": True}]
    return {"models": [model("sft", 0.565, False), model("dpo", 0.565 + gain, True)], "left_out": {},
            "samples": [{"prompt": "Reverse the list: fox, red. Write it in brackets. End with Done.", "responses": answers}]}


def dpo_log(steps: int, *, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    lines: list[dict[str, Any]] = [{"step": 0, "eval_loss": math.log(2), "eval_rewards/margins": 0.0, "eval_rewards/accuracies": 0.5}]
    for step in range(1, steps + 1):
        margin = 2 * step / steps + rng.gauss(0, 0.2)
        lines.append({"step": step, "loss": math.log1p(math.exp(-margin)), "grad_norm": 1 + rng.random(),
                      "learning_rate": 1e-3 * (1 - step / steps), "epoch": step / steps,
                      "rewards/chosen": margin * 0.3, "rewards/rejected": -margin * 0.7, "rewards/margins": margin,
                      "rewards/accuracies": 0.9, "logps/chosen": -9 + margin, "logps/rejected": -11 - margin, "tokens": 900,
                      "tokens_per_second": 4000 + rng.gauss(0, 150), "seconds": 0.22, "eta_seconds": 1.0, "memory_mb": 600.0})
        if step % 25 == 0:
            lines.append({"step": step, "eval_loss": math.log1p(math.exp(-2 * step / steps)), "eval_rewards/margins": 2 * step / steps,
                          "eval_rewards/accuracies": 0.5 + 0.4 * step / steps})
    return lines


def lengths(longest: int) -> dict[str, Any]:
    return {"p50": 20, "p90": 24, "p99": 27, "longest": longest, "histogram": [0, 0, 0, 0, 400]}


def write_run(folder: Path, *, steps: int = 60, beta: float = 0.1, seed: int = 0, **settings: Any) -> Path:
    """A finished run: sft, dpo, evaluate."""
    data = {"train": "@prepare/preferences.jsonl", "max_length": 96}
    recipe = {"name": folder.name, "seed": seed, "output": str(folder), "model": {"name": "@prepare/model", "method": "full"}, "stages": [
        {"sft": {"name": "sft", "data": data, "optim": {"learning_rate": 2e-3}}},
        {"dpo": {"name": "dpo", "data": data, "beta": beta, "optim": {"learning_rate": 5e-4}}},
        {"evaluate": {"name": "evaluate", "data": data, "models": ["sft", "dpo"]}}]}
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    write_json(folder / "environment.json", {"python": "3.11.9", "packages": {"torch": "2.13.0"}, "devices": ["cpu"], "threads": 2})
    tokens = {"rows": 400, "kept": 388, "prompts_cut": 4, "responses_cut": 0, "boundary_merges": 0, "prompt_tokens": 8000,
              "response_tokens": 5120, "packed_tokens": 13120, "padded_tokens": 20100, "prompt_lengths": lengths(28),
              "response_lengths": lengths(12), "sequence_lengths": lengths(40), "rejected": {"identical_tokens": 12}, "first_rows": {}}
    for name, lines in (("sft", [{"step": step, "loss": 3 / step ** 0.5, "learning_rate": 2e-3, "epoch": 0.1, "tokens_per_second": 9000.0,
                                  "seconds": 0.1} for step in range(1, steps + 1)]), ("dpo", dpo_log(steps, seed=seed))):
        write_stage(folder / name, kind=name, seconds=61.5, results={"layout": "packed", "layout_reason": "each prompt once"})
        (folder / name / "train_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        write_json(folder / name / "data.json", {"rows": 412, "train": 388, "holdout": 24, "rejected": {"empty_response": 12},
                                                 "repaired": {}, "layouts": {"preferences.jsonl": "ranked"},
                                                 "files": {"preferences.jsonl": "ab12cd34"},
                                                 "train_tokens": tokens, "holdout_tokens": tokens | {"rows": 24, "kept": 24}})
        (folder / name / "rejects.jsonl").write_text(
            json.dumps({"where": "preferences.jsonl:17", "reason": "empty_response", "detail": HOSTILE}) + "\n", encoding="utf-8")
    write_stage(folder / "evaluate", kind="evaluate", seconds=9.0, results={})
    write_json(folder / "evaluate" / "evaluation.json", evaluation(**settings))
    return folder


def write_stage(folder: Path, *, kind: str, seconds: float, results: dict[str, Any], status: str = "finished") -> None:
    folder.mkdir()
    write_json(folder / "stage.json", {"kind": kind, "status": status, "identity": "00", "seconds": seconds, "results": results,
                                       "inputs": {"configuration": "{}", "seed": "0", "data preferences.jsonl": "5e6f7a8b"}})


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
