"""Whether two final answers are equal, both in the one way of writing that `latex.plain` gives.

What may be said of an answer with names, lists, pairs and sets is decided here; numbers in `quantity`, expressions in `symbolic`.
"""

import re

from rlsys.rewards.math.latex import closing_index, comparison_key, split_top_level, trim, unwrap
from rlsys.rewards.math.quantity import parse_number, split_unit, units_differ

MAX_PARTS = 24
GRID = r"(?:[pbB]?matrix|smallmatrix|array)"
MATRIX = re.compile(
    rf"[\[(]?\s*\\begin\{{{GRID}\}}(?:\{{[^}}]*\}})?((?:(?!\\begin).)*?)\\end\{{{GRID}\}}\s*[\])]?", re.DOTALL
)
# No digits but in an index: 2x + 3 is no name.
NAME = re.compile(r"(?>[A-Za-z]'*+|\\text\{[^{}]*+\}|\\[A-Za-z]++|_\{?\w++\}?|[{}()\[\],+\-|/ ])++")  # never backtracks
VALUE = re.compile(r"\\(?:sqrt|pi|frac)(?![A-Za-z])|^e$")  # looks like a name, and is a number
CALL = re.compile(r"[A-Za-z]'*(?:\^\{?-1\}?)?(?:_\{?\w+\}?)?\([^()]*\)")  # f(2)
VARIABLE = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?")
# "(B) 12", "B: yes", "B"; no other choice may follow.
CHOICE = re.compile(
    r"(?:\(([A-Ja-j])\)|([A-Ja-j])[).:](?=\s|$)|([A-Ja-j])$)(?:\s(?!.*(?<![A-Za-z\\])[A-J](?![A-Za-z])|.*\([a-j]\)).*)?"
)
WORDS = re.compile(r"(?:\\text\{[^{}]*\}|[A-Za-z' .\-])+")
ORDER = re.compile(r"[<>=]|\\(?:le|ge|neq)(?![A-Za-z])")
RELATION = re.compile(rf"{ORDER.pattern}|\\begin|\\(?:in|cup|setminus)(?![A-Za-z])|^[\[(].*[\])]$")
TRIGONOMETRY = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")


def same_answer(gold: str, answer: str) -> bool:
    """Whether two answers, both in one way of writing, are equal."""
    if comparison_key(gold) == comparison_key(answer) or choice_letter(gold) == choice_letter(answer) != "":
        return True
    (name, value), (other, said) = split_name(gold), split_name(answer)
    at_cross = VARIABLE.fullmatch(name) and VARIABLE.fullmatch(other) and comparison_key(name) != comparison_key(other)
    if not at_cross and any(_same_parts(*a, *b) for a in possible_readings(value) for b in possible_readings(said)):
        return True
    related = bool(RELATION.search(gold) and RELATION.search(answer))
    return related and (_equal(gold, answer) or (not at_cross and _equal(value, said)))


def choice_letter(text: str) -> str:
    """The choice a text names, if it names one.  "\\text{(B)} 12" -> "B" """
    found = CHOICE.fullmatch(re.sub(r"\\text\{(.*?)\}", r"\1", text))
    return found[found.lastindex or 0] if found else ""


def split_name(text: str) -> tuple[str, str]:
    """The name an equation gives, and the value.  "x = 3" -> "x", "3";  "x = 5 + 6 = 11" -> "x", "11";  "2x = 6" -> "", "2x = 6" """
    if element := re.fullmatch(r"([A-Za-z]|\\[a-z]+)\s*\\in(?![a-z])\s*(.*)", text, re.DOTALL):
        return element[1], unwrap(element[2].strip())
    left, *sides = split_top_level(text, "=")
    if not sides or not all(sides) or len(split_top_level(text, ",;")) > 1:
        return _approximate(text)
    if not left or NAME.fullmatch(left) or CALL.fullmatch(left):
        return left, _approximate(sides[-1])[1]
    if all(_same_one(side, sides[-1]) for side in (left, *sides[:-1])):  # 5 + 6 = 11
        return "", sides[-1]
    return "", text


