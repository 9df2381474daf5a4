"""What is patched for vLLM's reload of weights."""

from functools import partial

import pytest
import torch

from workers.sync.vllm_backend import name_partial_loaders


def load(parameter: torch.Tensor, loaded: torch.Tensor, heads: int) -> None:
    parameter.copy_(loaded[:heads])


def test_a_loader_without_a_name_can_be_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.model_loader.reload import layerwise

    monkeypatch.setattr(layerwise, "_get_weight_loader", layerwise._get_weight_loader)
    layer = torch.nn.Linear(3, 2)
    layer.weight.weight_loader = loader = partial(load, heads=2)  # type: ignore[assignment]
    with pytest.raises(AttributeError, match="__name__"):
        layerwise._wrap_parameters_weight_loader(layer)
    name_partial_loaders()
    layerwise._wrap_parameters_weight_loader(layer)
    assert layer.weight.weight_loader.__name__ == "online_process_loader"
    assert layerwise._get_original_loader(layer.weight) is loader
