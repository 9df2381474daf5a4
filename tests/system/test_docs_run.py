"""Commands of the pages, run as they stand there, in a folder that has what the pages show.

In the suite those that start no Ray; `make docs` runs the others too, with fewer and smaller steps. Only what needs a GPU, or a
model of the hub, is left out. Data sets of the hub are folders here, which have their names, their form, and a few rows.
"""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typed
from click.testing import CliRunner
from clusters import Cluster
from docs import lay_out
from killing import ROOT, tidy
from published import all_of_them
from tiny_gguf import make_tensors, write_gguf
from tiny_multimodal import FAMILIES, save_whole
from typed import Typed

from launch.tools.cli import commands as rlsys

COMMANDS = typed.typed_commands()
STARTS_RAY = ("train ", "eval ", "check ", "doctor ", "bench ")
COSTS = {"step_s": 0.01, "sequence_s": 1e-4, "prompt_s": 1e-6, "score_s": 1e-5, "update_s": 1e-4, "sync_s": 0.5}
SIMULATED = ["trainer.prompts_per_step=4", "policy.tokens_per_pack=16384", "cluster.device=gpu"]
SIMULATED += ["model.path=Qwen/Qwen2.5-0.5B"]  # the tiny model's window is 64 tokens
MORE = {
    "track runs/a": ["tracking.to=tensorboard"],  # that run had none
    "plan configs/tiny_cpu.yaml --simulate runs/demo --gpus 64": SIMULATED,
}
SMALL = ["trainer.steps=2", "trainer.prompts_per_step=4", "eval.every=2"]
FROM_THE_HUB = "import hf:"
SHOWS_A_PAGE = re.compile("^watch|--open")
SERVES = "serve "
ALL = pytest.mark.skipif("RLSYS_ALL_DOCS" not in os.environ, reason="make docs runs it")


def each(which: Callable[[Typed], object]) -> pytest.MarkDecorator:
    commands = sorted((t for t in COMMANDS if which(t)), key=lambda t: t.text)
    assert commands
    return pytest.mark.parametrize("typed_command", [pytest.param(t, id=f"{t.where} {t.text}") for t in commands])


