"""Whether a configuration fits, and the suggestions if it does not."""

import re
from pathlib import Path

import pytest

from launch.tools.estimates.devices import GIB, GPUS, NodeSpec, parse_cluster
from launch.tools.estimates.memory import SequenceLengths, total_bytes
from launch.tools.fitting.fit import Fit, check_fit
from launch.tools.fitting.formatting import shorten_names
from launch.tools.plan.suggestions import suggest_changes, with_settings
from rlsys.checks import load_checked
from rlsys.config.loading import load_config
from rlsys.config.schema import Config, RewardFunction
from rlsys.models.known_shapes import look_up_shape
from rlsys.models.shapes import ModelShape

SEVEN, LENGTHS = look_up_shape("Qwen/Qwen2.5-Math-7B"), SequenceLengths(1024, 3072)


def on(text: str, **settings: object) -> Fit:
    config = with_settings(
        load_config("configs/dapo_7b_gpu.yaml"), {k.replace("__", "."): v for k, v in settings.items()}
    )
    return check_fit(config, SEVEN, LENGTHS, 1500, parse_cluster(text))


def suggested(fit: Fit) -> list:
    return suggest_changes(fit, lambda c: check_fit(c, SEVEN, LENGTHS, 1500, fit.nodes))


def test_a_recipe_fits_the_hardware_that_its_header_names():
    assert on("8xH100").fits
    assert on("8xA100-80").fits


def test_roles_on_one_gpu_add_up_at_the_same_moment():
    fit = on("8xH100")
    engine, rank = fit.processes["rollout"].device, fit.processes["policy"].device
    gpu = fit.gpus[1]
    assert gpu.workers == ["rollout-1", "policy-1"]
    moments = {m: sum(engine[m].values()) + sum(rank.get(m, rank["generate"]).values()) for m in engine}
    assert gpu.needed == pytest.approx(max(moments.values()))


def test_the_drawing_of_colocated_gpus_has_these_bytes():
    page = Path("workers/README.md").read_text()
    drawn = re.findall(r"^    (generate|score|update|Adam|  wake) .* ([\d.]+)$", page, re.M)
    fit = on("8xH100")
    engine, rank = fit.processes["rollout"].device, fit.processes["policy"].device
    moments = ["generate", "score", "update", "step", "sync", "generate"]
    assert [float(number) for _, number in drawn] == [
        round((total_bytes(engine[m]) + total_bytes(rank[m])) / GIB, 1) for m in moments
    ]


@pytest.mark.parametrize("cluster", ["8xH100", "8xH200", "8xB200", "2x8xH200"])
@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_activations_are_kept_where_every_gpu_then_has_a_tenth_of_its_memory_free(cluster, placement):
    engines = {"rollout__engines": 4 if placement == "separate" else 8, "policy__ranks": 4}
    settings = engines | {"cluster__placement": placement, "pipeline__max_lag": 0, "policy__tokens_per_pack": 8192}
    chosen, kept = (on(cluster, **settings, policy__gradient_checkpointing=value) for value in (None, False))
    learners = [g for g in kept.gpus if "policy" in " ".join(g.workers)]
    roomy = max(g.needed / g.capacity for g in learners) <= 0.9
    assert learners
    assert chosen.config.policy.gradient_checkpointing is not roomy
    assert chosen.times == on(cluster, **settings, policy__gradient_checkpointing=not roomy).times


def test_an_overfull_gpu_is_named_with_its_excess():
    fit = on("8xA100-40")
    assert not fit.fits
    [problem] = fit.problems
    assert problem.startswith("GPU 0 of node 0 (rollout-0, policy-0), and 7 other GPUs: ")
    assert fit.bytes_over == pytest.approx(sum(g.needed - g.capacity for g in fit.gpus))


def test_suggestions_fit_and_the_fastest_comes_first():
    suggestions = suggested(on("8xA100-40"))
    assert 2 <= len(suggestions) <= 3
    assert [r.slower for r in suggestions] == sorted(r.slower for r in suggestions)
    for suggestion in suggestions:
        words = dict(word.split("=") for word in suggestion.text.split())
        again = on("8xA100-40", **{k.replace(".", "__"): _value(v) for k, v in words.items()})
        assert again.fits, suggestion.text


def _value(word: str) -> object:
    if word in ("true", "false"):
        return word == "true"
    return int(word) if word.isdecimal() else float(word) if word.replace(".", "").isdecimal() else word


def test_no_suggestion_changes_more_than_it_needs():
    for suggestion in suggested(on("8xA100-40")):
        for key in suggestion.settings:
            fewer = {k.replace(".", "__"): v for k, v in suggestion.settings.items() if k != key}
            assert not on("8xA100-40", **fewer).fits


