"""`rlhf sft` and `rlhf dpo` killed at random moments and started again; by hand with twenty kills: kill_resume.py."""

from __future__ import annotations

import pytest
from kill_resume import kill_and_compare, write_inputs


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "kills"), [("sft", 1), ("dpo", 2)])
def test_a_killed_command_started_again_gives_the_same_bits(tmp_path, stage, kills):
    write_inputs(tmp_path, rows=40)
    hits, faults = kill_and_compare(tmp_path, stage, kills=kills, seed=kills, epochs=10.5)
    assert faults == []
    assert hits, "the run was over before it could be killed"
