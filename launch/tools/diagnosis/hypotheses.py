"""Possible causes of a disagreement between engines and policy, each tested by computing the log-probs again.

A forward pass under a hypothesis is a `WhatIf`, which a policy rank computes (`workers.learner.proofs.what_if`). If the
engine may have received other tokens, the hypothesis is another batch.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from rlsys.agreement import Agreement
from rlsys.batching.packing import pack, unpack
from rlsys.config.schema import Config
from rlsys.interfaces import STEP_0, Diagnosable, ModelFacts, Sampling, WhatIf
from rlsys.types import Batch, Floats, Sample

TOP_P = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
TOP_K = (5, 10, 20, 40, 50, 100)


@dataclass(frozen=True)
class Hypothesis:
    """`Hypothesis("temperature", "the engine seems to sample at 0.7, the trainer divides by 1", 2e-5, 1e-4)`"""

    cause: str
    claim: str
    mean: float  # |rollout - policy| under this hypothesis
    largest: float


class HypothesisTester:
    """Computes the gap between engines and policy under a hypothesis."""

    def __init__(
        self, agreement: Agreement, policy: Diagnosable, config: Config, facts: ModelFacts, weights: dict[str, str]
    ):
        self.agreement, self.policy, self.config = agreement, policy, config
        self.facts, self.weights, self.batch = facts, weights, agreement.batch
        self.sampling = Sampling(config.rollout.temperature)  # as configured
        self.bfloat16_logprobs: Floats | None = None  # [T] the policy's, if a hypothesis computed them

    def recompute(self, what_if: WhatIf, batch: Batch | None = None) -> Floats:
        """The log-probs under a hypothesis.  [T, samplings]"""
        batch = batch or self.batch
        count = len(batch.samples)
        # A hypothesis about attention is also one about packing: it gets one sequence per pack.
        budget = 1 if what_if.attention else self.config.policy.tokens_per_pack
        packs = pack(batch, range(count), ranks=self.policy.ranks, tokens_per_pack=budget, share_prompts=False)
        return unpack(packs, self.policy.rescore(packs, what_if), count)

    def gaps(self, samplings: list[Sampling]) -> list[tuple[float, float]]:
        return [self.agreement.gap(column) for column in self.recompute(WhatIf(tuple(samplings))).T]

    def test(self, cause: str, claim: str, what_if: WhatIf, batch: Batch | None = None) -> Hypothesis:
        return Hypothesis(cause, claim, *self.agreement.gap(self.recompute(what_if, batch)[:, 0]))


Outcomes = Iterator[Hypothesis | str]  # a str says why the cause could not be tested


def compiled(tester: HypothesisTester) -> Outcomes:
    """Compiled layers. No `WhatIf` uses them: if they are the cause, every hypothesis removes the gap."""
    if tester.config.policy.compile:
        claim = "the trainer's compiled layers give other log-probs than the same layers as they are"
        yield tester.test("compiled layers", claim, WhatIf((tester.sampling,)))


def temperature(tester: HypothesisTester) -> Outcomes:
    """Another temperature: the one that fits best."""
    configured = tester.sampling.temperature
    best = fit_temperature(lambda ts: [mean for mean, _ in tester.gaps([Sampling(t) for t in ts])], configured)
    if math.isclose(best, configured):
        claim = f"no temperature fits better than {configured:g}"
    elif math.isclose(best, 1.0):
        claim = f"the engine's log-probs seem to be from before temperature, the trainer divides by {configured:g}"
    else:
        claim = f"the engine seems to sample at {best:g}, the trainer divides by {configured:g}"
    yield tester.test("temperature", claim, WhatIf((Sampling(best),)))


def fit_temperature(gaps: Callable[[list[float]], list[float]], configured: float) -> float:
    """The temperature with the smallest gap, rounded as far as it still explains the gap."""
    grid = [configured * 2 ** (i / 4) for i in range(-16, 17)] + [1.0]
    for _ in range(3):
        measured = gaps(grid)
        i = sorted(range(len(grid)), key=lambda i: (measured[i], abs(grid[i] - configured)))[0]
        best, least = grid[i], measured[i]
        below = max((t for t in grid if t < best), default=best / 2)
        above = min((t for t in grid if t > best), default=best * 2)
        grid = [best, *np.linspace(below, above, 17).tolist()]
    rounded = [round(best, digits) for digits in range(4)]
    rounded = [t for t in rounded if t > 0] + [best]
    return next(t for t, gap in zip(rounded, gaps(rounded), strict=True) if gap <= 1.1 * least + 1e-6)


def top_p(tester: HypothesisTester) -> Outcomes:
    model_default = tester.facts.generation.get("top_p", 1.0)
    values = sorted({*TOP_P, model_default} - {1.0})
    yield from best_truncation(tester, "top-p", [replace(tester.sampling, top_p=p) for p in values])


def top_k(tester: HypothesisTester) -> Outcomes:
    generation = tester.facts.generation
    values = sorted({*TOP_K, int(generation.get("top_k", 0))})
    samplings = [replace(tester.sampling, top_k=k) for k in values if 0 < k < tester.facts.model_vocab]
    yield from best_truncation(tester, "top-k", samplings)
    if len(generation) > 1:
        temperature = tester.sampling.temperature
        temperatures = sorted({temperature, generation.get("temperature", temperature)})
        top_p, top_k = generation.get("top_p", 1.0), int(generation.get("top_k", 0))
        samplings = [Sampling(t, top_p, top_k) for t in temperatures]
        yield from best_truncation(tester, "top-k", samplings, " (of the model's generation_config.json)")


def best_truncation(tester: HypothesisTester, cause: str, samplings: list[Sampling], source: str = "") -> Outcomes:
    """The best of several truncated distributions."""
    if not samplings:
        return
    (mean, largest), s = min(zip(tester.gaps(samplings), samplings, strict=True), key=lambda pair: pair[0])
    options = [f"temperature {s.temperature:g}"] if s.temperature != tester.sampling.temperature else []
    options += [f"top_p {s.top_p:g}"] if s.top_p < 1 else []
    options += [f"top_k {s.top_k}"] if s.top_k else []
    claim = f"the engine seems to sample with {' and '.join(options)}{source}, the trainer takes the whole vocabulary"
    yield Hypothesis(cause, claim, mean, largest)


def dtype(tester: HypothesisTester) -> Outcomes:
    engine, trainer = tester.config.rollout.dtype, tester.config.policy.dtype
    other = "bfloat16" if trainer == "float32" else "float32"
    claim = f"the engine computes in {other}, the trainer in {trainer}"
    if engine == trainer:
        claim = f"the engine seems to compute in {other}, though both are configured for {trainer}"
    if other == "float32" and tester.config.policy.zero_stage == 3:
        yield "ZeRO 3 shards that are bfloat16 cannot compute in float32"
        return
    [logprobs] = tester.recompute(WhatIf((tester.sampling,), dtype=other)).T
    if other == "bfloat16":
        tester.bfloat16_logprobs = logprobs
    yield Hypothesis("dtype", claim, *tester.agreement.gap(logprobs))


def tokenizer(tester: HypothesisTester) -> Outcomes:
    """The engine may have computed with other tokens than the trainer: those of another tokenizer call."""
    batch, sampling = tester.batch, WhatIf((tester.sampling,))
    tested = []
    for claim, tokens in other_prompt_tokens(batch, tester.facts).items():
        if tokens != [p.tokens for p in batch.prompts] and tokens not in tested and all(tokens):
            tested.append(tokens)
            claim = f"the engine seems to have seen the prompt {claim}"
            yield tester.test("tokenizer", claim, sampling, replace_prompts(batch, tokens))
    reencoded = reencode_completions(batch, tester.facts)
    if any(not np.array_equal(a.tokens, b.tokens) for a, b in zip(reencoded, batch.samples, strict=True)):
        claim = "the engine's log-probs seem to be of the completion's text, encoded again"
        yield tester.test("tokenizer", claim, sampling, replace(batch, samples=reencoded))
    if not tested:
        yield "prompts and completions, encoded again, are the same tokens"


def other_prompt_tokens(batch: Batch, facts: ModelFacts) -> dict[str, list[list[int]]]:
    """The prompts as other tokenizer calls would have encoded them, by description."""
    count = len(batch.prompts)
    prompts = [p.tokens for p in batch.prompts]
    others = {
        "without the tokens in front that its text does not have": facts.without_special_tokens[:count],
        "with special tokens in front": facts.with_special_tokens[:count],
    }
    if facts.bos is not None:
        others["with one more BOS in front"] = [[facts.bos, *tokens] for tokens in prompts]
        others["without its BOS"] = [t[1:] if t[:1] == [facts.bos] and len(t) > 1 else t for t in prompts]
    return others


def padding(tester: HypothesisTester) -> Outcomes:
    lengths = [len(p.tokens) for p in tester.batch.prompts]
    longest = max(lengths)
    if min(lengths) == longest:
        yield f"all prompts have {longest} tokens: there is nothing to pad"
        return
    for side, claim in (
        ("left", "positions seem to begin at the padding in front of a prompt"),
        ("right", "positions of completions seem to begin behind the longest prompt"),
    ):
        what_if = WhatIf((tester.sampling,), positions=side, longest_prompt=longest)
        yield tester.test("padding", claim, what_if)
    pad = tester.facts.pad if tester.facts.pad is not None else tester.facts.eos
    if pad is not None:
        tokens = [[pad] * (longest - len(p.tokens)) + p.tokens for p in tester.batch.prompts]
        claim = "the padding in front of a prompt seems to be seen"
        yield tester.test("padding", claim, WhatIf((tester.sampling,)), replace_prompts(tester.batch, tokens))


def stale_weights(tester: HypothesisTester) -> Outcomes:
    for name, folder in {"step 0": STEP_0, **tester.weights}.items():
        what_if = WhatIf((tester.sampling,), weights=folder)
        yield tester.test("stale weights", f"the engine seems to have the weights of {name}", what_if)


def packing(tester: HypothesisTester) -> Outcomes:
    claim = "the trainer's packs give other log-probs than the model's own attention, one sequence at a time"
    yield tester.test("packing", claim, WhatIf((tester.sampling,), attention="own"))


CAUSES: dict[str, Callable[[HypothesisTester], Outcomes]] = {
    "compiled layers": compiled,
    "temperature": temperature,
    "top-p": top_p,
    "top-k": top_k,
    "dtype": dtype,
    "tokenizer": tokenizer,
    "padding": padding,
    "stale weights": stale_weights,
    "packing": packing,
}


def replace_prompts(batch: Batch, tokens: list[list[int]]) -> Batch:
    """The same completions after other prompts."""
    return replace(batch, prompts=[replace(p, tokens=t) for p, t in zip(batch.prompts, tokens, strict=True)])


def reencode_completions(batch: Batch, facts: ModelFacts) -> list[Sample]:
    """Replaces the tokens of each completion by those of its text, if they are as many: others cannot be compared."""
    text_tokens = facts.without_special_tokens[len(batch.prompts) :]
    return [reencode_completion(sample, tokens) for sample, tokens in zip(batch.samples, text_tokens, strict=True)]


def reencode_completion(sample: Sample, text_tokens: list[int]) -> Sample:
    end = sample.tokens[-1:].tolist() if len(text_tokens) == len(sample.tokens) - 1 else []
    tokens = np.array(text_tokens + end, dtype=np.int32)
    return replace(sample, tokens=tokens) if len(tokens) == len(sample.tokens) else sample
