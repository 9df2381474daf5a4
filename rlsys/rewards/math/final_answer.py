"""Finds the final answer in a text.

The last box that is not empty counts before everything else. Without a box, the answer is what follows `####` or "the
answer is", or else the last formula or number.
"""

import re

from rlsys.rewards.math.latex import normalize_latex, split_top_level, trim
from rlsys.rewards.math.quantity import GLYPH, LETTER, SCALED, SCALES, parse_number, split_unit

BOX = re.compile(r"\\(boxed|fbox|framebox)(?![A-Za-z])\s*")
WITHOUT_BRACES = re.compile(
    r"(?=[-+]?\d|[A-Za-z](?![A-Za-z])|\\[A-Za-z]{2})(?:\{(?:[^{}]|\{[^{}]*\})*\}|\([^()]*\)|[^\s$*<!{}()\]])+"
)
JOINED = re.compile(  # what may stand between two boxes of one answer; never backtracks
    r"(?>[ \t$,;}&]|\\[()\[\],;:! ]|\\q?quad|\\text\{\s*+|\b(?:and|or|maybe|perhaps|possibly)\b)*+"
)
FORMULA = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<!\\)\$([^$\n]+?)(?<!\\)\$", re.DOTALL)
ANNOUNCED = re.compile(  # in a sentence, or by a heading
    r"(?im)\banswer\b[^.:\n]{0,40}?(?:\bis\b|\bare\b|:|=)[\s:*]*|^#[^\n]*\banswer\**[ \t]*\n[\s*]*"
)
# Directly after a script without blanks; but 负5 (minus 5) is not 5, nor is 根号5 (root of 5).
BEHIND_GLYPH = rf"(?<={GLYPH})(?<![负負号スト])"
NUMBER = re.compile(
    rf"(?:(?<![\w.^√])|{BEHIND_GLYPH})(?:[-−]\s?)?[$€£]?(?:\d*√)?(?:\d[\d,]*\d|\d)?(?:\.\d+|(?<=\d)|\d)"
    r"(?:[⁻⁰¹²³⁴-⁹]+|\^\{?-?\d+\}?)?(?:\s\d+(?=/))?(?:\s?/\s?\d+)?"
    rf"(?:\s?(?:\\?%|percent|pct|(?:{'|'.join(SCALES)})\b|(?:{SCALED.pattern})\w*))?"
)
END = re.compile(  # of a sentence; in "5!." the ! is a factorial
    r"\.(?=\s|\*|$)|(?<=\d)!(?=\*\*|\s*(?:$|\n)|\s+[A-Z])|;|\*\*|\n|,?\s+(?:since|because|which|where)\b"
)
WORD = re.compile(  # ab + 2 has none
    rf"(?<![\\\w])(?:{LETTER}{{3,}}|{LETTER}{{2}}(?=(?:['’]{LETTER}+)?\s+[\w$\\]))|{GLYPH}"
)
# Words before an answer that do not change it; "twice 5" is not 5.
LEAD = re.compile(
    r"(?i)(?:(?:exactly|precisely|just|simply|only|about|approximately|roughly|therefore|thus|hence|so|then|indeed"
    rf"|it(?:['’]s)?|is|equal|to|of|total|the|an?(?=\s+{LETTER}{{2}}))(?:[,:]\s*|\s+)|{GLYPH}+{BEHIND_GLYPH}[:：,，]?\s*)+(?![-+*/^=<>]\s)"
)
# A word after an answer that does not change it; "5 or less" is not 5.
REMARK = re.compile(
    rf"(?<!\sor)(?<!\sand)(?<!\sthan)(?<!\sa)\s+\(?(?:(?:a|an|the|in|of|at|on|to|by|for)\s+)*(?!{SCALED.pattern}){LETTER}{{2,}}\)?$"
)
MAX_ANSWER_CHARS = 1000
MAX_BOXES = 50
MAX_REMARKS = 5  # words removed after an answer
TAIL_CHARS = 4000  # at the end of a text, where an answer without a box is searched


def final_answer(text: str, boxed_only: bool = False) -> str:
    """Returns the final answer as it is written, or nothing.

    "... so $x = \\boxed{\\frac{1}{2}}$." -> "\\frac{1}{2}"
    """
    answer = boxed_answer(text)
    if not answer and not boxed_only:
        answer = unboxed_answer(text.strip()[-TAIL_CHARS:])
    return answer if len(answer) <= MAX_ANSWER_CHARS else ""


