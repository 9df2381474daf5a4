"""vLLM's CPU engines: those that the checks refuse do not run, and others sample what the policy computes.

All families are tried with `make families`.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_script import run_script

from rlsys.models.support import NOT_IN_VLLM, NOT_ON_CPU, model_problem
from rlsys.tasks.zigzag import make_tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "rlsys" / "packs"))
from families import FAMILIES, build_family

# One process imports vLLM and starts a child for each model: a process has one engine in its life.
TRY_EACH = """
import asyncio, json, os, sys
from rlsys.config.loading import load_config
from rlsys.types import Request
from workers.rollout.architecture import keeps_state
from workers.rollout.engine_settings import STATE_ARGUMENTS, engine_arguments
from workers.rollout.in_process_engine import InProcessEngine
from workers.rollout.refusal import reason
from workers.rollout.vllm_requests import Stops, request_id

async def sample(engine, requests):
    done = {}
    async for outputs in engine.generate(requests, Stops([])):
        done |= {o.request_id: o.outputs[0] for o in outputs}
    return [(list(o.token_ids), list(o.logprobs.logprobs)) for o in (done[request_id(r)] for r in requests)]

def try_one(folder):
    config = load_config("configs/tiny_cpu.yaml", [])
    settings = engine_arguments(config, folder, "rlsys_host_memory", 32)
    if keeps_state(folder, False):
        settings |= STATE_ARGUMENTS
    engine = InProcessEngine(settings)
    requests = [Request("p", i, PROMPT, seed=i, temperature=1.0, max_new_tokens=10, ignore_end=True) for i in range(3)]
    together = asyncio.run(sample(engine, requests))
    alone = [asyncio.run(sample(engine, [r]))[0] for r in requests]
    return {"together": together, "alone": alone}

PROMPT, folders = json.load(sys.stdin)
import vllm, vllm.v1.worker.cpu_worker
for name, folder in folders.items():
    pid = os.fork()
    if not pid:
        try:
            result = try_one(folder)
        except Exception as error:
            result = {"error": reason(error)}
        print("result", json.dumps([name, result]), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""
PROMPT = list(range(3, 20))
SIZES = {"hidden_size": 128, "head_dim": 32, "vocab_size": 64}
LATENT = {"head_dim": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "kv_lora_rank": 512}
MAMBA = {"mamba_d_head": 32, "mamba_n_heads": 8}
EXPERTS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
OWN_SIZES: dict[str, dict[str, Any]] = {  # which vLLM's kernels need
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), LATENT),
    "minicpm3": LATENT,
    **dict.fromkeys(("granitemoehybrid", "bamba"), MAMBA),
    "falcon_h1": MAMBA | {"mamba_d_ssm": 256},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 32},
    "mamba2": {"num_heads": 8, "head_dim": 32, "intermediate_size": 256},
    "zamba2": {
        "num_key_value_heads": 4,
        "n_mamba_heads": 8,
        "mamba_headdim": 32,
        "attention_hidden_size": 256,
        "attention_head_dim": 64,
    },
    "gpt_oss": {"intermediate_size": 128},
    "gemma4_text": {"global_head_dim": 64, "vocab_size_per_layer_input": 64},
    "cohere2": {"sliding_window": 60},  # see `context_from_config`
}
# What vLLM says of the families that are refused.
SAYS = {
    "jamba": "selective_scan_fwd",
    "qwen3_5_text": "No module named 'torchvision'",
    "qwen3_next": "CPU GDN attention requires BF16",
    "kimi_linear": "has no attribute 'get'",
    "mimo_v2_flash": "has no attribute 'hybrid_layer_pattern'",
    "bamba": "does not dispatch through the Transformers attention interface",
    "minimax": "does not dispatch through the Transformers attention interface",
}
UNTESTED = {
    *("mamba", "falcon_mamba", "qwen3_5_moe_text"),  # other sizes of the same layers
    "gpt_oss",  # it samples, and the first sync fails
}
FEW = ("lfm2", "falcon_h1", "jamba", "bamba")
LISTED = [name for name in FAMILIES if "RLSYS_ALL_FAMILIES" in os.environ or name in FEW]


def build(family: str) -> Any:
    experts = EXPERTS if "moe_intermediate_size" in FAMILIES[family] else {}
    model = build_family(family, **SIZES | experts | OWN_SIZES.get(family, {}))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3)
    return model


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folders = {name: str(tmp_path_factory.mktemp(name)) for name in LISTED}
    for name, folder in folders.items():
        build(name).save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
    done = run_script(TRY_EACH, [PROMPT, folders], timeout_s=60 + 60 * len(folders))
    lines = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    problems = {
        name: model_problem(json.loads((Path(folder) / "config.json").read_text()), "cpu", verify=False)
        for name, folder in folders.items()
    }
    tried = dict(json.loads(line.removeprefix("result ")) for line in lines)
    return {name: (problems[name], tried[name]) for name in folders}


@pytest.mark.parametrize("family", LISTED)
def test_an_engine_samples_what_the_policy_computes_or_the_checks_refuse_the_model(
    family: str, results: dict[str, Any]
) -> None:
    problem, tried = results[family]
    if problem and family not in UNTESTED:
        assert SAYS[family] in tried["error"], "what vLLM says"
        return
    assert "error" not in tried, tried
    policy = build(family)
    for (tokens, logprobs), (tokens_alone, logprobs_alone) in zip(tried["together"], tried["alone"], strict=True):
        assert tokens == tokens_alone
        assert torch.allclose(torch.tensor(logprobs), torch.tensor(logprobs_alone), atol=1e-6, rtol=0)
        logits = policy(input_ids=torch.tensor([PROMPT + tokens]), use_cache=False).logits[0, len(PROMPT) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        assert (expected - torch.tensor(logprobs)).abs().mean() < 5e-5


def test_short_convolutions_do_not_depend_on_the_batch(results: dict[str, Any]) -> None:
    _, tried = results["lfm2"]
    assert tried["together"] == tried["alone"], "bit for bit"


def test_every_refused_family_is_tried() -> None:
    assert set(SAYS) | UNTESTED == {*NOT_ON_CPU, *NOT_IN_VLLM}
