"""Where a completion ends before its limit: at an end-of-sequence token, or at one of the user's tokens or strings."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from rlsys.config.schema import Config
from rlsys.types import Request
from workers.rollout.vllm_requests import Stops, request_id, sampling_params


def stop_length(tokenizer: Any, request: Request, tokens: list[int], stops: Stops) -> int | None:
    """Returns the number of tokens up to the end of the first stop string; None if there is none.

    Decodes as vLLM does when it samples the completion in one go.
    """
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    if not stops.strings or request.ignore_end:
        return None
    whole = SimpleNamespace(
        request_id=request_id(request),
        sampling_params=sampling_params(replace(request, partial=None), stops),
        prompt_token_ids=request.tokens,
        prompt_embeds=None,
    )
    detokenizer: Any = IncrementalDetokenizer.from_new_request(tokenizer, whole)  # type: ignore[arg-type]
    return next((n for n, token in enumerate(tokens, 1) if detokenizer.update([token], False)), None)


def read_end_ids(model: str, tokenizer: Any, config: Config) -> list[int]:
    """All tokens that end a completion: of the tokenizer, of generation_config.json, and rollout.stop_token_ids."""
    ids = model_end_ids(model, tokenizer, config.model.trust_remote_code)
    return sorted({*ids, *config.rollout.stop_token_ids})


def model_end_ids(model: str, tokenizer: Any, trust_remote_code: bool = False) -> set[int]:
    """The tokens that end a completion by the tokenizer and generation_config.json."""
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
