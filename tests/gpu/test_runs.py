"""The tiny run on GPUs: CUDA engines, every transport, colocation with sleep and wake, bf16."""

import subprocess
import sys
from pathlib import Path

import pytest
from killing import Run

from rlsys.runs.directory import read_lines, read_samples

ROOT = Path(__file__).parent.parent.parent
FLOAT32 = ["policy.dtype=float32", "rollout.dtype=float32"]
COLOCATED = ["cluster.placement=colocated", "rollout.engines=1", "policy.ranks=1", "rollout.gpu_memory=0.3"]
SEPARATE = ["cluster.placement=separate", "rollout.engines=1", "policy.ranks=1", "rollout.gpu_memory=0.3"]


def train(run: Path, *overrides: str) -> list[dict[str, float]]:
    command = [sys.executable, "-m", "launch", "train", "configs/tiny_cpu.yaml", f"run.dir={run}", "cluster.device=gpu"]
    done = subprocess.run([*command, *overrides], capture_output=True, text=True, timeout=540, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return read_lines(run / "metrics.jsonl")


def need_gpus(count: int) -> None:
    import torch

    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs; this machine has {torch.cuda.device_count()}")


@pytest.mark.parametrize("transport", ["cuda_ipc", "shared_memory", "object_store"])
def test_one_gpu_shared_by_engine_and_policy(tmp_path: Path, transport: str) -> None:
    overrides = [f"sync.transport={transport}", "trainer.steps=4", *FLOAT32]
    lines = train(tmp_path / "run", *COLOCATED, *overrides)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert all(line["mismatch/mean_abs"] < 1e-3 for line in lines[1:]), "engine and policy compute the same"


def test_weights_survive_sleeping_and_waking(tmp_path: Path) -> None:
    """With a learning rate of next to nothing, greedy answers before and after three sleeps are the same."""
    run = tmp_path / "run"
    train(
        run,
        *COLOCATED,
        *FLOAT32,
        "sync.transport=cuda_ipc",
        "trainer.steps=3",
        "policy.lr=1e-12",
        "policy.lr_schedule=constant",
    )
    before, after = read_samples(run, "eval-000000"), read_samples(run, "eval-000003")
    assert [r["completion"] for r in after] == [r["completion"] for r in before]


@pytest.mark.parametrize("stage", [2, 3])
def test_bf16_learns(tmp_path: Path, stage: int) -> None:
    lines = train(
        tmp_path / "run",
        *COLOCATED,
        f"policy.zero_stage={stage}",
    )
    accuracy = [line["eval/zigzag/accuracy"] for line in lines if "eval/zigzag/accuracy" in line]
    assert accuracy[0] < 0.5
    assert accuracy[-1] > 0.9


def test_a_killed_engine_is_replaced(tmp_path: Path) -> None:
    """Between two steps and in the middle of one; the run goes on, and every sync is proved as ever."""
    options = [*COLOCATED, "sync.transport=shared_memory", "trainer.steps=6"]  # by which a new engine can get weights
    run = Run(tmp_path / "run", "cluster.device=gpu", *options).start()
    try:
        run.until_step(2)
        run.kill("rollout-0")
        run.until_step(4)
        run.kill("rollout-0")
        assert run.wait() == 0, run.text()
    finally:
        run.end()
    assert [e["worker"] for e in run.events("replaced")] == ["rollout-0", "rollout-0"]
    assert [line["step"] for line in run.lines()] == [0, 1, 2, 3, 4, 5, 6]


def test_two_gpus_apart_by_nccl(tmp_path: Path) -> None:
    need_gpus(2)
    lines = train(tmp_path / "run", *SEPARATE, *FLOAT32, "sync.transport=nccl", "trainer.steps=4")
    assert all(line["mismatch/mean_abs"] < 1e-3 for line in lines[1:])


def test_two_gpus_generate_and_train_at_the_same_time(tmp_path: Path) -> None:
    need_gpus(2)
    lines = train(tmp_path / "run", *SEPARATE, "sync.transport=nccl", "pipeline.max_lag=1", "trainer.steps=6")
    assert [line["lag"] for line in lines[2:]] == [1] * 5


def test_each_of_two_ranks_sends_its_shards_by_nccl(tmp_path: Path) -> None:
    need_gpus(3)
    options = ["sync.transport=nccl", "trainer.steps=4", "policy.ranks=2", "policy.zero_stage=3"]
    lines = train(tmp_path / "run", *SEPARATE, *FLOAT32, *options)
    assert all(line["mismatch/mean_abs"] < 1e-3 for line in lines[1:])
