"""Reads the calls of a reply: which tool, with which arguments, or why not. The model can read each reason."""

import json
from collections.abc import Sequence
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError

from rlsys.episodes.ask import ToolCall
from rlsys.errors import ConfigError

Schema = dict[str, Any]
UNREADABLE = "The tool call cannot be read. Write it exactly as described, with complete arguments in valid JSON."
CUT = "The tool call was cut, because the answer became too long."


class CallReader:
    """Checks calls against the schemas of the tools. `CallReader([schema])("add", '{"a": 1}', "call00000")`"""

    def __init__(self, tools: Sequence[Schema]):
        self.validators = {tool["function"]["name"]: make_validator(tool["function"]) for tool in tools}

    def __call__(self, name: str, arguments: str, call_id: str) -> ToolCall:
        try:
            values = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:  # also for a number or a nesting that Python does not take
            return ToolCall(name, {}, call_id, f"The arguments of `{name}` are not valid JSON: {error}.")
        if not isinstance(values, dict):
            error_text = f"The arguments of `{name}` must be a JSON object, not {json.dumps(values)[:40]}."
            return ToolCall(name, {}, call_id, error_text)
        return ToolCall(name, values, call_id, self.describe_error(name, values))

    def describe_error(self, name: str, arguments: dict[str, Any]) -> str:
        if name not in self.validators:
            names = ", ".join(f"`{known}`" for known in self.validators) or "none"
            return f"There is no tool `{name}`. The tools are: {names}."
        errors = list(self.validators[name].iter_errors(arguments))
        return f"The arguments of `{name}` are wrong: {describe(errors[0])}." if errors else ""


def make_validator(function: Schema) -> Draft202012Validator:
    schema = function.get("parameters") or {}
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ConfigError(
            f"the parameters of the tool `{function['name']}` are no JSON schema: {error.message}"
        ) from None
    return Draft202012Validator(schema)


def describe(error: ValidationError) -> str:
    place = ".".join(str(part) for part in error.absolute_path)
    message = error.message if len(error.message) <= 200 else error.message[:200] + "…"
    return f"`{place}`: {message}" if place else message
