"""What processes on GPUs find in their environment: one allocator, one network interface, a GPU, a share of the cores."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rlsys.config.schema import Config
from workers.learner.rendezvous import prepare_network, require_gpu
from workers.rollout.engine_settings import engine_environment
from workers.start.gpu_environment import rank_environment
from workers.start.network import choose_interface
from workers.start.worker_setup import cpu_threads
from workers.sync.nccl import NcclReceiver

BOTH_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def test_colocated_ranks_and_engines_keep_memory_that_the_other_can_open(tiny: Callable[..., Config]) -> None:
    config = tiny("cluster.device=gpu", "cluster.placement=colocated")
    for environment in (rank_environment(config), engine_environment(config)):
        assert [environment[name] for name in BOTH_NAMES] == ["expandable_segments:False"] * 2


def test_ranks_with_gpus_of_their_own_use_expandable_segments_and_engines_do_as_vllm(
    tiny: Callable[..., Config],
) -> None:
    config = tiny("cluster.device=gpu")
    assert [rank_environment(config)[name] for name in BOTH_NAMES] == ["expandable_segments:True"] * 2
    assert not engine_environment(config).keys() & set(BOTH_NAMES)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_user_s_variables_reach_ranks_and_engines(tiny: Callable[..., Config], device: str) -> None:
    config = tiny(f"cluster.device={device}", "cluster.env={NCCL_IB_HCA: mlx5, NCCL_IB_GID_INDEX: 3}")
    for environment in (rank_environment(config), engine_environment(config)):
        assert (environment["NCCL_IB_HCA"], environment["NCCL_IB_GID_INDEX"]) == ("mlx5", "3")


def test_on_cpu_nothing_of_gpus_is_set(tiny: Callable[..., Config]) -> None:
    assert rank_environment(tiny()) == {"OMP_NUM_THREADS": "1"}
    assert not engine_environment(tiny()).keys() & set(BOTH_NAMES)


def test_the_interface_is_the_one_with_the_node_s_address_unless_the_site_names_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    choose_interface("127.0.0.1", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "ib0")


def test_the_logs_of_ranks_and_engines_say_what_nccl_finds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inherited = [n for n in os.environ if n.startswith(("NCCL_", "FI_", "OFI_"))]
    for name in ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", *inherited]:
        monkeypatch.setenv(name, "")  # so that it is as before after this test
        monkeypatch.delenv(name)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5")
    monkeypatch.setenv("FI_PROVIDER", "efa")
    prepare_network("gpu", 2)
    line = "network: 127.0.0.1 is lo; FI_PROVIDER=efa NCCL_IB_HCA=mlx5 NCCL_SOCKET_IFNAME=lo\n"
    assert capsys.readouterr().out == line
    NcclReceiver()
    assert capsys.readouterr().out == line
    prepare_network("gpu", 1)
    prepare_network("cpu", 2)
    assert capsys.readouterr().out == "", "no rank uses NCCL"


def test_a_rank_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"sees no GPU.* CUDA_VISIBLE_DEVICES is 3"):
        require_gpu()


def test_ranks_of_several_nodes_share_only_the_cores_of_their_own(
    tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [Path(f"/dev/nvidia{i}") for i in range(8)]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: gpus if str(self) == "/dev" else [])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(192)))
    config = tiny("cluster.device=gpu")
    assert cpu_threads(config, 32) == 24  # 192 cores for 8 ranks on this node, of 32
    assert cpu_threads(config, 4) == 48
    assert cpu_threads(tiny("policy.threads=2"), 32) == 2
