"""What the policy minimizes, checked by hand with two sequences, of two tokens and of one token."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlsys.batching.minibatches import loss_weights, weigh_other_terms
from rlsys.batching.packing import empty_pack, pack
from rlsys.config.schema import Config
from rlsys.errors import ConfigError
from rlsys.types import Batch, Columns, Floats, Ints, Pack, Prompt, Sample
from workers.learner.objective import Objective


def floats(*values: float) -> Floats:
    return np.array(values, dtype=np.float32)


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int32)


LOGPROBS = floats(-1.0, -2.0, -0.5)
PACK = Pack(
    tokens=ints(1, 2, 3, 4),
    lengths=[2, 2],
    parent=[-1, -1],
    targets=ints(2, 3, 4),
    samples=[0, 1],
    target_counts=[2, 1],
    turn_counts=[2, 1],
    first_logit=[0, 3],
    next_logits=[1, 4],
    rollout=LOGPROBS,
    weights=floats(0.5, 0.25, 0.25),
    columns=Columns(advantages=floats(1, 1, -2), old=LOGPROBS),
)


def objective(config: Config, kl_coef: float = 0.0) -> Objective:
    created = Objective(config, "cpu")
    created.start_minibatch(kl_coef)
    return created


def outputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(LOGPROBS, requires_grad=True), torch.tensor([0.1, 0.2, 0.3], requires_grad=True)


def with_columns(**columns: Floats | None) -> Pack:
    return replace(PACK, columns=replace(PACK.columns, **columns))


def test_on_policy_it_is_the_weighted_sum_of_the_policy_gradient(tiny: Callable[..., Config]) -> None:
    loss = objective(tiny())
    logprobs, entropy = outputs()
    total = loss(PACK, (logprobs, entropy))
    total.backward()  # type: ignore[no-untyped-call]
    assert total.item() == pytest.approx(-0.5 - 0.25 + 0.5)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-0.5, -0.25, 0.5])
    assert entropy.grad is None
    assert loss.sums_over_tokens()["loss"] == pytest.approx(-0.25)
    assert [loss.sums_over_tokens()[name] for name in ("computed", "kl", "mismatch", "clip_low", "clip_high")] == [
        3,
        0,
        0,
        0,
        0,
    ]
    assert "correction" not in loss.sums_over_tokens()


def test_without_old_log_probs_the_policy_is_its_own_anchor(tiny: Callable[..., Config]) -> None:
    loss = objective(tiny())
    without_old = replace(PACK, columns=Columns(advantages=PACK.columns.advantages))
    assert loss(without_old, outputs()).item() == loss(PACK, outputs()).item()


def test_the_kl_term_has_the_coefficient_of_the_call(tiny: Callable[..., Config]) -> None:
    loss = objective(tiny("algorithm.kl=k2"), kl_coef=0.5)
    plain = loss(PACK, outputs()).item()
    total = loss(with_columns(ref=LOGPROBS - 1), outputs()).item()
    assert total - plain == pytest.approx(0.5 * 0.5 * 1.0), (
        "coefficient, k2 of a log-ratio of 1, weights of one together"
    )
    assert loss.sums_over_tokens()["kl"] == pytest.approx(1.5)


@pytest.mark.parametrize("loss", ["ppo_clip", "advantage_clip", "dcpo", "cispo", "sapo", "dppo_tv", "reinforce"])
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["correction.method=icepop"],
        ["algorithm.anchor=rollout"],
        ["entropy.coef=2"],
        ["trainer.updates_per_step=1"],
    ],
    ids=str,
)
def test_the_gradient_at_some_targets_is_known_without_the_others(
    tiny: Callable[..., Config], loss: str, options: list[str]
) -> None:
    if (loss, options) == ("reinforce", ["algorithm.anchor=rollout"]):
        pytest.skip("refused: no ratio")
    pack = replace(
        with_columns(
            old=None if "trainer.updates_per_step=1" in options else LOGPROBS - floats(0.1, -0.1, 0.3),
            ref=LOGPROBS - 1,
            old_kl_coef=floats(3, 3, 0),
        ),
        rollout=LOGPROBS + floats(0.2, -0.1, 0.1),
    )
    on_policy = ["trainer.updates_per_step=1"] * (loss == "reinforce")
    terms = objective(tiny(f"algorithm.loss={loss}", *options, *on_policy), kl_coef=0.5)
    logprobs, entropy = outputs()
    (terms(pack, (logprobs, entropy)) * 3).backward()
    slopes = terms.slopes(pack, 3)
    assert slopes
    assert logprobs.grad is not None
    for which in (slice(0, 2), slice(2, 3), torch.tensor([2, 0])):
        grad, of_entropy = slopes(which, logprobs.detach()[which], entropy.detach()[which])
        assert torch.equal(grad, logprobs.grad[which])
        assert (of_entropy is None) == (entropy.grad is None)
        if of_entropy is not None and entropy.grad is not None:
            assert torch.equal(of_entropy, entropy.grad[which])


@pytest.mark.parametrize("options", ["algorithm.loss=gspo", "algorithm.loss=gmpo", "correction.method=sequence_mis"])
def test_the_gradient_of_a_loss_of_whole_sequences_waits_for_them(tiny: Callable[..., Config], options: str) -> None:
    assert objective(tiny(options)).slopes(PACK, 1) is None


def test_the_entropy_bonus_lowers_the_loss_and_has_a_gradient(tiny: Callable[..., Config]) -> None:
    loss = objective(tiny("entropy.coef=2"))
    logprobs, entropy = outputs()
    total = loss(PACK, (logprobs, entropy))
    total.backward()  # type: ignore[no-untyped-call]
    assert total.item() == pytest.approx(-0.25 - 2 * (0.05 + 0.05 + 0.075))
    assert entropy.grad is not None
    assert entropy.grad.tolist() == pytest.approx([-1.0, -0.5, -0.5])


def test_kl_cov_keeps_its_tokens_near_their_old_log_probs(tiny: Callable[..., Config]) -> None:
    loss = objective(tiny("algorithm.loss=reinforce", "trainer.updates_per_step=1"))
    pack = with_columns(old=LOGPROBS - floats(0, 2, 2), old_kl_coef=floats(3, 3, 0))
    logprobs, entropy = outputs()
    plain = loss(with_columns(old=LOGPROBS - floats(0, 2, 2)), outputs()).item()
    total = loss(pack, (logprobs, entropy))
    assert total.item() - plain == pytest.approx(0.25 * 3 * 2), (
        "the second token: weight, coefficient, half of two squared"
    )


def test_a_correction_weights_the_policy_loss_but_not_the_kl(tiny: Callable[..., Config]) -> None:
    loss = objective(tiny("correction.method=mis", "correction.high=1.5"), kl_coef=1.0)
    rollout = LOGPROBS - np.log(floats(0.5, 1.0, 2.0))  # ratios old / rollout
    pack = replace(with_columns(ref=LOGPROBS - 1), rollout=rollout)
    total = loss(pack, outputs()).item()
    kl = math.exp(-1)  # k3 of a log-ratio of 1: e^-1 + 1 - 1
    assert total == pytest.approx(-0.5 * 0.5 - 0.25 * 1.0 + 0.0 + kl, rel=1e-5)
    assert loss.sums_over_tokens()["correction"] == pytest.approx(1.5)
    assert loss.sums_over_tokens()["correction_squared"] == pytest.approx(1.25)
    assert loss.sums_over_tokens()["masked"] == 1
    assert loss.sums_over_tokens()["mismatch_max"] == pytest.approx(math.log(2), rel=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_degrpo_decouples_the_policy_loss_and_nothing_else(tiny: Callable[..., Config], seed: int) -> None:
    """1/G Σ_i (α L_i0 + 1/T_i Σ_t L_it + 1/(1 + T_i) Σ_t (β KL - c H)), Σ_t over T_i tokens without the control token.

    arXiv 2505.13379, eq. 4 for L and KL. Answers without a control token are means as in GRPO.
    """
    alpha, beta, bonus, control = 0.01, 0.7, 0.3, 5
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, 6).tolist()
    config = tiny("algorithm.normalize=decoupled", f"algorithm.control_weight={alpha}", f"entropy.coef={bonus}")
    first, members = [control, 1, control, control, 2, control], [0, 1, 3, 4, 5]
    tokens = [ints(token, *[3] * (n - 1)) for token, n in zip(first, lengths, strict=True)]
    samples = [Sample("p", i, "", t, np.zeros(len(t), np.float32), "stop", 0) for i, t in enumerate(tokens)]
    prompt = Prompt("p", "made", "", [2, 4], {})
    batch = Batch([prompt], samples, np.zeros(6, np.int64), rng.normal(size=6).astype(np.float32), [{}] * 6)
    old, moves, gaps = (-rng.random((3, sum(lengths))) * [[3], [0.4], [1]]).astype(np.float32)
    ref = old + moves + gaps
    columns = Columns(advantages=np.repeat(batch.rewards, lengths), old=old, ref=ref)
    new, entropies = torch.tensor(old + moves, requires_grad=True), torch.rand(sum(lengths), requires_grad=True)

    expected: torch.Tensor = torch.zeros(())
    ends = np.cumsum(lengths).tolist()
    for m in members:
        losses, others = [], []
        for t in range(ends[m] - lengths[m], ends[m]):
            ratio, advantage, d = (new[t] - float(old[t])).exp(), float(batch.rewards[m]), float(ref[t]) - new[t]
            losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
            others.append(beta * (d.exp() - d - 1) - bonus * entropies[t])
        rest = losses
        if first[m] == control:
            expected, rest = expected + alpha * losses[0] / len(members), losses[1:]
        expected = expected + sum(rest) / max(len(rest), 1) / len(members) + sum(others) / len(others) / len(members)
    wanted = torch.autograd.grad(expected, (new, entropies))

    weighed = weigh_other_terms(config, batch, members, columns)
    weights = loss_weights(config, batch, members, [control])
    packs = pack(batch, members, ranks=2, tokens_per_pack=24, columns=weighed, weights=weights)
    loss, parts = objective(config, kl_coef=beta), batch.split(np.arange(sum(lengths)))
    total: torch.Tensor = torch.zeros(())
    for p in packs[0] + packs[1]:
        places = torch.from_numpy(np.concatenate([parts[m] for m in p.samples] or [ints()])).long()
        total = total + loss(p, (new[places], entropies[places]))
        slopes = loss.slopes(p, 1)
        assert slopes
        of_logprobs, of_entropies = slopes(slice(None), new.detach()[places], entropies.detach()[places])
        torch.testing.assert_close(of_logprobs, wanted[0][places], atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(of_entropies, wanted[1][places], atol=1e-6, rtol=1e-4)
    assert total.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    for actual, grad in zip(torch.autograd.grad(total, (new, entropies)), wanted, strict=True):
        torch.testing.assert_close(actual, grad, atol=1e-6, rtol=1e-4)


def test_clipped_tokens_are_counted_by_side(tiny: Callable[..., Config]) -> None:
    loss = objective(tiny("algorithm.clip_low=0.1", "algorithm.clip_high=0.3"))
    loss(with_columns(old=LOGPROBS - np.log(floats(1.5, 1.2, 0.8))), outputs())
    assert (loss.sums_over_tokens()["clip_low"], loss.sums_over_tokens()["clip_high"]) == (1, 1)


def test_a_users_loss_gets_the_options_that_it_names(
    tiny: Callable[..., Config], tmp_path: "pytest.TempPathFactory"
) -> None:
    file = f"{tmp_path}/mine.py"
    with open(file, "w") as out:
        out.write(
            "def mine(logprobs, old, advantages, sequences, *, clip_high): return clip_high * advantages * logprobs\n"
        )
    loss = objective(tiny(f"algorithm.loss={file}:mine", "algorithm.clip_high=3"))
    assert loss(PACK, outputs()).item() == pytest.approx(3 * (-0.5 - 0.5 + 0.25))
    assert loss.sums_over_tokens()["clip_high"] == 0


@pytest.mark.parametrize(
    ("result", "returned"),
    [
        ("-(logprobs * advantages).mean()", r"a tensor \[\]"),
        ("logprobs[:, None]", r"a tensor \[3, 1\]"),
        ("0.0", "a float"),
    ],
)
def test_a_users_loss_returns_one_number_per_token(
    tiny: Callable[..., Config], tmp_path: Path, result: str, returned: str
) -> None:
    """A mean would be weighted by every token's weight, in silence."""
    (tmp_path / "mine.py").write_text(f"def mine(logprobs, old, advantages, sequences): return {result}\n")
    loss = objective(tiny(f"algorithm.loss={tmp_path}/mine.py:mine"))
    with pytest.raises(ConfigError, match=f"algorithm.loss: the function returned {returned} for 3 tokens"):
        loss(PACK, outputs())


