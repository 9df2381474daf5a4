"""A game of the tests' own: it says what follows from the last answer, forgets turns, and takes its time."""

import asyncio
from typing import Any


async def play(row: dict[str, Any], ask: Any) -> dict[str, float]:
    """A third turn never knows of the second; after an even first answer it knows of nothing before it."""
    text, score, replies = row["prompt"], 0.0, []
    first = text[0]
    for turn in range(1 + int(first) % 3):
        odd = replies and replies[0].tokens[0] % 2
        options = {"after": replies[0] if odd else None} if turn == 2 else {}
        reply = await ask(text, **options)
        replies.append(reply)
        text = f"{turn}{len(reply.text) % 10}>"
        await asyncio.sleep(0.02)
        score += float(reply.text.startswith(first))
        reply.score(0.1 * turn)
    return {"first": score}
