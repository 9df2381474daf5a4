"""The papers' formulas as plain loops in double precision, without torch. Tests compare the tensor code with them.

ADVANTAGES[name](rewards, groups, **options) -> one advantage per sample
LOSSES[name](logprobs, old, advantages, sequences, weights, **options) -> losses, and d Σ weight · loss / d log-prob
KL[name](logprobs, ref) -> values, and their derivatives by log-prob
CORRECTIONS[name](old, rollout, sequences, **options) -> one weight per token

Derivatives are derived by hand; `differences` checks them numerically.
"""

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

Numbers = list[float]
Pair = tuple[Numbers, Numbers]

# --- advantages -------------------------------------------------------------------------------------------------------


def members(ids: Sequence[int]) -> list[list[int]]:
    """The positions of each id.  [7, 3, 7] -> [[0, 2], [1]]"""
    positions: dict[int, list[int]] = {}
    for i, label in enumerate(ids):
        positions.setdefault(label, []).append(i)
    return list(positions.values())


def deviation(values: Numbers, std: str) -> float:
    """sqrt(Σ (x - mean)² / (n - 1)) for `sample`, / n for `population`; 0 for a single value."""
    if len(values) == 1:
        return 0.0
    squares = math.fsum((x - fmean(values)) ** 2 for x in values)
    return math.sqrt(squares / (len(values) - 1 if std == "sample" else len(values)))


def standardize(values: Numbers, std: str, eps: float) -> Numbers:
    """(x - mean) / (deviation + eps); without division for `none`; 0 for equal values."""
    if min(values) == max(values):
        return [0.0] * len(values)
    divisor = 1.0 if std == "none" else deviation(values, std) + eps
    return [(x - fmean(values)) / divisor for x in values]


def grouped(function: Callable[[Numbers], Numbers], rewards: Numbers, groups: Sequence[int]) -> Numbers:
    """Applies a function of one group's rewards to every group."""
    out = [0.0] * len(rewards)
    for group in members(groups):
        for i, advantage in zip(group, function([rewards[i] for i in group]), strict=True):
            out[i] = advantage
    return out


def grpo(rewards: Numbers, groups: Sequence[int], *, std: str = "sample", eps: float = 1e-6) -> Numbers:
    """A_i = (r_i - mean(r)) / (std(r) + eps).  arXiv 2402.03300, section 4.1.2"""
    return grouped(lambda group: standardize(group, std, eps), rewards, groups)


def dr_grpo(rewards: Numbers, groups: Sequence[int]) -> Numbers:
    """A_i = r_i - mean(r).  arXiv 2503.20783"""
    return grouped(lambda group: [r - fmean(group) for r in group], rewards, groups)


def rloo(rewards: Numbers, groups: Sequence[int]) -> Numbers:
    """A_i = r_i - 1/(G-1) Σ_{j≠i} r_j.  arXiv 2402.14740"""

    def of_group(group: Numbers) -> Numbers:
        others = [group[:i] + group[i + 1 :] for i in range(len(group))]
        return [r - fmean(rest) if rest else 0.0 for r, rest in zip(group, others, strict=True)]

    return grouped(of_group, rewards, groups)


def reinforce_pp(
    rewards: Numbers,
    groups: Sequence[int],
    *,
    lengths: Sequence[int],
    whiten_over: str = "tokens",
    std: str = "sample",
    eps: float = 1e-6,
) -> Numbers:
    """A_i = (r_i - mean(batch)) / (std(batch) + eps), over samples or over tokens.  arXiv 2501.03262"""
    tokens = [r for r, length in zip(rewards, lengths, strict=True) for _ in range(length)]
    if whiten_over == "samples" or not tokens:
        return standardize(rewards, std, eps)
    mean = tokens[0] if min(tokens) == max(tokens) else fmean(tokens)
    divisor = 1.0 if std == "none" else deviation(tokens, std) + eps
    return [(r - mean) / divisor if length else 0.0 for r, length in zip(rewards, lengths, strict=True)]


def reinforce_pp_baseline(rewards: Numbers, groups: Sequence[int], **options: Any) -> Numbers:
    """A'_i = r_i - mean(group);  A_i = (A'_i - mean(batch of A')) / (std(batch of A') + eps).  arXiv 2501.03262"""
    return reinforce_pp(dr_grpo(rewards, groups), groups, **options)


