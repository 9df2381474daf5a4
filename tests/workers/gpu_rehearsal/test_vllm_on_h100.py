"""What vLLM's own code for CUDA makes of our engines' arguments and of a rank that joins its group, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
COLOCATED = {"grpo_countdown_3b_gpu.yaml", "dr_grpo_7b_gpu.yaml", "dapo_7b_gpu.yaml", "tiny_cpu.yaml"}


def run(word: str) -> list[Any]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(HERE / "fake_h100.py"), word], env=environment, capture_output=True, text=True, timeout=150
    )
    marks = ("CONFIG ", "STREAM ")
    lines = [json.loads(line.partition(" ")[2]) for line in done.stdout.splitlines() if line.startswith(marks)]
    assert done.returncode == 0, done.stderr[-3000:]
    return lines


@pytest.fixture(scope="module")
def engines() -> dict[str, dict[str, Any]]:
    return dict(run("configs"))


def test_every_configuration_for_gpus_is_accepted_with_graphs_and_large_batches(engines: Any) -> None:
    names = {path.name for path in (ROOT / "configs").glob("*_gpu.yaml")}
    assert {name.partition(" ")[0] for name in engines} == names | {"tiny_cpu.yaml"}
    for name, engine in engines.items():
        file = name.partition(" ")[0]
        assert (engine["graphs"] == "NONE") == (name == "tiny_cpu.yaml 5"), name
        assert engine["largest_graph"] == (0 if engine["graphs"] == "NONE" else engine["sequences"]), name
        assert engine["batched_tokens"] == 8192, name
        assert engine["chunked_prefill"], name
        assert engine["prefix_caching"], name
        assert engine["asynchronous"], name
        assert engine["logprobs"] == "processed_logprobs", name
        assert engine["sleep"] == (file in COLOCATED), name
        assert engine["transfer"] == ("ipc" if file in COLOCATED else "rlsys_nccl"), name
        assert engine["dtype"] == "torch.bfloat16", name
        assert engine["executor"] == ("MultiprocExecutor" if "32b" in name else "UniProcExecutor"), name
        assert engine["extension"] == "workers.rollout.vllm_extension.WorkerExtension", name


def test_a_rank_that_joins_the_engines_keeps_its_stream_and_its_attention() -> None:
    assert run("stream") == [{"kept": True, "available": True}]
