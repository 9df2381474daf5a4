"""The sizes of models, compared with transformers' models."""

import json
from collections import Counter

import pytest
from models.small_families import COMMON, FAMILIES, build_without_weights, small_config

from rlsys.batching.balance import DEFAULT_PAIRS_PER_TOKEN
from rlsys.errors import ConfigError
from rlsys.models.config_json import context_from_config, parse_config
from rlsys.models.families import KNOWN
from rlsys.models.known_shapes import BUILTIN_MODELS, KNOWN_SHAPES, look_up_shape
from rlsys.models.lookup import model_shape, pairs_per_token
from rlsys.tasks import zigzag
from rlsys.tasks.builtin import TINY_MODELS

every_family = pytest.mark.parametrize(("family", "more"), FAMILIES)


@pytest.mark.parametrize("tied", [True, False])
@every_family
def test_as_many_parameters_as_transformers_builds(family, more, tied):
    """Whether its config.json says all, or only what differs from the family's defaults."""
    config = small_config(family, more, tied=tied)
    counts = [p.numel() for p in build_without_weights(config).parameters()]
    for settings in (config.to_dict(), COMMON | more | {"model_type": family, "tie_word_embeddings": tied}):
        shape = parse_config("it", settings)
        assert (shape.parameters, shape.largest_tensor) == (sum(counts), max(counts))


def test_every_known_family_is_compared():
    assert {family for family, _ in FAMILIES} == {family.name for family in KNOWN}


@every_family
def test_the_linear_layers_are_those_of_the_model(family, more):
    import torch

    config = small_config(family, more)
    modules = dict(build_without_weights(config).named_modules())
    del modules["lm_head"]
    built = Counter(
        (name.rpartition(".")[2], m.in_features, m.out_features)
        for name, m in modules.items()
        if isinstance(m, torch.nn.Linear)
    )
    counted = Counter()
    for matrix in parse_config("it", config.to_dict()).linear_layers:
        counted[matrix[:3]] += matrix.layers
    assert counted == built


@every_family
def test_windows_and_mixers_are_in_as_many_layers_as_in_the_model(family, more):
    config = small_config(family, more)
    model = build_without_weights(config)
    attention = [m for name, m in model.named_modules() if name.endswith(("self_attn", "layers.1.attention"))]
    windows = [getattr(m, "sliding_window", getattr(m.config, "sliding_window", None)) for m in attention]
    mixers = [n for n, _ in model.named_modules() if n.rpartition(".")[2] in ("linear_attn", "conv", "mamba")]
    for settings in (config.to_dict(), COMMON | more | {"model_type": family}):
        shape = parse_config("it", settings)
        assert shape.attention_layers == len(attention)
        assert shape.mixer_layers == len([n for n in mixers if not n.endswith("conv.conv")])
        assert [shape.window] * shape.windowed_layers == [w for w in windows if w]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", 8_030_261_248),
    ],
)
def test_known_models_have_the_parameters_that_their_authors_state(name, parameters):
    assert look_up_shape(name).parameters == parameters


@pytest.mark.parametrize(
    ("name", "context"),
    [
        ("Qwen/Qwen2.5-7B", 131072),
        ("Qwen/Qwen2.5-7B-Instruct", 32768),
        ("Qwen/Qwen2.5-Math-7B-Instruct", 4096),
        ("Qwen/Qwen3-4B", 40960),
        ("Qwen/Qwen3-4B-Base", 32768),
        ("Qwen/Qwen3-4B-Instruct-2507", 262144),
    ],
)
def test_variants_of_one_shape_may_have_another_context(name, context):
    assert look_up_shape(name).context == context


