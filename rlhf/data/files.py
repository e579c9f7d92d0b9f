"""Files and hub data sets -> rows: JSONL, JSON, CSV and Parquet, each also gzipped, read a row at a time.

Lines end at b"\\n" and nowhere else: U+2028, U+2029 and U+0085 are ordinary characters of a JSON string. A line that cannot be read is
a RowError in its place; a file that cannot be read (cut gzip, torn CSV quotes, UTF-16) is a DataError.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl

from rlhf.data.rejects import RowError
from rlhf.errors import DataError

Row = dict[str, object]

CONTAINERS = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
HUB_OPTIONS = {"split": "split", "config": "name", "data_dir": "data_dir", "revision": "revision"}
"""Key in a source -> argument of datasets.load_dataset."""

_HUB = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?)(?:\?(?P<options>\w+=[^&]+(?:&\w+=[^&]+)*))?")
_BOM = b"\xef\xbb\xbf"
_OTHER_BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x00\x00\xfe\xff": "UTF-32"}
_PARQUET_ROWS = 1024


class Line(NamedTuple):
    """One row of a source, or why it could not be read."""

    number: int
    """JSONL: the line; elsewhere the row. From 1; the header of a CSV file is not counted."""
    content: Row | RowError


class Rows(NamedTuple):
    lines: Iterator[Line]
    digest: Callable[[], str]
    """SHA-256 of a file's bytes; of a hub data set, of the rows read so far."""


@dataclass(frozen=True, slots=True)
class Source:
    name: str
    """As it appears in `where` and in the hashes: the path as given, or the hub name with its options."""
    path: Path | None
    """None for a hub data set."""

    def open(self) -> Rows:
        return _open_hub(self.name) if self.path is None else _open_file(self.name, self.path)


def expand(sources: Sequence[str]) -> list[Source]:
    """Paths, globs (`data/*.jsonl.gz`) and hub names (`org/name?split=train&data_dir=part`) -> sources, in the order given."""
    found = [source for text in sources for source in _expand_one(text)]
    if not found:
        raise DataError("no data source is named; give a file, a glob or a hub name")
    places: dict[Path | str, str] = {}
    for source in found:
        place = source.name if source.path is None else source.path.resolve()
        if place in places:
            names = source.name if places[place] == source.name else f"{places[place]} and {source.name} are one file"
            raise DataError(f"named twice: {names}; every row of it would be a duplicate. Name each file once")
        places[place] = source.name
    return found


def _expand_one(text: str) -> list[Source]:
    if not text.strip():
        raise DataError("a data source has no name; give a file, a glob or a hub name")
    try:
        path = Path(text).expanduser()
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, RuntimeError) as error:       # a name longer than names can be, a ~user who is not there
        raise DataError(f"{text[:80]!r} is no name of a file: {error}") from error
    if is_file:
        return [Source(text, path)]
    if is_folder:
        raise DataError(f"{text} is a folder; name its files, for example {text.rstrip('/')}/*.jsonl")
    hub = _HUB.fullmatch(text)
    if hub and hub["options"]:
        return [Source(text, None)]
    if any(sign in text for sign in "*?["):
        return [Source(str(match), match) for match in _matches(text, path)]
    if hub is None or container_of(path) is not None:
        raise DataError(f"no such file: {text} (looked in {Path.cwd()})")
    return [Source(text, None)]


def _matches(text: str, pattern: Path) -> list[Path]:
    """Files below the part of the pattern that has no wildcard, by name."""
    base = pattern
    while any(sign in str(base) for sign in "*?["):
        base = base.parent
    try:
        found = sorted(base.glob(str(pattern.relative_to(base))))
    except ValueError as error:
        raise DataError(f"{text} is no pattern of file names: {error}") from error
    dangling = [match for match in found if match.is_symlink() and not match.exists()]
    if dangling:
        raise DataError(f"{text}: {dangling[0]} is a link to a file that is not there; remove the link or restore the file")
    files = [match for match in found if match.is_file()]
    if not files:
        raise DataError(f"no file matches {text} (looked in {Path.cwd()})")
    return files


def container_of(path: Path) -> str | None:
    """`.jsonl` for pairs.jsonl and pairs.jsonl.gz; None for a name that says nothing."""
    name = path.name.removesuffix(".gz")
    return next((suffix for suffix in CONTAINERS if name.lower().endswith(suffix)), None)


