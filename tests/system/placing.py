"""Places small actors as a run would place its workers, on the cluster at RAY_ADDRESS; prints what became of each case."""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import ray
from killing import CONFIG

from launch.cluster import Actors
from launch.placement import reserve_gpus
from rlsys.config.loading import load_config
from rlsys.errors import ConfigError
from workers.rollout.engine_settings import engine_environment
from workers.start.gpu_environment import rank_environment

VARIABLES = ("PYTORCH_ALLOC_CONF", "NCCL_IB_HCA")
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Worker:
    def __init__(self, *_: Any):
        pass

    def place(self) -> tuple[str, list[int]]:
        return ray.util.get_node_ip_address(), sorted(map(int, os.environ["CUDA_VISIBLE_DEVICES"].split(",")))

    def environment(self) -> dict[str, str]:
        return {name: os.environ.get(name, "") for name in VARIABLES}

    def rendezvous_address(self) -> tuple[str, int]:
        from workers.learner.ranks import LearnerRank

        return LearnerRank.rendezvous_address(SimpleNamespace(port=0))  # type: ignore[arg-type]

    def meet(self, address: str, port: int, rank: int, ranks: int, others: dict[str, str]) -> dict[str, str]:
        """As far as ranks get without GPUs, on a node whose address is on an interface of its own. `others`: variables of
        all but the first node."""
        from workers.learner.rendezvous import create_store, prepare_network
        from workers.start.nccl_settings import compare_settings, nccl_settings

        node = ray.util.get_node_ip_address()
        pretended = SimpleNamespace(address=node)
        psutil.net_if_addrs = lambda: {f"eth{node[-1]}": [pretended]}
        os.environ.pop("GLOO_SOCKET_IFNAME")  # of the tests
        os.environ |= others if rank else {}
        prepare_network("gpu", ranks)
        store = create_store(address, port, rank, ranks, timedelta(seconds=60))
        meeting = {"node": node, "rendezvous": address} | {n: os.environ.get(n, "") for n in INTERFACES}
        try:
            compare_settings(store, rank, ranks, nccl_settings(node))
        except ConfigError as error:
            meeting["refused"] = str(error)
        store.set(f"done/{rank}", "")
        store.wait([f"done/{i}" for i in range(ranks)])
        return meeting


def placed(overrides: list[str], workers: list[str], method: str, others: dict[str, str]) -> dict[str, Any]:
    """The node and the GPUs of each worker, or its environment, or where it meets the others."""
    notes: list[str] = []
    config = load_config(CONFIG, ["cluster.device=gpu", *overrides])
    try:
        place = reserve_gpus(ray, config, True, notes.append)
    except ConfigError as error:
        return {"refused": str(error), "notes": notes}
    session, watchdog = SimpleNamespace(ray=ray, forkserver_dir=None), SimpleNamespace(logs=Path("logs"))
    actors = Actors(session, config, watchdog)
    spawners = {
        engine: actors.make_spawner(Worker, place, engine_environment(config) if engine else rank_environment(config))
        for engine in (True, False)
    }
    started = {name: spawners[name.startswith("rollout")](name) for name in workers}
    if method == "meet":
        address, port = ray.get(started[workers[0]].rendezvous_address.remote(), timeout=60)
        calls = [started[w].meet.remote(address, port, i, len(workers), others) for i, w in enumerate(workers)]
        places = dict(zip(workers, ray.get(calls, timeout=100), strict=True))
    else:
        places = {name: ray.get(getattr(actor, method).remote(), timeout=60) for name, actor in started.items()}
    for actor in actors.actors:
        ray.kill(actor)
    ray.util.remove_placement_group(place.placement_group)
    return places


def main() -> None:
    ray.init(log_to_driver=False, logging_level="error")
    placements = []
    for case in json.loads(sys.argv[1]):
        held = None
        if case["held"]:  # by somebody else
            held = ray.remote(Worker).options(num_gpus=case["held"]).remote()
            ray.get(held.place.remote())
        placements.append(placed(case["overrides"], case["workers"], case["method"], case.get("others", {})))
        if held:
            ray.kill(held)
    print(json.dumps(placements))


main()
