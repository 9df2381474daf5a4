"""The reward `json_schema`: whether a completion is JSON of the shape it was asked for."""

import functools
import json
import re
from pathlib import Path
from typing import Any

from rlsys.config.schema import ConfigError

BLOCK = re.compile(r"```json\s*\n?(.*?)```", re.DOTALL | re.IGNORECASE)


def json_schema(completion: str, *, schema: dict[str, Any] | str) -> float:
    """1 if the completion, or its last ```json block, is valid JSON by `schema`: the schema itself, or the path of its file.

    Without such a block, what a model thought before </think> is left out. NaN and Infinity are no JSON.
    """
    blocks = BLOCK.findall(completion)
    try:
        value = json.loads(blocks[-1] if blocks else completion.rpartition("</think>")[2], parse_constant=_refuse)
        return float(_validator(schema if isinstance(schema, str) else json.dumps(schema)).is_valid(value))
    except (ValueError, RecursionError):  # no JSON, or deeper than anyone reads
        return 0.0


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


@functools.lru_cache(maxsize=8)
def _validator(schema: str) -> Any:
    """Of a path, or of a schema as a text."""
    import jsonschema.validators

    found = json.loads(schema if schema.lstrip().startswith("{") else Path(schema).expanduser().read_text())
    kind = jsonschema.validators.validator_for(found)
    kind.check_schema(found)
    return kind(found)


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
        raise ConfigError(f"`schema`: {schema} is no JSON: {error}.") from error
    except jsonschema.SchemaError as error:
        raise ConfigError(f"`schema` is no JSON schema: {error.message} at {error.json_path}.") from error
