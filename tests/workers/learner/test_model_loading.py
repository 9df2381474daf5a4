"""Models that cannot be trained are refused in a sentence; a damaged one is not taken for such."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlsys.config.loading import load_config
from rlsys.config.schema import ConfigError
from rlsys.packs.logprobs import PackedLogprobs
from workers.learner.model import load_causal_lm
from workers.learner.proof import prove_logprobs

sys.path.insert(0, str(Path(__file__).parents[2] / "rlsys" / "packs"))
from families import REFUSED, build_family

ROOT = Path(__file__).parents[3]


def start(folder: Path, *overrides: str) -> None:
    """What a reference does at its start."""
    config = load_config(ROOT / "configs" / "tiny_cpu.yaml", overrides)
    packed = PackedLogprobs(load_causal_lm(config, str(folder), config.policy))
    with torch.no_grad():
        prove_logprobs(packed.lm, lambda packs, **options: [packed(pack, **options) for pack in packs])


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_whose_layers_do_not_compute_packs_is_refused_by_name(family: str, tmp_path: Path) -> None:
    build_family(family).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"a {family} model, which rlsys cannot train"):
        start(tmp_path)


def lose_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def change_a_shape(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(5)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def truncate(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lose_a_tensor, "do not hold model.norm.weight"),
        (change_a_shape, r"model.safetensors: model.norm.weight is \[5\], and by config.json \[32\]"),
        (truncate, "model.safetensors is truncated or damaged: it has"),
    ],
)
def test_damaged_weights_are_named_and_not_blamed_on_the_architecture(
    tmp_path: Path, damage: Callable[[Path], None], sentence: str, stage: int
) -> None:
    build_family("llama").save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(ConfigError, match=sentence) as damaged:
        start(tmp_path, f"policy.zero_stage={stage}")
    assert "cannot train" not in str(damaged.value)
    assert "again" in str(damaged.value), "it says what to do"
