"""The configuration of a PEFT adapter is read, and what is no plain LoRA is refused in a sentence."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
from peft import LoraConfig

from rlsys.checks.lora import check_lora
from rlsys.config.loading import build_config
from rlsys.config.schema import Config
from rlsys.errors import ConfigError
from rlsys.models.adapters import FREE_FIELDS, AdapterConfig, read_adapter_config

PLAIN = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["v_proj", "q_proj"], "bias": "none"}


def write(folder: Path, **changes: object) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps(PLAIN | changes))
    return folder


def test_rank_alpha_and_targets_are_read(tmp_path):
    assert read_adapter_config(write(tmp_path)) == AdapterConfig(8, 16.0, ["q_proj", "v_proj"])


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"use_rslora": True}, "use_rslora: True"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias: 'all'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save: \['lm_head'\]"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"r": None}, "is no LoRA adapter"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
        ({"trainable_token_indices": {"embed_tokens": [0]}}, "trainable_token_indices"),
        ({"lora_bias": True}, "lora_bias"),
        ({"alora_invocation_tokens": [0]}, r"alora_invocation_tokens: \[0\]"),
        ({"use_qalora": True}, "use_qalora"),
        ({"arrow_config": {"top_k": 3}}, "arrow_config"),
        ({"velora_config": {"rank": 1}}, "velora_config"),
        ({"megatron_config": {"a": 1}}, "megatron_config"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out: True"),
        ({"peft_type": "ADALORA"}, "peft_type: 'ADALORA'"),
        ({"a_field_of_next_year": "on"}, "a_field_of_next_year: 'on'"),
    ],
)
def test_other_kinds_of_adapters_are_refused(tmp_path, changes, part):
    with pytest.raises(ConfigError, match=part):
        read_adapter_config(write(tmp_path, **changes))


@pytest.mark.parametrize(
    "start", ["pissa", "pissa_niter_16", "PiSSA", "olora", "OLoRA", "corda", "loftq", "lora_ga", "next_year", ["pissa"]]
)
def test_an_adapter_that_began_by_changing_its_base_is_refused(tmp_path, start):
    with pytest.raises(ConfigError, match=r"has init_lora_weights: .*, which changes the base .* Merge the adapter"):
        read_adapter_config(write(tmp_path, init_lora_weights=start))


@pytest.mark.parametrize("start", [True, False, "gaussian", "Gaussian", "orthogonal", "eva", "mica", None])
def test_an_adapter_that_began_beside_its_base_is_plain(tmp_path, start):
    folder = write(tmp_path, init_lora_weights=start, eva_config={"rho": 2.0}, a_field_of_next_year=None)
    assert read_adapter_config(folder).rank == 8


def test_every_field_of_peft_is_free_or_refused_where_it_is_not_the_default(tmp_path):
    for field in fields(LoraConfig):
        default = LoraConfig().to_dict().get(field.name)
        assert read_adapter_config(write(tmp_path, **({} if field.name in PLAIN else {field.name: default})))
        if field.name not in FREE_FIELDS:
            with pytest.raises(ConfigError, match=field.name):
                read_adapter_config(write(tmp_path, **{field.name: ["other"]}))


def configure(**options: object) -> Config:
    from omegaconf import OmegaConf

    return build_config(OmegaConf.create(options), [], "made")


def test_a_configuration_repeats_the_numbers_of_its_adapter(tmp_path):
    model = {"adapter": str(write(tmp_path))}
    assert not list(check_lora(configure(model=model, policy={"lora": {"rank": 8, "alpha": 16}})))
    problems = list(check_lora(configure(model=model, policy={"lora": {"rank": 4, "alpha": 64}})))
    assert [p.rpartition("Use ")[2] for p in problems] == ["policy.lora.rank 8.", "policy.lora.alpha 16."]
