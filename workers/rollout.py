"""Rollout: vLLM engines as Ray actors, and the driver's one handle to them."""

import asyncio
import queue
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from rlsys.config import Config
from rlsys.failures import WorkerFailed, WorkerLost
from rlsys.types import Request, Sample
from workers.crew import TRIES, Crew
from workers.engines import AsyncEngine, Engine, InProcessEngine, arguments
from workers.process import settle
from workers.proof import differences, listed, together
from workers.sync import RECEIVERS, SENDERS, Message
from workers.waiting import TICK_S, Patience, Watch, explain


class RolloutWorker:
    """One engine. Generates on one version of the weights at a time: `take` waits for `generate` to end."""

    def __init__(self, config: Config, index: int, logs: str):
        settle(f"rollout-{index}", logs)
        self.config, self.index, self.version = config, index, 0
        self.busy = asyncio.Lock()
        import vllm  # noqa: F401  the slow import, while the driver does other things

    async def start(self, model: str, transport: str, longest_prompt: int) -> None:
        from transformers import AutoTokenizer, GenerationConfig

        self.tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=self.config.model.trust_remote_code)
        try:
            ends = GenerationConfig.from_pretrained(model).eos_token_id
        except OSError:  # the model has no generation_config.json
            ends = None
        more = [ends] if isinstance(ends, int) else ends or []
        self.stop_ids = sorted({i for i in [self.tokenizer.eos_token_id, *more] if i is not None})
        self.receiver = RECEIVERS[transport]()
        settings = arguments(self.config, model, self.receiver.backend, longest_prompt)
        on_cpu = self.config.cluster.device == "cpu"
        self.engine: Engine = InProcessEngine(settings, self.config.rollout.exact) if on_cpu else AsyncEngine(settings)
        if on_cpu and (names := (await self.engine.call("rlsys_rows_matter"))[0]):
            print(
                f"On this machine products with {listed(names)} depend on what else is in the batch: a sample that is drawn "
                "again, after an engine was lost, may differ from the first in the last bit of its log-probs."
            )

    async def generate(self, requests: list[Request]) -> AsyncIterator[list[Sample]]:
        """Samples as they finish: a stream of object references on the driver's side."""
        by_id = {f"{r.uid}/{r.index}": r for r in requests}
        async with self.busy:
            async for outs in self.engine.generate(requests, self.stop_ids):
                yield [self.sample(by_id[out.request_id], out.outputs[0]) for out in outs]

    def sample(self, request: Request, out: Any) -> Sample:
        tokens = list(out.token_ids)
        return Sample(
            uid=request.uid,
            index=request.index,
            text=self.tokenizer.decode(tokens, skip_special_tokens=True),
            tokens=np.array(tokens, dtype=np.int32),
            logprobs=np.array([d[t].logprob for t, d in zip(tokens, out.logprobs, strict=True)], dtype=np.float32),
            finish=out.finish_reason,
            version=self.version,
        )

    async def connect(self, invitation: Message) -> None:
        info = self.receiver.init_info(invitation, self.index, self.config.rollout.tensor_parallel)
        await self.engine.call("init_weight_transfer_engine", init_info=info)
        if self.config.sync.verify:
            lost = (await self.engine.call("rlsys_chart", manifest=invitation["manifest"]))[0]
            if lost:
                print(
                    f"sync.verify: this architecture stores {listed(lost)} in a way of its own. Of these all bits together are "
                    "compared, in any order; tensors among them that changed places would not be seen."
                )

    async def take(self, messages: list[Message], version: int) -> tuple[int, dict[str, str]]:
        """Replaces the weights. Returns their version and fingerprints of what the engine now computes with, by tensor."""
        async with self.busy:
            await self.engine.wake("weights")
            await self.engine.call("start_weight_update")
            await self.engine.call("update_weights", update_info=self.receiver.update_info(messages))
            await self.engine.call("finish_weight_update")
            await self.engine.forget_prefixes()
            self.version = version
            return version, together(await self.engine.call("rlsys_prove")) if self.config.sync.verify else {}

    async def sleep(self) -> None:
        async with self.busy:
            await self.engine.sleep()

    async def wake(self) -> None:
        await self.engine.wake("kv_cache")


