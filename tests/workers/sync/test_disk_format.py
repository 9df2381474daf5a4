"""What is sent has the names and shapes that transformers writes into files."""

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from workers.sync.sending import PolicyWeights

sys.path.insert(0, str(Path(__file__).parents[2] / "rlsys" / "packs"))
from families import build_family


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "nemotron_h", "gpt_oss", "llama"])
def test_weights_are_sent_as_transformers_saves_them(family, tmp_path):
    build_family(family).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    engine = SimpleNamespace(gathered=lambda *parameters: nullcontext())
    weights = PolicyWeights(model, engine, torch.float32, rank=0, shards=1)
    saved = load_file(tmp_path / "model.safetensors")
    trained = {name for name in saved if saved[name].is_floating_point()} - {
        name for name, _ in model.named_buffers() if name in saved
    }
    sent = dict(tensor for bucket in weights.full_buckets() for tensor in bucket)
    assert set(sent) <= set(saved)
    assert {name for name in trained if name not in sent} <= {n for n in saved if "bias" in n}, "only buffers stay"
    for name, tensor in sent.items():
        assert torch.equal(tensor, saved[name])
    assert [(name, list(tensor.shape)) for name, tensor in sent.items()] == [
        (name, shape) for name, _, shape in weights.manifest()
    ]