@pytest.mark.parametrize(
    ("settings", "context"),
    [
        ({}, 0),
        ({"max_position_embeddings": 4096}, 4096),
        ({"model_type": "phi3", "max_position_embeddings": 4096, "sliding_window": 2047}, 4096),
        ({"model_type": "mistral", "max_position_embeddings": 32768, "sliding_window": None}, 32768),
        ({"model_type": "qwen2_moe", "max_position_embeddings": 32768, "sliding_window": None}, 32768),
        ({"model_type": "qwen2_moe", "max_position_embeddings": 8192, "sliding_window": 512}, 512),
        (
            {
                "model_type": "qwen2_moe",
                "max_position_embeddings": 8192,
                "sliding_window": 512,
                "use_sliding_window": False,
            },
            8192,
        ),
        ({"model_type": "llama4_text", "max_position_embeddings": 10**7, "attention_chunk_size": 8192}, 8192),
        ({"model_type": "cohere2", "max_position_embeddings": 8192, "sliding_window": 4096}, 4096),
        ({"model_type": "cohere2_moe", "max_position_embeddings": 8192, "sliding_window": 4096}, 4096),
        ({"text_config": {"max_position_embeddings": 4096}}, 4096),
        ({"model_type": "gpt2", "n_positions": 1024}, 1024),
    ],
)
def test_a_window_that_is_only_a_mask_limits_the_context(settings, context):
    assert context_from_config(settings) == context


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096},
        {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096}},
        {"rope_parameters": {"full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 4096}}},
    ],
)
def test_positions_that_depend_on_the_longest_sequence_of_a_pack_limit_the_context(settings):
    assert context_from_config({"max_position_embeddings": 131072} | settings) == 4096


def test_other_scaled_positions_do_not_limit_the_context():
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 4096}
    assert context_from_config({"max_position_embeddings": 131072, "rope_scaling": rope}) == 131072


def test_only_the_experts_that_a_token_passes_are_active():
    model = look_up_shape("Qwen/Qwen3-30B-A3B")
    assert (round(model.parameters / 1e9, 1), round(model.active_parameters / 1e9, 2)) == (30.5, 3.35)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_built_in_models_have_the_shapes_in_the_table(name):
    built = zigzag.build_model(0, TINY_MODELS[name].symbols)
    shape = parse_config(name, built.config.to_dict())
    assert shape == model_shape(name)[0]
    assert shape.parameters == sum(p.numel() for p in built.parameters()) == 330_752 + 128 * (shape.vocabulary - 13)


def test_the_table_has_every_built_in_model():
    assert list(TINY_MODELS) == BUILTIN_MODELS


def test_a_directory_precedes_the_table_and_a_given_file_precedes_both(tmp_path):
    settings = COMMON | {"model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert model_shape(str(tmp_path))[0].layers == 4
    assert model_shape("Qwen/Qwen2.5-7B", tmp_path / "config.json")[0].layers == 4
    assert model_shape("Qwen/Qwen2.5-7B")[0].layers == 28


def test_pairs_per_token_are_as_much_work_as_one_token():
    work = model_shape("Qwen/Qwen2.5-0.5B")[0].flop_counter
    pairs = pairs_per_token("Qwen/Qwen2.5-0.5B")
    assert pairs == 8320
    assert work.forward_flops(0, 2, 0) == pytest.approx(work.flops_per_token * (2 + 3 / pairs))
    assert pairs_per_token("nobody/nothing-9b") == DEFAULT_PAIRS_PER_TOKEN


def test_a_hub_name_is_found_in_the_local_cache(tmp_path, monkeypatch):
    folder = tmp_path / "hub" / "models--me--mine" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(COMMON | {"model_type": "qwen3"}))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert model_shape("me/mine")[0].family == "qwen3"


def test_an_unknown_name_is_refused_with_a_way_out():
    with pytest.raises(ConfigError, match="--model-config FILE"):
        model_shape("nobody/nothing-9b")


def test_an_unknown_architecture_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ConfigError, match="gpt2"):
        model_shape(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"not the config\.json"):
        model_shape(str(tmp_path))


def test_every_known_model_is_found_by_its_name():
    assert all(look_up_shape(model.name) == model for model in KNOWN_SHAPES.values())


def test_a_model_without_dense_layers_need_not_state_their_width():
    """As Qwen3.5's models with experts do not."""
    config = small_config("qwen3_5_moe_text", dict(FAMILIES)["qwen3_5_moe_text"])
    settings = {name: value for name, value in config.to_dict().items() if name != "intermediate_size"}
    parameters = sum(p.numel() for p in build_without_weights(config).parameters())
    assert parse_config("it", settings).parameters == parameters
