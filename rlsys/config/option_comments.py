"""The meaning of each option: its choices, and the comment beside it in schema.py."""

import ast
import dataclasses
import inspect
from typing import Any

from rlsys.config import schema
from rlsys.config.schema import Config
from rlsys.config.shorthand import ENTRY_TYPES


def option_comments() -> dict[str, str]:
    """Returns comments by option, such as `policy.lr`; `reward.functions.NAME.weight` for settings of entries."""
    source = inspect.getsource(schema)
    lines = source.splitlines()
    comments = {
        (node.name, field.target.id): lines[(field.end_lineno or 0) - 1].partition("  # ")[2]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    by_option = {
        f"{section.name}.{option.name}": prepend_choices(option, comments[kind.__name__, option.name])
        for section in dataclasses.fields(Config)
        for kind in (type(getattr(Config(), section.name)),)
        for option in dataclasses.fields(kind)
    }
    return by_option | {
        f"{key}.NAME.{name}": comments[kind.__name__, name]
        for key, kind in ENTRY_TYPES.items()
        for name in kind.__annotations__
    }


def prepend_choices(option: "dataclasses.Field[Any]", comment: str) -> str:
    """ "decides the build of vLLM" -> "cpu | gpu: decides the build of vLLM" """
    choices = option.metadata.get("choices", ()) + ("module:function",) * option.metadata.get("user_function", False)
    return f"{' | '.join(choices)}: {comment}" if choices else comment
