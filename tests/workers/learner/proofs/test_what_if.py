"""Each cause of disagreement, reproduced with transformers, is diagnosed from the log-probs alone."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from launch.tools.diagnosis.explain import Diagnosis, diagnose
from rlsys.agreement import Agreement
from rlsys.batching.packing import pack, unpack
from rlsys.config.schema import Config
from rlsys.forward.attention import PACKED_ATTENTION, packed_attention
from rlsys.interfaces import ModelFacts, WhatIf
from rlsys.types import Batch, Floats, Pack, Prompt, Sample
from workers.learner.files.loading import load_packed
from workers.learner.model_facts import read_model_facts
from workers.learner.proofs.what_if import rescore

Prompts = list[list[int]]


class LocalPolicy:
    """A policy of one rank in this process, without DeepSpeed."""

    ranks = 1

    def __init__(self, config: Config, model: str):
        self.packed, self.model = load_packed(config, model).eval(), model

    def forward_all(self, packs: list[Pack]) -> list[Any]:
        with torch.no_grad():
            return [self.packed(p) for p in packs]

    def score(self, packs: list[list[Pack]]) -> list[list[Floats]]:
        return [[logprobs.numpy() for logprobs, _ in self.forward_all(packs[0])]]

    def rescore(self, packs: list[list[Pack]], what_if: WhatIf) -> list[list[Floats]]:
        return [rescore(self.forward_all, self.packed.lm, packs[0], what_if, self.model)]

    def model_facts(self, texts: list[str]) -> ModelFacts:
        return read_model_facts(self.model, texts)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """With matrices this small, more threads are slower when other processes use the same cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def batch(model: str) -> Batch:
    """Twelve prompts of four to seven tokens, with completions sampled from the model."""
    tokenizer, lm = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    texts = ["3185>", "70416>", "864152>"] * 4
    torch.manual_seed(0)
    prompts, samples = [], []
    for i, text in enumerate(texts):
        ids = tokenizer(text)["input_ids"]
        out = lm.generate(torch.tensor([ids]), do_sample=True, max_new_tokens=10, top_k=0)[0, len(ids) :].tolist()
        prompts.append(Prompt(f"p{i}", "made", text, ids, {}))
        decoded = tokenizer.decode(out, skip_special_tokens=True)
        tokens = np.array(out, dtype=np.int32)
        samples.append(Sample(f"p{i}", 0, decoded, tokens, np.zeros(len(out), np.float32), "stop", 0))
    return Batch(prompts, samples, np.arange(12), np.zeros(12, np.float32), [{}] * 12)


def by_transformers(
    lm: Any,
    batch: Batch,
    *,
    prompts: Prompts | None = None,
    warpers: list[Any] | None = None,
    positions: Callable[[int, int], torch.Tensor] | None = None,
) -> Floats:
    """Returns log-probs [T] of the completions, one unpacked sequence at a time. `positions(prompt, total)`"""
    columns = []
    for prompt, sample in zip(prompts or [p.tokens for p in batch.prompts], batch.samples, strict=True):
        ids, n = torch.tensor([[*prompt, *sample.tokens.tolist()]]), len(prompt)
        places = {} if positions is None else {"position_ids": positions(n, ids.shape[1])[None]}
        with torch.no_grad():
            logits = lm(ids, **places).logits[0, n - 1 : -1].float()
        logits = LogitsProcessorList(warpers or [])(ids, logits)
        columns.append(logits.log_softmax(-1).gather(-1, ids[0, n:, None])[:, 0].numpy())
    return np.concatenate(columns)


def agreement_with(batch: Batch, logprobs: Floats, policy: LocalPolicy) -> Agreement:
    """Returns the agreement if these were the engine's log-probs."""
    samples = [dataclasses.replace(s, logprobs=p) for s, p in zip(batch.samples, batch.split(logprobs), strict=True)]
    batch = dataclasses.replace(batch, samples=samples)
    packs = pack(batch, range(12), ranks=1, tokens_per_pack=64)
    return Agreement(batch, unpack(packs, policy.score(packs), 12), 1e-3)


