"""Numbers of a pack on their way to the device."""

from typing import Any

import numpy as np
import pytest
import torch

from rlsys.forward.transfer import to_device


def test_on_cpu_a_tensor_has_the_numbers_and_their_type() -> None:
    assert to_device(np.array([1.5, 2.0], np.float32), "cpu").tolist() == [1.5, 2.0]
    assert to_device([1, 2], torch.device("cpu"), torch.long).dtype == torch.long
    here = torch.arange(3)
    assert to_device(here, "cpu") is here


def test_a_gpu_copies_from_pinned_memory_and_the_host_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self + 0.5)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, **how: copies.append((self.tolist(), device, how)))
    to_device(np.array([1.0, 2.0]), "cuda:0")
    assert copies == [([1.5, 2.5], "cuda:0", {"non_blocking": True})]
