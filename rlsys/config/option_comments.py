"""What each option means: the comment beside it in schema.py."""

import ast
import dataclasses
import inspect

from rlsys.config import schema
from rlsys.config.schema import Config
from rlsys.config.shorthand import ENTRY_TYPES


def option_comments() -> dict[str, str]:
    """Comments by option, such as `policy.lr`; `reward.functions.NAME.weight` for options of named entries."""
    source = inspect.getsource(schema)
    lines = source.splitlines()
    comments = {
        (node.name, field.target.id): lines[(field.end_lineno or 0) - 1].partition("  # ")[2]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    sections = {f.name: type(getattr(Config(), f.name)) for f in dataclasses.fields(Config)}
    by_option = {
        f"{name}.{f.name}": comments[kind.__name__, f.name]
        for name, kind in sections.items()
        for f in dataclasses.fields(kind)
    }
    return by_option | {
        f"{key}.NAME.{name}": comments[kind.__name__, name]
        for key, kind in ENTRY_TYPES.items()
        for name in kind.__annotations__
    }
