"""What the policy minimizes, term by term, and the sums that it reports of each mini-batch."""

from typing import Any, NamedTuple

import torch

from rlsys.algorithms import corrections, kl, losses
from rlsys.config.derived import correction_method, is_supervised, kl_estimator, weighs_tokens_alone
from rlsys.config.methods import LOSSES
from rlsys.config.options import reject_unused_options, select_options
from rlsys.config.plugins import load_function
from rlsys.config.schema import Config
from rlsys.forward.logprob_head import Slopes
from rlsys.forward.transfer import to_device
from rlsys.types import Pack
from workers.learner.bad_sample import FirstBadSample


class Objective:
    """`Objective(config, device)(pack, (logprobs, entropy))` is a pack's share of the loss, a scalar.

    loss = Σ weight · (policy loss · correction + kl_coef · KL − entropy_coef · entropy + old_kl_coef · ½ (log ratio)²)

    With `normalize: decoupled`, all terms but the policy loss have weights of their own.
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
        self.by_token = weighs_tokens_alone(config)
        self.sampled = not is_supervised(config)  # by engines, whose log-probs are compared

    def start_minibatch(self, kl_coef: float) -> None:
        """Resets the sums."""
        names = ["loss", "kl", "clip_low", "clip_high", "mismatch", "mismatch_max", "computed"]
        if self.correction:
            names += ["correction", "correction_squared", "masked", "corrected"]
        self.kl_coef, self.sums = kl_coef, dict.fromkeys(names, torch.zeros((), device=self.device))
        self.bad_sample = FirstBadSample(self.device)

    def sums_over_tokens(self) -> dict[str, float]:
        """Returns sums over the computed tokens, and their largest mismatch. Only this waits for the device."""
        return {name: total.item() for name, total in self.sums.items()}

    def __call__(self, pack: Pack, outputs: tuple[Any, Any]) -> Any:
        logprobs, entropy = outputs  # [K]
        columns = self.columns(pack)
        terms = self.terms(columns, logprobs, entropy)
        total = terms.loss.sum()

        self.bad_sample.observe(pack, logprobs, terms.loss)
        if pack.samples:
            policy, weight = terms.policy, terms.correction
            self.add(loss=total, clip_low=policy.clipped_low, clip_high=policy.clipped_high)
            self.add_mismatch((terms.old - columns.rollout).abs() * self.sampled)
            if terms.kl is not None:
                self.add(kl=terms.kl)
            if weight is not None:
                # The others have no policy loss to correct; whether they are here at all depends on a KL term.
                corrected = columns.advantages != 0
                self.add(correction=weight * corrected, correction_squared=weight.square() * corrected)
                self.add(masked=(weight == 0) & corrected, corrected=corrected)
        return total

    def slopes(self, pack: Pack, factor: float) -> Slopes | None:
        """Returns the gradient of `factor` times the loss by some outputs of a pack. None if it depends on the others."""
        if not self.by_token:
            return None
        columns = self.columns(pack)

        def slopes(
            which: Any, logprobs: torch.Tensor, entropy: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            with torch.enable_grad():
                outputs = logprobs.detach().requires_grad_(), entropy.detach().requires_grad_()
                total = self.terms(columns.some(which), *outputs).loss.sum() * factor
                grad, of_entropy = torch.autograd.grad(total, outputs, allow_unused=True)
            return grad, of_entropy

        return slopes

    def columns(self, pack: Pack) -> "TokenColumns":
        c = pack.columns
        columns = (
            c.old,
            pack.rollout,
            c.advantages,
            pack.sequences,
            c.ref,
            c.old_kl_coef,
            pack.weights,
            c.term_weights,
        )
        return TokenColumns(*(None if column is None else to_device(column, self.device) for column in columns))

    def terms(self, columns: "TokenColumns", logprobs: torch.Tensor, entropy: torch.Tensor) -> "Terms":
        old = logprobs.detach() if columns.old is None else columns.old
        sequences = columns.sequences.long()
        anchor = columns.rollout if self.anchor == "rollout" else old
        policy = self.loss(logprobs, anchor, columns.advantages, sequences, **self.loss_options)
        loss, weight, divergence, weights = policy.loss, None, None, columns.weights
        if self.correction:
            weight = self.correction(old, columns.rollout, sequences, **self.correction_options)
            loss = loss * weight
        if columns.term_weights is not None:
            loss, weights = loss * (columns.weights / columns.term_weights), columns.term_weights
        if columns.ref is not None:
            divergence = self.kl(logprobs, columns.ref)
            loss = loss + self.kl_coef * divergence
        if self.entropy_coef:
            loss = loss - self.entropy_coef * entropy
        if columns.old_kl_coef is not None:
            loss = loss + columns.old_kl_coef * kl.k2(logprobs, old)
        return Terms(loss * weights, policy, weight, divergence, old)

    def add(self, **columns: torch.Tensor) -> None:
        """Adds each column's sum to the sum of the same name."""
        for name, column in columns.items():
            self.sums[name] = self.sums[name] + column.detach().sum()

    def add_mismatch(self, gap: torch.Tensor) -> None:
        """`gap` [K]: |old − rollout|."""
        self.add(mismatch=gap, computed=torch.ones_like(gap))
        self.sums["mismatch_max"] = torch.maximum(self.sums["mismatch_max"], gap.max())


class TokenColumns(NamedTuple):
    """What the loss knows of each target, as tensors [K]; None if the method does not use it."""

    old: Any
    rollout: Any
    advantages: Any
    sequences: Any
    ref: Any
    old_kl_coef: Any
    weights: Any
    term_weights: Any

    def some(self, which: Any) -> "TokenColumns":
        return TokenColumns(*(None if column is None else column[which] for column in self))


class Terms(NamedTuple):
    """A loss per target [K], token weights included, and what it was made of."""

    loss: torch.Tensor
    policy: losses.LossAndClip
    correction: torch.Tensor | None
    kl: torch.Tensor | None
    old: torch.Tensor
