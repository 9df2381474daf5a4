"""Which GPUs workers get, and what is said if they cannot get them. Runs without Ray."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch import placement
from launch.placement import NodeResources, describe_nodes, first_unplaceable, make_bundles, reserve_gpus
from rlsys.config.loading import load_config
from rlsys.config.schema import Config
from rlsys.errors import ConfigError

CONFIG = Path(__file__).parents[2] / "configs" / "tiny_cpu.yaml"


def config(*overrides: str) -> Config:
    settings = ["cluster.device=gpu", "cluster.start_timeout_s=0", "reference.kl_coef=0"]
    return load_config(CONFIG, [*settings, *overrides])


def nodes(*gpus: float, cpus: float = 16, taken: float = 0) -> list[NodeResources]:
    """On the first node, some GPUs are taken."""
    return [
        NodeResources(f"10.0.0.{i}", number, cpus, number - (taken if i == 1 else 0), cpus)
        for i, number in enumerate(gpus, start=1)
    ]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """`refused(nodes, override, …)` is the error for a configuration on these nodes."""

    def error_on(nodes: list[NodeResources], *overrides: str) -> str:
        monkeypatch.setattr(placement, "list_nodes", lambda ray: nodes)
        with pytest.raises(ConfigError) as caught:
            reserve_gpus(None, config(*overrides), True, lambda text: None)
        return str(caught.value)

    return error_on


def bundles(*overrides: str, training: bool = True) -> list[tuple[float, dict[str, list[int]]]]:
    return [(b.gpus, b.workers) for b in make_bundles(config(*overrides), training)]


def test_separate_workers_have_gpus_of_their_own() -> None:
    assert bundles("rollout.tensor_parallel=2", "reference.kl_coef=0.1") == [
        (2, {"rollout-0": [0, 1]}),
        (2, {"rollout-1": [0, 1]}),
        (1, {"policy-0": [0]}),
        (1, {"policy-1": [0]}),
        (1, {"reference": [0]}),
    ]
    assert bundles("rollout.tensor_parallel=2", training=False) == [
        (2, {"rollout-0": [0, 1]}),
        (2, {"rollout-1": [0, 1]}),
    ]


def test_colocated_workers_share_a_gpu_and_the_reference_is_on_the_first() -> None:
    shared = bundles("cluster.placement=colocated", "reference.kl_coef=0.1")
    assert shared == [
        (1, {"rollout-0": [0], "policy-0": [0], "reference": [0]}),
        (1, {"rollout-1": [0], "policy-1": [0]}),
    ]
    with_critic = bundles("cluster.placement=colocated", "algorithm.advantage=gae", "critic.ranks=1")
    assert with_critic[0] == (1, {"rollout-0": [0], "policy-0": [0], "critic-0": [0]})
    assert with_critic[1] == (1, {"rollout-1": [0], "policy-1": [0]})


def test_each_frozen_engine_has_a_gpu_of_its_own_in_training_and_evaluation() -> None:
    two = "models={judge: {path: 'builtin:tiny', engines: 2}}"
    own = [(1, {"model-judge-0": [0]}), (1, {"model-judge-1": [0]})]
    assert bundles(two)[4:] == own
    assert bundles(two, "cluster.placement=colocated")[2:] == own
    assert bundles(two, training=False)[2:] == own
    assert bundles(two, "cluster.device=cpu") == []


def test_the_reference_is_on_gpus_by_default_and_on_cpus_if_asked() -> None:
    assert bundles("reference.kl_coef=0.1")[4:] == [(1, {"reference": [0]})]
    two = ["reference={kl_coef: 0.1, ranks: 2}"]
    assert bundles(*two)[4:] == [(1, {"reference-0": [0]}), (1, {"reference-1": [0]})]
    assert bundles(*two, "cluster.placement=colocated") == [
        (1, {"rollout-0": [0], "policy-0": [0], "reference-0": [0]}),
        (1, {"rollout-1": [0], "policy-1": [0], "reference-1": [0]}),
    ]
    assert len(bundles("reference={kl_coef: 0.1, place: cpu}")) == 4


def test_a_colocated_engine_of_several_gpus_shares_each_with_a_rank() -> None:
    wide = ["cluster.placement=colocated", "rollout={engines: 2, tensor_parallel: 2}", "policy.ranks=4"]
    assert bundles(*wide, "algorithm.advantage=gae", "critic.ranks=3") == [
        (2, {"rollout-0": [0, 1], "policy-0": [0], "policy-1": [1], "critic-0": [0], "critic-1": [1]}),
        (2, {"rollout-1": [0, 1], "policy-2": [0], "policy-3": [1], "critic-2": [0]}),
    ]
    assert bundles(*wide, training=False) == [(2, {"rollout-0": [0, 1]}), (2, {"rollout-1": [0, 1]})]


def test_a_reward_model_has_its_own_gpus_whatever_the_others_run_on() -> None:
    functions = "reward.functions={zigzag: 1.0, judge_model: {function: model, gpus: 1}}"
    assert bundles(functions)[-1] == (1, {"reward-1-0": [0]})
    assert bundles(functions, "cluster.placement=colocated")[-1] == (1, {"reward-1-0": [0]})
    assert bundles(functions, "cluster.device=cpu") == [(1, {"reward-1-0": [0]})]


def test_on_cpu_workers_are_dealt_to_nodes_with_cpus() -> None:
    alive = [{"NodeID": f"{i:056}", "Alive": i != 5, "Resources": {"CPU": 2} if i else {}} for i in (0, 1, 2, 3, 5)]
    ray = SimpleNamespace(nodes=lambda: alive)
    place = reserve_gpus(ray, config("cluster.device=cpu"), True, lambda text: None)
    strategies = [place(name)["scheduling_strategy"] for name in ("policy-0", "policy-1", "rollout-0", "rollout-1")]
    assert [strategy.node_id for strategy in strategies] == [f"{i:056}" for i in (1, 2, 3, 1)]
    assert all(strategy.soft for strategy in strategies)


def test_the_largest_bundles_go_first_to_the_node_that_they_fill_best() -> None:
    large_and_small = make_bundles(config("rollout={engines: 1, tensor_parallel: 4}", "policy.ranks=3"), True)
    assert first_unplaceable(large_and_small, nodes(4, 3), free=True) is None
    assert first_unplaceable(large_and_small, nodes(3, 4), free=True) is None
    unplaced = first_unplaceable(large_and_small, nodes(4, 2), free=True)
    assert unplaced is not None
    assert list(unplaced.workers) == ["policy-2"]


def test_too_few_gpus_are_counted_by_role_and_node(refused: Callable[..., str]) -> None:
    assert refused(nodes(4, 4, taken=1), "policy.ranks=8") == (
        "policy-6 (policy.ranks (8)) needs 1 GPU and 1 CPU on one node, and finds no place. All together need 10 GPUs: "
        "rollout.engines (2) × rollout.tensor_parallel (1) 2, policy.ranks (8) 8. The cluster has 2 nodes: "
        "10.0.0.1, 10.0.0.2 with 4 GPUs and 16 CPUs each. "
        "Use fewer, or cluster.placement=colocated, where engines and policy share GPUs."
    )


def test_an_engine_that_no_node_can_hold_has_its_largest_size_named(refused: Callable[..., str]) -> None:
    message = refused(nodes(4, 4, 4, 4), "rollout={engines: 1, tensor_parallel: 8}")
    assert message.startswith(
        "rollout-0 (rollout.engines (1) × rollout.tensor_parallel (8)) needs 8 GPUs and 1 CPU on one node"
    )
    assert message.endswith(
        "The cluster has 4 nodes with 4 GPUs and 16 CPUs each. An engine runs on one node: use "
        "rollout.tensor_parallel=4 or less."
    )


def test_enough_gpus_on_nodes_that_are_too_small_are_not_enough(refused: Callable[..., str]) -> None:
    message = refused(
        nodes(3, 3), "rollout={engines: 2, tensor_parallel: 2}", "policy.ranks=2", "reference.kl_coef=0.1"
    )
    assert message.startswith("reference (reference.ranks (1)) needs 1 GPU and 1 CPU on one node, and finds no place.")
    assert (
        first_unplaceable(make_bundles(config("rollout.tensor_parallel=2"), False), nodes(3, 1), free=True) is not None
    )


def test_cpus_can_be_what_is_missing(refused: Callable[..., str]) -> None:
    assert "10.0.0.1 with 8 GPUs and 3 CPUs. " in refused(nodes(8, cpus=3))


def test_a_cluster_without_gpus_says_so(refused: Callable[..., str]) -> None:
    assert refused(nodes(0)).endswith("0 GPUs and 16 CPUs. Start nodes with GPUs, or use cluster.device=cpu.")


@pytest.mark.parametrize(
    ("cluster", "gpus", "more", "hint"),
    [
        (nodes(0), 1, [], "Start nodes with GPUs, or give the reward model gpus 0, the CPU."),
        (nodes(2, 2), 4, [], "A reward model computes on one GPU: give it gpus 1 or less."),
        (nodes(2), 4, ["cluster.device=gpu"], "A reward model computes on one GPU: give it gpus 1 or less."),
        (nodes(1, cpus=0), 1, [], "Use fewer."),
    ],
)
def test_a_reward_model_has_hints_of_its_own(
    refused: Callable[..., str], cluster: list[NodeResources], gpus: int, more: list[str], hint: str
) -> None:
    functions = f"reward.functions={{taste: {{function: model, path: m, gpus: {gpus}}}}}"
    message = refused(cluster, "cluster.device=cpu", functions, *more)
    assert message.startswith(f"reward-0 (gpus ({gpus}) of reward model taste) needs {gpus} GPU")
    assert message.endswith(hint)


def test_gpus_that_others_use_are_waited_for_and_then_named(refused: Callable[..., str]) -> None:
    assert refused(nodes(4, taken=2)) == (
        "policy-0 (policy.ranks (2)) needs 1 GPU and 1 CPU on one node, and others keep them. All together need 4 GPUs: "
        "rollout.engines (2) × rollout.tensor_parallel (1) 2, policy.ranks (2) 2. The cluster has 1 node: "
        "10.0.0.1 with 4 GPUs and 16 CPUs, 2 and 16 of them free. `ray status` and `rlsys job list` show which jobs run; wait, or use fewer."
    )


def test_many_nodes_are_counted_and_not_listed() -> None:
    assert describe_nodes(nodes(*[8] * 64)) == "The cluster has 64 nodes with 8 GPUs and 16 CPUs each, all free"
