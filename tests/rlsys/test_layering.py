"""Imports go down only: launch → workers → rlsys, and rlsys knows no cluster."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def files(package: str) -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / package).rglob("*.py"))


def imported(file: str) -> set[str]:
    """Top-level names of everything a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").split(".")[0])
    return found


def loaded(code: str) -> set[str]:
    """What a fresh interpreter has imported after `code`."""
    code += "\nimport sys; print('MODULES', *sorted(m for m in sys.modules if '.' not in m))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return set(out.rpartition("MODULES")[2].split())


def test_the_check_sees_imports_inside_functions():
    assert "pyarrow" in imported("rlsys/data/store.py")


@pytest.mark.parametrize("file", files("rlsys"))
def test_the_algorithm_knows_no_cluster(file):
    assert not imported(file) & {"ray", "vllm", "deepspeed", "workers", "launch"}


@pytest.mark.parametrize("file", files("workers"))
def test_workers_know_nothing_of_who_starts_them(file):
    assert "launch" not in imported(file)


def test_the_command_line_is_light_until_the_configuration_is_known_to_be_good():
    heavy = {"torch", "ray", "vllm", "deepspeed", "transformers"}
    assert not loaded("import launch.cli") & heavy
    validate = (
        "from launch.cli import commands; "
        "commands.main(['validate', 'configs/tiny_cpu.yaml'], standalone_mode=False); "
        "commands.main(['validate', '--options'], standalone_mode=False)"
    )
    found = loaded(validate)
    assert not found & heavy
    assert "omegaconf" in found, "the configuration was read"


def test_the_types_and_the_configuration_load_no_model_library():
    assert not loaded("import rlsys.config_load, rlsys.types, rlsys.data, rlsys.rewards") & {"torch", "transformers"}
