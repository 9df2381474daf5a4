"""What depends on the number of nodes and on the storage that they share. Runs without Ray."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.cluster import RunningCluster
from launch.models import copy_model_into_run
from launch.placement import choose_transport
from launch.train import refuse_job_folder
from rlsys.config.loading import load_config
from rlsys.config.schema import Config
from rlsys.errors import ConfigError

CONFIG = Path(__file__).parents[2] / "configs" / "tiny_cpu.yaml"


def config(*overrides: str) -> Config:
    return load_config(CONFIG, overrides)


def test_weights_take_shared_memory_within_a_node_and_the_object_store_between_nodes() -> None:
    assert choose_transport(config(), 1) == "shared_memory"
    assert choose_transport(config(), 2) == "object_store"
    assert choose_transport(config("cluster.device=gpu"), 2) == "nccl"
    assert choose_transport(config("cluster.device=gpu", "cluster.placement=colocated"), 2) == "cuda_ipc"
    assert choose_transport(config("sync.transport=object_store"), 1) == "object_store"


def test_shared_memory_is_refused_between_nodes() -> None:
    with pytest.raises(
        ConfigError, match=r"keeps within a host, and the cluster has 3 nodes\. Use auto, or object_store"
    ):
        choose_transport(config("sync.transport=shared_memory"), 3)


def test_the_built_in_model_is_copied_into_the_run(tmp_path: Path) -> None:
    cache, run = tmp_path / "cache", tmp_path / "run"
    for folder in (cache, run):
        folder.mkdir()
    (cache / "config.json").write_text("{}")
    assert copy_model_into_run(run, str(cache)) == str(cache), "no run, as with doctor"
    (run / "config.yaml").touch()
    assert copy_model_into_run(run, str(cache)) == copy_model_into_run(run, str(cache)) == str(run / "model")
    assert (run / "model" / "config.json").read_text() == "{}"
    assert not (run / ".model").exists()


def joined(logs: Path, ranks: int) -> RunningCluster:
    """With a policy whose ranks have said where they are in `logs`, where they could."""
    parts: dict[str, Any] = dict.fromkeys(RunningCluster.__dataclass_fields__)
    policy = SimpleNamespace(watchdog=SimpleNamespace(logs=logs))
    return RunningCluster(**parts | {"config": config(f"policy.ranks={ranks}"), "groups": {"policy": policy}})


def test_a_rank_that_does_not_see_the_run_directory_is_named(tmp_path: Path) -> None:
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "policy-0.pid").write_text(json.dumps({"node": "a", "pid": 1, "created": 0.5}))
    joined(logs, ranks=1).require_run_directory()
    with pytest.raises(
        ConfigError, match=rf"run\.dir: policy-1 cannot write to {tmp_path}/run: another node has no such"
    ):
        joined(logs, ranks=2).require_run_directory()


def test_a_run_in_the_folder_of_a_job_is_refused() -> None:
    refuse_job_folder(Path("/shared/runs/one"))
    with pytest.raises(ConfigError, match=r"is in the working directory of a Ray job.*run\.dir=/shared/runs/NAME"):
        refuse_job_folder(Path("/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1/runs/tiny_cpu"))
