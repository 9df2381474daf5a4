"""Models that cannot be trained are refused in a sentence; a damaged one is not taken for such."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_script import run_script
from families import REFUSED, VOCABULARY, build_family
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from rlsys.config.loading import load_config
from rlsys.errors import ConfigError
from rlsys.forward.attention import PACKED_ATTENTION
from rlsys.forward.logprobs import PackedLogprobs
from rlsys.forward.unpackable import LAYER_ERRORS, refusing_unpackable
from rlsys.models.families import family_of
from workers.learner.files import loading
from workers.learner.files.loading import load_causal_lm, load_packed, offload_layer_inputs
from workers.learner.proofs.at_start import prove_logprobs
from workers.learner.proofs.packing import proof_packs

CONFIG = Path(__file__).parents[4] / "configs" / "tiny_cpu.yaml"


def start(folder: Path, *overrides: str) -> None:
    """What a reference does at its start."""
    packed = load_packed(load_config(CONFIG, overrides), str(folder))
    with torch.no_grad():
        prove_logprobs(packed.lm, lambda packs, **options: [packed(pack, **options) for pack in packs])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", REFUSED)
def test_a_model_whose_layers_do_not_compute_packs_is_refused_by_name(family: str, dtype: str, tmp_path: Path) -> None:
    """Also where its weights are small, and rounding is about as large as what it computes otherwise."""
    lm = build_family(family)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.mul_(0.1)
    lm.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"a {family} model, which rlsys cannot train"):
        start(tmp_path, f"policy.dtype={dtype}")


@pytest.mark.parametrize(
    ("family", "rate"), [("seed_oss", "residual_dropout"), ("opt", "dropout"), ("mixtral", "router_jitter_noise")]
)
def test_a_model_with_noise_of_its_own_computes_the_same_while_it_is_trained(
    family: str, rate: str, tmp_path: Path
) -> None:
    build_family(family, **{rate: 0.5}).save_pretrained(tmp_path)
    config = load_config(CONFIG, [])
    packed, (_, [single, _, _]) = load_packed(config, str(tmp_path)), proof_packs(VOCABULARY)
    assert getattr(AutoConfig.from_pretrained(tmp_path), rate) == 0.5
    assert torch.equal(packed.train()(single)[0], packed.eval()(single)[0])


@pytest.mark.parametrize("family", ["mixtral", "minimax", "minimax_m2", "phimoe"])
def test_noise_of_routers_is_none_in_sampling_except_in_families_that_are_refused(family: str) -> None:
    noisy, quiet = (build_family(family, router_jitter_noise=noise, sliding_window=None) for noise in (0.1, 0.0))
    tokens = torch.arange(3, 60)[None]
    same = torch.equal(noisy(input_ids=tokens).logits, quiet(input_ids=tokens).logits)
    assert same == (not family_of(family).draws_experts)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_parameters_have_one_dtype_and_biases_of_routers_keep_theirs(stored: str, tmp_path: Path) -> None:
    """transformers keeps a router of ERNIE in float32, and its bias is a parameter without a gradient."""
    lm = build_family("ernie4_5_moe")
    lm.to(getattr(torch, stored)).save_pretrained(tmp_path)
    [bias] = [t for name, t in load_file(tmp_path / "model.safetensors").items() if "e_score_correction_bias" in name]
    config = load_config(CONFIG, ["policy.dtype=bfloat16"])
    loaded = load_causal_lm(config, str(tmp_path), config.policy)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    [kept] = [t for name, t in loaded.named_buffers() if "e_score_correction_bias" in name]
    assert kept.dtype == torch.float32
    assert bias.any()
    assert torch.equal(kept, bias.float())


LOAD_PARTITIONED = """
import json, sys
from rlsys.config.loading import load_config
from rlsys.forward import attention
from transformers import AttentionInterface
from workers.learner.files.loading import load_policy
from workers.learner.proofs.at_start import prove_loaded
from workers.learner.rendezvous import join_process_group
from workers.learner.zero import import_deepspeed
from workers.start.ports import free_port

file, folder, options, drop = json.load(sys.stdin)
config = load_config(file, options)
import_deepspeed(config, ranks=1)
join_process_group("cpu", 0, 1, "127.0.0.1", free_port(), seed=0, timeout_s=60)

def without_soft_cap(*arguments, softcap=None, **keywords):
    return attention.packed_attention(*arguments, **keywords)

if drop:
    AttentionInterface.register(attention.PACKED_ATTENTION, without_soft_cap)
