"""Tiny models of families with sizes that vLLM's CPU build runs, and what its engines sample with them."""

from typing import Any

import torch
from engine_script import read_results, run_script
from families import FAMILIES, build_family

from rlsys.tasks.zigzag import make_tokenizer

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


def build_for_engines(family: str) -> Any:
    experts = {name: size for name, size in EXPERTS.items() if name in FAMILIES[family]}  # vLLM has all that are named
    model = build_family(family, **SIZES | experts | OWN_SIZES.get(family, {}))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3)
    return model


def save(model: Any, folder: str) -> None:
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def sample_each(folders: dict[str, str], before: str = "") -> dict[str, Any]:
    """What an engine samples with each model, or the error that it raises, by the model's name. `before`: lines of code."""
    return read_results(run_script(before + TRY_EACH, [PROMPT, folders], timeout_s=60 + 60 * len(folders)))


def logprob_difference(model: Any, tokens: list[int], logprobs: list[float]) -> float:
    """Mean difference between an engine's log-probs of a completion and those by transformers."""
    logits = model(input_ids=torch.tensor([PROMPT + tokens]), use_cache=False).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    return (expected - torch.tensor(logprobs)).abs().mean().item()
