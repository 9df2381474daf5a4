"""Processes whose NCCL is set differently do not begin to wait for each other."""

import os
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from rlsys.errors import ConfigError
from workers.start.nccl_settings import NcclSettings, nccl_settings, require_same_settings, takes_interface
from workers.start.ports import free_port
from workers.sync.nccl import NcclReceiver

# A rank on a node that says that it has another address, as far as the ranks have met.
RANK = """
import sys
from datetime import timedelta
from rlsys.errors import ConfigError
from workers.learner.rendezvous import create_store
from workers.start.nccl_settings import compare_settings, nccl_settings
rank, port = int(sys.argv[1]), int(sys.argv[2])
store = create_store("127.0.0.1", port, rank, 3, timedelta(seconds=60))
try:
    compare_settings(store, rank, 3, nccl_settings(f"127.0.0.{1 + rank}"))
    print("alike")
except ConfigError as error:
    print(error)
store.set(f"done/{rank}", "")
store.wait([f"done/{i}" for i in range(3)])  # rank 0 keeps it
"""
HERE = NcclSettings("10.0.0.1", {"NCCL_CUMEM_ENABLE": "0"}, "eth0", by_node=True)


def start_ranks(*variables: dict[str, str]) -> list[str]:
    """What three ranks say, each with these variables."""
    port = free_port()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(i), str(port)],
            env=clean | {"PYTHONPATH": os.pathsep.join(sys.path)} | own,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i, own in enumerate(variables)
    ]
    return [rank.communicate(timeout=120)[0].strip() for rank in ranks]


def test_every_rank_names_the_one_that_has_other_settings_than_rank_0() -> None:
    for refusal in start_ranks({"NCCL_P2P_DISABLE": "1"}, {"NCCL_P2P_DISABLE": "1"}, {"NCCL_ALGO": "Ring"}):
        assert refusal == (
            "NCCL has other settings in rank 0 on 127.0.0.1 than in rank 2 on 127.0.0.3: NCCL_ALGO not set and Ring; "
            "NCCL_P2P_DISABLE 1 and not set. Set them alike in the environment of `ray start` on all nodes, or in "
            "cluster.env."
        )


def test_nodes_may_name_their_parts_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    for name, value in {"NCCL_IB_HCA": "mlx5_0", "NCCL_DEBUG": "INFO", "NCCL_NET": "IB"}.items():
        monkeypatch.setenv(name, value)
    assert nccl_settings("127.0.0.1").variables == {"NCCL_NET": "IB"}


def test_ranks_meet_on_one_network() -> None:
    names = ("rank 0", "rank 1")
    other = replace(HERE, node="10.0.0.2", interface="ib0", by_node=False)
    with pytest.raises(
        ConfigError, match=r"on 10.0.0.2: NCCL_SOCKET_IFNAME eth0 and ib0, and only one takes the node's"
    ):
        require_same_settings(HERE, other, names)
    require_same_settings(HERE, replace(HERE, interface="ens5"), names)  # each the one with its node's address
    require_same_settings(replace(other, interface="ib1"), other, names)


@pytest.mark.parametrize(
    ("pattern", "taken"),
    [
        ("", True),
        ("eth", True),
        ("ib0,eth0", True),
        ("=eth", False),
        ("=eth0", True),
        ("^lo,docker", True),
        ("^eth", False),
    ],
)
def test_interfaces_are_matched_as_nccl_matches_them(pattern: str, taken: bool) -> None:
    assert takes_interface(pattern, "eth0") is taken


def test_an_engine_refuses_other_settings_than_those_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    receiver = NcclReceiver()
    assert receiver.settings == nccl_settings("127.0.0.1") == NcclSettings("127.0.0.1", {}, "lo", by_node=True)
    info = {"address": "10.0.0.1", "port": 1, "world": 3, "senders": 1, "buckets": [], "settings": asdict(HERE)}
    with pytest.raises(
        ConfigError, match=r"policy-0 on 10.0.0.1 than in rollout-1 on 127.0.0.1: NCCL_CUMEM_ENABLE 0 and"
    ):
        receiver.init_info(info, 1, 1, False)
    assert receiver.init_info(info | {"settings": asdict(replace(HERE, variables={}))}, 1, 1, False)["rank_offset"] == 2
