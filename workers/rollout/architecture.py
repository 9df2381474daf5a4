"""Finds vLLM's class of a model."""

import importlib
from collections.abc import Iterator
from typing import Any


def register_architecture(model: str, trust_remote_code: bool) -> None:
    """Gives vLLM the model's class. By itself vLLM would start a process that imports vLLM again to inspect it."""
    from vllm import ModelRegistry

    for name, model_class in find_classes(model, trust_remote_code):
        ModelRegistry.register_model(name, model_class)


def keeps_state(model: str, trust_remote_code: bool) -> bool:
    """Returns whether vLLM keeps one state per sequence for some layers, such as Mamba's, and not keys of each token."""
    from vllm.model_executor.models.interfaces import has_inner_state

    return any(has_inner_state(model_class) for _, model_class in find_classes(model, trust_remote_code))


def find_classes(model: str, trust_remote_code: bool) -> Iterator[tuple[str, Any]]:
    """Names and classes of the model's architectures that are vLLM's own."""
    from transformers import AutoConfig
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    for name in AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code).architectures or []:
        if name in _TEXT_GENERATION_MODELS:
            module, class_name = _TEXT_GENERATION_MODELS[name]
            library = importlib.import_module(module if "." in module else f"vllm.model_executor.models.{module}")
            yield name, getattr(library, class_name)
