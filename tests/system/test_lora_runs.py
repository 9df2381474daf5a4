"""Whole runs with LoRA: killed ones end as the undisturbed one, and vLLM loads the adapter and says what our engines said."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from killing import ROOT, Run, require_equal, running, tidy

from workers.rollout.engine_settings import CPU_ENVIRONMENT

STEPS = ["trainer.steps=6", "checkpoint.every=2", "eval.every=3", "trainer.prompts_per_step=8", "rollout.engines=1"]
CONFIG = ROOT / "configs" / "lora_cpu.yaml"
STAGES = (2, 3)


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
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`alone(3)` is a finished run with ZeRO 3 that was left alone."""
    folder = tmp_path_factory.mktemp("lora")

    def get(stage: int, *settings: str) -> Path:
        path = folder / "-".join([f"zero-{stage}", *settings])
        if not path.exists():
            with tidy() as environment:
                run = Run(
                    path, *STEPS, f"policy.zero_stage={stage}", *settings, config=CONFIG, environment=environment
                ).start()
                assert run.wait() == 0, run.text()
        return path

    return get


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_whose_rank_and_driver_are_killed_ends_as_if_nothing_had_been(
    environment: dict[str, str], alone: Callable[..., Path], tmp_path: Path, stage: int
) -> None:
    settings = [*STEPS, f"policy.zero_stage={stage}"]
    with running(tmp_path / "run", *settings, config=CONFIG, environment=environment) as run:
        run.until_step(3)
        run.kill("policy-1")
        run.until(lambda: run.events("restart"))
        run.until_step(5)
        run.family()[1].kill()  # the driver
        assert run.wait() == 0, run.text()
    assert len(run.events("restart")) == 2
    assert all(line["kl"] > 0 for line in run.lines()[2:]), "KL is in the loss"
    assert not (run.path / "logs" / "reference.log").exists(), "and no process is the reference"
    require_equal(alone(stage), run.path)


@pytest.mark.parametrize(("stage", "settings"), [(3, ()), (2, ("pipeline.max_lag=1",))])
def test_engines_that_merge_adapters_and_are_killed_end_as_those_that_get_all_weights(
    environment: dict[str, str], alone: Callable[..., Path], tmp_path: Path, stage: int, settings: tuple[str, ...]
) -> None:
    overrides = [*STEPS, f"policy.zero_stage={stage}", "sync.what=adapter", *settings]
    with running(tmp_path / "run", *overrides, config=CONFIG, environment=environment) as run:
        run.until_step(2)
        run.kill("rollout-0")
        run.until_step(3)
        run.family()[1].kill()  # the driver
        assert run.wait() == 0, run.text()
    assert [e["worker"] for e in run.events("replaced")] == ["rollout-0"]
    assert len(run.events("restart")) == 1
    require_equal(alone(stage, *settings), run.path)


def test_halves_of_an_engine_merge_the_adapter_from_which_a_run_starts(
    environment: dict[str, str], alone: Callable[..., Path], tmp_path: Path
) -> None:
    before, adapter = alone(2), tmp_path / "adapter"
    assert rlsys("export", str(before), str(adapter), "--adapter").returncode == 0
    base = json.loads((adapter / "base_model.json").read_text())["path"]
    halves = [*STEPS, "trainer.steps=2", "sync.what=adapter", "rollout.tensor_parallel=2"]
    start = [f"model.path={base}", f"model.adapter={adapter}"]
    with running(tmp_path / "run", *halves, *start, config=CONFIG, environment=environment) as run:
        assert run.wait() == 0, run.text()
    assert run.events("wrong weights") == []
    assert all(line["mismatch/mean_abs"] < 1e-5 for line in run.lines()[1:])
    assert evaluated(run.path, 0) == evaluated(before, 6)


def test_vllm_loads_the_adapter_and_says_what_the_engines_said(alone: Callable[..., Path], tmp_path: Path) -> None:
    run = alone(2)
    assert rlsys("export", str(run), str(tmp_path / "adapter"), "--adapter").returncode == 0
    base = json.loads((tmp_path / "adapter" / "base_model.json").read_text())["path"]
    first, last = (evaluated(run, step) for step in (0, 6))
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


def test_the_merged_model_is_evaluated_and_exported_as_the_run_was(alone: Callable[..., Path], tmp_path: Path) -> None:
    run = alone(2)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rlsys("export", str(run), str(tmp_path / "merged")).returncode == 0
    for target in ([run], [tmp_path / "merged", "--config", run / "config.yaml"]):
        done = rlsys("eval", *map(str, target), "--json", "-")
        assert done.returncode == 0, done.stderr
        assert json.dumps(lines[-1]["eval/zigzag/accuracy"]) in done.stdout, done.stdout
