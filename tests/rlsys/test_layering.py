"""Imports go down only: launch → workers → rlsys. Between rooms they go one way, inside a room they make no circle, the core imports no tool,
and rlsys knows no cluster."""

import ast
import re
import subprocess
import sys
from collections import Counter, deque
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Every room, lowest first: a room imports only from rooms above it in this list. Files at the door of a package are rooms of their own.
ROOMS = {
    "rlsys": [
        *("errors", "types", "text", "seeds", "threads", "interfaces", "config", "tasks", "sandbox", "rewards"),
        *("data", "runs", "tracking", "algorithms", "batching", "forward", "models", "episodes"),
        *("sampling", "pipeline", "evaluation", "agreement", "updates"),
        *("metrics", "trainer", "checks"),
    ],
    "workers": [
        "fleet",
        "start",
        "processes",
        "sync",
        "cpu",
        "reward",
        "turns",
        "rollout",
        "frozen",
        "serve",
        "episodes",
        "learner",
    ],
    "launch": [
        *(
            "printing",
            "models",
            "roles",
            "bundles",
            "datasets",
            "placement",
            "ray_session",
            "cluster",
            "supervise",
            "train",
        ),
    ],
    "launch.tools": [
        *(
            "diagnosis",
            "analysis",
            "estimates",
            "fitting",
            "advice",
            "targets",
            "show_samples",
            "synthetic",
            "local_data",
        ),
        *(
            "validate",
            "check",
            "convert",
            "imports",
            "jobs",
            "track",
            "compare",
            "export",
            "evaluate",
            "serve",
            "rescore",
        ),
        *("report", "plan", "init", "doctor", "bench", "cli"),
    ],
}
# Rooms inside a room, lowest first; "" are the files at its door.
INSIDE = {"workers.learner": ["files", "proofs", ""]}
EVERYWHERE = {"errors", "types", "text", "seeds", "threads", "config"}  # the pages do not repeat them in every row
TYPING = ("TYPE_CHECKING", "typing.TYPE_CHECKING")
DOOR = "launch/__main__.py"  # `python -m launch` is the command line


def files(floor: str) -> list[str]:
    """The Python files of a floor. The tools are a floor of their own, above launch."""
    found = [str(p.relative_to(ROOT)) for p in (ROOT / floor.replace(".", "/")).rglob("*.py")]
    return sorted(file for file in found if file != DOOR and floor_of(module(file)) == floor)


def module(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def floor_of(name: str) -> str:
    return "launch.tools" if name.startswith("launch.tools") else name.split(".")[0]


def room(name: str) -> str:
    """ "rlsys.config.schema" -> "config" """
    return [*name.removeprefix(floor_of(name)).split("."), ""][1]


def imports(file: str, typing: bool = True) -> set[str]:
    """Full names of the modules a file imports, inside functions too. `typing`: also those that only type checkers import."""
    tree = ast.parse((ROOT / file).read_text())
    names, checked = set(), set[ast.AST]()
    if not typing:
        blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) in TYPING]
        checked = {node for block in blocks for line in block.body for node in ast.walk(line)}
    for node in ast.walk(tree):
        if node in checked:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            package = ROOT / node.module.replace(".", "/")
            inside = {a.name for a in node.names if (package / f"{a.name}.py").exists() or (package / a.name).is_dir()}
            names |= {f"{node.module}.{name}" for name in inside} | (
                {node.module} if len(inside) < len(node.names) else set()
            )
    return names


def imported(file: str) -> set[str]:
    """Top-level names of everything a file imports."""
    return {name.split(".")[0] for name in imports(file)}


def loaded(code: str) -> set[str]:
    """What a fresh interpreter has imported after `code`."""
    code += "\nimport sys; print('MODULES', *sorted(m for m in sys.modules if '.' not in m))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return set(out.rpartition("MODULES")[2].split())


def test_the_check_sees_imports_inside_functions():
    assert "pyarrow" in imported("rlsys/data/store.py")


@pytest.mark.parametrize("package", ROOMS)
def test_every_room_has_its_place_in_the_order(package):
    rooms = {room(module(file)) for file in files(package)} - {""}
    assert rooms == set(ROOMS[package])


@pytest.mark.parametrize("package", ROOMS)
def test_between_rooms_imports_go_one_way(package):
    order = {name: place for place, name in enumerate(ROOMS[package])}
    upward = [
        f"{file} imports {name}"
        for file in files(package)
        for name in imports(file)
        if floor_of(name) == package and room(module(file)) and order[room(name)] > order[room(module(file))]
    ]
    assert not upward


