"""The configuration of a PEFT adapter is read, and what is no plain LoRA is refused in a sentence."""

import json
from pathlib import Path

import pytest

from rlsys.checks.lora import check_lora
from rlsys.config.loading import build_config
from rlsys.config.schema import Config, ConfigError
from rlsys.models.adapters import AdapterConfig, read_adapter_config

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
    ],
)
def test_other_kinds_of_adapters_are_refused(tmp_path, changes, part):
    with pytest.raises(ConfigError, match=part):
        read_adapter_config(write(tmp_path, **changes))


def configure(**options: object) -> Config:
    from omegaconf import OmegaConf

    return build_config(OmegaConf.create(options), [], "made")


def test_a_configuration_repeats_the_numbers_of_its_adapter(tmp_path):
    model = {"adapter": str(write(tmp_path))}
    assert not list(check_lora(configure(model=model, policy={"lora": {"rank": 8, "alpha": 16}})))
    problems = list(check_lora(configure(model=model, policy={"lora": {"rank": 4, "alpha": 64}})))
    assert [p.rpartition("Use ")[2] for p in problems] == ["policy.lora.rank 8.", "policy.lora.alpha 16."]
