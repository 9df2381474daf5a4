"""Compares two final answers, both normalized by `latex.normalize_latex`.

This file handles names, lists, pairs and sets; `quantity` handles numbers, and `symbolic` expressions.
"""

import re

from rlsys.rewards.math.latex import closing_index, comparison_key, split_top_level, trim, unwrap
from rlsys.rewards.math.quantity import parse_number, split_unit, units_differ

MAX_PARTS = 24
GRID = r"(?:[pbB]?matrix|smallmatrix|array)"
MATRIX = re.compile(
    rf"[\[(]?\s*\\begin\{{{GRID}\}}(?:\{{[^}}]*\}})?((?:(?!\\begin).)*?)\\end\{{{GRID}\}}\s*[\])]?", re.DOTALL
)
# Digits only in an index: 2x + 3 is not a name.
NAME = re.compile(r"(?>[A-Za-z]'*+|\\text\{[^{}]*+\}|\\[A-Za-z]++|_\{?\w++\}?|[{}()\[\],+\-|/ ])++")  # never backtracks
VALUE = re.compile(r"\\(?:sqrt|pi|frac)(?![A-Za-z])|^e$")  # looks like a name, but is a number
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
    """True if two normalized answers are equal."""
    if comparison_key(gold) == comparison_key(answer) or choice_letter(gold) == choice_letter(answer) != "":
        return True
    (gold_name, gold_value), (name, value) = split_name(gold), split_name(answer)
    variables = VARIABLE.fullmatch(gold_name) and VARIABLE.fullmatch(name)
    names_differ = variables and comparison_key(gold_name) != comparison_key(name)
    readings = [(a, b) for a in possible_readings(gold_value) for b in possible_readings(value)]
    if not names_differ and any(_same_structure(*a, *b) for a, b in readings):
        return True
    relations = bool(RELATION.search(gold) and RELATION.search(answer))
    return relations and (_equal(gold, answer) or (not names_differ and _equal(gold_value, value)))


def choice_letter(text: str) -> str:
    """Returns the letter of a multiple choice that a text names, or nothing.  "\\text{(B)} 12" -> "B" """
    match = CHOICE.fullmatch(re.sub(r"\\text\{(.*?)\}", r"\1", text))
    return match[match.lastindex or 0] if match else ""


def split_name(text: str) -> tuple[str, str]:
    """Splits an equation into a name and its value.

    "x = 3" -> "x", "3";  "x = 5 + 6 = 11" -> "x", "11";  "2x = 6" -> "", "2x = 6"
    """
    if element := re.fullmatch(r"([A-Za-z]|\\[a-z]+)\s*\\in(?![a-z])\s*(.*)", text, re.DOTALL):
        return element[1], unwrap(element[2].strip())
    left, *sides = split_top_level(text, "=")
    if not sides or not all(sides) or len(split_top_level(text, ",;")) > 1:
        return _exact_side(text)
    if not left or NAME.fullmatch(left) or CALL.fullmatch(left):
        return left, _exact_side(sides[-1])[1]
    if all(_same_part(side, sides[-1]) for side in (left, *sides[:-1])):  # 5 + 6 = 11
        return "", sides[-1]
    return "", text


def _exact_side(text: str) -> tuple[str, str]:
    """Returns the exact side of ≈, or the only side, and its name if it has one.

    "\\sqrt{2} \\approx 1.41" -> "", "\\sqrt{2}";  "x \\approx 2" -> "x", "2"
    """
    exact, approx, rounded = (side.strip() for side in text.partition("\\approx"))
    if not approx:
        return "", unwrap(text)
    if not exact:
        return "", unwrap(rounded)
    return (exact, rounded) if NAME.fullmatch(exact) and not VALUE.search(exact) else ("", unwrap(exact))


def possible_readings(text: str) -> list[tuple[str, list[str]]]:
    """Returns the structures a text may mean, as (kind, parts).

    "1,234" -> a number, or a list;  "2,5" -> a list, or a decimal comma
    """
    if not re.fullmatch(r"-?\d+(?:,\d+)+", text):
        return [read_structure(text)]
    as_list = ("list", text.split(","))
    if parse_number(text) is not None:
        return [("one", [text]), as_list]
    return [as_list, ("one", [text.replace(",", ".")])] if text.count(",") == 1 else [as_list]


def read_structure(text: str) -> tuple[str, list[str]]:
    """Returns kind and parts of a text with one meaning.

    "[0,1)" -> "[)", ["0", "1"];  "1 \\pm \\sqrt{2}" -> "list", [...]
    """
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
        parts = split_top_level(text[1:-1], ",;")
        return (text[0] + text[-1] if len(parts) == 2 else "()"), parts
    if angle := re.fullmatch(r"\\langle(.*)\\rangle", text):
        return "()", split_top_level(angle[1], ",")
    is_number = parse_number(split_unit(text)[0]) is not None  # 1,000 dollars are one number
    parts = [text] if is_number else expand_plus_minus(split_top_level(text, ",;"))
    names = [split_name(part)[0] for part in parts]
    if len(set(names)) == len(names) > 1 and all(names):  # x = 3, y = 4 is a pair
        return "()", [part for _, part in sorted(zip(names, parts, strict=True))]
    return ("list" if len(parts) > 1 else "one"), parts


