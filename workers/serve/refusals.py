"""Errors of requests, in the form of each dialect."""

from dataclasses import dataclass
from typing import Any

ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


@dataclass
class Refusal(Exception):
    """Refusal(400, "`n` must be 1 or more.", "n")"""

    status: int
    message: str
    param: str | None = None
    code: str | None = None


def openai_form(refusal: Refusal) -> dict[str, Any]:
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {"error": {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code}}


def anthropic_form(refusal: Refusal) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": refusal.message}}
