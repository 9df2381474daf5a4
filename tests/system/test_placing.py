"""Placement groups on two nodes that claim four GPUs each: Ray's bookkeeping is real, the GPUs are not."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from clusters import HEAD, OTHER, Cluster
from killing import tidy

ENGINES = ["rollout-0", "rollout-1"]
RANKS = [f"policy-{i}" for i in range(8)]
CASES = [
    (["rollout.tensor_parallel=2", "policy.ranks=4"], [*ENGINES, *RANKS[:4]], 0),
    (
        ["cluster.placement=colocated", "rollout.engines=8", "policy.ranks=8", "reference={kl_coef: 0.1, gpus: 0.2}"],
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
]


@pytest.fixture(scope="module")
def placements() -> list[dict[str, tuple[str, list[int]]]]:
    with tidy() as environment:
        cluster = Cluster(environment)
        try:
            cluster.start(OTHER, options=("--num-gpus=4",), cpus=16)
            cases = [{"overrides": o, "workers": w, "held": h} for o, w, h in CASES]
            done = subprocess.run(
                [sys.executable, str(Path(__file__).with_name("placing.py")), json.dumps(cases)],
                capture_output=True,
                text=True,
                timeout=200,
                env=cluster.environment | {"RAY_ADDRESS": f"{HEAD}:{cluster.port}"},
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return json.loads(done.stdout.splitlines()[-1])
        finally:
            cluster.end()


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
