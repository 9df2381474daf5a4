"""Episodes with other methods, engines and ways to evaluate than the default ones."""

import itertools
import json
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from killing import LIGHT, STEPS, Run
from test_episodes import require_logprobs_of_transformers, samples

GAME = """
async def play(row, ask):
    first = await ask(row["prompt"])
    second = await ask(f"{len(first.text)}>")
    return float(row["prompt"][0] in first.text) + 2.0 * (row["prompt"][1] in second.text[:3])

async def pays_always(row, ask):
    await ask(row["prompt"])
    await ask("1>")
    return 1.0
"""
PROMPTS = ["152804>", "203496>", "864152>", "981734>", "310472>", "546913>", "678025>", "729160>"]


def run_of(folder: Path, environment: dict[str, str], *options: str, function: str = "play") -> Run:
    (folder / "game.py").write_text(GAME)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    own = [f"data.train={rows}", f"eval.datasets={rows}", "reward.functions={}", "checkpoint.every=0", "eval.every=0"]
    own += [f"episode={{play: '{folder}/game.py:{function}', window: 64}}", "trainer.steps=2"]
    own += ["rollout.max_new_tokens=8", "trainer.samples_per_prompt=4"]
    run = Run(folder / "run", *STEPS, *LIGHT, *own, *options, environment=environment).start()
    assert run.wait() == 0, run.text()
    return run


def test_remax_takes_the_greedy_episode_of_the_same_prompt_and_exact_arithmetic_leaves_no_gap(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """The evaluation before the first step plays the same prompts greedily, with the same weights."""
    run = run_of(tmp_path, environment, "algorithm.advantage=remax", "rollout.exact=true", "reference.kl_coef=0")
    greedy = {s["prompt"]: s["reward"] for s in samples(run.path, "eval-000000")}
    trained = samples(run.path, "step-000001")
    assert len({s["reward"] for s in trained}) > 1
    for sample in trained:
        assert sample["advantage"] == pytest.approx(sample["reward"] - greedy[sample["prompt"]], abs=1e-6)
    assert [line["mismatch/max_abs"] for line in run.lines()[1:]] == [0.0, 0.0]


def test_dynamic_sampling_keeps_groups_that_differ_and_pass_at_k_counts_episodes_of_an_engine_of_two_processes(
    environment: dict[str, str], tmp_path: Path
) -> None:
    run = run_of(
        tmp_path,
        environment,
        *["dynamic_sampling.enabled=true", "trainer.prompts_per_step=4", "eval.pass_score=3"],
        *["eval.samples=4", "eval.temperature=1.0", "rollout.tensor_parallel=2"],
    )
    groups = rewards_by_prompt(run.path, "step-000001")
    assert len(groups) == 4
    assert all(len(set(rewards)) > 1 for rewards in groups.values())
    evaluated = rewards_by_prompt(run.path, "eval-000000")
    assert {len(rewards) for rewards in evaluated.values()} == {4}
    pairs = [[max(pair) >= 3 for pair in itertools.combinations(r, 2)] for r in evaluated.values()]
    [passed] = {value for key, value in run.lines()[0].items() if key.endswith("/pass@2")}
    assert passed == pytest.approx(fmean(fmean(of_prompt) for of_prompt in pairs))
    assert 0 < passed < 1
    assert {len(s["observations"]) for s in samples(run.path, "step-000001")} == {2}
    require_logprobs_of_transformers(run.path)


@pytest.mark.long
def test_a_critic_learns_what_an_episode_pays_at_each_of_its_own_tokens(
    environment: dict[str, str], tmp_path: Path
) -> None:
    options = ["algorithm.advantage=gae", "critic.lr=1e-2", "trainer.steps=8", "trainer.updates_per_step=2"]
    run = run_of(tmp_path, environment, *options, "reference.kl_coef=0", function="pays_always")
    values = [line["critic/value_mean"] for line in run.lines()[1:]]
    assert abs(values[-1] - 1.0) < 0.2 < abs(values[0] - 1.0)
    for sample in samples(run.path, "step-000002"):
        advantages = sample["token_advantages"]
        assert len(advantages) == len(sample["tokens"])
        assert np.isfinite(advantages).all()


def rewards_by_prompt(run: Path, name: str) -> dict[str, list[float]]:
    rewards: dict[str, list[float]] = {}
    for sample in samples(run, name):
        rewards.setdefault(sample["uid"], []).append(sample["reward"])
    return rewards
