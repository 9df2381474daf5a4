"""The cause is the hypothesis that removes the gap. A fake policy with known log-probs plays each cause."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from fakes import make_batch, make_config

from launch.tools.diagnosis.explain import Diagnosis, diagnose, explain_disagreement, find_tokenizer_problems
from launch.tools.diagnosis.hypotheses import fit_temperature, reencode_completions
from rlsys.agreement import Agreement
from rlsys.config.schema import Config
from rlsys.errors import WorkerFailed
from rlsys.interfaces import STEP_0, ModelFacts, Sampling, WhatIf
from rlsys.types import Batch, Floats, Pack

FACTS = ModelFacts(
    bos=None,
    eos=1,
    pad=0,
    model_eos=[1],
    tokenizer_vocab=13,
    model_vocab=13,
    generation={},
    with_special_tokens=[],
    without_special_tokens=[],
)
Gap = Callable[[Pack, WhatIf, Sampling], float]


class CausePolicy:
    """A policy whose log-probs are the engine's plus `gap(pack, what_if, sampling)`."""

    def __init__(self, gap: Gap, facts: ModelFacts = FACTS, ranks: int = 2):
        self.gap, self.facts_of_model, self.ranks = gap, facts, ranks

    def score(self, packs: list[list[Pack]]) -> list[list[Floats]]:
        raise AssertionError("the log-probs are measured already")

    def rescore(self, packs: list[list[Pack]], what_if: WhatIf) -> list[list[Floats]]:
        assert len(packs) == self.ranks
        return [
            [
                np.stack([p.rollout + np.float32(self.gap(p, what_if, s)) for s in what_if.samplings], axis=1)
                for p in rank_packs
            ]
            for rank_packs in packs
        ]

    def model_facts(self, texts: list[str]) -> ModelFacts:
        without = self.facts_of_model.without_special_tokens or [[] for _ in texts]
        with_special = self.facts_of_model.with_special_tokens or without
        return replace(self.facts_of_model, without_special_tokens=without, with_special_tokens=with_special)


@pytest.fixture
def config(tmp_path) -> Config:
    return make_config(tmp_path)


def make_agreement(gap: float = 1.0, prompt_lengths: list[int] | None = None) -> Agreement:
    """Four samples whose policy log-probs are off by `gap`."""
    batch = make_batch([0] * 4, [0, 1, 2, 3], [3, 2, 4, 1], prompt_lengths)
    return Agreement(batch, np.concatenate([s.logprobs for s in batch.samples]) + np.float32(gap), 1e-3)


def run_diagnosis(
    config: Config, gap: Gap, facts: ModelFacts = FACTS, *, before: float = 1.0, prompt_lengths: list[int] | None = None
) -> Diagnosis:
    measured = make_agreement(before, prompt_lengths)
    return diagnose(measured, {"the checkpoint of step 7": "/somewhere"}, policy=CausePolicy(gap, facts), config=config)


def agrees_if(applies: Callable[[Pack, WhatIf, Sampling], bool], gap: float = 1.0) -> Gap:
    """Agrees if `applies`, and is off by `gap` otherwise."""
    return lambda pack, what_if, sampling: 2e-5 if applies(pack, what_if, sampling) else gap


@pytest.mark.parametrize(
    ("applies", "message"),
    [
        (lambda p, v, s: s.top_p == 0.9, "top-p: the engine seems to sample with top_p 0.9"),
        (lambda p, v, s: s.top_k == 10, "top-k: the engine seems to sample with top_k 10"),
        (lambda p, v, s: v.dtype == "bfloat16", "dtype: the engine seems to compute in bfloat16, though"),
        (lambda p, v, s: v.weights == STEP_0, "stale weights: the engine seems to have the weights of step 0"),
        (
            lambda p, v, s: v.weights == "/somewhere",
            "stale weights: the engine seems to have the weights of the checkpoint",
        ),
        (
            lambda p, v, s: v.attention == "own",
            "packing: the trainer's packs give other log-probs",
        ),
        (
            lambda p, v, s: v.positions == "left" and v.longest_prompt == 5,
            "padding: positions seem to begin at the padding",
        ),
        (
            lambda p, v, s: v.positions == "right" and v.longest_prompt == 5,
            "padding: positions of completions seem to begin",
        ),
    ],
)
def test_the_cause_is_named_with_the_gap_before_and_after(config, applies, message):
    diagnosis = run_diagnosis(config, agrees_if(applies), prompt_lengths=[5, 4, 4, 3])
    assert str(diagnosis).startswith(message)
    assert str(diagnosis).endswith("(gap 1 → 2e-05)")


