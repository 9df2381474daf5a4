"""Log-probs of sampled tokens on CPU, a few rows at a time: with 262,144 words those of a batch take 200 MB."""

from typing import Any

import torch

LOGPROBS_MODE = "processed_logits"  # vLLM's sampler hands on the logits, after temperature
BLOCK_ELEMENTS = 1 << 21  # as many as stay in a cache


def gather_sampled(logits: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
    """Returns the log-prob and the rank of each row's token, as vLLM's `Sampler.gather_logprobs` does from log-probs."""
    from vllm.v1.outputs import LogprobsTensors

    assert num_logprobs == 0, "only the sampled token's"
    rows = max(BLOCK_ELEMENTS // logits.shape[1], 1)
    block, tokens = logits.new_empty(min(rows, len(logits)), logits.shape[1]), token_ids.unsqueeze(-1)
    sampled, ranks = logits.new_empty(len(logits), 1), torch.empty(len(logits), dtype=torch.int64)
    for start in range(0, len(logits), rows):
        of = slice(start, start + rows)
        logprobs = torch.log_softmax(logits[of], -1, out=block[: len(logits[of])])
        sampled[of] = logprobs.gather(-1, tokens[of])
        ranks[of] = (logprobs >= sampled[of]).sum(-1)
    return LogprobsTensors(tokens.to(torch.int32), sampled, ranks)
