"""On which nodes and GPUs bundles are placed."""

import math

from launch.bundles import Bundle
from launch.tools.fitting.layout import UnplacedBundle, deal_to_nodes, place_bundles


def bundle(gpus: float, name: str) -> Bundle:
    return Bundle(gpus, {name: list(range(math.ceil(gpus)))}, "because")


ENGINE, RANKS = bundle(4, "rollout-0"), [bundle(1, f"policy-{i}") for i in range(3)]


def test_bundles_are_packed_onto_few_nodes_and_never_cut() -> None:
    layout = place_bundles([ENGINE, *RANKS], [4, 8])
    assert layout.gpus[0] == [["rollout-0"]] * 4
    assert layout.gpus[1][:4] == [["policy-0"], ["policy-1"], ["policy-2"], []]
    assert layout.unplaced == []


def test_bundles_without_room_are_listed() -> None:
    layout = place_bundles([ENGINE, bundle(4, "rollout-1"), RANKS[0]], [6])
    assert layout.unplaced == [UnplacedBundle("rollout-1", 4)]
    assert ["policy-0"] in layout.gpus[0]


def test_workers_with_part_of_a_gpu_share_one() -> None:
    layout = place_bundles(
        [RANKS[0], bundle(0.5, "reference"), bundle(0.5, "reward-1-0"), bundle(0.5, "reward-2-0")], [3]
    )
    assert layout.gpus[0] == [["policy-0"], ["reference", "reward-1-0"], ["reward-2-0"]]
    assert place_bundles([RANKS[0], bundle(0.5, "reference")], [1]).unplaced == [UnplacedBundle("reference", 0.5)]


def test_workers_of_a_bundle_are_on_their_own_gpus_of_it() -> None:
    shared = Bundle(2, {"rollout-0": [0, 1], "policy-0": [0], "policy-1": [1]}, "because")
    assert place_bundles([ENGINE, shared], [8]).gpus[0][4:] == [
        ["rollout-0", "policy-0"],
        ["rollout-0", "policy-1"],
        [],
        [],
    ]


def test_a_bundle_needs_a_cpu_too() -> None:
    layout = place_bundles(RANKS, [4], [2])
    assert layout.unplaced == [UnplacedBundle("policy-2", 1, for_cpus=True)]
    assert len(place_bundles(RANKS, [4], [0]).unplaced) == 3, "others have all of them"
    assert place_bundles(RANKS, [4], [None]).unplaced == [], "not known"


def test_workers_without_gpus_are_dealt_to_nodes_that_take_them() -> None:
    assert deal_to_nodes(["a", "b", "c"], [False, True, True]) == [[], ["a", "c"], ["b"]]
    assert deal_to_nodes(["a", "b", "c"], [False, False]) == [["a", "c"], ["b"]]
