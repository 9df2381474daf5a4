"""What is sent has the names and shapes that transformers writes into files."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from families import build_family
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlsys.errors import ConfigError
from workers.sync.sending import PolicyWeights


@pytest.mark.parametrize(
    "family",
    ["qwen3_moe", "deepseek_v3", "nemotron_h", "gpt_oss", "llama", "glm4_moe", "minimax", "ernie4_5_moe", "lfm2_moe"],
)
def test_weights_are_sent_as_transformers_saves_them(family, tmp_path):
    build_family(family).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    engine = SimpleNamespace(gathered=lambda *parameters: nullcontext())
    weights = PolicyWeights(model, engine, torch.float32, rank=0, shards=1)
    saved = load_file(tmp_path / "model.safetensors")
    trained = {name for name in saved if saved[name].is_floating_point()} - {
        name for name, _ in model.named_buffers() if name in saved
    }
    with weights.whole(weights.manifest()) as tensors:
        sent = dict(tensors)
    assert set(sent) <= set(saved)
    assert {name for name in trained if name not in sent} <= {n for n in saved if "bias" in n}, "only buffers stay"
    for name, tensor in sent.items():
        assert torch.equal(tensor, saved[name])
    assert [(name, list(tensor.shape)) for name, tensor in sent.items()] == [
        (name, shape) for name, _, shape in weights.manifest()
    ]


def test_a_model_whose_files_hold_several_parameters_in_one_tensor_is_refused(tmp_path):
    build_family("hrm_text").save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    parts = model.model.L_module.layers[0].mlp
    both = saved["model.L_module.layers.0.mlp.gate_up_proj.weight"]
    assert torch.equal(both, torch.cat([parts.gate_proj.weight, parts.up_proj.weight])), "as transformers saves them"
    with pytest.raises(ConfigError, match=r"HrmTextForCausalLM hold .* in one tensor, model\.L_module\.layers\.0\."):
        PolicyWeights(model, SimpleNamespace(), torch.float32, rank=0, shards=1)
