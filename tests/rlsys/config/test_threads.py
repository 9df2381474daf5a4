"""The number of CPU threads, which is `auto` by default."""

import os

import pytest

from rlsys.config import loading
from rlsys.errors import ConfigError
from rlsys.runs.directory import RunDirectory

LARGE = "model.path=Qwen/Qwen3-0.6B"
ONE_EACH = "model: {path: Qwen/Qwen3-0.6B}\nrollout: {engines: 1}\npolicy: {ranks: 1}"


@pytest.fixture
def cores(monkeypatch):
    """`cores(8)` gives this machine eight."""
    return lambda count: monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))


@pytest.mark.parametrize(
    ("options", "threads"),  # of an engine, of a rank, on eight cores
    [
        ("rollout.engines=1 policy.ranks=1", (8, 8)),
        ("rollout.engines=3 policy.ranks=4", (2, 2)),
        ("rollout.engines=1 rollout.tensor_parallel=4 policy.ranks=1", (2, 8)),
        ("rollout.engines=16 policy.ranks=16", (1, 1)),
        ("rollout.engines=1 policy.ranks=3 pipeline.max_lag=1", (2, 2)),  # they work at the same time
        ("rollout.engines=1 policy.ranks=1 rollout.exact=true", (1, 1)),
        ("rollout.engines=1 policy.ranks=1 cluster.device=gpu", (1, 1)),
        ("rollout.engines=1 policy.ranks=1 rollout.threads=3", (3, 8)),
        ("rollout.engines=1 policy.ranks=1 policy.threads=auto", (8, 8)),
        ("rollout.engines=1 policy.ranks=1 model.path=builtin:tiny", (1, 1)),
        ("rollout.engines=1 policy.ranks=1 model.path=somebody/unknown", (8, 8)),
    ],
)
def test_engines_and_ranks_share_the_cores(read, cores, options, threads):
    cores(8)
    config = read("", LARGE, *options.split())
    assert (config.rollout.threads, config.policy.threads) == threads


def test_a_number_or_auto_is_expected(read):
    with pytest.raises(ConfigError, match=r"`policy\.threads` must be a whole number"):
        read("", "policy.threads=automatic")


def test_a_run_keeps_the_threads_that_it_began_with(read, cores, tmp_path):
    cores(8)
    begun = read(ONE_EACH, f"run.dir={tmp_path}/run")
    run = RunDirectory(begun)
    run.record_metrics({"step": 0})
    run.close()
    assert "threads: 8" in (tmp_path / "run" / "config.yaml").read_text()
    cores(2)
    again = read(ONE_EACH, f"run.dir={tmp_path}/run")
    assert again == begun
    RunDirectory(again).close()
    other = read(ONE_EACH, f"run.dir={tmp_path}/other")
    assert (other.rollout.threads, other.policy.threads) == (2, 2)
    assert loading.flatten(other)["policy.threads"] == 2
