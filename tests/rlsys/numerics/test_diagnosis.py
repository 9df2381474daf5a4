"""The cause is the supposition that removes the gap. A policy whose log-probs are easy to reckon pretends to be each."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from fakes import make_batch, make_config

from rlsys.config.schema import Config
from rlsys.interfaces import STEP_0, ModelFacts, Sampling, WhatIf
from rlsys.numerics.agreement import Agreement
from rlsys.numerics.diagnosis import (
    Diagnosis,
    diagnose,
    explain_disagreement,
    find_tokenizer_problems,
    fit_temperature,
    reencode_completions,
)
from rlsys.runs.errors import WorkerFailed
from rlsys.types import Batch, Floats, Pack

FACTS = ModelFacts(bos=None, eos=1, pad=0, ends=[1], symbols=13, embeddings=13, generation={}, encoded=[], bare=[])
Gap = Callable[[Pack, WhatIf, Sampling], float]


class Pretender:
    """A policy whose every log-prob is the engine's plus `gap(pack, variant, sampling)`."""

    def __init__(self, gap: Gap, facts: ModelFacts = FACTS, ranks: int = 2):
        self.gap, self.told, self.ranks = gap, facts, ranks

    def score(self, packs: list[list[Pack]]) -> list[list[Floats]]:
        raise AssertionError("the log-probs are measured already")

    def rescore(self, packs: list[list[Pack]], variant: WhatIf) -> list[list[Floats]]:
        assert len(packs) == self.ranks
        return [
            [
                np.stack([p.rollout + np.float32(self.gap(p, variant, s)) for s in variant.samplings], axis=1)
                for p in own
            ]
            for own in packs
        ]

    def model_facts(self, texts: list[str]) -> ModelFacts:
        again = self.told.bare or [[] for _ in texts]
        return replace(self.told, bare=again, encoded=self.told.encoded or again)


@pytest.fixture
def config(tmp_path) -> Config:
    return make_config(tmp_path)


def found(gap: float = 1.0, prompt_lengths: list[int] | None = None) -> Agreement:
    """Four samples whose policy log-probs are off by `gap`."""
    batch = make_batch([0] * 4, [0, 1, 2, 3], [3, 2, 4, 1], prompt_lengths)
    return Agreement(batch, np.concatenate([s.logprobs for s in batch.samples]) + np.float32(gap), 1e-3)


def diagnosed(
    config: Config, gap: Gap, facts: ModelFacts = FACTS, *, before: float = 1.0, prompt_lengths: list[int] | None = None
) -> Diagnosis:
    measured = found(before, prompt_lengths)
    return diagnose(measured, Pretender(gap, facts), config, {"the checkpoint of step 7": "/somewhere"})


def unless(wanted: Callable[[Pack, WhatIf, Sampling], bool], gap: float = 1.0) -> Gap:
    """Agrees where something is supposed, and is off by `gap` elsewhere."""
    return lambda pack, variant, sampling: 2e-5 if wanted(pack, variant, sampling) else gap


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (lambda p, v, s: s.top_p == 0.9, "top-p: the engine seems to sample with top_p 0.9, the trainer takes the whole vocabulary"),
        (lambda p, v, s: s.top_k == 10, "top-k: the engine seems to sample with top_k 10, the trainer takes the whole vocabulary"),
        (lambda p, v, s: v.dtype == "bfloat16", "dtype: the engine seems to compute in bfloat16, though both are to compute in float32"),
        (lambda p, v, s: v.weights == STEP_0, "stale weights: the engine seems to have the weights of step 0"),
        (lambda p, v, s: v.weights == "/somewhere", "stale weights: the engine seems to have the weights of the checkpoint of step 7"),
        (lambda p, v, s: v.attention == "plain", "attention kernel: the trainer's packed attention gives other log-probs"),
        (lambda p, v, s: v.positions == "left" and v.longest_prompt == 5, "padding: positions seem to begin at the padding"),
        (lambda p, v, s: v.positions == "right" and v.longest_prompt == 5, "padding: positions of completions seem to begin"),
    ],
)  # fmt: skip
def test_what_removes_the_gap_is_named_with_the_gap_before_and_after(config, wanted, said):
    diagnosis = diagnosed(config, unless(wanted), prompt_lengths=[5, 4, 4, 3])
    assert str(diagnosis).startswith(said)
    assert str(diagnosis).endswith("(gap 1 → 2e-05)")


def test_the_temperature_that_fits_is_found(config):
    diagnosis = diagnosed(config, lambda p, v, s: abs(s.temperature - 0.7) + 2e-5)
    assert str(diagnosis) == "temperature: the engine seems to sample at 0.7, the trainer divides by 1 (gap 1 → 2e-05)"


def test_compiled_layers_that_compute_otherwise_are_named_as_all_variants_agree_then(config):
    built = replace(config, policy=replace(config.policy, compile=True))
    assert str(diagnosed(built, lambda p, v, s: 2e-5)).startswith("compiled layers: the trainer's compiled layers give")


def test_log_probs_from_before_temperature_are_named(config):
    warm = replace(config, rollout=replace(config.rollout, temperature=0.6))
    diagnosis = diagnosed(warm, lambda p, v, s: abs(s.temperature - 1))
    assert str(diagnosis).startswith(
        "temperature: the engine's log-probs seem to be from before temperature, the trainer divides by 0.6"
    )


@pytest.mark.parametrize("true", [0.07, 0.7, 1.0, 1.234, 9.5])
def test_a_fitted_temperature_is_as_round_as_it_can_be(true):
    assert fit_temperature(lambda ts: [abs(np.log(t / true)) for t in ts], now=1.0) == pytest.approx(true, rel=1e-3)


