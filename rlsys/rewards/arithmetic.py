"""The reward `countdown`: making a number from given ones. What a completion says is walked through, never evaluated."""

import ast
import operator
from fractions import Fraction

from rlsys.rewards.answer_score import AnswerScore

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
MAX_EXPRESSION_CHARS = 200  # characters


def countdown(completion: str, numbers: list[int], target: int) -> AnswerScore:
    """1 if the completion's answer makes `target` from `numbers`, each used once, with + - * / and parentheses.

    The answer is in the last <answer>…</answer>, or else on the last line that is nothing but an expression. `= 24` may follow.
    """
    end = completion.rfind("</answer>")
    start = completion.rfind("<answer>", 0, max(end, 0))
    for text in [completion[start + 8 : end]] if start >= 0 else reversed(completion.splitlines()):
        try:
            sides = [evaluate_arithmetic(side) for side in text.split("=")]
        except SyntaxError:
            continue
        except ZeroDivisionError:
            return AnswerScore(0.0, "")
        values, used = {value for value, _ in sides}, sides[0][1]
        right = values == {Fraction(target)} and sorted(used) == sorted(map(int, numbers))
        return AnswerScore(right, "".join(text.partition("=")[0].split()))
    return AnswerScore(0.0, "")


def evaluate_arithmetic(text: str) -> tuple[Fraction, list[int]]:
    """The exact value of an expression, and the numbers in it.  "(1 + 2) / 4" -> 3/4, [1, 2, 4]

    Nothing is evaluated: the syntax tree is walked, and what is not arithmetic is a `SyntaxError`.
    """
    text, used = text.strip(), []
    if len(text) > MAX_EXPRESSION_CHARS or set(text) - set("0123456789+-*/() "):
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
