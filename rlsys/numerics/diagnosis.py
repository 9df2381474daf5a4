"""Why engines and policy disagree: each usual cause is supposed to be true, and the log-probs are computed again.

The supposition that removes most of the gap is the cause. A forward pass under a supposition is a `Variant`, which a policy rank
computes (`workers.learner.what_if`); what the engine may have been given instead of our tokens is another batch. Nothing is trained.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from rlsys.config.schema import Config
from rlsys.interfaces import STEP_0, Diagnosable, ModelFacts, Sampling, WhatIf
from rlsys.numerics.agreement import Agreement, Disagreement
from rlsys.packs.packing import pack, unpack
from rlsys.runs.errors import WorkerFailed
from rlsys.types import Batch, Floats, Sample

MAX_UNEXPLAINED_SHARE = 1 / 3  # of the gap may be left
TOP_P = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
TOP_K = (5, 10, 20, 40, 50, 100)


@dataclass(frozen=True)
class Hypothesis:
    """`Supposition("temperature", "the engine seems to sample at 0.7, the trainer divides by 1", 2e-5, 1e-4)`"""

    cause: str
    claim: str
    mean: float  # |rollout - policy| if it were so
    largest: float


@dataclass(frozen=True)
class Diagnosis:
    agreement: Agreement
    tested: list[Hypothesis] = field(default_factory=list)  # in the order of `CAUSES`
    untested: dict[str, str] = field(default_factory=dict)  # cause → why
    tokenizer_remarks: list[str] = field(default_factory=list)  # about the tokenizer, whatever the gap is
    bfloat16_gap: float | None = None  # mean by which bfloat16 alone moves the policy's log-probs

    @property
    def explanation(self) -> Hypothesis | None:
        """What explains the gap."""
        there = [s for s in self.tested if math.isfinite(s.mean)]
        best = min(there, key=lambda s: s.mean, default=None)
        return best if best and best.mean <= self.agreement.mean * MAX_UNEXPLAINED_SHARE else None

    def __str__(self) -> str:
        """The cause with its figures, or that there is none among those known."""
        before = self.agreement.mean
        if best := self.explanation:
            return f"{best.cause}: {best.claim} (gap {before:.2g} → {best.mean:.2g})"
        # Two bfloat16 passes need not round alike, so that computing in it does not remove the gap: its size has to do.
        if self.bfloat16_gap is not None and self.bfloat16_gap >= before * MAX_UNEXPLAINED_SHARE:
            return f"dtype: rounding to bfloat16 moves the policy's own log-probs by {self.bfloat16_gap:.2g}, and the gap is {before:.2g}"
        least = min(self.tested, key=lambda s: s.mean, default=None)
        return "nothing that is known explains it: " + (
            f"the nearest is {least.cause} ({least.claim}), with a gap of {least.mean:.2g} after {before:.2g}"
            if least
            else "nothing could be tried"
        )


def explain_disagreement(
    agreement: Agreement, policy: Diagnosable, config: Config, weights: dict[str, str]
) -> Disagreement:
    """What stops a run: the figures, then their cause."""
    try:
        cause = str(diagnose(agreement, policy, config, weights))
    except WorkerFailed as error:  # which must not hide what was found
        cause = f"unknown; looking for it failed ({str(error).partition(chr(10))[0]})"
    return Disagreement(
        f"{agreement}. Cause: {cause}. What is learned from samples of another policy is worth little, so the run stops. "
        "`rlsys doctor CONFIG` shows all that was tried; a larger trainer.max_mismatch lets it pass."
    )


def diagnose(agreement: Agreement, policy: Diagnosable, config: Config, weights: dict[str, str]) -> Diagnosis:
    """Tries everything. `weights`: what engines may still have, beside those of step 0; in words → model directory."""
    facts = policy.model_facts([p.text for p in agreement.batch.prompts] + [s.text for s in agreement.batch.samples])
    trial = HypothesisTester(agreement, policy, config, facts, weights)
    diagnosis = Diagnosis(agreement, tokenizer_remarks=find_tokenizer_problems(agreement.batch, facts))
    for cause, suppositions in CAUSES.items():
        for supposed in suppositions(trial):
            if isinstance(supposed, str):
                diagnosis.untested[cause] = supposed
            else:
                diagnosis.tested.append(supposed)
    rounded = trial.bfloat16_logprobs
    rounding = None if rounded is None else float(np.abs(rounded.astype(np.float64) - agreement.policy).mean())
    return replace(diagnosis, bfloat16_gap=rounding)


class HypothesisTester:
    """What a supposition is tried on."""

    def __init__(
        self, found: Agreement, policy: Diagnosable, config: Config, facts: ModelFacts, weights: dict[str, str]
    ):
        self.found, self.policy, self.config, self.facts, self.weights = found, policy, config, facts, weights
        self.batch, self.now = found.batch, Sampling(config.rollout.temperature)
        self.bfloat16_logprobs: Floats | None = None  # [T] the policy's log-probs in bfloat16

    def recompute(self, variant: WhatIf, batch: Batch | None = None) -> Floats:
        """[T, samplings]"""
        batch = batch or self.batch
        count = len(batch.samples)
        # A supposition about attention is one about packing too: there, every sequence has a pack of its own.
        budget = 1 if variant.attention else self.config.policy.tokens_per_pack
        packs = pack(batch, range(count), ranks=self.policy.ranks, tokens_per_pack=budget, share_prompts=False)
        return unpack(packs, self.policy.rescore(packs, variant), count)

    def gaps(self, samplings: list[Sampling]) -> list[tuple[float, float]]:
        return [self.found.gap(column) for column in self.recompute(WhatIf(tuple(samplings))).T]

    def test(self, cause: str, claim: str, variant: WhatIf, batch: Batch | None = None) -> Hypothesis:
        return Hypothesis(cause, claim, *self.found.gap(self.recompute(variant, batch)[:, 0]))


Outcomes = Iterator[Hypothesis | str]  # a str: why no more could be tried


def compiled(trial: HypothesisTester) -> Outcomes:
    """Every variant is computed without; this one comes first, as all agree if compiled layers are the cause."""
    if trial.config.policy.compile:
        claim = "the trainer's compiled layers give other log-probs than the same layers as they are"
        yield trial.test("compiled layers", claim, WhatIf((trial.now,)))


def temperature(trial: HypothesisTester) -> Outcomes:
    """The temperature that fits best."""
    now = trial.now.temperature

    def gaps(temperatures: list[float]) -> list[float]:
        return [mean for mean, _ in trial.gaps([Sampling(t) for t in temperatures])]

    best = fit_temperature(gaps, now)
    if math.isclose(best, now):
        claim = f"no temperature fits better than {now:g}"
    elif math.isclose(best, 1.0):
        claim = f"the engine's log-probs seem to be from before temperature, the trainer divides by {now:g}"
    else:
        claim = f"the engine seems to sample at {best:g}, the trainer divides by {now:g}"
    yield trial.test("temperature", claim, WhatIf((Sampling(best),)))


def fit_temperature(gaps: Callable[[list[float]], list[float]], now: float) -> float:
    """The temperature of the smallest gap, as round a number as explains it."""
    grid = [now * 2 ** (i / 4) for i in range(-16, 17)] + [1.0]
    for _ in range(3):
        found = gaps(grid)
        i = sorted(range(len(grid)), key=lambda i: (found[i], abs(grid[i] - now)))[0]
        best, least = grid[i], found[i]
        below = max((t for t in grid if t < best), default=best / 2)
        above = min((t for t in grid if t > best), default=best * 2)
        grid = [best, *np.linspace(below, above, 17).tolist()]
    round_ones = [round(best, digits) for digits in range(4)]
    round_ones = [t for t in round_ones if t > 0] + [best]
    return next(t for t, gap in zip(round_ones, gaps(round_ones), strict=True) if gap <= 1.1 * least + 1e-6)


def top_p(trial: HypothesisTester) -> Outcomes:
    own = trial.facts.generation.get("top_p", 1.0)
    yield from best_truncation(trial, "top-p", [replace(trial.now, top_p=p) for p in sorted({*TOP_P, own} - {1.0})])


def top_k(trial: HypothesisTester) -> Outcomes:
    own, most = int(trial.facts.generation.get("top_k", 0)), trial.facts.embeddings
    ks = [k for k in sorted({*TOP_K, own}) if 0 < k < most]
    yield from best_truncation(trial, "top-k", [replace(trial.now, top_k=k) for k in ks])
    if len(trial.facts.generation) > 1:
        g = trial.facts.generation
        warm = {trial.now.temperature, g.get("temperature", trial.now.temperature)}
        together = [Sampling(t, g.get("top_p", 1.0), int(g.get("top_k", 0))) for t in sorted(warm)]
        yield from best_truncation(trial, "top-k", together, " (of the model's generation_config.json)")


def best_truncation(trial: HypothesisTester, cause: str, samplings: list[Sampling], where: str = "") -> Outcomes:
    """The best of several truncated distributions."""
    if samplings:
        (mean, largest), s = min(zip(trial.gaps(samplings), samplings, strict=True), key=lambda pair: pair[0])
        said = [f"temperature {s.temperature:g}"] if s.temperature != trial.now.temperature else []
        said += [f"top_p {s.top_p:g}"] if s.top_p < 1 else []
        said += [f"top_k {s.top_k}"] if s.top_k else []
        what = " and ".join(said)
        yield Hypothesis(
            cause,
            f"the engine seems to sample with {what}{where}, the trainer takes the whole vocabulary",
            mean,
            largest,
        )


def dtype(trial: HypothesisTester) -> Outcomes:
    engine, own = trial.config.rollout.dtype, trial.config.policy.dtype
    other = "bfloat16" if own == "float32" else "float32"
    claim = f"the engine computes in {other}, the trainer in {own}"
    if engine == own:
        claim = f"the engine seems to compute in {other}, though both are to compute in {own}"
    if other == "float32" and trial.config.policy.zero_stage == 3:
        yield "ZeRO 3 shards that are bfloat16 cannot compute in float32"
        return
    [computed] = trial.recompute(WhatIf((trial.now,), dtype=other)).T
    if other == "bfloat16":
        trial.bfloat16_logprobs = computed
    yield Hypothesis("dtype", claim, *trial.found.gap(computed))


def tokenizer(trial: HypothesisTester) -> Outcomes:
    """Other tokens than those that were sent and came back."""
    batch, facts = trial.batch, trial.facts
    count = len(batch.prompts)
    prompts = [p.tokens for p in batch.prompts]
    others = {
        "without the tokens in front that its text does not have": facts.bare[:count],
        "with special tokens in front": facts.encoded[:count],
    }
    if facts.bos is not None:
        others["with one more BOS in front"] = [[facts.bos, *tokens] for tokens in prompts]
        others["without its BOS"] = [t[1:] if t[:1] == [facts.bos] and len(t) > 1 else t for t in prompts]
    tried = []
    for claim, tokens in others.items():
        if tokens != prompts and tokens not in tried and all(tokens):
            tried.append(tokens)
            claim = f"the engine seems to have seen the prompt {claim}"
            yield trial.test("tokenizer", claim, WhatIf((trial.now,)), replace_prompts(batch, tokens))
    again = reencode_completions(batch, facts)
    if any(not np.array_equal(a.tokens, b.tokens) for a, b in zip(again, batch.samples, strict=True)):
        claim = "the engine's log-probs seem to be of the completion's text, encoded again"
        yield trial.test("tokenizer", claim, WhatIf((trial.now,)), replace(batch, samples=again))
    if not tried:
        yield "prompts and completions, encoded again, are the same tokens"


def padding(trial: HypothesisTester) -> Outcomes:
    lengths = [len(p.tokens) for p in trial.batch.prompts]
    longest = max(lengths)
    if min(lengths) == longest:
        yield f"all prompts have {longest} tokens: there is nothing to pad"
        return
    for side, claim in (
        ("left", "positions seem to begin at the padding in front of a prompt"),
        ("right", "positions of completions seem to begin behind the longest prompt"),
    ):
        variant = WhatIf((trial.now,), positions=side, longest_prompt=longest)
        yield trial.test("padding", claim, variant)
    pad = trial.facts.pad if trial.facts.pad is not None else trial.facts.eos
    if pad is not None:
        tokens = [[pad] * (longest - len(p.tokens)) + p.tokens for p in trial.batch.prompts]
        claim = "the padding in front of a prompt seems to be seen"
        yield trial.test("padding", claim, WhatIf((trial.now,)), replace_prompts(trial.batch, tokens))


def stale_weights(trial: HypothesisTester) -> Outcomes:
    for which, folder in {"step 0": STEP_0, **trial.weights}.items():
        variant = WhatIf((trial.now,), weights=folder)
        yield trial.test("stale weights", f"the engine seems to have the weights of {which}", variant)


def attention(trial: HypothesisTester) -> Outcomes:
    claim = "the trainer's packed attention gives other log-probs than plain attention, one sequence at a time"
    yield trial.test("attention kernel", claim, WhatIf((trial.now,), attention="plain"))


CAUSES: dict[str, Callable[[HypothesisTester], Outcomes]] = {
    "compiled layers": compiled,
    "temperature": temperature,
    "top-p": top_p,
    "top-k": top_k,
    "dtype": dtype,
    "tokenizer": tokenizer,
    "padding": padding,
    "stale weights": stale_weights,
    "attention kernel": attention,
}


def replace_prompts(batch: Batch, tokens: list[list[int]]) -> Batch:
    """The same completions of other prompts."""
    return replace(batch, prompts=[replace(p, tokens=t) for p, t in zip(batch.prompts, tokens, strict=True)])


def reencode_completions(batch: Batch, facts: ModelFacts) -> list[Sample]:
    """Each completion as the tokens of its text, where those are as many: others cannot be compared token by token."""

    def one(sample: Sample, tokens: list[int]) -> Sample:
        end = sample.tokens[-1:].tolist() if len(tokens) == len(sample.tokens) - 1 else []
        again = np.array(tokens + end, dtype=np.int32)
        return replace(sample, tokens=again) if len(again) == len(sample.tokens) else sample

    return [one(s, t) for s, t in zip(batch.samples, facts.bare[len(batch.prompts) :], strict=True)]


def find_tokenizer_problems(batch: Batch, facts: ModelFacts) -> list[str]:
    """What is odd about tokens, in sentences."""
    said = []
    prompts = batch.prompts
    if facts.symbols > facts.embeddings:
        said.append(
            f"the tokenizer has {facts.symbols} tokens, the model embeds {facts.embeddings}: the others have no weights."
        )
    doubled = [p for p in prompts if p.tokens[:2] == [facts.bos, facts.bos]]
    if facts.bos is not None and doubled:
        said.append(
            f"{len(doubled)} of {len(prompts)} prompts begin with two BOS tokens: "
            "the template writes one and the tokenizer adds one."
        )
    if facts.eos is not None and facts.ends and facts.eos not in facts.ends:
        said.append(f"the tokenizer ends a text with token {facts.eos}, the model's files with {facts.ends}.")
    changed = sum(not same_tokens(s, t) for s, t in zip(batch.samples, facts.bare[len(prompts) :], strict=True))
    if changed:
        said.append(
            f"{changed} of {len(batch.samples)} completions, decoded and encoded again, are other tokens; "
            "nothing here encodes them again, but other tools would."
        )
    return said


def same_tokens(sample: Sample, again: list[int]) -> bool:
    """Whether the text's tokens are the sampled ones, special tokens at the end aside."""
    tokens = sample.tokens.tolist()
    return tokens[: len(again)] == again and len(tokens) - len(again) <= 1
