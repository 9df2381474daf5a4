"""Tensors as they are in a model's files, where transformers keeps them in memory in another form.

    in memory   experts.gate_up_proj [E, 2 I, H]
    in files    experts.0.gate_proj.weight [I, H], experts.0.up_proj.weight [I, H], experts.1.…

vLLM reads the form of the files, so this form is sent.
"""

from typing import Any

from workers.sync.layout import NamedTensors


def is_converted(model: Any) -> bool:
    """Returns whether some tensors have another form in files."""
    return bool(getattr(model, "_weight_conversions", None))


def to_disk_format(model: Any, name: str, tensor: Any) -> NamedTensors:
    """Returns what a parameter becomes in files, by name."""
    from transformers.core_model_loading import revert_weight_conversion

    if not is_converted(model):
        return [(name, tensor)]
    return list(revert_weight_conversion(model, {name: tensor.detach()}).items())
