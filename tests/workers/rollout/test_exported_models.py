"""Mixtures of experts, which transformers keeps in memory in another form than in files: trained, saved and exported.

The exported model has the policy's weights for transformers, and its log-probs for vLLM's CPU engine. All families are
tried with `make families`.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_samples import build_for_engines, logprob_difference, sample_each, save
from engine_script import read_results, run_script
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from launch.tools.export import export
from rlsys.models.families import family_of

pytestmark = pytest.mark.long

# Each model is trained for one update with ZeRO 3, and written as a checkpoint's model, in several files.
TRAIN_EACH = """
import json, sys
from pathlib import Path
from safetensors.torch import save_file
from rlsys.config.loading import load_config
from workers.learner.proofs.packing import proof_packs
from workers.learner.files import model_shards, policy_checkpoint
from workers.learner.files.loading import load_policy
from workers.learner.rendezvous import join_process_group
from workers.learner.files.tensor_files import write_tensors
from workers.learner.zero import ZeroEngine, import_deepspeed
from workers.start.ports import free_port

config = load_config("configs/tiny_cpu.yaml", ["policy.zero_stage=3"])
import_deepspeed(config, ranks=1)
join_process_group("cpu", 0, 1, "127.0.0.1", free_port(), seed=0, timeout_s=60)
policy_checkpoint.MAX_FILE = model_shards.MAX_FILE = 100_000
for name, (source, checkpoint) in json.load(sys.stdin).items():
    packed, folder = load_policy(config, source), Path(checkpoint)
    zero, lm = ZeroEngine(packed, config.policy, lr=1e-2), packed.lm
    together, single = proof_packs(60)
    zero.minimize([together], lambda pack, output: -output[0].mean(), lr=1e-2)
    for directory in ("model", "optimizer"):
        (folder / directory).mkdir(parents=True)
    for file, tensors in policy_checkpoint.copy_state(zero.state, lm, config.policy.dtype).items():
        write_tensors(folder / file, tensors)
    policy_checkpoint.write_model_files(zero.state, lm, source, config, "", folder / "model")
    with zero.gathered(*lm.parameters()):
        save_file({n: t.detach().clone().contiguous() for n, t in lm.state_dict().items()}, folder / "in_memory")
    logprobs = [output[0].tolist() for output in zero.forward_all(single)]
    tokens = [[*map(int, pack.tokens), int(pack.targets[-1])] for pack in single]
    print("result", json.dumps([name, list(zip(tokens, logprobs))]), flush=True)
"""
FAMILIES = ("gpt_oss", "qwen2_moe", "qwen3_moe")
MORE = (
    *("deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "granitemoehybrid"),
    *("jamba", "kimi_linear", "lfm2_moe", "mimo_v2_flash", "minimax", "minimax_m2", "nemotron_h", "qwen3_next"),
)
TRIED = FAMILIES + (MORE if "RLSYS_ALL_FAMILIES" in os.environ else ())
IN_ENGINES = [
    name
    for name in (TRIED if "RLSYS_ALL_FAMILIES" in os.environ else ("qwen3_moe",))
    if family_of(name).runs_on_cpu or name == "gpt_oss"  # its files load, a sync does not
]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """By family: the exported model, and sequences of tokens with the policy's log-probs of their last ones."""
    folders = {name: tmp_path_factory.mktemp(name) for name in TRIED}
    for name, folder in folders.items():
        save(build_for_engines(name), str(folder))
    paths = {name: (str(folder), str(folder / "checkpoint")) for name, folder in folders.items()}
    sequences = read_results(run_script(TRAIN_EACH, paths, timeout_s=60 + 20 * len(paths)))
    for folder in folders.values():
        export(folder / "checkpoint", folder / "exported", force=False)
    return {name: (folder / "exported", sequences[name]) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def sampled(exported: dict[str, tuple[Path, Any]]) -> dict[str, Any]:
    return sample_each({name: str(exported[name][0]) for name in IN_ENGINES})


@pytest.mark.parametrize("family", TRIED)
def test_transformers_loads_what_the_policy_computes_with(family: str, exported: dict[str, tuple[Path, Any]]) -> None:
    folder, sequences = exported[family]
    before = load_file(folder.parent / "model.safetensors")
    saved = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert saved.keys() == before.keys()
    assert sum(not torch.equal(saved[name], before[name]) for name in saved) > len(saved) / 2, "it is trained"
    assert len(list(folder.glob("*.safetensors"))) > 1

    model, remarks = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(remarks[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    weights, in_memory = model.state_dict(), load_file(folder.parent / "checkpoint" / "in_memory")
    assert weights.keys() == in_memory.keys()
    assert all(torch.equal(tensor, in_memory[name]) for name, tensor in weights.items())
    for tokens, logprobs in sequences:
        logits = model(input_ids=torch.tensor([tokens[:-1]]), use_cache=False).logits[0, -len(logprobs) :]
        own = logits.log_softmax(-1).gather(-1, torch.tensor(tokens[-len(logprobs) :])[:, None])[:, 0]
        assert torch.allclose(own, torch.tensor(logprobs), atol=1e-5)


@pytest.mark.parametrize("family", IN_ENGINES)
def test_an_engine_samples_with_the_exported_model(
    family: str, exported: dict[str, tuple[Path, Any]], sampled: dict[str, Any]
) -> None:
    assert "error" not in sampled[family], sampled[family]
    model = AutoModelForCausalLM.from_pretrained(exported[family][0])
    for tokens, logprobs in sampled[family]["together"]:
        assert logprob_difference(model, tokens, logprobs) < 5e-5
