"""Families that no list names: a tiny random model of each is computed as its sequences alone, or refused in a sentence.

A dozen by default; `make families` tries every causal model type that transformers has.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, REFUSED, build_family
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlsys.config.loading import load_config
from rlsys.errors import ConfigError
from workers.learner.files.loading import load_packed
from workers.learner.proofs.at_start import prove_logprobs

CONFIG = Path(__file__).parents[4] / "configs" / "tiny_cpu.yaml"
LARGEST = 8_000_000  # parameters: of a type whose sizes have other names, the model would not be tiny
SAMPLE = (
    *(
        "apertus",
        "arcee",
        "ernie4_5",
        "exaone_moe",
        "glm4",
        "gpt2",
        "gpt_neox",
        "granitemoe",
        "helium",
        "hunyuan_v1_dense",
    ),
    *("mamba", "modernbert-decoder", "opt", "recurrent_gemma", "starcoder2", "zaya"),
)
UNLISTED = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(FAMILIES) - set(REFUSED))


def build_or_skip(family: str) -> Any:
    """The model, or a skipped test that says why there is none."""
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in build_family(family).parameters())
        if size > LARGEST:
            pytest.skip(f"{size:,} parameters: its sizes have names of their own")
        return build_family(family)
    except Exception as error:
        pytest.skip(f"no tiny model by common sizes: {type(error).__name__} {str(error).splitlines()[0][:150]}")


@pytest.mark.parametrize("family", UNLISTED if "RLSYS_ALL_FAMILIES" in os.environ else SAMPLE)
def test_a_family_that_no_list_names_is_right_or_refused_in_a_sentence(
    family: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    build_or_skip(family).save_pretrained(tmp_path)
    try:
        packed = load_packed(load_config(CONFIG, []), str(tmp_path))
        with torch.no_grad():
            prove_logprobs(packed.lm, lambda packs, **options: [packed(pack, **options) for pack in packs])
    except ConfigError as error:
        sentence = str(error)
        assert sentence.startswith("model.path: ")
        assert "rlsys cannot train" in sentence
        assert sentence.endswith("lists models that it can.") or sentence.endswith("lists those that it can.")
        assert not any(name in sentence for name in ("Error ", "object has no attribute", "unexpected keyword"))
        record_property("answer", f"refused: {sentence.replace(str(tmp_path), 'it')}")


def test_the_sample_is_of_unlisted_families() -> None:
    assert set(SAMPLE) <= set(UNLISTED)
