"""Finding the policy's tensors in an engine's parameters, and verifying them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from workers.sync import fingerprint
from workers.sync.parameter_map import ParameterMap
from workers.sync.verify import combine_devices, describe_differences, tensor_fingerprint, to_hex

WIDTH, HEADS, SIZE, VOCABULARY, INNER = 8, 4, 2, 13, 12
Weights = dict[str, torch.Tensor]


def policy_weights(kv_heads: int = 2) -> Weights:
    """The policy's weights, named as Hugging Face names them."""
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
    """One device's shard of the parameters, laid out as vLLM does, without renaming."""

    packed_modules_mapping = {  # noqa: RUF012
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

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


def engine_fingerprints(weights: Weights, engines: list[Engine], by_position: bool = False) -> dict[str, str]:
    maps = [ParameterMap(e, manifest(weights), i, len(engines), by_position) for i, e in enumerate(engines)]
    return combine_devices([m.fingerprints() for m in maps])


def policy_fingerprints(weights: Weights, by_position: bool = False) -> dict[str, str]:
    return {name: to_hex(tensor_fingerprint(w, by_position)) for name, w in weights.items()}


@pytest.mark.parametrize("by_position", [False, True])
def test_fused_padded_and_tied_parameters_have_the_policys_fingerprints(by_position: bool) -> None:
    weights = policy_weights()
    assert engine_fingerprints(weights, [Engine(weights)], by_position) == policy_fingerprints(weights, by_position)


@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 2), (4, 2), (2, 4), (4, 1)])
def test_shards_of_several_devices_add_up_and_copies_count_once(ranks: int, kv_heads: int) -> None:
    weights = policy_weights(kv_heads)
    engines = [Engine(weights, rank, ranks) for rank in range(ranks)]
    assert engine_fingerprints(weights, engines, by_position=True) == policy_fingerprints(weights, by_position=True)
    engines[-1].get_parameter("model.layers.0.mlp.down_proj.weight")[3, 0] += 1
    differences = describe_differences(
        policy_fingerprints(weights, by_position=True), engine_fingerprints(weights, engines, by_position=True)
    )
    assert differences == f"1 of {len(weights)} tensors differ: model.layers.0.mlp.down_proj.weight"


def test_a_flipped_bit_in_any_tensor_is_found() -> None:
    weights = policy_weights()
    for name in weights:
        changed = weights | {name: weights[name].clone()}
        changed[name].view(torch.int32).view(-1)[-1] ^= 1
        differences = describe_differences(
            policy_fingerprints(weights), engine_fingerprints(weights, [Engine(changed)])
        )
        assert differences == f"1 of {len(weights)} tensors differ: {name}"


def test_tensors_that_swapped_places_are_named() -> None:
    weights = policy_weights()
    gate, up = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    engine = Engine(weights | {gate: weights[up], up: weights[gate]})
    differences = describe_differences(policy_fingerprints(weights), engine_fingerprints(weights, [engine]))
    assert differences == f"2 of {len(weights)} tensors differ: {gate} (it holds {up}), {up} (it holds {gate})"


def test_a_policy_that_cannot_fill_the_engine_is_refused_at_once() -> None:
    weights = policy_weights()
    fewer = {name: w for name, w in weights.items() if "k_proj" not in name and name != "model.norm.weight"}
    with pytest.raises(ValueError, match=r"computes with .*qkv_proj\.weight.*model\.norm\.weight, which no tensor"):
        ParameterMap(Engine(weights), manifest(fewer))
    with pytest.raises(ValueError, match=r"no place for model\.extra\.weight"):
        ParameterMap(Engine(weights), manifest(weights | {"model.extra.weight": torch.ones(3)}))


def test_tensors_stored_in_another_form_are_compared_together() -> None:
    """Gate and up are interleaved in one parameter with another name."""
    weights = policy_weights()
    gate, up = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    engine = Engine(weights)
    mlp = engine.get_submodule("model.layers.0.mlp")
    experts = torch.stack([weights[gate], weights[up]], 1)
    del mlp.gate_up_proj
    mlp.register_parameter("experts", nn.Parameter(experts, requires_grad=False))

    parameter_map = ParameterMap(engine, manifest(weights))
    assert parameter_map.unmapped_tensors == [gate, up]
    engine.load_weights(weights.items())
    assert combine_devices([parameter_map.fingerprints()]) == policy_fingerprints(weights)
    engine.load_weights(weights.items())
    experts[2, 0, 0] += 1
    differences = describe_differences(policy_fingerprints(weights), combine_devices([parameter_map.fingerprints()]))
    assert differences == f"2 of {len(weights)} tensors are missing: {gate}, {up}"
    assert fingerprint.hash_unordered([experts]) != 0


def test_one_tensor_of_q_k_and_v_has_no_region_on_several_devices() -> None:
    """Phi-3 stores q, k and v in one tensor. Each device has a shard of each of the three."""
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

    assert engine_fingerprints(weights, [engine(0, 1)]) == policy_fingerprints(weights)
    for ranks in (2, 3):
        devices = [engine(rank, ranks) for rank in range(ranks)]
        maps = [ParameterMap(e, manifest(weights), i, ranks, by_position=True) for i, e in enumerate(devices)]
        for device in devices:
            device.load_weights(weights.items())
        assert maps[0].unmapped_tensors == list(weights)
        assert combine_devices([m.fingerprints() for m in maps]) == policy_fingerprints(weights, by_position=True)
        devices[1].attn.qkv_proj.weight.data[0, 0] += 1
        for device in devices:
            device.load_weights(weights.items())
        assert combine_devices([m.fingerprints() for m in maps]) == {}


