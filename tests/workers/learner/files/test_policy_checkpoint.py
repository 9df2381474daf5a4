"""What the files of a checkpoint's model hold."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import build_family
from transformers import AutoConfig, AutoModelForCausalLM

from rlsys.config.loading import load_config
from workers.learner.files.loading import load_packed
from workers.learner.files.policy_checkpoint import copy_weights, model_files, write_model_settings
from workers.learner.files.tensor_files import write_tensors

CONFIG = Path(__file__).parents[4] / "configs" / "tiny_cpu.yaml"


def state(stage: int, ranks: int) -> Any:
    return SimpleNamespace(rank=0, ranks=ranks, stage=stage)


def test_a_small_model_is_one_file_unless_ranks_hold_parts_of_it() -> None:
    tensors = {f"p{i}": torch.zeros(size) for i, size in enumerate((2, 2, 4))}
    assert model_files(tensors, state(2, 2)) == {"model.safetensors": ["p0", "p1", "p2"]}
    assert model_files(tensors, state(3, 1)) == {"model.safetensors": ["p0", "p1", "p2"]}
    halves = {"model-00001-of-00002.safetensors": ["p0", "p1"], "model-00002-of-00002.safetensors": ["p2"]}
    assert model_files(tensors, state(3, 2)) == halves


def test_buffers_that_belong_to_the_model_are_in_its_files(tmp_path: Path) -> None:
    lm = build_family("deepseek_v3")
    name = next(name for name, _ in lm.named_buffers() if name.endswith("e_score_correction_bias"))
    lm.get_buffer(name).copy_(torch.arange(lm.get_buffer(name).numel()))
    for file, tensors in copy_weights(state(2, 1), lm, disk_format=True).items():
        write_tensors(tmp_path / file, tensors)
    write_model_settings(lm, lm.config, tmp_path)
    loaded, remarks = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not remarks["missing_keys"]
    assert not remarks["unexpected_keys"]
    assert loaded.state_dict().keys() == lm.state_dict().keys()
    assert all(torch.equal(tensor, lm.state_dict()[key]) for key, tensor in loaded.state_dict().items())


@pytest.mark.parametrize(
    ("family", "rate"), [("seed_oss", "residual_dropout"), ("opt", "dropout"), ("mixtral", "router_jitter_noise")]
)
def test_a_checkpoint_keeps_the_rates_of_noise_that_training_does_without(
    family: str, rate: str, tmp_path: Path
) -> None:
    source, saved = tmp_path / "source", tmp_path / "saved"
    build_family(family, **{rate: 0.5}).save_pretrained(source)
    lm = load_packed(load_config(CONFIG, []), str(source)).lm
    assert getattr(lm.config, rate) == 0
    saved.mkdir()
    write_model_settings(lm, AutoConfig.from_pretrained(source), saved)
    assert (saved / "config.json").read_text() == (source / "config.json").read_text()
    assert getattr(lm.config, rate) == 0
