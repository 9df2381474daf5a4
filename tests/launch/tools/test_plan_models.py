"""`rlsys plan --models`: a table of several models for one configuration."""

import json
from pathlib import Path
from typing import Any

import pytest
from click import UsageError
from click.testing import CliRunner

from launch.tools.cli import commands

SEVEN, PARAMETERS, ADAPTERS = "Qwen/Qwen2.5-7B", 7_615_616_512, 80_740_352  # adapters of rank 32, as peft counts them
ONE_GPU = ["cluster.placement=colocated", "policy.ranks=1", "rollout.engines=1", "rollout.gpu_memory=0.7"]
PLAN = ["plan", "configs/grpo_gsm8k_1.5b_gpu.yaml"]
LORA = ["policy.lora={rank: 32, alpha: 64}"]


def plan(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(
        commands, [*PLAN, *ONE_GPU, *words], env={"COLUMNS": "80"}, standalone_mode=False, catch_exceptions=False
    )
    return done.return_value, done.output


def figures(tmp_path: Path, *words: str) -> dict[str, Any]:
    file = tmp_path / "models.json"
    code, output = plan("--cluster", "1xH100", "--json", str(file), *words)
    assert code in (0, 1), output
    return json.loads(file.read_text())


def test_each_part_is_that_of_its_model(tmp_path: Path) -> None:
    models = figures(tmp_path, *LORA, "--models", f"{SEVEN},Qwen/Qwen2.5-32B")
    policy, engine = (models[SEVEN]["parts"][role] for role in ("policy", "engine"))
    assert policy["adapters"] == 2 * ADAPTERS
    assert policy["optimizer"] == 12 * ADAPTERS + 8 * 32 * 18_944, "Adam's state, and for the norm a matrix in float64"
    assert policy["buckets"] == max(2 * 152_064 * 3_584, (2 + 2 + 4) * ADAPTERS), (
        "the largest bucket, or gradients and their two copies"
    )
    assert policy["weights"] == 2 * (PARAMETERS + 152_064 * 3_584), "with the largest tensor, which is merged or sent"
    assert engine["weights"] == 2 * PARAMETERS
    assert models[SEVEN]["fits"]
    assert not models["Qwen/Qwen2.5-32B"]["fits"], "twice 61 GiB of weights"


def test_without_lora_there_are_no_adapters(tmp_path: Path) -> None:
    parts = figures(tmp_path, "--models", "Qwen/Qwen2.5-0.5B")["Qwen/Qwen2.5-0.5B"]["parts"]["policy"]
    assert "adapters" not in parts
    assert parts["optimizer"] > 12 * 494_032_768


def test_the_change_that_is_named_makes_the_model_fit() -> None:
    words = ["--cluster", "1xRTX4090", *LORA]
    code, output = plan(*words, "--models", f"{SEVEN},Qwen/Qwen2.5-32B")
    assert code == 1, "neither fits as it is"
    assert "✗ Qwen/Qwen2.5-32B: GPU 0" in output
    assert all(len(line) <= 80 for line in output.splitlines() if "fit" not in line and "GPU 0" not in line)
    [change] = [line for line in output.splitlines() if line.startswith(f"{SEVEN} fits with ")]
    changes = change.removeprefix(f"{SEVEN} fits with ").split()
    assert "policy.offload=[optimizer,params]" in changes, "24 GiB do not hold two copies of the weights"
    assert plan(*words, f"model.path={SEVEN}")[0] == 1
    assert plan(*words, f"model.path={SEVEN}", *changes)[0] == 0


def test_costs_of_one_model_say_nothing_of_others() -> None:
    with pytest.raises(UsageError, match="are of one"):
        plan("--models", SEVEN, "--measured", "costs.json")
    with pytest.raises(UsageError, match="empty name"):
        plan("--models", f"{SEVEN},,")
