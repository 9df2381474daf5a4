"""Into how many parts the heads of attention can be split."""


def heads_divide(heads: int, kv_heads: int, parts: int) -> bool:
    """Returns True if heads divide into this many parts. Heads of keys and values are repeated where there are too few."""
    return heads % parts == 0 and (kv_heads % parts == 0 or parts % kv_heads == 0)


def sequence_parallel_problem(name: str, heads: int, kv_heads: int, ranks: int) -> str:
    """Says why `policy.sequence_parallel` does not suit a model; empty if it does."""
    if heads_divide(heads, kv_heads, ranks):
        return ""
    possible = [str(n) for n in range(1, heads + 1) if heads_divide(heads, kv_heads, n)]
    return (
        f"policy.sequence_parallel ({ranks}) does not divide {name}: {heads} attention heads, {kv_heads} of keys and "
        f"values. It may be {', '.join(possible)}."
    )
