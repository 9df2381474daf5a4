"""The interfaces of OpenAI and Anthropic: what a request may have, what answers it, and how errors are written."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from workers.serve import parameters
from workers.serve.front import Front
from workers.serve.refusals import Refusal, anthropic_form, openai_form


@dataclass(frozen=True)
class Dialect:
    """One kind of requests. `answer` returns vLLM's reply, its error, or an iterator of what is streamed."""

    request: Any  # vLLM's model of the body
    answer: Callable[[Front, Any, Request], Awaitable[Any]]
    write_body: Callable[[Any], dict[str, Any]]
    write_events: Callable[[AsyncIterator[Any]], AsyncIterator[str]]
    error_form: Callable[[Refusal], dict[str, Any]]
    supported: Collection[str]
    early_events: int = 0  # that are streamed before anything is sampled
    stop: str = ""  # the parameter with stop strings
    tool_types: tuple[str, ...] = ("function",)


async def keep_events(events: AsyncIterator[str]) -> AsyncIterator[str]:
    async for event in events:
        yield event


async def named_events(events: AsyncIterator[Any]) -> AsyncIterator[str]:
    async for event in events:
        yield f"event: {event.type}\ndata: {event.model_dump_json(by_alias=True)}\n\n"


def read_error(event: str) -> Refusal | None:
    """Returns the error that an event tells of."""
    data = event.partition("data: ")[2]
    error = json.loads(data).get("error") if data.startswith("{") else None
    return Refusal(error.get("code") or 500, error["message"], error.get("param")) if error else None


DIALECTS = {
    "/v1/chat/completions": Dialect(
        ChatCompletionRequest,
        lambda front, request, raw: front.chat.create_chat_completion(request, raw),
        lambda reply: reply.model_dump(mode="json"),
        keep_events,
        openai_form,
        parameters.CHAT,
        stop="stop",
    ),
    "/v1/responses": Dialect(
        ResponsesRequest,
        lambda front, request, raw: front.responses.create_responses(request, raw),
        lambda reply: reply.model_dump(mode="json", by_alias=True),
        named_events,
        openai_form,
        parameters.RESPONSES,
        early_events=2,
        stop="stop",
    ),
    "/v1/messages": Dialect(
        AnthropicMessagesRequest,
        lambda front, request, raw: front.messages.create_messages(request, raw),
        lambda reply: reply.model_dump(mode="json", exclude_none=True),
        keep_events,
        anthropic_form,
        parameters.MESSAGES,
        stop="stop_sequences",
        tool_types=("custom",),
    ),
    "/v1/messages/count_tokens": Dialect(
        AnthropicCountTokensRequest,
        lambda front, request, raw: front.messages.count_tokens(request, raw),
        lambda reply: reply.model_dump(mode="json", exclude_none=True),
        keep_events,
        anthropic_form,
        parameters.COUNT_TOKENS,
        tool_types=("custom",),
    ),
}
