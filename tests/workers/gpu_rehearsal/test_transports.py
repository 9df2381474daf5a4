"""Weights by NCCL and by CUDA IPC, from DeepSpeed's ranks into vLLM's engines, with a fake in place of the GPU alone.

Ours and vLLM's own code of both transports runs as on GPUs: every handshake, packing, order, dtype, name and handle.
Tests of one shape share its processes, in this order; `make rehearsal` runs all shapes.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rehearsed
import reusable_ranks
from fakes import make_batch
from safetensors.numpy import load_file

from rlsys.batching.packing import pack
from rlsys.config.schema import Config
from rlsys.errors import WorkerFailed, WorkerLost
from rlsys.types import Columns
from workers.fleet.process_registry import clear_registry
from workers.fleet.watchdog import Watchdog
from workers.learner.policy import PolicyGroup
from workers.rollout.engine_settings import CPU_ENVIRONMENT
from workers.rollout.rollout_group import RolloutGroup

pytestmark = pytest.mark.long

HERE = str(Path(__file__).parent)
FIRST_LAYER = "model.layers.0.self_attn"
BUCKET_BYTES = 1 << 18  # about ten buckets


@dataclass(frozen=True)
class Shape:
    transport: str
    engines: int
    tensor_parallel: int = 1

    @property
    def ranks(self) -> int:
        """By CUDA IPC, every worker of an engine shares its GPU with a rank."""
        return self.engines * self.tensor_parallel if self.transport == "cuda_ipc" else 2

    def overrides(self) -> list[str]:
        rollout = [f"rollout.engines={self.engines}", f"rollout.tensor_parallel={self.tensor_parallel}"]
        return [f"policy.ranks={self.ranks}", *rollout]


NCCL, NCCL_PARALLEL, IPC, IPC_PARALLEL = (Shape(t, *n) for t in ("nccl", "cuda_ipc") for n in ((3, 1), (1, 2)))
SHAPES = [NCCL, NCCL_PARALLEL, IPC, IPC_PARALLEL]
if "RLSYS_ALL_SHAPES" in os.environ:
    SHAPES += [Shape(transport, *n) for transport in ("nccl", "cuda_ipc") for n in ((1, 1), (3, 2))]


class Rehearsal:
    """Ranks and engines of a shape."""

    def __init__(self, spawn: Callable[..., Any], config: Config, model: str, transport: str, logs: Path):
        self.model, self.transport, self.logs, self.is_connected = model, transport, logs, False

        def rank(name: str) -> Any:
            return spawn(rehearsed.RehearsedRank, config, int(name.split("-")[1]), None)

        def engine(name: str) -> Any:
            return spawn(rehearsed.RehearsedEngine, config, int(name.split("-")[1]), CPU_ENVIRONMENT)

        self.policy = PolicyGroup(config, rank, Watchdog(logs))
        self.engines = RolloutGroup(config, engine, Watchdog(logs))
        self.policy.call_all("set_bucket_bytes", BUCKET_BYTES)
        self.engines.start(model, transport, 64)
        self.addresses = self.each_engine("rehearsal_addresses")

    def change(self, section: str, **fields: Any) -> None:
        """Changes a section of the configuration, from the next connection on."""
        config = self.policy.config
        self.policy.config = replace(config, **{section: replace(getattr(config, section), **fields)})

    def connect(self, zero_stage: int) -> None:
        """Starts the ranks and connects them with the engines, as at the start of a run."""
        self.change("policy", zero_stage=zero_stage)
        self.policy.call_all("set_config", self.policy.config)
        self.policy.start(self.model, self.transport)
        self.policy.connect(self.engines)
        self.is_connected = True

    def require_connection(self) -> None:
        """A test may be the first of its shape."""
        if not self.is_connected:
            self.connect(3)

    def each_engine(self, method: str, **options: Any) -> list[Any]:
        calls = {n: a.call.remote(method, **options) for n, a in self.engines.workers.actors.items()}
        return list(self.engines.watchdog.gather(calls, method).values())

    def plant(self, fault: str, worker: str, device: int | None = None) -> None:
        """Plants a fault of `fake_gpu.py` in a rank, or in an engine's worker for a device; None: in all its workers."""
        self.require_connection()
        kind, _, index = worker.partition("-")
        if kind == "policy":
            call = self.policy.actors[int(index)].plant.remote(fault)
        else:
            call = self.engines.workers.actors[worker].call.remote("rehearsal_plant", fault=fault, device=device)
        self.policy.watchdog.gather({worker: call}, "planting a fault")

    def train(self) -> None:
        """Makes one update, which moves every weight."""
        self.require_connection()
        batch = make_batch([0.0] * 4, [0, 0, 1, 1], [3, 5, 2, 4])
        tokens = int(batch.lengths.sum())
        columns = Columns(advantages=np.linspace(-1, 1, tokens, dtype=np.float32))
        weights, ranks = np.full(tokens, 1 / tokens, np.float32), len(self.policy.actors)
        packs = pack(batch, range(4), ranks=ranks, tokens_per_pack=64, columns=columns, weights=weights)
        self.policy.update(packs, 1e-3, 0.0)

    def require_policys_weights(self, folder: Path) -> None:
        """Compares what engines compute with against files of the policy: the key matrix lies after the query's."""
        folder.mkdir()
        self.policy.write_weights(str(folder))
        weights = {name: weight for file in folder.iterdir() for name, weight in load_file(file).items()}
        parallel = self.policy.config.rollout.tensor_parallel
        query, key = (weights[f"{FIRST_LAYER}.{name}_proj.weight"] for name in "qk")
        first, count = len(query) // parallel, len(key) // parallel
        rows = self.each_engine("rehearsal_rows", parameter=f"{FIRST_LAYER}.qkv_proj.weight", first=first, count=count)
        assert all(np.array_equal(held, key[:count]) for held in rows)

    def differences(self) -> set[str]:
        """How engines' weights differ from the policy's, which they then forget: else they would load no others."""
        update = self.engines.weight_update
        assert update
        expected = update.version, update.fingerprints
        differences = set(self.engines.workers.call("verify_weights", *expected, doing="verifying weights").values())
        for actor in self.engines.workers.actors.values():
            actor.forget_difference.remote()
        return differences


