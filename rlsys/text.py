"""Words of data, models and libraries, as a terminal may have them."""

CONTROL_ESCAPES = {n: f"\\x{n:02x}" for n in (*range(32), *range(127, 160)) if chr(n) not in "\t\n"}


def escape_control_chars(text: str) -> str:
    r"""With what a terminal would obey spelt out: one that clears the screen is shown as `\x1b[2J`."""
    return text.translate(CONTROL_ESCAPES)


def replace_surrogates(text: str) -> str:
    """Half of a surrogate pair, which no file can hold, becomes a question mark."""
    return text.encode(errors="replace").decode()
