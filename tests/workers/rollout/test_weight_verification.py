"""An engine on real vLLM notices wrong weights, and no sample leaves it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from zigzag_requests import generate, make_requests, same_bits

from rlsys.config.schema import Config
from rlsys.errors import WorkerLost
from workers.fleet.watchdog import Watchdog
from workers.rollout.engine_settings import CPU_ENVIRONMENT
from workers.rollout.rollout_group import RolloutGroup
from workers.rollout.rollout_worker import RolloutWorker
from workers.sync.host_memory import HostMemory
from workers.sync.layout import shard_views, tensor_view
from workers.sync.outgoing import OutgoingBucket
from workers.sync.shared_memory import SharedMemorySender
from workers.sync.verify import combine_ranks
from workers.sync.weight_sync import WeightUpdate


def outgoing_of(weights: dict[str, torch.Tensor]) -> OutgoingBucket:
    """What the only rank sends."""
    manifest = [(n, "float32", list(w.shape)) for n, w in weights.items()]
    return OutgoingBucket(0, manifest, [(n, 0, w) for n, w in weights.items()])


@pytest.fixture
def tokenizer(model: str) -> Any:
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture
def sent(spawn: Callable[..., Any], tiny: Callable[..., Config], model: str, tmp_path: Path) -> "SentWeights":
    return SentWeights(spawn, tiny("rollout.engines=1", "rollout.max_sequences=8"), model, tmp_path)


class SentWeights:
    """Sends weights to one engine, as a policy would."""

    def __init__(self, spawn: Callable[..., Any], config: Config, model: str, logs: Path):
        lm = AutoModelForCausalLM.from_pretrained(model)
        self.weights = {n: p.detach() * 1.5 for n, p in lm.named_parameters()}
        self.sender, self.events = SharedMemorySender(0, 1, 1), list[dict[str, Any]]()
        manifest = [(n, "float32", list(w.shape)) for n, w in self.weights.items()]
        self.info = self.sender.connection_info([manifest], in_place=False) | {
            "manifest": manifest,
            "shards": 1,
            "by_position": False,
        }
        self.sender.connect(self.info)
        outgoing = outgoing_of(self.weights)
        self.sender.send(outgoing)
        self.update = WeightUpdate([[]], 1, combine_ranks([outgoing.fingerprints]))

        watchdog = Watchdog(logs, event=lambda kind, **facts: self.events.append({"kind": kind} | facts))
        self.group = RolloutGroup(
            config, lambda name: spawn(RolloutWorker, config, 0, environment=CPU_ENVIRONMENT), watchdog
        )
        self.group.start(model, "shared_memory", 17)
        self.group.connect(self.info)

    @property
    def engine(self) -> Any:
        return self.group.workers.actors["rollout-0"]

    def load(self, flip_then: str = "") -> None:
        """Loads and verifies the weights. A bit of the named parameter flips in between."""

        def flip(worker: Any) -> None:
            runner = worker.engine.engine.model_executor.driver_worker.worker.model_runner
            runner.get_model().get_parameter(flip_then).data.view(torch.int32)[0, 0] ^= 1

        self.group.load_weights(self.update)
        if flip_then:
            ray.get(self.engine.__ray_call__.remote(flip))
        self.group.verify_weights()


def test_an_engine_with_wrong_weights_names_the_tensors(sent: SentWeights) -> None:
    def difference(version: int = 1, expected: dict[str, str] = sent.update.fingerprints, **changes: Any) -> str:
        info = sent.info | changes

        def change_info(worker: Any) -> None:
            worker.weights_error = ""
            worker.receiver.init_info(info, 0, 1, True)

        ray.get(sent.engine.__ray_call__.remote(change_info))
        ray.get(sent.engine.load_weights.remote([[]], 1))
        return str(ray.get(sent.engine.verify_weights.remote(version, expected)))

    memory = sent.sender.memory
    assert difference() == ""
    assert difference(version=2) == "it has version 1"
    [whole] = sent.info["buckets"]
    layout = {name: place for name, *place in whole}

    up = "model.layers.1.mlp.up_proj.weight"
    tensor_view(memory, *layout[up]).view(torch.int32)[7, 7] ^= 1 << 30
    assert difference() == f"1 of 26 tensors differ: {up}"
    tensor_view(memory, *layout[up]).view(torch.int32)[7, 7] ^= 1 << 30

    q, k = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
    exchanged = {q: k, k: q}
    swapped = [(exchanged.get(name, name), *place) for name, *place in whole]
    assert difference(buckets=[swapped]) == f"2 of 26 tensors differ: {q} (it holds {k}), {k} (it holds {q})"
    with pytest.raises(ray.exceptions.RayTaskError, match=f"WrongWeights: .* 2 of 26 tensors differ: {q}"):
        ray.get(sent.engine.load_weights.remote([[]], 2))

    assert difference() == "", "the next load is correct again"

    others = HostMemory(len(memory))  # the next version of the weights, of which one tensor never arrives
    outgoing = outgoing_of({n: w * 2 for n, w in sent.weights.items()})
    outgoing.copy_to(shard_views(others.bytes, whole, outgoing.shards))
    incomplete = [place for place in whole if place[0] != up]
    expected = combine_ranks([outgoing.fingerprints])
    assert difference(1, expected, path=others.path, buckets=[incomplete]) == f"1 of 26 tensors differ: {up}"


def test_no_sample_leaves_an_engine_with_wrong_weights(sent: SentWeights, tokenizer: Any) -> None:
    sent.load()
    samples = generate(sent.group, make_requests(tokenizer))

    down = "model.layers.0.mlp.down_proj.weight"
    sent.load(flip_then=down)
    assert same_bits(generate(sent.group, make_requests(tokenizer)), samples), "the engine was replaced"
    wrong = "generating: rollout-0 has weights that are not version 1 of the policy's: 1 of 26 tensors differ: "
    assert [(e["kind"], e["cause"]) for e in sent.events] == [
        ("wrong weights", wrong + down),
        ("replaced", wrong + down),
    ]

    sent.sender.memory[1234] ^= 1
    sent.load()
    with pytest.raises(WorkerLost, match=r"version 1 either: 1 of 26 tensors differ: model\.embed_tokens\.weight"):
        next(sent.group.generate(make_requests(tokenizer)))
