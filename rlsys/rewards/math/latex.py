"""Normalizes the many ways in which LaTeX and plain text write the same thing. Nothing is parsed or evaluated here."""

import re
from unicodedata import normalize

SCRIPTS = [
    (re.compile(f"[{signs}]+"), rf"{mark}{{\g<0>}}", str.maketrans(signs, letters))
    for mark, signs, letters in (
        ("^", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni"),
        ("_", "₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₙ", "0123456789+-()n"),
    )
]
SIGNS = str.maketrans(
    {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}  # full-width letters and digits
    | dict.fromkeys("\u2212\u2013\u2014\u2010\u2011", "-")
    | dict.fromkeys("\u00a0\u2009\u202f\u3000\t\n\r~", " ")
    | dict.fromkeys('“”„"', "")
    | dict.fromkeys("\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\u00ad", "")  # invisible
    | {
        "’": "'",
        "′": "'",
        "×": "\\times ",
        "⋅": "\\cdot ",
        "·": "\\cdot ",
        "∙": "\\cdot ",
        "÷": "/",
        "⁄": "/",
        "∕": "/",
    }
    | {
        "π": "\\pi ",
        "∞": "\\infty ",
        "≤": "\\le ",
        "≥": "\\ge ",
        "≠": "\\neq ",
        "≈": "\\approx ",
        "±": "\\pm ",
    }
    | {"∪": "\\cup ", "∩": "\\cap ", "∅": "\\emptyset ", "∈": "\\in ", "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta "}
    | {"°": "^\\circ", "º": "^\\circ", "…": "\\ldots "}
    | {sign: "\\frac{{{}}}{{{}}}".format(*normalize("NFKC", sign).split("⁄")) for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"}
    | {"ℝ": "\\mathbb{R}", "⟨": "\\langle ", "⟩": "\\rangle ", "，": ",", "。": "."}
)
TOKEN = r"\w|\\(?:pi|theta|alpha|beta|gamma|delta|epsilon|lambda|mu|rho|sigma|tau|phi|varphi|omega)(?![A-Za-z])\s*"
TEXT_STYLE = r"text(?:bf|it|rm|normal|tt|sf|sc)?|mbox|hbox"
MATH_STYLE = r"math(?:rm|bf|it|sf|tt|normal)|operatorname\*?|bm|boldsymbol"
STYLED = re.compile(
    rf"(?:\\?\$|\\[(\[]|\s)*\\(?:(?P<text>{TEXT_STYLE})|{MATH_STYLE})\s*(?P<inside>\{{.*\}})(?:\$|\\[)\]]|\s)*",
    re.DOTALL,
)
RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"√\s*(\d+(?:\.\d+)?)", r"\\sqrt{\1}"),  # √16 is the root of 16; in TeX, \sqrt16 is the root of 1
        (r"√", r"\\sqrt"),
        (r"\\\\(?=\s*[a-zA-Z])(?![^&]*\\end)", r"\\"),  # \\frac, escaped once too often
        (r"\\\\\s*\[[^\]]*(?:pt|em|ex)\]", r"\\\\ "),  # space between the rows of a matrix
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\.?", ""),
        (r"\\(?:displaystyle|textstyle|limits|nolimits|mathstrut|strut)(?![A-Za-z])", ""),
        (r"(?<!\\)\\!\s*|(?<!\\)\\,|\\(?:thinspace|negthinspace)(?![A-Za-z])", ""),
        (r"(?<!\\)\\[;: >]|\\q?quad(?![A-Za-z])|\\(?:hspace|phantom)\{[^}]*\}", " "),
        (r"(?<!\\)\\[()\[\]]|\\?\$|\\?[€£¥]", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"(\d*\.\d*?)(\d{1,6}?)\2{2,}(?:\.\.\.|\\[lc]?dots)", r"\1\\overline{\2}"),  # 0.333...
        (r"\\(?:l|r)?dots(?:[bcmo])?(?![A-Za-z])|\\ldots", r"\\ldots "),
        (rf"\\(?:{TEXT_STYLE}|{MATH_STYLE})\s*(?=\{{)", r"\\text"),
        (r"\\(?:rm|bf|it)(?![A-Za-z])", ""),
        (
            r"(?<![\d}])(?<![\d}] )\\text\{([A-Za-z])\}|\\text\{([eid])\}",
            r"\1\2",
        ),  # a variable or a choice; behind a number, a unit
        (r"\\text\{((?:[\d.,\s+\-/]|\\?%)*)\}", r"\1"),
        (r"\\text\{\s*(\d[\d.,]*)\s+([A-Za-z]{3,})\.?\s*\}", r"\1 \\text{\2}"),  # 18 dollars
        (r"(\\text\{\s*)?(?:\\?%|\b(?:percent(?:age)?|pct)\b)(?(1)\s*\})", "%"),
        (r"[,;]?\s*(?:\\text\{\s*[,;]?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s*", ", "),
        (r"\{\s*([.,])\s*\}", r"\1"),
        (
            r"\^\s*(\{)?\s*\\(?:circ|degree)(?(1)\s*\})|\\degree(?![A-Za-z])|\s*(\\text\{\s*)?\bdegrees?\b(?!\s*(?:[CF]|Celsius|Fahrenheit))(?(2)\s*\})",
            r"^\\circ ",
        ),
        (r"\\(?:leqslant|leq)(?![A-Za-z])|<=", r"\\le "),
        (r"\\(?:geqslant|geq)(?![A-Za-z])|>=", r"\\ge "),
        (r"\\(?:ne|not\s*=)(?![A-Za-z])|!=", r"\\neq "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\lbrack(?![A-Za-z])", "["),
        (r"\\rbrack(?![A-Za-z])", "]"),
        (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\approxeq|\\simeq|\\doteq|~=", r"\\approx "),
        (r"\\(?:land|wedge)(?![A-Za-z])", ","),
        (r"\*\*", "^"),
        (r"\\(?:l|r)?vert(?![A-Za-z])", "|"),
        (
            r"(?<![\\A-Za-z])(sqrt|pi|sin|cos|tan|cot|sec|csc|log|ln|infty|arcsin|arccos|arctan|theta|alpha|beta)(?![A-Za-z])",
            r"\\\1 ",
        ),
        (r"(?<![\\A-Za-z])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty "),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\sqrt\s*(\d|[a-zA-Z])", r"\\sqrt{\1}"),
        (rf"\\frac(?![A-Za-z])\s*({TOKEN})", r"\\frac{\1}"),
        (rf"(\\frac\s*\{{[^{{}}]*\}})\s*({TOKEN})", r"\1{\2}"),
        (r"\\frac\s+", r"\\frac"),
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),
        (r"\{\s*(\w+)\s*\\choose\s*(\w+)\s*\}", r"\\binom{\1}{\2}"),
        (r"(?i)(?:(?<=:\d\d)\s*|(?<=\d)\s+|(?<=\d)(?=\\))(\\text\{\s*)?a\.?m\b\.?(?(1)\s*\})", " am"),
        (r"(?i)(?:(?<=:\d\d)\s*|(?<=\d)\s+|(?<=\d)(?=\\))(\\text\{\s*)?p\.?m\b\.?(?(1)\s*\})", " pm"),
        (r"\s+", " "),
        (r"^\s*\\\{\s*[a-zA-Z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?:\\mid|:|\|)\s*(.+?)\s*\\\}\s*\.?\s*$", r"\1"),
        (r"^\s*(?:[a-z]\s*\\in\s*)?\\mathbb\s*\{?R\}?\s*$", r"(-\\infty,\\infty)"),
    )
]
WRAPPERS = {"{": "}", "(": ")"}


def normalize_latex(text: str) -> str:
    """Returns the text in one way of writing.  "$\\left(\\dfrac12,\\, 3\\right)$." -> "(\\frac{1}{2},3)" """
    for pattern, replacement, letters in SCRIPTS:  # 10⁻³ has one exponent
        text = pattern.sub(replacement, text).translate(letters)
    text = re.sub(r"\d", lambda digit: str(int(digit[0])), text.translate(SIGNS))  # of any script
    text = drop_style(trim(text))  # before the rules, for which ** is a power
    for pattern, replacement in RULES:
        text = pattern.sub(replacement, text)
    return unwrap(trim(text))


def trim(text: str) -> str:
    """Removes blanks and the punctuation of the sentence around the text."""
    before = None
    while before != text:
        before, text = text, text.strip().strip("`").rstrip("\\,;:").strip()
        if text.startswith("**") and text.endswith("**"):
            text = text[2:-2]
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1]
    return text


