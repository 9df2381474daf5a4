"""When a worker returns freed GPU memory to the device."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from rlsys.config.schema import Config
from workers.learner import gpu_memory
from workers.learner.gpu_memory import frees_gpu_memory, frees_gpu_memory_for_models
from workers.learner.policy import PolicyRank
from workers.learner.ranks import LearnerGroup
from workers.sync import Message
from workers.sync.weight_sync import WeightSync, WeightUpdate

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
        ((*COLOCATED, "reference.kl_coef=0.1"), 1),
        ((*COLOCATED, "reference.kl_coef=0.1", "reference.place=cpu"), 0),
        ((*COLOCATED, *NO_REFERENCE, *CRITIC), 1),
        (("cluster.device=gpu", *NO_REFERENCE, *CRITIC), 0),
    ],
)
def test_while_engines_sleep_memory_is_freed_for_other_models_only(
    tiny: Callable[..., Config], emptied: list[int], overrides: tuple[str, ...], times: int
) -> None:
    assert Worker(tiny(*overrides)).halve(6) == 3
    assert len(emptied) == times


class Ranks(LearnerGroup):
    """One rank, which makes a started call when its answer is awaited, as late as Ray may."""

    def __init__(self, config: Config, calls: list[str]):
        self.role, self.config, self.calls, self.lock = "policy", config, calls, threading.RLock()
        self.watchdog: Any = None
        self.rank = object.__new__(PolicyRank)
        self.rank.config = config
        self.rank.weight_sender = self  # type: ignore[assignment]

    def start_calls(self, method: str, *arguments: Any) -> dict[str, Callable[[], Any]]:
        if method in ("connection_info", "connect", "fingerprints", "finish_send"):
            return {"policy-0": lambda: {"parts": 2, "by_position": True}}
        return {"policy-0": partial(getattr(self.rank, method), *arguments)}

    def _wait(self, calls: dict[str, Callable[[], Any]], doing: str, timeout_s: float) -> list[Any]:
        return [call() for call in calls.values()]

    def send(self, part: int, verify: bool) -> None:
        self.calls.append(f"send {part}")


class Engines:
    """As a sync sees them."""

    def __init__(self, config: Config, calls: list[str]):
        self.can_sleep = config.cluster.placement == "colocated"
        self.weight_update: WeightUpdate | None = None
        self.calls = calls

    def connect(self, info: Message) -> None: ...
    def verify_weights(self) -> None: ...
    def start_calls(self, method: str, *arguments: Any) -> dict[str, Any]: ...

    def replacements_paused(self) -> AbstractContextManager[object]:
        return nullcontext()

    def load_weights(self, update: WeightUpdate, sends: dict[str, Any] | None = None) -> dict[str, Any]:
        self.calls.append("engines wake")
        for [send] in update.parts:
            send()
        return {"policy-0": {}}


@pytest.mark.parametrize(
    ("overrides", "freed"), [(COLOCATED, ["free"]), (("cluster.device=gpu",), []), (("cluster.device=cpu",), [])]
)
def test_all_ranks_have_freed_their_memory_before_an_engine_wakes(
    tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], freed: list[str]
) -> None:
    config, calls = tiny(*overrides), list[str]()
    monkeypatch.setattr("workers.learner.policy.free_gpu_memory", lambda config: calls.append("free"))
    WeightSync(Ranks(config, calls), Engines(config, calls), "shared_memory").run(version=1)
    assert calls == [*freed, "engines wake", "send 0", "send 1"]


def test_present_objects_are_left_out_of_later_collections() -> None:
    import gc

    try:
        gpu_memory.freeze_started_objects()
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()
