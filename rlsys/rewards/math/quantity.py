"""Parses numbers as people write them, exactly, and the units behind them."""

import re
from fractions import Fraction

DECIMAL = r"(?:[1-9]\d{0,2}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?"
SIGN = r"(?P<sign>[-+]?)\s*"
FORMS = [
    re.compile(SIGN + form)
    for form in (
        rf"(?P<number>{DECIMAL})",
        r"(?P<number>\d{1,3}(?: \d{3})+)",  # 1 000 000
        r"(?P<number>\d*\.\d*)(?:\\overline\{?|\\bar\{?|\\dot\{?|\()(?P<repeat>\d+)[})]?",
        r"(?:(?P<whole>\d+)\s*)?\\frac\{\s*(?P<neg>-?)(?P<over>\d+)\s*\}\{\s*(?P<under>\d+)\s*\}",
        r"(?:(?P<whole>\d+)(?:\s+|\s*\+\s*|-(?=\d+/)))?(?P<over>\d+)\s*/\s*(?P<under>\d+)",
        rf"(?P<number>{DECIMAL})\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{{?\s*(?P<power>[-+]?\s*\d{{1,3}})\s*\}}?",
        rf"(?P<number>{DECIMAL})[eE](?P<power>[-+]?\d{{1,3}})",
        r"(?:10)\s*\^\s*\{?\s*(?P<power>[-+]?\s*\d{1,3})\s*\}?",
        rf"(?P<number>{DECIMAL})\s*(?:\\text\{{\s*)?(?P<scale>hundred|thousand|million|billion|trillion)\s*\}}?",
    )
]
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
MAX_DIGITS = 400  # a longer number is compared as a text
UNITS = {
    name: unit
    for unit, names in {
        "mm": "mm millimeter millimetre",
        "cm": "cm centimeter centimetre",
        "m": "m meter metre",
        "km": "km kilometer kilometre",
        "in": "in inch inche",
        "ft": "ft foot feet",
        "yd": "yd yard",
        "mi": "mi mile",
        "mg": "mg milligram",
        "g": "g gram",
        "kg": "kg kilogram",
        "lb": "lb lbs pound",
        "oz": "oz ounce",
        "ml": "ml mL milliliter millilitre",
        "l": "l L liter litre",
        "s": "s sec second",
        "min": "min minute",
        "h": "h hr hour",
        "day": "day",
        "week": "week",
        "month": "month",
        "year": "year yr",
        "dollar": "dollar USD usd",
        "cent": "cent",
        "mph": "mph",
        "kmh": "kmh kmph km/h",
        "m/s": "m/s",
        "cm/s": "cm/s",
        "rad": "rad radian",
        "N": "N newton",
        "J": "J joule",
        "W": "W watt",
        "V": "V volt",
        "K": "K kelvin",
        "Hz": "Hz hertz",
    }.items()
    for name in names.split()
}
# Words that are not units.
FUNCTIONS = set("sin cos tan cot sec csc log exp mod max min gcd lcm det for all any".split())  # noqa: SIM905
LETTER = r"[^\W\d_]"  # of any script
GLYPH = r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"  # of a script that puts no blank before a unit
SCALED = re.compile("[十百千万萬億亿兆半割成百천만억반]|тыс|мил")  # 3万 is not 3
IN_TEXT = re.compile(r"(?P<core>.+?)\s*\\text\{(?P<unit>[^{}]*)\}\s*(?:\^\s*\{?(?P<power>\d)\}?)?")
IN_LETTERS = re.compile(
    r"(?P<core>[-+]?(?:[\d.,/ +]|\\frac\{\d+\}\{\d+\}|\\sqrt\{\d+\}|\\pi)*(?:[\d}]|i(?![a-z])))(?P<gap>\s*)"
    rf"(?P<unit>{LETTER}(?:{LETTER}|[ .'/-])*?)\s*(?:\^\s*\{{?(?P<power>\d)\}}?)?"
)


def parse_number(text: str) -> Fraction | None:
    """Returns the exact value of a number that stands alone.

    "1{,}234.5", "-\\frac{2}{3}", "1 1/2", "0.\\overline{3}", "3 \\times 10^{-2}"
    """
    if len(text) > MAX_DIGITS:
        return None
    for form in FORMS:
        if (match := form.fullmatch(text)) and (value := _value(match.groupdict(""))) is not None:
            return value
    return None


def _value(groups: dict[str, str]) -> Fraction | None:
    """Returns the value of a match of one of the `FORMS`, or None where it is none, such as 1/0 or 1 3/2."""
    sign = -1 if (groups["sign"] == "-") != (groups.get("neg") == "-") else 1
    if denominator := groups.get("under"):
        whole, over, under = groups["whole"], int(groups["over"]), int(denominator)
        if under == 0 or (whole and (groups.get("neg") or over >= under)):
            return None
        return sign * (int(whole or 0) + Fraction(over, under))
    digits = groups.get("number", "1").replace(",", "").replace(" ", "")
    if not digits.strip("."):
        return None
    value = Fraction(digits.rstrip("."))
    if repeat := groups.get("repeat"):
        places = len(digits.partition(".")[2])
        value += Fraction(int(repeat), (10 ** len(repeat) - 1) * 10**places)
    power = int(groups.get("power", "").replace(" ", "") or 0) + SCALES.get(groups.get("scale", ""), 0)
    return sign * value * Fraction(10) ** power


def split_unit(text: str) -> tuple[str, str]:
    """Splits a measured value from its unit.

    "5\\text{ cm}^2" -> "5", "cm^2";  "12 apples" -> "12", "apple";  "3x" -> "3x", ""
    """
    if (match := IN_TEXT.fullmatch(text)) and re.search(r"[\d\\]|^[a-zA-Z]$", match["core"]):
        name = match["unit"].strip()
        if name in SCALES or re.search(r"\d(?!$)|\b(?:or|and)\b", name):
            return text, ""
        return match["core"], _normalize_unit(name, match["power"])
    if match := IN_LETTERS.fullmatch(text):
        name = match["unit"].strip(" .")
        words = set(name.split())
        is_known = _normalize_unit(name, None) in UNITS.values() and (len(name) > 1 or bool(match["gap"]))
        is_word = re.match(rf"{LETTER}{{3}}|{GLYPH}" if match["gap"] else GLYPH, name) and not FUNCTIONS & words
        if (is_known or is_word) and not words & set(SCALES) and not SCALED.search(name):
            return match["core"].strip(), _normalize_unit(name, match["power"])
    return text, ""


def _normalize_unit(name: str, power: str | None) -> str:
    """Returns one name for a unit.  "square meters" -> "m^2";  "apples" -> "apple" """
    match = re.fullmatch(r"(?:(sq|square|cubic|cu)\b\.?\s*)?(.*?)\.?", name)
    assert match is not None, name
    kind, name = match.groups()
    power = {"sq": "2", "square": "2", "cubic": "3", "cu": "3"}.get(kind or "", power or "")
    singular = name.removesuffix("s")
    base = UNITS.get(name) or UNITS.get(singular) or UNITS.get(name.lower().removesuffix("s")) or singular
    return f"{base}^{power}" if power and power != "1" else base


def units_differ(one: str, other: str) -> bool:
    """True if two known units differ. An unknown one, such as apples, counts as a word of the sentence."""
    known = set(UNITS.values())
    return one != other and one.partition("^")[0] in known and other.partition("^")[0] in known
