"""What the policy minimizes, term by term, and the sums that it reports of each mini-batch."""

from typing import Any

import torch

from rlsys.algorithms import corrections, kl, losses
from rlsys.config.derived import correction_method, kl_estimator
from rlsys.config.methods import LOSSES
from rlsys.config.options import reject_unused_options, select_options
from rlsys.config.plugins import load_function
from rlsys.config.schema import Config
from rlsys.packs.transfer import to_device
from rlsys.types import Pack
from workers.learner.bad_sample import FirstBadSample


class Objective:
    """`Objective(config, device)(pack, (logprobs, entropy))` is a pack's share of the loss, a scalar.

    loss = Σ weight · (policy loss · correction + kl_coef · KL − entropy_coef · entropy + old_kl_coef · ½ (log ratio)²)
    """

    def __init__(self, config: Config, device: Any):
        a = config.algorithm
        self.device, self.entropy_coef = device, config.entropy.coef
        function = load_function(a.loss, losses.LOSSES, "algorithm.loss")
        reject_unused_options(function, a, "loss", LOSSES)
        self.loss, self.loss_options = losses.report_clip(function), select_options(function, a)
        self.anchor = a.anchor
        self.correction = corrections.CORRECTIONS.get(correction_method(config))
        self.correction_options = select_options(self.correction, config.correction) if self.correction else {}
        self.kl = kl.ESTIMATORS[kl_estimator(config)]

    def start_minibatch(self, kl_coef: float) -> None:
        """Resets the sums."""
        names = ["loss", "kl", "entropy", "clip_low", "clip_high", "mismatch", "mismatch_max", "tokens"]
        if self.correction:
            names += ["correction", "correction_squared", "masked"]
        self.kl_coef, self.sums = kl_coef, dict.fromkeys(names, torch.zeros((), device=self.device))
        self.bad_sample = FirstBadSample(self.device)

    def sums_over_tokens(self) -> dict[str, float]:
        """Returns sums over the mini-batch's tokens, and its largest mismatch. Only this waits for the device."""
        return {name: total.item() for name, total in self.sums.items()}

    def __call__(self, pack: Pack, outputs: tuple[Any, Any]) -> Any:
        logprobs, entropy = outputs  # [K]
        columns = pack.columns
        old = logprobs.detach() if columns.old is None else self.to_tensor(columns.old)
        rollout, sequences = self.to_tensor(pack.rollout), self.to_tensor(pack.sequences).long()

        anchor = rollout if self.anchor == "rollout" else old
        policy = self.loss(logprobs, anchor, self.to_tensor(columns.advantages), sequences, **self.loss_options)
        loss = policy.loss
        weight = self.correction(old, rollout, sequences, **self.correction_options) if self.correction else None
        if weight is not None:
            loss = loss * weight
        divergence = None
        if columns.ref is not None:
            divergence = self.kl(logprobs, self.to_tensor(columns.ref))
            loss = loss + self.kl_coef * divergence
        if self.entropy_coef:
            loss = loss - self.entropy_coef * entropy
        if columns.old_kl_coef is not None:
            loss = loss + self.to_tensor(columns.old_kl_coef) * kl.k2(logprobs, old)
        loss = loss * self.to_tensor(pack.weights)
        total = loss.sum()

        self.bad_sample.observe(pack, logprobs, loss)
        if pack.samples:
            self.add(loss=total, entropy=entropy, clip_low=policy.clipped_low, clip_high=policy.clipped_high)
            self.add_mismatch((old - rollout).abs())
            if divergence is not None:
                self.add(kl=divergence)
            if weight is not None:
                self.add(correction=weight, correction_squared=weight.square(), masked=weight == 0)
        return total

    def add(self, **columns: torch.Tensor) -> None:
        """Adds each column's sum to the sum of the same name."""
        for name, column in columns.items():
            self.sums[name] = self.sums[name] + column.detach().sum()

    def add_mismatch(self, gap: torch.Tensor) -> None:
        """`gap` [K]: |old − rollout|."""
        self.add(mismatch=gap, tokens=torch.ones_like(gap))
        self.sums["mismatch_max"] = torch.maximum(self.sums["mismatch_max"], gap.max())

    def to_tensor(self, values: Any) -> Any:
        return to_device(values, self.device)
