"""Importing a module of ours has no effect, and the light modules stay light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
         for package in ("rlhf", "annotation") for path in sorted((ROOT / package).rglob("*.py"))
         if path.parent.name != "inside" or path.stem == "settings"]
"""The other files in inside/ run where argilla-server is installed."""
LIGHT = ("rlhf", "rlhf.errors", "rlhf.records", "rlhf.config", "rlhf.whole_files", "rlhf.recipe", "rlhf.key_help", "rlhf.cli",
         "annotation", "annotation.tasks", "annotation.verdicts", "annotation.votes", "annotation.backend", "annotation.home",
         "annotation.cli")
HEAVY = ("torch", "numpy", "transformers", "datasets", "pandas", "peft", "trl", "deepspeed", "accelerate", "argilla", "matplotlib")

EFFECTS = """
import importlib, logging, os, random, sys
# What others do when imported is theirs.
import accelerate, datasets, deepspeed, numpy, peft, pydantic, rich.progress, torch, transformers, trl, typer.core, yaml
connections = []
sys.addaudithook(lambda event, args: connections.append((event, args)) if event in ("socket.connect", "socket.getaddrinfo") else None)

def state():
    return {"environment": dict(os.environ), "folder": os.getcwd(), "path": list(sys.path), "handlers": list(logging.root.handlers),
            "level": logging.root.level, "dtype": torch.get_default_dtype(), "threads": torch.get_num_threads(),
            "torch": torch.get_rng_state().tolist(), "numpy": str(numpy.random.get_state()), "python": random.getstate(),
            "precision": torch.get_float32_matmul_precision(), "deterministic": torch.are_deterministic_algorithms_enabled()}

for name in sys.argv[1:]:
    before = state()
    importlib.import_module(name)
    after = state()
    changed = [key for key in before if before[key] != after[key]]
    assert not changed, f"importing {name} changes {changed}"
    assert not connections, f"importing {name} asks the network: {connections}"
"""


@pytest.mark.parametrize("name", LIGHT)
def test_a_light_module_imports_nothing_heavy(name: str) -> None:
    code = f"import sys, {name}\nprint(*sorted({{module.split('.')[0] for module in sys.modules}} & set({HEAVY!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == []


def test_importing_every_module_changes_nothing_and_asks_nobody() -> None:
    done = subprocess.run([sys.executable, "-c", EFFECTS, *NAMES], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
