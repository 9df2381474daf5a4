"""Two nodes that each say they have four H100: where the workers of a run go, and what `rlsys plan --address` says of them.

Ray's bookkeeping is real, the GPUs are not.
"""

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import HEAD, OTHER, Cluster
from killing import ROOT, tidy

pytestmark = pytest.mark.long

CONFIG = "configs/dapo_7b_gpu.yaml"
FOUR_GPUS = ("--num-gpus=4", '--resources={"accelerator_type:H100": 1}')
# Somebody else, who has one GPU of the node that he is on until his input ends.
TAKES_ONE = """
import ray
ray.init("auto", log_to_driver=False)
taken = ray.util.placement_group([{"GPU": 1}])
ray.get(taken.ready())
print("taken", flush=True)
input()
"""

# A client of Ray, for where no autoscaler tells of nodes.
LOOKS = """
import sys
from launch.tools.plan.live_cluster import query_as_client
print(sorted(node.gpus for node in query_as_client(sys.argv[1])))
"""

ENGINES = ["rollout-0", "rollout-1"]
RANKS = [f"policy-{i}" for i in range(8)]
CASES = [
    (["rollout.tensor_parallel=2", "policy.ranks=4", "reference.place=cpu"], [*ENGINES, *RANKS[:4]], 0),
    (
        ["cluster.placement=colocated", "rollout.engines=8", "policy.ranks=8", "reference={kl_coef: 0.1}"],
        [*(f"rollout-{i}" for i in range(8)), *RANKS, "reference"],
        0,
    ),
    (["rollout.tensor_parallel=8", "rollout.engines=1"], [], 0),
    (["policy.ranks=8"], [], 0),
    (["policy.ranks=4", "cluster.start_timeout_s=1"], [], 3),
    (["policy.ranks=4"], [*ENGINES, *RANKS[:4]], 0),
    (
        ["cluster.placement=colocated", "rollout={engines: 4, tensor_parallel: 2}", "policy.ranks=8"],
        [*(f"rollout-{i}" for i in range(4)), *RANKS],
        0,
    ),
    (
        [
            *(
                "rollout={engines: 1, tensor_parallel: 2}",
                "policy.ranks=2",
                "algorithm.advantage=gae",
                "critic.ranks=2",
            ),
            *("reference={kl_coef: 0.1}", "reward.functions={zigzag: 1, model: {path: a/b, gpus: 1}}"),
        ],
        ["rollout-0", *RANKS[:2], "critic-0", "critic-1", "reference", "reward-1-0"],
        0,
    ),
]
COLOCATED = ["cluster.placement=colocated", "rollout.engines=2", "policy.ranks=2", "cluster.env={NCCL_IB_HCA: mlx5}"]
ENVIRONMENTS = [
    (COLOCATED, [*ENGINES, *RANKS[:2]]),
    (["rollout.engines=2", "policy.ranks=2"], [*ENGINES, *RANKS[:2]]),
]
# Engines leave one GPU of each node to a rank.
APART = ["rollout={engines: 2, tensor_parallel: 3}", "policy.ranks=2", "reference.place=cpu"]
MEETINGS = [
    (APART, {}),
    ([*APART, "cluster.env={NCCL_SOCKET_IFNAME: ib0}"], {"NCCL_P2P_DISABLE": "1"}),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with tidy() as environment:
        started = Cluster(environment)
        try:
            yield started.start(OTHER, cpus=16, options=FOUR_GPUS)
        finally:
            started.end()


@pytest.fixture(scope="module")
def placements(cluster: Cluster) -> list[dict[str, tuple[str, list[int]]]]:
    """What became of each of CASES."""
    cases = [{"overrides": o, "workers": w, "held": h, "method": "place"} for o, w, h in CASES]
    cases += [{"overrides": o, "workers": w, "held": 0, "method": "environment"} for o, w in ENVIRONMENTS]
    meeting = {"workers": RANKS[:2], "held": 0, "method": "meet"}
    cases += [meeting | {"overrides": o, "others": others} for o, others in MEETINGS]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("placing.py")), json.dumps(cases)],
        capture_output=True,
        text=True,
        timeout=200,
        env=cluster.environment | {"RAY_ADDRESS": f"{HEAD}:{cluster.port}"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_tensor_parallel_engine_has_two_gpus_of_one_node_and_ranks_have_the_rest(placements) -> None:
    each = [(node, gpu) for node, gpus in placements[0].values() for gpu in gpus]
    assert sorted(each) == [(node, gpu) for node in (HEAD, OTHER) for gpu in range(4)], "each GPU has one owner"
    assert [len(placements[0][name][1]) for name in (*ENGINES, *RANKS[:4])] == [2, 2, 1, 1, 1, 1]


def test_colocated_ranks_reach_over_nodes_and_each_shares_its_engines_gpu(placements) -> None:
    for i in range(8):
        assert placements[1][f"policy-{i}"] == placements[1][f"rollout-{i}"]
    assert len({(node, *gpus) for node, gpus in placements[1].values()}) == 8
    assert placements[1]["reference"] == placements[1]["rollout-0"]


def test_a_colocated_tensor_parallel_engine_shares_each_of_its_gpus_with_a_rank(placements) -> None:
    for i in range(4):
        node, gpus = placements[6][f"rollout-{i}"]
        assert [placements[6][f"policy-{2 * i + k}"] for k in (0, 1)] == [[node, [gpu]] for gpu in gpus]
    assert len({(node, gpu) for node, gpus in placements[6].values() for gpu in gpus}) == 8


def test_critic_reference_and_reward_model_have_gpus_of_their_own(placements) -> None:
    assert len({(node, gpu) for node, gpus in placements[7].values() for gpu in gpus}) == 8
    assert [len(gpus) for _, gpus in placements[7].values()] == [2, 1, 1, 1, 1, 1, 1]


def test_engines_and_ranks_on_one_gpu_agree_on_the_allocator_and_get_the_user_s_variables(placements) -> None:
    colocated, separate = placements[8:10]
    for variables in colocated.values():
        assert variables["PYTORCH_ALLOC_CONF"] == "expandable_segments:False"
        assert variables["NCCL_IB_HCA"] == "mlx5"
    assert {separate[name]["PYTORCH_ALLOC_CONF"] for name in RANKS[:2]} == {"expandable_segments:True"}
    assert {separate[name]["PYTORCH_ALLOC_CONF"] for name in ENGINES} == {""}


def test_ranks_meet_at_the_node_of_rank_0_on_the_interfaces_of_their_own_nodes(placements) -> None:
    first, second = (placements[10][name] for name in RANKS[:2])
    assert {first["node"], second["node"]} == {HEAD, OTHER}
    assert first["rendezvous"] == second["rendezvous"] == first["node"]
    for rank in (first, second):
        assert rank["GLOO_SOCKET_IFNAME"] == rank["NCCL_SOCKET_IFNAME"] == f"eth{rank['node'][-1]}"
        assert "refused" not in rank


def test_a_rank_whose_node_sets_nccl_otherwise_is_named_with_both_nodes(placements) -> None:
    first, second = (placements[11][name] for name in RANKS[:2])
    assert first["NCCL_SOCKET_IFNAME"] == second["NCCL_SOCKET_IFNAME"] == "ib0", "as the user says"
    assert first["GLOO_SOCKET_IFNAME"] == f"eth{first['node'][-1]}"
    assert first["refused"] == second["refused"]
    where = f"in rank 0 on {first['node']} than in rank 1 on {second['node']}: NCCL_P2P_DISABLE not set and 1. "
    assert where in first["refused"]


def test_what_does_not_fit_is_said_at_once(placements) -> None:
    assert "use rollout.tensor_parallel=4 or less" in placements[2]["refused"]
    assert placements[3]["refused"].startswith(
        "policy-6 (policy.ranks (8)) needs 1 GPU and 1 CPU on one node, and finds no place."
    )
    assert re.search(r"2 nodes: 127.0.0.\d, 127.0.0.\d with 4 GPUs and 16 CPUs each\. ", placements[3]["refused"])
    assert placements[2]["notes"] == placements[3]["notes"] == []


def test_gpus_of_another_job_are_waited_for_and_then_given_up(placements) -> None:
    message = placements[4]["refused"]
    assert "others keep them" in message
    assert "with 4 GPUs and 16 CPUs, 1 and 15 of them free" in message or "1 and 16 of them free" in message
    assert placements[4]["notes"][0].startswith("waiting for GPUs that others have.")


def test_what_was_given_back_can_be_had_again(placements) -> None:
    assert len({(node, *gpus) for node, gpus in placements[5].values()}) == 6


def plan(cluster: Cluster, address: str, figures: Path, *words: str) -> tuple[int, str, list[tuple[int, str, float]]]:
    """The exit code, what it says, and of each node its free GPUs, their kind and its free CPUs."""
    command = [sys.executable, "-m", "launch", "plan", CONFIG, *words, "--address", address, "--json", str(figures)]
    options = {"capture_output": True, "text": True, "timeout": 120, "cwd": ROOT}
    done = subprocess.run(command, env=cluster.environment | {"COLUMNS": "100"}, **options)
    assert figures.is_file(), done.stdout + done.stderr
    nodes = json.loads(figures.read_text())["cluster"]["nodes"]
    figures.unlink()
    return done.returncode, done.stdout, sorted((n["gpus"], n["gpu"]["name"], n["cpus"]) for n in nodes)


@contextlib.contextmanager
def tunnel(host: str, port: int) -> Iterator[int]:
    """A port of this machine that leads there, as with `ssh -L`."""

    def carry(a: socket.socket, b: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while some := a.recv(1 << 16):
                b.sendall(some)
            b.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                ends = entrance.accept()[0], socket.create_connection((host, port))
                for a, b in (ends, ends[::-1]):
                    threading.Thread(target=carry, args=(a, b), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as entrance:
        threading.Thread(target=serve, daemon=True).start()
        yield entrance.getsockname()[1]
        entrance.shutdown(socket.SHUT_RDWR)


def test_a_running_cluster_is_looked_at_and_told_what_it_lacks(cluster, tmp_path):
    address, client = f"{cluster.head}:{cluster.port}", f"ray://{cluster.head}:{cluster.clients}"
    figures, whole, begun = tmp_path / "figures.json", (4, "H100", 16), (3, "H100", 16)
    code, text, nodes = plan(cluster, address, figures, "policy.offload=optimizer")
    assert (code, nodes) == (0, [whole, whole]), text
    assert "8 x H100 in 2 nodes" in text

    environment = cluster.environment | {"RAY_ADDRESS": address}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([sys.executable, "-c", TAKES_ONE], env=environment, **pipes) as somebody:
        assert somebody.stdout.readline() == "taken\n"
        deadline = time.monotonic() + 20
        while begun not in plan(cluster, address, figures)[2] and time.monotonic() < deadline:
            time.sleep(0.5)  # the cluster does not know it at once
        for way in (address, client):
            code, text, nodes = plan(cluster, way, figures)
            assert (code, nodes) == (1, [begun, whole]), text
            assert (
                "All together need 8 GPUs: rollout.engines (8) × rollout.tensor_parallel (1) 8. The cluster has 7."
                in text
            )
            assert "rollout-7 + policy-7: no node has 1 GPU left." in text
        with tunnel(
            cluster.head, cluster.clients
        ) as port:  # whose end cannot be told from here: its autoscaler is asked
            deadline = time.monotonic() + 20
            while begun not in (nodes := plan(cluster, f"ray://127.0.0.1:{port}", figures)[2]):
                assert time.monotonic() < deadline, nodes
                time.sleep(0.5)  # it looks every five seconds
            assert nodes == [begun, whole]
            looks = [sys.executable, "-c", LOOKS, f"ray://127.0.0.1:{port}"]
            looked = subprocess.run(
                looks, env=cluster.environment, capture_output=True, text=True, timeout=120, cwd=ROOT
            )
            assert looked.stdout == "[3, 4]\n", looked.stderr
        somebody.communicate("\n", timeout=30)
