"""Places small actors as a run would place its workers, on the cluster at RAY_ADDRESS; prints what became of each case."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from killing import CONFIG

from launch.cluster import Actors
from launch.placement import reserve_gpus
from rlsys.config.loading import load_config
from rlsys.config.schema import ConfigError
from workers.rollout.engine_settings import engine_environment
from workers.supervision.gpu_environment import rank_environment

VARIABLES = ("PYTORCH_ALLOC_CONF", "NCCL_IB_HCA")


class Worker:
    def __init__(self, *_: Any):
        pass

    def place(self) -> tuple[str, list[int]]:
        return ray.util.get_node_ip_address(), sorted(map(int, os.environ["CUDA_VISIBLE_DEVICES"].split(",")))

    def environment(self) -> dict[str, str]:
        return {name: os.environ.get(name, "") for name in VARIABLES}


def placed(overrides: list[str], workers: list[str], method: str) -> dict[str, Any]:
    """The node and the GPUs of each worker, or its environment."""
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
        placements.append(placed(case["overrides"], case["workers"], case["method"]))
        if held:
            ray.kill(held)
    print(json.dumps(placements))


main()
