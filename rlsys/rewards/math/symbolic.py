"""Compares two expressions by their values.

math-verify parses them, and both are evaluated at some points to fifty digits.

Nothing is simplified, solved or integrated, so any answer costs milliseconds only. Expressions that would grow beyond
`MAX_DIGITS` digits, and those with unevaluated integrals, sums or limits, are not evaluated at all. Import this module
where it is used: sympy takes half a second to load.
"""

import logging
import re
from functools import lru_cache
from math import ceil, comb, prod
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse
from sympy.core.relational import Relational

MAX_CHARS = 400
MAX_DEPTH = 6  # brackets within brackets; each level doubles the parser's time
MAX_BARS = 6
MAX_DIGITS = 3000.0  # of an intermediate number
MAX_EXPANDED_DIGITS = 40.0  # a smaller expression is multiplied out, so that texts of equal ones are more often equal
MAX_TERMS = 300  # after multiplying out: a tenth of a second
DIGITS = 50
POINTS = ("7/5", "-11/7", "23/13", "-3/17", "41/11", "5/19")  # of the first variable; others follow at a distance
READING = LatexExtractionConfig(
    boxed_match_priority=0,
    normalization_config=NormalizationConfig(  # units=True would read `m` as meters
        basic_latex=True, malformed_operators=True, units=False, nits=False, boxed="last"
    ),
)
logging.getLogger("math_verify.parser").setLevel(logging.ERROR)  # it warns that parsing has no time limit
HEAVY = re.compile(
    r"\\(?:int|iint|oint|sum|prod|lim|frac\{\s*d[^{}]*\}\{\s*d\s*[a-zA-Z]|partial|gcd|lcm|det|max|min|sup)(?![A-Za-z])"
)
GROWING = (sympy.exp, sympy.factorial, sympy.gamma, sympy.binomial, sympy.sinh, sympy.cosh)
# What sympy raises for expressions that it cannot handle. It has NotImplementedError where a rule is missing.
UNSUPPORTED = (ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError)
CHOOSE = re.compile(r"\\(?:[dt]?binom|choose)(?![A-Za-z])")  # the parser evaluates it at once


def equal_expressions(gold: str, answer: str, tolerance: float = 1e-30) -> bool:
    """True if both are expressions, equations, inequalities or sets that mean the same. `tolerance` is relative."""
    parsed_gold, parsed_answer = parse_expression(gold), parse_expression(answer)
    if parsed_gold is None or parsed_answer is None:
        return False
    try:
        return _equal(parsed_gold, parsed_answer, tolerance)
    except (*UNSUPPORTED, KeyError):
        return False


@lru_cache(maxsize=256)
def parse_expression(text: str) -> Any:
    """Parses a LaTeX text without evaluating it. Returns None if it is no expression, or would cost too much."""
    if not text or len(text) > MAX_CHARS or bracket_depth(text) > MAX_DEPTH or HEAVY.search(text):
        return None
    if CHOOSE.search(text) and re.search(r"\d{4}|\^", text):
        return None
    if text.count("|") > MAX_BARS or re.search(r"\d{60}|\d_\{?\d|\d[:;]\d|(?<![_^\d])\d+ \d+(?![\d/])", text):
        return None  # 204_5 is not in base ten, and 2 3 is not a sum
    try:  # without the parser's own time limit, which is a signal: the reward process has a deadline
        results = parse(f"\\boxed{{{text}}}", [READING], fallback_mode="no_fallback", parsing_timeout=None)
        return results[0] if results and digit_bound(results[0]) < MAX_DIGITS else None
    except (ArithmeticError, AttributeError, RecursionError, TypeError, ValueError):
        return None


def canonical_text(expression: Any) -> str:
    """Writes an expression as a text, in sympy's order; a small one is multiplied out.  \\sqrt{8} -> 2*sqrt(2)"""
    try:
        exact = expression.xreplace({f: sympy.Rational(str(f)) for f in expression.atoms(sympy.Float)}).doit()
        if (
            isinstance(exact, sympy.Expr)
            and digit_bound(exact) < MAX_EXPANDED_DIGITS
            and term_bound(exact) <= MAX_TERMS
        ):
            exact = sympy.expand(exact)
        return str(exact)[:200]
    except UNSUPPORTED:
        return str(expression)[:200]


def bracket_depth(text: str) -> int:
    """The depth of nested brackets; `MAX_CHARS` if they are not balanced."""
    deepest = depth = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth if depth >= 0 else MAX_CHARS)
    return deepest if depth == 0 else MAX_CHARS


def digit_bound(expression: Any) -> float:
    """An upper bound on the digits of the largest intermediate number.  9^{9^{9}} -> more than `MAX_DIGITS`"""
    if isinstance(expression, (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)):
        return MAX_DIGITS
    if isinstance(expression, sympy.Rational):
        return float(len(str(abs(expression))))
    inside = [digit_bound(arg) for arg in getattr(expression, "args", ())]
    if not inside:
        return 1.0
    if isinstance(expression, sympy.Pow):
        return max(inside[0] * max(_rough_size(expression.args[1], inside[1]), 1.0), inside[1])
    if isinstance(expression, GROWING):
        return max(inside) * max(_rough_size(arg, bound) for arg, bound in zip(expression.args, inside, strict=True))
    return max(inside) + 1 if isinstance(expression, sympy.Add) else float(sum(inside))


def term_bound(expression: Any) -> int:
    """An upper bound on the number of terms after multiplying out; cut off above `MAX_TERMS`.  (a + b)^2 c -> 3"""
    inside = [term_bound(arg) for arg in getattr(expression, "args", ())]
    count = sum(inside) or 1
    if isinstance(expression, sympy.Mul):
        count = prod(inside)
    elif isinstance(expression, sympy.Pow):
        exponent = sum(ceil(abs(n)) for n in expression.exp.atoms(sympy.Number))
        count = comb(exponent + inside[0] - 1, inside[0] - 1) * inside[1]
    return min(count, MAX_TERMS + 1)