def expand_plus_minus(parts: list[str]) -> list[str]:
    """Writes out each ±, and drops empty parts.  ["1 \\pm 2"] -> ["1 + 2", "1 - 2"]"""
    expanded = []
    for part in filter(None, parts):
        signs = [("+", "-"), ("-", "+")] if "\\pm" in part else [("", "")]
        for plus, minus in signs:
            name, value = split_name(part.replace("\\pm", plus).replace("\\mp", minus) if plus else part)
            value = unwrap(trim(value)).removeprefix("+").strip()
            expanded.append(f"{name} = {value}" if name else value)
    return expanded


def _same_structure(gold_kind: str, gold_parts: list[str], kind: str, parts: list[str]) -> bool:
    """True if the parts are equal, in any order for lists and sets."""
    if len(gold_parts) != len(parts) or not 0 < len(gold_parts) <= MAX_PARTS:
        return False
    kinds = {gold_kind, kind}
    if len(parts) == 1 and kinds <= {"one", "list", "{}"}:
        return _same_part(gold_parts[0], parts[0])
    if kinds <= {"list", "{}"}:
        unmatched = list(parts)
        for gold_part in gold_parts:
            match = next((part for part in unmatched if same_answer(gold_part, part)), None)
            if match is None:
                return False
            unmatched.remove(match)
        return True
    ordered = gold_kind == kind or kinds == {"()", "list"}
    return ordered and all(same_answer(a, b) for a, b in zip(gold_parts, parts, strict=True))


def _same_part(gold: str, answer: str) -> bool:
    """Compares two answers that are not lists: numbers with units, texts, expressions."""
    (gold, gold_unit), (answer, unit) = split_unit(gold), split_unit(answer)
    if units_differ(gold_unit, unit) or ("rad" in (gold_unit, unit) and "\\circ" in gold + answer):
        return False
    gold, answer = drop_degrees(gold), drop_degrees(answer)
    if gold.endswith("%") or answer.endswith("%"):
        return _same_percentage(gold, answer)
    if comparison_key(gold) == comparison_key(answer):
        return True
    if any(parse_number(text) is None and is_text(text) for text in (gold, answer)):
        return False
    return _same_value(gold, answer)


def drop_degrees(text: str) -> str:
    return text if TRIGONOMETRY.search(text) else re.sub(r"\^\\circ\s*[CF]?", "", text).strip()


def _same_percentage(gold: str, answer: str) -> bool:
    """Compares two answers of which one has a %.

    28 % is 28 %, 0.28, and 28 where percent are asked for; neither 0.28 nor 0.28 % is 28.
    """
    gold_text, text = gold.rstrip("% "), answer.rstrip("% ")
    gold_number, number = parse_number(gold_text), parse_number(text)
    if gold_number is None or number is None:
        return _same_value(gold_text, text)
    gold_share = gold_number / 100 if gold.endswith("%") else gold_number
    share = number / 100 if answer.endswith("%") else number
    return gold_share == share or (gold_number == number and (gold.endswith("%") or abs(number) >= 1))


def is_text(text: str) -> bool:
    """True for words, and False for a product of variables."""
    if not WORDS.fullmatch(text):
        return bool(re.search(r"\\text\{[^{}]*[A-Za-z]{2}", text))
    letters = re.sub(r"\\text|[^A-Za-z]", "", text)
    return len(letters) != 2 or "text" in text or letters.lower() in ("no", "on")


def is_solved(text: str) -> bool:
    """True if the text is no relation, or one with a variable alone on one side."""
    sides = ORDER.split(text)
    return len(sides) == 1 or any(VARIABLE.fullmatch(side.strip(" -")) for side in sides)


def _equal(gold: str, answer: str, tolerance: float = 1e-30) -> bool:
    """True if two expressions or relations mean the same. 2x = 6 is not accepted as the answer x = 3."""
    from rlsys.rewards.math import symbolic

    return (is_solved(answer) or not is_solved(gold)) and symbolic.equal_expressions(gold, answer, tolerance)


def _same_value(gold: str, answer: str) -> bool:
    gold_number, number = parse_number(gold), parse_number(answer)
    tolerance = _tolerance(gold, answer)
    if gold_number is None or number is None:
        return _equal(gold, answer, tolerance)
    if gold_number == number or "." not in gold + answer:
        return gold_number == number
    return abs(gold_number - number) <= tolerance * max(abs(gold_number), abs(number))


def _tolerance(gold: str, answer: str) -> float:
    """The relative error allowed between two values.

    Where one is exact and the other a decimal of six digits or more, rounded or cut off, it is just below a unit of the
    last digit.
    """
    decimals = [text for text in (gold, answer) if "." in text]
    exact = parse_number(answer if decimals == [gold] else gold)
    if len(decimals) != 1 or (exact is not None and exact.denominator == 1):
        return 1e-9 if decimals else 1e-30
    digits = [re.sub(r"[.,]", "", decimal).lstrip("0") for decimal in re.findall(r"[\d,]*\.\d+", decimals[0])]
    # Not quite a whole unit: 0.375001 is not 3/8.
    return max([1e-9, *(0.9999 / int(d) for d in digits if len(d) >= 6)])
