"""What vLLM's engines are built from."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from rlsys.config.schema import Config
from workers.rollout.engine_settings import CPU_ENVIRONMENT, engine_arguments

TAKEN = """
import json, sys
from vllm import EngineArgs
for settings in json.load(sys.stdin):
    scheduler = EngineArgs(**settings).create_engine_config().scheduler_config
    print("taken", scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
"""


def tokens(config: Config, longest_prompt: int) -> Any:
    return engine_arguments(config, "", "ipc", longest_prompt).get("max_num_batched_tokens")


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_vllm_chooses_how_many_tokens_it_computes_at_a_time_where_it_can(
    tiny: Callable[..., Config], device: str
) -> None:
    config = tiny(f"cluster.device={device}", "rollout.max_sequences=2048", "sync.transport=auto")
    assert tokens(config, 54) is None
    assert tokens(config, 5000) is None


def test_more_sequences_than_that_are_a_token_each_and_on_cpu_a_whole_one_too(tiny: Callable[..., Config]) -> None:
    config = tiny("rollout.max_sequences=4096")
    new = config.rollout.max_new_tokens
    assert tokens(config, 54) == 4096
    assert tokens(config, 5000) == 5000 + new
    assert tokens(tiny("rollout.max_sequences=4096", "cluster.device=gpu"), 5000) == 4096


def test_vllm_takes_more_sequences_than_it_computes_tokens_by_itself(tiny: Callable[..., Config], model: str) -> None:
    settings = [engine_arguments(tiny(f"rollout.max_sequences={n}"), model, "ipc", 54) for n in (2048, 2049, 5000)]
    done = subprocess.run(
        [sys.executable, "-c", TAKEN],
        input=json.dumps([{k: v for k, v in s.items() if k != "kernel_config"} for s in settings]),
        env={**os.environ, **CPU_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert [line for line in done.stdout.splitlines() if line.startswith("taken")] == [
        "taken 2048 2048",
        "taken 2049 2049",
        "taken 5000 5000",
    ], done.stderr
