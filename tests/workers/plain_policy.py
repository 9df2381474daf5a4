"""Updates of the policy as the papers write them: one sample after the other, without packs, ranks and DeepSpeed.

Loss of a mini-batch: Σ over samples and tokens of -w min(r A, clip(r, 0.8, 1.2) A) + u β (exp(d) - d - 1),
r = π / old (arXiv 1707.06347, eq. 7), d = log ref - log π (k3, arXiv 2402.03300, eq. 4), w as in `WEIGHTS`; u is w, but
1 / (N · own length) with `decoupled`: α L_0 + 1/T Σ L_t - β KL, of which α is for the policy loss (arXiv 2505.13379).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlsys.types import Batch, Floats

CONSTANT, CONTROL_WEIGHT = 8, 1e-3

# name → weights of each sample's tokens, from the number of tokens of each sample
WEIGHTS: dict[str, Callable[[list[int]], list[list[float]]]] = {
    "token_mean": lambda lengths: [[1 / sum(lengths)] * n for n in lengths],
    "sequence_mean": lambda lengths: [[1 / len(lengths) / n] * n for n in lengths],
    "sequence_sum": lambda lengths: [[1 / len(lengths)] * n for n in lengths],
    "constant": lambda lengths: [[1 / len(lengths) / CONSTANT] * n for n in lengths],
    "decoupled": lambda lengths: [
        [CONTROL_WEIGHT / len(lengths), *[1 / len(lengths) / max(n - 1, 1)] * (n - 1)] for n in lengths
    ],
}


@dataclass(frozen=True)
class PlainSample:
    """A sample of K tokens."""

    prompt: list[int]
    tokens: list[int]
    rollout: list[float]  # [K] log-probs, and so are `old` and `ref`
    old: Tensor
    ref: Floats
    advantages: Floats


class PlainPolicy:
    """The model of a folder, trained by torch's own AdamW."""

    def __init__(self, folder: str):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.adam = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def forward(self, prompt: list[int], tokens: list[int]) -> Tensor:
        """Log-probs of a completion's tokens.  [K]"""
        logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1)[range(len(tokens)), tokens]

    def score(self, batch: Batch) -> list[Tensor]:
        prompts = [batch.prompts[group].tokens for group in batch.groups]
        with torch.no_grad():
            return [self.forward(p, s.tokens.tolist()) for p, s in zip(prompts, batch.samples, strict=True)]

    def update(self, samples: list[PlainSample], normalize: str, lr: float, kl_coef: float) -> dict[str, float]:
        """Makes one update. Returns sums over tokens, the largest mismatch and the norm of the gradient."""
        self.adam.zero_grad()
        lengths = [len(sample.tokens) for sample in samples]
        weights = WEIGHTS[normalize](lengths)
        kl_weights = WEIGHTS["sequence_mean" if normalize == "decoupled" else normalize](lengths)
        rows = zip(samples, weights, kl_weights, strict=True)
        results = [self.backward(sample, torch.tensor(w), kl_coef * torch.tensor(u)) for sample, w, u in rows]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).item()
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        sums = {name: sum(result[name] for result in results) for name in results[0]}
        return sums | {"mismatch_max": max(result["mismatch_max"] for result in results), "grad_norm": norm}

    def backward(self, sample: PlainSample, weights: Tensor, kl_weights: Tensor) -> dict[str, float]:
        """Adds a sample's gradient. Returns its sums over tokens, and its largest mismatch."""
        logprobs = self.forward(sample.prompt, sample.tokens)
        advantages, ref = torch.from_numpy(sample.advantages), torch.from_numpy(sample.ref)
        ratio, d = (logprobs - sample.old).exp(), ref - logprobs
        kl = d.exp() - d - 1
        policy = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = (weights * policy + kl_weights * kl).sum()
        loss.backward()
        mismatch = (sample.old - torch.tensor(sample.rollout)).abs()
        columns = {"loss": loss, "kl": kl, "mismatch": mismatch, "computed": torch.ones_like(kl)}
        columns |= {"clip_low": (ratio < 0.8) & (advantages < 0), "clip_high": (ratio > 1.2) & (advantages > 0)}
        return {name: column.sum().item() for name, column in columns.items()} | {"mismatch_max": mismatch.max().item()}
