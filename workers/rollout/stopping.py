"""Where a completion ends before its limit: at an end-of-sequence token, or at one of the user's tokens or strings."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from rlsys.types import Request
from workers.rollout.vllm_requests import Stops, prompt_tokens, request_id, sampling_params


def stop_length(tokenizer: Any, request: Request, tokens: list[int], stops: Stops) -> int | None:
    """Returns the number of tokens up to the end of the first stop string; None if there is none."""
    if not has_stop_strings(request, stops):
        return None
    search = StopSearch(tokenizer, request, stops)
    return search.tokens if search.find(tokens) else None


def has_stop_strings(request: Request, stops: Stops) -> bool:
    return bool(stops.strings or request.stop) and not request.ignore_end


class StopSearch:
    """Looks for stop strings in a completion that grows. Decodes as vLLM does when it samples the completion in one go."""

    def __init__(self, tokenizer: Any, request: Request, stops: Stops):
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        whole = SimpleNamespace(
            request_id=request_id(request),
            sampling_params=sampling_params(replace(request, partial=None), stops),
            prompt_token_ids=prompt_tokens(request),
            prompt_embeds=None,
        )
        self.detokenizer: Any = IncrementalDetokenizer.from_new_request(tokenizer, whole)  # type: ignore[arg-type]
        self.tokens = 0  # read so far; if a string was found, up to its end

    def find(self, tokens: list[int]) -> str | None:
        """Reads further tokens, up to the end of the first stop string. Returns the string."""
        for token in tokens:
            self.tokens += 1
            if string := self.detokenizer.update([token], False):
                return str(string)
        return None
