"""Runs of a program that asks the model at a web address: what is trained on is what was sampled, and kills change nothing."""

import json
from pathlib import Path

import pytest
from aiming import aim
from command_lines import command_of
from killing import EPISODES, LIGHT, STEPS, Run, few_held_out, require_equal, running, tidy
from test_episodes import require_logprobs_of_transformers, samples, turns_of
from test_survival import PATIENCE

AGENT = Path(__file__).parent / "own_agent.py"
PLAYED = [
    *EPISODES,
    *STEPS,
    f"episode.play={AGENT}:play",
    "episode.max_turns=8",
    "trainer.steps=6",
    "episode.step_timeout_s=10",
]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps, left alone."""
    path = tmp_path_factory.mktemp("agents") / "run"
    with tidy() as environment:
        few = few_held_out(path.parent)
        run = Run(path, *PLAYED, *PATIENCE, few, "checkpoint.keep_last=10", environment=environment).start()
        assert run.wait() == 0, run.text()
    return path


def test_every_trained_token_has_the_log_prob_that_transformers_computes(played: Path) -> None:
    require_logprobs_of_transformers(played)
    rows = samples(played, "step-000001")
    assert len(rows) == 8 * 4
    for sample in rows:
        kind = int(json.loads(sample["row"])["prompt"][0]) % 3
        assert len(sample["after"]) == (6, 3, 1)[kind], "each is trained once"
    assert {sum(after == -1 for after in sample["after"]) for sample in rows} == {0, 1}


@pytest.mark.parametrize(
    "options",
    [
        ["pipeline.max_lag=2", "rollout.oversample=0.5", "pipeline.in_flight=true"],
        ["pipeline.max_lag=1", "dynamic_sampling.enabled=true"],
    ],
    ids=["oversampled", "dynamic"],
)
def test_requests_side_by_side_go_on_over_steps_and_syncs(
    environment: dict[str, str], tmp_path: Path, options: list[str]
) -> None:
    """Every step trains on whole episodes, and evaluations play them too."""
    few = few_held_out(tmp_path)
    run = Run(tmp_path / "run", *PLAYED, *options, *LIGHT, few, environment=environment).start()
    assert run.wait() == 0, run.text()
    for step in range(1, 7):
        rows = samples(run.path, f"step-{step:06d}")
        assert len(rows) >= 8 * 4
        for sample in rows:
            kind = int(json.loads(sample["row"])["prompt"][0]) % 3
            assert len(sample["after"]) == (6, 3, 1)[kind]
            assert sum(own for _, own in turns_of(sample)) == len(sample["tokens"])
    assert max(line["lag"] for line in run.lines()[1:]) <= 2
    assert samples(run.path, "eval-000005")


@pytest.mark.long
def test_whatever_is_killed_the_run_ends_as_if_nothing_had_been(
    environment: dict[str, str], played: Path, tmp_path: Path
) -> None:
    few = few_held_out(played.parent)
    with running(tmp_path / "run", *PLAYED, *PATIENCE, few, environment=environment) as run:
        run.until_step(1)
        aim(run, "rollout", "rollout-0", share=0.3)
        run.until(lambda: any(e["worker"] == "rollout-0" for e in run.events("replaced")))
        run.until_step(run.lines()[-1]["step"] + 1)
        for process in [p for p in run.family() if "workers.episodes.process" in command_of(p)]:
            process.kill()
        run.until_step(run.lines()[-1]["step"] + 1)
        run.family()[1].kill()  # the driver
        run.until(lambda: run.events("restart"))
        assert run.wait() == 0, run.text()
    require_equal(played, tmp_path / "run")
