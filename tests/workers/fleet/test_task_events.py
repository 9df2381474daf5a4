"""The record that Ray keeps of calls, in the memory of its GCS server."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plain_worker

from launch.cluster import Actors
from launch.ray_session.connect import address_for_ray_cli
from rlsys.config.schema import Config
from workers.fleet.watchdog import Watchdog


def recorded_calls(ray: Any, actor: Any) -> int:
    from ray.util.state import list_tasks

    own = ("actor_id", "=", actor._actor_id.hex())
    return len(list_tasks(address=address_for_ray_cli(ray), filters=[own], limit=1000))


def test_ray_keeps_no_record_of_the_calls_of_workers(
    session: Any, tiny: Callable[..., Config], start_worker: Callable[[str], Any], tmp_path: Path
) -> None:
    """Each step makes about 60 calls, so the record would grow as long as the run goes on."""
    ray, other = session.ray, start_worker("b-0")
    actors = Actors(session, tiny(), Watchdog(tmp_path))
    worker = actors.make_spawner(plain_worker.ConfiguredWorker, lambda name: {}, {})("a-0")
    ray.get([actor.echo.remote(i) for actor in (worker, other) for i in range(20)])
    deadline = time.monotonic() + 60
    while recorded_calls(ray, other) < 20 and time.monotonic() < deadline:  # Ray reports them every second
        time.sleep(0.2)
    assert recorded_calls(ray, other) >= 20
    assert recorded_calls(ray, worker) == 0
    ray.kill(worker)
