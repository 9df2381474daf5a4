"""Functions that a user brings, named as `module:function` or `path/to/file.py:function`."""

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from rlsys.errors import ConfigError

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
PROCESS_MARK = "RLSYS_USER_PROCESS"  # in the environment of a process that runs them, and of all that it starts
LOADED: dict[tuple[Path, int, int], Any] = {}  # modules by path, time of change and size of their file


def load_function(spec: str, table: Mapping[str, Callable[..., Any]], key: str) -> Callable[..., Any]:
    """Returns the function called `spec` in `table`, or the user's own. Raises `ConfigError` if there is none."""
    if spec in table:
        return table[spec]
    module_name, colon, name = spec.rpartition(":")
    if not colon:
        raise ConfigError(
            f"{key}: `{spec}` is not known. Built in: {', '.join(sorted(table))}; "
            "or give module:function or path/to/file.py:function."
        )
    try:
        is_file = module_name.endswith(".py")
        module = load_file(Path(module_name).expanduser()) if is_file else importlib.import_module(module_name)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        problem = f"{key}: importing {module_name} (of `{spec}`) failed: {type(error).__name__}: {error}"
        raise ConfigError(problem) from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = ", ".join(n for n, v in vars(module).items() if callable(v) and not n.startswith("_")) or "none"
        raise ConfigError(f"{key}: {module_name} has no function `{name}`. Functions there: {functions}.")
    return function


def user_function_problems(key: str, spec: str) -> list[str]:
    """Returns what is wrong with the user's function that option `key` names; built-in names are skipped."""
    problem = explain_missing(spec) if ":" in spec else ""
    return [f"{key}: {problem}."] if problem else []


def explain_missing(spec: str) -> str:
    """Explains why the user's function `spec` does not exist; empty if it seems to exist. Runs none of its code."""
    module_name, _, name = spec.rpartition(":")
    if not name.isidentifier():
        return f"`{spec}` names no function; write {module_name}:my_function"
    if not module_name.endswith(".py"):
        missing = f"there is no module {module_name} (of `{spec}`), neither installed nor in {Path.cwd()}"
        return "" if is_importable(module_name) else missing
    path = Path(module_name).expanduser()
    if not path.is_file():
        return f"the file {module_name} (of `{spec}`) does not exist (from {Path.cwd()})"
    try:
        tree = ast.parse(path.read_bytes(), path.name)
    except (SyntaxError, ValueError) as error:
        return f"{module_name} is not Python: {error}"
    names = bound_names(tree)
    if names is None or name in names:
        return ""
    functions = ", ".join(dict.fromkeys(n.name for n in tree.body if isinstance(n, DEFINITIONS))) or "none"
    return f"{module_name} has no function `{name}`. Functions there: {functions}"


def short_name(spec: str) -> str:
    """Returns the name of a function in metrics.  "my.py:brevity" -> "brevity" """
    return spec.rpartition(":")[2]


def is_importable(module: str) -> bool:
    """True if the module or its package is loaded, installed, or in the current directory, as workers find it."""
    package = module.partition(".")[0]
    if package in sys.modules or not package.isidentifier():
        return package in sys.modules
    return bool(importlib.util.find_spec(package) or PathFinder.find_spec(package, [str(Path.cwd())]))


def bound_names(tree: ast.Module) -> set[str] | None:
    """Returns all names that a file binds anywhere; None if it may bind any name, as `import *` does."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case _ if isinstance(node, DEFINITIONS):
                names.add(node.name)
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.alias(name="*") | ast.Name(id="globals"):
                return None
            case ast.alias():
                names.add(node.asname or node.name.partition(".")[0])
    return names


def load_file(path: Path) -> Any:
    """Runs a Python file as a module, once as long as the file does not change."""
    if not path.is_file():
        raise ConfigError(f"the file {path} does not exist (from {Path.cwd()}).")
    name, version = f"rlsys_user_{path.stem}", (path.resolve(), path.stat().st_mtime_ns, path.stat().st_size)
    if version in LOADED:
        return LOADED[version]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    LOADED[version] = module
    return module
