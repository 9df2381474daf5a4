"""Where a chart finds the policy's tensors in an engine's parameters, and what differences are called."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from workers.sync import fingerprint
from workers.sync.verify import ParameterMap, combine_devices, describe_differences, tensor_fingerprint, to_hex

WIDTH, HEADS, SIZE, VOCABULARY, INNER = 8, 4, 2, 13, 12
Weights = dict[str, torch.Tensor]


def policy(kv_heads: int = 2) -> Weights:
    """Under the names of Hugging Face."""
    torch.manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": [VOCABULARY, WIDTH],
        "model.layers.0.self_attn.q_proj.weight": [HEADS * SIZE, WIDTH],
        "model.layers.0.self_attn.q_proj.bias": [HEADS * SIZE],
        "model.layers.0.self_attn.k_proj.weight": [kv_heads * SIZE, WIDTH],
        "model.layers.0.self_attn.k_proj.bias": [kv_heads * SIZE],
        "model.layers.0.self_attn.v_proj.weight": [kv_heads * SIZE, WIDTH],
        "model.layers.0.self_attn.v_proj.bias": [kv_heads * SIZE],
        "model.layers.0.self_attn.o_proj.weight": [WIDTH, HEADS * SIZE],
        "model.layers.0.mlp.gate_proj.weight": [INNER, WIDTH],
        "model.layers.0.mlp.up_proj.weight": [INNER, WIDTH],
        "model.layers.0.mlp.down_proj.weight": [WIDTH, INNER],
        "model.norm.weight": [WIDTH],
    }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def manifest(weights: Weights) -> list[tuple[str, str, list[int]]]:
    return [(name, "float32", list(w.shape)) for name, w in weights.items()]


class Engine(nn.Module):
    """One device's share of the parameters, laid out as vLLM does. It renames nothing."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}  # noqa: RUF012

    def __init__(self, weights: Weights, rank: int = 0, ranks: int = 1):
        super().__init__()

        def rows(name: str, shares: int = ranks) -> torch.Tensor:
            return weights[name].chunk(shares)[rank * shares // ranks]

        def columns(name: str) -> torch.Tensor:
            return weights[name].chunk(ranks, dim=1)[rank]

        def hold(where: str, **named: torch.Tensor) -> Any:
            module: nn.Module = self
            for step in where.split("."):
                if step not in dict(module.named_children()):
                    module.add_module(step, nn.Module())
                module = module.get_submodule(step)
            for name, value in named.items():
                module.register_parameter(name, nn.Parameter(value.clone(), requires_grad=False))
                split = name == "bias" or len(value) != len(weights.get(f"{where}.{name}", []))
                if split or where.endswith("_proj"):
                    module.get_parameter(name).output_dim = 0  # type: ignore[attr-defined]
            return module

        a, m = "model.layers.0.self_attn.", "model.layers.0.mlp."
        kv = min(ranks, len(weights[f"{a}k_proj.bias"]) // SIZE)
        for kind in ("weight", "bias"):
            parts = [
                rows(f"{a}q_proj.{kind}"),
                rows(f"{a}k_proj.{kind}", kv),
                rows(f"{a}v_proj.{kind}", kv),
            ]
            hold(f"{a}qkv_proj", **{kind: torch.cat(parts)}).output_partition_sizes = [len(p) for p in parts]
        parts = [rows(f"{m}gate_proj.weight"), rows(f"{m}up_proj.weight")]
        hold(f"{m}gate_up_proj", weight=torch.cat(parts)).output_partition_sizes = [len(p) for p in parts]
        hold(f"{a}o_proj", weight=columns(f"{a}o_proj.weight"))
        hold(f"{m}down_proj", weight=columns(f"{m}down_proj.weight"))
        hold("model.norm", weight=weights["model.norm.weight"])
        each = -(-VOCABULARY // ranks)
        first, end = rank * each, min(VOCABULARY, (rank + 1) * each)
        padded = torch.full((16, WIDTH), float(rank))
        padded[: end - first] = weights["model.embed_tokens.weight"][first:end]
        table = hold("model.embed_tokens", weight=padded)
        table.shard_indices = SimpleNamespace(org_vocab_start_index=first, org_vocab_end_index=end)
        head = nn.Module()
        head.weight = table.weight  # tied
        self.lm_head = head

    def load_weights(self, weights: Any) -> None:
        for _ in weights:
            pass


def answered(weights: Weights, engines: list[Engine], by_place: bool = False) -> dict[str, str]:
    charts = [ParameterMap(e, manifest(weights), i, len(engines), by_place) for i, e in enumerate(engines)]
    return combine_devices([c.fingerprints() for c in charts])


def expected(weights: Weights, by_place: bool = False) -> dict[str, str]:
    return {name: to_hex(tensor_fingerprint(w, by_place)) for name, w in weights.items()}


@pytest.mark.parametrize("by_place", [False, True])
def test_fused_padded_and_tied_parameters_prove_the_policys_tensors(by_place: bool) -> None:
    weights = policy()
    assert answered(weights, [Engine(weights)], by_place) == expected(weights, by_place)


@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 2), (4, 2), (2, 4), (4, 1)])
def test_shares_of_several_devices_add_up_and_copies_count_once(ranks: int, kv_heads: int) -> None:
    weights = policy(kv_heads)
    engines = [Engine(weights, rank, ranks) for rank in range(ranks)]
    assert answered(weights, engines, by_place=True) == expected(weights, by_place=True)
    engines[-1].get_parameter("model.layers.0.mlp.down_proj.weight")[3, 0] += 1
    said = describe_differences(expected(weights, by_place=True), answered(weights, engines, by_place=True))
    assert said == f"1 of {len(weights)} tensors differ: model.layers.0.mlp.down_proj.weight"


