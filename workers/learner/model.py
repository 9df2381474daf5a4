"""Loads a Hugging Face causal language model for packed sequences."""

import contextlib
from collections.abc import Iterator
from typing import Any

from rlsys.config.schema import Config, ConfigError, PolicyConfig
from workers.cpu import compiling
from workers.rollout.stopping import read_end_ids

# What layers raise that are not made for packs.
LAYER_ERRORS = (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError)
DROPOUTS = ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")


def load_causal_lm(config: Config, path: str, settings: PolicyConfig, exact: bool = False) -> Any:
    """Loads the model at `path` with packed attention and without dropout. `exact`: with the engine's arithmetic."""
    import torch
    from transformers import AutoModelForCausalLM

    from rlsys.packs import attention
    from rlsys.packs.exact import use_exact_linear
    from rlsys.packs.mixers import fold_mixers

    model_config = load_model_config(path, config.model.trust_remote_code)
    with refusing_unpackable(path, model_config.model_type, ValueError):  # attention that cannot be replaced
        lm = AutoModelForCausalLM.from_pretrained(
            path,
            config=model_config,
            dtype=getattr(torch, settings.dtype),
            attn_implementation=attention.EXACT_PACKED_ATTENTION if exact else attention.PACKED_ATTENTION,
            trust_remote_code=config.model.trust_remote_code,
        )
    if exact:
        use_exact_linear(lm)
    with refusing_unpackable(path, model_config.model_type, *LAYER_ERRORS):
        fold_mixers(lm.get_decoder())
    if settings.gradient_checkpointing:
        # Dropout is off, so no random numbers need to be kept.
        lm.gradient_checkpointing_enable({"use_reentrant": settings.zero_stage == 3, "preserve_rng_state": False})
    if settings.compile:
        compile_layers(lm)
    return lm


@contextlib.contextmanager
def refusing_unpackable(path: str, family: str, *errors: type[Exception]) -> Iterator[None]:
    """Turns what a library raises for a model whose layers cannot compute packs into a refusal."""
    try:
        yield
    except errors as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"model.path: {path} is a {family} model, which rlsys cannot train: its layers do not compute packs of "
            f"sequences ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})."
        ) from error


def load_model_config(path: str, trust_remote_code: bool) -> Any:
    """Reads the model's configuration, with dropout off."""
    from transformers import AutoConfig

    model_config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    for name in DROPOUTS:
        if hasattr(model_config, name):
            setattr(model_config, name, 0.0)
    return model_config


def compile_layers(lm: Any) -> None:
    """Compiles each layer for any number of tokens. Layers are alike, so what is compiled for one serves all."""
    compiling.allow_compiling("policy.compile", "policy.compile false")
    layers = [module for module in lm.modules() if type(module).__name__ in (lm._no_split_modules or ())]
    if not layers:
        raise ConfigError(
            f"policy.compile: {type(lm).__name__} does not say which of its modules are layers (`_no_split_modules`). "
            "Use policy.compile false."
        )
    for layer in layers:
        layer.compile(dynamic=True)


def load_packed(config: Config, path: str) -> Any:
    """Loads the model at `path` as `PackedLogprobs`."""
    from rlsys.packs.logprobs import PackedLogprobs

    r = config.rollout
    lm = load_causal_lm(config, path, config.policy, r.exact)
    return PackedLogprobs(
        lm,
        temperature=r.temperature,
        chunk=config.policy.logprob_chunk,
        min_new_tokens=r.min_new_tokens,
        float32_head=config.policy.head_dtype == "float32",
        end_ids=load_end_ids(config, path) if r.min_new_tokens else (),
    )


def load_policy(config: Config, path: str) -> Any:
    """Loads the model at `path` as `load_packed` does, with the adapters that policy.lora asks for."""
    packed, lora = load_packed(config, path), config.policy.lora
    if not lora.rank:
        return packed
    import torch

    from rlsys.packs.lora import add_adapters
    from workers.learner.adapter_files import load_adapter

    add_adapters(
        packed.lm,
        rank=lora.rank,
        alpha=lora.alpha,
        targets=lora.targets,
        format=getattr(torch, config.rollout.dtype),
        seed=config.run.seed,
    )
    if config.model.adapter:
        load_adapter(packed.lm, config)
    if config.policy.gradient_checkpointing:
        packed.lm.enable_input_require_grads()  # else a layer whose input has no gradient is not computed again
    return packed


def load_end_ids(config: Config, path: str) -> list[int]:
    """The tokens that end a completion, by the model's files and the configuration."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    return read_end_ids(path, tokenizer, config)
