"""Engines on real vLLM: what they sample, and that the weights they compute with are the policy's."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlsys import tiny as tiny_task
from rlsys.config import Config
from rlsys.packing import pack, unpack
from rlsys.types import Batch, Columns, Prompt, Request, Sample
from workers.engines import CPU_ENVIRONMENT
from workers.model import load_packed
from workers.policy import PolicyGroup, PolicyRank
from workers.rollout import RolloutGroup, RolloutWorker

PROMPTS = [row["prompt"] for row in tiny_task.rows("zigzag_heldout")[:12]]


def requests(tokenizer: Any, *, n: int = 1, temperature: float = 0.0) -> list[Request]:
    return [
        Request(f"p{g}", i, tokenizer.encode(text), 1000 * g + i, temperature, 10)
        for g, text in enumerate(PROMPTS)
        for i in range(n)
    ]


def generated(group: RolloutGroup, wanted: list[Request]) -> list[Sample]:
    found = {(s.uid, s.index): s for chunk in group.generate(wanted) for s in chunk}
    return [found[r.uid, r.index] for r in wanted]


def batch_of(tokenizer: Any, samples: list[Sample]) -> Batch:
    prompts = [Prompt(f"p{g}", "zigzag", text, tokenizer.encode(text), {}) for g, text in enumerate(PROMPTS)]
    group = np.array([int(s.uid[1:]) for s in samples])
    return Batch(prompts, samples, group, np.zeros(len(samples), np.float32), [{}] * len(samples))


@pytest.fixture
def engines(spawn: Callable[..., Any], model: str, tmp_path: Path) -> Callable[..., RolloutGroup]:
    def start(config: Config, transport: str = "shared_memory") -> RolloutGroup:
        count = config.rollout.engines
        actors = [spawn(RolloutWorker, config, i, environment=CPU_ENVIRONMENT) for i in range(count)]
        group = RolloutGroup(config, actors, tmp_path)
        group.start(model, transport, 7)
        return group

    return start


@pytest.fixture(scope="module")
def tokenizer(model: str) -> Any:
    return AutoTokenizer.from_pretrained(model)


def greedy_by_transformers(model: str, tokenizer: Any, text: str, change: dict[str, torch.Tensor] | None = None) -> str:
    lm = AutoModelForCausalLM.from_pretrained(model)
    if change:
        lm.load_state_dict(change, strict=False)
    ids = torch.tensor([tokenizer.encode(text)])
    out = lm.generate(ids, max_new_tokens=10, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def test_samples_their_logprobs_and_their_seeds(
    engines: Callable[..., RolloutGroup], tiny: Callable[..., Config], tokenizer: Any, model: str
) -> None:
    config = tiny("rollout.temperature=0.7")
    group = engines(config)

    greedy = generated(group, requests(tokenizer))
    assert [s.text for s in greedy[:4]] == [greedy_by_transformers(model, tokenizer, p) for p in PROMPTS[:4]]

    wanted = requests(tokenizer, n=8, temperature=0.7)
    samples = generated(group, wanted)
    assert len({s.text for s in samples if s.uid == "p0"}) > 1, "a group must differ"
    assert all(s.finish == ("stop" if s.tokens[-1] == tokenizer.eos_token_id else "length") for s in samples)

    again = generated(group, [wanted[37]])[0]
    assert np.array_equal(again.tokens, samples[37].tokens), "a sample can be drawn again on its own"

    batch = batch_of(tokenizer, samples)
    packs = pack(batch, range(len(samples)), ranks=1, tokens_per_pack=256)
    policy = load_packed(config, model)
    with torch.no_grad():
        scored = unpack(packs, [[policy(p)[0].numpy() for p in packs[0]]], len(samples))
    gaps = np.abs(np.concatenate([s.logprobs for s in samples]) - scored)
    assert gaps.max() < 1e-4, "rollout and policy log-probs are the same quantity"


def test_samples_arrive_while_others_are_still_generated(
    engines: Callable[..., RolloutGroup], tiny: Callable[..., Config], tokenizer: Any
) -> None:
    group = engines(tiny("rollout.engines=1", "rollout.max_sequences=4"))
    wanted = requests(tokenizer, n=8, temperature=1.0)
    arrivals = [(time.monotonic(), len(chunk)) for chunk in group.generate(wanted)]
    assert sum(count for _, count in arrivals) == len(wanted)
    assert len(arrivals) >= 8
    assert arrivals[-1][0] > arrivals[0][0]


@pytest.mark.parametrize(
    ("transport", "stage", "dtype"),
    [("shared_memory", 2, "float32"), ("object_store", 3, "float32"), ("shared_memory", 2, "bfloat16")],
)
def test_engines_compute_with_the_policys_weights_after_a_sync(
    engines: Callable[..., RolloutGroup],
    spawn: Callable[..., Any],
    tiny: Callable[..., Config],
    changed: Callable[..., Config],
    tokenizer: Any,
    model: str,
    tmp_path: Path,
    transport: str,
    stage: int,
    dtype: str,
) -> None:
    config = changed(changed(tiny(), "policy", zero_stage=stage), "rollout", dtype=dtype)
    group = engines(config, transport)
    policy = PolicyGroup(config, [spawn(PolicyRank, config, i) for i in range(2)], group, tmp_path)
    policy.start(model, transport)
    policy.connect()
    before = generated(group, requests(tokenizer))

    batch = batch_of(tokenizer, before)
    tokens = int(batch.lengths.sum())
    columns = Columns(advantages=-np.ones(tokens, dtype=np.float32))
    weights = np.full(tokens, 1 / tokens, dtype=np.float32)
    for _ in range(3):
        packs = pack(batch, range(12), ranks=2, tokens_per_pack=256, columns=columns, weights=weights)
        policy.update(packs, 1e-2, 0.0)
    stale = generated(group, requests(tokenizer))
    assert [s.text for s in stale] == [s.text for s in before], "engines keep their weights until the sync"

    policy.sync(1)
    after = generated(group, requests(tokenizer))
    assert [s.text for s in after] != [s.text for s in before]
    assert {s.version for s in after} == {1}
    policy.save(str(tmp_path / "checkpoint"))
    saved = str(tmp_path / "checkpoint" / "model")
    if dtype == "float32":
        assert [s.text for s in after[:4]] == [greedy_by_transformers(saved, tokenizer, p) for p in PROMPTS[:4]]
        packs = pack(batch_of(tokenizer, after), range(12), ranks=2, tokens_per_pack=256)
        scored = unpack(packs, policy.score(packs), 12)
        assert np.abs(np.concatenate([s.logprobs for s in after]) - scored).max() < 1e-4

    if transport == "shared_memory":
        flip_one_bit(policy)
        with pytest.raises(RuntimeError, match="did not arrive whole"):
            policy.sync(2)


def flip_one_bit(policy: PolicyGroup) -> None:
    """From now on, one bit of the shared weights flips after they are written and before the engines read them."""
    original = policy.engines.calls

    def calls(method: str, *arguments: Any) -> dict[str, Any]:
        if method == "take":
            message = arguments[0][0]
            memory = torch.from_file(message["path"], shared=True, size=message["size"], dtype=torch.uint8)
            memory[4321] ^= 1
        return original(method, *arguments)

    policy.engines.calls = calls  # type: ignore[method-assign]