def test_a_users_loss_need_not_know_of_ranks_without_sequences(tiny: Callable[..., Config], tmp_path: Path) -> None:
    """`max` of no tokens raises an error."""
    (tmp_path / "mine.py").write_text("def mine(logprobs, old, a, sequences): return -logprobs * a / a.abs().max()\n")
    loss, none = objective(tiny(f"algorithm.loss={tmp_path}/mine.py:mine")), floats()
    total = loss(empty_pack(Columns(advantages=none)), (torch.zeros(0, requires_grad=True),) * 2)
    total.backward()  # type: ignore[no-untyped-call]
    assert total.item() == 0


def test_a_pack_that_adds_nothing_has_a_gradient_of_zero(tiny: Callable[..., Config]) -> None:
    loss = objective(tiny("correction.method=tis", "entropy.coef=1"), kl_coef=1.0)
    nothing = torch.zeros(0, requires_grad=True)
    none = floats()
    total = loss(empty_pack(Columns(advantages=none, old=none, ref=none, old_kl_coef=none)), (nothing, nothing))
    total.backward()  # type: ignore[no-untyped-call]
    assert total.item() == 0
    assert set(loss.sums_over_tokens().values()) == {0.0}


def first_bad_sample(config: Config, *packs: Pack) -> float:
    loss = objective(config, kl_coef=1.0)
    for p in packs:
        loss(p, outputs()).backward()  # type: ignore[no-untyped-call]
    return loss.bad_sample.index()


