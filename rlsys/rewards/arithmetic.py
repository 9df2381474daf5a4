"""The reward `countdown`: making a number from given ones. An expression is parsed, and never run as code."""

import ast
import operator
from fractions import Fraction

from rlsys.rewards.answer_score import AnswerScore

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
MAX_EXPRESSION_CHARS = 200


def countdown(completion: str, numbers: list[int], target: int) -> AnswerScore:
    """1 if the completion's answer makes `target` from `numbers`, each used once, with + - * / and parentheses.

    The answer is in the last <answer>…</answer>, or else it is the last line that holds only an expression. `= 24` may
    follow.
    """
    end = completion.rfind("</answer>")
    start = completion.rfind("<answer>", 0, max(end, 0))
    candidates = [completion[start + 8 : end]] if start >= 0 else reversed(completion.splitlines())
    for text in candidates:
        try:
            sides = [evaluate_arithmetic(side) for side in text.split("=")]
        except SyntaxError:
            continue
        except ZeroDivisionError:
            return AnswerScore(0.0, "")
        values, used_numbers = {value for value, _ in sides}, sides[0][1]
        right = values == {Fraction(target)} and sorted(used_numbers) == sorted(map(int, numbers))
        return AnswerScore(right, "".join(text.partition("=")[0].split()))
    return AnswerScore(0.0, "")


def evaluate_arithmetic(text: str) -> tuple[Fraction, list[int]]:
    """Returns the exact value of an expression, and the numbers in it.  "(1 + 2) / 4" -> 3/4, [1, 2, 4]

    Walks the syntax tree; anything that is not arithmetic raises `SyntaxError`.
    """
    text, numbers = text.strip(), []
    if len(text) > MAX_EXPRESSION_CHARS or set(text) - set("0123456789+-*/() "):
        raise SyntaxError

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.BinOp(left, operation, right) if type(operation) in OPERATIONS:
                result: Fraction = OPERATIONS[type(operation)](value(left), value(right))
                return result
            case ast.UnaryOp(ast.USub(), operand):
                return -value(operand)
            case ast.Constant(int() as number):
                numbers.append(number)
                return Fraction(number)
        raise SyntaxError

    return value(ast.parse(text, mode="eval").body), numbers
