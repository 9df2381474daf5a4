"""Completions that end at a string or a token of the user's, on real vLLM."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from zigzag_requests import PROMPTS, generate, make_batch, make_requests

from rlsys.batching.packing import pack
from rlsys.config.schema import Config
from rlsys.types import Request, Sample, stop_at
from workers.learner.files.loading import load_packed
from workers.rollout.engine_settings import CPU_ENVIRONMENT, engine_arguments
from workers.rollout.rollout_group import RolloutGroup
from workers.rollout.stopping import stop_length
from workers.rollout.vllm_requests import Stops

STRINGS, TOKEN = ["94", "1<eos>"], 7  # the token is a 5
STOPPING = ("rollout.engines=1", f"rollout.stop={json.dumps(STRINGS)}", f"rollout.stop_token_ids=[{TOKEN}]")


@pytest.fixture(scope="module")
def greedy(model: str) -> list[list[int]]:
    """The greedy completion of each prompt, by Transformers."""
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    completions = []
    for text in PROMPTS:
        ids = torch.tensor([tokenizer.encode(text)])
        completions.append(lm.generate(ids, max_new_tokens=10, do_sample=False)[0, ids.shape[1] :].tolist())
    return completions


def first_stop(tokenizer: Any, tokens: list[int], strings: list[str], ids: set[int]) -> list[int]:
    """The tokens up to the first one after which the text ends in a stop string, or that is a stop token."""
    for n in range(1, len(tokens) + 1):
        if tokens[n - 1] in ids or any(tokenizer.decode(tokens[:n]).endswith(s) for s in strings):
            return tokens[:n]
    return tokens


def test_a_completion_ends_with_the_stop_also_after_it_was_interrupted(
    engines: Callable[..., RolloutGroup], model: str, greedy: list[list[int]]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    wanted = [first_stop(tokenizer, tokens, STRINGS, {TOKEN, tokenizer.eos_token_id}) for tokens in greedy]
    endings = {tokenizer.decode(tokens)[-2:] for tokens in wanted}
    assert "94" in endings, "a stop string is reached"
    assert TOKEN in {tokens[-1] for tokens in wanted}, "so is the stop token"
    group, requests = engines(*STOPPING), make_requests(tokenizer)
    samples = generate(group, requests)
    assert [s.tokens.tolist() for s in samples] == wanted
    assert [s.text for s in samples] == [tokenizer.decode(t, skip_special_tokens=True) for t in wanted]
    assert {s.finish for s in samples} == {"stop"}
    unlimited = generate(group, [replace(r, ignore_end=True) for r in requests])
    assert {(len(s.tokens), s.finish) for s in unlimited} == {(10, "length")}, "benchmarks ignore all stops"

    for at in range(1, max(map(len, wanted))):
        begun = [replace(stop_at(s, at), finish="cut") for s in samples]
        rest = [replace(r, partial=p) for r, p, w in zip(requests, begun, wanted, strict=True) if at < len(w)]
        whole = {(s.uid, s.index): s for s in samples}
        for again in generate(group, rest):
            before = whole[again.uid, again.index]
            assert again.tokens.tolist() == before.tokens.tolist(), f"interrupted after {at}"
            assert (again.finish, again.text) == ("stop", before.text)
            assert np.abs(again.logprobs - before.logprobs).max() < 1e-4


def test_a_request_of_an_episode_may_have_strings_of_its_own(
    engines: Callable[..., RolloutGroup], model: str, greedy: list[list[int]]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    group, requests = engines("rollout.engines=1", "episode={play: guess, window: 64}"), make_requests(tokenizer)
    stops = [("94", "8") if i % 2 else () for i in range(len(requests))]
    wanted = [
        first_stop(tokenizer, tokens, list(stop), {tokenizer.eos_token_id})
        for tokens, stop in zip(greedy, stops, strict=True)
    ]
    samples = generate(group, [replace(r, stop=stop) for r, stop in zip(requests, stops, strict=True)])
    assert [s.tokens.tolist() for s in samples] == wanted
    ended = [s.text.endswith(("94", "8")) for s in samples]
    assert any(ended[1::2])
    assert {s.finish for s in samples} == {"stop"}


def test_no_completion_is_shorter_than_the_shortest_and_log_probs_say_so(
    engines: Callable[..., RolloutGroup], tiny: Callable[..., Config], model: str
) -> None:
    options = ("rollout.engines=1", "rollout.min_new_tokens=8", "rollout.stop=['5']", "rollout.temperature=0.7")
    tokenizer, group = AutoTokenizer.from_pretrained(model), engines(*options)
    requests = make_requests(tokenizer, n=4, temperature=0.7)
    samples = generate(group, requests)
    assert min(len(s.tokens) for s in samples) >= 8, "the model itself ends with the seventh token"
    assert any("5" in s.text[:8] for s in samples), "the stop string does not count before"
    begun = [replace(stop_at(s, 3), finish="cut") for s in samples]
    again = generate(group, [replace(r, partial=p) for r, p in zip(requests, begun, strict=True)])
    assert min(len(s.tokens) for s in again) >= 8, "the part before an interruption counts"

    lm, packed = AutoModelForCausalLM.from_pretrained(model), load_packed(tiny(*options), model)
    for r, s in [*zip(requests, samples, strict=True), *zip(requests, again, strict=True)][::5]:
        ids, count = torch.tensor([[*r.tokens, *s.tokens.tolist()]]), len(s.tokens)
        logits = lm(ids).logits[0, -count - 1 : -1] / 0.7
        logits[:8, tokenizer.eos_token_id] = -torch.inf
        expected = logits.log_softmax(-1).gather(1, ids[0, -count:, None])[:, 0]
        assert np.abs(s.logprobs - expected.detach().numpy()).max() < 1e-4
        batch = make_batch(tokenizer, [s])
        [[by_policy]] = pack(batch, [0], ranks=1, tokens_per_pack=64)
        with torch.no_grad():
            assert np.abs(packed(by_policy)[0].numpy() - s.logprobs).max() < 1e-4


ASYNC_ENGINE = """
import asyncio, json, sys
from rlsys.types import Request
from workers.rollout.async_engine import AsyncEngine
from workers.rollout.vllm_requests import Stops, request_id

