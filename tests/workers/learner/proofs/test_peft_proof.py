"""Adapters that the real peft wrote: rlsys computes what peft does, or refuses the adapter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlsys.errors import ConfigError
from rlsys.forward.lora import adapted_layers, add_adapters
from rlsys.models.adapters import read_adapter_config
from rlsys.tasks.builtin import TINY_MODELS
from workers.learner.files.adapter_files import fill_adapters
from workers.learner.proofs.against_peft import compare_with_peft

TARGETS = ["q_proj", "v_proj", "up_proj"]
IDS = torch.tensor([[3, 4, 5, 6, 7, 8]])


def load() -> Any:
    folder = TINY_MODELS["builtin:tiny"].folder(0, lambda _: None)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def write(folder: Path, **options: Any) -> Path:
    """An adapter that has learned something."""
    torch.manual_seed(0)
    model = get_peft_model(load(), LoraConfig(r=4, lora_alpha=12, target_modules=TARGETS, **options))
    model.save_pretrained(folder)
    file = folder / "adapter_model.safetensors"
    save_file({name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in load_file(file).items()}, file)
    return folder


def load_as_plain(folder: Path) -> Any:
    lm = load()
    add_adapters(lm, rank=4, alpha=12, targets=TARGETS, format=torch.float32, seed=0)
    fill_adapters(lm, folder)
    return lm


@pytest.mark.parametrize("start", [True, False, "gaussian", "orthogonal", "mica"])
def test_a_plain_adapter_is_computed_as_by_peft(start, tmp_path):
    folder = write(tmp_path / "adapter", init_lora_weights=start)
    assert read_adapter_config(folder).alpha == 12
    lm = load_as_plain(folder)
    compare_with_peft(lm, folder)
    by_peft = PeftModel.from_pretrained(load(), folder)(IDS).logits.log_softmax(-1)
    assert (lm(IDS).logits.log_softmax(-1) - by_peft).abs().max() < 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "olora"},
        {"use_rslora": True},
        {"alpha_pattern": {"q_proj": 3}},
        {"use_dora": True},
    ],
    ids=str,
)
def test_what_peft_computes_in_another_way_is_refused_and_would_be_noticed(options, tmp_path):
    folder = write(tmp_path / "adapter", **options)
    with pytest.raises(ConfigError, match=next(iter(options))):
        read_adapter_config(folder)
    with pytest.raises(ConfigError, match=r"peft computes other weights of model\.layers\.\d+\..*_proj than rlsys"):
        compare_with_peft(_without_extra_tensors(folder), folder)


def _without_extra_tensors(folder: Path) -> Any:
    file = folder / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "magnitude" not in name}, file)
    return load_as_plain(folder)


def test_a_converted_pissa_adapter_is_plain(tmp_path):
    torch.manual_seed(0)
    options = {"lora_alpha": 6, "target_modules": TARGETS}
    model = get_peft_model(load(), LoraConfig(r=2, init_lora_weights="pissa", **options))
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "start")
    model.peft_config["default"].init_lora_weights = "pissa"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter += 0.05 * torch.randn_like(parameter)
    trained = model(IDS).logits.log_softmax(-1)
    model.save_pretrained(tmp_path / "adapter", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    assert read_adapter_config(tmp_path / "adapter").rank == 4
    lm = load_as_plain(tmp_path / "adapter")
    compare_with_peft(lm, tmp_path / "adapter")
    assert (lm(IDS).logits.log_softmax(-1) - trained).abs().max() < 1e-3


def test_layers_of_each_name_are_compared_and_the_model_stays_as_it_is(tmp_path):
    folder = write(tmp_path / "adapter")
    lm = load_as_plain(folder)
    before = {name: layer.merged() for name, layer in adapted_layers(lm).items()}
    compare_with_peft(lm, folder)
    assert all(torch.equal(layer.merged(), before[name]) for name, layer in adapted_layers(lm).items())
    for name, layer in adapted_layers(lm).items():
        if "up_proj" in name:
            layer.scale *= 2
    with pytest.raises(ConfigError, match="up_proj than rlsys: they differ by up to "):
        compare_with_peft(lm, folder)
