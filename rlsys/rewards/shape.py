"""Rewards for the form of a text, not for its content: `length`, `repetition`."""

from typing import Any

from rlsys.errors import ConfigError


def length(completion: str, tokens: int, *, at_most: int, zero_at: int = 0, by: str = "tokens") -> float:
    """1 for a completion of up to `at_most` tokens, falling linearly to 0 at `zero_at` (0: twice `at_most`) and beyond.

    `by`: tokens | characters.
    """
    size = tokens if by == "tokens" else len(completion)
    end = zero_at or 2 * at_most
    return min(1.0, max(0.0, (end - size) / (end - at_most)))


def repetition(completion: str, *, ngram: int = 3, max_penalty: float = -1.0, by: str = "words") -> float:
    """`max_penalty` times the share of repeated n-grams; 0 if none repeats.

    As in open-r1, after Yeo et al. 2025, arXiv 2502.03373, appendix C.2. `by`: words | characters (for languages
    without blanks).
    """
    units = completion.lower().split() if by == "words" else list("".join(completion.split()))
    grams = [tuple(units[i : i + ngram]) for i in range(len(units) - ngram + 1)]
    return max_penalty * (1 - len(set(grams)) / len(grams)) + 0.0 if grams else 0.0


def check_length(options: dict[str, Any]) -> None:
    at_most, zero_at, by = options.get("at_most"), options.get("zero_at", 0), options.get("by", "tokens")
    if not isinstance(at_most, int) or at_most < 1:
        raise ConfigError(f"`at_most` is {at_most!r}; give the number of tokens up to which the score is 1.")
    if not isinstance(zero_at, int) or (zero_at and zero_at <= at_most):
        raise ConfigError(f"`zero_at` is {zero_at!r}; it must be more than `at_most` ({at_most}), or 0 for twice that.")
    if by not in ("tokens", "characters"):
        raise ConfigError(f"`by` is {by!r}; it may be tokens or characters.")


def check_repetition(options: dict[str, Any]) -> None:
    ngram, penalty, by = options.get("ngram", 3), options.get("max_penalty", -1.0), options.get("by", "words")
    if not isinstance(ngram, int) or ngram < 1:
        raise ConfigError(f"`ngram` is {ngram!r}; it is a number of words, 1 or more.")
    if not isinstance(penalty, int | float) or penalty > 0:
        raise ConfigError(f"`max_penalty` is {penalty!r}; it must be 0 or less.")
    if by not in ("words", "characters"):
        raise ConfigError(f"`by` is {by!r}; it may be words or characters.")
