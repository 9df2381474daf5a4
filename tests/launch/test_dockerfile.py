"""docker/Dockerfile as far as it can be read; `make image` runs its steps."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docker" / "Dockerfile").read_text()


def stage(name: str) -> list[str]:
    """Its steps, one to a line."""
    steps = re.sub(r"\\\n", " ", "\n".join(x for x in TEXT.splitlines() if not x.startswith("#")))
    return steps[steps.index(f" AS {name}\n") :].partition("\nFROM ")[0].splitlines()[1:]


def test_hadolint_finds_nothing_that_we_did_not_choose() -> None:
    """We chose Debian's packages of the day, because its archive keeps no others, and a user with a name."""
    linter = [
        Path(sys.executable).parent / "hadolint",
        "--ignore=DL3008",
        "--ignore=DL3066",
        ROOT / "docker" / "Dockerfile",
    ]
    done = subprocess.run(linter, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_base_image_has_a_full_version() -> None:
    bases = re.findall(r"^FROM (\S+) AS \S+$", TEXT, re.M)
    assert len(bases) == TEXT.count("\nFROM ") == 3
    assert all(re.search(r":\d+\.\d+\.\d+-", base) for base in bases)


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_an_image_runs_as_a_user_and_is_asked_for_its_health(name: str) -> None:
    steps = stage(name)
    assert "USER rlsys" in steps
    assert not [s for s in steps if s.startswith("USER ") and s != "USER rlsys"]
    [health] = [s for s in steps if s.startswith("HEALTHCHECK ")]
    assert (ROOT / health.split()[-1].strip('"]')).is_file()
    assert [s for s in steps if s][-1] == 'CMD ["rlsys", "--help"]'


@pytest.mark.parametrize("name", ["build-cpu", "gpu"])
def test_what_is_installed_is_what_the_makefile_installs(name: str) -> None:
    [packages, command] = re.findall(r"make \w+ PROFILE=\w+ EXTRAS=\w+", "\n".join(stage(name)))
    assert packages == command.replace("install", "packages")
    done = subprocess.run([*command.split(), "--dry-run", "VENV=none"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    profile = name.removeprefix("build-")
    assert f"-c docker/constraints-{profile}.txt -r pyproject.toml --extra {profile}\n" in done.stdout


@pytest.mark.parametrize("name", ["build-cpu", "gpu"])
def test_packages_are_installed_before_any_code_is_there(name: str, tmp_path: Path) -> None:
    steps = stage(name)
    before = steps[: next(i for i, step in enumerate(steps) if "make packages" in step)]
    copied = [step.split() for step in before if step.startswith("COPY ")]
    for *sources, target in ([word for word in words[1:] if not word.startswith("--")] for words in copied):
        (tmp_path / target).mkdir(exist_ok=True)
        for source in sources:
            shutil.copy(ROOT / source, tmp_path / target)
    command = ["make", "packages", f"PROFILE={name.removeprefix('build-')}", "--dry-run"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0
    assert not list(tmp_path.rglob("*.py"))


def test_tools_for_building_stay_out_of_the_image() -> None:
    installed = re.findall(r"--no-install-recommends ([\w+ -]+?) +&&", "\n".join(stage("cpu")))
    assert installed == ["libnuma1 wget"], "which vLLM's CPU kernels load, and KubeRay's probes call"
    assert {".git", ".venv", "runs"} <= set((ROOT / ".dockerignore").read_text().split())