def test_the_temperature_that_fits_is_found(config):
    diagnosis = run_diagnosis(config, lambda p, v, s: abs(s.temperature - 0.7) + 2e-5)
    assert str(diagnosis) == "temperature: the engine seems to sample at 0.7, the trainer divides by 1 (gap 1 → 2e-05)"


def test_compiled_layers_are_named_if_every_hypothesis_removes_the_gap(config):
    built = replace(config, policy=replace(config.policy, compile=True))
    assert str(run_diagnosis(built, lambda p, v, s: 2e-5)).startswith(
        "compiled layers: the trainer's compiled layers give"
    )


def test_log_probs_from_before_temperature_are_named(config):
    warm = replace(config, rollout=replace(config.rollout, temperature=0.6))
    diagnosis = run_diagnosis(warm, lambda p, v, s: abs(s.temperature - 1))
    assert str(diagnosis).startswith(
        "temperature: the engine's log-probs seem to be from before temperature, the trainer divides by 0.6"
    )


@pytest.mark.parametrize("true", [0.07, 0.7, 1.0, 1.234, 9.5])
def test_a_fitted_temperature_is_rounded_as_far_as_possible(true):
    assert fit_temperature(lambda ts: [abs(np.log(t / true)) for t in ts], configured=1.0) == pytest.approx(
        true, rel=1e-3
    )


def test_the_models_generation_config_is_tested_with_its_temperature(config):
    facts = replace(FACTS, model_vocab=1000, generation={"temperature": 0.6, "top_p": 0.83, "top_k": 23.0})
    truncated = Sampling(0.6, 0.83, 23)
    diagnosis = run_diagnosis(config, agrees_if(lambda p, v, s: s == truncated), facts)
    assert "temperature 0.6 and top_p 0.83 and top_k 23 (of the model's generation_config.json)" in str(diagnosis)


@pytest.mark.parametrize(
    ("facts", "applies", "message"),
    [
        (
            replace(FACTS, bos=12),
            lambda p: 12 in p.tokens[:1],
            "the engine seems to have seen the prompt with one more BOS in front",
        ),
        (
            replace(FACTS, without_special_tokens=[[5, 5]] * 8),
            lambda p: p.tokens[0] == p.tokens[1] == 5,
            "the engine seems to have seen the prompt without the tokens in front",
        ),
    ],
)
def test_different_prompt_tokens_are_blamed_on_the_tokenizer(config, facts, applies, message):
    diagnosis = run_diagnosis(config, agrees_if(lambda p, v, s: bool(p.samples) and applies(p)), facts)
    assert str(diagnosis).startswith(f"tokenizer: {message}")


def test_prompts_of_one_length_have_nothing_to_pad(config):
    diagnosis = run_diagnosis(config, agrees_if(lambda p, v, s: False))
    assert diagnosis.untested["padding"] == "all prompts have 4 tokens: there is nothing to pad"
    assert not any(s.cause == "padding" for s in diagnosis.tested)


