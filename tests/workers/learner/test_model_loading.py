"""Models that cannot be trained are refused in a sentence; a damaged one is not taken for such."""

import sys
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


def start(folder: Path) -> None:
    """What a reference does at its start."""
    config = load_config(ROOT / "configs" / "tiny_cpu.yaml")
    packed = PackedLogprobs(load_causal_lm(config, str(folder), config.policy))
    with torch.no_grad():
        prove_logprobs(packed.lm, lambda packs, **options: [packed(pack, **options) for pack in packs])


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_whose_layers_do_not_compute_packs_is_refused_by_name(family: str, tmp_path: Path) -> None:
    build_family(family).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"a {family} model, which rlsys cannot train"):
        start(tmp_path)


def test_damaged_weights_are_not_blamed_on_the_architecture(tmp_path: Path) -> None:
    build_family("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(5)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RuntimeError) as damaged:
        start(tmp_path)
    assert not isinstance(damaged.value, ConfigError)
