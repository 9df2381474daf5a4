"""Runs whose samples are episodes: what is trained on is what was sampled, and kills change nothing."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from aiming import aim
from command_lines import command_of
from killing import EPISODES, LIGHT, STEPS, Run, outcome, require_equal, running, tidy
from test_survival import PATIENCE, stop
from transformers import AutoModelForCausalLM

from rlsys.tasks.builtin import TINY_MODELS

PLAYED = [*EPISODES, *STEPS, "episode.step_timeout_s=5"]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps of episodes, left alone."""
    path = tmp_path_factory.mktemp("episodes") / "run"
    with tidy() as environment:
        run = Run(path, *PLAYED, *PATIENCE, "checkpoint.keep_last=10", environment=environment).start()
        assert run.wait() == 0, run.text()
    return path


def samples(run: Path, name: str) -> list[dict[str, Any]]:
    return list(pyarrow.parquet.read_table(run / "samples" / f"{name}.parquet").to_pylist())


def turns_of(sample: dict[str, Any]) -> list[tuple[list[int], int]]:
    """For each turn all that the model saw and wrote up to its end, and how many tokens of the turn are at the end."""
    turns: list[tuple[list[int], int]] = []
    ends = [at for at, *_ in sample["observations"][1:]] + [len(sample["tokens"])]
    for turn, (at, *observed) in enumerate(sample["observations"]):
        after = turn - 1 if sample["after"][turn] is None else sample["after"][turn]
        before, _ = turns[after] if after >= 0 else ([], 0)
        turns.append(([*before, *observed, *sample["tokens"][at : ends[turn]]], ends[turn] - at))
    return turns


def test_every_trained_token_has_the_log_prob_that_transformers_computes(played: Path) -> None:
    require_logprobs_of_transformers(played)
    assert {tuple(sample["after"]) for sample in samples(played, "step-000001")} == {
        (None,),
        (None, None),
        (None, None, 0),
        (None, None, -1),
    }


def require_logprobs_of_transformers(run: Path) -> None:
    """Recomputes the log-probs of the first step: the model has not been trained then."""
    model = AutoModelForCausalLM.from_pretrained(TINY_MODELS["builtin:tiny"].folder(0, print), dtype=torch.float32)
    gaps = []
    for sample in samples(run, "step-000001"):
        expected = []
        for tokens, own in turns_of(sample):
            with torch.inference_mode():
                logprobs = torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), -1)
            expected += [float(logprobs[place - 1, tokens[place]]) for place in range(len(tokens) - own, len(tokens))]
        gaps += list(np.abs(np.array(sample["rollout_logprobs"]) - expected))
    assert np.mean(gaps) < 1e-6
    assert np.max(gaps) < 1e-4


def test_a_sample_keeps_its_conversation_and_its_reward_is_what_the_game_returned(played: Path) -> None:
    for sample in samples(played, "step-000002"):
        messages = json.loads(sample["transcript"])
        replies = [m["content"] for m in messages if m["role"] == "assistant"]
        assert "".join(replies) == sample["completion"]
        assert messages[0]["content"] == json.loads(sample["row"])["prompt"]
        first = messages[0]["content"][0]
        scores = [0.1 * turn for turn in range(len(replies))]
        assert sample["turn_scores"] == pytest.approx(scores)
        assert sample["reward"] == pytest.approx(sum(r.startswith(first) for r in replies) + sum(scores), abs=1e-6)
        assert len(replies) == 1 + int(first) % 3


@pytest.mark.long
def test_whatever_is_killed_the_run_ends_as_if_nothing_had_been(
    environment: dict[str, str], played: Path, tmp_path: Path
) -> None:
    with running(tmp_path / "run", *PLAYED, *PATIENCE, environment=environment) as run:
        run.kill("episode-0")  # while it starts
        run.until_step(1)
        aim(run, "rollout", "rollout-0", share=0.3)
        run.until(lambda: any(e["worker"] == "rollout-0" for e in run.events("replaced")))
        run.until_step(run.lines()[-1]["step"] + 2)  # a step without a replacement, whose length the next kill goes by
        aim(run, "rollout", "episode-1", share=0.5)
        run.until(
            lambda: "episode-1" in {e["worker"] for e in run.events("replaced")}
        )  # not later than in the next step
        for process in [p for p in run.family() if "workers.episodes.process" in command_of(p)]:
            process.kill()
        run.until_step(run.lines()[-1]["step"] + 1)
        run.family()[1].kill()  # the driver
        run.until(lambda: run.events("restart"))
        run.until_step(7)
        stop(run, "episode-0", phase="rollout", doing="playing episodes")
        assert run.wait() == 0, run.text()
    assert {e["worker"] for e in run.events("replaced")} >= {"rollout-0", "episode-1", "episode-0"}
    require_equal(played, tmp_path / "run")


