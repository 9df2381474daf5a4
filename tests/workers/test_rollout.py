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
from rlsys.failures import WorkerFailed
from rlsys.packing import pack, unpack
from rlsys.types import Batch, Columns, Prompt, Request, Sample
from workers.engines import CPU_ENVIRONMENT
from workers.model import load_packed
from workers.policy import PolicyGroup, PolicyRank
from workers.proof import differences, shown, tensor_print, together
from workers.rollout import Delivery, RolloutGroup, RolloutWorker
from workers.sync.host_memory import HostMemory, view
from workers.sync.shared_memory import Sender
from workers.waiting import Watch

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
        def engine(name: str) -> Any:
            return spawn(RolloutWorker, config, int(name.split("-")[1]), environment=CPU_ENVIRONMENT)

        group = RolloutGroup(config, engine, Watch(tmp_path))
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


def same(a: list[Sample], b: list[Sample]) -> bool:
    """Bit for bit."""
    return all(
        np.array_equal(x.tokens, y.tokens) and np.array_equal(x.logprobs, y.logprobs) for x, y in zip(a, b, strict=True)
    )


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

    for some in ([37], [95, 3], range(40, 47), range(95, -1, -1)):
        again = generated(group, [wanted[i] for i in some])
        assert same(again, [samples[i] for i in some]), "a sample can be drawn again, in whatever company"

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
    config = tiny("rollout.temperature=0.7", "rollout.exact=true", "rollout.engines=1")
    group = engines(config)
    wanted = requests(tokenizer, n=8, temperature=0.7)
    samples = generated(group, wanted)
    assert same(generated(group, wanted[30:39]), samples[30:39])
    rollout = np.concatenate([s.logprobs for s in samples])
    for tokens_per_pack in (64, 256, 4096):
        assert np.array_equal(scored(config, model, tokenizer, samples, tokens_per_pack), rollout)


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
    policy = PolicyGroup(
        config, lambda name: spawn(PolicyRank, config, int(name.split("-")[1])), group, Watch(tmp_path)
    )
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
    policy.saved(wait=True)
    saved = str(tmp_path / "checkpoint" / "model")
    if dtype == "float32":
        assert [s.text for s in after[:4]] == [greedy_by_transformers(saved, tokenizer, p) for p in PROMPTS[:4]]
        packs = pack(batch_of(tokenizer, after), range(12), ranks=2, tokens_per_pack=256)
        scored = unpack(packs, policy.score(packs), 12)
        assert np.abs(np.concatenate([s.logprobs for s in after]) - scored).max() < 1e-4

    if transport == "shared_memory":
        flip_one_bit(group)
        with pytest.raises(
            WorkerFailed, match=r"did not arrive whole.* 1 of 26 tensors differ: model\.embed_tokens\.weight"
        ):
            policy.sync(2)


def flip_one_bit(group: RolloutGroup) -> None:
    """From now on, one bit of the shared weights flips after they are written and before the engines read them."""
    original = group.take

    def take(delivery: Delivery) -> dict[str, str]:
        message = delivery.messages[0]
        memory = torch.from_file(message["path"], shared=True, size=message["size"], dtype=torch.uint8)
        memory[1234] ^= 1
        return original(delivery)

    group.take = take  # type: ignore[method-assign]


def test_an_engine_that_has_other_weights_says_which(
    ray: Any, spawn: Callable[..., Any], tiny: Callable[..., Config], model: str
) -> None:
    engine = spawn(RolloutWorker, tiny(), 0, environment=CPU_ENVIRONMENT)
    ray.get(engine.start.remote(model, "shared_memory", 7))
    weights = {n: p.detach() * 1.5 for n, p in AutoModelForCausalLM.from_pretrained(model).named_parameters()}
    manifest = [(n, "float32", list(w.shape)) for n, w in weights.items()]
    sender = Sender(0, 1)
    ray.get(engine.connect.remote(sender.invite(manifest)))
    expected = {n: shown(tensor_print(w, by_place=False)) for n, w in weights.items()}

    def taken(message: dict[str, Any]) -> str:
        version, prints = ray.get(engine.take.remote([message], 1))
        assert version == 1
        return differences(expected, prints)

    message = sender.send(iter(weights.items()))
    assert taken(message) == ""
    layout = {name: place for name, *place in message["layout"]}

    up = "model.layers.1.mlp.up_proj.weight"
    view(sender.memory.bytes, *layout[up]).view(torch.int32)[7, 7] ^= 1 << 30
    assert taken(message) == f"1 of 26 tensors differ: {up}"
    view(sender.memory.bytes, *layout[up]).view(torch.int32)[7, 7] ^= 1 << 30

    q, k = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
    exchanged = {q: k, k: q}
    swapped = [(exchanged.get(name, name), *place) for name, *place in message["layout"]]
    assert taken(message | {"layout": swapped}) == f"2 of 26 tensors differ: {q} (it holds {k}), {k} (it holds {q})"

    def flipped(worker: Any, parameter: str) -> dict[str, str]:
        """What the engine says after a bit of its own memory has flipped."""
        inside = worker.engine.engine
        runner = inside.model_executor.driver_worker.worker.model_runner
        runner.get_model().get_parameter(parameter).data.view(torch.int32)[0, 0] ^= 1
        return together(inside.collective_rpc("rlsys_prove"))

    assert taken(message) == "", "and takes them whole again"
    down = "model.layers.0.mlp.down_proj.weight"
    prints = ray.get(engine.__ray_call__.remote(flipped, down))
    assert differences(expected, prints) == f"1 of 26 tensors differ: {down}"

    others = HostMemory(message["size"])  # the next version of the weights, one of which never comes
    later = {n: w * 2 for n, w in weights.items()}
    others.fill(message["layout"], iter(later.items()))
    expected = {n: shown(tensor_print(w, by_place=False)) for n, w in later.items()}
    without = [place for place in message["layout"] if place[0] != up]
    assert up in taken({"path": others.path, "size": message["size"], "layout": without})


def test_an_engine_that_is_late_is_told_by_its_version() -> None:
    delivery = Delivery([], 7, {"a": "1"})
    answers = {"rollout-0": (7, {"a": "1"}), "rollout-1": (6, {"a": "1"}), "rollout-2": (7, {"a": "2"})}
    assert delivery.wrong(answers) == {
        "rollout-1": "it has version 6",
        "rollout-2": "1 of 1 tensors differ: a",
    }