def test_a_tensor_parallel_size_that_cannot_split_the_model_is_refused():
    fit = on("8xH100", rollout__tensor_parallel=8, rollout__engines=1)
    assert fit.problems[0].endswith("28 attention heads, 4 of keys and values, an MLP of 18,944. It may be 1, 2, 4.")
    few = suggested(on("8xA100-40"))
    assert {r.settings.get("rollout.tensor_parallel", 1) for r in few} <= {1, 2, 4}


def test_missing_gpus_are_named_together():
    fit = on("4xH100")
    assert (
        fit.problems[0]
        == "All together need 8 GPUs: rollout.engines (8) × rollout.tensor_parallel (1) 8. The cluster has 4."
    )
    assert fit.problems[1] == "rollout-4 + policy-4 to rollout-7 + policy-7: no node has 1 GPU each left."
    assert all(r.fit.fits for r in suggested(fit))


def proposed(model: ModelShape, gpus: str, *overrides: str) -> tuple[Fit, list[dict[str, object]]]:
    """A plain configuration with separate engines and ranks on H100s: its fit, and the settings of all suggestions."""
    start = ["cluster.device=gpu", "policy.dtype=bfloat16", "rollout.dtype=bfloat16", "pipeline.max_lag=1"]
    config = load_config("configs/grpo_gsm8k_0.5b_gpu.yaml", [*start, *overrides])
    fit = check_fit(config, model, SequenceLengths(512, 512), 256, parse_cluster(gpus))
    helping = suggest_changes(fit, lambda c: check_fit(c, model, SequenceLengths(512, 512), 256, fit.nodes))
    assert all(r.fit.fits for r in helping)
    return fit, [r.settings for r in helping]


def test_suggestions_make_room_for_a_reference():
    four = ["rollout.engines=4", "policy.ranks=4", "reference.kl_coef=0.001"]
    fit, settings = proposed(look_up_shape("Qwen2.5-0.5B"), "8xH100", *four)
    assert fit.problems[1] == "reference: no node has 1 GPU left."
    assert {"rollout.engines": 3} in settings
    assert {"policy.ranks": 3} in settings
    assert {"reference.place": "cpu"} in settings


def test_suggestions_make_room_for_a_critic():
    four = ["rollout.engines=4", "policy.ranks=4", "algorithm.advantage=gae", "critic.ranks=2"]
    _, settings = proposed(look_up_shape("Qwen2.5-0.5B"), "8xH100", *four)
    assert {"rollout.engines": 2} in settings
    assert {"policy.ranks": 2} in settings


def test_an_engine_that_takes_all_gpus_becomes_narrower():
    wide = ["rollout.engines=1", "rollout.tensor_parallel=8", "policy.ranks=1", "policy.offload=optimizer"]
    large = ["policy.gradient_checkpointing=false", "policy.tokens_per_pack=8192"]
    fit, settings = proposed(look_up_shape("Qwen3-8B"), "8xH100", *wide, *large)
    assert fit.problems[1] == "policy-0: no node has 1 GPU left."
    assert settings
    assert all(s["rollout.tensor_parallel"] < 8 and len(s) > 1 for s in settings), "and something of the rank"


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_suggestions_leave_a_reward_model_its_gpu(placement):
    judge = "reward.functions={rm: {function: model, path: judge, gpus: 1}}"
    four = ["rollout.engines=4", "policy.ranks=4", f"cluster.placement={placement}", "pipeline.max_lag=0"]
    fit, settings = proposed(look_up_shape("Qwen2.5-0.5B"), "4xH100", *four, judge)
    assert fit.layout.unplaced
    assert settings


def test_without_a_fitting_suggestion_the_nearest_is_given():
    suggestions = suggested(on("1xL4"))
    assert suggestions
    assert all(not r.fit.fits and r.fit.bytes_over > 0 for r in suggestions)


def test_a_cache_in_main_memory_gets_the_size_that_fits():
    tiny, lengths, nodes = look_up_shape("builtin:tiny"), SequenceLengths(7, 10), [NodeSpec(0, None, 2, 16 * GIB)]

    def settings(megabytes: int, lengths: SequenceLengths = lengths) -> list[dict[str, object]]:
        config = with_settings(load_checked("configs/tiny_cpu.yaml"), {"rollout.kv_cache_mb": megabytes})
        fit = check_fit(config, tiny, lengths, 7, nodes)
        return [r.settings for r in suggest_changes(fit, lambda c: check_fit(c, tiny, lengths, 7, nodes))]

    [most] = settings(100_000)
    two = 2 * (most["rollout.kv_cache_mb"] - 64) << 20
    at_64 = check_fit(load_checked("configs/tiny_cpu.yaml"), tiny, lengths, 7, nodes).host_bytes[0]
    assert 0.95 * 16 * GIB - (2 << 20) < at_64 + two <= 0.95 * 16 * GIB
    [enough] = settings(1, SequenceLengths(7, 600))
    assert enough == {"rollout.kv_cache_mb": 2}, "607 tokens of 2 KiB"


