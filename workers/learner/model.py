"""Loads a Hugging Face causal language model for packed sequences."""

from typing import Any

from rlsys.config.schema import Config, ConfigError, PolicyConfig
from workers.cpu import compiling

# Logits that are transformed after lm_head are not what `LogprobHead` computes.
LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def load_causal_lm(config: Config, path: str, settings: PolicyConfig, exact: bool = False) -> Any:
    """The model at `path` with packed attention, dropout off. `exact`: in the engine's arithmetic."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlsys.packs import attention
    from rlsys.packs.exact import use_exact_linear

    found = AutoConfig.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    if transforms := [name for name in LOGIT_TRANSFORMS if getattr(found, name, None) not in (None, 1, 1.0)]:
        raise ConfigError(
            f"model.path: {path} scales or caps its logits ({', '.join(transforms)}), which is not supported."
        )
    for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if hasattr(found, name):
            setattr(found, name, 0.0)
    lm = AutoModelForCausalLM.from_pretrained(
        path,
        config=found,
        dtype=getattr(torch, settings.dtype),
        attn_implementation=attention.EXACT_PACKED_ATTENTION if exact else attention.PACKED_ATTENTION,
        trust_remote_code=config.model.trust_remote_code,
    )
    if exact:
        use_exact_linear(lm)
    if settings.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": settings.zero_stage == 3})
    if settings.compile:
        compile_layers(lm)
    return lm


def compile_layers(lm: Any) -> None:
    """One by one, for any number of tokens: layers are alike, and what is compiled for one serves all."""
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
    """A `PackedLogprobs` around it."""
    from rlsys.packs.logprobs import PackedLogprobs

    lm = load_causal_lm(config, path, config.policy, config.rollout.exact)
    return PackedLogprobs(lm, temperature=config.rollout.temperature, chunk=config.policy.logprob_chunk)
