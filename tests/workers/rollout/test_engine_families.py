"""vLLM's CPU engines: those that the checks refuse do not run, and others sample what the policy computes.

All families are tried with `make families`.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_samples import FAMILIES, build_for_engines, logprob_difference, sample_each, save

from rlsys.models.families import FAMILIES as RECORDS
from rlsys.models.support import model_problem

pytestmark = pytest.mark.long

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


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folders = {name: str(tmp_path_factory.mktemp(name)) for name in LISTED}
    for name, folder in folders.items():
        save(build_for_engines(name), folder)
    tried = sample_each(folders)
    problems = {
        name: model_problem(json.loads((Path(folder) / "config.json").read_text()), "cpu", verify=False)
        for name, folder in folders.items()
    }
    return {name: (problems[name], tried[name]) for name in folders}


@pytest.mark.parametrize("family", LISTED)
def test_an_engine_samples_what_the_policy_computes_or_the_checks_refuse_the_model(
    family: str, results: dict[str, Any], record_property: Callable[[str, object], None]
) -> None:
    problem, tried = results[family]
    record_property("answer", f"no engine: {tried['error']}"[:200] if "error" in tried else "samples")
    if problem and family not in UNTESTED:
        assert SAYS[family] in tried["error"], "what vLLM says"
        return
    assert "error" not in tried, tried
    policy = build_for_engines(family)
    for (tokens, logprobs), (tokens_alone, logprobs_alone) in zip(tried["together"], tried["alone"], strict=True):
        assert tokens == tokens_alone
        assert torch.allclose(torch.tensor(logprobs), torch.tensor(logprobs_alone), atol=1e-6, rtol=0)
        assert logprob_difference(policy, tokens, logprobs) < 5e-5


def test_short_convolutions_do_not_depend_on_the_batch(results: dict[str, Any]) -> None:
    _, tried = results["lfm2"]
    assert tried["together"] == tried["alone"], "bit for bit"


HAS_AMX = "import torch\ntorch.cpu._is_amx_tile_supported = lambda: True\n"


def test_on_a_cpu_with_amx_experts_and_latent_attention_compute_in_float32(tmp_path: Path) -> None:
    """vLLM has kernels for such CPUs that do not take float32. It chooses latent attention's without looking at the dtype."""
    folders = {name: str(tmp_path / name) for name in ("deepseek_v3", "qwen3_moe")}
    for name, folder in folders.items():
        save(build_for_engines(name), folder)
    for name, tried in sample_each(folders, HAS_AMX).items():
        assert "error" not in tried, tried
        policy = build_for_engines(name)
        for tokens, logprobs in tried["together"]:
            assert logprob_difference(policy, tokens, logprobs) < 5e-5


def test_every_refused_family_is_tried() -> None:
    assert set(SAYS) | UNTESTED == {name for name, family in RECORDS.items() if not family.runs_on_cpu}
