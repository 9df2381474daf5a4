"""When a worker returns freed GPU memory to the device."""

from types import SimpleNamespace

import pytest
import torch

from workers.learner.gpu_memory import frees_gpu_memory


class Worker:
    def __init__(self, device: str, placement: str):
        self.config = SimpleNamespace(cluster=SimpleNamespace(device=device, placement=placement))

    @frees_gpu_memory
    def double(self, number: int, *, fails: bool = False) -> int:
        if fails:
            raise ValueError("no")
        return 2 * number


@pytest.mark.parametrize(
    ("device", "placement", "times"), [("gpu", "colocated", 2), ("gpu", "separate", 0), ("cpu", "colocated", 0)]
)
def test_a_worker_that_shares_its_gpu_keeps_no_freed_memory(
    monkeypatch: pytest.MonkeyPatch, device: str, placement: str, times: int
) -> None:
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    worker = Worker(device, placement)
    assert worker.double(3) == 6
    with pytest.raises(ValueError, match="no"):
        worker.double(3, fails=True)
    assert len(emptied) == times