@dataclass(frozen=True)
class Delivery:
    """Weights on their way: the transport's messages, what the weights are called, and the policy's fingerprint of each tensor."""

    messages: list[Message]
    version: int
    prints: dict[str, str]

    def wrong(self, answers: dict[str, tuple[int, dict[str, str]]]) -> dict[str, str]:
        """By engine, in words, where its own version or fingerprints are others. No entry: it has them all, bit for bit."""
        found = {}
        for name, (version, prints) in answers.items():
            late = "" if version == self.version else f"it has version {version}"
            if what := late or (differences(self.prints, prints) if self.prints else ""):
                found[name] = what
        return found


class RolloutGroup:
    """All engines as one, for the driver. Implements `rlsys.interfaces.Rollout`.

    An engine that is lost is replaced, given the present weights, and asked again for the samples that are missing.
    """

    def __init__(self, config: Config, spawn: Callable[[str], Any], watch: Watch):
        self.config, self.watch = config, watch
        self.crew = Crew([f"rollout-{i}" for i in range(config.rollout.engines)], spawn, watch, then=self.catch_up)
        self.sleeps = config.cluster.placement == "colocated"
        self.awake = True
        self.delivery: Delivery | None = None

    def calls(self, method: str, *arguments: Any) -> dict[str, Any]:
        """The same call on every engine, not waited for."""
        return {name: getattr(actor, method).remote(*arguments) for name, actor in self.crew.actors.items()}

    def start(self, model: str, transport: str, longest_prompt: int) -> None:
        self.lasting = SENDERS[transport].lasting
        arguments, limit = (model, transport, longest_prompt), self.config.cluster.start_timeout_s
        self.crew.call("start", *arguments, doing="starting the engines", limit_s=limit, keep=True)

    def connect(self, invitation: Message) -> None:
        limit = self.config.cluster.start_timeout_s
        self.crew.call("connect", invitation, doing="connecting the engines", limit_s=limit, keep=True)

    def take(self, delivery: Delivery) -> dict[str, str]:
        """Has every engine take the weights; returns what is wrong at which. An engine that comes later takes them too."""
        self.delivery = delivery
        return delivery.wrong(self.crew.call("take", delivery.messages, delivery.version, doing="taking weights"))

    def catch_up(self, names: list[str]) -> None:
        """Gives engines that have just come the weights that the others have."""
        if self.delivery is None:
            return
        if not self.lasting:
            raise WorkerLost(f"{', '.join(names)} cannot be given the present weights again by this sync.transport")
        messages, version = self.delivery.messages, self.delivery.version
        try:
            answers = self.crew.call("take", messages, version, doing="taking weights again", only=names)
        except WorkerFailed as error:  # whose memory it is may be gone; the ranks may be busy, so they are not asked
            raise WorkerLost(
                f"weights of version {version} cannot be given to {', '.join(names)} again: {error}"
            ) from error
        for name, what in self.delivery.wrong(answers).items():
            raise WorkerLost(f"weights of version {version} that were kept for {name} are no longer whole: {what}")

    def generating(self) -> None:
        if self.sleeps and not self.awake:
            self.crew.call("wake", doing="waking the engines")
        self.awake = True

    def resting(self) -> None:
        if self.sleeps and self.awake:
            self.crew.call("sleep", doing="putting the engines to sleep")
            self.awake = False

    def generate(self, requests: list[Request]) -> Iterator[list[Sample]]:
        """Deals whole groups round the engines, so that a group's prompt is computed once, and merges the streams."""
        names = list(self.crew.actors)
        uids = list(dict.fromkeys(r.uid for r in requests))
        engine_of = {uid: names[i % len(names)] for i, uid in enumerate(uids)}
        streams = Streams(self.watch)
        for name in names:
            streams.open(name, self.crew.actors[name], [r for r in requests if engine_of[r.uid] == name])
        in_vain: Counter[str] = Counter()
        while streams.missing:
            name, samples = streams.next()
            if isinstance(samples, WorkerLost):
                in_vain[name] += name in streams.missing
                if in_vain[name] == TRIES:  # it may be what it is asked that ends it
                    raise samples
                self.crew.replace({name: samples})
                streams.open(name, self.crew.actors[name], list(streams.missing.get(name, {}).values()))
                streams.hear_all()
            elif isinstance(samples, Exception):
                raise samples
            elif samples:
                in_vain[name] = 0
                yield samples


