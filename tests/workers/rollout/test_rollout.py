"""Engines on real vLLM: what they sample, and that the weights they compute with are the policy's."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlsys.config.schema import Config
from rlsys.packs.packing import pack, unpack
from rlsys.runs.errors import WorkerLost
from rlsys.tasks import zigzag as tiny_task
from rlsys.types import Batch, Columns, Prompt, Request, Sample
from workers.learner.model import load_packed
from workers.learner.policy import PolicyGroup
from workers.rollout.engine_settings import CPU_ENVIRONMENT
from workers.rollout.rollout_group import RolloutGroup, WeightUpdate
from workers.rollout.rollout_worker import RolloutWorker
from workers.supervision.watchdog import Watchdog
from workers.sync.host_memory import HostMemory
from workers.sync.layout import BUCKET_BYTES, tensor_view
from workers.sync.outgoing import OutgoingWeights
from workers.sync.shared_memory import SharedMemorySender
from workers.sync.verify import combine_ranks

PAIR = ("rollout.max_sequences=8",)  # two engines
COMPILED = ("rollout.engines=1", "rollout.enforce_eager=false")
THREADED = ("rollout.engines=1", "rollout.threads=2")
COARSE = ("rollout.engines=1", "rollout.dtype=bfloat16")
FLYING = ("rollout.engines=1", "rollout.max_sequences=4", "pipeline.max_lag=1", "pipeline.in_flight=true")
FLYING += ("rollout.max_new_tokens=40",)
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


def same(a: list[Sample], b: list[Sample]) -> bool:
    """Bit for bit."""
    return all(
        np.array_equal(x.tokens, y.tokens) and np.array_equal(x.logprobs, y.logprobs) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("options", [PAIR, COMPILED, THREADED], ids=["two engines", "a compiled one", "two threads"])
def test_samples_their_logprobs_and_their_seeds(
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
    greedy = generated(group, requests(tokenizer))
    assert [s.text for s in greedy[:4]] == [greedy_by_transformers(model, tokenizer, p) for p in PROMPTS[:4]]

    wanted = requests(tokenizer, n=8, temperature=0.7)
    samples = generated(group, wanted)
    assert len({s.text for s in samples if s.uid == "p0"}) > 1, "a group must differ"
    assert all(s.finish == ("stop" if s.tokens[-1] == tokenizer.eos_token_id else "length") for s in samples)

    for some in ([37], [95, 3], range(40, 47), range(95, -1, -1)):
        again = generated(group, [wanted[i] for i in some])
        assert same(again, [samples[i] for i in some]), "a sample can be drawn again, in whatever company"

    config = tiny("rollout.temperature=0.7")
    gaps = np.concatenate([s.logprobs for s in samples]) - scored(config, model, tokenizer, samples, 256)
    assert np.abs(gaps).max() < 1e-4, "rollout and policy log-probs are the same quantity"


def scored(config: Config, model: str, tokenizer: Any, samples: list[Sample], tokens_per_pack: int) -> Any:
    torch.set_num_threads(1)
    policy = load_packed(config, model)
    packs = pack(batch_of(tokenizer, samples), range(len(samples)), ranks=1, tokens_per_pack=tokens_per_pack)
    with torch.no_grad():
        return unpack(packs, [[policy(p)[0].numpy() for p in packs[0]]], len(samples))


def test_exact_log_probs_are_the_policys_bit_for_bit(
    engines: Callable[..., RolloutGroup], tiny: Callable[..., Config], tokenizer: Any, model: str
) -> None:
    options = ("rollout.temperature=0.7", "rollout.exact=true", "rollout.engines=1")
    config, group = tiny(*options), engines(*options)
    wanted = requests(tokenizer, n=8, temperature=0.7)
    samples = generated(group, wanted)
    assert same(generated(group, wanted[30:39]), samples[30:39])
    rollout = np.concatenate([s.logprobs for s in samples])
    for tokens_per_pack in (64, 256, 4096):
        assert np.array_equal(scored(config, model, tokenizer, samples, tokens_per_pack), rollout)


def test_samples_arrive_while_others_are_still_generated(engines: Callable[..., RolloutGroup], tokenizer: Any) -> None:
    group = engines(*PAIR)
    wanted = requests(tokenizer, n=8, temperature=1.0)
    arrivals, owed = [], len(wanted)
    for chunk in group.generate(wanted):
        arrivals.append((time.monotonic(), len(chunk)))
        owed -= len(chunk)
        assert sum(group.samples_by_engine().values()) == owed, "at the engines, and waiting for one"
    assert owed == 0
    assert group.samples_by_engine() == {"": 0, "rollout-0": 0, "rollout-1": 0}
    assert len(arrivals) >= 8
    assert arrivals[-1][0] > arrivals[0][0]


def test_samples_arrive_while_weights_are_sent(engines: Callable[..., RolloutGroup], tokenizer: Any) -> None:
    group, sending, sent = engines(*PAIR), threading.Event(), threading.Event()

    def send() -> None:
        with group.replacements_paused():
            sending.set()
            sent.wait(20)

    stream = group.generate(requests(tokenizer, n=8, temperature=1.0))
    owed, waiting, thread = 96 - len(next(stream)), group.samples_by_engine()[""], threading.Thread(target=send)
    thread.start()
    sending.wait()
    owed -= len(next(stream))
    assert thread.is_alive()
    assert group.samples_by_engine()[""] == waiting > 0, "an engine could be another one by now"
    sent.set()
    assert sum(map(len, stream)) == owed


@pytest.mark.parametrize(
    ("which", "transport", "stage"),
    [
        (PAIR, "shared_memory", 2),
        (PAIR, "shared_memory", 3),
        (FLYING, "object_store", 3),
        (PAIR, "object_store", 2),
        (COARSE, "shared_memory", 2),
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
    if transport == "object_store":
        together = [
            worker.__ray_call__.remote(lambda w: bool(w.receiver.memory)) for worker in group.workers.actors.values()
        ]
        assert set(ray.get(together)) == {stage == 3}, "what one rank sends is loaded from where Ray holds it"
    policy.call_all("set_bucket_bytes", BUCKET_BYTES)
    after = generated(group, requests(tokenizer))
    assert [s.text for s in after] != [s.text for s in before]
    assert {s.version for s in after} == {1}
    policy.save(str(tmp_path / "checkpoint"))
    policy.saved(wait=True)
    saved = str(tmp_path / "checkpoint" / "model")
    if which != COARSE:
        assert [s.text for s in after[:4]] == [greedy_by_transformers(saved, tokenizer, p) for p in PROMPTS[:4]]
        packs = pack(batch_of(tokenizer, after), range(12), ranks=2, tokens_per_pack=256)
        scored = unpack(packs, policy.score(packs), 12)
        assert np.abs(np.concatenate([s.logprobs for s in after]) - scored).max() < 1e-4


def test_in_flight_half_written_samples_go_on_with_other_weights_and_say_so(
    engines: Callable[..., RolloutGroup],
    policy: Callable[..., PolicyGroup],
    changed: Callable[..., Config],
    tokenizer: Any,
    model: str,
) -> None:
    group = engines(*FLYING, transport="object_store")
    policy = policy(changed(group.config, "policy", zero_stage=3), group, "object_store")
    policy.sync(1)
    # Long ones of different lengths, so that at any moment some are half-written.
    asked = requests(tokenizer, n=16, temperature=1.0)
    wanted = [replace(r, ignore_end=True, max_new_tokens=20 + 3 * (i % 7)) for i, r in enumerate(asked)]

    batch = batch_of(tokenizer, generated(group, requests(tokenizer)))
    tokens = int(batch.lengths.sum())
    columns = Columns(advantages=-np.ones(tokens, dtype=np.float32))
    weights = np.full(tokens, 1 / tokens, dtype=np.float32)
    for _ in range(3):
        packs = pack(batch, range(12), ranks=2, tokens_per_pack=256, columns=columns, weights=weights)
        policy.update(packs, 1e-2, 0.0)
    with ThreadPoolExecutor(1) as other:
        stream = group.generate(wanted)
        samples = next(stream)
        taken = other.submit(policy.sync, 2)  # and proves it
        samples += [s for some in stream for s in some]
        taken.result()

    samples.sort(key=lambda s: (int(s.uid[1:]), s.index))
    assert [(s.uid, s.index) for s in samples] == [(r.uid, r.index) for r in wanted], (
        "each once, four or five at a time"
    )
    ends = np.cumsum([r.max_new_tokens for r in wanted])[:-1]
    before = np.split(scored(group.config, model, tokenizer, samples, 256), ends)
    packs = pack(batch_of(tokenizer, samples), range(len(samples)), ranks=2, tokens_per_pack=256)
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


def test_what_is_cut_off_goes_on_as_if_it_had_not_been(engines: Callable[..., RolloutGroup], tokenizer: Any) -> None:
    group = engines(*FLYING, transport="object_store")
    wanted = [replace(r, ignore_end=True, max_new_tokens=4 + g % 7) for g, r in enumerate(requests(tokenizer, n=2))]
    whole = generated(group, wanted)
    found = []
    for some in group.generate(wanted):
        found += some
        group.stop_early()
    done = {(s.uid, s.index): s for s in found}
    cut = {key: s for key, s in done.items() if s.finish == "cut"}
    assert 0 < len(cut) < len(done) < len(wanted), "finished, half-written, never begun"
    rest = [replace(r, partial=cut.get((r.uid, r.index))) for r in wanted if (r.uid, r.index) in cut]
    again = {(s.uid, s.index): s for s in generated(group, [r for r in rest if len(r.partial.tokens)])}
    assert again
    for s in whole:
        other = again.get((s.uid, s.index)) or (s if (s.uid, s.index) in cut else done.get((s.uid, s.index), s))
        assert (other.text, other.tokens.tolist(), other.finish) == (s.text, s.tokens.tolist(), s.finish)
        assert np.abs(other.logprobs - s.logprobs).max() < 1e-4


def outgoing_of(weights: dict[str, torch.Tensor]) -> OutgoingWeights:
    """Of the only rank."""
    return OutgoingWeights([], [[(n, 0, w) for n, w in weights.items()]], torch.float32)


@pytest.fixture
def sent(spawn: Callable[..., Any], tiny: Callable[..., Config], model: str, tmp_path: Path) -> "Sent":
    return Sent(spawn, tiny("rollout.engines=1", "rollout.max_sequences=8"), model, tmp_path)


class Sent:
    """Weights as a policy would send them, to one engine of its own."""

    def __init__(self, spawn: Callable[..., Any], config: Config, model: str, logs: Path):
        lm = AutoModelForCausalLM.from_pretrained(model)
        self.weights = {n: p.detach() * 1.5 for n, p in lm.named_parameters()}
        self.sender, self.events = SharedMemorySender(0, 1, 1), list[dict[str, Any]]()
        manifest = [(n, "float32", list(w.shape)) for n, w in self.weights.items()]
        self.invitation = self.sender.connection_info(manifest) | {
            "manifest": manifest,
            "shards": 1,
            "by_position": False,
        }
        self.sender.connect(self.invitation)
        outgoing = outgoing_of(self.weights)
        self.sender.send(outgoing, 0)
        self.delivery = WeightUpdate([[]], 1, combine_ranks([outgoing.fingerprints]))

        watchdog = Watchdog(logs, event=lambda kind, **facts: self.events.append({"kind": kind} | facts))
        self.group = RolloutGroup(
            config, lambda name: spawn(RolloutWorker, config, 0, environment=CPU_ENVIRONMENT), watchdog
        )
        self.group.start(model, "shared_memory", 7)
        self.group.connect(self.invitation)

    @property
    def engine(self) -> Any:
        return self.group.workers.actors["rollout-0"]

    def take(self, flip_then: str = "") -> None:
        """A bit of the engine's own memory may flip before it proves what it took."""

        def flip(worker: Any) -> None:
            runner = worker.engine.engine.model_executor.driver_worker.worker.model_runner
            runner.get_model().get_parameter(flip_then).data.view(torch.int32)[0, 0] ^= 1

        self.group.load_weights(self.delivery)
        if flip_then:
            ray.get(self.engine.__ray_call__.remote(flip))
        self.group.verify_weights()


