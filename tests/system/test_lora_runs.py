"""Whole runs with LoRA: killed ones end as the undisturbed one, and vLLM loads the adapter and says what our engines said."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from killing import ROOT, Run, require_equal, running, tidy

from workers.rollout.engine_settings import CPU_ENVIRONMENT

pytestmark = pytest.mark.long

CONFIG = ROOT / "configs" / "lora_cpu.yaml"
STEPS = ["trainer.steps=6", "checkpoint.every=2", "eval.every=3", "trainer.prompts_per_step=8", "rollout.engines=1"]
STEPS += ["reward.workers=1"]
AHEAD = [*STEPS, "policy.zero_stage=3", "pipeline.max_lag=1", "dynamic_sampling.enabled=true"]
AHEAD += ["algorithm.normalize=sequence_mean", "algorithm.std=none", "watchdog.stall_s=12"]


def rlsys(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "launch", *words], capture_output=True, text=True, timeout=300, cwd=ROOT
    )


GREEDY = """
import json, sys
from vllm import LLM, ModelRegistry, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

ModelRegistry.register_model("Qwen2ForCausalLM", Qwen2ForCausalLM)
base, adapter, *prompts = sys.argv[1:]
options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 64, "kv_cache_memory_bytes": 64 << 20}
llm = LLM(base, enable_lora=True, max_lora_rank=8, **options)
greedy = SamplingParams(temperature=0, max_tokens=10)
for lora in (None, LoRARequest("adapter", 1, adapter)):
    answers = llm.generate(prompts, greedy, lora_request=lora, use_tqdm=False)
    print("TEXTS", json.dumps([answer.outputs[0].text for answer in answers]))
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was left alone."""
    path = tmp_path_factory.mktemp("lora") / "run"
    with tidy() as environment:
        run = Run(path, *AHEAD, config=CONFIG, environment=environment).start()
        assert run.wait() == 0, run.text()
        left = Path(environment["TMPDIR"]) / f"rlsys-{run.process.pid}-left"  # as of a run killed after its last step
        left.mkdir()
        assert run.start().wait() == 0, run.text()
        assert "finished: 6 steps are done" in run.text()
        assert not left.exists()
    return path


def test_engines_ranks_and_the_driver_are_killed_and_it_ends_as_if_nothing_had_been(
    environment: dict[str, str], alone: Path, tmp_path: Path
) -> None:
    """One step ahead, with ZeRO 3 and dynamic sampling."""
    with running(tmp_path / "run", *AHEAD, config=CONFIG, environment=environment) as run:
        run.until_step(2)
        run.kill("rollout-0", signal.SIGSTOP)
        run.until(lambda: run.events("replaced"))
        run.until_step(3)
        run.kill("policy-1")
        run.until(lambda: run.events("restart"))
        run.until_step(5)
        run.family()[1].kill()  # the driver
        assert run.wait() == 0, run.text()
    assert [e["worker"] for e in run.events("replaced")] == ["rollout-0"]
    assert "rollout-0" in run.events("stall")[0]["stacks"]
    assert [e["cause"] for e in run.events("restart")] == ["it lost a worker", "the driver was ended by SIGKILL"]
    assert [line["lag"] for line in run.lines()[1:]] == [0] + [1] * 5
    assert all(line["groups/equal"] == 0 for line in run.lines()[1:])
    assert all(line["kl"] > 0 for line in run.lines()[2:]), "KL is in the loss"
    assert not (run.path / "logs" / "reference.log").exists(), "and no process is the reference"
    require_equal(alone, run.path)


def test_halves_of_an_engine_get_the_adapter_from_which_a_run_starts(
    environment: dict[str, str], alone: Path, tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter"
    assert rlsys("export", str(alone), str(adapter), "--adapter").returncode == 0
    base = json.loads((adapter / "base_model.json").read_text())["path"]
    halves = [*STEPS, "trainer.steps=2", "rollout.tensor_parallel=2"]
    start = [f"model.path={base}", f"model.adapter={adapter}"]
    with running(tmp_path / "run", *halves, *start, config=CONFIG, environment=environment) as run:
        assert run.wait() == 0, run.text()
    assert run.events("wrong weights") == []
    assert all(line["mismatch/mean_abs"] < 1e-5 for line in run.lines()[1:])
    assert evaluated(run.path, 0) == evaluated(alone, 6)


def test_vllm_loads_the_adapter_and_says_what_the_engines_said(alone: Path, tmp_path: Path) -> None:
    assert rlsys("export", str(alone), str(tmp_path / "adapter"), "--adapter").returncode == 0
    base = json.loads((tmp_path / "adapter" / "base_model.json").read_text())["path"]
    first, last = (evaluated(alone, step) for step in (0, 6))
    done = subprocess.run(
        [sys.executable, "-c", GREEDY, base, str(tmp_path / "adapter"), *last],
        env={**os.environ, **CPU_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=300,
    )
    texts = [json.loads(line.removeprefix("TEXTS ")) for line in done.stdout.splitlines() if line.startswith("TEXTS ")]
    assert texts == [list(first.values()), list(last.values())], done.stderr[-2000:]
    assert first != last


def evaluated(run: Path, step: int) -> dict[str, Any]:
    """Greedy completions by prompt."""
    rows = pyarrow.parquet.read_table(run / "samples" / f"eval-{step:06}.parquet").to_pylist()
    return {row["prompt"]: row["completion"] for row in rows[:32]}


def test_the_merged_model_is_evaluated_and_exported_as_the_run_was(alone: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (alone / "metrics.jsonl").read_text().splitlines()]
    assert rlsys("export", str(alone), str(tmp_path / "merged")).returncode == 0
    for target in ([alone], [tmp_path / "merged", "--config", alone / "config.yaml"]):
        done = rlsys("eval", *map(str, target), "--json", "-")
        assert done.returncode == 0, done.stderr
        assert json.dumps(lines[-1]["eval/zigzag/accuracy"]) in done.stdout, done.stdout
