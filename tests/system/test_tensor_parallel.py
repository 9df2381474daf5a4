"""An engine of several processes, as engines on GPUs are: vLLM's AsyncLLM, its core, and here two halves of every matrix."""

from pathlib import Path

import psutil
import pyarrow.parquet
import pytest
from killing import LIGHT, STEPS, Run, running

pytestmark = pytest.mark.long

AHEAD = ["pipeline.max_lag=2", "pipeline.in_flight=true", "rollout.oversample=0.25", "reference.kl_coef=0"]
HALVES = [
    *STEPS,
    *LIGHT,
    *AHEAD,
    "rollout.tensor_parallel=2",
    "trainer.steps=5",
    "policy.zero_stage=3",
    "policy.ranks=2",
]


def test_two_halves_sample_what_one_engine_does_and_another_two_take_their_place(
    environment: dict[str, str], undisturbed: Path, tmp_path: Path
) -> None:
    with running(tmp_path / "run", *HALVES, environment=environment) as run:
        run.until_step(2)
        half(run).kill()
        assert run.wait() == 0, run.text()
    assert [e["worker"] for e in run.events("replaced")] == ["rollout-0"]
    assert run.events("restart") == []
    assert all(line["kl"] == 0 for line in run.lines()[1:])
    assert not (run.path / "logs" / "reference.log").exists(), "nothing needs it"
    first = run.lines()[0]
    assert first["eval/zigzag/accuracy"] == Run(undisturbed).lines()[0]["eval/zigzag/accuracy"]
    single, mine = samples(undisturbed), samples(run.path)
    common = {key for key, row in mine.items() if key in single and row["version"] == 0 and not row["changes"]}
    assert len(common) >= 16
    for key in common:
        assert mine[key]["tokens"] == single[key]["tokens"]
        assert mine[key]["rollout_logprobs"] == pytest.approx(single[key]["rollout_logprobs"], abs=1e-5)


def half(run: Run) -> psutil.Process:
    """The process of one of them."""
    return next(p for p in run.process_of("rollout-0").children(recursive=True) if p.name().startswith("VLLM::Worker"))


def samples(path: Path) -> dict[tuple[str, int], dict]:
    rows = pyarrow.parquet.read_table(path / "samples" / "step-000001.parquet").to_pylist()
    return {(row["uid"], row["index"]): row for row in rows}