def drop_style(text: str) -> str:
    """Removes a font command around the whole text, unless the text is words.  "\\mathbf{x=5}" -> "x=5" """
    while (match := STYLED.fullmatch(text)) and closing_index(match["inside"], 0) == len(match["inside"]) - 1:
        inside = match["inside"][1:-1].strip()
        words = re.search(r"(?<![\\A-Za-z])[A-Za-z]{3}", inside) if match["text"] else None
        if words or not re.search(r"[\d\\]", inside):
            break
        text = inside
    return text


def unwrap(text: str) -> str:
    """Removes braces or parentheses around the whole text, unless they hold several parts.  "(5)" -> "5" """
    while len(text) > 1 and WRAPPERS.get(text[0]) == text[-1] and closing_index(text, 0) == len(text) - 1:
        inner = text[1:-1].strip()
        if not inner or (text[0] == "(" and len(split_top_level(inner, ",;")) > 1):
            break
        text = inner
    return text


def closing_index(text: str, start: int) -> int:
    """Returns where the bracket at `start` closes, or -1. `[0, 1)` closes: half-open intervals are written so."""
    depth = 0
    for i in range(start, len(text)):
        depth += text[i] in "([{"
        depth -= text[i] in ")]}"
        if depth == 0:
            return i
    return -1


def split_top_level(text: str, separators: str) -> list[str]:
    """Splits the text at separators outside all brackets.  "1,(2,3)" -> "1", "(2,3)" """
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += char in "([{"
        depth -= char in ")]}"
        if depth == 0 and char in separators:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()]


def comparison_key(text: str) -> str:
    """Returns a key that is equal for texts that differ only in blanks, articles or case.

    "\\text{No  solution}" -> "nosolution"
    """
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"([_^])\{(\w)\}", r"\1\2", text)
    text = re.sub(r"^(?:an?|the)\s+(?=[A-Za-z]{3})", "", text.strip(), flags=re.IGNORECASE)
    bare = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)  # "2 3" is not 23
    return bare.lower() if re.search(r"(?<![\\A-Za-z])[A-Za-z]{3,}", text) or bare.lower() in ("no", "yes") else bare