def opo(rewards: Numbers, groups: Sequence[int], *, lengths: Sequence[int]) -> Numbers:
    """A_i = r_i - Σ_j l_j r_j / Σ_j l_j.  arXiv 2505.23585"""
    out = [0.0] * len(rewards)
    for group in members(groups):
        total = sum(lengths[i] for i in group)
        weights = [lengths[i] / total if total else 1 / len(group) for i in group]
        baseline = math.fsum(w * rewards[i] for w, i in zip(weights, group, strict=True))
        for i in group:
            out[i] = rewards[i] - baseline
    return out


def grpo_passk(rewards: Numbers, groups: Sequence[int], *, std: str = "sample", eps: float = 1e-6) -> Numbers:
    """A_i = (max_j r_j - max_{j≠i} r_j) / (std(r) + eps).  arXiv 2503.19595, divided as GRPO does"""

    def of_group(group: Numbers) -> Numbers:
        others = [group[:i] + group[i + 1 :] for i in range(len(group))]
        divisor = 1.0 if std == "none" else deviation(group, std) + eps
        return [(max(group) - max(rest)) / divisor if rest else 0.0 for rest in others]

    return grouped(of_group, rewards, groups)


def gdpo(
    rewards: list[Numbers],
    groups: Sequence[int],
    *,
    weights: Sequence[float] | None = None,
    std: str = "sample",
    eps: float = 1e-6,
    whiten: bool = True,
) -> Numbers:
    """A_i = Σ_k w_k (r_ik - mean_k) / (std_k + eps), finally divided by the batch deviation.  arXiv 2601.05242"""
    columns = [list(column) for column in zip(*rewards, strict=True)]
    total = [0.0] * len(groups)
    for column, weight in zip(columns, weights or [1.0] * len(columns), strict=True):
        for i, advantage in enumerate(grpo(column, groups, std=std, eps=eps)):
            total[i] += weight * advantage
    return standardize(total, "sample", eps) if whiten else total


def max_rl(rewards: Numbers, groups: Sequence[int], *, eps: float = 1e-6) -> Numbers:
    """A_i = (r_i - mean(r)) / (mean(r) + eps).  arXiv 2602.02710"""
    return grouped(lambda group: [(r - fmean(group)) / (fmean(group) + eps) for r in group], rewards, groups)


def remax(rewards: Numbers, groups: Sequence[int], *, greedy: Numbers) -> Numbers:
    """A_i = r_i - r(greedy completion of the same prompt); 0 if that has no reward.  arXiv 2310.10505"""
    return [0.0 if math.isnan(g) else r - g for r, g in zip(rewards, greedy, strict=True)]


def raw(rewards: Numbers, groups: Sequence[int]) -> Numbers:
    """A_i = r_i.  Williams 1992"""
    return list(rewards)


ADVANTAGES: dict[str, Callable[..., Numbers]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "opo": opo,
    "grpo_passk": grpo_passk,
    "gdpo": gdpo,
    "max_rl": max_rl,
    "remax": remax,
    "raw": raw,
}

# --- losses -----------------------------------------------------------------------------------------------------------


def clipped(value: float, advantage: float, low: float, high: float) -> float:
    """min(x A, clip(x, low, high) A) / A: the advantage decides which of the two bounds counts."""
    if advantage == 0:
        return value
    return min(value, high) if advantage > 0 else max(value, low)


def ppo_clip(
    logprobs: Numbers,
    old: Numbers,
    advantages: Numbers,
    sequences: Sequence[int],
    weights: Numbers,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 10.0,
) -> Pair:
    """-min(r A, clip(r, 1 - ε_low, 1 + ε_high) A); for A < 0 at most -c A, if c is not 0.  arXiv 1707.06347, 2503.14476, 1912.09729"""
    losses, gradient = [], []
    for logprob, before, advantage, weight in zip(logprobs, old, advantages, weights, strict=True):
        r = math.exp(logprob - before)
        kept = clipped(r, advantage, 1 - clip_low, 1 + clip_high)
        if dual_clip and advantage < 0:
            kept = min(kept, dual_clip)
        losses.append(-kept * advantage)
        gradient.append(-weight * advantage * r if kept == r else 0.0)  # dr / d log π = r
    return losses, gradient


