"""Whether two expressions are one, by their values: parsed by math-verify, then evaluated at some points to fifty digits.

Nothing is simplified, solved or integrated, so an answer costs milliseconds whatever it is; what would grow beyond
`LARGEST` digits, and what is not yet worked out (integrals, sums, limits), is not evaluated at all. To be imported where it is used:
sympy takes half a second to load.
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

MAX_CHARS = 400  # characters
MAX_DEPTH = 6  # brackets within brackets; the parser takes twice as long for each
MAX_BARS = 6
MAX_DIGITS = 3000.0  # digits of a number on the way
MAX_EXPANDED_DIGITS = (
    40.0  # an expression of fewer digits is multiplied out, so that texts of equal ones are more often equal
)
MAX_TERMS = 300  # of what is multiplied out: a tenth of a second
DIGITS = 50
POINTS = ("7/5", "-11/7", "23/13", "-3/17", "41/11", "5/19")  # of the first variable; others follow at a distance
READING = LatexExtractionConfig(
    boxed_match_priority=0,
    normalization_config=NormalizationConfig(  # units=True would take `m` for metres
        basic_latex=True, malformed_operators=True, units=False, nits=False, boxed="last"
    ),
)
logging.getLogger("math_verify.parser").setLevel(logging.ERROR)  # it warns that it has no time limit
HEAVY = re.compile(
    r"\\(?:int|iint|oint|sum|prod|lim|frac\{\s*d[^{}]*\}\{\s*d\s*[a-zA-Z]|partial|gcd|lcm|det|max|min|sup)(?![A-Za-z])"
)
GROWING = (sympy.exp, sympy.factorial, sympy.gamma, sympy.binomial, sympy.sinh, sympy.cosh)
CHOOSE = re.compile(r"\\(?:[dt]?binom|choose)(?![A-Za-z])")  # worked out as it is parsed


def equal_expressions(gold: str, answer: str, tolerance: float = 1e-30) -> bool:
    """Whether both are expressions, equations, inequalities or sets that mean the same, values within `tolerance` of their size."""
    one, other = parse_expression(gold), parse_expression(answer)
    if one is None or other is None:
        return False
    try:
        return _equal(one, other, tolerance)
    except (ArithmeticError, AttributeError, KeyError, NotImplementedError, RecursionError, TypeError, ValueError):
        return False


@lru_cache(maxsize=256)
def parse_expression(text: str) -> Any:
    """The expression a LaTeX text means, unevaluated, or None where it means none or would cost too much."""
    if not text or len(text) > MAX_CHARS or bracket_depth(text) > MAX_DEPTH or HEAVY.search(text):
        return None
    if CHOOSE.search(text) and re.search(r"\d{4}|\^", text):
        return None
    if text.count("|") > MAX_BARS or re.search(r"\d{60}|\d_\{?\d|\d[:;]\d|(?<![_^\d])\d+ \d+(?![\d/])", text):
        return None  # 204_5 is no number of base ten, and 2 3 no sum
    try:  # its own time limits are signals; the reward process is killed from outside instead
        found = parse(f"\\boxed{{{text}}}", [READING], fallback_mode="no_fallback", parsing_timeout=None)
        return found[0] if found and digit_bound(found[0]) < MAX_DIGITS else None
    except (ArithmeticError, AttributeError, RecursionError, TypeError, ValueError):
        return None


def canonical_text(expression: Any) -> str:
    """An expression as a text, in sympy's order, small ones multiplied out.  \\sqrt{8} -> 2*sqrt(2)"""
    try:
        exact = expression.xreplace({f: sympy.Rational(str(f)) for f in expression.atoms(sympy.Float)}).doit()
        small = (
            isinstance(exact, sympy.Expr)
            and digit_bound(exact) < MAX_EXPANDED_DIGITS
            and term_bound(exact) <= MAX_TERMS
        )
        return str(sympy.expand(exact) if small else exact)[:200]
    except (ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError):
        return str(expression)[:200]


def bracket_depth(text: str) -> int:
    """Brackets within brackets at the deepest; of a text that does not close them all, more than anyone may have."""
    deepest = now = 0
    for char in text:
        now += (char in "([{") - (char in ")]}")
        deepest = max(deepest, now if now >= 0 else MAX_CHARS)
    return deepest if now == 0 else MAX_CHARS


def digit_bound(expression: Any) -> float:
    """A bound on the digits of the largest number on the way to the value.  9^{9^{9}} -> more than `LARGEST`"""
    if isinstance(expression, (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)):
        return MAX_DIGITS
    if isinstance(expression, sympy.Rational):
        return float(len(str(abs(expression))))
    inside = [digit_bound(arg) for arg in getattr(expression, "args", ())]
    if not inside:
        return 1.0
    if isinstance(expression, sympy.Pow):
        return max(inside[0] * max(_about(expression.args[1], inside[1]), 1.0), inside[1])
    if isinstance(expression, GROWING):
        return max(inside) * max(_about(arg, size) for arg, size in zip(expression.args, inside, strict=True))
    return max(inside) + 1 if isinstance(expression, sympy.Add) else float(sum(inside))


