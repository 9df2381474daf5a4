"""The calculator task as programs play it that know nothing of training: loops around OpenAI's and Anthropic's own clients."""

import json
from functools import cache
from typing import Any

from rlsys.tasks.calculator import add

NUMBER = {"type": "integer"}
PARAMETERS = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
ABOUT = {"name": "add", "description": "Adds two numbers."}


async def with_openai(row: dict[str, Any], session: Any) -> None:
    """Calls the tool until a reply has no call."""
    import openai

    http_client = shared_client(openai.DefaultAsyncHttpxClient)
    client = openai.AsyncOpenAI(base_url=session.openai_url, api_key=session.key, http_client=http_client)
    tools: Any = [{"type": "function", "function": ABOUT | {"parameters": PARAMETERS}}]
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    while True:
        reply = await client.chat.completions.create(model=session.model, messages=messages, tools=tools)
        message = reply.choices[0].message
        if not message.tool_calls:
            return
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            assert call.type == "function"
            result = call_add(json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def with_anthropic(row: dict[str, Any], session: Any) -> None:
    """Calls the tool until a reply has no call."""
    import anthropic

    http_client = shared_client(anthropic.DefaultAsyncHttpxClient)
    client = anthropic.AsyncAnthropic(base_url=session.anthropic_url, api_key=session.key, http_client=http_client)
    tools: Any = [ABOUT | {"input_schema": PARAMETERS}]
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    while True:
        reply = await client.messages.create(model=session.model, messages=messages, tools=tools, max_tokens=100)
        calls = [part for part in reply.content if part.type == "tool_use"]
        if not calls:
            return
        messages.append(
            {"role": "assistant", "content": [part.model_dump(exclude_none=True) for part in reply.content]}
        )
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": call_add(call.input)} for call in calls]
        messages.append({"role": "user", "content": results})


def call_add(arguments: Any) -> str:
    """What the model hears: the sum, or what is wrong with its call."""
    try:
        return str(add(**arguments))
    except TypeError as error:
        return str(error)


@cache
def shared_client(kind: Any) -> Any:
    """One for all episodes of a process: each has certificates to load."""
    return kind()
