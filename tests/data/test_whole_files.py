"""A file is replaced as a whole, or what was there stays and the error says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.errors import StorageError
from rlhf.whole_files import replace_file


def test_a_file_is_replaced_and_nothing_stays_beside_it(tmp_path: Path) -> None:
    for text in ("first, longer than the second", "second \u2028 ü"):
        replace_file(tmp_path / "file.json", text)
        assert (tmp_path / "file.json").read_text(encoding="utf-8") == text
    assert [path.name for path in tmp_path.iterdir()] == ["file.json"]


def test_what_cannot_be_replaced_stays_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "inside").touch()
    with pytest.raises(StorageError, match=r"taken could not be written .*directory.*; what was there before is intact\. Free some space"):
        replace_file(tmp_path / "taken", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["inside"]


@pytest.mark.parametrize("place", ["absent/file.json", "file/file.json"])
def test_a_folder_that_is_none_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=f"{place} could not be written .*nothing was left behind"):
        replace_file(tmp_path / place, "text")
