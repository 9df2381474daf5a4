"""The meaning of each option: its choices, and the comment next to it in the source."""

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from rlsys.config.schema import Config
from rlsys.config.shorthand import ENTRY_TYPES


def option_comments() -> dict[str, str]:
    """Returns comments by option, such as `policy.lr`; `reward.functions.NAME.weight` for settings of entries."""
    sections = dict(find_sections())
    modules = {inspect.getmodule(kind) for kind in (*sections.values(), *ENTRY_TYPES.values())}
    comments = {key: comment for module in modules if module for key, comment in read_comments(module).items()}
    by_option = {
        f"{section}.{option.name}": prepend_choices(option, comments[kind.__name__, option.name])
        for section, kind in sections.items()
        for option in dataclasses.fields(kind)
    }
    alone = {name: comment for (kind, name), comment in comments.items() if kind == "Config" and comment}
    return (
        by_option
        | alone
        | {
            f"{key}.NAME.{name}": comments[kind.__name__, name]
            for key, kind in ENTRY_TYPES.items()
            for name in kind.__annotations__
        }
    )


def find_sections(kind: Any = Config, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Yields sections and the sections in them: `policy` and `PolicyConfig`, `policy.lora` and `LoraConfig`."""
    for field in dataclasses.fields(kind):
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            yield f"{prefix}{field.name}", field.type
            yield from find_sections(field.type, f"{prefix}{field.name}.")


def read_comments(module: ModuleType) -> dict[tuple[str, str], str]:
    """Returns the comments at the ends of fields by class and field: {("RunConfig", "seed"): "every random …"}"""
    source = inspect.getsource(module)
    lines = source.splitlines()
    return {
        (node.name, field.target.id): lines[(field.end_lineno or 0) - 1].partition("  # ")[2]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def prepend_choices(option: "dataclasses.Field[Any]", comment: str) -> str:
    """ "decides the build of vLLM" -> "cpu | gpu: decides the build of vLLM" """
    choices = option.metadata.get("choices", ()) + ("module:function",) * option.metadata.get("user_function", False)
    return f"{' | '.join(choices)}: {comment}" if choices else comment