packed = load_policy(config, folder)
prove_loaded(packed, config)
base = [p for name, p in packed.named_parameters() if "lora" not in name]
print("dtypes", {str(p.dtype) for p in packed.parameters()}, "partitioned", {hasattr(p, "ds_id") for p in base})
"""


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize(
    ("safetensors", "lora"),
    [
        (True, []),
        pytest.param(False, [], marks=pytest.mark.long),
        pytest.param(True, ["policy.lora={rank: 2, alpha: 4, targets: [q_proj]}"], marks=pytest.mark.long),
    ],
)
def test_a_model_in_half_precision_is_proved_in_float32_before_zero_3_takes_it_over(
    tmp_path: Path, safetensors: bool, lora: list[str], drop: bool
) -> None:
    """Here a soft cap that is dropped changes less than rounding to bfloat16."""
    build_family("gemma2", attn_logit_softcapping=5.0).save_pretrained(tmp_path)
    if not safetensors:
        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    options = ["policy.zero_stage=3", "policy.dtype=bfloat16", "rollout.dtype=bfloat16", *lora]
    done = run_script(LOAD_PARTITIONED, [str(CONFIG), str(tmp_path), options, drop])
    if drop:
        assert "computes a pack of sequences otherwise than each sequence alone" in done.stderr
        assert "first in the output of Gemma2Attention" in done.stderr
    else:
        facts = f"dtypes {{'torch.bfloat16'}} partitioned {{{safetensors}}}"
        assert facts in done.stdout, done.stderr[-2000:]


def test_a_machine_without_memory_is_not_blamed_on_the_architecture() -> None:
    with (
        pytest.raises(torch.OutOfMemoryError, match="no memory"),
        refusing_unpackable("m", "llama", *LAYER_ERRORS),
    ):
        raise torch.OutOfMemoryError("no memory")


def test_a_refusal_names_the_layer_that_raised_an_error() -> None:
    layer = torch.nn.Linear(3, 2)
    with (
        pytest.raises(ConfigError, match=r"packs of sequences: the model raises AssertionError\. rlsys"),
        refusing_unpackable("m", "llama", *LAYER_ERRORS),
    ):
        raise AssertionError
    with (
        pytest.raises(ConfigError, match=r"a llama model, .*: Linear raises RuntimeError mat1 and mat2 shapes"),
        refusing_unpackable("m", "llama", *LAYER_ERRORS),
    ):
        layer(torch.zeros(1, 4))


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("modernbert-decoder", "does not say which of its modules is the decoder, but names a Linear"),
        ("gptj", "GPTJBlock knows only attention of its own"),
        ("recurrent_gemma", "RecurrentGemmaRglru does not take several sequences in one row"),
        ("zaya", "ZayaAttention does not take several sequences in one row"),
    ],
)
def test_a_refusal_of_a_family_that_no_list_names_says_why(family: str, words: str, tmp_path: Path) -> None:
    build_family(family).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"a {family} model, which rlsys cannot train.*{words}"):
        start(tmp_path)


def lose_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def change_a_shape(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(5)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def truncate(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lose_a_tensor, "do not hold model.norm.weight"),
        (change_a_shape, r"model.safetensors: model.norm.weight is \[5\], and by config.json \[32\]"),
        (truncate, "model.safetensors is truncated or damaged: it has"),
    ],
)
def test_damaged_weights_are_named_and_not_blamed_on_the_architecture(
    tmp_path: Path, damage: Callable[[Path], None], sentence: str, stage: int
) -> None:
    build_family("llama").save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(ConfigError, match=sentence) as damaged:
        start(tmp_path, f"policy.zero_stage={stage}")
    assert "cannot train" not in str(damaged.value)
    assert "again" in str(damaged.value), "it says what to do"


@pytest.mark.parametrize("reentrant", [False, True])  # true with ZeRO 3
def test_offloading_moves_the_inputs_of_layers_and_nothing_else(
    reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[torch.Tensor] = []

    class Recorded(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool):
            super().__init__(lambda x: moved.append(x) or x.clone(), lambda x: x)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Recorded)
    _, [single, _, _] = proof_packs(VOCABULARY)
    gradients = []
    for offload in (False, True):
        lm = build_family("llama").train()
        lm.set_attn_implementation(PACKED_ATTENTION)
        lm.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if offload:
            offload_layer_inputs(lm, pin_memory=False)
        PackedLogprobs(lm)(single)[0].sum().backward()
        gradients.append([p.grad for p in lm.parameters()])
    assert [x.shape for x in moved if x.numel()] == [(1, len(single.tokens), 32)] * 2, "two layers"
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_model_is_loaded_with_offloading_if_the_configuration_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[bool] = []
    monkeypatch.setattr(loading, "offload_layer_inputs", lambda lm, pin_memory: pinned.append(pin_memory))
    build_family("llama").save_pretrained(tmp_path)
    for parts in ("optimizer", "activations"):
        settings = ["policy.gradient_checkpointing=true", f"policy.offload={parts}"]
        config = load_config(CONFIG, settings)
        load_causal_lm(config, str(tmp_path), config.policy)
    assert pinned == [False], "only memory of a host with GPUs is pinned"