def test_the_first_sample_that_is_not_a_number_is_found(tiny: Callable[..., Config]) -> None:
    good, bad = floats(1, 1, 1), floats(1, math.nan, math.inf)
    assert first_bad_sample(tiny(), PACK, with_columns(advantages=good)) == math.inf
    elsewhere = replace(with_columns(advantages=bad), samples=[7, 4])
    assert first_bad_sample(tiny(), elsewhere) == 4, "both are bad; the first in the batch, wherever it is packed"
    assert first_bad_sample(tiny(), replace(elsewhere, samples=[3, 9]), elsewhere, PACK) == 3


def test_an_infinite_loss_or_an_infinite_gradient_is_found(tiny: Callable[..., Config]) -> None:
    assert first_bad_sample(tiny(), with_columns(ref=floats(-1, -2, -math.inf))) == 1
    steep = with_columns(advantages=floats(-3e38, 1, 1), old=LOGPROBS)
    assert (
        first_bad_sample(
            tiny("algorithm.loss=reinforce", "trainer.updates_per_step=1"), replace(steep, weights=floats(1, 1, 1))
        )
        == math.inf
    )
    loss = objective(tiny())
    logprobs, entropy = outputs()
    total = loss(PACK, (logprobs, entropy))
    (total + (logprobs[2] * 0).sqrt()).backward()
    assert loss.bad_sample.index() == 1, "the square root is 0, its slope is infinite"


