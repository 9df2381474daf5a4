"""Which losses of engines end a run: those of one sample, and not those of a storm. `Generation`, on engines that die at once."""

import pickle
import random
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from plain_cluster import PlainCluster
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError

from rlsys.errors import WorkerLost
from rlsys.types import Request, Sample
from workers.fleet.cluster import CallFailed
from workers.fleet.ray_cluster import call_failed
from workers.fleet.watchdog import Watchdog
from workers.rollout.generation import Generation

# --- storms, and samples that end engines ----------------------------------------------------------------------------

Death = Callable[[str, int, list[str]], bool]  # engine, samples that it has given of this call, what is left of it
NODE_DIED = CallFailed("its node has died", node_died=True)


class Cluster:
    """Engines that die when `dies` says so, before their next sample. Each of them runs any number of requests at once."""

    def __init__(self, engines: int, dies: Death, error: CallFailed | None = None):
        self.dies, self.error = dies, error or CallFailed("the process died")
        self.lost: list[str] = []
        self.lock, self.actors = threading.RLock(), {f"rollout-{i}": self.start(f"rollout-{i}") for i in range(engines)}

    def start(self, name: str) -> Any:
        def generate(requests: bytes) -> Iterator[bytes]:
            left = pickle.loads(requests)
            for given in range(len(left)):
                if self.dies(name, given, [f"{r.uid}/{r.index}" for r in left]):
                    raise self.error
                request = left.pop(0)
                tokens, logprobs = np.array([5], dtype=np.int32), np.zeros(1, dtype=np.float32)
                yield pickle.dumps([Sample(request.uid, request.index, "", tokens, logprobs, "stop", 0)])

        return SimpleNamespace(generate=generate, stop_early=lambda: None)

    def replace(self, lost: dict[str, WorkerLost], actors: Any) -> None:
        for name in lost:
            self.lost.append(name)
            self.actors[name] = self.start(name)


def generate_in(cluster: Any, tmp_path: Path, groups: int = 10) -> list[str]:
    """The samples of groups of 4, by name. Each must come once."""
    requests = [Request(f"p{group}", i, [1], 0, 1.0, 8) for group in range(groups) for i in range(4)]
    generation = Generation(requests, cluster, Watchdog(tmp_path, cluster=PlainCluster()), 16)
    names = [f"{sample.uid}/{sample.index}" for samples in generation.run() for sample in samples]
    assert sorted(names) == sorted(f"{r.uid}/{r.index}" for r in requests)
    assert generation.waiting_count == 0
    return names


@pytest.mark.parametrize("engines", [1, 2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_engines_that_die_often_of_anything_end_no_run(tmp_path: Path, engines: int, seed: int) -> None:
    """Each gives one to three samples of its requests, so some are in many lost engines, and none is the cause."""
    lives = random.Random(seed)
    cluster = Cluster(engines, lambda engine, given, left: given > lives.randrange(3))
    generate_in(cluster, tmp_path)
    assert len(cluster.lost) > 5


def test_nodes_that_are_lost_are_held_against_no_sample(tmp_path: Path) -> None:
    """Even a last sample, alone in each engine."""
    left = [9]

    def dies(engine: str, given: int, names: list[str]) -> bool:
        left[0] -= names == ["p0/3"]
        return names == ["p0/3"] and left[0] >= 0

    cluster = Cluster(2, dies, NODE_DIED)
    generate_in(cluster, tmp_path, groups=1)
    assert len(cluster.lost) == 9


def test_ray_says_of_an_actor_that_its_process_died_or_more() -> None:
    node_died = ActorDiedError()
    node_died.error_msg += "\nThe actor died because its node has died. Node Id: 8df1\n\tit received SIGTERM"
    assert call_failed(node_died).node_died
    assert call_failed(RayActorError(error_msg="it ended", preempted=True)).node_died
    process = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR"
    assert not call_failed(RayActorError(error_msg=process)).node_died
    unavailable = call_failed(ActorUnavailableError("Socket closed", None))
    assert not unavailable.node_died, "its process may have died of a sample"


@pytest.mark.parametrize("engines", [1, 2, 5])
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "when it is next"])
@pytest.mark.parametrize("storm", [False, True], ids=["", "in a storm"])
def test_a_sample_that_ends_every_engine_is_found_and_named(
    tmp_path: Path, engines: int, at_once: bool, storm: bool
) -> None:
    def dies(engine: str, given: int, left: list[str]) -> bool:
        return "p4/2" in (left if at_once else left[:1]) or (storm and given > 2)

    cluster = Cluster(engines, dies)
    with pytest.raises(WorkerLost, match=r"each had no sample but 2 of prompt p4\.") as failed:
        generate_in(cluster, tmp_path)
    assert len(cluster.lost) <= (40 if storm else 6)
    named = re.findall(r"rollout-\d", str(failed.value).partition("were lost one after the other")[0])[-3:]
    assert len(set(named)) == min(engines, 2) or len(set(named)) == 3, "one engine may be the cause itself"


def test_of_two_such_samples_one_is_named(tmp_path: Path) -> None:
    cluster = Cluster(3, lambda engine, given, left: left[0] in ("p2/1", "p7/0"))
    with pytest.raises(WorkerLost, match=r"no sample but (1 of prompt p2|0 of prompt p7)\."):
        generate_in(cluster, tmp_path)
    assert len(cluster.lost) < 12


def test_an_engine_that_always_dies_is_held_against_no_sample(tmp_path: Path) -> None:
    """Others sample what it has lost. It is not replaced for ever."""
    cluster = Cluster(3, lambda engine, given, left: engine == "rollout-1")
    with pytest.raises(WorkerLost, match="rollout-1 was lost 10 times without an answer in between"):
        generate_in(cluster, tmp_path, groups=2000)
    assert set(cluster.lost) == {"rollout-1"}


@pytest.mark.parametrize("engines", [1, 2])
def test_a_node_that_is_lost_again_and_again_ends_the_run(tmp_path: Path, engines: int) -> None:
    cluster = Cluster(engines, lambda engine, given, left: engine == "rollout-0", NODE_DIED)
    with pytest.raises(WorkerLost, match="rollout-0 was lost 10 times"):
        generate_in(cluster, tmp_path, groups=2000)


def test_the_sample_that_ends_engines_is_found_before_all_others_are_sampled(tmp_path: Path) -> None:
    cluster = Cluster(2, lambda engine, given, left: "p4/2" in left)
    with pytest.raises(WorkerLost, match=r"no sample but 2 of prompt p4\. \d{1,3} others came"):
        generate_in(cluster, tmp_path, groups=500)


@pytest.mark.parametrize("engines", [1, 4])
def test_engines_that_all_die_end_the_run_and_no_sample_is_called_the_cause(tmp_path: Path, engines: int) -> None:
    cluster = Cluster(engines, lambda engine, given, left: True)
    with pytest.raises(WorkerLost, match="so the engines may be the cause as well"):
        generate_in(cluster, tmp_path, groups=40)
    assert len(cluster.lost) < 12 * engines


def test_a_run_that_stops_early_leaves_suspects_behind(tmp_path: Path) -> None:
    cluster: Any = Cluster(1, lambda engine, given, left: "p0/0" in left)
    requests = [Request(f"p{i}", 0, [1], 0, 1.0, 8) for i in range(30)]
    generation, count = Generation(requests, cluster, Watchdog(tmp_path, cluster=PlainCluster()), 8), 0
    for samples in generation.run():
        count += len(samples)
        if len(generation.suspects):
            generation.stop_early()
    assert 0 < count < 30
    assert generation.waiting_count == 0
