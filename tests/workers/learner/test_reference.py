"""The reference's log-probs."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from zigzag_requests import PROMPTS, make_batch

from rlsys.batching.packing import pack, unpack
from rlsys.config.schema import Config
from rlsys.tasks import zigzag
from rlsys.types import Batch, Columns, Sample
from workers.fleet.watchdog import Watchdog
from workers.learner.policy import PolicyGroup
from workers.learner.reference import Reference, ReferenceWorker, reference_number


def test_the_reference_scores_with_the_model_that_it_is_started_with(
    spawn: Callable[..., Any], tiny: Callable[..., Config], model: str, tmp_path: Path
) -> None:
    """And its completions are the policy's, which no token that ends only the reference's would have ended early."""
    other, tokenizer = zigzag.build_model(7), zigzag.make_tokenizer()
    other.generation_config.eos_token_id = [tokenizer.eos_token_id, 9]
    other.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    config = tiny(f"reference.path={tmp_path}/other", "rollout.temperature=0.7", "rollout.min_new_tokens=2")
    samples = [
        Sample(f"p{g}", 0, "", np.arange(2, 2 + 3 + g % 4, dtype=np.int32), np.zeros(3 + g % 4, np.float32), "stop", 0)
        for g in range(len(PROMPTS))
    ]
    batch = make_batch(tokenizer, samples)
    packs = pack(batch, range(len(samples)), ranks=1, tokens_per_pack=64)
    worker = spawn(ReferenceWorker, config, 0)
    ray.get(worker.start.remote(str(tmp_path / "other"), model))
    scores = batch.split(unpack(packs, [ray.get(worker.score.remote(packs[0]))], len(samples)))
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    for text, sample, score in zip(PROMPTS, samples, scores, strict=True):
        ids = torch.tensor([[*AutoTokenizer.from_pretrained(tmp_path / "other").encode(text), *sample.tokens.tolist()]])
        logits = lm(ids).logits[0, -len(sample.tokens) - 1 : -1] / 0.7
        logits[:2, tokenizer.eos_token_id] = -torch.inf
        logprobs = logits.log_softmax(-1)
        expected = logprobs.gather(1, ids[0, -len(sample.tokens) :, None])[:, 0].detach().numpy()
        assert np.abs(score - expected).max() < 1e-4


def random_batch() -> Batch:
    samples = [
        Sample(f"p{g}", 0, "", np.arange(2, 5 + g % 4, dtype=np.int32), np.zeros(3 + g % 4, np.float32), "stop", 0)
        for g in range(len(PROMPTS))
    ]
    return make_batch(zigzag.make_tokenizer(), samples)


@pytest.mark.parametrize("settings", ["ranks=2", "place=split", "ranks=2 place=split", "ranks=2 place=offload"])
def test_ranks_share_the_packs_and_with_zero_3_the_model(
    spawn: Callable[..., Any],
    policy: Callable[..., PolicyGroup],
    tiny: Callable[..., Config],
    model: str,
    tmp_path: Path,
    settings: str,
) -> None:
    def scores(config: Config) -> Any:
        def start(name: str) -> Any:
            return spawn(ReferenceWorker, config, *reference_number(name))

        reference = Reference(config, start, Watchdog(tmp_path / "logs"), group)
        reference.start(model, model)
        packs = pack(batch, range(12), ranks=reference.ranks, tokens_per_pack=48)
        assert len(packs) == reference.ranks
        first = unpack(packs, reference.score(packs), 12)
        reference.refresh()
        return first, unpack(packs, reference.score(packs), 12)

    (tmp_path / "logs").mkdir()
    batch, group = random_batch(), policy(tiny())
    total = int(batch.lengths.sum())
    columns, weights = Columns(advantages=np.ones(total, np.float32)), np.full(total, 1 / total, np.float32)
    group.update(pack(batch, range(12), ranks=2, tokens_per_pack=256, columns=columns, weights=weights), 1e-2, 0.0)
    before, after = scores(tiny())
    split_before, split_after = scores(tiny(*(f"reference.{setting}" for setting in settings.split())))
    assert np.abs(split_before - before).max() < 1e-5
    assert np.abs(split_after - after).max() < 1e-5
    assert np.abs(after - before).max() > 0.01


def test_a_refreshed_reference_has_the_policys_weights_also_in_a_checkpoint_and_in_a_replacement(
    spawn: Callable[..., Any],
    policy: Callable[..., PolicyGroup],
    tiny: Callable[..., Config],
    model: str,
    tmp_path: Path,
) -> None:
    config, tokenizer = tiny("policy.zero_stage=3"), zigzag.make_tokenizer()
    samples = [
        Sample(f"p{g}", 0, "", np.arange(2, 7, dtype=np.int32), np.zeros(5, np.float32), "stop", 0)
        for g in range(len(PROMPTS))
    ]
    batch = make_batch(tokenizer, samples)
    [packs], by_rank = (pack(batch, range(12), ranks=ranks, tokens_per_pack=256) for ranks in (1, 2))
    (tmp_path / "logs").mkdir()

    def reference() -> Reference:
        made = Reference(config, lambda _: spawn(ReferenceWorker, config, 0), Watchdog(tmp_path / "logs"), group)
        made.start(model, model)
        return made

    def scores(of: Reference) -> Any:
        return unpack([packs], of.score([packs]), 12)

    group = policy(config)
    first = reference()
    before = scores(first)
    (tmp_path / "none").mkdir()
    first.save(str(tmp_path / "none"))
    assert first.saved_files(wait=True) == {}, "it still has the weights that it started with"
    columns, weights = Columns(advantages=np.ones(60, dtype=np.float32)), np.full(60, 1 / 60, dtype=np.float32)
    for _ in range(3):
        group.update(pack(batch, range(12), ranks=2, tokens_per_pack=256, columns=columns, weights=weights), 1e-2, 0.0)
    assert np.array_equal(scores(first), before)
    first.refresh()
    refreshed = scores(first)
    assert np.abs(refreshed - before).max() > 0.1
    assert np.abs(refreshed - unpack(by_rank, group.score(by_rank), 12)).max() < 1e-5

    (tmp_path / "saved").mkdir()
    first.save(str(tmp_path / "saved"))
    group.update(pack(batch, range(12), ranks=2, tokens_per_pack=256, columns=columns, weights=weights), 1e-2, 0.0)
    files = first.saved_files(wait=True) or {}
    assert len(files) > 1, "each rank writes its files"
    for name, digest in files.items():
        assert hashlib.sha256((tmp_path / "saved" / name).read_bytes()).hexdigest() == digest
    [actor] = first.workers.actors.values()
    ray.kill(actor)
    assert np.array_equal(scores(first), refreshed), "a replacement reads the same files"
    first.refresh()
    assert not np.array_equal(scores(first), refreshed)
    resumed = reference()
    resumed.load(str(tmp_path / "none"))
    assert np.array_equal(scores(resumed), before)
    resumed.load(str(tmp_path / "saved"))
    assert np.array_equal(scores(resumed), refreshed)
