"""The reference's log-probs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from zigzag_requests import PROMPTS, make_batch

from rlsys.config.schema import Config
from rlsys.packs.packing import pack, unpack
from rlsys.tasks import zigzag
from rlsys.types import Sample
from workers.learner.reference import ReferenceWorker


def test_the_reference_scores_with_the_model_that_it_is_started_with(
    spawn: Callable[..., Any], tiny: Callable[..., Config], tmp_path: Path
) -> None:
    other, tokenizer = zigzag.build_model(7), zigzag.make_tokenizer()
    other.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    config = tiny(f"reference.path={tmp_path}/other", "rollout.temperature=0.7")
    samples = [
        Sample(f"p{g}", 0, "", np.arange(2, 2 + 3 + g % 4, dtype=np.int32), np.zeros(3 + g % 4, np.float32), "stop", 0)
        for g in range(len(PROMPTS))
    ]
    batch = make_batch(tokenizer, samples)
    packs = pack(batch, range(len(samples)), ranks=1, tokens_per_pack=64)
    worker = spawn(ReferenceWorker, config)
    ray.get(worker.start.remote(str(tmp_path / "other")))
    scores = batch.split(unpack(packs, [ray.get(worker.score.remote(packs[0]))], len(samples)))
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    for text, sample, score in zip(PROMPTS, samples, scores, strict=True):
        ids = torch.tensor([[*AutoTokenizer.from_pretrained(tmp_path / "other").encode(text), *sample.tokens.tolist()]])
        logprobs = (lm(ids).logits[0, -len(sample.tokens) - 1 : -1] / 0.7).log_softmax(-1)
        expected = logprobs.gather(1, ids[0, -len(sample.tokens) :, None])[:, 0].detach().numpy()
        assert np.abs(score - expected).max() < 1e-4