def test_dtype_is_the_cause_only_if_computing_with_it_removes_the_gap(config):
    half = replace(config, rollout=replace(config.rollout, dtype="bfloat16"))
    diagnosis = run_diagnosis(half, lambda p, v, s: 0.01 if v.dtype else 0.03, before=0.03)
    assert str(diagnosis).startswith("dtype: the engine computes in bfloat16, the trainer in float32")
    other = run_diagnosis(half, lambda p, v, s: -0.02 if v.dtype else 0.03, before=0.03)
    assert other.bfloat16_gap == pytest.approx(0.05, rel=1e-3)
    assert str(other).startswith("none of the known causes removes it; it may be rounding, as bfloat16 moves")
    assert str(other).endswith("by 0.05, and the gap is 0.03")
    single = run_diagnosis(config, lambda p, v, s: -0.02 if v.dtype else 0.03, before=0.03)
    assert str(single).startswith("none of the known causes explains it"), "nothing here computes in bfloat16"


def test_an_unexplained_gap_is_reported_with_the_nearest_cause(config):
    diagnosis = run_diagnosis(config, lambda p, v, s: 0.8 if v.attention else 1.0)
    assert diagnosis.explanation is None
    assert str(diagnosis).startswith("none of the known causes explains it: the nearest is packing (")
    assert str(diagnosis).endswith("with a gap of 0.8 after 1")


def test_the_error_has_figures_cause_and_a_way_out(config):
    policy = CausePolicy(agrees_if(lambda p, v, s: v.attention == "own"))
    message = str(explain_disagreement(make_agreement(), {}, policy=policy, config=config))
    assert message.startswith(
        "rollout and policy disagree: mean 1, largest 1 over 10 tokens; the mean may be 0.001. Cause: "
    )
    assert "packing: " in message
    assert "rlsys doctor CONFIG" in message
    assert "trainer.max_mismatch" in message


def test_a_diagnosis_that_fails_does_not_hide_the_disagreement(config):
    def broken(pack: Pack, what_if: WhatIf, sampling: Sampling) -> float:
        raise WorkerFailed("policy-1 died\nand more")

    message = str(explain_disagreement(make_agreement(), {}, policy=CausePolicy(broken), config=config))
    assert message.startswith("rollout and policy disagree: mean 1")
    assert "the diagnosis failed (policy-1 died)" in message


# --- tokenizer problems -----------------------------------------------------------------------------------------------


def make_batch_of(prompt: list[int], completion: list[int]) -> Batch:
    batch = make_batch([0], [0], [len(completion)], [len(prompt)])
    tokens = np.array(completion, dtype=np.int32)
    return replace(
        batch,
        prompts=[replace(batch.prompts[0], tokens=prompt)],
        samples=[replace(batch.samples[0], tokens=tokens)],
    )


def test_usual_tokens_cause_no_remarks():
    facts = replace(FACTS, bos=7, without_special_tokens=[[7, 3], [4, 5]])
    assert find_tokenizer_problems(make_batch_of([7, 3], [4, 5, 1]), facts) == []


def test_every_unusual_token_causes_a_remark():
    facts = replace(FACTS, bos=7, model_eos=[9], tokenizer_vocab=14, without_special_tokens=[[7, 3], [6]])
    message = " ".join(find_tokenizer_problems(make_batch_of([7, 7, 3], [4, 5, 1]), facts))
    assert "1 of 1 prompts begin with two BOS tokens" in message
    assert "the tokenizer ends a text with token 1, the model's files with [9]" in message
    assert "the tokenizer has 14 tokens, the model embeds 13" in message
    assert "1 of 1 completions, decoded and encoded again, are other tokens" in message


@pytest.mark.parametrize(
    ("again", "expected"),
    [([8, 9], [8, 9, 1]), ([8, 9, 2], [8, 9, 2]), ([8], [4, 5, 1])],
    ids=["ended", "same", "fewer"],
)
def test_a_completion_is_reencoded_if_the_number_of_tokens_stays(again, expected):
    facts = replace(FACTS, without_special_tokens=[[7], again])
    assert reencode_completions(make_batch_of([7], [4, 5, 1]), facts)[0].tokens.tolist() == expected