def _approximate(text: str) -> tuple[str, str]:
    """The exact side of ≈, or the only one.  "\\sqrt{2} \\approx 1.41" -> "", "\\sqrt{2}";  "x \\approx 2" -> "x", "2" """
    exact, approx, rounded = (side.strip() for side in text.partition("\\approx"))
    if not approx:
        return "", unwrap(text)
    if not exact:
        return "", unwrap(rounded)
    return (exact, rounded) if NAME.fullmatch(exact) and not VALUE.search(exact) else ("", unwrap(exact))


def possible_readings(text: str) -> list[tuple[str, list[str]]]:
    """What a text may mean: kind and parts each.  "1,234" -> a number, and a list;  "2,5" -> a list, and a decimal comma"""
    if not re.fullmatch(r"-?\d+(?:,\d+)+", text):
        return [read_structure(text)]
    listed = ("list", text.split(","))
    if parse_number(text) is not None:
        return [("one", [text]), listed]
    return [listed, ("one", [text.replace(",", ".")])] if text.count(",") == 1 else [listed]


def read_structure(text: str) -> tuple[str, list[str]]:
    """Kind and parts of a text that means one thing.  "[0,1)" -> "[)", ["0", "1"];  "1 \\pm \\sqrt{2}" -> "list", [...]"""
    if matrix := MATRIX.fullmatch(text):
        rows = [row.split("&") for row in matrix[1].split("\\\\") if row.strip()]
        cells = [unwrap(trim(cell)) for row in rows for cell in row]
        return ("()" if rows and len(rows) == len(cells) else f"{len(rows)} rows"), cells
    if len(union := re.split(r"\\cup(?![A-Za-z])|(?<=[\])])\s*U\s*(?=[\[(])", text)) > 1:
        return "list", [part.strip() for part in union]
    inner = text[2:-2] if text.startswith("\\{") and text.endswith("\\}") else ""
    if inner and "\\}" not in inner:
        return "{}", expand_plus_minus(split_top_level(inner, ",;"))
    if text[:1] in ("(", "[") and text[-1] in ")]" and closing_index(text, 0) == len(text) - 1:
        inside = split_top_level(text[1:-1], ",;")
        return (text[0] + text[-1] if len(inside) == 2 else "()"), inside
    if angle := re.fullmatch(r"\\langle(.*)\\rangle", text):
        return "()", split_top_level(angle[1], ",")
    listed = (
        expand_plus_minus(split_top_level(text, ",;")) if parse_number(split_unit(text)[0]) is None else [text]
    )  # 1,000 dollars are one
    names = [split_name(part)[0] for part in listed]
    if len(set(names)) == len(names) > 1 and all(names):  # x = 3, y = 4 is a pair
        return "()", [part for _, part in sorted(zip(names, listed, strict=True))]
    return ("list" if len(listed) > 1 else "one"), listed


def expand_plus_minus(listed: list[str]) -> list[str]:
    """Each ± written out, and empty parts left out.  ["1 \\pm 2"] -> ["1 + 2", "1 - 2"]"""
    found = []
    for part in filter(None, listed):
        signs = [("+", "-"), ("-", "+")] if "\\pm" in part else [("", "")]
        for plus, minus in signs:
            name, value = split_name(part.replace("\\pm", plus).replace("\\mp", minus) if plus else part)
            value = unwrap(trim(value)).removeprefix("+").strip()
            found.append(f"{name} = {value}" if name else value)
    return found


