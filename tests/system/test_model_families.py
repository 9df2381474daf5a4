"""Whole runs of models that are no plain decoder: what engines sample with is what the policy computes, after each sync.

`make families` runs all that engines on CPU run.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from killing import LIGHT, ROOT, Run, running
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlsys.models.families import family_of
from rlsys.tasks.zigzag import make_tokenizer

sys.path.insert(0, str(ROOT / "tests" / "workers" / "rollout"))
from engine_samples import FAMILIES as ALL
from engine_samples import build_family, build_for_engines

pytestmark = pytest.mark.long

LATENT_SIZES = {"head_dim": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "kv_lora_rank": 512}
SIZES = {"hidden_size": 128, "head_dim": 32, "vocab_size": 64}  # heads that vLLM has on CPUs
SPECIAL: dict[str, dict[str, Any]] = {
    "gemma2": {},  # soft caps of scores and of logits, windows
    "qwen3_moe": {"moe_intermediate_size": 16},  # experts that files hold one by one, and vLLM pads
    "glm4_moe": {"moe_intermediate_size": 32},  # routers with a bias that is no parameter
    "deepseek_v3": {"moe_intermediate_size": 32, **LATENT_SIZES},  # routing that vLLM takes from the configuration
    "lfm2": {},  # short convolutions: states instead of keys
    "ernie4_5_moe": {"moe_intermediate_size": 32},  # the same without groups of experts; vLLM names it otherwise
}
LLAMA4 = {"attention_chunk_size": 8192}  # as long as a pack may be
OTHERS = ["llama4_text", *(name for name in ALL if name not in SPECIAL and family_of(name).runs_on_cpu)]
# Latent attention and experts; layers of Mamba, which a rank runs as often as it has blocks.
FEW = ["deepseek_v3", "nemotron_h"]
FAMILIES = [*SPECIAL, *OTHERS] if "RLSYS_ALL_FAMILIES" in os.environ else FEW
LARGEST_MISMATCH = {"minicpm3": 1e-4}


def build(family: str) -> Any:
    if family == "llama4_text":
        return build_family(family, **SIZES, **LLAMA4)
    if family not in SPECIAL:
        return build_for_engines(family)
    model = build_family(family, **SIZES | SPECIAL[family])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)  # enough to choose other experts
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_engines_agree_with_the_policy_and_the_checkpoint_loads(
    environment: dict[str, str], tmp_path: Path, family: str
) -> None:
    model = build(family)
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    options = [
        f"model.path={tmp_path / 'model'}",
        "trainer.steps=2",
        "policy.ranks=2",
        "policy.zero_stage=3",
        "policy.lr=1e-2",
        f"reward.functions={{{Path(__file__).parent}/own_reward.py:closeness: 1.0}}",  # which any model earns a part of
    ]
    options += ["policy.lr_schedule=constant", "policy.warmup_updates=0"]
    options += ["sync.verify=false"] if family_of(family).unverified else []
    with running(tmp_path / "run", *LIGHT, *options, environment=environment) as run:
        assert run.wait() == 0, run.text()
    assert [line["step"] for line in run.lines()] == [0, 1, 2]
    assert all(line["mismatch/mean_abs"] < LARGEST_MISMATCH.get(family, 1e-5) for line in run.lines()[1:])
    check_checkpoint(run, tmp_path / "model", type(model))


def test_an_engine_that_converts_its_experts_gets_merged_adapters(environment: dict[str, str], tmp_path: Path) -> None:
    model = build_family("qwen3_moe", **SIZES, moe_intermediate_size=16)
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    options = [f"model.path={tmp_path / 'model'}", "trainer.steps=2", "policy.lr=1e-2"]
    options += ["policy.lora={rank: 4, alpha: 8, targets: [q_proj, v_proj]}"]
    with running(tmp_path / "run", *LIGHT, *options, environment=environment) as run:
        assert run.wait() == 0, run.text()
    assert all(line["mismatch/mean_abs"] < 1e-5 for line in run.lines()[1:])


def load_all(folder: Path) -> dict[str, Any]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def check_checkpoint(run: Run, model: Path, kind: Callable[..., Any]) -> None:
    """The saved model has the tensors that transformers itself saves, and they load without a remark."""
    [checkpoint] = (run.path / "checkpoints").glob("step-*/model")
    saved, own = load_all(checkpoint), load_all(model)
    assert set(saved) == set(own)
    matrices = [name for name in own if "down_proj" in name]
    assert not any(torch.equal(saved[name], own[name]) for name in matrices), "what was sent has changed"
    loaded, remarks = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert isinstance(loaded, kind)
    assert not remarks["missing_keys"]
    assert not remarks["unexpected_keys"]