def test_a_truncation_of_the_models_own_files_is_tried_with_their_temperature(config):
    facts = replace(FACTS, embeddings=1000, generation={"temperature": 0.6, "top_p": 0.83, "top_k": 23.0})
    wanted = Sampling(0.6, 0.83, 23)
    diagnosis = diagnosed(config, unless(lambda p, v, s: s == wanted), facts)
    assert "temperature 0.6 and top_p 0.83 and top_k 23 (of the model's generation_config.json)" in str(diagnosis)


@pytest.mark.parametrize(
    ("facts", "wanted", "said"),
    [
        (replace(FACTS, bos=12), lambda p: 12 in p.tokens[:1], "the engine seems to have seen the prompt with one more BOS in front"),
        (replace(FACTS, bare=[[5, 5]] * 8), lambda p: p.tokens[0] == p.tokens[1] == 5, "the engine seems to have seen the prompt without the tokens in front"),
    ],
)  # fmt: skip
def test_other_tokens_are_the_tokenizers(config, facts, wanted, said):
    diagnosis = diagnosed(config, unless(lambda p, v, s: bool(p.samples) and wanted(p)), facts)
    assert str(diagnosis).startswith(f"tokenizer: {said}")


def test_prompts_of_one_length_have_nothing_to_pad(config):
    diagnosis = diagnosed(config, unless(lambda p, v, s: False))
    assert diagnosis.untested["padding"] == "all prompts have 4 tokens: there is nothing to pad"
    assert not any(s.cause == "padding" for s in diagnosis.tested)


def test_a_gap_of_the_size_of_rounding_is_of_dtype_though_nothing_removes_it(config):
    half = replace(config, rollout=replace(config.rollout, dtype="bfloat16"))
    diagnosis = diagnosed(half, lambda p, v, s: 0.01 if v.dtype else 0.03, before=0.03)
    assert str(diagnosis).startswith("dtype: the engine computes in bfloat16, the trainer in float32")
    other = diagnosed(half, lambda p, v, s: -0.02 if v.dtype else 0.03, before=0.03)
    assert other.bfloat16_gap == pytest.approx(0.05, rel=1e-3)
    assert str(other) == "dtype: rounding to bfloat16 moves the policy's own log-probs by 0.05, and the gap is 0.03"


def test_what_nothing_explains_is_said_so_with_the_nearest(config):
    diagnosis = diagnosed(config, lambda p, v, s: 0.8 if v.attention else 1.0)
    assert diagnosis.explanation is None
    assert str(diagnosis).startswith("nothing that is known explains it: the nearest is attention kernel (")
    assert str(diagnosis).endswith("with a gap of 0.8 after 1")


def test_the_run_stops_with_figures_cause_and_a_way_out(config):
    policy = Pretender(unless(lambda p, v, s: v.attention == "plain"))
    said = str(explain_disagreement(found(), policy, config, {}))
    assert said.startswith(
        "rollout and policy disagree: mean 1, largest 1 over 10 tokens; the mean may be 0.001. Cause: "
    )
    assert "attention kernel: " in said
    assert "rlsys doctor CONFIG" in said
    assert "trainer.max_mismatch" in said


def test_a_diagnosis_that_fails_does_not_hide_what_was_found(config):
    def broken(pack: Pack, variant: WhatIf, sampling: Sampling) -> float:
        raise WorkerFailed("policy-1 died\nand more")

    said = str(explain_disagreement(found(), Pretender(broken), config, {}))
    assert said.startswith("rollout and policy disagree: mean 1")
    assert "looking for it failed (policy-1 died)" in said


# --- what is odd about tokens ----------------------------------------------------------------------------------------------


def batch_of(prompt: list[int], completion: list[int]) -> Batch:
    batch = make_batch([0], [0], [len(completion)], [len(prompt)])
    tokens = np.array(completion, dtype=np.int32)
    return replace(
        batch,
        prompts=[replace(batch.prompts[0], tokens=prompt)],
        samples=[replace(batch.samples[0], tokens=tokens)],
    )


def test_nothing_is_remarked_where_tokens_are_what_they_should_be():
    facts = replace(FACTS, bos=7, bare=[[7, 3], [4, 5]])
    assert find_tokenizer_problems(batch_of([7, 3], [4, 5, 1]), facts) == []


def test_two_beginnings_other_ends_missing_rows_and_other_tokens_are_remarked():
    facts = replace(FACTS, bos=7, ends=[9], symbols=14, bare=[[7, 3], [6]])
    said = " ".join(find_tokenizer_problems(batch_of([7, 7, 3], [4, 5, 1]), facts))
    assert "1 of 1 prompts begin with two BOS tokens" in said
    assert "the tokenizer ends a text with token 1, the model's files with [9]" in said
    assert "the tokenizer has 14 tokens, the model embeds 13" in said
    assert "1 of 1 completions, decoded and encoded again, are other tokens" in said


@pytest.mark.parametrize(
    ("again", "expected"),
    [([8, 9], [8, 9, 1]), ([8, 9, 2], [8, 9, 2]), ([8], [4, 5, 1])],
    ids=["ended", "same", "fewer"],
)
def test_a_completion_encoded_again_is_compared_where_it_has_as_many_tokens(again, expected):
    facts = replace(FACTS, bare=[[7], again])
    assert reencode_completions(batch_of([7], [4, 5, 1]), facts)[0].tokens.tolist() == expected
