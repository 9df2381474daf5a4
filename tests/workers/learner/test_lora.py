"""LoRA on real DeepSpeed: gradients and files are those of the peft library, and checkpoints resume bit for bit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from plain_policy import PlainPolicy
from ragged_updates import ragged_batch, train, train_plainly, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlsys.batching.packing import pack, unpack
from rlsys.config.schema import Config
from rlsys.errors import ConfigError
from rlsys.interfaces import STEP_0, Sampling, WhatIf
from workers.learner.files.loading import load_policy
from workers.learner.files.merged_model import write_merged_model
from workers.learner.policy import PolicyGroup
from workers.learner.proofs.what_if import round_to_bfloat16
from workers.learner.reference import ReferenceWorker

pytestmark = pytest.mark.long

RANK, ALPHA = 4, 8
LORA = f"policy.lora={{rank: {RANK}, alpha: {ALPHA}}}"
Start = Callable[..., PolicyGroup]


@pytest.fixture
def start(policy: Start, tiny: Callable[..., Config]) -> Start:
    """`start("policy.zero_stage=3")` returns a policy with adapters."""
    return lambda *overrides: policy(tiny(LORA, *overrides))


@pytest.fixture
def adapter(start: Start, tmp_path: Path) -> str:
    """The adapter of a checkpoint after one step, as PEFT's users would find it."""
    group = start("policy.ranks=1")
    train(group, 4096, step=0)
    group.save(str(tmp_path / "first"))
    group.saved_files(wait=True)
    return str(tmp_path / "first" / "model")


class PeftPolicy(PlainPolicy):
    """`PlainPolicy` whose model is peft's, with the weights of an adapter."""

    def __init__(self, folder: str, adapter: str):
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = PeftModel.from_pretrained(base, adapter, is_trainable=True)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.adam = torch.optim.AdamW(trained, betas=(0.9, 0.95), weight_decay=0.0)

    def merged(self) -> torch.Tensor:
        merged = self.model.merge_and_unload()
        return torch.cat([p.detach().flatten() for p in merged.parameters()])


@pytest.mark.parametrize(
    "settings",
    [
        ("policy.zero_stage=0", "policy.ranks=1"),
        ("policy.zero_stage=1", "policy.ranks=2"),
        ("policy.zero_stage=2", "policy.ranks=2", "policy.gradient_checkpointing=true"),
        ("policy.zero_stage=2", "policy.ranks=1", "policy.compile=true"),
        ("policy.zero_stage=3", "policy.ranks=2", "sync.transport=object_store"),
        (
            "policy.zero_stage=3",
            "policy.ranks=2",
            "policy.gradient_checkpointing=true",
            "policy.offload=optimizer",
        ),
        ("policy.zero_stage=2", "policy.ranks=1", "rollout.exact=true"),
    ],
    ids=" ".join,
)
def test_updates_are_those_of_peft(start: Start, adapter: str, model: str, settings: tuple[str, ...]) -> None:
    plain = PeftPolicy(model, adapter)
    expected = [train_plainly(plain, step) for step in range(2)]
    group = start(f"model.adapter={adapter}", *settings)
    before = weights(group)
    for step, wanted_updates in enumerate(expected):
        for actual, wanted in zip(train(group, 64, step), wanted_updates, strict=True):
            assert {name: actual[name] for name in wanted} == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    after = weights(group)
    assert (after - plain.merged()).abs().max() < 2e-5
    assert (after - before).abs().max() > 2e-4, "nothing was learned, so nothing was compared"


def score(group: PolicyGroup, method: str = "score") -> torch.Tensor:
    packs = pack(ragged_batch(), range(16), ranks=group.ranks, tokens_per_pack=64)
    return torch.from_numpy(unpack(packs, getattr(group, method)(packs), 16))


@pytest.mark.parametrize("stage", [2, 3])
def test_peft_loads_a_checkpoint_and_computes_the_same(start: Start, model: str, tmp_path: Path, stage: int) -> None:
    group = start(f"policy.zero_stage={stage}")
    train(group, 4096, step=0)
    group.save(str(tmp_path))
    files = group.saved_files(wait=True)
    assert files is not None
    assert {"model/adapter_config.json", "model/adapter_model.safetensors"} < files.keys()
    assert "model/model.safetensors" not in files
    plain = PeftPolicy(model, str(tmp_path / "model"))
    assert (torch.cat(plain.score(ragged_batch())) - score(group)).abs().max() < 1e-5
    assert (plain.merged() - weights(group)).abs().max() < 1e-6


