"""Loads a Hugging Face causal language model for packed log-probs."""

from typing import Any

from rlsys.config import Config, ConfigError

# Logits that are transformed after lm_head are not what `LogprobHead` computes.
UNSUPPORTED = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def load_packed(config: Config, path: str, dtype: str) -> Any:
    """A `PackedLogprobs` around the model at `path`, dropout off."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlsys.attention import NAME
    from rlsys.logprobs import PackedLogprobs

    settings = AutoConfig.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    if found := [name for name in UNSUPPORTED if getattr(settings, name, None) not in (None, 1, 1.0)]:
        raise ConfigError(f"model.path: {path} scales or caps its logits ({', '.join(found)}), which is not supported.")
    for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if hasattr(settings, name):
            setattr(settings, name, 0.0)
    lm = AutoModelForCausalLM.from_pretrained(
        path,
        config=settings,
        dtype=getattr(torch, dtype),
        attn_implementation=NAME,
        trust_remote_code=config.model.trust_remote_code,
    )
    return PackedLogprobs(lm, temperature=config.rollout.temperature, chunk=config.policy.logprob_chunk)