def test_an_engine_without_room_for_one_sequence_does_not_fit():
    fit = on("8xH100", rollout__gpu_memory=0.19)
    assert any("one full sequence has 4,096" in problem for problem in fit.problems)


def test_main_memory_counts_where_it_is_known():
    config = load_checked("configs/tiny_cpu.yaml")
    small, large = NodeSpec(0, None, 2, 1 * GIB), NodeSpec(0, None, 2, 16 * GIB)
    tiny, lengths = look_up_shape("builtin:tiny"), SequenceLengths(7, 10)
    assert check_fit(config, tiny, lengths, 7, [large]).fits
    [problem] = check_fit(config, tiny, lengths, 7, [small]).problems
    assert "main memory" in problem


def test_a_reward_model_counts_on_a_gpu_or_in_main_memory():
    def fit_on(nodes: list[NodeSpec], **options: object) -> Fit:
        judge = RewardFunction(function="model", options={"path": "judge", **options})
        config = with_settings(load_config("configs/dapo_7b_gpu.yaml"), {"reward.functions": {"rm": judge}})
        return check_fit(config, SEVEN, LENGTHS, 1500, nodes, {"judge": look_up_shape("Qwen2.5-72B")})

    [problem] = fit_on(parse_cluster("9xH100"), gpus=1).problems
    assert problem.startswith("GPU 0 of node 1 (reward-0): 305 GiB at generate")
    node = NodeSpec(8, GPUS["H100"], None, 400 * GIB)
    [problem] = fit_on([node]).problems
    assert problem.startswith("node 0: its processes hold 480 GiB")


def test_names_of_workers_are_shortened_to_ranges():
    assert shorten_names(["rollout-8", "rollout-9", "policy-0", "reference"]) == [
        "rollout-8 to 9",
        "policy-0",
        "reference",
    ]
    assert shorten_names(["rollout-1", "rollout-5", "rollout-2"]) == ["rollout-1 to 2", "rollout-5"], (
        "not those between"
    )


def test_memory_counts_on_the_node_that_a_worker_is_dealt_to():
    nodes = [NodeSpec(0, None, 2, 16 * GIB)] * 3
    tiny, lengths = look_up_shape("builtin:tiny"), SequenceLengths(7, 10)
    fit = check_fit(load_checked("configs/tiny_cpu.yaml"), tiny, lengths, 7, nodes)
    assert fit.layout.cpu_workers == [
        ["policy-0", "rollout-0", "reward-1", "driver"],
        ["policy-1", "rollout-1"],
        ["reference", "reward-0"],
    ]
    reference, reward = (total_bytes(fit.processes[name].peak()[1]) for name in ("reference", "reward"))
    assert fit.host_bytes[2] == reference + reward


def test_shared_memory_does_not_reach_over_nodes():
    config = load_checked("configs/tiny_cpu.yaml", ["sync.transport=shared_memory"])
    nodes, tiny = [NodeSpec(0, None, 2, 16 * GIB)] * 2, look_up_shape("builtin:tiny")
    fit = check_fit(config, tiny, SequenceLengths(7, 10), 7, nodes)
    assert fit.problems[0].startswith("sync.transport shared_memory keeps within a host")
    [suggestion] = suggest_changes(fit, lambda c: check_fit(c, tiny, SequenceLengths(7, 10), 7, nodes))
    assert suggestion.text == "sync.transport=auto"
    assert on("8xH100", sync__transport="shared_memory").fits


def test_every_process_is_on_one_gpu():
    fit = on("8xH100")
    assert [gpu.workers for gpu in fit.gpus] == [list(bundle.workers) for bundle in fit.bundles]


def test_a_change_of_an_option_leaves_the_others():
    assert with_settings(Config(), {"policy.ranks": 4}).policy.lr == Config().policy.lr


def test_the_smallest_gpu_of_a_cluster_decides():
    nodes = [NodeSpec(4, GPUS["H100"]), NodeSpec(4, GPUS["L4"])]
    fit = check_fit(load_config("configs/dapo_7b_gpu.yaml"), SEVEN, LENGTHS, 1500, nodes)
    assert any(g.gpu.name == "L4" and g.needed > g.capacity for g in fit.gpus)
