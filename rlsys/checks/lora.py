"""Checks policy.lora and model.adapter."""

from collections.abc import Iterator
from dataclasses import fields

from rlsys.config.schema import Config, LoraConfig
from rlsys.errors import ConfigError
from rlsys.models.adapters import read_adapter_config
from rlsys.models.shapes import ModelShape


def check_lora(c: Config) -> Iterator[str]:
    lora, default = c.policy.lora, LoraConfig()
    if lora.rank < 0:
        return  # see `check_values`
    if not lora.rank:
        changed = [f.name for f in fields(lora) if getattr(lora, f.name) != getattr(default, f.name)]
        for key in [f"policy.lora.{name}" for name in changed] + ["model.adapter"] * bool(c.model.adapter):
            yield f"{key} is set, but policy.lora.rank is 0: there is no adapter. Give a rank such as 32, or leave {key} out."
        return
    if not lora.alpha:
        yield f"policy.lora.alpha is missing; an adapter is multiplied by alpha / rank. Give it, such as {2 * lora.rank}."
    if not lora.targets:
        yield "policy.lora.targets is empty; no layer would be trained. Use all-linear, or layers such as [q_proj, v_proj]."
    if c.model.adapter:
        yield from check_adapter(c)


def check_adapter(c: Config) -> Iterator[str]:
    """Requires that policy.lora repeats the rank and alpha of model.adapter."""
    try:
        adapter = read_adapter_config(c.model.adapter)
    except ConfigError as error:
        yield str(error)
        return
    for name, value in (("rank", adapter.rank), ("alpha", adapter.alpha)):
        if (ours := getattr(c.policy.lora, name)) != value:
            yield f"policy.lora.{name} is {ours:g}, and the adapter {c.model.adapter} has {value:g}. Use policy.lora.{name} {value:g}."


def check_targets(c: Config, model: ModelShape) -> Iterator[str]:
    """Finds targets that match no layer. Models with experts are checked later, when they are loaded."""
    if not c.policy.lora.rank or model.experts:
        return
    linear = list(dict.fromkeys(matrix.name for matrix in model.linear_layers))
    if unknown := [t for t in c.policy.lora.targets if t.rpartition(".")[2] not in (*linear, "all-linear")]:
        yield (
            f"policy.lora.targets: {', '.join(unknown)} matches no linear layer of {model.name} below its output layer; it "
            f"has {', '.join(linear)}. Name some of those, or all-linear."
        )
