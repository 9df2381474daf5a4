"""`rlsys plan` as a user types it, and with --simulate."""

import json
import re

import pytest
from click.testing import CliRunner
from made_run import make_run

from launch.tools.cli import commands
from launch.tools.estimates.devices import GPUS, NodeSpec
from launch.tools.plan import lengths

COSTS = {"step_s": 0.01, "sequence_s": 1e-4, "prompt_s": 1e-6, "score_s": 1e-5, "update_s": 1e-4, "sync_s": 0.5}


@pytest.fixture
def costs(tmp_path) -> str:
    (tmp_path / "costs.json").write_text(json.dumps(COSTS))
    return str(tmp_path / "costs.json")


def simulated(*words: str) -> list[str]:
    result = CliRunner().invoke(
        commands, ["plan", *words, "--steps", "2"], env={"COLUMNS": "80"}, catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return [line.strip() for line in result.output.splitlines()]


def test_every_schedule_has_a_line_and_fits_80_columns(costs):
    lines = simulated("configs/tiny_cpu.yaml", "--simulate", costs, "--ragged", "5,10")
    ways = [line.split("  ")[0] for line in lines if line.startswith("lag ")]
    assert ways == ["lag 0", "lag 1", "lag 2", "lag 1 in flight", "lag 2 in flight +25%"]
    assert max(map(len, lines[:8])) <= 80


def test_the_schedule_of_the_configuration_comes_first(costs):
    lines = simulated("configs/tiny_cpu.yaml", "pipeline.max_lag=3", "--simulate", costs, "--ragged", "5,10")
    ways = [line.split("  ")[0] for line in lines if line.startswith("lag ")]
    assert ways == ["lag 3", "lag 0", "lag 1", "lag 2", "lag 1 in flight", "lag 2 in flight +25%"]


def test_a_colocated_configuration_that_oversamples_comes_first(costs):
    own = ["cluster.placement=colocated", "pipeline.max_lag=1", "rollout.oversample=0.5", "trainer.prompts_per_step=16"]
    own += ["rollout.engines=2", "policy.ranks=2", "dynamic_sampling.enabled=false"]
    lines = simulated("configs/dapo_7b_gpu.yaml", *own, "--simulate", costs, "--ragged", "50,200")
    assert [line.split("  ")[0] for line in lines if line.startswith("lag ")] == ["lag 1 +50%", "lag 0"]


def test_a_reference_and_a_critic_have_gpus_of_their_own(costs):
    settings = ["trainer.prompts_per_step=32", "reference.kl_coef=0.1"]
    settings += ["algorithm.advantage=gae", "critic.ranks=2", "dynamic_sampling.enabled=false"]
    few = ["--simulate", costs, "--ragged", "50,200", "--gpus"]
    lines = simulated("configs/dapo_7b_gpu.yaml", *settings, *few, "7")
    assert [line.split()[2:4] for line in lines if line.startswith("lag 0")] == [
        ["7", "same"],
        ["1", "3"],
        ["2", "2"],
        ["3", "1"],
    ]
    result = CliRunner().invoke(commands, ["plan", "configs/dapo_7b_gpu.yaml", *settings, *few, "4"])
    assert "--gpus 4: 3 are for others, and what is left is less than two engines" in str(result.exception)


def test_placements_are_tried_without_data(costs):
    few = "trainer.prompts_per_step=32"
    lines = simulated("configs/dapo_7b_gpu.yaml", few, "--simulate", costs, "--gpus", "4", "--ragged", "50,200")
    assert [line.split()[2:4] for line in lines if line.startswith("lag 0")] == [
        ["4", "same"],
        ["1", "3"],
        ["2", "2"],
        ["3", "1"],
    ]


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        ([], 1.1),  # one pack of 32 x (7 + 16 x 9) = 4,832 tokens, and 10 steps of all 512 sequences
        (["policy.tokens_per_pack=4096"], 2.1),
        (["rollout.max_sequences=256", "cluster.device=cpu", "rollout.exact=true"], 1.2),
    ],
)
def test_on_gpus_what_a_configuration_for_cpus_leaves_open_is_as_on_gpus(words, seconds, tmp_path):
    (tmp_path / "open.yaml").write_text("data: {train: builtin:zigzag}")
    zero = dict.fromkeys(COSTS, 0.0)
    (tmp_path / "costs.json").write_text(json.dumps(zero | {"step_s": 0.01, "pack_s": 1.0}))
    given = ["--simulate", str(tmp_path / "costs.json"), "--gpus", "2", "--ragged", "10,10", "--prompt-tokens", "7"]
    simulated(str(tmp_path / "open.yaml"), *words, *given, "--json", str(tmp_path / "figures.json"))
    ways = json.loads((tmp_path / "figures.json").read_text())["ways"]
    separate = next(way for way in ways if (way["placement"], way["max_lag"]) == ("separate", 0))
    assert separate["step_s"] == pytest.approx(seconds)


