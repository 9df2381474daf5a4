"""The demonstration keeps its promise, from start to export: GRPO learns from the verifier, and from nothing else."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet
import pytest
from cpu_seconds import CpuSeconds, plain_seconds
from killing import LIGHT, Run, running, tidy

from launch.tools.report.gather import ReportedRun as Shown
from launch.tools.report.gather import page_data
from launch.tools.report.sample_pieces import sample_files, sample_texts, sample_tokens
from launch.tools.report.token_texts import load_token_texts

STEPS = 80  # of configs/tiny_cpu.yaml
ACTORS = {"rollout-0", "rollout-1", "reward-0", "reward-1", "reference", "policy-0", "policy-1"}


@dataclass
class Demo:
    run: Run
    cpu_seconds: float  # of all its processes
    plain_seconds: float  # of plain PyTorch, for one forward and backward pass of each sample
    actors: set[str]  # while it trained


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    plain = plain_seconds(STEPS)
    with tidy() as environment, running(tmp_path_factory.mktemp("demo") / "run", environment=environment) as run:
        spent = CpuSeconds(run.process.pid)
        run.until_step(1)
        [start] = run.events("start")
        listed = subprocess.run(
            [str(Path(sys.executable).parent / "ray"), "list", "actors", "--format", "json"],
            capture_output=True,
            text=True,
            env=environment | {"RAY_AUTH_MODE": "token", "RAY_ADDRESS": start["ray"]},
            check=True,
        )
        assert run.wait(550) == 0, run.text()
    actors = json.loads(listed.stdout[listed.stdout.index("[") :])
    return Demo(
        run, spent.total(), max(plain, plain_seconds(STEPS)), {a["name"] for a in actors if a["state"] == "ALIVE"}
    )


def accuracies(run: Run) -> list[float]:
    return [line["eval/zigzag/accuracy"] for line in run.lines() if "eval/zigzag/accuracy" in line]


def test_the_demo_learns(demo: Demo) -> None:
    measured = accuracies(demo.run)
    assert measured[0] <= 0.5
    assert measured[-1] >= 0.95


def test_it_takes_little_more_cpu_time_than_its_passes_alone(demo: Demo) -> None:
    """The demo also starts all processes, samples, scores twice, verifies and evaluates: 4 to 5 times in all."""
    ratio = demo.cpu_seconds / demo.plain_seconds
    print(f"{demo.cpu_seconds:.0f} CPU seconds, {ratio:.1f} times those of plain PyTorch for its passes")
    assert 1 < ratio < 10


def test_it_says_what_matters_and_nothing_else(demo: Demo) -> None:
    output = demo.run.text()
    assert str(demo.run.path) in output
    assert "held-out accuracy" in output
    for chatter in ("Warning", "INFO", "DeepSpeed", "Loading"):
        assert chatter not in output


def test_its_actors_are_listed_by_name(demo: Demo) -> None:
    assert demo.actors == {f"rlsys-{name}" for name in ACTORS}


def test_it_writes_a_line_for_every_step_every_sample_and_checkpoints(demo: Demo) -> None:
    lines, path = demo.run.lines(), demo.run.path
    assert [line["step"] for line in lines] == list(range(81))
    names = "reward/mean reward/std loss kl entropy grad_norm clip_fraction mismatch/mean_abs mismatch/max_abs tokens "
    names += "tokens_per_second time/step time/rollout time/reward time/score time/update time/sync sync/version"
    assert set(names.split()) <= set(lines[1])
    assert [line["step"] for line in lines if "eval/zigzag/accuracy" in line] == list(range(0, 81, 10))
    assert [line["sync/version"] for line in lines[1:]] == list(range(1, 81))
    assert all(line["lag"] == 0 for line in lines[1:])
    assert [p.name for p in sorted((path / "checkpoints").iterdir())] == ["step-000060", "step-000080"]
    samples = pyarrow.parquet.read_table(path / "samples" / "step-000002.parquet").to_pylist()
    assert len(samples) == 512
    assert {"uid", "completion", "reward", "advantage", "version"} <= set(samples[0])
    assert (path / "config.yaml").is_file()
    events = {json.loads(line)["event"] for line in (path / "events.jsonl").open()}
    assert events == {"start", "begin", "agreement", "sync", "checkpoint", "done"}
    assert {f"{name}.log" for name in ACTORS} <= {p.name for p in (path / "logs").iterdir()}


def test_engines_and_policy_agree_in_each_step(demo: Demo) -> None:
    gaps = {line["step"]: (line["mismatch/mean_abs"], line["mismatch/max_abs"]) for line in demo.run.lines()[1:]}
    print(
        f"largest mean {max(mean for mean, _ in gaps.values()):.1e}, largest gap {max(m for _, m in gaps.values()):.1e}"
    )
    assert len(gaps) == STEPS
    assert not {step: gap for step, gap in gaps.items() if not (gap[0] <= 1e-6 and gap[1] <= 1e-4)}


def test_its_model_is_evaluated_and_exported(
    demo: Demo, rlsys: Callable[..., "subprocess.CompletedProcess[str]"], tmp_path: Path
) -> None:
    out, model = tmp_path / "samples.parquet", tmp_path / "model"
    evaluated = rlsys("eval", str(demo.run.path), "--out", str(out), "rollout.engines=1", "reward.workers=1")
    assert evaluated.returncode == 0, evaluated.stderr
    assert f"zigzag: accuracy {accuracies(demo.run)[-1]:.1%} of 256 prompts" in evaluated.stdout
    assert rlsys("export", str(demo.run.path), str(model)).returncode == 0
    completions = {r["prompt"]: r["completion"] for r in pyarrow.parquet.read_table(out).to_pylist()[:8]}
    assert completions == {p: greedy(model, p) for p in completions}, "transformers reads the export as the engines do"


def greedy(model: Path, prompt: str) -> str:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = torch.tensor([tokenizer.encode(prompt)])
    out = AutoModelForCausalLM.from_pretrained(model).generate(ids, max_new_tokens=10, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def test_shuffled_rewards_teach_nothing_and_ctrl_c_ends_with_130(environment: dict[str, str], tmp_path: Path) -> None:
    options = ["reward.shuffle=true", "trainer.steps=100000", "eval.every=5", *LIGHT]
    with running(tmp_path / "run", *options, environment=environment) as run:
        run.until_step(10)
        os.killpg(run.process.pid, signal.SIGINT)  # every process of the group gets it, as on Ctrl-C in a terminal
        assert run.wait(60) == 130, run.text()
    assert "Run the same command again" in run.text()
    measured = accuracies(run)
    assert len(measured) >= 3
    assert max(measured[1:]) <= measured[0] + 0.1


def test_its_report_shows_all_that_it_did(demo: Demo) -> None:
    [report] = page_data([Shown.read(demo.run.path)])["runs"]
    assert (report["state"]["kind"], report["missing"]) == ("done", [])
    assert not [f for f in report["findings"] if f["tone"] == "problem"]
    assert {w["name"] for w in report["lanes"]["workers"]} == ACTORS | {"driver"}
    last = [f for f in sample_files(demo.run.path) if f.stem.startswith("step-")][-1]
    tokens = sample_tokens(last, None, load_token_texts(demo.run.path, report["model"]))
    completions = [
        re.sub("<[a-z]+>", "", "".join(tokens["words"][i] for i in own)) for own in tokens["ids"]
    ]  # <eos>, or <pad>
    assert completions == sample_texts(last)["text"]
    assert max(abs(gap) for own in tokens["gap"] for gap in own) < 1e-3
