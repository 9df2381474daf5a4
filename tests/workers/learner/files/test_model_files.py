"""Models that are built from descriptions of their files, and read in parts, are those that transformers loads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, build_family
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from workers.learner.files.model_files import ModelFiles, describing_files
from workers.learner.files.partitioning import tie_equal_weights


def describe(folder: Path, dtype: torch.dtype) -> tuple[Any, ModelFiles]:
    stored: dict[str, Any] = {}
    with describing_files(stored):
        lm = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    files = ModelFiles(lm, stored)
    tie_equal_weights(lm, files)
    return lm, files


def read_in_parts(files: ModelFiles, name: str, tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    size = -(-tensor.numel() // ranks)
    parts = []
    for rank in range(ranks):
        first = min(rank * size, tensor.numel())
        parts.append(files.read(name, tensor, first, min(size, tensor.numel() - first)).to(tensor.dtype))
    return torch.cat(parts).view(tensor.shape)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_buffers_are_those_that_transformers_loads(family: str, tmp_path: Path) -> None:
    build_family(family).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for dtype in (torch.float32, torch.bfloat16):
        expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        lm, files = describe(tmp_path, dtype)
        assert lm.state_dict().keys() == expected.state_dict().keys()
        for name, whole in expected.named_parameters():
            described = lm.get_parameter(name)
            assert described.is_meta
            assert described.dtype == whole.dtype
            assert torch.equal(read_in_parts(files, name, described, 3), whole)
        for name, whole in expected.named_buffers():
            buffer = lm.get_buffer(name)
            actual = read_in_parts(files, name, buffer, 1) if buffer.is_meta else buffer
            assert torch.equal(actual, whole)


@pytest.mark.parametrize("equal", [True, False])
def test_tied_weights_that_are_stored_twice_are_one_if_they_are_equal(tmp_path: Path, equal: bool) -> None:
    build_family("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * (1 if equal else 2)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    lm, files = describe(tmp_path, torch.float32)
    tied = lm.lm_head.weight is lm.model.embed_tokens.weight
    assert tied == (expected.lm_head.weight is expected.model.embed_tokens.weight) == equal
    assert torch.equal(read_in_parts(files, "lm_head.weight", lm.lm_head.weight, 2), expected.lm_head.weight)


def test_tied_weights_may_be_stored_under_the_name_of_the_output_layer(tmp_path: Path) -> None:
    build_family("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    lm, files = describe(tmp_path, torch.float32)
    assert lm.lm_head.weight is lm.model.embed_tokens.weight
    assert torch.equal(read_in_parts(files, "lm_head.weight", lm.lm_head.weight, 2), weights["lm_head.weight"])