@pytest.fixture(scope="module")
def rehearsal(
    request: pytest.FixtureRequest,
    ray: Any,
    worker_options: Callable[..., Any],
    tiny: Callable[..., Config],
    model: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Rehearsal]:
    actors: list[Any] = []
    for module in (reusable_ranks, rehearsed):
        ray.cloudpickle.register_pickle_by_value(module)
    shape, logs = request.param, tmp_path_factory.mktemp("logs")

    def spawn(kind: type, config: Config, index: int, environment: dict[str, str] | None) -> Any:
        options = worker_options(environment)
        actors.append(ray.remote(kind).options(**options).remote(config, index, str(logs), HERE))
        return actors[-1]

    try:
        yield Rehearsal(spawn, tiny(*shape.overrides()), model, shape.transport, logs)
    finally:
        for actor in actors:
            ray.kill(actor)
        clear_registry(logs)  # also removes the shared memory of engines of several processes


def of(*shapes: Shape) -> Any:
    return pytest.mark.parametrize("rehearsal", shapes, ids=str, indirect=True)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


@of(*SHAPES)
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_every_engine_computes_with_the_policys_weights_after_each_sync(
    rehearsal: Rehearsal, tmp_path: Path, zero_stage: int
) -> None:
    rehearsal.connect(zero_stage)
    for version in (1, 2):
        rehearsal.train()
        rehearsal.policy.sync(version)
        assert rehearsal.differences() == {""}
        rehearsal.require_policys_weights(tmp_path / str(version))
    assert rehearsal.each_engine("rehearsal_addresses") == rehearsal.addresses, "CUDA graphs read them where they were"


@of(NCCL)
def test_an_engine_that_connects_late_is_waited_for(rehearsal: Rehearsal) -> None:
    rehearsal.engines.workers.actors["rollout-1"].be_late.remote(3.0)
    rehearsal.connect(3)
    rehearsal.policy.sync(1)
    assert rehearsal.differences() == {""}
    rehearsal.engines.workers.actors["rollout-1"].be_late.remote(0.0)


@of(NCCL, IPC)
def test_an_engine_that_loads_late_is_waited_for(rehearsal: Rehearsal) -> None:
    rehearsal.plant("late", "rollout-1")
    rehearsal.train()
    rehearsal.policy.sync(2)
    assert rehearsal.differences() == {""}


