"""Built-in rewards. Each is a plain function; see the package for the signature."""

from collections.abc import Callable

from rlsys.tiny import is_zigzag


def exact(completion: str, answer: str) -> float:
    """1 if the completion is the answer, blanks at the ends aside."""
    return float(completion.strip() == str(answer).strip())


def contains(completion: str, answer: str) -> float:
    """1 if the answer occurs in the completion."""
    return float(str(answer).strip() in completion)


def math(completion: str, answer: str) -> float:
    """1 if the completion's final answer (boxed, or the last expression) is mathematically equal to `answer`."""
    from math_verify import parse, verify

    # math-verify's own time limits are signals; the reward process is killed from outside instead.
    gold = parse(answer if "\\boxed" in answer else f"\\boxed{{{answer}}}", parsing_timeout=None)
    last = completion[max(completion.rfind("\\boxed"), 0) :]  # all boxes together would be read as one set
    return float(verify(gold, parse(last, parsing_timeout=None), timeout_seconds=None))


def zigzag(prompt: str, completion: str, finish: str) -> float:
    """1 if the completion is the prompt's digits in a zigzag order, and ends there."""
    return float(finish == "stop" and sorted(completion) == sorted(prompt.rstrip(">")) and is_zigzag(completion))


REWARDS: dict[str, Callable[..., float | dict[str, float]]] = {
    "exact": exact,
    "contains": contains,
    "math": math,
    "zigzag": zigzag,
}