def assumed_lengths(*words: str) -> str:
    """The line that tells them."""
    done = CliRunner().invoke(commands, ["plan", *words], env={"COLUMNS": "300"}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    [line] = [line for line in done.output.splitlines() if "prompts of " in line]
    return line.removeprefix("lengths: ")


def test_simulate_and_measured_assume_the_same_lengths(costs):
    simulated = assumed_lengths("configs/tiny_cpu.yaml", "--simulate", costs)
    assert simulated == assumed_lengths("configs/tiny_cpu.yaml", "--measured", costs)
    assert simulated == (
        "prompts of 7 tokens at most and 7.0 on average (as in the data), "
        "completions of 5.0 on average and 10 at most (half of rollout.max_new_tokens, and all of it)"
    )


def test_prompts_are_as_long_as_in_the_data_if_data_and_tokenizer_are_here(costs, tmp_path):
    for name, texts in {"train": ["1>", "12345>", "123>"], "test": ["1234567890>"]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    data = [f"data.train={tmp_path}/train.jsonl", f"eval.datasets={tmp_path}/test.jsonl"]
    for mode in (["--simulate", costs], []):
        known = assumed_lengths("configs/tiny_cpu.yaml", *data, *mode)
        assert known.startswith("prompts of 11 tokens at most and 4.0 on average (as in the data), ")
    gone = assumed_lengths("configs/tiny_cpu.yaml", "data.train=owner/name", "rollout.max_prompt_tokens=7")
    assert gone.startswith("prompts of 7 tokens (rollout.max_prompt_tokens; owner/name is a data set of the hub), ")
    gone = assumed_lengths("configs/tiny_cpu.yaml", f"data.train={tmp_path}/gone.jsonl")
    assert gone.startswith(
        f"prompts of 54 tokens (what the model's window leaves; {tmp_path}/gone.jsonl is not on this"
    )
    long = assumed_lengths("configs/tiny_cpu.yaml", *data, "rollout.max_prompt_tokens=5")
    assert f"(rollout.max_prompt_tokens; {tmp_path}/train.jsonl:2: the prompt has 6 tokens; at most 5 fit" in long
    unknown = assumed_lengths("configs/tiny_cpu.yaml", *data, "model.path=Qwen/Qwen2.5-0.5B", "policy.ranks=1")
    assert unknown.startswith(
        "prompts of 256 tokens (assumed; --prompt-tokens sets another length; the model's tokenizer"
    )


def test_lengths_come_from_the_run_with_the_costs_unless_options_set_them(tmp_path):
    run = make_run(tmp_path / "run")
    simulated = assumed_lengths("configs/tiny_cpu.yaml", "--simulate", str(run))
    assert simulated == assumed_lengths("configs/tiny_cpu.yaml", "--measured", str(run))
    had = lengths.read_run_lengths(run)
    assert (had.mean, had.longest) == (pytest.approx(7.0, abs=0.2), 10)
    assert had.prompt == pytest.approx(7, abs=1), "of 7 letters, which are about as many tokens"
    assert simulated == (
        f"prompts of {had.prompt} tokens (about as in {run}), completions of {had.mean:.1f} on average and 10 at most (as in {run})"
    )
    options = ["--ragged", "3,6", "--prompt-tokens", "20"]
    assert assumed_lengths("configs/tiny_cpu.yaml", "--simulate", str(run), *options) == (
        "prompts of 20 tokens (--prompt-tokens), completions of 3.0 on average and 6 at most (--ragged)"
    )
    shorter = assumed_lengths("configs/tiny_cpu.yaml", "rollout.max_new_tokens=2", "--simulate", str(run))
    assert "completions of 2.0 on average and 2 at most" in shorter, "no more than the configuration allows"


def test_simulate_and_measured_give_the_same_seconds(costs):
    simulated = CliRunner().invoke(commands, ["plan", "configs/tiny_cpu.yaml", "--simulate", costs]).output
    [seconds] = [line.split()[4] for line in simulated.splitlines() if line.startswith("lag 0")]
    _, measured = planned("configs/tiny_cpu.yaml", "--measured", costs)
    assert [line.split()[1] for line in measured.splitlines() if line.startswith("step ")] == [seconds]


@pytest.mark.parametrize("mode", [["--simulate", "COSTS"], []], ids=["simulated", "planned"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ragged=-5,10"], "the mean (-5) must be between 1 and the maximum (10)"),
        (["--ragged=10,5"], "must be between 1 and the maximum (5)"),
        (["--ragged=0,0"], "must be between 1"),
        (["--ragged=nan,5"], "the mean (nan)"),
        (["--ragged=inf,10"], "the mean (inf)"),
        (["--ragged=5,100"], "= 101, but the model's window is 64 tokens"),
        (
            ["--ragged=5,10", "--prompt-tokens=60"],
            "(60) + rollout.max_new_tokens (10) = 70, but the model's window is 64",
        ),
        (["--ragged=5,10", "policy.tokens_per_pack=9"], "smaller than one full sequence"),
    ],
)
def test_impossible_lengths_are_refused(options, message, mode, costs):
    from rlsys.errors import ConfigError

    with pytest.raises(ConfigError) as error:
        planned("configs/tiny_cpu.yaml", *[costs if word == "COSTS" else word for word in mode], *options)
    assert message in str(error.value)


def test_the_figures_of_a_simulation_are_written_as_json(costs, tmp_path):
    simulated(
        "configs/tiny_cpu.yaml", "--simulate", costs, "--ragged", "5,10", "--json", str(tmp_path / "new" / "f.json")
    )
    figures = json.loads((tmp_path / "new" / "f.json").read_text())
    assert figures["costs"] == {"pack_s": 0.0, "optimizer_s": 0.0, "reward_s": 0.0, "other_s": 0.0} | COSTS
    assert (figures["lengths"]["prompt"], figures["lengths"]["mean"], figures["lengths"]["longest"]) == (7, 5.0, 10)
    own, *others = figures["ways"]
    assert (own["max_lag"], own["placement"], own["engines"], own["ranks"]) == (0, "separate", 2, 2)
    assert own["samples_per_s"] == pytest.approx(512 / own["step_s"])
    assert [way["max_lag"] for way in others] == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--simulate", "COSTS", "--cluster", "64xH100"], "Use --gpus N to try placements"),
        (["--simulate", "COSTS", "--address", "auto"], "--address does not work with --simulate"),
        (["--simulate", "COSTS", "--measured", "COSTS"], "--measured does not work with --simulate"),
        (["--simulate", "COSTS", "--model-config", "c.json"], "--model-config does not work with --simulate"),
        (["--gpus", "8"], "--gpus needs --simulate; --cluster names GPUs"),
        (["--steps", "3"], "--steps needs --simulate"),
        (
            ["--cluster", "8xH100", "--address", "auto"],
            "--cluster names GPUs that need not exist, --address a running cluster",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(words, message, costs):
    given = [costs if word == "COSTS" else word for word in words]
    result = CliRunner().invoke(commands, ["plan", "configs/tiny_cpu.yaml", *given], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.output


# --- without --simulate --------------------------------------------------------------------------------------------------------


def planned(*words: str, width: int = 80) -> tuple[int, str]:
    result = CliRunner().invoke(commands, ["plan", *words], env={"COLUMNS": str(width)}, catch_exceptions=False)
    return result.return_value if result.return_value is not None else result.exit_code, result.output


def test_an_engine_needs_room_for_the_completions_of_an_evaluation_too():
    # builtin:tiny keeps 2 x 2 layers x 128 numbers of 4 bytes a token: 1 MiB has room for 512 tokens.
    options = ["rollout.kv_cache_mb=1", "rollout.max_new_tokens=10", "--prompt-tokens", "20"]
    _, text = planned("configs/tiny_cpu.yaml", *options)
    assert "KV cache of an engine: 512 tokens, 17.1 full sequences of 30" in text
    _, text = planned("configs/tiny_cpu.yaml", *options, "eval.max_new_tokens=44")
    assert "KV cache of an engine: 512 tokens, 8.0 full sequences of 64" in text


def test_a_plan_for_other_gpus_draws_their_workers():
    _, text = planned("configs/dapo_7b_gpu.yaml", "--cluster", "8xH100")
    lines = text.splitlines()
    assert "8 x H100 in 1 node" in text
    assert [line for line in lines if "rollout-4" in line and "rollout-7" in line]
    assert "✓ configs/dapo_7b_gpu.yaml fits." in text
    boxes = [line for line in lines if line.startswith(("╭", "│", "╰"))]
    assert boxes
    assert max(map(len, boxes)) <= 80


def test_an_assumed_prompt_may_make_a_sequence_longer_than_a_pack():
    long = ["rollout.max_prompt_tokens=0", "rollout.max_new_tokens=4096", "policy.tokens_per_pack=4096"]
    _, text = planned("configs/grpo_gsm8k_0.5b_gpu.yaml", *long, "--cluster", "8xH100")
    assert "pack alone, of 4351 tokens" in " ".join(text.split())


def test_nodes_that_are_alike_are_drawn_once():
    _, text = planned("configs/dapo_32b_gpu.yaml", "--cluster", "8x8xH100")
    assert "nodes 1 to 3 are the same, with rollout-2 to 7" in text
    assert "nodes 5 to 7 are the same, with policy-8 to 31" in text
    assert text.count("╭─ GPU 0 ") == 2


def test_suggested_changes_can_be_typed_and_fit():
    _, text = planned("configs/dapo_7b_gpu.yaml", "--cluster", "8xA100-40")
    assert "✗ configs/dapo_7b_gpu.yaml does not fit:" in text
    [change] = [line for line in text.splitlines() if line.startswith("  1. ")]
    settings = change.split("  (")[0].split()[1:]
    _, again = planned("configs/dapo_7b_gpu.yaml", *settings, "--cluster", "8xA100-40")
    assert "fits" in again.splitlines()[-1]
    assert "not fit" not in again


def test_a_plan_on_this_machine_needs_no_cluster_and_no_data(tmp_path):
    _, text = planned("configs/tiny_cpu.yaml", "data.train=not_here.jsonl", "--json", str(tmp_path / "f.json"))
    assert "1 node: this machine" in text
    figures = json.loads((tmp_path / "f.json").read_text())
    assert figures["model"]["parameters"] == 330_752
    assert figures["fits"] is True
    assert figures["memory"]["rollout"]["host"]["generate"]["KV cache"] == 64 << 20
    assert set(figures["seconds"]) >= {"rollout", "score", "update", "sync", "step"}


def test_a_busy_cluster_is_drawn_with_what_it_lacks(monkeypatch):
    node = NodeSpec(8, GPUS["A100-40"], 0, 0, "10.0.0.1", "A100")
    monkeypatch.setattr("launch.tools.plan.command.find_nodes", lambda *_: ([node], "a cluster"))
    _, text = planned("configs/dapo_7b_gpu.yaml", width=120)
    assert "node 0 (10.0.0.1): 8 x A100-40 of 39.4 GiB (the smallest of the GPUs named A100), 0 CPUs" in text
    assert "rollout-0 + policy-0 to rollout-7 + policy-7: no node has 1 GPU and a CPU each left." in text


def test_a_plan_for_cpus_draws_processes_and_counts_idle_gpus():
    _, text = planned("configs/tiny_cpu.yaml", "--cluster", "2x8xH100", width=120)
    first, _, second = text.partition("node 1: ")
    for name in ("policy-0", "reference", "rollout-1", "reward-1", "driver"):
        assert (f"┌─ {name} ─" in first, f"┌─ {name} ─" in second) == (True, False)
    assert "idle: 16 GPUs, which cluster.device cpu does not use" in second


def test_the_memory_table_tells_rank_0_from_the_other_ranks():
    for ranks, others in ((2, ["policy-1"]), (3, ["policy-1…"]), (1, [])):
        _, text = planned("configs/tiny_cpu.yaml", f"policy.ranks={ranks}")
        [heads] = [line for line in text.splitlines() if line.startswith("part ")]
        assert heads.split() == ["part", "rollout", "policy-0", *others, "reference", "reward", "driver"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["configs/dapo_7b_gpu.yaml"], r"offloaded to main memory: nothing"),
        (
            ["configs/dapo_7b_gpu.yaml", "policy.offload=[optimizer]"],
            r"offloaded to main memory by policy.offload optimizer, NOT NEEDED: without it a GPU would hold 65.6 of 79.1 GiB",
        ),
        (
            ["configs/grpo_countdown_3b_gpu.yaml"],
            r"offloaded to main memory by policy.offload optimizer, needed: without it a GPU would hold \S+ of 79.1 GiB",
        ),
    ],
)
def test_what_is_offloaded_is_named_and_whether_it_would_fit_without(words, line, tmp_path):
    file = tmp_path / "plan.json"
    done = CliRunner().invoke(commands, ["plan", *words, "--json", str(file)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    [printed] = [text.strip() for text in done.output.splitlines() if text.startswith("offloaded")]
    assert re.fullmatch(line, printed), printed
    offloads = json.loads(file.read_text())["offloads"]
    assert [o["needed"] for o in offloads] == [", needed" in line] * ("nothing" not in line)


def test_seconds_may_come_from_a_measurement(costs):
    _, text = planned("configs/tiny_cpu.yaml", "--measured", costs, "--ragged", "5,10")
    assert "Seconds of a step, with the costs that were measured" in text
    assert "ESTIMATE" not in text


@pytest.mark.parametrize("words", [[], ["policy.sequence_parallel=2"]])
def test_a_model_with_mixers_is_planned_and_its_ranks_share_no_packs(words, tmp_path):
    sizes = {"model_type": "qwen3_5_text", "hidden_size": 2560, "intermediate_size": 9216, "vocab_size": 248320}
    sizes |= {"num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": sizes, "tie_word_embeddings": True}))
    given = ["model.path=nobody/hybrid", *words, "--model-config", str(tmp_path / "config.json")]
    _, text = planned("configs/dapo_7b_gpu.yaml", *given, "--json", str(tmp_path / "plan.json"), width=300)
    assert ("nobody/hybrid has linear attention, which hand on a state" in text) == bool(words)
    assert re.search(r"an engine decodes [89]\d\d sequences at once, not 1024: it has no states for more", text)
    _, large = planned("configs/dapo_7b_gpu.yaml", *given, "--cluster", "2x8xH200", width=300)
    assert "an engine decodes" not in large
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert figures["fits"] == (not words)
    assert list(figures["longest_sequences"]) == ["1"]


def test_an_unknown_model_needs_its_config_json(tmp_path):
    from rlsys.errors import ConfigError

    with pytest.raises(ConfigError, match="--model-config"):
        planned("configs/tiny_cpu.yaml", "model.path=nobody/nothing-9b")
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128}
            | {"num_hidden_layers": 2, "num_attention_heads": 2}
        )
    )
    _, text = planned(
        "configs/tiny_cpu.yaml", "model.path=nobody/nothing-9b", "--model-config", str(tmp_path / "config.json")
    )
    assert "nobody/nothing-9b: " in text