def test_an_episode_of_one_turn_is_a_single_answer(
    environment: dict[str, str], undisturbed: Path, tmp_path: Path
) -> None:
    """The same tokens with the same seeds, and from equal rewards the same weights, in each of ten steps."""
    own = "from rlsys.rewards.functions import zigzag\n\nasync def play(row, ask):\n    reply = await ask(row['prompt'])\n"
    own += "    return zigzag(row['prompt'], reply.text, reply.finish)\n"
    (tmp_path / "own.py").write_text(own)
    options = [f"episode={{play: '{tmp_path}/own.py:play', window: 64}}", "reward.functions={}"]
    run = Run(tmp_path / "run", *STEPS, *options, environment=environment).start()
    assert run.wait() == 0, run.text()
    for step in range(1, 11):
        answers, episodes = (
            {
                (s["uid"].partition(":")[2], s["index"]): (s["tokens"], s["rollout_logprobs"], s["reward"])
                for s in samples(path, f"step-{step:06d}")
            }
            for path in (undisturbed, run.path)
        )
        assert len(answers) == 8 * 16
        assert episodes == answers, f"step {step}"
    assert outcome(run.path)["weights"] == outcome(undisturbed)["weights"]


@pytest.mark.parametrize("demo", ["guess_cpu", pytest.param("calculator_cpu", marks=pytest.mark.long)])
def test_the_demos_play_episodes(environment: dict[str, str], tmp_path: Path, demo: str) -> None:
    sizes = ["trainer.steps=2", "trainer.prompts_per_step=8", "eval.datasets=[]"]
    config = Path(__file__).parents[2] / "configs" / f"{demo}.yaml"
    run = Run(tmp_path / "run", *sizes, *LIGHT, config=config, environment=environment).start()
    assert run.wait() == 0, run.text()
    rows = samples(run.path, "step-000001")
    assert len(rows) == 8 * 16
    for sample in rows:
        messages = json.loads(sample["transcript"])
        row, last = json.loads(sample["row"]), messages[-1]["content"]
        if demo == "guess_cpu":
            solved = float(last == str(row["secret"]))
            assert sample["reward"] - sum(sample["turn_scores"]) == pytest.approx(solved, abs=1e-5)
            assert {m["content"] for m in messages[1:] if m["role"] == "user"} <= {"higher", "lower"}
        else:
            assert sample["reward"] == (last == f"={row['answer']}")
    calling = [s for s in rows if '"tool_calls"' in s["transcript"]]
    assert bool(calling) == (demo == "calculator_cpu")
    if calling:
        (call,), result = next(
            (m["tool_calls"], messages[i + 1])
            for messages in (json.loads(s["transcript"]) for s in calling)
            for i, m in enumerate(messages)
            if m.get("tool_calls") and not m["tool_calls"][0].get("error")
        )
        assert result["content"] == str(sum(call["function"]["arguments"].values()))


def test_episodes_go_on_over_steps_and_syncs(environment: dict[str, str], tmp_path: Path) -> None:
    """In flight and over-sampled: every step trains on whole episodes."""
    options = ["pipeline.max_lag=2", "rollout.oversample=0.5", "pipeline.in_flight=true"]
    run = Run(tmp_path / "run", *PLAYED, *options, *LIGHT, environment=environment).start()
    assert run.wait() == 0, run.text()
    continued = 0
    for step in range(1, 11):
        rows = samples(run.path, f"step-{step:06d}")
        assert len(rows) == 8 * 4
        for sample in rows:
            assert len(sample["observations"]) == 1 + int(json.loads(sample["row"])["prompt"][0]) % 3
            assert sum(own for _, own in turns_of(sample)) == len(sample["tokens"])
            continued += bool(sample["changes"])
    assert continued
    assert max(line["lag"] for line in run.lines()[1:]) <= 2


@pytest.mark.long
def test_a_window_too_small_for_the_first_turn_is_said_before_anything_is_trained(
    environment: dict[str, str], tmp_path: Path
) -> None:
    run = Run(tmp_path / "run", *PLAYED, "episode.window=5", *LIGHT, environment=environment).start()
    assert run.wait() == 2
    assert "None of the first 8 episodes had a turn. 8 of them: " in run.text()
    assert "episode.window is 5" in run.text()