def _rough_size(expression: Any, bound: float) -> float:
    """The size of the expression with all variables 5; where its digits have a large bound, the size it may have."""
    if bound > 12:
        return 10.0 ** min(bound, 9.0)
    values = dict.fromkeys(expression.free_symbols, sympy.Integer(5))
    return float(abs(complex(sympy.N(expression.xreplace(values), 5))))


def _equal(gold: Any, answer: Any, tolerance: float) -> bool:
    if isinstance(gold, Relational) and isinstance(answer, Relational):
        return _same_relation(gold, answer)
    if isinstance(gold, sympy.Set) or isinstance(answer, sympy.Set):
        gold_set, answer_set = as_set(gold), as_set(answer)
        return gold_set is not None and gold_set == answer_set
    if isinstance(gold, sympy.logic.boolalg.Boolean) and isinstance(answer, sympy.logic.boolalg.Boolean):
        parts, others = list(gold.args), list(answer.args)
        return len(parts) == len(others) > 0 and all(any(_equal(a, b, tolerance) for b in others) for a in parts)
    if isinstance(gold, sympy.MatrixExpr) or isinstance(answer, sympy.MatrixExpr):
        gold, answer = gold.doit(), answer.doit()
    if isinstance(gold, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase):
        return gold.shape == answer.shape and all(
            _equal(a, b, tolerance) for a, b in zip(gold.flat(), answer.flat(), strict=True)
        )
    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return False
    if isinstance(gold, sympy.Symbol) or isinstance(answer, sympy.Symbol) or gold.has(sympy.core.function.AppliedUndef):
        return bool(gold == answer or (term_bound(gold - answer) <= MAX_TERMS and sympy.expand(gold - answer) == 0))
    return _same_values(gold, answer, tolerance)


def _same_values(gold: Any, answer: Any, tolerance: float) -> bool:
    """True if the values agree at every point where both have one, and at two points or more."""
    if gold.is_number and answer.is_number:
        extra = int(digit_bound(gold) + digit_bound(answer)) if tolerance < 1e-20 else 0  # 2^{2005} is not 2^{2005} - 1
        return _near(*_values_at(gold, answer, "", DIGITS + extra), sympy.Rational(tolerance) / 10**extra)
    agreed = 0
    for point in POINTS:
        a, b = _values_at(gold, answer, point)
        if a.is_finite and b.is_finite:  # 1/0 is infinite, and equal to nothing
            if not _near(a, b, tolerance):
                return False
            agreed += 1
    return agreed >= 2


def _values_at(gold: Any, answer: Any, point: str, precision: int = DIGITS) -> tuple[Any, Any]:
    """Evaluates both with the variables, in the order of their names, at `point`, `point` + 2/3, ..."""
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    values = {
        s: sympy.I if str(s) == "i" else sympy.Rational(point or 0) + sympy.Rational(2 * k, 3)
        for k, s in enumerate(symbols)
    }
    return tuple(sympy.N(e.xreplace(values).doit(), precision) for e in (gold, answer))


def _near(a: Any, b: Any, tolerance: Any) -> bool:
    """True if two values agree relative to their size, so 1/2004! is not 1/2006!."""
    return bool(a.is_finite and b.is_finite and abs(a - b) <= tolerance * max(abs(a), abs(b)))


def _same_relation(gold: Any, answer: Any) -> bool:
    """True if two relations are equal up to a constant factor: x < 1 is -x > -1, and 2x + 4y = 3 is y = -x/2 + 3/4."""
    (kind, left), (other_kind, right) = _as_difference(gold), _as_difference(answer)
    if kind is not other_kind or left.free_symbols != right.free_symbols or not left.free_symbols:
        return False
    ratios = []
    for point in POINTS:
        a, b = _values_at(left, right, point)
        if a.is_finite and b.is_finite and abs(b) > 1e-20:
            ratios.append(a / b)
    constant = len(ratios) >= 2 and all(_near(r, ratios[0], 1e-30) for r in ratios)
    return bool(constant and abs(ratios[0]) > 1e-20 and (kind in (EQUAL, UNEQUAL) or ratios[0] > 0))


EQUAL, UNEQUAL, BELOW, AT_MOST = "=", "≠", "<", "≤"


def _as_difference(relation: Any) -> tuple[str, Any]:
    """Returns the relation as `difference kind 0`.  3 > x -> "<", x - 3"""
    left, right = relation.lhs, relation.rhs
    match relation:
        case sympy.Eq():
            return EQUAL, left - right
        case sympy.Ne():
            return UNEQUAL, left - right
        case sympy.StrictLessThan():
            return BELOW, left - right
        case sympy.LessThan():
            return AT_MOST, left - right
        case sympy.StrictGreaterThan():
            return BELOW, right - left
    return AT_MOST, right - left


def as_set(expression: Any) -> Any:
    """Returns a set, or the set of numbers that inequalities in one variable allow.  x >= 5 -> [5, oo)"""
    if isinstance(expression, sympy.Set):
        return expression.doit()
    relations = [expression] if isinstance(expression, Relational) else list(getattr(expression, "args", ()))
    if not relations or not all(isinstance(r, Relational) for r in relations) or len(expression.free_symbols) != 1:
        return None
    (symbol,) = expression.free_symbols
    bounds = [r for r in relations if (r.lhs == symbol and r.rhs.is_number) or (r.rhs == symbol and r.lhs.is_number)]
    return sympy.Intersection(*(r.doit().as_set() for r in bounds)) if len(bounds) == len(relations) else None
