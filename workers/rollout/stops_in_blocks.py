"""Stop strings of requests whose outputs leave vLLM's core in blocks: they are looked for where the outputs arrive.

By itself vLLM looks for them in every token, so it would need each token alone. Here it is not told of them. The core samples on until
a block is read, and tokens after the end of the string, fewer than a block, are cut.

core ─▶ block ─▶ StopsInBlocks: a string? cut the block, and say that the request ends ─▶ vLLM's processor of outputs
"""

from dataclasses import replace
from typing import Any

from rlsys.types import Request
from workers.rollout.stopping import StopSearch, has_stop_strings
from workers.rollout.vllm_requests import Stops, request_id


class StopsInBlocks:
    """Changes outputs before vLLM's processor reads them."""

    def __init__(self, processor: Any):
        self.processor = processor
        self.asked: dict[str, tuple[Request, Stops]] = {}  # by our name of a request
        self.searches: dict[str, StopSearch] = {}  # by vLLM's name of a request: two calls may ask for the same one
        self.process = processor.process_outputs
        processor.process_outputs = self.process_outputs

    def watch(self, request: Request, stops: Stops) -> Stops:
        """Returns what the core has to know."""
        if has_stop_strings(request, stops):
            self.asked[request_id(request)] = request, stops
        return replace(stops, strings=[])

    def forget(self, request: Request) -> None:
        if self.asked.get(request_id(request), (None,))[0] is request:  # else another call has asked for it again
            del self.asked[request_id(request)]

    def process_outputs(self, outputs: list[Any], *arguments: Any, **options: Any) -> Any:
        ended = [output.request_id for output in outputs if self.ends(output)]
        processed = self.process(outputs, *arguments, **options)
        processed.reqs_to_abort += ended
        running = self.processor.request_states
        if len(self.searches) > len(running):
            self.searches = {name: search for name, search in self.searches.items() if name in running}
        return processed

    def ends(self, output: Any) -> bool:
        """Ends the output with a stop string if it has one. Returns True if the core does not know that the request ends."""
        from vllm.v1.engine import FinishReason

        state = self.processor.request_states.get(output.request_id)
        if state is None or state.external_req_id not in self.asked:
            return False
        if output.new_logprobs is None:  # they come with a later token
            return False
        search, begun = self.search(output.request_id, *self.asked[state.external_req_id])
        arrived, before = state.detokenizer.token_ids, search.tokens - begun
        string = search.find([*arrived[before:], *output.new_token_ids])
        if string is None:
            return False
        length, known = search.tokens - begun, output.finished
        output.new_token_ids = output.new_token_ids[: max(length - len(arrived), 0)]
        output.new_logprobs = output.new_logprobs.slice_request(0, length - before)
        output.finish_reason, output.stop_reason = FinishReason.STOP, string
        del arrived[length:]
        return not known

    def search(self, name: str, request: Request, stops: Stops) -> tuple[StopSearch, int]:
        """Returns the search in a request, and the number of its tokens that were sampled before it was asked for."""
        begun = request.partial.tokens.tolist() if request.partial else []
        if name not in self.searches:
            self.searches[name] = StopSearch(self.processor.tokenizer, request, stops)
            self.searches[name].find(begun)
        return self.searches[name], len(begun)