def _open_file(name: str, path: Path) -> Rows:
    container = container_of(path)
    if container is None:
        raise DataError(f"{name}: the ending does not say what is inside; rename it to one of {', '.join(CONTAINERS)}, optionally with .gz")

    def digest() -> str:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    return Rows(_lines_of_file(name, path, container), digest)


def _lines_of_file(name: str, path: Path, container: str) -> Iterator[Line]:
    readers: dict[str, Callable[[str, io.BufferedIOBase], Iterator[Line]]] = {
        ".jsonl": _read_jsonl, ".ndjson": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
    number = 0
    try:
        with _decompressed(path) as stream:
            for line in readers[container](name, stream):
                number = line.number
                yield line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{name}: the gzip stream is cut or damaged after row {number} ({error}); fetch the file again") from error
    except OSError as error:
        raise DataError(f"{name}: cannot be read after row {number}: {error}") from error


def _decompressed(path: Path) -> io.BufferedIOBase:
    """By the first two bytes, not by the name: browsers unpack .gz files and keep their names."""
    with path.open("rb") as stream:
        packed = stream.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if packed else path.open("rb")


def _byte_lines(name: str, stream: io.BufferedIOBase) -> Iterator[bytes]:
    for number, line in enumerate(stream, 1):
        if number > 1:
            yield line
            continue
        for mark, encoding in _OTHER_BOMS.items():
            if line.startswith(mark):
                raise DataError(f"{name} is {encoding}; convert it to UTF-8: iconv -f {encoding} -t UTF-8 {name}")
        yield line.removeprefix(_BOM)


def _distinct_keys(pairs: list[tuple[str, object]]) -> Row:
    row = dict(pairs)
    if len(row) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return row


def parse_json(data: bytes) -> Row | RowError:
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_distinct_keys)
    except UnicodeDecodeError as error:
        return RowError("bad_encoding", f"byte {error.object[error.start]:#04x} at offset {error.start} of the row is not UTF-8")
    except (ValueError, RecursionError) as error:
        return RowError("bad_json", str(error))
    return value if isinstance(value, dict) else RowError("not_an_object", f"the row is {type(value).__name__}, no object")


def _read_jsonl(name: str, stream: io.BufferedIOBase) -> Iterator[Line]:
    return _json_lines(_byte_lines(name, stream))


