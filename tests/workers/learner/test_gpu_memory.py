"""When a worker returns freed GPU memory to the device."""

from collections.abc import Callable

import pytest
import torch

from rlsys.config.schema import Config
from workers.learner import gpu_memory
from workers.learner.gpu_memory import frees_gpu_memory, frees_gpu_memory_for_models
from workers.learner.policy import PolicyRank

COLOCATED = ("cluster.device=gpu", "cluster.placement=colocated")
CRITIC = ("algorithm.advantage=gae",)
NO_REFERENCE = ("reference.kl_coef=0",)


class Worker:
    def __init__(self, config: Config):
        self.config = config

    @frees_gpu_memory
    def double(self, number: int, *, fails: bool = False) -> int:
        if fails:
            raise ValueError("no")
        return 2 * number

    @frees_gpu_memory_for_models
    def halve(self, number: int) -> int:
        return number // 2


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    times: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: times.append(1))
    return times


@pytest.mark.parametrize(
    ("overrides", "times"), [(COLOCATED, 2), (("cluster.device=gpu",), 0), (("cluster.device=cpu",), 0)]
)
def test_a_worker_that_shares_its_gpu_keeps_no_freed_memory(
    tiny: Callable[..., Config], emptied: list[int], overrides: tuple[str, ...], times: int
) -> None:
    worker = Worker(tiny(*overrides))
    assert worker.double(3) == 6
    with pytest.raises(ValueError, match="no"):
        worker.double(3, fails=True)
    assert len(emptied) == times


@pytest.mark.parametrize(
    ("overrides", "times"),
    [
        ((*COLOCATED, *NO_REFERENCE), 0),
        ((*COLOCATED, "reference.kl_coef=0.1", "reference.gpus=1"), 1),
        ((*COLOCATED, "reference.kl_coef=0.1", "reference.gpus=0"), 0),
        ((*COLOCATED, *NO_REFERENCE, *CRITIC), 1),
        (("cluster.device=gpu", *NO_REFERENCE, *CRITIC), 0),
    ],
)
def test_while_engines_sleep_memory_is_freed_for_other_models_only(
    tiny: Callable[..., Config], emptied: list[int], overrides: tuple[str, ...], times: int
) -> None:
    assert Worker(tiny(*overrides)).halve(6) == 3
    assert len(emptied) == times


def test_memory_is_free_before_the_first_part_wakes_the_engines(
    tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    class Sender:
        def send(self, part: int, verify: bool) -> None:
            calls.append(f"send {part}")

    monkeypatch.setattr("workers.learner.policy.free_gpu_memory", lambda config: calls.append("free"))
    rank = object.__new__(PolicyRank)
    rank.config, rank.weight_sender = tiny(*COLOCATED), Sender()  # type: ignore[assignment]
    rank.send(0)
    rank.send(1)
    assert calls == ["free", "send 0", "send 1"]


def test_present_objects_are_left_out_of_later_collections() -> None:
    import gc

    try:
        gpu_memory.freeze_started_objects()
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()
