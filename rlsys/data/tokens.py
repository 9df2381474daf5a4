"""Tokenizes prompts. What a tokenizer puts before a text stays, such as BOS. What it appends is left out, such as EOS: the model goes on there."""

from collections.abc import Sequence
from typing import Any


def tokenize_prompts(tokenizer: Any, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
    """Tokenizes many texts at once, which keeps all cores busy."""
    if not texts:
        return []
    tokens = encode(tokenizer, texts, add_special_tokens)
    if not add_special_tokens or not appended_tokens(tokenizer, texts[0]):
        return tokens
    own = encode(tokenizer, texts, add_special_tokens=False)
    return [with_special[: end_of(text, with_special)] for text, with_special in zip(own, tokens, strict=True)]


def appended_tokens(tokenizer: Any, text: str) -> list[int]:
    """Returns the tokens that the tokenizer puts behind a text by itself."""
    own, with_special = (tokenizer.encode(text, add_special_tokens=special, verbose=False) for special in (False, True))
    return list(with_special[end_of(own, with_special) :])


def encode(tokenizer: Any, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
    encoded = tokenizer(
        list(texts),
        add_special_tokens=add_special_tokens,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    return [list(ids) for ids in encoded["input_ids"]]


def end_of(text: Sequence[int], tokens: Sequence[int]) -> int:
    """Returns where a text ends in its tokens with special ones; the end of all if it is not found.  [7], [1, 7, 2] -> 2"""
    places = range(len(tokens) - len(text) + 1)
    return next((i + len(text) for i in places if tokens[i : i + len(text)] == text), len(tokens))
