"""The load benchmark in small: nothing fails, nothing that was acknowledged is lost, and every bar is in its object."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORRECTNESS = ("requests that failed", "not stored", "wrong status", "responses stored")
"""The other bars are about speed, which the tests' machine shares."""


def test_a_small_team_loses_nothing(server_python: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.annotation_load", "--quick", "--json"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode in (0, 1), ran.stderr[-3000:]
    bars = json.loads(ran.stdout)["bars"]
    assert ran.returncode == int(not all(bar["holds"] for bar in bars))
    assert len(bars) == 19
    assert [bar for bar in bars if any(name in bar["name"] for name in CORRECTNESS) and not bar["holds"]] == []
