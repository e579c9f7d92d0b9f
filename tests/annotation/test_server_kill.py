"""Acknowledged means stored: the server is killed while it is written to. `kill_server.py` does the same for more rounds."""

from __future__ import annotations

from pathlib import Path

import pytest
from kill_server import survive

from annotation.home import Home


@pytest.mark.slow
def test_kill_minus_nine_loses_no_acknowledged_response(server_python: Path, tmp_path: Path) -> None:
    seen, losses = survive(Home(tmp_path / "home"), server_python, 2, None)
    assert seen.refused == []
    assert seen.answers > 20    # it was under load
    assert len(seen.records) >= 20
    assert [loss for loss in losses if not loss.nothing] == []
