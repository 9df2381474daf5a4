"""Tiny random models that take images and text."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForMultimodalLM

from rlsys.tasks.zigzag import make_tokenizer

TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}}
# The options of text and of vision, and the model type of the text.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "gemma3": (TEXT, VISION, "gemma3_text"),
    "qwen3_5": (TEXT | {"layer_types": ["linear_attention", "full_attention"]}, QWEN_VISION, "qwen3_5_text"),
    "mistral3": (TEXT, VISION, "mistral"),
    "llama4": (
        TEXT | {"num_local_experts": 2, "intermediate_size_mlp": 96},
        VISION | {"vision_output_dim": 32},
        "llama4_text",
    ),
    "qwen3_vl": (TEXT | MROPE, QWEN_VISION, "qwen3"),
    "qwen2_5_vl": (TEXT | MROPE, QWEN_VISION, "qwen2"),
}


def save_whole(family: str, folder: Path, text: dict[str, Any], vision: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, text_config=text, vision_config=vision)
    model = AutoModelForMultimodalLM.from_config(config)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
