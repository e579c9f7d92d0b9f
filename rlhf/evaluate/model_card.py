"""A model card: what a stage made, from what, with which settings and figures, and how to load it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rlhf.errors import DataError
from rlhf.evaluate.report_content import before_after, data_table, evaluation_table, model_rows
from rlhf.evaluate.run_folder import RunView, StageView, read_run
from rlhf.evaluate.tables import Table
from rlhf.whole_files import replace_file

LOAD_MODEL = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModelForCausalLM.from_pretrained("FOLDER")
"""
LOAD_ADAPTER = """\
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoPeftModelForCausalLM.from_pretrained("FOLDER")   # adapter_config.json names the base
"""


def write_model_card(run: Path, stage: str) -> Path:
    """The card as README.md beside the model of a stage."""
    path = run / stage / "model" / "README.md"
    replace_file(path, model_card(run, stage))
    return path


def model_card(run: Path, stage: str) -> str:
    """Markdown about the model that a stage made. Raises DataError where the run has no such stage, or it made no model."""
    view = read_run(run)
    made = next((found for found in view.stages if found.name == stage), None)
    if made is None or not (run / stage / "model").is_dir():
        raise DataError(f"{run} has no stage {stage!r} that made a model; it has {', '.join(found.name for found in view.stages)}")
    adapter = (run / stage / "model" / "adapter_config.json").is_file()
    head = yaml.safe_dump({"library_name": "peft" if adapter else "transformers", "pipeline_tag": "text-generation",
                           "tags": ["prefloop", made.kind]}, sort_keys=False)
    parts = [f"---\n{head}---\n\n# {view.name}, stage {stage}",
             f"{'An adapter' if adapter else 'A model'} made by `{made.kind}` in {len(made.steps):,} optimizer steps.",
             section("How to load", code("python", LOAD_ADAPTER if adapter else LOAD_MODEL)),
             section("Results", *results(view, made)),
             section("Data", *([markdown_table(table)] if (table := data_table(made)) else []), hashes(made.inputs)),
             section("Recipe", code("yaml", settings_text(view, stage))),
             section("Environment", code("yaml", yaml.safe_dump(view.environment, sort_keys=False)))]
    return "\n\n".join(parts) + "\n"


def results(view: RunView, stage: StageView) -> list[str]:
    """Held-out figures of the training itself, and of evaluations that the run already holds."""
    found = []
    if (table := before_after(stage)) is not None:
        found.append(markdown_table(table))
    rows = [row for row in model_rows([view]) if row.label == stage.name]
    if rows:
        found.append("On held-out prompts, with 95 % intervals:\n\n" + markdown_table(evaluation_table(rows)))
    found += [f"**Alarm at step {line['step']}**: {inline(str(line['text']))}" for line in stage.alarms]
    return found or ["Nothing was held out."]


def hashes(inputs: Mapping[str, Any]) -> str:
    """What went in, by content hash; the configuration itself is the section below."""
    rows = tuple((name, str(value)) for name, value in inputs.items() if name not in ("configuration", "model", "version"))
    return markdown_table(Table(("input", "hash"), rows))


def settings_text(view: RunView, stage: str) -> str:
    """The model section and the stage's own, every key."""
    stages = [entry for entry in view.recipe.get("stages", ()) for kind, settings in entry.items() if settings.get("name", kind) == stage]
    return yaml.safe_dump({"seed": view.recipe.get("seed"), "model": view.recipe.get("model"), "stages": stages}, sort_keys=False,
                          allow_unicode=True)


def section(title: str, *blocks: str) -> str:
    return "\n\n".join([f"## {title}", *blocks])


def code(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def markdown_table(table: Table) -> str:
    lines = [table.head, tuple("---" for _ in table.head), *table.rows]
    return "\n".join("| " + " | ".join(map(inline, line)) + " |" for line in lines)


def inline(text: str) -> str:
    """Text of a run inside Markdown: no markup, no end of a table cell."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").replace("\n", " ")
