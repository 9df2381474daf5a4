"""How the weights of a checkpoint are dealt to files."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from workers.learner import policy_checkpoint
from workers.learner.policy_checkpoint import file_index, model_files


def model(*sizes: int) -> Any:
    lm = nn.Module()
    for i, size in enumerate(sizes):
        lm.register_parameter(f"p{i}", nn.Parameter(torch.zeros(size)))
    return lm


def zero(stage: int, ranks: int) -> Any:
    return SimpleNamespace(ranks=ranks, settings=SimpleNamespace(zero_stage=stage))


def test_a_small_model_is_one_file_unless_ranks_hold_parts_of_it() -> None:
    lm = model(2, 2, 4)
    assert model_files(lm, zero(2, 2)) == {"model.safetensors": ["p0", "p1", "p2"]}
    assert model_files(lm, zero(3, 1)) == {"model.safetensors": ["p0", "p1", "p2"]}
    halves = {"model-00001-of-00002.safetensors": ["p0", "p1"], "model-00002-of-00002.safetensors": ["p2"]}
    assert model_files(lm, zero(3, 2)) == halves


def test_no_file_is_larger_than_the_limit_but_for_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_checkpoint, "MAX_FILE", 40)  # ten numbers
    files = model_files(model(5, 5, 1, 12, 3, 7), zero(0, 1))
    assert list(files.values()) == [["p0", "p1"], ["p2"], ["p3"], ["p4", "p5"]]
    assert next(iter(files)) == "model-00001-of-00004.safetensors"
    index = file_index(model(5, 5, 1, 12, 3, 7), zero(0, 1))
    assert index["metadata"] == {"total_size": 4 * 33}
    assert index["weight_map"]["p3"] == "model-00003-of-00004.safetensors"
