"""The arguments that vLLM's engines are built with."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_script import run_script

from rlsys.config.schema import Config
from workers.rollout.engine_settings import engine_arguments

CREATE_CONFIGS = """
import json, sys
from vllm import EngineArgs
for settings in json.load(sys.stdin):
    scheduler = EngineArgs(**settings).create_engine_config().scheduler_config
    print("config", scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
"""


def max_batched_tokens(config: Config, longest_sequence: int) -> Any:
    return engine_arguments(config, "", "ipc", longest_sequence).get("max_num_batched_tokens")


def test_on_cpu_vllm_chooses_its_batched_tokens_where_it_can(tiny: Callable[..., Config]) -> None:
    config = tiny("rollout.max_sequences=2048")
    assert max_batched_tokens(config, 54) is None
    assert max_batched_tokens(config, 5000) is None


def test_with_more_sequences_there_is_a_token_for_each_and_on_cpu_for_a_prompt(tiny: Callable[..., Config]) -> None:
    config = tiny("rollout.max_sequences=4096")
    assert max_batched_tokens(config, 54) == 4096
    assert max_batched_tokens(config, 5000) == 5000


def test_on_gpus_prompts_are_computed_8192_tokens_at_a_time(tiny: Callable[..., Config]) -> None:
    assert max_batched_tokens(tiny("cluster.device=gpu"), 100_000) == 8192
    assert max_batched_tokens(tiny("cluster.device=gpu", "rollout.max_sequences=10000"), 54) == 10000


def test_engines_use_graphs_on_gpus_and_none_on_cpu_unless_the_user_decides(tiny: Callable[..., Config]) -> None:
    def eager(*overrides: str) -> Any:
        return engine_arguments(tiny(*overrides), "", "ipc", 64)["enforce_eager"]

    assert eager() is True
    assert eager("cluster.device=gpu") is False
    assert eager("cluster.device=gpu", "rollout.enforce_eager=true") is True
    assert eager("rollout.enforce_eager=false") is False
    assert engine_arguments(Config(), "", "ipc", 64)["enforce_eager"] is True


def test_every_number_of_sequences_of_an_engine_has_a_graph(tiny: Callable[..., Config]) -> None:
    def sizes(*overrides: str) -> Any:
        return engine_arguments(tiny("cluster.device=gpu", *overrides), "", "ipc", 64).get("cudagraph_capture_sizes")

    assert sizes("rollout.max_sequences=512") is None, "vLLM has graphs of up to 512 by itself"
    assert sizes("rollout.max_sequences=530")[-4:] == [496, 512, 528, 530]
    assert len(sizes()) == 3 + 31 + 49
    assert sizes()[-1] == 1024
    assert sizes("rollout.enforce_eager=true") is None


def test_outputs_leave_the_core_in_blocks_also_with_stop_strings(
    tiny: Callable[..., Config],
) -> None:
    def scheduler(*overrides: str) -> Any:
        return engine_arguments(tiny(*overrides), "", "ipc", 64).get("scheduler_cls", "").rpartition(".")[2]

    assert scheduler("cluster.device=gpu") == scheduler("rollout.tensor_parallel=2") == "build_scheduler"
    in_flight = ("pipeline.max_lag=1", "pipeline.in_flight=true")
    assert scheduler("cluster.device=gpu", *in_flight) == "build_in_flight_scheduler"
    assert scheduler("cluster.device=gpu", "rollout.stop=['x']") == "build_scheduler"
    assert scheduler("cluster.device=gpu", "rollout.stop=['x']", *in_flight) == "build_in_flight_scheduler"
    assert scheduler() == scheduler("rollout.stop=['x']") == ""


def test_prompts_are_copied_in_engines_inside_their_actors(tiny: Callable[..., Config]) -> None:
    def copies(*overrides: str) -> bool:
        return "kv_transfer_config" in engine_arguments(tiny(*overrides), "", "ipc", 64)

    assert copies()
    assert copies("pipeline.max_lag=1", "pipeline.in_flight=true")
    assert not copies("rollout.tensor_parallel=2")


@pytest.mark.long
def test_vllm_accepts_more_sequences_than_its_default_batched_tokens(tiny: Callable[..., Config], model: str) -> None:
    settings = [engine_arguments(tiny(f"rollout.max_sequences={n}"), model, "ipc", 64) for n in (2048, 2049, 5000)]
    done = run_script(CREATE_CONFIGS, [{k: v for k, v in s.items() if k != "kernel_config"} for s in settings])
    assert [line for line in done.stdout.splitlines() if line.startswith("config")] == [
        "config 2048 2048",
        "config 2049 2049",
        "config 5000 5000",
    ], done.stderr


HYBRID = {"model_type": "qwen3_5_text", "hidden_size": 2560, "intermediate_size": 9216, "vocab_size": 248320}
HYBRID |= {"num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256}


def test_an_engine_of_a_model_with_mixers_decodes_as_many_sequences_as_it_has_states_for(
    tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A state of 32 x 128 x 128 numbers and 3 x 8192 inputs has 1.05 MiB. A block has 8 layers; a sequence needs 4 blocks."""
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))

    def sequences(gib: int, *overrides: str) -> int:
        properties = SimpleNamespace(total_memory=gib << 30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        config = tiny("cluster.device=gpu", "rollout.gpu_memory=0.8", *overrides)
        return int(engine_arguments(config, str(tmp_path), "ipc", 64)["max_num_seqs"])

    block = 8 * 272 * 2 * 4 * 256 * 2  # of 272 tokens, which take a little more than a state
    small = sequences(24)
    assert 0.5 < small * 4 * block / (0.8 * 24 * 2**30 - 9e9) < 1, "of what is left beside 8 GiB of weights"
    assert f"decodes {small} sequences at the same time, not 1024" in capsys.readouterr().out
    assert sequences(80, "rollout.max_sequences=64") == 64
    assert capsys.readouterr().out == ""
    (tmp_path / "config.json").write_text(json.dumps(HYBRID | {"model_type": "qwen3"}))
    assert sequences(24) == 1024
