"""`openenv:URL`: an OpenEnv server that runs already. Each episode has a session of its own there.

    episode: openenv:http://127.0.0.1:8000

The server describes an action's fields. If one field alone is required, it is the reply's text, or its last number.
Otherwise the fields are those of the last JSON object in the reply. `action` names a field to use instead. An observation
is shown as its only text, or as JSON; `observation` names a field to show instead. `reset` is sent to the server, with
the row's seed. The reward of each step is the score of its turn.
"""

import asyncio
import functools
import json
import math
import re
import urllib.request
from typing import Any

from jsonschema import Draft202012Validator

from rlsys.episodes.ask import Ask
from rlsys.episodes.environments.package import first_line, import_package, row_seed
from rlsys.errors import ConfigError

OPTIONS = ("action", "observation", "reset", "prompt")
TIMEOUT_S = 10.0
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
INHERITED = ("metadata", "reward", "done")  # fields of every action or observation


async def play(
    url: str,
    row: dict[str, Any],
    ask: Ask,
    /,
    *,
    action: str = "",
    observation: str = "",
    reset: dict[str, Any] | None = None,
    prompt: str = "",
) -> float:
    client_type = import_package("openenv.core.generic_client", f"openenv:{url}", "openenv").GenericEnvClient
    reader = ActionReader(await asyncio.to_thread(action_schema, url), action)
    title = str(row.get("prompt") or prompt)
    async with client_type(base_url=url) as client:
        result = await client.reset(**{"seed": row_seed(row)} | (reset or {}))
        text = f"{title}\n{describe(result.observation, observation)}".strip()
        while not result.done:
            reply = await ask(text)
            fields = reader(reply.text)
            step = await take_step(client, fields, reader) if fields is not None else None
            if step is None:
                text = f"Your reply has no valid action. {reader.instruction}"
                continue
            result = step
            reply.score(float(result.reward or 0.0))
            text = describe(result.observation, observation)
    return 0.0  # turns have their scores


async def take_step(client: Any, fields: dict[str, Any], reader: "ActionReader") -> Any:
    """Returns None if the server refuses the fields, and its schema too. All else that it refuses is an error."""
    try:
        return await client.step(fields)
    except RuntimeError as error:
        if "VALIDATION_ERROR" not in str(error) or reader.is_valid(fields):
            raise
        return None


def check(url: str, options: dict[str, Any]) -> None:
    import_package("openenv.core.generic_client", f"openenv:{url}", "openenv")
    if not re.match(r"https?://[^/\s]", url):
        raise ConfigError(f"openenv:{url} is not the address of a server, such as openenv:http://127.0.0.1:8000.")
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise ConfigError(f"episode.options.{unknown[0]}: an OpenEnv episode has the options {', '.join(OPTIONS)}.")


def reach(url: str) -> None:
    """Raises `ConfigError` if no server answers."""
    try:
        action_schema(url)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"openenv:{url}: no OpenEnv server answers there ({first_line(error)}). Start it first, or correct the address."
        ) from None


@functools.lru_cache(maxsize=64)
def action_schema(url: str) -> dict[str, Any]:
    """Returns what the server says about the fields of an action, as a JSON schema."""
    with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=TIMEOUT_S) as response:
        schema: dict[str, Any] = json.load(response)["action"]
    return schema


class ActionReader:
    """Reads the fields of an action from a reply. Returns None if the reply holds no action."""

    def __init__(self, schema: dict[str, Any], field: str):
        self.is_valid = Draft202012Validator(schema).is_valid
        self.properties = {k: v for k, v in schema.get("properties", {}).items() if k not in INHERITED}
        required = [name for name in schema.get("required", []) if name in self.properties]
        names = required or list(self.properties)
        self.field = field or (names[0] if len(names) == 1 else "")

    def __call__(self, reply: str) -> dict[str, Any] | None:
        if not self.field:
            return last_object(reply)
        kind = self.properties.get(self.field, {}).get("type", "string")
        if kind not in ("integer", "number"):
            return {self.field: reply}
        numbers = NUMBER.findall(reply)
        if not numbers or math.isinf(float(numbers[-1])) or (kind == "integer" and not float(numbers[-1]).is_integer()):
            return None
        return {self.field: int(float(numbers[-1])) if kind == "integer" else float(numbers[-1])}

    @property
    def instruction(self) -> str:
        if not self.field:
            return f"Reply with a JSON object that has {', '.join(self.properties)}."
        described = self.properties.get(self.field, {})
        if "enum" in described:
            return f"Reply with one of: {', '.join(map(str, described['enum']))}."
        return "Reply with a number." if described.get("type") in ("integer", "number") else "Reply with a text."


def last_object(reply: str) -> dict[str, Any] | None:
    """Returns the last complete JSON object in a text."""
    last, position, decoder = None, 0, json.JSONDecoder()
    while (position := reply.find("{", position)) >= 0:
        try:
            last, position = decoder.raw_decode(reply, position)
        except (ValueError, RecursionError):
            position += 1
    return last


def describe(observation: dict[str, Any], field: str) -> str:
    """Writes an observation as text: the given field, else its only text, else all of it as JSON."""
    shown = {k: v for k, v in observation.items() if k not in INHERITED and v is not None}
    if field:
        if field not in shown:
            raise ValueError(f"the observation has no `{field}`; it has {', '.join(shown) or 'nothing'}.")
        shown = {field: shown[field]}
    if len(shown) == 1 and isinstance(text := next(iter(shown.values())), str):
        return text
    return json.dumps(shown, ensure_ascii=False)
