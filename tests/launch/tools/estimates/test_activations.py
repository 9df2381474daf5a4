"""Activations of a pass over a pack: estimated, and as torch counts them."""

import pytest
import torch
from fakes import make_batch
from forward.test_logprobs_memory import peak
from small_models import build_model, kinds_of_layers

from launch.tools.estimates import activations
from launch.tools.estimates.activations import LayerActivations, worst_case_pack
from launch.tools.estimates.memory import SequenceLengths, total_bytes
from rlsys.batching.packing import pack
from rlsys.config.derived import logprob_chunk
from rlsys.config.schema import (
    Config,
    PolicyConfig,
    TrainerConfig,
)
from rlsys.forward.decoder import run_decoder
from rlsys.forward.logprobs import PackedLogprobs
from rlsys.models.families import KNOWN
from workers.learner.files.loading import compile_layers


def saved_bytes(lm, packed) -> float:
    """Bytes of all tensors that are saved for the backward pass, without weights."""
    weights = {p.untyped_storage().data_ptr() for p in lm.parameters()}
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = (storage.nbytes(), storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        run_decoder(lm.get_decoder(), packed, torch.device("cpu"))
    return sum(size for size, _ in storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "mixing"), [(f.name, kind) for f in KNOWN for kind in kinds_of_layers(f.name)])
def test_a_layers_saved_bytes_per_token_are_a_fifth_too_many_at_most(family, mixing, dtype, monkeypatch):
    monkeypatch.setattr(activations, "PADDING_FACTOR", 1.0)  # all sequences are equally long
    batch = make_batch([0.0] * 2, [0, 1], [64] * 2, [193] * 2)  # of 256 tokens, which mixers need not fill up
    [[packed]] = pack(batch, range(2), ranks=1, tokens_per_pack=4096)
    four, fewer = build_model(family, dtype, mixing, num_hidden_layers=4)  # of which some have a window
    five, more = build_model(family, dtype, mixing, num_hidden_layers=5)
    measured = (saved_bytes(five, packed) - saved_bytes(four, packed)) / len(packed.tokens)
    width = 4 if dtype == torch.float32 else 2
    estimated = (LayerActivations(m, width, cells=1.0).mean * m.layers for m in (more, fewer))
    assert 0.96 < (next(estimated) - next(estimated)) / measured < 1.2


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_compiled_layer_saves_less(family, monkeypatch):
    """The partitioner decides which tensors are saved, so inductor need not generate code here."""
    right = torch.nn.Module.compile
    backend = "aot_eager_decomp_partition"
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **how: right(module, backend=backend, **how))
    batch = make_batch([0.0] * 4, [0, 1, 2, 3], [64] * 4)
    [[packed]] = pack(batch, range(4), ranks=1, tokens_per_pack=4096)
    three, model = build_model(family, torch.float32)
    four, _ = build_model(family, torch.float32, num_hidden_layers=4)
    for lm in (three, four):
        compile_layers(lm)
    measured = (saved_bytes(four, packed) - saved_bytes(three, packed)) / len(packed.tokens)
    assert LayerActivations(model, 4, cells=1.0, compiled=True).mean == pytest.approx(measured, rel=0.05)
    assert LayerActivations(model, 4, cells=1.0).mean > 1.2 * measured


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen2", {"vocab_size": 4096}),
        ("qwen2", {"intermediate_size": 640, "num_hidden_layers": 6}),
        *((family, {"num_hidden_layers": 6}) for family in ("qwen3_moe", "gpt_oss", "deepseek_v3")),
    ],
)
def test_the_peak_of_forward_and_backward_is_within_a_tenth(checkpointing, family, sizes, monkeypatch):
    estimated, counted = peaks(checkpointing, family, sizes, 4, monkeypatch)
    assert estimated == pytest.approx(counted, rel=0.1)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["qwen3_5_text", "granitemoehybrid", "falcon_h1", "lfm2"])
def test_the_peak_with_mixers_is_a_third_too_high_at_most(checkpointing, family, monkeypatch):
    monkeypatch.setattr(
        activations, "PADDING_FACTOR", 1.0
    )  # all sequences have 128 inputs, which need not be filled up
    estimated, counted = peaks(checkpointing, family, {"num_hidden_layers": 6}, 65, monkeypatch)
    assert 0.95 < estimated / counted < (1.33 if checkpointing else 1.1)


def peaks(checkpointing, family, sizes, prompt, monkeypatch) -> tuple[float, float]:
    """MiB that a forward and backward pass holds, as estimated and as torch counts."""
    monkeypatch.setattr(activations, "MALLOC", 1.0)  # torch's profiler counts requested bytes
    lm, model = build_model(family, torch.float32, **sizes)
    if checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    batch = make_batch([0.0] * 16, [i // 4 for i in range(16)], [64] * 16, [prompt] * 4)
    [[packed]] = pack(batch, range(16), ranks=1, tokens_per_pack=4096, share_prompts=not model.mixer)
    policy = PolicyConfig(ranks=1, gradient_checkpointing=checkpointing, tokens_per_pack=4096)
    config = Config(trainer=TrainerConfig(4, 4, 4), policy=policy)
    lengths = SequenceLengths(len(batch.prompts[0].tokens), 64)
    tokens, scored = worst_case_pack(config, model, lengths, 16, 1)
    assert tokens == pytest.approx(len(packed.tokens), rel=0.03)
    packed_lm = PackedLogprobs(lm, chunk=logprob_chunk(model.vocabulary))

    def both() -> None:
        for _ in range(2):  # the second adds to the gradients of the first
            packed_lm(packed)[0].sum().backward()

    parts = activations.pass_memory(config, model, tokens, scored, lengths, training=True).largest
    gradients = 4 * model.parameters
    return (total_bytes(parts) + gradients) / 2**20, peak(both)
