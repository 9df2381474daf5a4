"""Commands of the pages, and what one would type for them in a folder that has what the pages show."""

import re
import sys
from dataclasses import dataclass

from killing import ROOT

sys.path.insert(0, str(ROOT / "tests" / "launch"))
from docs import PAGES, commands, words

NEEDS_GPU = re.compile(r"cluster\.device=gpu")
AT_CLUSTER = re.compile(r"--address|ray job submit|job logs")
STANDS_FOR = {
    "A": "runs/a",
    "B": "runs/b",
    "CONFIG": "configs/tiny_cpu.yaml",
    "COSTS": "figures.json",
    "RUN": "runs/a",
    "RUN2": "runs/b",
    "SOURCE": "runs/a",
    "TARGET": "runs/a",
    "WEIGHT": "1",
}
OF_COMMAND = {
    ("validate", "FILE"): "configs/tiny_cpu.yaml",
    ("trace", "FILE"): "trace.json",
    ("export", "TARGET"): "exported",
    ("rescore", "NAME"): "zigzag",
    ("init", "NAME"): "builtin:tiny",
    ("init", "DATA"): "builtin:zigzag",
    ("init", "N"): "0",
    ("convert", "NAME"): "gsm8k",
    ("convert", "SOURCE"): "openai/gsm8k",
    ("convert", "OUT"): "converted.jsonl",
    ("bench", "60,128"): "20,40",  # the tiny model's window is 64 tokens
    ("plan", "60,128"): "20,40",
    ("bench", "256"): "16",
    ("bench", "64"): "32",
}


@dataclass(frozen=True)
class Typed:
    """Typed("README.md:126", ("plan", "configs/tiny_cpu.yaml"))"""

    where: str
    words: tuple[str, ...]  # after `rlsys`; of other commands all

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def name(self) -> str:
        return self.words[0]

    @property
    def at_cluster(self) -> bool:
        return bool(AT_CLUSTER.search(self.text))


def typed(command: list[str]) -> list[tuple[str, ...]]:
    """None for what is only named; several for one|other."""
    name, *rest = command
    if rest in (["--simulate"], ["--json"], ["--out"], ["stop"]) or (not rest and name != "doctor"):
        return []
    if rest and "|" in rest[0]:  # [ID] goes with all but the first
        one, *others = ([name, word, *rest[1:]] for word in rest[0].split("|"))
        return [*typed([w for w in one if w != "[ID]"]), *(t for other in others for t in typed(other))]
    given = [w for w in rest if not re.fullmatch(r"\[[A-Z=]+\]\.\.\.|\.\.\.|…", w)]
    given = [re.sub(r"[\[\]]", "", w) for w in given]  # what may be left out is said

    def resolve(word: str) -> str:
        return re.sub(r"\b[A-Z][A-Z0-9]*\b", lambda m: OF_COMMAND.get((name, m[0]), STANDS_FOR.get(m[0], m[0])), word)

    given = [OF_COMMAND.get((name, w), w) for w in given]
    return [(name, *(w if "/" in w or w.startswith("--") else resolve(w) for w in given))]


def typed_commands() -> list[Typed]:
    """Each once, where it stands first."""
    first: dict[tuple[str, ...], str] = {}
    for page in PAGES:
        for where, text in commands(page):
            if text.startswith("make "):
                continue
            command = words(text)
            for run in typed(command[1:]) if command[0] == "rlsys" else [tuple(command)]:
                if not NEEDS_GPU.search(text):
                    first.setdefault(run, where)
    return [Typed(where, run) for run, where in first.items()]
