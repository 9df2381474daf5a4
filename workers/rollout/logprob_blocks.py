"""Sends the log-probs of an engine in blocks, from vLLM's core to the process that asked.

By itself vLLM sends each token's log-prob as three arrays. Reading them takes longer than a small model's step on a GPU.
"""

from typing import Any

BLOCK = 16  # tokens of a request whose log-probs travel together


class LogprobBlocks:
    """Takes log-probs off a core's outputs until a request has a block of them or ends."""

    def __init__(self, block: int = BLOCK):
        self.block = block
        self.held: dict[str, list[Any]] = {}  # by request: vLLM's `LogprobsLists`

    def gather(self, output: Any) -> None:
        """Leaves an output without log-probs, or with all that its request still had."""
        held = self.held.setdefault(output.request_id, [])
        if output.new_logprobs is not None:
            held.append(output.new_logprobs)
        output.new_logprobs = None
        if held and (output.finished or len(held) >= self.block):
            output.new_logprobs = join(self.held.pop(output.request_id))

    def forget_all_but(self, requests: dict[str, Any]) -> None:
        """Drops what aborted requests left."""
        if len(self.held) > len(requests):
            self.held = {request: held for request, held in self.held.items() if request in requests}


def join(parts: list[Any]) -> Any:
    """`LogprobsLists` of successive tokens as one."""
    import numpy as np

    arrays = [np.concatenate(array) for array in list(zip(*parts, strict=True))[:3]]
    return type(parts[0])(*arrays)


def build_scheduler(vllm_config: Any, **parts: Any) -> Any:
    """Returns vLLM's own scheduler, whose outputs carry log-probs in blocks. vLLM calls it as its `scheduler_cls`."""
    vllm_config.scheduler_config.scheduler_cls = None
    scheduler = vllm_config.scheduler_config.get_scheduler_cls()(vllm_config=vllm_config, **parts)
    blocks, update = LogprobBlocks(), scheduler.update_from_output

    def update_from_output(*arguments: Any, **options: Any) -> Any:
        outputs_by_client = update(*arguments, **options)
        for outputs in outputs_by_client.values():
            for output in outputs.outputs:
                blocks.gather(output)
        blocks.forget_all_but(scheduler.requests)
        return outputs_by_client

    scheduler.update_from_output = update_from_output
    return scheduler
