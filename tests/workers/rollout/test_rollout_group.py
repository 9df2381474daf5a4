"""Engines on real vLLM: what they sample, with which weights, and how samples arrive."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from zigzag_requests import PROMPTS, generate, make_batch, make_requests, same_bits

from rlsys.batching.packing import pack, unpack
from rlsys.config.schema import Config
from rlsys.types import Columns, Request, Sample
from workers.learner.files.loading import load_packed
from workers.learner.policy import PolicyGroup
from workers.rollout.generation import Generation
from workers.rollout.rollout_group import RolloutGroup
from workers.sync.layout import BUCKET_BYTES

TWO_ENGINES = ("rollout.max_sequences=8",)
COMPILED = ("rollout.engines=1", "rollout.enforce_eager=false")
THREADED = ("rollout.engines=1", "rollout.threads=2")
BFLOAT16 = ("rollout.engines=1", "rollout.dtype=bfloat16")
IN_FLIGHT = ("rollout.engines=1", "rollout.max_sequences=4", "pipeline.max_lag=1", "pipeline.in_flight=true")
IN_FLIGHT += ("rollout.max_new_tokens=40",)


@pytest.fixture(scope="module")
def tokenizer(model: str) -> Any:
    return AutoTokenizer.from_pretrained(model)


def greedy_by_transformers(model: str, tokenizer: Any, text: str) -> str:
    lm = AutoModelForCausalLM.from_pretrained(model)
    ids = torch.tensor([tokenizer.encode(text)])
    out = lm.generate(ids, max_new_tokens=10, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def generate_without_rest(group: RolloutGroup, requests: list[Request]) -> Iterator[list[Sample]]:
    """An engine that decodes a few sequences at a time has dozens more, so it never waits for a busy driver."""
    group.generation = Generation(requests, group.workers, group.watchdog, 60)
    return group.generation.run()


@pytest.mark.parametrize(
    "options",
    [TWO_ENGINES, pytest.param(COMPILED, marks=pytest.mark.long), THREADED],
    ids=["two engines", "a compiled one", "two threads"],
)
def test_samples_have_the_policys_logprobs_and_depend_on_their_seed_alone(
    engines: Callable[..., RolloutGroup],
    tiny: Callable[..., Config],
    tokenizer: Any,
    model: str,
    options: tuple[str, ...],
) -> None:
    group = engines(*options)
    assert group.weight_update is None, "they have the model's own weights"
    counts = [actor.__ray_call__.remote(lambda _: torch.get_num_threads()) for actor in group.workers.actors.values()]
    assert set(ray.get(counts)) == {group.config.rollout.threads}
    greedy = generate(group, make_requests(tokenizer))
    assert [s.text for s in greedy[:4]] == [greedy_by_transformers(model, tokenizer, p) for p in PROMPTS[:4]]

    wanted = make_requests(tokenizer, n=8, temperature=0.7)
    samples = generate(group, wanted)
    assert len({s.text for s in samples if s.uid == "p0"}) > 1, "a group must differ"
    assert all(s.finish == ("stop" if s.tokens[-1] == tokenizer.eos_token_id else "length") for s in samples)

    for indices in ([37], [95, 3], range(40, 47), range(95, -1, -1)):
        again = generate(group, [wanted[i] for i in indices])
        assert same_bits(again, [samples[i] for i in indices]), "a sample can be drawn again, beside any others"

    config = tiny("rollout.temperature=0.7")
    gaps = np.concatenate([s.logprobs for s in samples]) - score_by_policy(config, model, tokenizer, samples, 256)
    assert np.abs(gaps).max() < 1e-4, "rollout and policy log-probs are the same quantity"


def score_by_policy(
    config: Config, model: str, tokenizer: Any, samples: list[Sample], tokens_per_pack: int, repeat: int = 1
) -> Any:
    torch.set_num_threads(1)
    policy = load_packed(config, model)
    packs = pack(make_batch(tokenizer, samples, repeat), range(len(samples)), ranks=1, tokens_per_pack=tokens_per_pack)
    with torch.no_grad():
        return unpack(packs, [[policy(p)[0].numpy() for p in packs[0]]], len(samples))


@pytest.mark.parametrize(("how", "kept"), [({"top_k": 1}, 1), ({"top_p": 1e-6}, 1), ({"top_k": 3}, 3)])
def test_an_evaluation_may_sample_from_the_likeliest_tokens_only(
    engines: Callable[..., RolloutGroup], tokenizer: Any, model: str, how: dict[str, Any], kept: int
) -> None:
    requests = [replace(r, **how) for r in make_requests(tokenizer, n=4, temperature=1.0)]
    samples = generate(engines(*TWO_ENGINES), requests)
    lm, ranks = AutoModelForCausalLM.from_pretrained(model), []
    for r, s in zip(requests, samples, strict=True):
        ids = torch.tensor([[*r.tokens, *s.tokens.tolist()]])
        logits = lm(ids).logits[0, len(r.tokens) - 1 : -1]
        ranks += (logits > logits.gather(1, ids[0, len(r.tokens) :, None])).sum(1).tolist()
    assert set(ranks) == set(range(kept)), "each of the likeliest is sampled, and no other"


def test_exact_log_probs_are_the_policys_bit_for_bit(
    engines: Callable[..., RolloutGroup], tiny: Callable[..., Config], tokenizer: Any, model: str
) -> None:
    options = ("rollout.temperature=0.7", "rollout.exact=true", "rollout.engines=1")
    config, group = tiny(*options), engines(*options)
    wanted = make_requests(tokenizer, n=8, temperature=0.7)
    samples = generate(group, wanted)
    assert same_bits(generate(group, wanted[30:39]), samples[30:39])
    rollout = np.concatenate([s.logprobs for s in samples])
    for tokens_per_pack in (64, 256, 4096):
        assert np.array_equal(score_by_policy(config, model, tokenizer, samples, tokens_per_pack), rollout)


def test_samples_arrive_while_others_are_still_generate(engines: Callable[..., RolloutGroup], tokenizer: Any) -> None:
    group = engines(*TWO_ENGINES)
    wanted = make_requests(tokenizer, n=8, temperature=1.0)
    arrivals, missing = [], len(wanted)
    for chunk in group.generate(wanted):
        arrivals.append((time.monotonic(), len(chunk)))
        missing -= len(chunk)
        assert sum(group.samples_by_engine().values()) == missing, "in the engines, and waiting for one"
    assert missing == 0
    assert group.samples_by_engine() == {"": 0, "rollout-0": 0, "rollout-1": 0}
    assert len(arrivals) >= 8
    assert arrivals[-1][0] > arrivals[0][0]


def test_samples_arrive_while_weights_are_sent(engines: Callable[..., RolloutGroup], tokenizer: Any) -> None:
    group, sending, sent = engines(*TWO_ENGINES), threading.Event(), threading.Event()

    def send() -> None:
        with group.replacements_paused():
            sending.set()
            sent.wait(20)

    stream = group.generate(make_requests(tokenizer, n=8, temperature=1.0))
    missing, waiting, thread = 96 - len(next(stream)), group.samples_by_engine()[""], threading.Thread(target=send)
    thread.start()
    sending.wait()
    missing -= len(next(stream))
    assert thread.is_alive()
    assert group.samples_by_engine()[""] == waiting > 0, "no request is assigned while an engine might be replaced"
    sent.set()
    assert sum(map(len, stream)) == missing


@pytest.mark.parametrize(
    ("which", "transport", "stage"),
    [
        (TWO_ENGINES, "shared_memory", 2),
        (TWO_ENGINES, "shared_memory", 3),
        (IN_FLIGHT, "object_store", 3),
        (TWO_ENGINES, "object_store", 2),
        (BFLOAT16, "shared_memory", 2),
        (COMPILED, "shared_memory", 2),
    ],
)
def test_engines_compute_with_the_policys_weights_after_a_sync(
    engines: Callable[..., RolloutGroup],
    policy: Callable[..., PolicyGroup],
    changed: Callable[..., Config],
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    which: tuple[str, ...],
    transport: str,
    stage: int,
) -> None:
    group = engines(*which, transport=transport)
    policy = policy(changed(group.config, "policy", zero_stage=stage), group, transport)
    policy.call_all("set_bucket_bytes", 1 << 17)
    policy.connect(group)
    assert policy.weight_sync.info["parts"] > 3
    before = generate(group, make_requests(tokenizer))

    batch = make_batch(tokenizer, before)
    tokens = int(batch.lengths.sum())
    columns = Columns(advantages=-np.ones(tokens, dtype=np.float32))
    weights = np.full(tokens, 1 / tokens, dtype=np.float32)
    for _ in range(3):
        packs = pack(batch, range(12), ranks=2, tokens_per_pack=256, columns=columns, weights=weights)
        policy.update(packs, 1e-2, 0.0)
    stale = generate(group, make_requests(tokenizer))
    assert [s.text for s in stale] == [s.text for s in before], "engines keep their weights until the sync"

    policy.sync(1)
    if transport == "object_store":
        joined = [
            worker.__ray_call__.remote(lambda w: bool(w.receiver.memory)) for worker in group.workers.actors.values()
        ]
        assert set(ray.get(joined)) == {stage == 3}, "pieces of one rank are loaded without a copy"
    policy.call_all("set_bucket_bytes", BUCKET_BYTES)
    after = generate(group, make_requests(tokenizer))
    assert [s.text for s in after] != [s.text for s in before]
    assert {s.version for s in after} == {1}
    policy.save(str(tmp_path / "checkpoint"))
    policy.saved_files(wait=True)
    saved = str(tmp_path / "checkpoint" / "model")
    if which != BFLOAT16:
        assert [s.text for s in after[:4]] == [greedy_by_transformers(saved, tokenizer, p) for p in PROMPTS[:4]]
        packs = pack(make_batch(tokenizer, after), range(12), ranks=2, tokens_per_pack=256)
        scores = unpack(packs, policy.score(packs), 12)
        assert np.abs(np.concatenate([s.logprobs for s in after]) - scores).max() < 1e-4


@pytest.mark.parametrize(
    ("repeat", "limits"),
    [(1, range(20, 41, 3)), (5, range(14, 28, 2))],  # of 64 tokens that the model takes
    ids=["short prompts", "prompts of whole blocks"],
)
def test_in_flight_an_unfinished_sample_goes_on_with_the_new_weights(
    engines: Callable[..., RolloutGroup],
    policy: Callable[..., PolicyGroup],
    changed: Callable[..., Config],
    tokenizer: Any,
    model: str,
    repeat: int,
    limits: range,
) -> None:
    """And one that waited has nothing of the old ones, also where it shares its prompt."""
    group = engines(*IN_FLIGHT, "rollout.max_sequences=6", "rollout.max_new_tokens=57", transport="object_store")
    policy = policy(changed(group.config, "policy", zero_stage=3), group, "object_store")
    policy.sync(1)
    # Long samples of different lengths: at any moment some are unfinished.
    requests = make_requests(tokenizer, n=32, temperature=1.0, repeat=repeat)
    wanted = [replace(r, ignore_end=True, max_new_tokens=limits[i % 7]) for i, r in enumerate(requests)]

    batch = make_batch(tokenizer, generate(group, make_requests(tokenizer)))
    tokens = int(batch.lengths.sum())
    columns = Columns(advantages=-np.ones(tokens, dtype=np.float32))
    weights = np.full(tokens, 1 / tokens, dtype=np.float32)
    for _ in range(3):
        packs = pack(batch, range(12), ranks=2, tokens_per_pack=256, columns=columns, weights=weights)
        policy.update(packs, 1e-2, 0.0)
    with ThreadPoolExecutor(1) as other:
        stream = generate_without_rest(group, wanted)
        samples = next(stream)
        sync = other.submit(policy.sync, 2)
        samples += [s for chunk in stream for s in chunk]
        sync.result()

    samples.sort(key=lambda s: (int(s.uid[1:]), s.index))
    assert [(s.uid, s.index) for s in samples] == [(r.uid, r.index) for r in wanted], "each sample arrives once"
    ends = np.cumsum([r.max_new_tokens for r in wanted])[:-1]
    before = np.split(score_by_policy(group.config, model, tokenizer, samples, 256, repeat), ends)
    packs = pack(make_batch(tokenizer, samples, repeat), range(len(samples)), ranks=2, tokens_per_pack=256)
    after = np.split(unpack(packs, policy.score(packs), len(samples)), ends)
    kinds = set()
    for s, old, new in zip(samples, before, after, strict=True):
        first, later = s.versions == 1, s.versions == 2
        kinds.add((bool(first.any()), bool(later.any())))
        assert (first | later).all()
        assert np.abs(s.logprobs - old)[first].max(initial=0) < 1e-4, "tokens of version 1 have its log-probs"
        if not first.any():
            assert np.abs(s.logprobs - new).max() < 1e-4, "and so have those of version 2"
        elif later.any():
            assert np.abs(s.logprobs - old)[later].max() > 1e-3, "other weights have sampled the rest"
    assert kinds == {(True, False), (True, True), (False, True)}


def test_a_sample_that_was_stopped_early_continues_as_if_it_had_not_been(
    engines: Callable[..., RolloutGroup], tokenizer: Any
) -> None:
    group = engines(*IN_FLIGHT, transport="object_store")
    requests = make_requests(tokenizer, n=12)  # enough that a late stop comes before the last
    wanted = [replace(r, ignore_end=True, max_new_tokens=20 + 3 * (g % 7)) for g, r in enumerate(requests)]
    whole = generate(group, wanted)
    stopped = []
    for chunk in generate_without_rest(group, wanted):
        stopped += chunk
        group.stop_early()
    done = {(s.uid, s.index): s for s in stopped}
    cut = {key: s for key, s in done.items() if s.finish == "cut"}
    assert 0 < len(cut) < len(done) < len(wanted), "some are finished, some unfinished, some never started"
    rest = [replace(r, partial=cut.get((r.uid, r.index))) for r in wanted if (r.uid, r.index) in cut]
    again = {(s.uid, s.index): s for s in generate(group, [r for r in rest if len(r.partial.tokens)])}
    assert again
    for s in whole:
        other = again.get((s.uid, s.index)) or (s if (s.uid, s.index) in cut else done.get((s.uid, s.index), s))
        assert (other.text, other.tokens.tolist(), other.finish) == (s.text, s.tokens.tolist(), s.finish)
        assert np.abs(other.logprobs - s.logprobs).max() < 1e-4
