"""Weights by NCCL and by CUDA IPC, from DeepSpeed's ranks into vLLM's engines, with a fake in place of the GPU alone.

Ours and vLLM's own code of both transports runs as on GPUs: every handshake, packing, order, dtype, name and handle.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rehearsed
import reusable_ranks
from fakes import make_batch
from safetensors.numpy import load_file

from rlsys.config.schema import Config
from rlsys.packs.packing import pack
from rlsys.runs.errors import WorkerLost
from rlsys.types import Columns
from workers.learner.policy import PolicyGroup
from workers.rollout.engine_settings import CPU_ENVIRONMENT
from workers.rollout.rollout_group import RolloutGroup
from workers.supervision.process_registry import clear_registry
from workers.supervision.watchdog import Watchdog

HERE = str(Path(__file__).parent)
FIRST_LAYER = "model.layers.0.self_attn"


class Rehearsal:
    """Ranks and engines of one transport. `start(zero_stage)` connects them, as at the start of a run."""

    def __init__(self, spawn: Callable[..., Any], config: Config, model: str, transport: str, logs: Path):
        self.config, self.model, self.transport = config, model, transport

        def rank(name: str) -> Any:
            return spawn(rehearsed.RehearsedRank, config, int(name.split("-")[1]), None)

        def engine(name: str) -> Any:
            return spawn(rehearsed.RehearsedEngine, config, int(name.split("-")[1]), CPU_ENVIRONMENT)

        self.policy = PolicyGroup(config, rank, Watchdog(logs))
        self.engines = RolloutGroup(config, engine, Watchdog(logs))
        self.engines.start(model, transport, 64)

    def connect(self, changed: Callable[..., Config], zero_stage: int) -> None:
        self.policy.config = changed(self.config, "policy", zero_stage=zero_stage)
        self.policy.call_all("set_config", self.policy.config)
        self.policy.start(self.model, self.transport)
        self.policy.connect(self.engines)

    def each_engine(self, method: str, *arguments: Any, **options: Any) -> list[Any]:
        calls = {n: a.call.remote(method, *arguments, **options) for n, a in self.engines.workers.actors.items()}
        return list(self.engines.watchdog.gather(calls, method).values())


@pytest.fixture
def rehearse(
    ray: Any, worker_options: Callable[..., Any], tiny: Callable[..., Config], model: str, tmp_path: Path
) -> Iterator[Callable[..., Rehearsal]]:
    actors: list[Any] = []
    for module in (reusable_ranks, rehearsed):
        ray.cloudpickle.register_pickle_by_value(module)

    def spawn(kind: type, config: Config, index: int, environment: dict[str, str] | None) -> Any:
        options = worker_options(environment)
        actors.append(ray.remote(kind).options(**options).remote(config, index, str(tmp_path), HERE))
        return actors[-1]

    def start(transport: str, *overrides: str) -> Rehearsal:
        return Rehearsal(spawn, tiny("policy.ranks=2", *overrides), model, transport, tmp_path)

    yield start
    for actor in actors:
        ray.kill(actor)
    clear_registry(tmp_path)  # also removes the shared memory of engines of several processes


def train(policy: PolicyGroup) -> None:
    """Makes one update, which moves every weight."""
    batch = make_batch([0.0] * 4, [0, 0, 1, 1], [3, 5, 2, 4])
    tokens = int(batch.lengths.sum())
    columns = Columns(advantages=np.linspace(-1, 1, tokens, dtype=np.float32))
    weights = np.full(tokens, 1 / tokens, np.float32)
    policy.update(pack(batch, range(4), ranks=2, tokens_per_pack=64, columns=columns, weights=weights), 1e-3, 0.0)


def require_policys_weights(rehearsal: Rehearsal, folder: Path) -> None:
    """Compares what engines compute with against files that the policy writes: the key matrix lies after the query's."""
    folder.mkdir()
    rehearsal.policy.write_weights(str(folder))
    weights = {name: weight for file in folder.iterdir() for name, weight in load_file(file).items()}
    parallel = rehearsal.config.rollout.tensor_parallel
    query, key = (weights[f"{FIRST_LAYER}.{name}_proj.weight"] for name in "qk")
    rows = {
        "parameter": f"{FIRST_LAYER}.qkv_proj.weight",
        "first": len(query) // parallel,
        "count": len(key) // parallel,
    }
    for held in rehearsal.each_engine("rehearsal_rows", **rows):
        assert np.array_equal(held, key[: len(key) // parallel])


@pytest.mark.parametrize(
    ("transport", "overrides", "stages"),
    [
        ("nccl", ("rollout.engines=3",), (0, 3)),
        ("nccl", ("rollout.engines=1", "rollout.tensor_parallel=2"), (3,)),
        ("cuda_ipc", ("rollout.engines=2",), (0, 3)),
        ("cuda_ipc", ("rollout.engines=1", "rollout.tensor_parallel=2"), (2,)),
    ],
)
def test_every_engine_computes_with_the_policys_weights_after_each_sync(
    rehearse: Callable[..., Rehearsal],
    changed: Callable[..., Config],
    tmp_path: Path,
    transport: str,
    overrides: tuple[str, ...],
    stages: tuple[int, ...],
) -> None:
    rehearsal = rehearse(transport, *overrides)
    addresses = rehearsal.each_engine("rehearsal_addresses")
    for stage in stages:
        rehearsal.connect(changed, stage)
        for version in (1, 2):
            train(rehearsal.policy)
            rehearsal.policy.sync(version)
            assert set(rehearsal.engines.compare_weights().values()) == {""}
            require_policys_weights(rehearsal, tmp_path / f"{stage}-{version}")
    assert rehearsal.each_engine("rehearsal_addresses") == addresses, "CUDA graphs read the parameters where they were"


def test_a_late_engine_is_waited_for_a_lost_tensor_named_and_a_dead_rank_ends_the_sync(
    rehearse: Callable[..., Rehearsal], changed: Callable[..., Config], tmp_path: Path
) -> None:
    rehearsal = rehearse("nccl", "rollout.engines=2")
    late, *_ = rehearsal.engines.workers.actors.values()
    late.be_late.remote(3.0)
    rehearsal.connect(changed, 3)
    rehearsal.policy.sync(1)
    assert set(rehearsal.engines.compare_weights().values()) == {""}

    rehearsal.each_engine("rehearsal_lose", name=f"{FIRST_LAYER}.o_proj.weight")
    train(rehearsal.policy)
    rehearsal.policy.sync(2)
    assert all("o_proj" in difference for difference in rehearsal.engines.compare_weights().values())

    rehearsal.policy.call_all("die_in_broadcast")
    with pytest.raises(WorkerLost, match="policy-0"):
        rehearsal.policy.sync(3)
