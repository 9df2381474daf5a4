"""Log-probs of sampled tokens from logits, against those of the whole batch at once."""

import pytest
import torch

from workers.cpu import sampled_logprobs
from workers.cpu.sampled_logprobs import gather_sampled


@pytest.mark.parametrize("elements", [1, 1000, 3000, 1 << 20])
def test_rows_in_blocks_have_the_same_bits_as_all_at_once(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled_logprobs, "BLOCK_ELEMENTS", elements)
    logits = torch.randn(7, 997, generator=torch.Generator().manual_seed(0)) * 5
    logits[2, :500] = -torch.inf  # forbidden words
    tokens = torch.tensor([0, 996, 600, 3, 7, 11, 500])
    gathered = gather_sampled(logits.clone(), 0, tokens)
    logprobs = torch.log_softmax(logits, -1)
    assert torch.equal(gathered.logprobs[:, 0], logprobs[torch.arange(7), tokens])
    assert gathered.logprob_token_ids[:, 0].tolist() == tokens.tolist()
    order = [sorted(row, reverse=True) for row in logprobs.tolist()]
    assert [order[i].index(logprobs[i, t]) + 1 for i, t in enumerate(tokens)] == gathered.selected_token_ranks.tolist()
