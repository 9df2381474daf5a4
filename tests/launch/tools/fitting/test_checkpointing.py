"""Whether a run computes activations again, by the GPUs that Ray finds. `test_fit.py` has the rule itself."""

from pathlib import Path
from typing import Any

import pytest

from launch.tools.fitting.checkpointing import with_checkpointing_chosen
from rlsys.config.loading import load_config

CONFIGS = Path(__file__).parents[4] / "configs"


def node(kind: str, gpus: int = 8, alive: bool = True) -> dict[str, Any]:
    """As `ray.nodes()` describes it."""
    resources = {"CPU": 64.0, "GPU": float(gpus), f"accelerator_type:{kind}": 1.0}
    return {"NodeManagerAddress": "10.0.0.1", "Alive": alive, "Resources": resources}


def chosen(name: str, nodes: list[dict[str, Any]], *overrides: str) -> tuple[bool | None, str]:
    """What the run's policy does, and what the user reads."""
    notes: list[str] = []
    config = with_checkpointing_chosen(load_config(CONFIGS / name, overrides), nodes, notes.append)
    return config.policy.gradient_checkpointing, "\n".join(notes)


@pytest.mark.parametrize(
    ("name", "nodes", "recompute", "words"),
    [
        (
            "dr_grpo_7b_gpu.yaml",
            [node("H100")],
            True,
            "policy.gradient_checkpointing is true: a GPU then holds at most 65",
        ),
        (
            "dr_grpo_7b_gpu.yaml",
            [node("H200")],
            False,
            "policy.gradient_checkpointing is false: a GPU then holds at most",
        ),
        ("dr_grpo_7b_gpu.yaml", [node("H200"), node("H100", alive=False)], False, "is false"),
        ("dr_grpo_7b_gpu.yaml", [node("H200", 4), node("H100", 4)], True, "is true"),
        (
            "dr_grpo_7b_gpu.yaml",
            [node("ABACUS")],
            True,
            "is not known (node 10.0.0.1 has GPUs of a kind that is not known",
        ),
        ("dr_grpo_7b_gpu.yaml", [node("H200", 1)], True, "is true"),  # it will be refused, as too few
        ("grpo_gsm8k_1.5b_gpu.yaml", [node("H100")], False, "of 79.1 GiB by estimate"),
    ],
)
def test_a_run_recomputes_where_its_gpus_lack_room(
    name: str, nodes: list[dict[str, Any]], recompute: bool, words: str
) -> None:
    decision, note = chosen(name, nodes)
    assert decision is recompute
    assert words in note


@pytest.mark.parametrize("value", [True, False])
def test_a_value_in_the_configuration_stays(value: bool) -> None:
    option = f"policy.gradient_checkpointing={str(value).lower()}"
    assert chosen("dr_grpo_7b_gpu.yaml", [node("H200")], option) == (value, "")


def test_offloaded_activations_are_those_of_checkpointing() -> None:
    assert chosen("grpo_gsm8k_1.5b_gpu.yaml", [node("H100")], "policy.offload=activations")[0] is True


def test_a_model_of_unknown_shape_recomputes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "something_new"}')
    decision, note = chosen("grpo_gsm8k_1.5b_gpu.yaml", [node("H100")], f"model.path={tmp_path}")
    assert decision is True
    assert "is not known" in note
    assert "something_new" in note
