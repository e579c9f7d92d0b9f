"""What the stages of a recipe say about each other: names, references, and model settings that no stage uses.

Works on what was written, not on validated configs, so that a wrong field elsewhere hides nothing here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

from rlhf.config import LoraConfig, Method, ModelConfig, Recipe, StageKind
from rlhf.errors import Problem
from rlhf.key_help import hints_of
from rlhf.schema_check import did_you_mean, join

STAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
RESERVED = frozenset(hints_of(Recipe)) | {"base"}
"""Words that cannot name a stage: overrides and `models` give them another meaning."""


@dataclass(frozen=True)
class StageDraft:
    """A stage as it was written: one entry of `stages`."""

    position: int
    kind: StageKind
    raw: Any

    @property
    def name(self) -> str:
        return str(self.raw["name"]) if isinstance(self.raw, dict) and "name" in self.raw else self.kind

    @property
    def entry(self) -> str:
        return f"stages[{self.position}]"


class Reference(NamedTuple):
    """`@STAGE/FILE`; `@STAGE` alone is the model that the stage made."""

    stage: str
    inside: str


def reference(text: str) -> Reference | None:
    if not text.startswith("@"):
        return None
    stage, _, inside = text[1:].partition("/")
    return Reference(stage, inside or "model")


def links_among(args: Mapping[str, Any]) -> list[str]:
    """Options of a prepare script that name what another stage made: `@STAGE/FILE`. All others are the script's own business."""
    return [key for key, value in args.items() if isinstance(value, str) and reference(value) is not None]


def addresses(drafts: Sequence[StageDraft]) -> list[str]:
    """How problems name each stage: by its name, or by its place in the list where the name does not tell."""
    counts = Counter(draft.name for draft in drafts)
    return [draft.name if counts[draft.name] == 1 and _usable(draft.name) else draft.entry for draft in drafts]


def wrong_names(drafts: Sequence[StageDraft]) -> Iterator[Problem]:
    first: dict[str, StageDraft] = {}
    for draft in drafts:
        if draft.name in first:
            yield Problem(draft.entry, f"is named {draft.name!r} like {first[draft.name].entry}; give one of them another name: NAME")
        elif not _usable(draft.name):
            why = "has another meaning in a recipe" if draft.name in RESERVED else "must be letters, digits, - and _: it names a folder"
            yield Problem(f"{draft.entry}.name", f"{draft.name!r} {why}")
        first.setdefault(draft.name, draft)


def _usable(name: str) -> bool:
    return STAGE_NAME.fullmatch(name) is not None and name not in RESERVED


def wrong_links(model: Any, drafts: Sequence[StageDraft], folder: Path) -> Iterator[Problem]:
    """References to stages that do not exist or come later, models that nobody makes, and code files that are not there."""
    names = [draft.name for draft in drafts]
    for draft, where in zip(drafts, addresses(drafts), strict=True):
        for path, text in _texts(draft.raw):
            yield from _wrong_reference(join(where, path), text, names, draft.position)
            if path == "models" and text != "base" and reference(text) is None:
                yield from _wrong_model(join(where, path), text, drafts, draft.position, folder)
            if (draft.kind, path) in (("prepare", "script"), ("evaluate", "scorer")) and reference(text) is None:
                file = (text.rpartition(":")[0] or text) if path == "scorer" else text
                yield from _missing_code(join(where, path), file, folder)
    users = [draft.position for draft in drafts if draft.kind != "prepare"]
    if users and isinstance(model, dict) and isinstance(model.get("name"), str):
        yield from _wrong_reference("model.name", model["name"], names, users[0])


def _texts(raw: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Every text of a stage with its path; of a prepare script's options only the links."""
    if isinstance(raw, str):
        yield path, raw
    elif isinstance(raw, list):
        for item in raw:
            yield from _texts(item, path)
    elif isinstance(raw, Mapping):
        for key, item in raw.items():
            if key == "args" and isinstance(item, Mapping):
                yield from ((join("args", str(name)), item[name]) for name in links_among(item))
            elif key != "name":
                yield from _texts(item, join(path, str(key)))


def _wrong_reference(where: str, text: str, names: list[str], position: int) -> Iterator[Problem]:
    linked = reference(text)
    earlier = ", ".join(names[:position]) or "none"
    if linked is not None and linked.stage not in names[:position]:
        why = "comes later, or is this stage itself" if linked.stage in names else f"does not exist{did_you_mean(linked.stage, names)}"
        yield Problem(where, f"{text!r} points to a stage that {why}. Stages before this one: {earlier}")


def _wrong_model(where: str, text: str, drafts: Sequence[StageDraft], position: int, folder: Path) -> Iterator[Problem]:
    trained = [draft.name for draft in drafts[:position] if draft.kind in ("sft", "dpo")]
    if text in trained or "/" in text or (folder / text).is_dir() or Path(text).is_dir():
        return
    yield Problem(where, f"{text!r} is no training stage before this one and no folder{did_you_mean(text, [*trained, 'base'])}. "
                         f"Known here: {', '.join(['base', *trained])}")


def _missing_code(where: str, file: str, folder: Path) -> Iterator[Problem]:
    if not (folder / file).is_file() and not Path(file).is_file():
        yield Problem(where, f"there is no file {folder / file}; the path is relative to the recipe")


def unused_settings(model: Any, drafts: Sequence[StageDraft]) -> Iterator[Problem]:
    """Adapter settings that differ from their defaults although no stage trains with a method that reads them."""
    training = [draft.raw for draft in drafts if draft.kind in ("sft", "dpo") and isinstance(draft.raw, dict)]
    if not training or not isinstance(model, dict):
        return
    general = model["method"] if "method" in model else ModelConfig(name="any").method
    methods = {raw["method"] if "method" in raw and raw["method"] is not None else general for raw in training}
    if not methods <= set(get_args(Method)):     # reported as a wrong value; what was meant is not known
        return
    said = f"is set, but the stages train with method {', '.join(sorted(methods))}"
    if methods == {"full"}:
        written = model["lora"] if "lora" in model and isinstance(model["lora"], dict) else {}
        defaults = vars(LoraConfig())
        for key in (key for key in written if key in defaults and written[key] != defaults[key]):
            yield Problem(f"model.lora.{key}", f"{said}; set a method of lora, qlora or dora, or remove it")
    if "qlora" not in methods and "double_quant" in model and model["double_quant"] != ModelConfig(name="any").double_quant:
        yield Problem("model.double_quant", f"{said}; set method to qlora, or remove it")