@of(NCCL, IPC)
def test_a_packet_that_is_exchanged_for_another_is_named(rehearsal: Rehearsal) -> None:
    rehearsal.plant("stale", "policy-0")
    rehearsal.train()
    rehearsal.policy.sync(3)
    different = rehearsal.differences() - {""}
    assert different
    assert all(" of 26 tensors differ: " in difference for difference in different)
    rehearsal.policy.sync(4)
    assert rehearsal.differences() == {""}


@of(NCCL)
def test_a_tensor_that_does_not_reach_the_model_is_named(rehearsal: Rehearsal) -> None:
    rehearsal.each_engine("rehearsal_lose", name=f"{FIRST_LAYER}.o_proj.weight")
    rehearsal.train()
    rehearsal.policy.sync(5)
    assert all("o_proj" in difference for difference in rehearsal.differences())


@of(IPC)
@pytest.mark.parametrize(
    ("fault", "reason"),
    [("raise", "RuntimeError: CUDA error: out of memory"), ("astray", "ValueError: IPC handle not found for GPU UUID")],
)
def test_an_engine_that_cannot_load_ends_the_sync(rehearsal: Rehearsal, fault: str, reason: str) -> None:
    rehearsal.connect(0)
    rehearsal.plant(fault, "rollout-1")
    with within(30), pytest.raises(WorkerFailed, match=f"loading weights: rollout-1 raised {reason}"):
        rehearsal.policy.sync(6)


@of(NCCL, IPC)
def test_an_engine_that_dies_ends_the_sync(rehearsal: Rehearsal) -> None:
    rehearsal.plant("die", "rollout-2")
    with within(30), pytest.raises(WorkerLost, match=r"loading weights: rollout-2 died"):
        rehearsal.policy.sync(6)
    del rehearsal.engines.workers.actors["rollout-2"]
    rehearsal.change("rollout", engines=2)


@of(IPC)
def test_a_rank_that_raises_is_named_with_its_first_error(rehearsal: Rehearsal) -> None:
    """What fails while it cleans up follows from that."""
    for _ in range(2):
        rehearsal.plant("raise", "policy-1")
    error = r"loading weights: policy-1 raised RuntimeError: CUDA error: out of memory, with 1 more to come"
    with within(30), pytest.raises(WorkerFailed, match=error):
        rehearsal.policy.sync(7)


@of(NCCL)
def test_a_packet_that_is_lost_ends_the_sync_after_the_limit(rehearsal: Rehearsal) -> None:
    rehearsal.connect(0)
    rehearsal.plant("lose", "policy-0")
    rehearsal.engines.watchdog.stall_s = 4.0
    stalled = r"loading weights: rollout-0, rollout-1 stalled: no answer for \d+ s \(watchdog.stall_s"
    with within(30), pytest.raises(WorkerLost, match=stalled):
        rehearsal.policy.sync(7)


@of(NCCL)
def test_an_engine_that_never_connects_ends_the_start(rehearsal: Rehearsal) -> None:
    rehearsal.engines.workers.actors["rollout-0"].be_late.remote(60.0)
    rehearsal.change("cluster", start_timeout_s=15)
    waiting = r"connecting policy and engines: .*rollout-0.* stalled: no answer for .* cluster.start_timeout_s"
    with within(45), pytest.raises(WorkerLost, match=waiting):
        rehearsal.connect(3)


@pytest.mark.skipif("RLSYS_ALL_SHAPES" not in os.environ, reason="run make rehearsal")
@of(Shape("nccl", 3, 2))
def test_one_worker_of_an_engine_that_cannot_load_ends_the_sync(rehearsal: Rehearsal) -> None:
    """The engine's other worker waits for it in a broadcast, and vLLM would wait for that one."""
    rehearsal.connect(0)
    rehearsal.plant("raise", "rollout-0", device=1)
    with within(60), pytest.raises(WorkerLost, match=r"loading weights: rollout-0 died"):
        rehearsal.policy.sync(3)
    assert "RuntimeError: CUDA error: out of memory" in (rehearsal.logs / "rollout-0.log").read_text()


@of(NCCL_PARALLEL, IPC_PARALLEL)
def test_a_rank_that_dies_ends_the_sync(rehearsal: Rehearsal) -> None:
    rehearsal.plant("die", "policy-1")
    with within(30), pytest.raises(WorkerLost, match="policy-1 died"):
        rehearsal.policy.sync(3)