def term_bound(expression: Any) -> int:
    """A bound on how many terms it has when multiplied out, or more than `MOST_TERMS`.  (a + b)^2 c -> 3"""
    inside = [term_bound(arg) for arg in getattr(expression, "args", ())]
    found = sum(inside) or 1
    if isinstance(expression, sympy.Mul):
        found = prod(inside)
    elif isinstance(expression, sympy.Pow):
        times = sum(ceil(abs(n)) for n in expression.exp.atoms(sympy.Number))
        found = comb(times + inside[0] - 1, inside[0] - 1) * inside[1]
    return min(found, MAX_TERMS + 1)


def _about(expression: Any, size: float) -> float:
    """How large the expression is where its variables are 5, or for one of many digits, where it may be."""
    if size > 12:
        return 10.0 ** min(size, 9.0)
    return float(
        abs(complex(sympy.N(expression.xreplace(dict.fromkeys(expression.free_symbols, sympy.Integer(5))), 5)))
    )


def _equal(gold: Any, answer: Any, tolerance: float) -> bool:
    if isinstance(gold, Relational) and isinstance(answer, Relational):
        return _same_relation(gold, answer)
    if isinstance(gold, sympy.Set) or isinstance(answer, sympy.Set):
        one, other = as_set(gold), as_set(answer)
        return one is not None and one == other
    if isinstance(gold, sympy.logic.boolalg.Boolean) and isinstance(answer, sympy.logic.boolalg.Boolean):
        ones, others = list(gold.args), list(answer.args)
        return len(ones) == len(others) > 0 and all(any(_equal(a, b, tolerance) for b in others) for a in ones)
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
    """At every point where both have a value, and at two of them at least."""
    if gold.is_number and answer.is_number:
        more = int(digit_bound(gold) + digit_bound(answer)) if tolerance < 1e-20 else 0  # 2^{2005} is not 2^{2005} - 1
        return _near(*_at(gold, answer, "", DIGITS + more), sympy.Rational(tolerance) / 10**more)
    agreed = 0
    for point in POINTS:
        one, other = _at(gold, answer, point)
        if one.is_finite and other.is_finite:  # 1/0 is infinite, and equal to nothing
            if not _near(one, other, tolerance):
                return False
            agreed += 1
    return agreed >= 2


def _at(one: Any, other: Any, point: str, precision: int = DIGITS) -> tuple[Any, Any]:
    """Both values where the variables, in the order of their names, are `point`, `point` + 2/3, ..."""
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    values = {
        s: sympy.I if str(s) == "i" else sympy.Rational(point or 0) + sympy.Rational(2 * k, 3)
        for k, s in enumerate(symbols)
    }
    return tuple(sympy.N(e.xreplace(values).doit(), precision) for e in (one, other))


def _near(one: Any, other: Any, tolerance: Any) -> bool:
    """Measured against their size, so 1/2004! is not 1/2006!."""
    return bool(one.is_finite and other.is_finite and abs(one - other) <= tolerance * max(abs(one), abs(other)))


def _same_relation(gold: Any, answer: Any) -> bool:
    """Equal but for a constant factor: x < 1 is -x > -1, and 2x + 4y = 3 is y = -x/2 + 3/4."""
    (kind, one), (other_kind, other) = _as_difference(gold), _as_difference(answer)
    if kind is not other_kind or one.free_symbols != other.free_symbols or not one.free_symbols:
        return False
    ratios = []
    for point in POINTS:
        a, b = _at(one, other, point)
        if a.is_finite and b.is_finite and abs(b) > 1e-20:
            ratios.append(a / b)
    constant = len(ratios) >= 2 and all(_near(r, ratios[0], 1e-30) for r in ratios)
    return bool(constant and abs(ratios[0]) > 1e-20 and (kind in (EQUAL, UNEQUAL) or ratios[0] > 0))


EQUAL, UNEQUAL, BELOW, AT_MOST = "=", "≠", "<", "≤"


def _as_difference(relation: Any) -> tuple[str, Any]:
    """The relation as `difference kind 0`.  3 > x -> "<", x - 3"""
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
    """A set, or the set of numbers that an inequality in one variable allows.  x >= 5 -> [5, oo)"""
    if isinstance(expression, sympy.Set):
        return expression.doit()
    relations = [expression] if isinstance(expression, Relational) else list(getattr(expression, "args", ()))
    if not relations or not all(isinstance(r, Relational) for r in relations) or len(expression.free_symbols) != 1:
        return None
    (symbol,) = expression.free_symbols
    plain = [r for r in relations if (r.lhs == symbol and r.rhs.is_number) or (r.rhs == symbol and r.lhs.is_number)]
    return sympy.Intersection(*(r.doit().as_set() for r in plain)) if len(plain) == len(relations) else None
