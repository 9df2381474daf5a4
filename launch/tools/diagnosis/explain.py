"""Explains why engines and policy disagree: the cause is the hypothesis that removes most of the gap."""

import math
from dataclasses import dataclass, field, replace

import numpy as np

from launch.tools.diagnosis.hypotheses import CAUSES, Hypothesis, HypothesisTester
from rlsys.agreement import Agreement
from rlsys.config.schema import Config
from rlsys.errors import Disagreement, WorkerFailed
from rlsys.interfaces import Diagnosable, ModelFacts
from rlsys.types import Batch, Sample

MAX_UNEXPLAINED_SHARE = 1 / 3  # of the gap may remain under the hypothesis that explains it


@dataclass(frozen=True)
class Diagnosis:
    agreement: Agreement
    tested: list[Hypothesis] = field(default_factory=list)  # in the order of `CAUSES`
    untested: dict[str, str] = field(default_factory=dict)  # cause → why
    tokenizer_remarks: list[str] = field(default_factory=list)  # made whatever the gap is
    bfloat16_gap: float | None = None  # mean by which bfloat16 alone moves the policy's log-probs
    half_precision: bool = False  # engines or policy are configured for it

    @property
    def explanation(self) -> Hypothesis | None:
        """The hypothesis that explains the gap, if one does."""
        finite = [h for h in self.tested if math.isfinite(h.mean)]
        best = min(finite, key=lambda h: h.mean, default=None)
        return best if best and best.mean <= self.agreement.mean * MAX_UNEXPLAINED_SHARE else None

    def __str__(self) -> str:
        """The cause with its figures, or that none of the known causes explains the gap."""
        before = self.agreement.mean
        if h := self.explanation:
            return f"{h.cause}: {h.claim} (gap {before:.2g} → {h.mean:.2g})"
        # Two bfloat16 passes may round differently, so computing in bfloat16 may not remove the gap: compare sizes.
        rounding = self.bfloat16_gap if self.half_precision else None
        if rounding is not None and rounding >= before * MAX_UNEXPLAINED_SHARE:
            return (
                "none of the known causes removes it; it may be rounding, as bfloat16 moves the policy's own log-probs by "
                f"{rounding:.2g}, and the gap is {before:.2g}"
            )
        nearest = min(self.tested, key=lambda h: h.mean, default=None)
        if nearest is None:
            return "none of the known causes could be tested"
        return (
            f"none of the known causes explains it: the nearest is {nearest.cause} ({nearest.claim}), "
            f"with a gap of {nearest.mean:.2g} after {before:.2g}"
        )


def explain_disagreement(
    agreement: Agreement, weights: dict[str, str], *, policy: Diagnosable, config: Config
) -> Disagreement:
    """Makes the error that stops a run: the figures, then their cause. `weights` as in `diagnose`."""
    try:
        cause = str(diagnose(agreement, weights, policy=policy, config=config))
    except WorkerFailed as error:  # which must not hide the disagreement
        cause = f"unknown; the diagnosis failed ({str(error).partition(chr(10))[0]})"
    return Disagreement(
        f"{agreement}. Cause: {cause}. Samples of another policy teach little, so the run stops. "
        "`rlsys doctor CONFIG` shows everything that was tested; a larger trainer.max_mismatch lets the run go on."
    )


def diagnose(agreement: Agreement, weights: dict[str, str], *, policy: Diagnosable, config: Config) -> Diagnosis:
    """Tests all known causes. `weights`: description → model directory of weights that the engines may still have."""
    batch = agreement.batch
    facts = policy.model_facts([p.text for p in batch.prompts] + [s.text for s in batch.samples])
    tester = HypothesisTester(agreement, policy, config, facts, weights)
    half = {config.rollout.dtype, config.policy.dtype} != {"float32"}
    remarks = find_tokenizer_problems(batch, facts)
    diagnosis = Diagnosis(agreement, tokenizer_remarks=remarks, half_precision=half)
    for cause, outcomes in CAUSES.items():
        for outcome in outcomes(tester):
            if isinstance(outcome, str):
                diagnosis.untested[cause] = outcome
            else:
                diagnosis.tested.append(outcome)
    if (rounded := tester.bfloat16_logprobs) is None:
        return diagnosis
    return replace(diagnosis, bfloat16_gap=float(np.abs(rounded.astype(np.float64) - agreement.policy).mean()))


def find_tokenizer_problems(batch: Batch, facts: ModelFacts) -> list[str]:
    """Describes, in sentences, what is unusual in the tokens of prompts and completions."""
    remarks = []
    prompts = batch.prompts
    if facts.tokenizer_vocab > facts.model_vocab:
        remarks.append(
            f"the tokenizer has {facts.tokenizer_vocab} tokens, the model embeds {facts.model_vocab}: "
            "the others have no weights."
        )
    doubled = [p for p in prompts if p.tokens[:2] == [facts.bos, facts.bos]]
    if facts.bos is not None and doubled:
        remarks.append(
            f"{len(doubled)} of {len(prompts)} prompts begin with two BOS tokens: "
            "the template writes one and the tokenizer adds one."
        )
    if facts.eos is not None and facts.model_eos and facts.eos not in facts.model_eos:
        remarks.append(f"the tokenizer ends a text with token {facts.eos}, the model's files with {facts.model_eos}.")
    changed = sum(
        not same_tokens(s, t) for s, t in zip(batch.samples, facts.without_special_tokens[len(prompts) :], strict=True)
    )
    if changed:
        remarks.append(
            f"{changed} of {len(batch.samples)} completions, decoded and encoded again, are other tokens; "
            "nothing here encodes them again, but other tools would."
        )
    return remarks


def same_tokens(sample: Sample, text_tokens: list[int]) -> bool:
    """True if the text encodes to the sampled tokens, except for a special token at the end."""
    tokens = sample.tokens.tolist()
    return tokens[: len(text_tokens)] == text_tokens and len(tokens) - len(text_tokens) <= 1
