"""The web server's application: keys, limits, routes and errors. Everything else is in `dialects.py`."""

import json
import secrets
import time
import traceback
from collections.abc import AsyncIterator, Callable
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers.validation import clean_loc_for_param
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.exceptions import VLLMValidationError

from workers.serve.dialects import DIALECTS, Dialect, read_error
from workers.serve.front import Front
from workers.serve.parameters import check_parameters
from workers.serve.refusals import Refusal, anthropic_form, openai_form

BODY_LIMIT = 16 << 20  # bytes


class App:
    """Serves one front to whoever has the key."""

    def __init__(self, front: Front, key: str, requests: Callable[[], int | None]):
        self.front, self.key = front, key
        self.requests = requests  # how many the model is answering; None: it has died
        self.started = int(time.time())
        routes = [Route(path, self.answer, methods=["POST"]) for path in DIALECTS]
        routes += [Route("/health", self.health), Route("/v1/models", self.models)]
        routes += [Route("/v1/models/{name:path}", self.model)]
        handlers: Any = {HTTPException: self.refuse_route, Refusal: self.refuse, Exception: self.refuse_failure}
        self.asgi = Starlette(routes=routes, exception_handlers=handlers)

    async def answer(self, request: Request) -> Response:
        self.check_key(request)
        dialect = DIALECTS[request.url.path]
        body = parse_body(await read_body(request))
        settings = self.front.settings
        self.check_parameters(body, dialect)
        self.check_model(body.get("model"))
        if dialect.stop and settings.stop:
            body.setdefault(dialect.stop, settings.stop)
        try:
            parsed = dialect.request.model_validate(body)
        except ValidationError as error:
            raise describe_validation(error) from None
        except Exception as error:  # some of vLLM's own checks fail in any way if a value has another type
            raise Refusal(400, f"The body cannot be read: {type(error).__name__}: {error}.") from None
        reply = await with_cancellation(self.reply)(dialect=dialect, parsed=parsed, raw_request=request)
        return reply or Response(status_code=499)  # the client has gone, and what it asked for was cancelled

    async def reply(self, dialect: Dialect, parsed: Any, raw_request: Request) -> Response:
        try:
            reply = await dialect.answer(self.front, parsed, raw_request)
            if isinstance(reply, AsyncIterator):
                return await stream(dialect, reply)
        except Refusal:
            raise
        except VLLMValidationError as error:
            raise Refusal(400, str(error.args[0]), error.parameter) from None
        except Exception as error:
            reply = create_error_response(error)
            if reply.error.code >= 500:
                traceback.print_exc()
        if isinstance(reply, ErrorResponse):
            raise Refusal(reply.error.code, reply.error.message, reply.error.param)
        return JSONResponse(dialect.write_body(reply))

    async def health(self, request: Request) -> Response:
        """For anybody: no key is needed."""
        requests = self.requests()
        return JSONResponse({"requests": requests}, 503 if requests is None else 200)

    async def models(self, request: Request) -> Response:
        self.check_key(request)
        card = self.card()
        return JSONResponse(
            {"object": "list", "data": [card], "has_more": False, "first_id": card["id"], "last_id": card["id"]}
        )

    async def model(self, request: Request) -> Response:
        self.check_key(request)
        self.check_model(request.path_params["name"])
        return JSONResponse(self.card())

    def card(self) -> dict[str, Any]:
        """Returns the model as both dialects describe one."""
        name = self.front.settings.name
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started))
        openai = {"id": name, "object": "model", "created": self.started, "owned_by": "rlsys"}
        return openai | {
            "type": "model",
            "display_name": name,
            "created_at": created,
            "max_model_len": self.front.window,
        }

    def check_parameters(self, body: dict[str, Any], dialect: Dialect) -> None:
        check_parameters(body, dialect.supported, dialect.tool_types, self.front.settings)

    def sent_key(self, request: Request) -> str:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        return request.headers.get("x-api-key") or (bearer if scheme.lower() == "bearer" else "")

    def check_key(self, request: Request) -> None:
        if not secrets.compare_digest(self.sent_key(request).encode(), self.key.encode()):
            raise Refusal(
                401,
                "The key is missing or wrong. Send the one that `rlsys serve` has printed as `Authorization: Bearer KEY`, "
                "or as `x-api-key`.",
                code="invalid_api_key",
            )

    def check_model(self, name: Any) -> None:
        served = self.front.settings.name
        if name not in (None, served):
            raise Refusal(404, f"There is no model `{name}`. This server has `{served}`.", "model", "model_not_found")

    # --- errors -----------------------------------------------------------------------------------------------------

    async def refuse(self, request: Request, refusal: Refusal) -> Response:
        return JSONResponse(error_form(request)(refusal), refusal.status)

    async def refuse_route(self, request: Request, error: HTTPException) -> Response:
        posted = ", ".join(DIALECTS)
        about = f"{request.method} {request.url.path}"
        message = f"There is no {about} here. POST to {posted}; GET /v1/models or /health."
        return await self.refuse(request, Refusal(error.status_code, message, code="unknown_url"))

    async def refuse_failure(self, request: Request, error: Exception) -> Response:
        message = f"The server failed: {type(error).__name__}. Its terminal says where."
        return await self.refuse(request, Refusal(500, message))


async def stream(dialect: Dialect, reply: AsyncIterator[Any]) -> Response:
    """Waits for the first event about a token: until then, an error is an answer with a status."""
    events = dialect.write_events(reply)
    first = [await anext(events) for _ in range(dialect.early_events + 1)]
    if refusal := read_error(first[-1]):
        raise refusal

    async def all_events() -> AsyncIterator[str]:
        try:
            for event in first:
                yield event
            async for event in events:
                yield event
        except Exception as error:  # too late for a status
            traceback.print_exc()
            refusal = Refusal(500, f"The server failed: {type(error).__name__}: {error}")
            yield f"event: error\ndata: {json.dumps(dialect.error_form(refusal))}\n\n"

    return StreamingResponse(all_events(), media_type="text/event-stream")


def error_form(request: Request) -> Callable[[Refusal], dict[str, Any]]:
    if dialect := DIALECTS.get(request.url.path):
        return dialect.error_form
    return anthropic_form if "anthropic-version" in request.headers else openai_form


async def read_body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_LIMIT:
            raise Refusal(413, f"The body is longer than {BODY_LIMIT >> 20} MiB. Send a shorter conversation.")
    return bytes(body)


def parse_body(text: bytes) -> dict[str, Any]:
    """Returns the parameters that ask for something: a client may send those that it has nothing for."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"The body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise Refusal(400, f"The body must be a JSON object, not {json.dumps(body)[:40]}.")
    return {name: value for name, value in body.items() if value not in (None, [], {})}


def describe_validation(error: ValidationError) -> Refusal:
    """Returns the first of the errors; a field that may have several forms has one for each form."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = clean_loc_for_param(first["loc"])
    message = str(first["msg"]).removeprefix("Value error, ").rstrip(".")
    return Refusal(400, f"`{place}`: {message}." if place else f"{message}.", place or None)
