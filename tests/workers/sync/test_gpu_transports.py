"""What the transports for GPUs do by themselves, without a GPU."""

from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from workers.sync.cuda_ipc import Exports


def test_what_stays_in_memory_is_exported_once_and_what_is_freed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    exported: list[torch.Tensor] = []

    def export(tensor: torch.Tensor) -> tuple[Any, Any]:
        exported.append(tensor.clone())
        return None, len(exported) - 1

    monkeypatch.setattr(reductions, "reduce_tensor", export)
    exports, flat = Exports(), torch.arange(100.0)

    def sync() -> list[int]:
        """Exports two weights of one storage that stays, and a cast that does not; returns their numbers."""
        cast = flat[:20].double()
        numbers = [exports.export(tensor) for tensor in (flat[:20].view(4, 5), flat[20:50], cast)]
        assert torch.equal(exported[numbers[2]], cast)
        del cast
        exports.forget_freed()
        return numbers

    assert sync() == [0, 1, 2]
    flat += 1
    assert sync() == [0, 1, 3]
    assert len(exports.known) == 2
    assert exports.export(flat[:20].view(5, 4)) == 4  # the same memory in another shape