def test_every_tensor_is_proved_by_its_own_bits() -> None:
    weights = policy()
    for name in weights:
        others = weights | {name: weights[name].clone()}
        others[name].view(torch.int32).view(-1)[-1] ^= 1
        said = describe_differences(expected(weights), answered(weights, [Engine(others)]))
        assert said == f"1 of {len(weights)} tensors differ: {name}"


def test_tensors_that_changed_places_are_seen_and_named() -> None:
    weights = policy()
    gate, up = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    engine = Engine(weights | {gate: weights[up], up: weights[gate]})
    said = describe_differences(expected(weights), answered(weights, [engine]))
    assert said == f"2 of {len(weights)} tensors differ: {gate} (it holds {up}), {up} (it holds {gate})"


def test_a_missing_and_an_unknown_tensor_are_named() -> None:
    prints = {"a": "1", "b": "2"}
    assert describe_differences(prints, prints) == ""
    assert describe_differences(prints, {"a": "1"}) == "1 of 2 tensors are missing: b"
    assert describe_differences({"a": "1"}, prints) == "1 were never sent: b"
    many = {str(i): "0" for i in range(9)}
    assert describe_differences(many, {}) == "9 of 9 tensors are missing: 0, 1, 2, 3 and 5 more"


def test_a_policy_that_cannot_fill_the_engine_is_refused_at_once() -> None:
    weights = policy()
    fewer = {name: w for name, w in weights.items() if "k_proj" not in name and name != "model.norm.weight"}
    with pytest.raises(ValueError, match=r"computes with .*qkv_proj\.weight.*model\.norm\.weight, which no tensor"):
        ParameterMap(Engine(weights), manifest(fewer))
    with pytest.raises(ValueError, match=r"no place for model\.extra\.weight"):
        ParameterMap(Engine(weights), manifest(weights | {"model.extra.weight": torch.ones(3)}))


def test_what_is_stored_in_a_way_of_its_own_is_compared_as_a_whole() -> None:
    """Here gate and up are interleaved under a name that says nothing."""
    weights = policy()
    gate, up = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    engine = Engine(weights)
    mlp = engine.get_submodule("model.layers.0.mlp")
    own = torch.stack([weights[gate], weights[up]], 1)
    del mlp.gate_up_proj
    mlp.register_parameter("experts", nn.Parameter(own, requires_grad=False))

    chart = ParameterMap(engine, manifest(weights))
    assert chart.unmapped_tensors == [gate, up]
    engine.load_weights(weights.items())
    assert combine_devices([chart.fingerprints()]) == expected(weights)
    engine.load_weights(weights.items())
    own[2, 0, 0] += 1
    said = describe_differences(expected(weights), combine_devices([chart.fingerprints()]))
    assert said == f"2 of {len(weights)} tensors are missing: {gate}, {up}"
    assert fingerprint.hash_unordered([own]) != 0


def test_one_tensor_of_q_k_and_v_is_compared_as_a_whole_where_devices_have_shares_of_each() -> None:
    """As Phi-3 has it on disk."""
    weights = {"attn.qkv_proj.weight": torch.randn(12, WIDTH)}
    q, k, v = weights["attn.qkv_proj.weight"].split([6, 3, 3])

    def engine(rank: int, ranks: int) -> nn.Module:
        model, attn, qkv = nn.Module(), nn.Module(), nn.Module()
        parts = [part.tensor_split(ranks)[rank] for part in (q, k, v)]
        qkv.weight, qkv.output_partition_sizes = nn.Parameter(torch.cat(parts)), [len(part) for part in parts]
        qkv.weight.output_dim = 0
        attn.qkv_proj, model.attn = qkv, attn
        model.packed_modules_mapping = {"qkv_proj": ["qkv_proj"]}
        model.load_weights = list
        return model

    assert answered(weights, [engine(0, 1)]) == expected(weights)
    for ranks in (2, 3):
        devices = [engine(rank, ranks) for rank in range(ranks)]
        charts = [ParameterMap(e, manifest(weights), i, ranks, by_place=True) for i, e in enumerate(devices)]
        for device in devices:
            device.load_weights(weights.items())
        assert charts[0].unmapped_tensors == list(weights)
        assert combine_devices([c.fingerprints() for c in charts]) == expected(weights, by_place=True)
        devices[1].attn.qkv_proj.weight.data[0, 0] += 1
        for device in devices:
            device.load_weights(weights.items())
        assert combine_devices([c.fingerprints() for c in charts]) == {}


def test_a_square_matrix_that_is_stored_the_other_way_round_is_compared_as_a_whole() -> None:
    """As GPT-2's is."""
    weights = {"transformer.c_proj.weight": torch.randn(WIDTH, WIDTH), "transformer.norm.weight": torch.randn(WIDTH)}
    model, inner = nn.Module(), nn.Module()
    inner.c_proj, inner.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
    inner.c_proj.weight.data, inner.norm.weight.data = (w.t().contiguous() for w in weights.values())
    inner._transpose_conv1d, model.transformer, model.load_weights = None, inner, list
    chart = ParameterMap(model, manifest(weights))
    model.load_weights(weights.items())
    assert chart.unmapped_tensors == ["transformer.c_proj.weight"]
    assert combine_devices([chart.fingerprints()]) == expected(weights)


def test_an_answer_fits_into_the_messages_of_an_engines_processes() -> None:
    weights = policy()
    chart = ParameterMap(Engine(weights), manifest(weights))
    chart.arrived_bits = {"gate": fingerprint.MODULUS - 1, "up": 3}
    assert chart.fingerprints().arrived_bits == 2
