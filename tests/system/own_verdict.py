"""A reward function as a user writes one; it asks a frozen model twice."""


async def likeness(prompt, completion, ask) -> dict[str, float]:
    """How many digits stand where the model puts them, greedily and by a sample of its own."""
    greedy = await ask("judge", prompt, max_tokens=10)
    sampled = await ask("judge", prompt, max_tokens=10, temperature=1.0, seed=len(set(completion)))
    return {
        name: sum(a == b for a, b in zip(text, completion, strict=False)) / 10
        for name, text in (("greedy", greedy), ("sampled", sampled))
    }
