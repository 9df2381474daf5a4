"""Which tokens end a completion, by a model's files and the configuration."""

from typing import Any

from rlsys.config.schema import Config


def read_end_ids(model: str, tokenizer: Any, config: Config) -> list[int]:
    """Returns all tokens that end a completion: of the tokenizer, of generation_config.json, and rollout.stop_token_ids."""
    ids = model_end_ids(model, tokenizer, config.model.trust_remote_code)
    return sorted({*ids, *config.rollout.stop_token_ids})


def model_end_ids(model: str, tokenizer: Any, trust_remote_code: bool = False) -> set[int]:
    """Returns the tokens that end a completion by the tokenizer and generation_config.json."""
    from transformers import AutoConfig, GenerationConfig

    try:
        defaults = GenerationConfig.from_pretrained(model)
    except OSError:  # the model has no generation_config.json; vLLM reads config.json then
        defaults = GenerationConfig.from_model_config(
            AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        )
    ids = defaults.eos_token_id
    ids = [ids] if isinstance(ids, int) else ids or []
    return {i for i in [tokenizer.eos_token_id, *ids] if i is not None}