class Streams:
    """The samples that engines still owe, as they come, and each of them once."""

    def __init__(self, watch: Watch):
        self.watch = watch
        self.missing: dict[str, dict[tuple[str, int], Request]] = {}  # by engine
        self.patience: dict[str, Patience] = {}
        self.opened: dict[str, int] = {}  # how many streams of an engine there were: only the last one counts
        self.arrived: queue.SimpleQueue[tuple[str, int, list[Sample] | Exception | None]] = queue.SimpleQueue()

    def open(self, name: str, actor: Any, requests: list[Request]) -> None:
        if not requests:
            return
        self.missing[name] = {(r.uid, r.index): r for r in requests}
        self.patience[name] = self.watch.patience()
        self.opened[name] = number = self.opened.get(name, 0) + 1
        stream = actor.generate.options(num_returns="streaming").remote(requests)
        threading.Thread(target=self.follow, args=(name, number, stream), daemon=True).start()

    def follow(self, name: str, number: int, stream: Any) -> None:
        try:
            for ref in stream:
                self.arrived.put((name, number, ray.get(ref)))
            self.arrived.put((name, number, None))
        except RayError as error:
            self.arrived.put((name, number, explain(error, name, "generating", self.watch.logs)))
        except Exception as error:
            self.arrived.put((name, number, error))

    def next(self) -> tuple[str, list[Sample] | Exception]:
        """New samples of an engine, or what became of it. Waits at most until one has stalled, whatever the others say."""
        while True:
            try:
                name, number, item = self.arrived.get(timeout=TICK_S)
            except queue.Empty:
                name, number, item = "", 0, None
            if name and number == self.opened[name]:
                self.patience[name].heard()
            if late := self.late():
                if name:  # what has come is not lost
                    self.arrived.put((name, number, item))
                return late
            if not name or number != self.opened[name]:
                continue
            return name, item if isinstance(item, Exception) else self.took(name, item)

    def late(self) -> tuple[str, Exception] | None:
        """An engine that owes samples and has said nothing for too long. Raises `Abandoned` if the run is to end."""
        for name, owed in self.missing.items():
            if waited := self.patience[name].over():
                self.opened[name] += 1  # what it may still say is not waited for
                return name, self.watch.stalled(
                    [name], "generating", waited, list(dict.fromkeys(uid for uid, _ in owed))
                )
        return None

    def hear_all(self) -> None:
        """Nobody was listened to for a while."""
        for patience in self.patience.values():
            patience.heard()

    def took(self, name: str, samples: list[Sample] | None) -> list[Sample] | Exception:
        """Those of the samples that were missing; the end of a stream (None) with some still missing is a failure."""
        if samples is None:
            count = len(self.missing.get(name, ()))
            return (
                WorkerFailed(f"generating: {name} ended {count} samples short. Its log: {self.watch.logs / name}.log")
                if count
                else []
            )
        owed = self.missing.get(name, {})
        new = [s for s in samples if owed.pop((s.uid, s.index), None)]
        if not owed:
            self.missing.pop(name, None)
        return new