def _same_parts(kind: str, ones: list[str], other_kind: str, others: list[str]) -> bool:
    if len(ones) != len(others) or not 0 < len(ones) <= MAX_PARTS:
        return False
    if len(ones) == 1 and {kind, other_kind} <= {"one", "list", "{}"}:
        return _same_one(ones[0], others[0])
    if {kind, other_kind} <= {"list", "{}"}:
        left = list(others)
        for one in ones:
            match = next((other for other in left if same_answer(one, other)), None)
            if match is None:
                return False
            left.remove(match)
        return True
    ordered = kind == other_kind or {kind, other_kind} == {"()", "list"}
    return ordered and all(same_answer(a, b) for a, b in zip(ones, others, strict=True))


def _same_one(gold: str, answer: str) -> bool:
    """Two answers that are no lists: numbers with units, texts, expressions."""
    (gold, unit), (answer, other) = split_unit(gold), split_unit(answer)
    if units_differ(unit, other) or ("rad" in (unit, other) and "\\circ" in gold + answer):
        return False
    gold, answer = drop_degrees(gold), drop_degrees(answer)
    if gold.endswith("%") or answer.endswith("%"):
        return _same_share(gold, answer)
    if comparison_key(gold) == comparison_key(answer):
        return True
    if any(parse_number(text) is None and is_text(text) for text in (gold, answer)):
        return False
    return _same_value(gold, answer)


def drop_degrees(text: str) -> str:
    return text if TRIGONOMETRY.search(text) else re.sub(r"\^\\circ\s*[CF]?", "", text).strip()


def _same_share(gold: str, answer: str) -> bool:
    """28 % is 28 %, 0.28, and 28 where percent are asked for; 0.28 is not 28, nor is 0.28 %."""
    one, other = parse_number(gold.rstrip("% ")), parse_number(answer.rstrip("% "))
    if one is None or other is None:
        return _same_value(gold.rstrip("% "), answer.rstrip("% "))
    shares = [n / 100 if text.endswith("%") else n for n, text in ((one, gold), (other, answer))]
    return shares[0] == shares[1] or (one == other and (gold.endswith("%") or abs(one) >= 1))


def is_text(text: str) -> bool:
    """Words, and not a product of variables."""
    if not WORDS.fullmatch(text):
        return bool(re.search(r"\\text\{[^{}]*[A-Za-z]{2}", text))
    letters = re.sub(r"\\text|[^A-Za-z]", "", text)
    return len(letters) != 2 or "text" in text or letters.lower() in ("no", "on")


def is_solved(text: str) -> bool:
    """Whether the text is no relation, or one with a variable alone on one side."""
    sides = ORDER.split(text)
    return len(sides) == 1 or any(VARIABLE.fullmatch(side.strip(" -")) for side in sides)


def _equal(gold: str, answer: str, tolerance: float = 1e-30) -> bool:
    """Whether two expressions or relations mean the same; but 2x = 6 is no answer where x = 3 is."""
    from rlsys.rewards.math import symbolic

    return (is_solved(answer) or not is_solved(gold)) and symbolic.equal_expressions(gold, answer, tolerance)


def _same_value(gold: str, answer: str) -> bool:
    one, other = parse_number(gold), parse_number(answer)
    tolerance = _tolerance(gold, answer)
    if one is None or other is None:
        return _equal(gold, answer, tolerance)
    return one == other or ("." in gold + answer and abs(one - other) <= tolerance * max(abs(one), abs(other)))


def _tolerance(gold: str, answer: str) -> float:
    """How far apart two values may be, as a share: less than a unit of the last digit where one is an exact number, and the
    other a decimal of six digits or more, rounded or cut off.
    """
    decimals = [text for text in (gold, answer) if "." in text]
    exact = parse_number(answer if decimals == [gold] else gold)
    if len(decimals) != 1 or (exact is not None and exact.denominator == 1):
        return 1e-9 if decimals else 1e-30
    digits = [re.sub(r"[.,]", "", found).lstrip("0") for found in re.findall(r"[\d,]*\.\d+", decimals[0])]
    # Not the whole of the unit: 0.375001 is not 3/8.
    return max([1e-9, *(0.9999 / int(known) for known in digits if len(known) >= 6)])
