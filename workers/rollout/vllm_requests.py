"""Requests as vLLM takes them, and its finished outputs in lists."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlsys.types import Request

# A finished sample waits this long for others: sending a list costs some milliseconds in each process.
MAX_BATCHING_DELAY_S = 0.25


@dataclass(frozen=True)
class Stops:
    """Where completions end before their limit. `Stops([1, 7], ["</answer>"])`"""

    token_ids: list[int]
    strings: list[str] = field(default_factory=list)  # looked for in the text with special tokens
    min_new_tokens: int = 0  # tokens of a completion before which it does not end


def sampling_params(request: Request, stops: Stops) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    strings = [] if request.ignore_end else [*stops.strings, *request.stop]
    min_tokens = max(min(stops.min_new_tokens, request.max_new_tokens) - tokens_before(request), 0)
    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_tokens=0 if request.ignore_end else min_tokens,
        max_tokens=request.max_new_tokens - tokens_before(request),
        seed=request.seed,
        logprobs=0,  # the sampled token's
        flat_logprobs=True,
        detokenize=bool(strings),
        stop=strings,
        include_stop_str_in_output=True,
        skip_special_tokens=False,  # a stop string may hold special tokens
        stop_token_ids=[] if request.ignore_end else stops.token_ids,
        ignore_eos=request.ignore_end,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def token_prompt(request: Request) -> Any:
    """Returns vLLM's prompt: the prompt's tokens, those already sampled, and what the environment said."""
    begun = request.partial.sequence.tolist() if request.partial else []
    return {"prompt_token_ids": [*prompt_tokens(request), *begun]}


def prompt_tokens(request: Request) -> list[int]:
    return request.tokens.tolist() if isinstance(request.tokens, np.ndarray) else list(request.tokens)


def tokens_before(request: Request) -> int:
    """Returns the number of tokens of the completion that were sampled before."""
    return len(request.partial.tokens) if request.partial else 0


def request_id(request: Request) -> str:
    return f"{request.uid}/{request.index}/{request.turn}"


async def collect_outputs(finished: "asyncio.Queue[Any]", count: int) -> AsyncIterator[list[Any]]:
    """Yields `count` outputs from the queue, in lists. Raises an exception found among them.

    No output waits longer than a quarter of the time since the call began.
    """
    began = time.monotonic()
    while count:
        outputs = [await finished.get()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(MAX_BATCHING_DELAY_S, (time.monotonic() - began) / 4)):
                while len(outputs) < count:
                    outputs.append(await finished.get())
        for output in outputs:
            if isinstance(output, Exception):
                raise output
        count -= len(outputs)
        yield outputs
