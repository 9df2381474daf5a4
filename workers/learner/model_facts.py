"""Reads what a diagnosis needs of a model's files: special tokens, sampling defaults, and how texts are tokenized."""

import contextlib

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from rlsys.interfaces import ModelFacts

SAMPLING_OPTIONS = ("temperature", "top_p", "top_k")


def read_model_facts(source: str, texts: list[str], trust_remote_code: bool = False) -> ModelFacts:
    """`source`: model directory or hub name."""
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    model_config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    model_eos, generation = as_list(model_config.eos_token_id), {}
    with contextlib.suppress(OSError):  # the model has no generation_config.json
        defaults = GenerationConfig.from_pretrained(source)
        model_eos += as_list(defaults.eos_token_id)
        generation = {n: float(v) for n in SAMPLING_OPTIONS if (v := getattr(defaults, n, None)) is not None}
    return ModelFacts(
        bos=tokenizer.bos_token_id,
        eos=tokenizer.eos_token_id,
        pad=tokenizer.pad_token_id,
        model_eos=sorted(set(model_eos)),
        tokenizer_vocab=max(tokenizer.get_vocab().values()) + 1,
        model_vocab=model_config.get_text_config().vocab_size,
        generation=generation,
        with_special_tokens=[list(tokenizer(t, add_special_tokens=True)["input_ids"]) for t in texts],
        without_special_tokens=[list(tokenizer(t, add_special_tokens=False)["input_ids"]) for t in texts],
    )


def as_list(ids: int | list[int] | None) -> list[int]:
    return [ids] if isinstance(ids, int) else list(ids or [])