def test_an_engine_that_has_other_weights_says_which(sent: Sent) -> None:
    def taken(version: int = 1, expected: dict[str, str] = sent.delivery.fingerprints, **told: Any) -> str:
        invitation = sent.invitation | told

        def believing(worker: Any) -> None:
            worker.weights_error = ""
            worker.receiver.init_info(invitation, 0, 1, True)

        ray.get(sent.engine.__ray_call__.remote(believing))
        ray.get(sent.engine.load_weights.remote([[]], 1))
        return str(ray.get(sent.engine.verify_weights.remote(version, expected)))

    memory = sent.sender.memory
    assert taken() == ""
    assert taken(version=2) == "it has version 1"
    [whole] = sent.invitation["buckets"]
    layout = {name: place for name, *place in whole}

    up = "model.layers.1.mlp.up_proj.weight"
    tensor_view(memory, *layout[up]).view(torch.int32)[7, 7] ^= 1 << 30
    assert taken() == f"1 of 26 tensors differ: {up}"
    tensor_view(memory, *layout[up]).view(torch.int32)[7, 7] ^= 1 << 30

    q, k = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
    exchanged = {q: k, k: q}
    swapped = [(exchanged.get(name, name), *place) for name, *place in whole]
    assert taken(buckets=[swapped]) == f"2 of 26 tensors differ: {q} (it holds {k}), {k} (it holds {q})"
    with pytest.raises(ray.exceptions.RayTaskError, match=f"WrongWeights: .* 2 of 26 tensors differ: {q}"):
        ray.get(sent.engine.load_weights.remote([[]], 2))

    assert taken() == "", "and takes them whole again"

    others = HostMemory(len(memory))  # the next version of the weights, one of which never comes
    outgoing = outgoing_of({n: w * 2 for n, w in sent.weights.items()})
    for bucket in outgoing.shard_buckets:
        outgoing.copy_bucket(bucket, whole, others.bytes)
    without = [place for place in whole if place[0] != up]
    expected = combine_ranks([outgoing.fingerprints])
    assert taken(1, expected, path=others.path, buckets=[without]) == f"1 of 26 tensors differ: {up}"


def test_no_sample_leaves_an_engine_that_has_other_weights(sent: Sent, tokenizer: Any) -> None:
    sent.take()
    samples = generated(sent.group, requests(tokenizer))

    down = "model.layers.0.mlp.down_proj.weight"
    sent.take(flip_then=down)
    assert same(generated(sent.group, requests(tokenizer)), samples), "another engine has taken its place"
    wrong = "generating: rollout-0 has weights that are not version 1 of the policy's: 1 of 26 tensors differ: "
    assert [(e["kind"], e["cause"]) for e in sent.events] == [
        ("weights did not arrive", wrong + down),
        ("replaced", wrong + down),
    ]

    sent.sender.memory[1234] ^= 1
    sent.take()
    with pytest.raises(WorkerLost, match=r"no longer whole: 1 of 26 tensors differ: model\.embed_tokens\.weight"):
        next(sent.group.generate(requests(tokenizer)))
