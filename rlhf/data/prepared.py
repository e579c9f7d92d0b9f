"""From a data set of records to the token runs of one stage, with everything that was left out written down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf.config import DataConfig
from rlhf.data.formats import DataSet
from rlhf.data.rejects import count_reasons, counted_rows, require_share, write_rejects
from rlhf.data.templates import Template
from rlhf.data.tokens import Tokens, tokenise
from rlhf.errors import DataError
from rlhf.records import Demonstration, PreferenceRecord, TokenRun
from rlhf.whole_files import replace_file


@dataclass(frozen=True)
class PreparedData:
    train: tuple[TokenRun, ...]
    holdout: tuple[TokenRun, ...]
    summary: dict[str, object]
    """What data.json holds: counts, lengths, truncation, rejects by reason, hashes of the files."""


def prepare(data: DataSet[Demonstration] | DataSet[PreferenceRecord], config: DataConfig, template: Template, folder: Path) -> PreparedData:
    """Tokenise both sides, write `rejects.jsonl` and `data.json` into the folder, stop when too much was rejected."""
    train = _side(data.train, config, template)
    holdout = _side(data.holdout, config, template)
    rejects = [*data.rejects, *train.rejects, *holdout.rejects]
    rejects_file = folder / "rejects.jsonl"
    write_rejects(rejects, rejects_file)
    summary: dict[str, object] = {
        "rows": data.rows, "train": len(train.runs), "holdout": len(holdout.runs), "rejected": count_reasons(rejects),
        "repaired": data.repaired, "layouts": data.layouts, "files": data.files, "chat_template_replaced": template.replaced,
        "train_tokens": asdict(train.report), "holdout_tokens": asdict(holdout.report),
    }
    replace_file(folder / "data.json", json.dumps(summary, indent=2))
    rows = counted_rows(len(rejects), rows=data.rows, kept=len(train.runs) + len(holdout.runs))
    require_share(rejects, rows=rows, at_most=config.max_rejected, rejects_file=rejects_file)
    if not train.runs:
        raise DataError(f"no row of {config.train} is left to train on ({data.rows} read, {len(holdout.runs)} held out). Repair what "
                        f"{rejects_file} lists, or lower data.holdout_percent.")
    return PreparedData(train.runs, holdout.runs, summary)


def _side(records: Sequence[Demonstration | PreferenceRecord], config: DataConfig, template: Template) -> Tokens:
    return tokenise(records, template, max_length=config.max_length, on_long=config.on_long)
