"""A reward function as a user writes one; asks for what it wants."""


def closeness(prompt: str, completion: str) -> float:
    """The share of the prompt's digits that occur in the completion."""
    digits = set(prompt) - {">"}
    return len(digits & set(completion)) / len(digits)
