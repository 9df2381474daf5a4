"""Adapter-only sync without processes: what is sent, and what an engine loads."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from rlsys.errors import ConfigError
from rlsys.forward.lora import add_adapters
from workers.sync.adapters import AdapterMatrices, AdapterMerger
from workers.sync.sending import PolicyWeights

WHOLE = type("Whole", (), {"gathered": lambda self, *parameters: nullcontext()})()
UP, NORM = "up_proj.weight", "norm.weight"


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.norm = nn.Linear(3, 5, bias=False), nn.LayerNorm(5, bias=False)

    def get_output_embeddings(self) -> None:
        return None


class Engine(nn.Module):
    """Notes what is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.loads = nn.Parameter(torch.zeros(1)), list[dict[str, torch.Tensor]]()

    def load_weights(self, weights: Any) -> None:
        self.loads.append(dict(weights))


def make_merger(engine: Engine, in_place: bool, dtype: str = "float32", format: str = "float32") -> AdapterMerger:
    files = {UP: torch.arange(15.0).view(5, 3), NORM: torch.ones(5) / 3, "lm_head.weight": torch.zeros(5, 5)}
    manifest = [(UP, format, [5, 3]), (NORM, format, [5])]
    return AdapterMerger(engine, files.items(), manifest, [UP], scale=0.5, dtype=dtype, in_place=in_place)


def test_a_and_b_travel_in_the_policys_dtype_and_nothing_else_does() -> None:
    lm = Policy().bfloat16()
    add_adapters(lm, rank=2, alpha=4, targets=["up_proj"], format=torch.float32, seed=0)
    matrices = AdapterMatrices(PolicyWeights(lm, WHOLE, torch.float32, 0, 1))
    expected = [("up_proj.lora_A", "bfloat16", [2, 3]), ("up_proj.lora_B", "bfloat16", [5, 2])]
    assert matrices.manifest() == expected
    with matrices.own(expected, whole_of_all_ranks=False) as shards:
        sent = [(name, first, tensor is getattr(lm.up_proj, name[-6:])) for name, first, tensor in shards]
    assert sent == [
        ("up_proj.lora_A", 0, True),
        ("up_proj.lora_B", 0, True),
    ]


def test_an_engine_loads_merged_weights_and_the_base_once() -> None:
    engine = Engine()
    merger = make_merger(engine, in_place=True)
    for sync, value in enumerate((1.0, 2.0)):
        a, b = torch.full((1, 3), value), torch.arange(5.0).view(5, 1)
        engine.load_weights([("up_proj.lora_A", a)])
        engine.load_weights([("up_proj.lora_B", b)])
        a.zero_()  # a transport uses its memory again
        assert len(engine.loads) == sync, "nothing is loaded before all has arrived"
        merger.merge()
        expected = [[3 * row + column + 0.5 * row * value for column in range(3)] for row in range(5)]
        assert engine.loads[-1][UP].tolist() == expected
    assert [list(loaded) for loaded in engine.loads] == [[UP, NORM], [UP]]


def test_an_engine_that_converts_weights_loads_all_each_time() -> None:
    engine = Engine()
    merger = make_merger(engine, in_place=False)
    for _ in range(2):
        engine.load_weights([("up_proj.lora_A", torch.ones(1, 3)), ("up_proj.lora_B", torch.ones(5, 1))])
        merger.merge()
    assert [list(loaded) for loaded in engine.loads] == [[UP, NORM]] * 2


def test_weights_are_rounded_as_the_policy_rounds_them() -> None:
    engine = Engine()
    merger = make_merger(engine, in_place=True, dtype="bfloat16", format="bfloat16")
    matrices = {"up_proj.lora_A": torch.ones(1, 3), "up_proj.lora_B": torch.full((5, 1), 1 / 64)}
    engine.load_weights([(name, matrix.bfloat16()) for name, matrix in matrices.items()])
    merger.merge()
    # Between 8 and 16, numbers in bfloat16 are 1/16 apart: 1/128 is lost above 2.
    assert engine.loads[0][UP].flatten().tolist() == [1 / 128, 1 + 1 / 128, *map(float, range(2, 15))]
    assert engine.loads[0][NORM].dtype == torch.bfloat16


def test_files_with_other_names_are_refused() -> None:
    manifest = [(UP, "float32", [5, 3]), (NORM, "float32", [5])]
    with pytest.raises(ConfigError, match=r"files have no norm\.weight, which the policy has.* Use sync\.what all"):
        AdapterMerger(Engine(), [(UP, torch.zeros(5, 3))], manifest, [UP], scale=1.0, dtype="float32", in_place=True)
