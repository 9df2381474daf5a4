"""Sends what an engine samples in blocks, from vLLM's core to the process that asked.

By itself vLLM sends a message for each step, with each token and three arrays for its log-prob. The core and the reader both work for
every one of them, and a small model's step on a GPU takes less time than that.
"""

from dataclasses import dataclass, field
from typing import Any

from workers.rollout.fresh_prefixes import salt_prefixes, vllms_scheduler
from workers.rollout.kv_slots import skip_needless_allocations

BLOCK = 16  # tokens of a request that are sent together


@dataclass
class Block:
    """What was sampled for a request and not sent yet."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)

    def logprobs_lists(self) -> Any:
        """Returns the log-probs as vLLM sends them, if there are any."""
        import numpy as np
        from vllm.v1.outputs import LogprobsLists

        if not self.logprobs:
            return None
        columns = np.array(self.tokens, np.int32)[:, None], np.array(self.logprobs, np.float32)[:, None]
        return LogprobsLists(*columns, np.array(self.ranks, np.int32))


class OutputBlocks:
    """Holds a core's outputs until a request has a block of them or ends. Without `hold_tokens` it holds log-probs only."""

    def __init__(self, size: int = BLOCK, hold_tokens: bool = True):
        self.size, self.hold_tokens = size, hold_tokens
        self.held: dict[str, Block] = {}  # by request

    def gather(self, outputs: list[Any], rows: dict[str, int], logprobs: Any) -> list[Any]:
        """Takes the outputs of a step, and its `LogprobsLists` with one row per request. Returns the outputs that leave."""
        values, ranks = [], []
        if logprobs is not None:
            values, ranks = logprobs.logprobs[:, 0].tolist(), logprobs.sampled_token_ranks.tolist()
        return [output for output in outputs if self.add(output, rows.get(output.request_id, 0), values, ranks)]

    def add(self, output: Any, row: int, values: list[float], ranks: list[int]) -> bool:
        """Returns True if the output leaves now, with all that its request had."""
        block = self.held.get(output.request_id)
        if block is None:
            block = self.held[output.request_id] = Block()
        end = row + len(output.new_token_ids)
        block.tokens += output.new_token_ids
        block.logprobs += values[row:end]
        block.ranks += ranks[row:end]
        if len(block.tokens) < self.size and not output.finished:
            return not self.hold_tokens
        del self.held[output.request_id]
        output.new_logprobs = block.logprobs_lists()
        if self.hold_tokens:
            output.new_token_ids = block.tokens
        return True

    def forget_all_but(self, requests: dict[str, Any]) -> None:
        """Drops what aborted requests left."""
        if len(self.held) > len(requests):
            self.held = {request: block for request, block in self.held.items() if request in requests}


def build_scheduler(vllm_config: Any, **parts: Any) -> Any:
    """Returns vLLM's own scheduler, whose outputs leave in blocks. vLLM calls it as its `scheduler_cls`."""
    return with_blocks(OutputBlocks(), vllm_config, parts)


def build_in_flight_scheduler(vllm_config: Any, **parts: Any) -> Any:
    """The same where weights change between two tokens. vLLM notes the version of each token that it sends: none may wait."""
    scheduler = with_blocks(OutputBlocks(hold_tokens=False), vllm_config, parts)
    salt_prefixes(scheduler)
    return scheduler


def with_blocks(blocks: OutputBlocks, vllm_config: Any, parts: dict[str, Any]) -> Any:
    scheduler = vllms_scheduler(vllm_config, parts)
    assert scheduler.num_spec_tokens == 0, (
        f"vLLM speculates with {scheduler.num_spec_tokens} tokens a step. Outputs in blocks need one row of log-probs for each "
        "request: leave out scheduler_cls, or speculative decoding."
    )
    skip_needless_allocations(scheduler)
    update = scheduler.update_from_output

    def update_from_output(step: Any, sampled: Any) -> Any:
        logprobs, sampled.logprobs = sampled.logprobs, None  # vLLM would cut them into arrays for each token
        messages = update(step, sampled)
        for client, message in list(messages.items()):
            message.outputs = blocks.gather(message.outputs, sampled.req_id_to_index, logprobs)
            if not (message.outputs or message.finished_requests or message.scheduler_stats):
                del messages[client]
        blocks.forget_all_but(scheduler.requests)
        return messages

    scheduler.update_from_output = update_from_output
    return scheduler