def test_a_transposed_square_matrix_has_no_region() -> None:
    """vLLM stores GPT-2's matrices transposed."""
    weights = {"transformer.c_proj.weight": torch.randn(WIDTH, WIDTH), "transformer.norm.weight": torch.randn(WIDTH)}
    model, inner = nn.Module(), nn.Module()
    inner.c_proj, inner.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
    inner.c_proj.weight.data, inner.norm.weight.data = (w.t().contiguous() for w in weights.values())
    inner._transpose_conv1d, model.transformer, model.load_weights = None, inner, list
    parameter_map = ParameterMap(model, manifest(weights))
    model.load_weights(weights.items())
    assert parameter_map.unmapped_tensors == ["transformer.c_proj.weight"]
    assert combine_devices([parameter_map.fingerprints()]) == policy_fingerprints(weights)


@pytest.mark.parametrize("by_position", [False, True])
def test_an_engine_may_keep_bfloat16_in_float32_but_not_a_number_between(by_position: bool) -> None:
    """As vLLM keeps the weights of some routers."""
    sent = {name: weight.bfloat16() for name, weight in policy_weights().items()}
    engine = Engine({name: weight.float() for name, weight in sent.items()})
    entries = [(name, "bfloat16", list(weight.shape)) for name, weight in sent.items()]
    parameter_map = ParameterMap(engine, entries, by_position=by_position)
    fingerprints = {name: to_hex(tensor_fingerprint(weight, by_position)) for name, weight in sent.items()}
    assert combine_devices([parameter_map.fingerprints()]) == fingerprints
    engine.model.norm.weight.data[3] *= 1 + 2**-12  # rounds to the number that was sent
    computed = combine_devices([parameter_map.fingerprints()])
    assert {name for name in computed if computed[name] != fingerprints[name]} == {"model.norm.weight"}


def test_an_engine_may_also_keep_bfloat16_in_float32_under_another_name() -> None:
    """As vLLM keeps the router's bias of ERNIE, beside experts in another form."""
    weights = policy_weights()
    gate, up = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    engine = Engine({name: weight.bfloat16() for name, weight in weights.items()})
    mlp = engine.get_submodule("model.layers.0.mlp")
    del mlp.gate_up_proj
    sent = {name: weight.bfloat16() for name, weight in weights.items()}
    wide, narrow = sent[gate].float(), sent[up].t().contiguous()
    mlp.register_parameter("wide", nn.Parameter(wide, requires_grad=False))
    mlp.register_parameter("narrow", nn.Parameter(narrow, requires_grad=False))

    entries = [(name, "bfloat16", list(weight.shape)) for name, weight in sent.items()]
    parameter_map = ParameterMap(engine, entries)
    fingerprints = {name: to_hex(tensor_fingerprint(weight, False)) for name, weight in sent.items()}
    for factor in (1, 1 + 2**-12):  # the second rounds to the number that was sent
        wide[3, 0] *= factor
        engine.load_weights(sent.items())
        computed = combine_devices([parameter_map.fingerprints()])
        assert {name for name in fingerprints if name not in computed} == ({gate, up} if factor != 1 else set())
        assert all(computed[name] == fingerprints[name] for name in computed)


def test_what_latent_attention_makes_of_a_tensor_is_verified_with_it() -> None:
    """kv_b_proj holds, for each head, 3 rows of keys and 2 of values. vLLM computes with them apart."""
    weights = {"attn.kv_b_proj.weight": torch.randn(2 * (3 + 2), 4)}
    model, attn, kv_b_proj = nn.Module(), nn.Module(), nn.Linear(4, 10, bias=False)
    kv_b_proj.weight.data = weights["attn.kv_b_proj.weight"].clone()
    attn.kv_b_proj, attn.qk_nope_head_dim, attn.v_head_dim = kv_b_proj, 3, 2
    heads = [weights["attn.kv_b_proj.weight"][i * 5 : i * 5 + 5] for i in range(2)]
    attn.W_UK_T = nn.Parameter(torch.stack([head[:3] for head in heads]), requires_grad=False)
    attn.W_UV = nn.Parameter(torch.stack([head[3:].T for head in heads]), requires_grad=False)
    model.attn = attn
    parameter_map = ParameterMap(model, manifest(weights))
    assert combine_devices([parameter_map.fingerprints()]) == policy_fingerprints(weights)
    for part in (attn.W_UK_T, attn.W_UV):
        part[1, 0, 0] += 1
        assert combine_devices([parameter_map.fingerprints()]) != policy_fingerprints(weights)
        part[1, 0, 0] -= 1


def test_fingerprints_fit_into_the_messages_of_an_engines_processes() -> None:
    weights = policy_weights()
    parameter_map = ParameterMap(Engine(weights), manifest(weights))
    parameter_map.arrived_bits = {"gate": fingerprint.MODULUS - 1, "up": 3}
    assert parameter_map.fingerprints().arrived_bits == 2
