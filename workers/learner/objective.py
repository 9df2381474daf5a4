"""What the policy minimises, term by term, and what it tells of each pack."""

from typing import Any

import torch

from rlsys.algorithms import corrections, kl, losses
from rlsys.config.options import options, refuse_unheard
from rlsys.config.plugins import find
from rlsys.config.schema import LOSSES, Config
from rlsys.types import Pack
from workers.learner.bad_sample import Culprit


class Objective:
    """`Objective(config, device)(pack, (logprobs, entropy))` is a pack's share of the loss, a scalar."""

    def __init__(self, config: Config, device: Any):
        a = config.algorithm
        self.device, self.entropy_coef = device, config.entropy.coef
        function = find(a.loss, losses.LOSSES, "algorithm.loss")
        refuse_unheard(function, a, "loss", LOSSES)
        self.loss, self.loss_options = losses.telling(function), options(function, a)
        self.correction = corrections.CORRECTIONS.get(config.correction.method)
        self.correction_options = options(self.correction, config.correction) if self.correction else {}
        self.kl = kl.ESTIMATORS[a.kl]

    def begin(self, kl_coef: float) -> None:
        """Starts a mini-batch."""
        names = ["loss", "kl", "entropy", "clip_low", "clip_high", "mismatch", "mismatch_max", "tokens"]
        if self.correction:
            names += ["correction", "correction_squared", "masked"]
        self.kl_coef, self.sums = kl_coef, dict.fromkeys(names, torch.zeros((), device=self.device))
        self.culprit = Culprit(self.device)

    def end(self) -> dict[str, float]:
        """The sums over the mini-batch's tokens, and the largest mismatch. Until here nothing waits for the device."""
        return {name: total.item() for name, total in self.sums.items()}

    def __call__(self, pack: Pack, answer: tuple[Any, Any]) -> Any:
        logprobs, entropy = answer  # [K]
        columns = pack.columns
        old = logprobs.detach() if columns.old is None else self.tensor(columns.old)
        rollout, sequences = self.tensor(pack.rollout), self.tensor(pack.sequences).long()

        told = self.loss(logprobs, old, self.tensor(columns.advantages), sequences, **self.loss_options)
        loss = told.loss
        weight = self.correction(old, rollout, sequences, **self.correction_options) if self.correction else None
        if weight is not None:
            loss = loss * weight
        divergence = None
        if columns.ref is not None:
            divergence = self.kl(logprobs, self.tensor(columns.ref))
            loss = loss + self.kl_coef * divergence
        if self.entropy_coef:
            loss = loss - self.entropy_coef * entropy
        if columns.anchor is not None:
            loss = loss + self.tensor(columns.anchor) * kl.k2(logprobs, old)
        loss = loss * self.tensor(pack.weights)
        total = loss.sum()
        self.culprit.watch(pack, logprobs, loss)

        if pack.samples:
            gap = (old - rollout).abs()
            self.add(loss=total, entropy=entropy, clip_low=told.low, clip_high=told.high, mismatch=gap)
            self.add(tokens=torch.ones_like(gap))
            self.sums["mismatch_max"] = torch.maximum(self.sums["mismatch_max"], gap.max())
            if divergence is not None:
                self.add(kl=divergence)
            if weight is not None:
                self.add(correction=weight, correction_squared=weight.square(), masked=weight == 0)
        return total

    def add(self, **columns: torch.Tensor) -> None:
        for name, column in columns.items():
            self.sums[name] = self.sums[name] + column.detach().sum()

    def tensor(self, values: Any) -> Any:
        return torch.tensor(values, device=self.device)