# --- samples of another policy ----------------------------------------------------------------------------------------

# Three completions of one token: the logits of the policy and of the engine that sampled, and the rewards.
POLICY_LOGITS, ENGINE_LOGITS = torch.tensor([0.3, -0.2, 0.1]), torch.tensor([0.25, -0.1, 0.05])
COMPLETION_REWARDS = torch.tensor([1.0, 0.0, -0.5])


def off_policy_gradient(config: Config) -> torch.Tensor:
    """The gradient of the loss over all completions, each with the engine's probability as its weight.  [3]"""
    sampled = ENGINE_LOGITS.log_softmax(0)
    pack = replace(
        PACK,
        targets=ints(0, 1, 2),
        rollout=sampled.numpy(),
        weights=sampled.exp().numpy(),
        columns=Columns(advantages=COMPLETION_REWARDS.numpy()),
    )
    logits = POLICY_LOGITS.clone().requires_grad_()
    loss: torch.Tensor = objective(config)(pack, (logits.log_softmax(0), torch.zeros(3)))
    return torch.autograd.grad(loss, logits)[0]


def reward_gradient() -> torch.Tensor:
    """The gradient of minus the policy's mean reward.  [3]"""
    logits = POLICY_LOGITS.clone().requires_grad_()
    return torch.autograd.grad(-(logits.softmax(0) * COMPLETION_REWARDS).sum(), logits)[0]


@pytest.mark.parametrize(
    "options", [[], ["algorithm.loss=reinforce"], ["algorithm.loss=dppo_tv"], ["algorithm.anchor=rollout"]]
)
def test_samples_of_older_weights_have_the_policys_own_gradient_by_default(
    tiny: Callable[..., Config], options: list[str]
) -> None:
    config = tiny("pipeline.max_lag=1", "trainer.updates_per_step=1", *options)
    torch.testing.assert_close(off_policy_gradient(config), reward_gradient(), atol=1e-6, rtol=1e-5)


def test_uncorrected_samples_of_older_weights_have_another_gradient(tiny: Callable[..., Config]) -> None:
    gradient = off_policy_gradient(tiny("pipeline.max_lag=1", "correction.method=none"))
    assert (gradient - reward_gradient()).norm() > 0.03 * reward_gradient().norm()


def test_the_ratio_to_the_engine_is_clipped_however_many_updates_ago_it_sampled(tiny: Callable[..., Config]) -> None:
    """The first token is 1.5 times as likely as when it was sampled, and good; the old log-probs say nothing of that."""
    pack = replace(PACK, rollout=LOGPROBS - np.log(floats(1.5, 1.0, 1.0)))
    by_anchor = {}
    for anchor in ("old", "rollout"):
        loss = objective(tiny(f"algorithm.anchor={anchor}"))
        logprobs, entropy = outputs()
        loss(pack, (logprobs, entropy)).backward()  # type: ignore[no-untyped-call]
        assert logprobs.grad is not None
        by_anchor[anchor] = (logprobs.grad[0].item(), loss.sums_over_tokens()["clip_high"])
    assert by_anchor == {"old": (-0.5, 0), "rollout": (0, 1)}
