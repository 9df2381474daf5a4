"""Requests to a service over HTTP, repeated while it cannot answer.

A request is repeated, `retries` times at most, if the service cannot be reached, is too slow, or answers 429 or 5xx.
The wait before a repetition is `backoff_s`, then twice as long, and so on, each ± 50 %, and at least what a Retry-After
header says. Any other failure raises at once, and the samples have no verdict. A bearer token is read from the
environment variable `token_env`; no file and no message shows it.
"""

import asyncio
import functools
import json
import math
import os
import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlsys.errors import ConfigError

if TYPE_CHECKING:
    import httpx

MAX_WAIT_S = 60.0


class ServiceError(RuntimeError):
    """A service did not answer as it should have."""


@dataclass(frozen=True)
class Endpoint:
    """Endpoint("http://localhost:9000/score", token_env="JUDGE_TOKEN", timeout_s=30.0, retries=4, backoff_s=0.5)"""

    url: str
    token_env: str
    timeout_s: float  # of one attempt
    retries: int
    backoff_s: float

    async def post(self, client: "httpx.AsyncClient", body: Any) -> Any:
        """Sends a body as JSON, and returns the JSON that the service replies with."""
        import httpx

        token = read_token(self.token_env)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        content = json.dumps(to_json(body))
        for attempt in range(self.retries + 1):
            retry_after_s = 0.0
            try:
                async with asyncio.timeout(self.timeout_s):  # for the whole reply: httpx's own limits are per chunk
                    reply = await client.post(self.url, content=content, headers=headers)
            except TimeoutError:
                problem = f"no answer within {self.timeout_s:g} s"
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if reply.is_success:
                    return _read_json(reply)
                problem = f"HTTP {reply.status_code}: {reply.text[:300]}"
                retry_after_s = _retry_after(reply)
                if reply.status_code != 429 and reply.status_code < 500:
                    raise ServiceError(_hide(token, f"{shown_url(self.url)} refused: {problem}"))
            if attempt < self.retries:
                await asyncio.sleep(max(retry_after_s, self.backoff_s * 2**attempt * random.uniform(0.5, 1.5)))
        attempts = self.retries + 1
        raise ServiceError(_hide(token, f"{shown_url(self.url)} failed {attempts} times, the last time: {problem}"))


def open_client() -> "httpx.AsyncClient":
    """A client for one call, which leaves no connection open. Certificates are read once per process."""
    import httpx

    return httpx.AsyncClient(verify=_certificates(), timeout=None)


@functools.cache
def _certificates() -> Any:
    import httpx

    return httpx.create_ssl_context()


def _read_json(reply: "httpx.Response") -> Any:
    try:
        return reply.json()
    except ValueError as error:
        raise ServiceError(f"{shown_url(str(reply.url))} did not reply with JSON: {reply.text[:200]}") from error


def _retry_after(reply: "httpx.Response") -> float:
    """Seconds that the service asks to wait, at most a minute. Dates are not read."""
    value = reply.headers.get("retry-after", "")
    return min(float(value), MAX_WAIT_S) if re.fullmatch(r"\d+(\.\d+)?", value) else 0.0


def read_token(token_env: str) -> str:
    if token_env and not os.environ.get(token_env):
        raise ConfigError(
            f"the environment variable {token_env} (token_env) is empty; put the service's bearer token there."
        )
    return os.environ.get(token_env, "") if token_env else ""


def _hide(token: str, text: str) -> str:
    return text.replace(token, "***") if token else text


def shown_url(url: str) -> str:
    """Returns the address without user name, password and query, which may be secret."""
    return re.sub(r"//[^/@]*@", "//", url).partition("?")[0]


def to_json(value: Any) -> Any:
    """Converts what a row may hold and JSON cannot: arrays to lists, NaN and infinities to null, the rest to text."""
    if isinstance(value, dict):
        return {k: to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    return to_json(value.tolist()) if hasattr(value, "tolist") else str(value)