def advantage_clip(
    logprobs: Numbers,
    old: Numbers,
    advantages: Numbers,
    sequences: Sequence[int],
    weights: Numbers,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 10.0,
) -> Pair:
    """ppo_clip, token by token, with ε_low and ε_high times 1 + |A| / (1 + |A|)."""
    losses, gradient = [], []
    for logprob, before, a, weight in zip(logprobs, old, advantages, weights, strict=True):
        width = 1 + abs(a) / (1 + abs(a))
        bounds = {"clip_low": clip_low * width, "clip_high": clip_high * width, "dual_clip": dual_clip}
        loss, slope = ppo_clip([logprob], [before], [a], [0], [weight], **bounds)
        losses += loss
        gradient += slope
    return losses, gradient


def gspo(
    logprobs: Numbers,
    old: Numbers,
    advantages: Numbers,
    sequences: Sequence[int],
    weights: Numbers,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Pair:
    """s = (π(y) / old(y))^(1/|y|);  -min(s A, clip(s, 1 - ε_low, 1 + ε_high) A).  arXiv 2507.18071, eq. 5, 7 and 13"""
    losses, gradient = [0.0] * len(logprobs), [0.0] * len(logprobs)
    for sequence in members(sequences):
        s = math.exp(sum(logprobs[t] - old[t] for t in sequence)) ** (1 / len(sequence))
        for t in sequence:
            kept = clipped(s, advantages[t], 1 - clip_low, 1 + clip_high)
            losses[t] = -kept * advantages[t]
            if kept == s:  # s_t = sg(s) π_t / sg(π_t)
                gradient[t] = -weights[t] * advantages[t] * s
    return losses, gradient


def dcpo(
    logprobs: Numbers,
    old: Numbers,
    advantages: Numbers,
    sequences: Sequence[int],
    weights: Numbers,
    *,
    clip_low: float = 0.16,
    clip_high: float = 0.2,
    max_ratio: float = 10.0,
) -> Pair:
    """0.5 + ½ √max(1 - 4 ε_low / q, 0) <= r <= 0.5 + ½ √(1 + 4 ε_high / q), and r <= 10.  arXiv 2509.02333, eq. 4"""
    losses, gradient = [], []
    for logprob, before, advantage, weight in zip(logprobs, old, advantages, weights, strict=True):
        r, q = math.exp(logprob - before), math.exp(before)
        low = 0.5 + math.sqrt(max(1 - 4 * clip_low / q, 0)) / 2
        high = 0.5 + math.sqrt(1 + 4 * clip_high / q) / 2
        kept = min(clipped(r, advantage, low, high), max_ratio)
        losses.append(-kept * advantage)
        gradient.append(-weight * advantage * r if kept == r else 0.0)
    return losses, gradient


def cispo(
    logprobs: Numbers,
    old: Numbers,
    advantages: Numbers,
    sequences: Sequence[int],
    weights: Numbers,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> Pair:
    """-sg(clip(r, 1 - ε_low, 1 + ε_high)) A log π.  arXiv 2506.13585, eq. 4 and 5"""
    losses, gradient = [], []
    for logprob, before, advantage, weight in zip(logprobs, old, advantages, weights, strict=True):
        kept = max(min(math.exp(logprob - before), 1 + clip_high), 1 - clip_low)
        losses.append(-kept * advantage * logprob)
        gradient.append(-weight * kept * advantage)
    return losses, gradient


def gmpo(
    logprobs: Numbers,
    old: Numbers,
    advantages: Numbers,
    sequences: Sequence[int],
    weights: Numbers,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> Pair:
    """-A (Π_t min over the clip (e^-ε_low, e^ε_high) of r_t)^(1/|y|).  arXiv 2507.20673"""
    losses, gradient = [0.0] * len(logprobs), [0.0] * len(logprobs)
    for sequence in members(sequences):
        ratios = {t: math.exp(logprobs[t] - old[t]) for t in sequence}
        kept = {t: clipped(ratios[t], advantages[t], math.exp(-clip_low), math.exp(clip_high)) for t in sequence}
        mean = math.prod(kept.values()) ** (1 / len(sequence))
        for t in sequence:
            losses[t] = -advantages[t] * mean
            for u in sequence:  # d mean / d log π_u = mean / |y|, if u is not clipped
                gradient[u] -= weights[t] * advantages[t] * mean / len(sequence) * (kept[u] == ratios[u])
    return losses, gradient


def sapo(
    logprobs: Numbers,
    old: Numbers,
    advantages: Numbers,
    sequences: Sequence[int],
    weights: Numbers,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Pair:
    """-σ(τ (r - 1)) 4/τ A.  arXiv 2511.20347"""
    losses, gradient = [], []
    for logprob, before, advantage, weight in zip(logprobs, old, advantages, weights, strict=True):
        r = math.exp(logprob - before)
        tau = tau_pos if advantage > 0 else tau_neg
        gate = 1 / (1 + math.exp(-tau * (r - 1)))
        losses.append(-gate * 4 / tau * advantage)
        gradient.append(-weight * advantage * 4 * gate * (1 - gate) * r)
    return losses, gradient


def dppo_tv(
    logprobs: Numbers,
    old: Numbers,
    advantages: Numbers,
    sequences: Sequence[int],
    weights: Numbers,
    *,
    clip_low: float = 0.15,
    clip_high: float = 0.15,
    max_ratio: float = 20.0,
) -> Pair:
    """-M min(r, C) A, its gradient -M min(r, C) A ∇ log π; M = 0 where A > 0 and π - old > δ_high, or A < 0 and old - π > δ_low.  arXiv 2602.04879"""
    losses, gradient = [], []
    for logprob, before, advantage, weight in zip(logprobs, old, advantages, weights, strict=True):
        up = math.exp(logprob) - math.exp(before)
        gone = up > clip_high if advantage > 0 else -up > clip_low
        losses.append(0.0 if gone else -min(math.exp(logprob - before), max_ratio) * advantage)
        gradient.append(weight * losses[-1])
    return losses, gradient


def reinforce(logprobs: Numbers, old: Numbers, advantages: Numbers, sequences: Sequence[int], weights: Numbers) -> Pair:
    """-A log π.  Williams 1992"""
    losses = [-a * p for a, p in zip(advantages, logprobs, strict=True)]
    return losses, [-w * a for w, a in zip(weights, advantages, strict=True)]


LOSSES: dict[str, Callable[..., Pair]] = {
    "ppo_clip": ppo_clip,
    "advantage_clip": advantage_clip,
    "gspo": gspo,
    "dcpo": dcpo,
    "cispo": cispo,
    "gmpo": gmpo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "reinforce": reinforce,
    "nll": reinforce,  # whose advantages are 1 then
}


def value_loss(values: Numbers, old: Numbers, returns: Numbers, *, clip: float = 0.2) -> Pair:
    """½ max((V - R)², (clip(V, V_old ± ε) - R)²), and its derivative by V.  PPO as in arXiv 2005.12729"""
    losses, slopes = [], []
    for value, before, target in zip(values, old, returns, strict=True):
        near = min(max(value, before - clip), before + clip)
        free, bounded = (value - target) ** 2 / 2, (near - target) ** 2 / 2
        losses.append(max(free, bounded))
        slopes.append(value - target if near == value or free > bounded else 0.0)
    return losses, slopes


def differences(total: Callable[[Numbers], float], at: Numbers, step: float = 1e-6) -> Numbers:
    """The gradient of a function by central differences."""
    slopes = []
    for i in range(len(at)):
        up, down = [*at], [*at]
        up[i], down[i] = at[i] + step, at[i] - step
        slopes.append((total(up) - total(down)) / (2 * step))
    return slopes


# --- KL ---------------------------------------------------------------------------------------------------------------


def k1(logprobs: Numbers, ref: Numbers) -> Pair:
    """log(π/ref)"""
    return [p - q for p, q in zip(logprobs, ref, strict=True)], [1.0] * len(ref)


def k2(logprobs: Numbers, ref: Numbers) -> Pair:
    """½ log²(π/ref)"""
    gaps = k1(logprobs, ref)[0]
    return [gap**2 / 2 for gap in gaps], gaps


def k3(logprobs: Numbers, ref: Numbers) -> Pair:
    """ref/π - 1 - log(ref/π).  Schulman 2020; ref/π of at most 13.6, where the value is 10"""
    shares = [min(math.exp(q - p), 13.6) for p, q in zip(logprobs, ref, strict=True)]
    return [share - 1 - math.log(share) for share in shares], [1 - share for share in shares]


def k3_unbiased(logprobs: Numbers, ref: Numbers) -> Pair:
    """The value of k3 with the derivative of k2, whose mean is the gradient of KL(π ‖ ref).  arXiv 2510.01555"""
    return k3(logprobs, ref)[0], k2(logprobs, ref)[1]


KL: dict[str, Callable[[Numbers, Numbers], Pair]] = {"k1": k1, "k2": k2, "k3": k3, "k3_unbiased": k3_unbiased}

# --- corrections ------------------------------------------------------------------------------------------------------


def token_ratios(old: Numbers, rollout: Numbers, sequences: Sequence[int]) -> Numbers:
    """old(y_t) / rollout(y_t)"""
    return [math.exp(a - b) for a, b in zip(old, rollout, strict=True)]


def sequence_ratios(old: Numbers, rollout: Numbers, sequences: Sequence[int]) -> Numbers:
    """Π_t old(y_t) / rollout(y_t), for each token of the sequence"""
    single, out = token_ratios(old, rollout, sequences), [0.0] * len(old)
    for sequence in members(sequences):
        for t in sequence:
            out[t] = math.prod(single[u] for u in sequence)
    return out


def tis(old: Numbers, rollout: Numbers, sequences: Sequence[int], *, high: float = 2.0) -> Numbers:
    """min(ratio, C)"""
    return [min(r, high) for r in token_ratios(old, rollout, sequences)]


def mis(old: Numbers, rollout: Numbers, sequences: Sequence[int], *, high: float = 2.0) -> Numbers:
    """ratio · 1[ratio <= C]"""
    return [r if r <= high else 0.0 for r in token_ratios(old, rollout, sequences)]


def sequence_tis(old: Numbers, rollout: Numbers, sequences: Sequence[int], *, high: float = 2.0) -> Numbers:
    """min(ratio of the sequence, C)"""
    return [min(r, high) for r in sequence_ratios(old, rollout, sequences)]


def sequence_mis(old: Numbers, rollout: Numbers, sequences: Sequence[int], *, high: float = 2.0) -> Numbers:
    """ratio of the sequence · 1[ratio of the sequence <= C]"""
    return [r if r <= high else 0.0 for r in sequence_ratios(old, rollout, sequences)]


def icepop(old: Numbers, rollout: Numbers, sequences: Sequence[int], *, low: float = 0.5, high: float = 5.0) -> Numbers:
    """ratio · 1[α <= ratio <= β].  arXiv 2510.18855"""
    return [r if low <= r <= high else 0.0 for r in token_ratios(old, rollout, sequences)]


CORRECTIONS: dict[str, Callable[..., Numbers]] = {
    "tis": tis,
    "mis": mis,
    "sequence_tis": sequence_tis,
    "sequence_mis": sequence_mis,
    "icepop": icepop,
}

# --- sums and time ----------------------------------------------------------------------------------------------------


def token_weights(
    lengths: Sequence[int],
    normalize: str,
    *,
    constant: int = 0,
    control_weight: float = 1e-3,
    starts: Sequence[bool] | None = None,
) -> Numbers:
    """The weight of every token in: 1/Σl ΣΣ, 1/N Σ 1/l Σ, 1/N ΣΣ, 1/(N L) ΣΣ, 1/N Σ (α first + 1/(l-1) Σ rest).

    In the last, a sequence that does not start with a control token is 1/N 1/l Σ.
    """
    out, count = [], len(lengths)
    for length, start in zip(lengths, starts or [True] * count, strict=True):
        for position in range(length):
            if normalize == "token_mean":
                out.append(1 / sum(lengths))
            elif normalize == "sequence_mean":
                out.append(1 / count / length)
            elif normalize == "sequence_sum":
                out.append(1 / count)
            elif normalize == "constant":
                out.append(1 / count / constant)
            elif normalize == "decoupled":
                is_control = start and position == 0
                out.append(control_weight / count if is_control else 1 / count / (length - start))
    return out


def gae(rewards: Numbers, values: Numbers, sequences: Sequence[int], *, gamma: float = 1.0, lam: float = 1.0) -> Pair:
    """A_t = δ_t + γ λ A_{t+1},  δ_t = r_t + γ V_{t+1} - V_t,  backward from each end.  arXiv 1506.02438"""
    advantages = [0.0] * len(rewards)
    for sequence in members(sequences):
        following, to_come = 0.0, 0.0
        for t in reversed(sequence):
            to_come = rewards[t] + gamma * following - values[t] + gamma * lam * to_come
            advantages[t], following = to_come, values[t]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]