async def main():
    settings, prompts, ids, strings = json.load(sys.stdin)
    requests = [Request(f"p{i}", 0, p, 0, 0.0, 10) for i, p in enumerate(prompts)]
    batches = AsyncEngine(settings).generate(requests, Stops(ids, strings))
    by_id = {o.request_id: o.outputs[0] async for outputs in batches for o in outputs}
    completions = [by_id[request_id(r)] for r in requests]
    print("completions", json.dumps([[list(c.token_ids), c.finish_reason] for c in completions]), flush=True)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.long
def test_an_engine_of_several_processes_ends_completions_at_the_same_place(
    tiny: Callable[..., Config], model: str, greedy: list[list[int]], tmp_path: Any
) -> None:
    """The tests above have an engine in one process."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    wanted = [first_stop(tokenizer, tokens, STRINGS, {TOKEN, tokenizer.eos_token_id}) for tokens in greedy]
    settings = engine_arguments(tiny(*STOPPING), model, "rlsys_host_memory", 18)
    settings = {k: v for k, v in settings.items() if k != "kernel_config"}
    script = tmp_path / "engine.py"  # a file: the engine starts processes of its own
    script.write_text(ASYNC_ENGINE)
    done = subprocess.run(
        [sys.executable, script],
        input=json.dumps([settings, [tokenizer.encode(p) for p in PROMPTS], [1, TOKEN], STRINGS]),
        env={**os.environ, **CPU_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    [answer] = [line for line in done.stdout.splitlines() if line.startswith("completions ")] or [done.stderr[-2000:]]
    assert json.loads(answer.removeprefix("completions ")) == [[tokens, "stop"] for tokens in wanted]


@pytest.mark.parametrize("stop", ["</answer>", "€", "question", "r>\n", "老", "<end>", "absent"])
def test_a_stop_string_ends_with_the_first_token_that_completes_it(byte_tokenizer: Any, stop: str) -> None:
    text = "so <answer>7 €</answer>\n\nNext question: 老 虎<end> and </answer>"
    tokens = byte_tokenizer.encode(text)
    ends = [n for n in range(1, len(tokens) + 1) if stop in byte_tokenizer.decode(tokens[:n])]
    request = Request("p", 0, byte_tokenizer.encode("Question: 3+4"), 0, 1.0, 100)
    assert stop_length(byte_tokenizer, request, tokens, Stops([], [stop])) == (ends[0] if ends else None)
    assert (stop == "absent") == (not ends)
    assert stop_length(byte_tokenizer, request, tokens, Stops([])) is None


def test_a_completion_that_is_ended_keeps_the_versions_of_its_tokens() -> None:
    tokens, logprobs = np.arange(6, dtype=np.int32), np.arange(6, dtype=np.float32)
    sample = Sample("p", 0, "", tokens, logprobs, "cut", version=3, changes=((2, 4), (4, 5)))
    ended = stop_at(sample, 4)
    assert (ended.tokens.tolist(), ended.logprobs.tolist(), ended.finish) == ([0, 1, 2, 3], [0, 1, 2, 3], "stop")
    assert ended.versions.tolist() == [3, 3, 4, 4]
