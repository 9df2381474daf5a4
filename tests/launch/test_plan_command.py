"""`rlsys plan --simulate` as a user types it."""

import json

import pytest
from click.testing import CliRunner

from launch.cli import commands

COSTS = {"step_s": 0.01, "sequence_s": 1e-4, "prompt_s": 1e-6, "score_s": 1e-5, "update_s": 1e-4, "sync_s": 0.5}


@pytest.fixture
def costs(tmp_path) -> str:
    (tmp_path / "costs.json").write_text(json.dumps(COSTS))
    return str(tmp_path / "costs.json")


def planned(*words: str) -> list[str]:
    found = CliRunner().invoke(
        commands, ["plan", *words, "--steps", "2"], env={"COLUMNS": "80"}, catch_exceptions=False
    )
    assert found.exit_code == 0, found.output
    return [line.strip() for line in found.output.splitlines()]


def test_every_way_has_a_line_and_fits_80_columns(costs):
    lines = planned("configs/tiny_cpu.yaml", "--simulate", costs, "--ragged", "5,10")
    ways = [line.split("  ")[0] for line in lines if line.startswith("lag ")]
    assert ways == ["lag 0", "lag 1", "lag 2", "lag 1 in flight", "lag 2 in flight +25%"]
    assert max(map(len, lines[:8])) <= 80
    assert any("100%" in line for line in lines)


def test_placements_are_tried_on_gpus_and_need_no_data(costs):
    lines = planned("configs/dapo_7b_gpu.yaml", "--simulate", costs, "--gpus", "4", "--ragged", "50,200")
    assert [line.split()[2:4] for line in lines if line.startswith("lag 0")] == [
        ["4", "same"],
        ["1", "3"],
        ["2", "2"],
        ["3", "1"],
    ]