def unboxed_answer(text: str) -> str:
    """Returns the final answer of a text without a box."""
    _, mark, after = text.rpartition("####")
    line, _, rest = after.strip().partition("\n")
    if mark and (_has_only_units(line) if re.search(r"\d", line) or rest else _count_words(line) <= 3):
        return line  # else it is a heading
    if tagged := re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL):
        return str(tagged[-1])
    if ANNOUNCED.search(text):
        return _announced_answer(text)
    return _stripped_answer(text) or _last_formula_or_number(text)


def _stripped_answer(text: str) -> str:
    """Returns the answer if the text holds hardly anything else, or nothing.  "so it is 5 cm in total" -> "5 cm" """
    text = trim(text.lstrip("# ").rstrip("。"))
    if len(text) > 200 or "\n" in text or FORMULA.search(text):
        return ""
    if not re.search(r"[\d\\]", text):
        return text if _count_words(text) <= 3 else ""
    if lead := LEAD.match(text):
        text = text[lead.end() :]
    for _ in range(MAX_REMARKS + 1):
        if _has_only_units(text):
            return text
        text = REMARK.sub("", text)
    return ""


def _has_only_units(text: str) -> bool:
    """True if the only words are units.  "x = 5 cm" """
    return len(text) <= MAX_ANSWER_CHARS and all(
        parse_number(part) is not None or not _count_words(split_unit(part)[0])
        for part in split_top_level(normalize_latex(text), ",;=")
    )


def _count_words(text: str) -> int:
    return len(WORD.findall(re.sub(r"\\[A-Za-z]+\{[^{}]*\}", "", text)))


def boxed_answer(text: str) -> str:
    """Returns the content of the last box. Boxes joined only by "and", "or" or a comma are one answer.

    A frame (`fbox`) counts if there is no `boxed`.
    """
    frames = list(BOX.finditer(text))
    matches = [match for match in frames if match[1] == "boxed"] or frames
    boxes = [box for box in (_box_content(text, match) for match in reversed(matches[-MAX_BOXES:])) if box[1]]
    if not boxes:
        return ""
    first, content, _ = boxes[0]
    parts = [content]
    for start, content, end in boxes[1:]:
        if end > first:  # it contains the box that was read
            continue
        if not JOINED.fullmatch(text, end, first):
            break
        first = start
        if content != parts[0]:
            parts.insert(0, content)
    return ", ".join(parts)


def _box_content(text: str, box: re.Match[str]) -> tuple[int, str, int]:
    """Returns start, content and end of one box. A box that never closes is empty."""
    start = box.end()
    if text[start : start + 1] != "{":
        token = WITHOUT_BRACES.match(text, start)
        return box.start(), token[0].rstrip("\\.,;:") if token else "", token.end() if token else start
    depth = 0
    # \{ is not a brace, and in \\{ the backslashes are a line break.
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return box.start(), text[start + 1 : brace.start()].strip(), brace.end()
    return box.start(), "", len(text)


def _announced_answer(text: str) -> str:
    """Returns what follows the last "answer is" or "Answer:", to the end of its sentence."""
    rest = text[list(ANNOUNCED.finditer(text))[-1].end() :]
    formulas = [(m.start(), m.end()) for m in FORMULA.finditer(rest)]
    ends = (m.start() for m in END.finditer(rest) if not any(a < m.start() < b for a, b in formulas))
    sentence = re.split(r"\b(?:is|are)\b", rest[: next(ends, len(rest))])[-1].strip("*\"'` ")
    unmarked = FORMULA.sub(_formula_content, sentence)
    return _stripped_answer(unmarked) or (unmarked if _count_words(unmarked) < 4 else _last_formula_or_number(sentence))


def _formula_content(formula: re.Match[str]) -> str:
    return str(next(filter(None, formula.groups())))


def _last_formula_or_number(text: str) -> str:
    """Returns the last formula or the last number, whichever comes later."""
    formulas, numbers = list(FORMULA.finditer(text)), list(NUMBER.finditer(text))
    if formulas and (not numbers or formulas[-1].end() >= numbers[-1].end()):
        return _formula_content(formulas[-1])
    return numbers[-1][0].strip() if numbers else ""
