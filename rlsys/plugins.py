"""Names of things a user brings: `module:function` or `path/to/file.py:function`."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlsys.config import ConfigError


def find(spec: str, table: Mapping[str, Callable[..., Any]], what: str) -> Callable[..., Any]:
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
