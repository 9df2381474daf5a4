"""The JSON schema of a Python function, from its signature and docstring.

async def search(query: str, limit: int = 5) -> str:
    \\"\\"\\"Searches the library.

    Args:
        query: words to look for
        limit: how many results at most
    \\"\\"\\"
"""

import inspect
import re
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin

from rlsys.errors import ConfigError

Schema = dict[str, Any]
SCALARS: dict[Any, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
    inspect.Parameter.empty: {},
}
GIVEN = ("row", "state")  # parameters that the episode fills in, and the model does not see


def function_schema(function: Callable[..., Any]) -> Schema:
    """Returns what a chat template shows of a function."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
    except Exception as error:  # an annotation may be any expression
        raise ConfigError(f"the parameters of the tool `{name}` cannot be read: {error}.") from error
    summary, descriptions = read_docstring(inspect.getdoc(function) or "")
    properties, required = {}, []
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(
                f"the tool `{name}` has a parameter `{parameter}`, which has no name for the model to use."
            )
        if parameter.name in GIVEN:
            continue
        schema = type_schema(parameter.annotation, f"`{parameter.name}` of the tool `{name}`")
        text = descriptions.get(parameter.name, "")
        properties[parameter.name] = schema | ({"description": text} if text else {})
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    schema = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": summary, "parameters": schema}}


def type_schema(kind: Any, whose: str) -> Schema:
    if (isinstance(kind, type) and kind in SCALARS) or kind is Any:
        return dict(SCALARS[kind])
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [type_schema(argument, whose) for argument in arguments]}
    if origin is list:
        return {"type": "array", "items": type_schema(arguments[0], whose)}
    if origin is dict:
        return {"type": "object", "additionalProperties": type_schema(arguments[1], whose)}
    raise ConfigError(
        f"the parameter {whose} has the type {kind}, which a model cannot write. "
        "Use str, int, float, bool, list, dict, Literal or a union of them."
    )


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Returns the text before the section `Args:`, and what that section says of each parameter."""
    summary, _, rest = re.sub(r"(?m)^(Args|Arguments|Parameters):\s*$", "\0", text, count=1).partition("\0")
    section = re.split(r"(?m)^\S", rest, maxsplit=1)[0]  # until the next section
    arguments = re.findall(
        r"(?m)^[ \t]+\*?(\w+)(?:\s*\([^)\n]*\))?:[ \t]*(.*(?:\n(?![ \t]+\w+(?:\s*\([^)\n]*\))?:).*)*)", section
    )
    summary = re.split(r"(?m)^(?:Returns|Raises|Yields|Examples?):\s*$", summary, maxsplit=1)[0]
    return summary.strip(), {name: " ".join(words.split()) for name, words in arguments}
