"""The reward `json_schema`: whether a completion is JSON that a schema accepts."""

import functools
import json
import re
from pathlib import Path
from typing import Any

from rlsys.errors import ConfigError

BLOCK = re.compile(r"```json\s*\n?(.*?)```", re.DOTALL | re.IGNORECASE)


def json_schema(completion: str, *, schema: dict[str, Any] | str) -> float:
    """1 if the completion, or its last ```json block, is JSON that `schema` accepts.

    `schema` is the schema itself, or the path of its file. Without such a block, the text up to </think> is ignored.
    NaN and Infinity are not JSON.
    """
    blocks = BLOCK.findall(completion)
    text = blocks[-1] if blocks else completion.rpartition("</think>")[2]
    try:
        value = json.loads(text, parse_constant=_reject_constant)
        return float(_validator(schema if isinstance(schema, str) else json.dumps(schema)).is_valid(value))
    except (ValueError, RecursionError):  # not JSON, or nested too deeply
        return 0.0


def _reject_constant(constant: str) -> Any:
    raise ValueError(constant)


@functools.lru_cache(maxsize=8)
def _validator(schema: str) -> Any:
    """Makes the validator of a schema, given as its text or the path of its file."""
    import jsonschema.validators

    parsed = json.loads(schema if schema.lstrip().startswith("{") else Path(schema).expanduser().read_text())
    validator_class = jsonschema.validators.validator_for(parsed)
    validator_class.check_schema(parsed)
    return validator_class(parsed)


def check_json_schema(options: dict[str, Any]) -> None:
    import jsonschema

    schema = options.get("schema")
    if not schema or not isinstance(schema, dict | str):
        raise ConfigError(f"`schema` is {schema!r}; give a JSON schema, or the path of a file with one.")
    try:
        _validator(schema if isinstance(schema, str) else json.dumps(schema))
    except OSError as error:
        raise ConfigError(
            f"`schema`: the file {schema} cannot be read (from {Path.cwd()}): {error.strerror}."
        ) from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"`schema`: {schema} is not JSON: {error}.") from error
    except jsonschema.SchemaError as error:
        raise ConfigError(f"`schema` is not a JSON schema: {error.message} at {error.json_path}.") from error
