"""Built-in rewards. Each is a plain function; see the package for the signature."""

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

from rlsys.tiny import is_zigzag

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
LONGEST_EXPRESSION = 200  # characters


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


def countdown(completion: str, numbers: list[int], target: int) -> float:
    """1 if the completion's answer makes `target` from `numbers`, each used once, with + - * / and parentheses.

    The answer is in the last <answer>…</answer>, or else on the last line that is nothing but an expression. `= 24` may follow.
    """
    end = completion.rfind("</answer>")
    start = completion.rfind("<answer>", 0, max(end, 0))
    for text in [completion[start + 8 : end]] if start >= 0 else reversed(completion.splitlines()):
        try:
            sides = [arithmetic(side) for side in text.split("=")]
        except SyntaxError:
            continue
        except ZeroDivisionError:
            return 0.0
        values, used = {value for value, _ in sides}, sides[0][1]
        return float(values == {Fraction(target)} and sorted(used) == sorted(map(int, numbers)))
    return 0.0


def arithmetic(text: str) -> tuple[Fraction, list[int]]:
    """The exact value of an expression, and the numbers in it.  "(1 + 2) / 4" -> 3/4, [1, 2, 4]

    Nothing is evaluated: the syntax tree is walked, and what is not arithmetic is a `SyntaxError`.
    """
    text, used = text.strip(), []
    if len(text) > LONGEST_EXPRESSION or set(text) - set("0123456789+-*/() "):
        raise SyntaxError

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.BinOp(left, operation, right) if type(operation) in OPERATIONS:
                found: Fraction = OPERATIONS[type(operation)](value(left), value(right))
                return found
            case ast.UnaryOp(ast.USub(), operand):
                return -value(operand)
            case ast.Constant(int() as number):
                used.append(number)
                return Fraction(number)
        raise SyntaxError

    return value(ast.parse(text, mode="eval").body), used


REWARDS: dict[str, Callable[..., float | dict[str, float]]] = {
    "exact": exact,
    "contains": contains,
    "math": math,
    "zigzag": zigzag,
    "countdown": countdown,
}