@pytest.fixture(scope="module")
def place(undisturbed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder to type in; `home` in it is one's own."""
    folder = lay_out(tmp_path_factory.mktemp("typed"))
    for name in {m for t in COMMANDS for m in re.findall(r"runs/(\w+)", t.text)}:
        shutil.copytree(undisturbed, folder / "runs" / name)
    shutil.copy(undisturbed / "samples" / "eval-000010.parquet", folder / "after.parquet")
    all_of_them(folder, folder / "home")
    write_gguf(folder / "model.gguf", make_tensors())
    text, vision, _ = FAMILIES["gemma3"]
    save_whole("gemma3", folder / "models" / "gemma-3-4b-it", text, vision)
    shutil.copy(ROOT / "LICENSE", folder)
    return folder


@each(
    lambda t: (
        not t.at_cluster
        and not t.text.startswith((*STARTS_RAY, FROM_THE_HUB, SERVES))
        and not SHOWS_A_PAGE.search(t.text)
    )
)
def test_it_does_what_it_says(typed_command: Typed, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    (place / "figures.json").write_text(json.dumps(COSTS))
    more = [word for begin, words in MORE.items() if typed_command.text.startswith(begin) for word in words]
    more = [word for word in more if word.partition("=")[0] not in typed_command.text]
    home = {
        "HOME": str(place / "home"),
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
    }
    done = CliRunner().invoke(rlsys, [*typed_command.words, *more], env={"COLUMNS": "100"} | home)
    assert done.exit_code == 0, f"{typed_command.where}: {done.output}\n{done.exception!r}"
    assert done.output


@each(lambda t: SHOWS_A_PAGE.search(t.text))
def test_a_page_is_shown(typed_command: Typed, place: Path, environment: dict[str, str]) -> None:
    """`watch` serves it until Ctrl-C; `--open` hands it to a browser."""
    browser, opened = place / "browser", place / "shown"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(browser.stat().st_mode | stat.S_IXUSR)
    opened.unlink(missing_ok=True)
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment |= {"PYTHONPATH": str(ROOT), "BROWSER": str(browser), "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    process = subprocess.Popen(
        [sys.executable, "-m", "launch", *typed_command.words], cwd=place, env=environment, **pipe
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    try:
        if typed_command.name == "watch":
            with urllib.request.urlopen(re.search(r"http://\S+", first)[0], timeout=30) as answer:
                assert b"<html" in answer.read()
            process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert process.returncode == 0, f"{typed_command.where}: {first}{rest}"
    if "--open" in typed_command.words:
        page = Path(opened.read_text().strip().removeprefix("file://"))
        assert "<html" in page.read_text()


@ALL
@each(lambda t: not t.at_cluster and t.text.startswith(STARTS_RAY))
def test_it_does_what_it_says_with_ray(typed_command: Typed, place: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "launch", *typed_command.words, *(SMALL if typed_command.name == "train" else [])]
    if typed_command.name == "train":  # into a folder of its own, where a run was put for others
        names = re.findall(r"run\.dir=(\S+)", typed_command.text) or ["runs/tiny_cpu"]
        shutil.rmtree(place / names[0], ignore_errors=True)
    environment |= {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, f"{typed_command.where}: {done.stdout}{done.stderr}"


class Shell:
    """Where a cluster is at hand, and its job server's address is in the environment."""

    def __init__(self, cluster: Cluster, place: Path):
        self.cluster, self.place = cluster, place
        self.environment = cluster.environment | {"RAY_API_SERVER_ADDRESS": cluster.url}

    def __call__(self, *words: str) -> str:
        """What a command says that does what it should."""
        done = subprocess.run(words, cwd=self.place, env=self.environment, capture_output=True, text=True, timeout=580)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def resolve(self, word: str) -> str:
        """The cluster's own for the addresses that the pages have."""
        word = re.sub(r"^(http://(HEAD|127\.0\.0\.1):(8265|PORT)|URL)$", self.cluster.url, word)
        word = re.sub(r"^HEAD:6379$", f"{self.cluster.head}:{self.cluster.port}", word)
        return word.replace("/shared", str(self.place / "shared"))


@pytest.fixture(scope="module")
def shell(place: Path) -> Iterator[Shell]:
    with tidy() as environment:
        cluster = Cluster(environment)
        try:
            yield Shell(cluster.start(cpus=4), place)
        finally:
            cluster.end()


@ALL
@each(lambda t: t.at_cluster and t.name != "job")
def test_it_does_what_it_says_at_a_cluster(typed_command: Typed, shell: Shell, tmp_path: Path) -> None:
    given = [shell.resolve(word) for word in typed_command.words]
    run = [*SMALL, *([] if "run.dir" in typed_command.text else [f"run.dir={tmp_path}/run"])]
    if typed_command.name == "ray":  # what it names is on the cluster
        given = [str(shell.place / typed.STANDS_FOR[w]) if w == "CONFIG" else w for w in given if w != "..."]
        assert "succeeded" in shell(*given, *run)
    elif typed_command.name == "submit":
        assert "is done" in shell("rlsys", *given, *run)
    elif typed_command.name == "plan":
        assert shell.cluster.head in shell("rlsys", *given)
    else:
        shell("env", *given)  # says so if there are none


@ALL
def test_a_job_is_looked_at_stopped_and_followed_to_its_end(shell: Shell) -> None:
    run = ["trainer.steps=9000", f"run.dir={shell.place}/shared/job"]
    shell("rlsys", "submit", "configs/tiny_cpu.yaml", *run, "--id", "ID", "--no-wait")
    job_commands = sorted(
        (t for t in COMMANDS if t.name == "job"), key=lambda t: ("--follow" in t.words, "stop" in t.words)
    )
    assert [t.words[1] for t in job_commands] == ["list", "status", "logs", "stop", "logs"]
    for command in job_commands:
        assert shell("rlsys", *(shell.resolve(word) for word in command.words))


@ALL
@each(lambda t: t.text.startswith(SERVES))
def test_a_checkpoint_is_served_until_ctrl_c(typed_command: Typed, place: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "launch", *typed_command.words, "--port", "0"]
    environment |= {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=place, env=environment, **pipe) as process:
        assert process.stdout is not None
        output = ""
        while not (address := re.search(r"ANTHROPIC_BASE_URL=(\S+)", output)):
            line = process.stdout.readline()
            assert line, output
            output += line
        with urllib.request.urlopen(f"{address[1]}/health", timeout=30) as answer:
            assert json.load(answer) == {"requests": 0}
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=60)[0]
    assert "Traceback" not in rest
