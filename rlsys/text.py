"""Cleans text from data, models and libraries for terminals and files."""

CONTROL_ESCAPES = {n: f"\\x{n:02x}" for n in (*range(32), *range(127, 160)) if chr(n) not in "\t\n"}


def escape_control_chars(text: str) -> str:
    r"""Spells out characters that a terminal would obey: the sequence that clears the screen becomes `\x1b[2J`."""
    return text.translate(CONTROL_ESCAPES)


def replace_surrogates(text: str) -> str:
    """Replaces half of a surrogate pair, which UTF-8 cannot encode, by a question mark."""
    return text.encode(errors="replace").decode()
