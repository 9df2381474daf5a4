"""The reward `format`: whether a completion consists of the requested tags."""

import re

from rlsys.errors import ConfigError


def format(completion: str, *, think: str = "think", answer: str = "answer", opened: bool = False) -> float:
    """1 if the completion is <think>…</think> and then <answer>…</answer>, each once, with only blanks outside.

    `opened`: the prompt already ends in <think>, so the completion must not open it again. `answer: ""`: the text after
    </think> needs no tags, but must not be blank.
    """
    text = f"<{think}>{completion}" if opened else completion
    tags = [f"<{think}>", f"</{think}>"] + ([f"<{answer}>", f"</{answer}>"] if answer else [])
    if any(text.count(tag) != 1 for tag in tags):
        return 0.0
    parts = [r"\s*", r".*", r"\s*", r".*", r"\s*"] if answer else [r"\s*", r".*", r"\s*\S.*"]
    pattern = parts[0] + "".join(re.escape(tag) + part for tag, part in zip(tags, parts[1:], strict=True))
    return float(re.fullmatch(pattern, text, re.DOTALL) is not None)


def check_format(options: dict[str, object]) -> None:
    for name in ("think", "answer"):
        tag = options.get(name, name)
        if not isinstance(tag, str) or not re.fullmatch(r"[\w|:.-]+" if name == "think" else r"[\w|:.-]*", tag):
            raise ConfigError(f"`{name}` is {tag!r}; it is the name of a tag without its brackets, such as {name}.")
