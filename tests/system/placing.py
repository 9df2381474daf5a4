"""Places small actors as a run would place its workers, on the cluster at RAY_ADDRESS; prints what became of each case."""

import json
import os
import sys
from typing import Any

import ray
from killing import CONFIG

from launch.placement import reserve_gpus
from rlsys.config.loading import load_config
from rlsys.config.schema import ConfigError


@ray.remote
class Worker:
    def place(self) -> tuple[str, list[int]]:
        return ray.util.get_node_ip_address(), sorted(map(int, os.environ["CUDA_VISIBLE_DEVICES"].split(",")))


def placed(overrides: list[str], workers: list[str]) -> dict[str, Any]:
    """The node and the GPUs of each worker."""
    notes: list[str] = []
    try:
        place = reserve_gpus(ray, load_config(CONFIG, ["cluster.device=gpu", *overrides]), True, notes.append)
    except ConfigError as error:
        return {"refused": str(error), "notes": notes}
    actors = {name: Worker.options(**{"num_cpus": 0} | place(name)).remote() for name in workers}
    places = {name: ray.get(actor.place.remote(), timeout=60) for name, actor in actors.items()}
    for actor in actors.values():
        ray.kill(actor)
    ray.util.remove_placement_group(place.placement_group)
    return places


def main() -> None:
    ray.init(log_to_driver=False, logging_level="error")
    placements = []
    for case in json.loads(sys.argv[1]):
        held = None
        if case["held"]:  # by somebody else
            held = Worker.options(num_gpus=case["held"]).remote()
            ray.get(held.place.remote())
        placements.append(placed(case["overrides"], case["workers"]))
        if held:
            ray.kill(held)
    print(json.dumps(placements))


main()
