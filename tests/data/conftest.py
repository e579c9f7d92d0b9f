"""Files in every container, for the readers' tests."""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")    # datasets reads it when it is imported

Write = Callable[[Path, Sequence[dict[str, object]]], str]
SHARED_DATA = Path(__file__).resolve().parents[2] / "../shared/data"


def write_rows(path: Path, rows: Sequence[dict[str, object]]) -> str:
    """Rows in the container that the name asks for."""
    plain = path.name.removesuffix(".gz")
    target = path.with_name(plain)
    match target.suffix:
        case ".jsonl":
            target.write_bytes(b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
        case ".json":
            target.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        case ".csv":
            with target.open("w", newline="", encoding="utf-8") as stream:
                writer = csv.DictWriter(stream, list(rows[0]))
                writer.writeheader()
                for row in rows:
                    writer.writerow({name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()})
        case ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), target)
    if path != target:
        path.write_bytes(gzip.compress(target.read_bytes(), mtime=0))
        target.unlink()
    return str(path)


@pytest.fixture(scope="session")
def write() -> Write:
    return write_rows


@pytest.fixture(scope="session")
def shared_data() -> Path:
    if not SHARED_DATA.is_dir():
        pytest.skip("the folder ../shared/data with real preference data is absent")
    return SHARED_DATA