def _json_lines(lines: Iterable[bytes]) -> Iterator[Line]:
    """Blank lines hold no row; they are counted in the line numbers."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield Line(number, parse_json(line))


def _read_json(name: str, stream: io.BufferedIOBase) -> Iterator[Line]:
    """An array of objects, or, as many .json files are, one object a line."""
    data = b"".join(_byte_lines(name, stream))
    if not data.strip():
        return
    first_line = data.lstrip().partition(b"\n")[0]
    if first_line.startswith(b"{"):
        if isinstance(parse_json(first_line), RowError):
            raise DataError(f"{name} holds one object; an array of rows, or one row a line, is needed")
        yield from _json_lines(data.split(b"\n"))
        return
    try:
        rows = json.loads(data.decode("utf-8"), object_pairs_hook=_distinct_keys)
    except UnicodeDecodeError as error:
        line, byte = data[:error.start].count(b"\n") + 1, data[error.start]
        raise DataError(f"{name}:{line}: bad_encoding: byte {byte:#04x} is not UTF-8; convert the file") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}: bad_json: {error}; nothing of the file can be read") from error
    if not isinstance(rows, list):
        raise DataError(f"{name} holds one value ({type(rows).__name__}); an array of rows is needed")
    for number, row in enumerate(rows, 1):
        yield Line(number, row if isinstance(row, dict) else RowError("not_an_object", f"the row is {type(row).__name__}, no object"))


def _require_distinct(name: str, columns: Sequence[str]) -> None:
    if len(set(columns)) != len(columns):
        raise DataError(f"{name}: a column name appears twice: {', '.join(columns)}; rename one of the two")


@contextmanager
def _long_cells() -> Iterator[None]:
    """The csv module refuses cells over 131,072 characters; its limit is a process-wide setting, so it is put back."""
    limit = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _read_csv(name: str, stream: io.BufferedIOBase) -> Iterator[Line]:
    # Bytes that are not UTF-8 become lone surrogates, which UTF-8 text cannot hold otherwise: the row they are in can be named.
    reader = csv.reader((line.decode("utf-8", "surrogateescape") for line in _byte_lines(name, stream)), strict=True)
    with _long_cells():
        try:
            header = next(reader, None)
            if header is None:
                return
            if len(header) == 1 and (other := next((sign for sign in ";\t|" if sign in header[0]), None)):
                raise DataError(f"{name}: the columns are separated by {other!r}; a CSV file has commas. Convert it, or save it as JSONL")
            _require_distinct(name, header)
            for number, cells in enumerate((cells for cells in reader if cells), 1):
                yield Line(number, _csv_row(header, cells))
        except csv.Error as error:
            raise DataError(f"{name}:{reader.line_num}: bad_csv: {error}; what follows cannot be told apart. "
                            "Repair the quotes or the line ends") from error


def _csv_row(header: list[str], cells: list[str]) -> Row | RowError:
    if len(cells) != len(header):
        return RowError("bad_csv", f"{len(cells)} cells under {len(header)} columns")
    broken = [column for column, cell in zip(header, cells, strict=True) if not cell.isascii() and re.search("[\udc80-\udcff]", cell)]
    if broken:
        return RowError("bad_encoding", f"{broken[0]} holds bytes that are not UTF-8")
    printed = [column for column, cell in zip(header, cells, strict=True)
               if column in _JSON_COLUMNS | _MESSAGE_COLUMNS and _PRINTED_BY_PYTHON.match(cell)]
    if printed:
        return RowError("bad_csv", f"{printed[0]} holds messages as Python prints them, not as JSON")
    return {column: structured(column, cell) for column, cell in zip(header, cells, strict=True)}


_JSON_COLUMNS = frozenset({"messages", "conversations", "responses", "scores", "ranks", "completions", "reviews", "history", "label",
                           "annotator1", "annotator2", "annotator3", "votes", "agreement", "smoothing"})
_MESSAGE_COLUMNS = frozenset({"prompt", "chosen", "rejected", "response", "completion"})
_ROLE_KEYS = frozenset({"role", "from", "messages"})
_PRINTED_BY_PYTHON = re.compile(r"\s*\[?\s*\{\s*'(?:role|content|from|value)'\s*:")
"""What pandas writes into a CSV file for a column of messages. Read as text, the brackets would be trained on."""


def structured(column: str, cell: str) -> object:
    """Lists, objects and numbers of a CSV cell, written as JSON. `prompt`, `chosen` and the like are text unless they hold messages."""
    if column in _JSON_COLUMNS or (column in _MESSAGE_COLUMNS and cell[:1] in ("[", "{")):
        try:
            value = json.loads(cell, object_pairs_hook=_distinct_keys)
        except (ValueError, RecursionError):
            return cell             # the layout says what is wrong with it, if it reads the column at all
        if column in _JSON_COLUMNS or _holds_messages(value):
            return value
    return cell


def _holds_messages(value: object) -> bool:
    if isinstance(value, dict):
        return bool(_ROLE_KEYS & value.keys())
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) and _ROLE_KEYS & item.keys() for item in value)


def _read_parquet(name: str, stream: io.BufferedIOBase) -> Iterator[Line]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        table = pyarrow.parquet.ParquetFile(io.BytesIO(stream.read()) if isinstance(stream, gzip.GzipFile) else stream)
        _require_distinct(name, table.schema_arrow.names)
        for batch in table.iter_batches(batch_size=_PARQUET_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield Line(number, row)
    except DataError:
        raise
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:    # ValueError: text that is not UTF-8, dates beyond Python's
        raise DataError(f"{name}: not readable as Parquet after row {number}: {error}") from error


def _open_hub(source: str) -> Rows:
    match = _HUB.fullmatch(source)
    assert match is not None, source
    options = dict(parse_qsl(match["options"] or ""))
    unknown = sorted(set(options) - set(HUB_OPTIONS))
    if unknown:
        raise DataError(f"{source}: unknown option {', '.join(unknown)}; known: {', '.join(HUB_OPTIONS)}")
    hashed = hashlib.sha256()
    return Rows(_lines_of_hub(source, match["name"], {"split": "train"} | options, hashed.update), hashed.hexdigest)


def _lines_of_hub(source: str, name: str, options: dict[str, str], update: Callable[[bytes], None]) -> Iterator[Line]:
    import datasets

    try:
        rows = datasets.load_dataset(name, **{HUB_OPTIONS[key]: value for key, value in options.items()})
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{source}: no such file here, and as a hub data set it cannot be loaded: {error}. Check the name and the network, "
                        "or download the files and name them") from error
    for number, row in enumerate(rows, 1):
        update(json.dumps(row, sort_keys=True, default=str).encode("ascii"))
        yield Line(number, dict(row))
