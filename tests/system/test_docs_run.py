"""Commands of the pages, run as they stand there, in a folder that has what the pages show.

In the suite those that start no Ray; `make docs` runs the others too, with fewer and smaller steps. Left out is what needs
a hub, a GPU, a cluster elsewhere, or a browser.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from killing import ROOT

sys.path.insert(0, str(ROOT / "tests" / "launch"))
from docs import PAGES, commands, lay_out, words

from launch.cli import commands as rlsys

QUICK = {"validate", "plan", "init", "compare", "rescore", "report", "trace", "export", "track"}
SLOW = {"train", "eval", "check", "doctor", "bench"}
ELSEWHERE = re.compile(r"--address|--open|cluster\.device=gpu|Qwen/|openai/|--simulate RUN")
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
    ("bench", "60,128"): "20,40",  # the tiny model's window is 64 tokens
    ("bench", "256"): "16",
    ("bench", "64"): "32",
}
COSTS = {"step_s": 0.01, "sequence_s": 1e-4, "prompt_s": 1e-6, "score_s": 1e-5, "update_s": 1e-4, "sync_s": 0.5}
MORE = {
    "track runs/a": ["tracking.to=tensorboard"],  # that run had none
    "plan configs/tiny_cpu.yaml --simulate runs/demo --gpus 64": [
        "trainer.prompts_per_step=4",
        "policy.tokens_per_pack=16384",
        "cluster.device=gpu",
    ],
}
SMALL = ["trainer.steps=2", "trainer.prompts_per_step=4", "eval.every=2"]


def typed(said: list[str]) -> list[str] | None:
    """What one would type for it; None for what cannot be run here, or is only named."""
    name, *rest = said
    if not rest or rest[-1] in ("--simulate", "--json") or ELSEWHERE.search(" ".join(rest)) or name not in QUICK | SLOW:
        return None
    given = [w for w in rest if not re.fullmatch(r"\[[A-Z=]+\]\.\.\.|\.\.\.|…", w)]
    given = [re.sub(r"[\[\]]", "", w) for w in given]  # what may be left out is said

    def meant(word: str) -> str:
        return re.sub(r"\b[A-Z][A-Z0-9]*\b", lambda m: OF_COMMAND.get((name, m[0]), STANDS_FOR.get(m[0], m[0])), word)

    given = [OF_COMMAND.get((name, w), w) for w in given]
    return [name, *(w if "/" in w or w.startswith("--") else meant(w) for w in given)]


FOUND = {
    " ".join(run): (where, run)
    for page in reversed(PAGES)
    for where, text in commands(page)
    if "rlsys " in text and (run := typed(words(text[text.index("rlsys ") :])[1:]))
}


def of(names: set[str]) -> pytest.MarkDecorator:
    found = [pytest.param(*f, id=f"{f[0]} {text}") for text, f in sorted(FOUND.items()) if f[1][0] in names]
    return pytest.mark.parametrize(("where", "said"), found)


@pytest.fixture(scope="module")
def place(undisturbed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = lay_out(tmp_path_factory.mktemp("typed"))
    for name in {m for text in FOUND for m in re.findall(r"runs/(\w+)", text)}:
        shutil.copytree(undisturbed, folder / "runs" / name)
    shutil.copy(undisturbed / "samples" / "eval-000010.parquet", folder / "after.parquet")
    return folder


@of(QUICK)
def test_it_does_what_it_says(where: str, said: list[str], place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    (place / "figures.json").write_text(json.dumps(COSTS))
    more = [word for begin, words in MORE.items() if " ".join(said).startswith(begin) for word in words]
    more = [word for word in more if word.partition("=")[0] not in " ".join(said)]
    done = CliRunner().invoke(rlsys, [*said, *more], env={"COLUMNS": "100"})
    assert done.exit_code == 0, f"{where}: {done.output}\n{done.exception!r}"
    assert done.output


@pytest.mark.skipif("RLSYS_ALL_DOCS" not in os.environ, reason="make docs runs it")
@of(SLOW)
def test_it_does_what_it_says_with_ray(where: str, said: list[str], place: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "launch", *said, *(SMALL if said[0] == "train" else [])]
    if said[0] == "train":  # into a folder of its own, where a run was put for others
        names = re.findall(r"run\.dir=(\S+)", " ".join(said)) or ["runs/tiny_cpu"]
        shutil.rmtree(place / names[0], ignore_errors=True)
    environment |= {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, f"{where}: {done.stdout}{done.stderr}"