def test_the_names_and_numbers_in_an_adapter_are_those_that_peft_writes(
    model: str, adapter: str, tmp_path: Path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(model)
    kinds = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=kinds, task_type="CAUSAL_LM")
    get_peft_model(base, settings).save_pretrained(tmp_path / "peft")
    ours, theirs = (tensors(Path(folder)) for folder in (adapter, tmp_path / "peft"))
    assert ours == theirs
    written = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    for name, value in json.loads((Path(adapter) / "adapter_config.json").read_text()).items():
        expected = written[name]
        assert (sorted(value) == sorted(expected)) if name == "target_modules" else value == expected, name


def tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: tensor.shape for name, tensor in load_file(folder / "adapter_model.safetensors").items()}


@pytest.mark.parametrize("stage", [2, 3])
def test_without_adapters_the_policy_is_that_of_step_0(start: Start, stage: int) -> None:
    group = start(f"policy.zero_stage={stage}")
    first = score(group)
    train(group, 4096, step=0)
    after = score(group)
    assert torch.equal(score(group, "score_without_adapters"), first)
    assert torch.equal(score(group), after)
    assert not torch.equal(after, first)


CASES = {
    "0": ("policy.zero_stage=0",),
    "1": ("policy.zero_stage=1",),
    "2": ("policy.zero_stage=2",),
    "3": ("policy.zero_stage=3",),
    "3-offload": ("policy.zero_stage=3", "policy.offload=[optimizer, params]"),
    "0-bfloat16": ("policy.zero_stage=0", "policy.dtype=bfloat16"),
    "2-bfloat16": ("policy.zero_stage=2", "policy.dtype=bfloat16", "rollout.dtype=bfloat16"),
    "3-bfloat16": ("policy.zero_stage=3", "policy.dtype=bfloat16", "rollout.dtype=bfloat16"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_loaded_checkpoint_continues_bit_for_bit(start: Start, tmp_path: Path, case: str) -> None:
    group = start(*CASES[case])
    initial = group.call_all("digest")
    train(group, 64, step=0)
    group.save(str(tmp_path))
    group.saved_files(wait=True)
    expected = train(group, 64, step=1), group.call_all("digest")
    group = start(*CASES[case])
    assert group.call_all("digest") == initial
    group.load(str(tmp_path))
    assert (train(group, 64, step=1), group.call_all("digest")) == expected


@pytest.mark.parametrize(("saved", "ranks", "loaded"), [("2", 1, "0"), ("3", 1, "2"), ("0", 2, "3")])
def test_other_ranks_and_stages_can_load_a_checkpoint(
    start: Start, tmp_path: Path, saved: str, ranks: int, loaded: str
) -> None:
    group = start(*CASES[saved])
    train(group, 64, step=0)
    group.save(str(tmp_path))
    group.saved_files(wait=True)
    at_save, end = weights(group), (train(group, 64, step=1), weights(group))[1]
    other = start(*CASES[loaded], f"policy.ranks={ranks}")
    other.load(str(tmp_path))
    assert torch.equal(weights(other), at_save)
    train(other, 64, step=1)
    assert (weights(other) - end).abs().max() < 1e-5


def test_a_checkpoint_of_adapters_does_not_fit_a_run_of_all_weights_nor_the_other_way_round(
    start: Start, policy: Start, tiny: Callable[..., Config], adapter: str, tmp_path: Path
) -> None:
    group = policy(tiny("policy.ranks=1"))
    group.save(str(tmp_path / "full"))
    group.saved_files(wait=True)
    with pytest.raises(Exception, match=r"first is a checkpoint of LoRA adapters, and policy\.lora is off"):
        group.load(str(Path(adapter).parent))
    with pytest.raises(Exception, match=r"full is a checkpoint of all weights, and policy\.lora trains adapters"):
        start("policy.ranks=1").load(str(tmp_path / "full"))


def test_an_adapter_of_another_base_is_refused(
    tiny: Callable[..., Config], model: str, adapter: str, tmp_path: Path
) -> None:
    lm = AutoModelForCausalLM.from_pretrained(model)
    other = tmp_path / "other"
    with torch.no_grad():
        lm.model.layers[1].mlp.up_proj.weight[3, 5] += 0.5
    lm.save_pretrained(other)
    with pytest.raises(ConfigError, match="is an adapter of another base") as raised:
        load_policy(tiny(LORA, f"model.adapter={adapter}"), str(other))
    assert all(part in str(raised.value) for part in (model, "fingerprint", "Use the same model.path"))
    low = tiny(LORA, f"model.adapter={adapter}", "policy.dtype=bfloat16", "rollout.dtype=bfloat16")
    assert load_policy(low, model), "a base has one fingerprint in all number formats"


@pytest.mark.parametrize(
    ("targets", "sentence"),
    [
        ("[q_proj]", r"only the adapter adapts model\.layers\.0\.mlp"),
        ("[q_proj, v_proj]", "only the adapter adapts"),
    ],
)
def test_an_adapter_of_other_layers_is_refused(
    tiny: Callable[..., Config], model: str, adapter: str, targets: str, sentence: str
) -> None:
    config = tiny(f"policy.lora={{rank: {RANK}, alpha: {ALPHA}, targets: {targets}}}", f"model.adapter={adapter}")
    with pytest.raises(ConfigError, match=sentence):
        load_policy(config, model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_merged_model_is_what_engines_got(start: Start, model: str, tmp_path: Path, dtype: str) -> None:
    group = start("policy.ranks=1", f"policy.dtype={dtype}", f"rollout.dtype={dtype}")
    train(group, 4096, step=0)
    group.save(str(tmp_path))
    group.saved_files(wait=True)
    write_merged_model(tmp_path / "model", model, tmp_path / "merged", dtype, dtype)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == getattr(torch, dtype)
    assert torch.equal(torch.cat([p.detach().flatten() for p in merged.parameters()]), weights(group))
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").decode([3, 4])


def test_a_reference_of_its_own_starts_from_the_adapter_and_takes_the_policys(
    spawn: Callable[..., Any], start: Start, tiny: Callable[..., Config], adapter: str, model: str, tmp_path: Path
) -> None:
    worker = spawn(ReferenceWorker, tiny(LORA, f"model.adapter={adapter}"), 0)
    ray.get(worker.start.remote(model, model))
    packs = pack(ragged_batch(), range(16), ranks=1, tokens_per_pack=64)

    def scored() -> torch.Tensor:
        return torch.from_numpy(unpack(packs, [ray.get(worker.score.remote(packs[0]))], 16))

    plain = torch.cat(PeftPolicy(model, adapter).score(ragged_batch()))
    assert (scored() - plain).abs().max() < 1e-5
    group = start(f"model.adapter={adapter}", "policy.zero_stage=3")
    train(group, 64, step=0)
    group.write_weights(str(tmp_path))
    ray.get(worker.load_weights.remote(str(tmp_path)))
    assert torch.equal(scored(), score(group))
    assert (scored() - plain).abs().max() > 1e-4


@pytest.mark.parametrize("stage", [2, 3])
def test_a_diagnosis_finds_the_weights_of_step_0_and_of_a_checkpoint(start: Start, tmp_path: Path, stage: int) -> None:
    group = start(f"policy.zero_stage={stage}")
    first = score(group)
    train(group, 64, step=0)
    group.save(str(tmp_path))
    group.saved_files(wait=True)
    saved = score(group)
    train(group, 64, step=1)
    before = group.call_all("digest")
    packs = pack(ragged_batch(), range(16), ranks=group.ranks, tokens_per_pack=64)
    for directory, expected in ((STEP_0, first), (str(tmp_path / "model"), saved)):
        columns = group.rescore(packs, WhatIf((Sampling(1.0),), weights=directory))
        found = unpack(packs, [[column[:, 0] for column in rank] for rank in columns], 16)
        assert (torch.from_numpy(found) - expected).abs().max() < 1e-5, directory
    assert group.call_all("digest") == before


def test_a_diagnosis_in_bfloat16_rounds_merged_weights(tiny: Callable[..., Config], adapter: str, model: str) -> None:
    lm = load_policy(tiny(LORA, f"model.adapter={adapter}"), model).lm
    layer = lm.model.layers[0].mlp.up_proj
    plain = layer.weight + ALPHA / RANK * layer.lora_B @ layer.lora_A
    with torch.no_grad(), round_to_bfloat16(lm):
        assert torch.equal(layer.merged(), plain.bfloat16().float())
    assert (layer.merged() - plain).abs().max() < 1e-6