@pytest.mark.parametrize("outer", INSIDE)
def test_inside_a_room_imports_go_one_way(outer):
    paths = {file: file.removeprefix(f"{outer.replace('.', '/')}/").split("/") for file in files(floor_of(outer))}
    inner = {
        file: "" if len(path) == 1 else path[0] for file, path in paths.items() if module(file).startswith(f"{outer}.")
    }
    assert set(inner.values()) == set(INSIDE[outer])
    place = {module(file): INSIDE[outer].index(name) for file, name in inner.items()}
    assert [
        f"{file} imports {name}" for file in inner for name in imports(file) if place.get(name, 0) > place[module(file)]
    ] == []


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """A shortest circle for each module that is on one, without repeating those that an earlier one named."""
    found: list[list[str]] = []
    for start in sorted(graph):
        if any(start in circle for circle in found):
            continue
        paths, seen = deque([[start]]), set[str]()
        while paths and start not in seen:
            path = paths.popleft()
            for name in sorted(graph.get(path[-1], set()) - seen):
                seen.add(name)
                paths.append([*path, name])
        found += [path for path in paths if path[-1] == start]
    return found


def test_a_circle_is_found_by_its_shortest_way():
    graph = {"a": {"b", "d"}, "b": {"c"}, "c": {"a"}, "d": {"c", "e"}, "e": set(), "f": {"f"}, "g": {"a"}}
    assert cycles(graph) == [["a", "b", "c", "a"], ["d", "c", "a", "d"], ["f", "f"]]


def test_no_modules_import_each_other():
    """Inside functions neither: an import there hides a circle, and does not cut it. What only type checkers import may go both ways."""
    graph = {module(file): imports(file, typing=False) for package in ROOMS for file in files(package)}
    assert [" → ".join(circle) for circle in cycles(graph)] == []


@pytest.mark.parametrize("package", ["rlsys", "workers"])
def test_the_page_names_every_room_and_what_it_imports(package):
    table = (ROOT / package / "README.md").read_text().partition("|room|contents|imports|\n")[2].partition("\n\n")[0]
    rows = [row.strip("|").split("|") for row in table.splitlines()[1:]]
    names = [re.findall(r"`(\w+)/?`", first) for first, *_ in rows]
    assert [name for row in names for name in row] == ROOMS[package]
    for row, (*_, drawn) in zip(names, rows, strict=True):
        modules = {name for file in files(package) if room(module(file)) in row for name in imports(file)}
        used = {room(name) for name in modules if name.startswith(f"{package}.")} - {*row, *EVERYWHERE}
        assert set(re.findall(r"\w+", drawn)) == used, row


@pytest.mark.parametrize("floor", ROOMS)
def test_floors_import_only_floors_below(floor):
    """Training imports no tool: what a run asks of them is handed in."""
    above = list(ROOMS)[list(ROOMS).index(floor) + 1 :]
    assert [
        f"{file} imports {name}" for file in files(floor) for name in imports(file) if floor_of(name) in above
    ] == []


@pytest.mark.parametrize("file", files("rlsys"))
def test_the_algorithm_knows_no_cluster(file):
    assert not imported(file) & {"ray", "vllm", "deepspeed", "workers", "launch"}


@pytest.mark.parametrize("file", files("workers"))
def test_workers_reach_ray_through_one_file(file):
    assert "ray" not in imported(file) or file == "workers/fleet/ray_cluster.py"


def test_the_command_line_is_light_until_the_configuration_is_known_to_be_good():
    heavy = {"torch", "ray", "vllm", "deepspeed", "transformers"}
    assert not loaded("import launch.tools.cli") & heavy
    validate = (
        "from launch.tools.cli import commands; "
        "commands.main(['validate', 'configs/tiny_cpu.yaml'], standalone_mode=False); "
        "commands.main(['validate', '--options'], standalone_mode=False)"
    )
    modules = loaded(validate)
    assert not modules & heavy
    assert "omegaconf" in modules, "the configuration was read"


def test_the_types_and_the_configuration_load_no_model_library():
    assert not loaded("import rlsys.checks, rlsys.types, rlsys.data, rlsys.rewards") & {"torch", "transformers"}


@pytest.mark.parametrize("house", ["rlsys.sandbox", "rlsys.rewards.math"])
def test_some_rooms_have_one_door(house):
    """They could be packages of their own."""
    outside = [file for floor in ROOMS for file in files(floor) if not module(file).startswith(house)]
    inside = [f"{file} imports {name}" for file in outside for name in imports(file) if name.startswith(f"{house}.")]
    assert inside == []


def test_modules_that_tests_share_have_one_name_each():
    """They are all found by their plain names: of two with the same name, whichever folder comes first is imported."""
    shared = [path for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith(("test_", "conftest"))]
    names = Counter(path.name for path in shared)
    assert [str(path) for path in shared if names[path.name] > 1] == []