@pytest.fixture(scope="module")
def lm(model: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(model).eval()


@pytest.fixture
def diagnosed(batch: Batch, tiny: Callable[..., Config], model: str) -> Callable[..., Diagnosis]:
    def run(
        logprobs: Floats, *overrides: str, weights: dict[str, str] | None = None, batch: Batch = batch
    ) -> Diagnosis:
        config = tiny("policy.tokens_per_pack=64", *overrides)
        policy = LocalPolicy(config, model)
        before = {name: p.detach().clone() for name, p in policy.packed.lm.named_parameters()}
        agreement = agreement_with(batch, logprobs, policy)
        diagnosis = diagnose(agreement, weights or {}, policy=policy, config=config)
        assert all(torch.equal(p, before[name]) for name, p in policy.packed.lm.named_parameters()), "restored"
        assert agreement_with(batch, logprobs, policy).mean == agreement.mean, "the forward pass too"
        return diagnosis

    return run


def test_a_policy_that_agrees_needs_no_explanation(diagnosed: Callable[..., Diagnosis], lm: Any, batch: Batch) -> None:
    diagnosis = diagnosed(by_transformers(lm, batch))
    assert diagnosis.agreement.within_limit
    assert diagnosis.agreement.mean < 1e-6
    assert diagnosis.explanation is None
    assert not any("BOS" in remark or "encoded again" in remark for remark in diagnosis.tokenizer_remarks)


@pytest.mark.parametrize(
    ("warpers", "override", "start"),
    [
        (
            [TemperatureLogitsWarper(0.7)],
            "rollout.temperature=1",
            "temperature: the engine seems to sample at 0.7, the trainer divides by 1",
        ),
        (
            [TemperatureLogitsWarper(1.37)],
            "rollout.temperature=0.7",
            "temperature: the engine seems to sample at 1.37, the trainer divides by 0.7",
        ),
        (
            [],
            "rollout.temperature=0.7",
            "temperature: the engine's log-probs seem to be from before temperature, the trainer divides by 0.7",
        ),
        (
            [TopPLogitsWarper(0.9)],
            "rollout.temperature=1",
            "top-p: the engine seems to sample with top_p 0.9, the trainer takes",
        ),
        (
            [TemperatureLogitsWarper(1.5), TopPLogitsWarper(0.95)],
            "rollout.temperature=1.5",
            "top-p: the engine seems to sample with top_p 0.95",
        ),
        ([TopKLogitsWarper(5)], "rollout.temperature=1", "top-k: the engine seems to sample with top_k 5"),
    ],
    ids=["temperature", "another temperature", "raw", "top-p", "top-p when warm", "top-k"],
)
def test_a_change_of_the_logits_is_named(
    diagnosed: Callable[..., Diagnosis], lm: Any, batch: Batch, warpers: list[Any], override: str, start: str
) -> None:
    logprobs = by_transformers(lm, batch, warpers=warpers)
    # A truncated engine would not have sampled some of these tokens. They keep their log-probs without the truncation.
    sampled = np.isfinite(logprobs)
    without_truncation = by_transformers(lm, batch, warpers=warpers[:-1])
    diagnosis = diagnosed(np.where(sampled, logprobs, without_truncation), override)
    assert str(diagnosis).startswith(start)
    assert not diagnosis.agreement.within_limit


@pytest.mark.parametrize(
    ("positions", "start"),
    [
        (
            lambda n, all_: torch.cat([torch.arange(n), torch.arange(7, 7 + all_ - n)]),
            "padding: positions of completions",
        ),
        ("seen", "padding: the padding in front of a prompt seems to be seen"),
    ],
    ids=["right", "seen"],
)
def test_padding_is_named(
    diagnosed: Callable[..., Diagnosis], lm: Any, batch: Batch, positions: Any, start: str
) -> None:
    if positions == "seen":
        logprobs = by_transformers(lm, batch, prompts=[[0] * (7 - len(p.tokens)) + p.tokens for p in batch.prompts])
    else:
        logprobs = by_transformers(lm, batch, positions=positions)
    diagnosis = diagnosed(logprobs)
    assert str(diagnosis).startswith(start)
    assert diagnosis.explanation is not None
    assert diagnosis.explanation.mean < 1e-5


def test_a_missing_first_token_is_named(diagnosed: Callable[..., Diagnosis], lm: Any, batch: Batch) -> None:
    logprobs = by_transformers(lm, batch, prompts=[p.tokens[1:] for p in batch.prompts])
    fewer = dataclasses.replace(batch, prompts=[dataclasses.replace(p, text=p.text[1:]) for p in batch.prompts])
    diagnosis = diagnosed(logprobs, batch=fewer)
    assert str(diagnosis).startswith("tokenizer: the engine seems to have seen the prompt without the tokens in front")


def test_an_engine_in_bfloat16_may_be_rounding(diagnosed: Callable[..., Diagnosis], model: str, batch: Batch) -> None:
    half = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    diagnosis = diagnosed(by_transformers(half, batch), "rollout.dtype=bfloat16")
    assert "it may be rounding" in str(diagnosis)


def test_a_policy_in_bfloat16_is_named(diagnosed: Callable[..., Diagnosis], lm: Any, batch: Batch) -> None:
    sent = copy.deepcopy(lm).bfloat16().float()  # the weights of a bfloat16 policy, in a float32 engine
    diagnosis = diagnosed(by_transformers(sent, batch), "policy.dtype=bfloat16")
    assert str(diagnosis).startswith("dtype: the engine computes in float32, the trainer in bfloat16")


def test_older_weights_are_named_by_their_checkpoint(
    diagnosed: Callable[..., Diagnosis], batch: Batch, model: str, tmp_path: Path
) -> None:
    old = AutoModelForCausalLM.from_pretrained(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in old.parameters():
            p += 0.01 * torch.randn_like(p)
    old.save_pretrained(tmp_path / "old")
    known = {"the checkpoint of step 40": str(tmp_path / "old")}
    diagnosis = diagnosed(by_transformers(old, batch), weights=known)
    assert str(diagnosis).startswith("stale weights: the engine seems to have the weights of the checkpoint of step 40")


@pytest.fixture
def broken_kernel() -> Iterator[None]:
    def wrong(*arguments: Any, scaling: float = 1.0, **keywords: Any) -> Any:
        return packed_attention(*arguments, scaling=scaling * 1.5, **keywords)

    AttentionInterface.register(PACKED_ATTENTION, wrong)
    yield
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)


@pytest.mark.usefixtures("broken_kernel")
def test_a_wrong_attention_kernel_is_named(diagnosed: Callable[..., Diagnosis], lm: Any, batch: Batch) -> None:
    diagnosis = diagnosed(by_transformers(lm, batch))
    assert str(diagnosis).startswith("packing: ")


def test_wrong_compiled_layers_are_named(
    diagnosed: Callable[..., Diagnosis], lm: Any, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(graph: Any, _: Any) -> Callable[..., list[Any]]:
        return lambda *inputs: [x * 1.01 if torch.is_tensor(x) else x for x in graph(*inputs)]

    right = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **how: right(module, backend=wrong, **how))
    diagnosis = diagnosed(by_transformers(lm, batch), "policy.compile=true")
    assert str(diagnosis).startswith("compiled layers: ")
    assert diagnosis.explanation is not None
    assert diagnosis.explanation.mean < 1e-5


def test_an_unexplained_gap_is_reported_as_such(diagnosed: Callable[..., Diagnosis], lm: Any, batch: Batch) -> None:
    noise = np.random.default_rng(0).normal(0, 1, int(batch.lengths.sum())).astype(np.float32)
    diagnosis = diagnosed(by_transformers(lm, batch) + noise)
    assert diagnosis.explanation is None
    assert str(diagnosis).startswith("none of the known causes explains it: the nearest is ")
