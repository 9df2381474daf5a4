"""A program of the tests' own, which asks the model by OpenAI's client: side by side, with summaries, and again what it has asked."""

import asyncio
from functools import cache
from typing import Any

import openai


@cache
def http_client() -> Any:
    """One for all episodes: each loads certificates, for 30 ms in which nothing else runs."""
    return openai.DefaultAsyncHttpxClient()


async def play(row: dict[str, Any], session: Any) -> float:
    client = openai.AsyncOpenAI(
        base_url=session.openai_url, api_key=session.key, max_retries=0, http_client=http_client()
    )

    async def ask(*history: str) -> str:
        messages: Any = [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(history)]
        reply = await client.chat.completions.create(model=session.model, messages=messages)
        await asyncio.sleep(0.02)
        return reply.choices[0].message.content or ""

    prompt, kind = row["prompt"], int(row["prompt"][0]) % 3
    first = await ask(prompt)
    if kind == 0:  # two that go on with it, one of which goes on twice, and one that knows nothing of it
        ones, _, _ = await asyncio.gather(ask(prompt, first, "1>"), ask(prompt, first, "2>"), ask("9>"))
        await asyncio.gather(ask(prompt, first, "1>", ones, "3>"), ask(prompt, first, "1>", ones, "4>"))
    elif kind == 1:  # a summary, and what follows it
        summary = f"{len(first) % 10}>"
        await ask(summary, await ask(summary), "5>")
    else:
        assert await ask(prompt) == first
    return float(first.startswith(prompt[0]))