@pytest.mark.parametrize(("kind", "why"), [(None, "hf download"), ("abacus", "the layers of model_type `abacus`")])
def test_an_unknown_reward_model_is_named(kind, why, tmp_path):
    if kind:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    judge = f"reward.functions={{rm: {{function: model, path: '{tmp_path}'}}}}"
    _, text = planned("configs/tiny_cpu.yaml", judge, "--json", str(tmp_path / "f.json"), width=300)
    assert json.loads((tmp_path / "f.json").read_text())["fits"] is False
    assert f"Not counted: reward model {tmp_path}: " in text
    assert why in text
    assert "Whether configs/tiny_cpu.yaml fits is not known" in text


def test_problems_of_the_configuration_come_first():
    from rlsys.errors import ConfigError

    with pytest.raises(ConfigError, match="gpu_memory"):
        planned("configs/tiny_cpu.yaml", "rollout.gpu_memory=2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "configs/dapo_7b_gpu.yaml rollout.max_new_tokens=3500 --cluster 8xH100",
            "4524, but the model's window is 4096",
        ),
        ("configs/dapo_7b_gpu.yaml rollout.max_new_tokens=12000 --cluster 8xH100", "Reduce one of them by 8928."),
        ("configs/tiny_cpu.yaml rollout.max_new_tokens=64", r"\(at least 1\).* window is 64 tokens"),
    ],
)
def test_sequences_beyond_the_models_window_are_refused(words, message):
    from rlsys.errors import ConfigError

    with pytest.raises(ConfigError, match=message):
        planned(*words.split())


def test_a_given_config_json_sets_the_window(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944}
            | {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
            | {"max_position_embeddings": 16384}
        )
    )
    long = ["rollout.max_new_tokens=12000", "policy.tokens_per_pack=16384", "--cluster", "8xH100"]
    code, _ = planned("configs/dapo_7b_gpu.yaml", *long, "--model-config", str(tmp_path / "config.json"))
    assert code == 0


def test_without_gpus_no_time_is_estimated(monkeypatch):
    monkeypatch.setattr(
        "launch.tools.plan.command.find_nodes", lambda *_: ([NodeSpec(0, None, 8, 64 << 30)], "nowhere")
    )
    _, text = planned("configs/dapo_7b_gpu.yaml")
    assert "The cluster has 0." in text
    assert "Seconds of a step" not in text


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_without_a_cluster_fails_at_once(scheme):
    from rlsys.errors import ConfigError
    from workers.start.ports import free_port

    address = f"{scheme}127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match=f"--address: no Ray cluster answers at {address}"):
        planned("configs/dapo_7b_gpu.yaml", "--address", address)
