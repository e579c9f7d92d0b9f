"""Imports point one way: errors <- records <- config; maths; data, models; the loop; the objectives; evaluate; ops; cli."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
           for package in ("rlhf", "annotation") for path in sorted((ROOT / package).rglob("*.py"))}
WATCHED = {"rlhf", "annotation", "recipes", "benchmarks", "torch", "transformers", "trl", "peft", "deepspeed", "accelerate", "bitsandbytes",
           "datasets", "argilla", "pydantic", "yaml", "typer"}

CONTRACTS = {"rlhf.errors", "rlhf.records", "rlhf.config", "rlhf.whole_files"}
RECIPE = {"rlhf.recipe", "rlhf.recipe_text", "rlhf.recipe_links", "rlhf.schema_check", "rlhf.key_help"}
DATA = CONTRACTS | {"rlhf.data", "torch", "transformers", "datasets"}
MODELS = CONTRACTS | {"rlhf.maths", "rlhf.models", "torch", "transformers", "peft", "bitsandbytes", "pydantic"}
LOOP = DATA | MODELS | {"rlhf.distributed", "rlhf.fitting", "rlhf.guards", "rlhf.progress", "rlhf.reference_scores", "rlhf.step_log",
                        "rlhf.step_plan", "rlhf.training", "rlhf.training_progress", "trl"}
ANNOTATION = {"annotation", "rlhf.records", "rlhf.errors", "rlhf.whole_files", "rlhf.progress", "rlhf.maths.agreement",
              "rlhf.maths.bootstrap", "rlhf.maths.dawid_skene"}
ALLOWED: dict[str, set[str]] = {    # longest prefix wins; what a module may import among our own and the watched packages
    "rlhf": LOOP,                   # modules of the loop itself: never an objective, evaluate, ops, or the recipe
    "rlhf.errors": set(),
    "rlhf.records": {"rlhf.errors"},
    "rlhf.whole_files": {"rlhf.errors"},
    "rlhf.progress": set(),
    "rlhf.commands": {"rlhf.errors", "typer"},
    "rlhf.config": {"rlhf.errors", "pydantic"},
    "rlhf.key_help": CONTRACTS,
    "rlhf.schema_check": CONTRACTS | RECIPE | {"pydantic"},
    "rlhf.recipe": CONTRACTS | RECIPE | {"yaml"},
    "rlhf.recipe_text": CONTRACTS | RECIPE | {"yaml"},
    "rlhf.recipe_links": CONTRACTS | RECIPE,
    "rlhf.maths": {"rlhf.errors", "rlhf.maths", "torch"},
    "rlhf.data": DATA,
    "rlhf.data.trl_templates": DATA | {"trl"},
    "rlhf.models": MODELS,
    "rlhf.distributed": CONTRACTS | {"rlhf.distributed", "torch", "transformers", "accelerate", "deepspeed"},
    "rlhf.sft": LOOP,
    "rlhf.dpo": LOOP,
    "rlhf.evaluate": LOOP | RECIPE | {"rlhf.evaluate", "rlhf.rollout", "yaml"},
    "rlhf.ops": LOOP | RECIPE | {"rlhf.evaluate", "rlhf.ops", "rlhf.sft", "rlhf.dpo", "yaml", "pydantic"},
    "rlhf.cli": LOOP | RECIPE | {"rlhf.commands", "rlhf.evaluate", "rlhf.ops", "typer"},
    "annotation": ANNOTATION,
    "annotation.argilla": ANNOTATION | {"argilla"},
    "annotation.agreement": ANNOTATION | {"torch"},
    "annotation.annotator_quality": ANNOTATION | {"torch"},
    "annotation.vote_table": ANNOTATION | {"torch"},
    "annotation.page": ANNOTATION | {"rlhf.evaluate.plots"},
    "annotation.cli": ANNOTATION | {"rlhf.commands", "typer"},
    "annotation.cli_options": {"typer"},
    "annotation.cli_server": ANNOTATION | {"rlhf.commands", "typer"},
    "annotation.cli_push": ANNOTATION | {"rlhf.commands", "rlhf.config", "rlhf.data", "rlhf.ops.evaluate_stage", "rlhf.rollout", "typer"},
    "annotation.cli_verdicts": ANNOTATION | {"rlhf.commands", "typer"},
    "annotation.cli_agreement": ANNOTATION | {"rlhf.commands", "typer"},
    "annotation.cli_export": ANNOTATION | {"rlhf.commands", "typer"},
    "annotation.server.inside": {"annotation.server.inside", "pydantic"},
}
RELATIVE = '"""Runs inside the server\'s environment: '
"""How files begin that are imported under another package name, and so by relative imports."""
ONE_DOOR = ("torch.distributed", "accelerate", "deepspeed")
"""What only rlhf.distributed may import."""


def inside(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def imports_of(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 or RELATIVE in source, f"line {node.lineno}: imports are absolute here"
            if node.level:
                continue
            assert node.module is not None
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] in WATCHED}


def forbidden_imports(module: str, source: str) -> set[str]:
    owner = max((prefix for prefix in ALLOWED if inside(module, prefix)), key=len)
    used = imports_of(source)
    bad = {name for name in used if not any(inside(name, allowed) for allowed in ALLOWED[owner])}
    return bad | {name for name in used if owner != "rlhf.distributed" and any(inside(name, package) for package in ONE_DOOR)}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_lies_below_it(module: str) -> None:
    assert forbidden_imports(module, MODULES[module].read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize(("module", "source", "found"), [
    ("rlhf.maths.losses", "import torch\nfrom torch import distributed", {"torch.distributed"}),
    ("rlhf.training", "import torch.distributed as dist", {"torch.distributed"}),
    ("rlhf.distributed.ranks", "import torch.distributed as dist\nfrom accelerate import PartialState", set()),
    ("rlhf.models.packing", "from rlhf.data.tokens import tokenise", {"rlhf.data.tokens.tokenise"}),
    ("rlhf.data.formats", "def late():\n    from rlhf.models import loading", {"rlhf.models.loading"}),
    ("rlhf.sft", "from rlhf.dpo import train", {"rlhf.dpo.train"}),
    ("rlhf.training", "from rlhf import dpo", {"rlhf.dpo"}),
    ("rlhf.config", "import torch", {"torch"}),
    ("annotation.tasks", "from rlhf.records import Prompt\nimport torch", {"torch"}),
    ("annotation.tasks", "import argilla", {"argilla"}),
    ("annotation.argilla", "import argilla", set()),
])
def test_the_rule_itself_finds(module: str, source: str, found: set[str]) -> None:
    assert forbidden_imports(module, source) == found
