"""Names of things a user brings: `module:function` or `path/to/file.py:function`."""

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from rlsys.config.schema import ConfigError

DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def load_function(spec: str, table: Mapping[str, Callable[..., Any]], what: str) -> Callable[..., Any]:
    """The function called `spec` in `table`, or the user's own. Raises `ConfigError` saying why it cannot be had."""
    if spec in table:
        return table[spec]
    home, colon, name = spec.rpartition(":")
    if not colon:
        raise ConfigError(
            f"{what}: `{spec}` is not known. Built in: {', '.join(sorted(table))}; or give module:function or path/to/file.py:function."
        )
    try:
        module = _file(Path(home).expanduser()) if home.endswith(".py") else importlib.import_module(home)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what}: importing {home} (of `{spec}`) failed: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        there = ", ".join(n for n, v in vars(module).items() if callable(v) and not n.startswith("_")) or "none"
        raise ConfigError(f"{what}: {home} has no function `{name}`. Functions there: {there}.")
    return function


def explain_missing(spec: str) -> str:
    """Why the user's own `spec` cannot be had here, as far as that is seen without running it; empty if it can, it seems."""
    home, _, name = spec.rpartition(":")
    if not name.isidentifier():
        return f"`{spec}` names no function; write {home}:my_function"
    if not home.endswith(".py"):
        here = is_importable(home)
        return "" if here else f"there is no module {home} (of `{spec}`), neither installed nor in {Path.cwd()}"
    path = Path(home).expanduser()
    if not path.is_file():
        return f"the file {home} (of `{spec}`) does not exist (from {Path.cwd()})"
    try:
        file = ast.parse(path.read_bytes(), path.name)
    except (SyntaxError, ValueError) as error:
        return f"{home} is not Python: {error}"
    names = _bound(file)
    if names is None or name in names:
        return ""
    there = ", ".join(dict.fromkeys(n.name for n in file.body if isinstance(n, DEFINED))) or "none"
    return f"{home} has no function `{name}`. Functions there: {there}"


def user_function_problems(key: str, spec: str) -> list[str]:
    """Whether `module:function` or `file.py:function` can be one."""
    problem = explain_missing(spec) if ":" in spec else ""
    return [f"{key}: {problem}."] if problem else []


def short_name(name: str) -> str:
    """What a function is called in figures.  "my.py:brevity" -> "brevity" """
    return name.rpartition(":")[2]


def is_importable(module: str) -> bool:
    """Whether its package is here, or it is; workers find modules in the current directory too."""
    top = module.partition(".")[0]
    if top in sys.modules or not top.isidentifier():
        return top in sys.modules
    return bool(importlib.util.find_spec(top) or PathFinder.find_spec(top, [str(Path.cwd())]))


def _bound(file: ast.Module) -> set[str] | None:
    """Names that a file may give to something, wherever in it; None: any, as it takes all of another module's."""
    names: set[str] = set()
    for node in ast.walk(file):
        match node:
            case _ if isinstance(node, DEFINED):
                names.add(node.name)
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.alias(name="*") | ast.Name(id="globals"):
                return None
            case ast.alias():
                names.add(node.asname or node.name.partition(".")[0])
    return names


def _file(path: Path) -> Any:
    """The file as a module. One that is named twice, and has not changed, is run once."""
    if not path.is_file():
        raise ConfigError(f"the file {path} does not exist (from {Path.cwd()}).")
    name, state = f"rlsys_user_{path.stem}", (path.resolve(), path.stat().st_mtime_ns, path.stat().st_size)
    if state in _FILES:
        return _FILES[state]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    _FILES[state] = module
    return module


_FILES: dict[tuple[Path, int, int], Any] = {}
