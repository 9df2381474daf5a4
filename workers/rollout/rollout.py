"""Rollout: vLLM engines as Ray actors, and the driver's one handle to them."""

import asyncio
import queue
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from rlsys.config.schema import Config
from rlsys.runs.errors import WorkerFailed, WorkerLost, WrongWeights
from rlsys.runs.timeline import recorded, request_facts
from rlsys.types import Request, Sample, join_partial
from workers.rollout.engines import AsyncEngine, Engine, InProcessEngine, engine_arguments, request_id, runs_in_process
from workers.rollout.request_scheduler import Dispatch
from workers.supervision import process_registry
from workers.supervision.replaceable_workers import MAX_ATTEMPTS, ReplaceableWorkers
from workers.supervision.watchdog import POLL_S, StallTimer, Watchdog, explain_failure
from workers.supervision.worker_setup import setup_worker_process
from workers.sync import RECEIVERS, SENDERS, Message
from workers.sync.transport import PartRefs
from workers.sync.verify import combine_devices, describe_differences, list_names


class RolloutWorker:
    """One engine. Generates on one version of the weights at a time: `take` waits for all of `generate` to end.

    With `pipeline.in_flight` it takes them between two tokens instead, and what is half-written goes on. It begins to sample as
    soon as it has the weights, and holds back what is finished until `prove` has found them to be the policy's.
    """

    def __init__(self, config: Config, index: int, logs: str):
        setup_worker_process(f"rollout-{index}", logs)
        self.config, self.index, self.version, self.logs = config, index, 0, Path(logs)
        self.turns = ReadWriteLock()
        self.weights = asyncio.Lock()  # of who changes them, or looks at them
        self.proved, self.wrong = asyncio.Event(), ""  # samples wait for it; and what was found
        self.proved.set()
        import torch
        import vllm  # noqa: F401  the slow import, while the driver does other things

        if config.cluster.device == "cpu":
            torch.set_num_threads(config.rollout.threads)

    @recorded()
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
        settings = engine_arguments(self.config, model, self.receiver.backend, longest_prompt)
        inside = runs_in_process(self.config)
        self.engine: Engine = InProcessEngine(settings, self.config.rollout.exact) if inside else AsyncEngine(settings)
        if not inside:
            process_registry.register_process(f"rollout-{self.index}", self.logs)
        await self.engine.set_weight_version(self.version)
        if self.config.cluster.device == "cpu":
            await self.tell_what_matters(settings["max_model_len"])

    async def tell_what_matters(self, longest: int) -> None:
        """On a CPU a sample that is drawn again, after an engine was lost, is to be the same bit for bit."""
        may_differ = "a sample that is drawn again, after an engine was lost, may differ from the first in the last bit of its log-probs."
        if names := (await self.engine.call_workers("rlsys_rows_matter"))[0]:
            print(
                f"On this machine products with {list_names(names)} depend on what else is in the batch: {may_differ}"
            )
        if self.config.rollout.exact:
            return
        alike = (await self.engine.call_workers("rlsys_alike_up_to", longest=longest))[0]
        if alike < longest:
            print(
                f"On this machine attention over more than {alike} tokens depends on how many of them were there already: {may_differ} "
                "rollout.exact=true has an attention of its own, which does not."
            )

    @recorded(request_facts)
    async def generate(self, requests: list[Request]) -> AsyncIterator[list[Sample]]:
        """Samples as they finish: a stream of object references on the driver's side."""
        by_id = {request_id(r): r for r in requests}
        async with self.turns.shared():
            # Samples that are asked for from now on make no use of prompts that older weights computed.
            salt = str(self.version) if self.config.pipeline.in_flight else ""
            async for outs in self.engine.generate(requests, self.stop_ids, salt):
                await self.proved.wait()
                self.refuse_if_wrong()
                yield [self.sample(by_id[out.request_id], out.outputs[0]) for out in outs]

    async def stop_early(self) -> None:
        """Ends what is being generated; samples come half-written."""
        await self.engine.stop_early()

    def sample(self, request: Request, out: Any) -> Sample:
        tokens, spans = list(out.token_ids), out.weight_versions
        new = Sample(
            uid=request.uid,
            index=request.index,
            text="",
            tokens=np.array(tokens, dtype=np.int32),
            logprobs=np.array([d[t].logprob for t, d in zip(tokens, out.logprobs, strict=True)], dtype=np.float32),
            finish="cut" if out.finish_reason == "abort" else out.finish_reason,
            version=int(spans[0].version) if spans else self.version,
            changes=tuple((span.start, int(span.version)) for span in spans[1:]),
        )
        whole = join_partial(request.partial, new) if request.partial else new
        return replace(whole, text=self.tokenizer.decode(whole.tokens.tolist(), skip_special_tokens=True))

    async def connect(self, invitation: Message) -> None:
        wide, inside = self.config.rollout.tensor_parallel, runs_in_process(self.config)
        info = self.receiver.init_info(invitation, self.index, wide, inside)
        await self.engine.call_workers("init_weight_transfer_engine", init_info=info)
        if self.config.sync.verify:
            policy = {key: invitation[key] for key in ("manifest", "shards", "by_position")}
            lost = (await self.engine.call_workers("rlsys_chart", **policy))[0]
            if lost:
                print(
                    f"sync.verify: this architecture stores {list_names(lost)} in a way of its own. Of these all bits together are "
                    "compared, in any order; tensors among them that changed places would not be seen."
                )

    @recorded(lambda _, parts, version: {"version": version})
    async def take(self, parts: list[PartRefs], version: int) -> None:
        """Replaces the weights, by what the ranks say of each part. If it fails, no sample leaves any more."""
        self.refuse_if_wrong()
        in_flight = self.config.pipeline.in_flight
        async with self.engine.paused() if in_flight else self.turns.exclusive(), self.weights:
            self.proved.clear()
            await self.engine.wake("weights")
            await self.engine.call_workers("start_weight_update")
            async for update in self.receiver.update_infos(parts):
                await self.engine.call_workers("update_weights", update_info=update)
            await self.engine.call_workers("finish_weight_update")
            if not in_flight:  # else the salt keeps prompts of different weights apart
                await self.engine.reset_prefix_cache()
            await self.engine.set_weight_version(version)
            self.version = version
            if not self.config.sync.verify:
                self.proved.set()

    @recorded(lambda _, version, expected: {"version": version})
    async def prove(self, version: int, expected: dict[str, str]) -> str:
        """Compares what the engine computes with to the policy's fingerprints. Says what is wrong; then no sample leaves any more."""
        async with self.weights:
            try:
                found = combine_devices(await self.engine.inspect("rlsys_prove"))
                late = "" if self.version == version else f"it has version {self.version}"
                self.wrong = late or describe_differences(expected, found)
            except Exception as error:
                self.wrong = f"they cannot be looked at, {type(error).__name__}: {error}"
            self.proved.set()
        return self.wrong

    def refuse_if_wrong(self) -> None:
        if self.wrong:
            raise WrongWeights(f"has weights that are not version {self.version} of the policy's: {self.wrong}")

    @recorded()
    async def sleep(self) -> None:
        async with self.turns.exclusive():
            await self.engine.sleep()

    @recorded()
    async def wake(self) -> None:
        await self.engine.wake("kv_cache")


class ReadWriteLock:
    """Those who generate do so together; who changes the engine does it alone."""

    def __init__(self) -> None:
        self.changed = asyncio.Condition()
        self.generating, self.taken = 0, False

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        async with self.changed:
            await self.changed.wait_for(lambda: not self.taken)
            self.generating += 1
        try:
            yield
        finally:
            async with self.changed:
                self.generating -= 1
                self.changed.notify_all()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        async with self.changed:
            await self.changed.wait_for(lambda: not self.taken and not self.generating)
            self.taken = True
        try:
            yield
        finally:
            async with self.changed:
                self.taken = False
                self.changed.notify_all()


@dataclass(frozen=True)
class WeightUpdate:
    """Weights on their way: what the ranks say of each part, what the weights are called, and the policy's fingerprint of each
    tensor, when all is sent."""

    parts: list[PartRefs]
    version: int
    fingerprints: dict[str, str]


class RolloutGroup:
    """All engines as one, for the driver. Implements `rlsys.interfaces.Rollout`.

    An engine that is lost, or has wrong weights, is replaced, given the present ones, and asked again for the samples that are
    missing.
    """

    def __init__(self, config: Config, spawn: Callable[[str], Any], watchdog: Watchdog):
        self.config, self.watchdog = config, watchdog
        self.workers = ReplaceableWorkers(
            [f"rollout-{i}" for i in range(config.rollout.engines)],
            spawn,
            watchdog,
            before_replace=self.require_replayable_weights,
            after_replace=self.resend_weights,
        )
        self.sleeps = config.cluster.placement == "colocated"
        self.awake = True
        self.weight_update: WeightUpdate | None = None
        self.work: tuple[Dispatch, EngineStreams] | None = None  # what is being generated, or was last

    def samples_by_engine(self) -> dict[str, int]:
        """How many samples each engine is at; under "" those that wait for one. May be asked at any time, by any thread."""
        waiting, missing = (self.work[0].waiting_count, self.work[1].missing.copy()) if self.work else (0, {})
        return {"": waiting} | {name: len(missing.get(name, ())) for name in self.workers.actors.copy()}

    def start_calls(self, method: str, *arguments: Any) -> dict[str, Any]:
        """The same call on every engine, not waited for."""
        return {name: getattr(actor, method).remote(*arguments) for name, actor in self.workers.actors.items()}

    def start(self, model: str, transport: str, longest_prompt: int) -> None:
        self.replayable = SENDERS[transport].replayable
        arguments, limit = (model, transport, longest_prompt), self.config.cluster.start_timeout_s
        self.workers.call("start", *arguments, doing="starting the engines", limit_s=limit, replay=True)

    def connect(self, invitation: Message) -> None:
        limit = self.config.cluster.start_timeout_s
        self.workers.call("connect", invitation, doing="connecting the engines", limit_s=limit, replay=True)

    def load_weights(self, delivery: WeightUpdate, sending: dict[str, Any] | None = None) -> dict[str, Any]:
        """Has every engine take the weights. An engine that comes later takes them too. `sending` are the calls of who still
        sends them; returns their answers."""
        self.weight_update = delivery
        tries = MAX_ATTEMPTS if self.replayable else 1  # who came in another's place could not be given them
        found = self.workers.call(
            "take",
            delivery.parts,
            delivery.version,
            doing="taking weights",
            concurrent_calls=sending,
            max_attempts=tries,
        )
        return {name: found[name] for name in sending or {}}

    def verify_weights(self) -> None:
        """Has every engine compare what it took with what the policy has. One that is wrong says so when it is asked for samples."""
        if not (delivery := self.weight_update) or not delivery.fingerprints:
            return
        asked = delivery.version, delivery.fingerprints
        if self.config.cluster.device == "gpu":  # with memory that is taken while it generates
            self.workers.call("prove", *asked, doing="proving weights")
        else:
            with self.replacements_paused():  # an engine that is coming has no weights yet, and proves them by itself
                self.start_calls("prove", *asked)

    def require_replayable_weights(self, lost: dict[str, WorkerLost]) -> None:
        """Raises where other engines would start in vain."""
        if self.weight_update and not self.replayable:
            first, _, more = str(next(iter(lost.values()))).partition("\n")
            raise WorkerLost(f"{first}; another could not be given the present weights by this sync.transport\n{more}")

    def resend_weights(self, names: list[str]) -> None:
        """Gives engines that have just come the weights that the others have."""
        delivery = self.weight_update
        if delivery is None:
            return
        version = delivery.version
        try:
            self.workers.call("take", delivery.parts, version, doing="taking weights again", only=names)
        except WorkerFailed as error:  # whose memory it is may be gone; the ranks may be busy, so they are not asked
            raise WorkerLost(
                f"weights of version {version} cannot be given to {', '.join(names)} again: {error}"
            ) from error
        if delivery.fingerprints:
            found = self.workers.call(
                "prove", version, delivery.fingerprints, doing="proving weights again", only=names
            )
            for name, what in found.items():
                if what:
                    raise WorkerLost(f"weights of version {version} kept for {name} are no longer whole: {what}")

    def wake(self) -> None:
        if self.sleeps and not self.awake:
            self.workers.call("wake", doing="waking the engines")
        self.awake = True

    def sleep(self) -> None:
        if self.sleeps and self.awake:
            self.workers.call("sleep", doing="putting the engines to sleep")
            self.awake = False

    def generate(self, requests: list[Request]) -> Iterator[list[Sample]]:
        """Engines are given requests as they have room for them; their streams are merged."""
        work, streams = Dispatch(requests, self.config.rollout.max_sequences), EngineStreams(self.watchdog)
        self.work = work, streams
        in_vain: Counter[tuple[str, int]] = Counter()
        self.stop_requested = False
        self.assign_requests(work, streams)
        while streams.owing:
            name, samples = streams.next()
            if isinstance(samples, WrongWeights):
                self.watchdog.event("weights did not arrive", worker=name, cause=str(samples))
            if isinstance(samples, WorkerLost):
                actor, owed = streams.lost(name)
                in_vain.update(owed.keys())
                if any(in_vain[key] == MAX_ATTEMPTS for key in owed):  # it may be what they are asked that ends them
                    raise samples
                if not self.stop_requested:
                    work.requeue(list(owed.values()))
                self.workers.replace({name: samples}, {name: actor})
                streams.hear_all()
            elif isinstance(samples, Exception):
                raise samples
            elif samples:
                yield samples
                if self.stop_requested and not streams.ending:
                    work.clear()
                    streams.stop_early()
            self.assign_requests(work, streams)

    def stop_early(self) -> None:
        """Said between two lists of samples of `generate`."""
        self.stop_requested = True

    def replacements_paused(self) -> AbstractContextManager[object]:
        """While this holds no engine takes another's place; one that is about to is waited for."""
        return self.workers.lock

    def assign_requests(self, work: Dispatch, streams: "EngineStreams") -> None:
        """While ranks send, engines go on with what they have; the next samples ask again."""
        if not work.waiting_count or not self.workers.lock.acquire(blocking=not streams.owing):
            return
        try:
            holding = {
                name: len(owed)
                for name, actor in self.workers.actors.items()
                if not (owed := streams.missing.get(name, {})) or streams.actors[name] is actor
            }
            for name, share in work.assign(holding).items():
                streams.open(name, self.workers.actors[name], share)
        finally:
            self.workers.lock.release()


Key = tuple[str, int]  # uid and index of a sample
Arrival = tuple[str, Any, list[Key], list[Sample] | Exception | None]  # engine, its actor, what was asked, what it says


class EngineStreams:
    """The samples that engines still owe, as they come, and each of them once. An engine may be at several streams."""

    def __init__(self, watch: Watchdog):
        self.watch = watch
        self.actors: dict[str, Any] = {}  # by engine; what another one in its place says does not count
        self.missing: dict[str, dict[Key, Request]] = {}
        self.patience: dict[str, StallTimer] = {}
        self.ending = False
        self.arrived: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self.held: Arrival | None = None  # what came when another engine was late

    @property
    def owing(self) -> list[str]:
        return [name for name, owed in self.missing.items() if owed]

    def open(self, name: str, actor: Any, requests: list[Request]) -> None:
        if not self.missing.get(name):
            self.actors[name], self.missing[name], self.patience[name] = actor, {}, self.watch.start_timer()
        asked = {(r.uid, r.index): r for r in requests}
        self.missing[name] |= asked
        stream = actor.generate.options(num_returns="streaming").remote(requests)
        threading.Thread(target=self.follow, args=(name, actor, list(asked), stream), daemon=True).start()

    def follow(self, name: str, actor: Any, asked: list[Key], stream: Any) -> None:
        try:
            for ref in stream:
                self.arrived.put((name, actor, asked, ray.get(ref)))
            self.arrived.put((name, actor, asked, None))
        except RayError as error:
            self.arrived.put((name, actor, asked, explain_failure(error, name, "generating", self.watch.logs)))
        except Exception as error:
            self.arrived.put((name, actor, asked, error))

    def stop_early(self) -> None:
        """Has engines send what they are at as it is."""
        self.ending = True
        for name in self.owing:
            self.actors[name].stop_early.remote()

    def lost(self, name: str) -> tuple[Any, dict[Key, Request]]:
        """The engine is no more: which one it was, and what it still owed."""
        return self.actors.pop(name), self.missing.pop(name)

    def next(self) -> tuple[str, list[Sample] | Exception]:
        """New samples of an engine, or what became of it. Waits at most until one has stalled, whatever the others say."""
        while True:
            try:
                came, self.held = self.held or self.arrived.get(timeout=POLL_S), None
            except queue.Empty:
                came = None
                if self.ending:  # it may have overtaken what was asked just before
                    self.stop_early()
            heard = came is not None and self.actors.get(came[0]) is came[1]
            if came and heard:
                self.patience[came[0]].reset()
            if late := self.late():
                self.held = came  # it is not lost
                return late
            if came and heard:
                name, _, asked, item = came
                return name, item if isinstance(item, Exception) else self.took(name, asked, item)

    def late(self) -> tuple[str, Exception] | None:
        """An engine that owes samples and has said nothing for too long. Raises `Abandoned` if the run is to end."""
        for name in self.owing:
            if waited := self.patience[name].expired():
                uids = list(dict.fromkeys(uid for uid, _ in self.missing[name]))
                return name, self.watch.report_stall([name], "generating", waited, uids)
        return None

    def hear_all(self) -> None:
        """Nobody was listened to for a while."""
        for patience in self.patience.values():
            patience.reset()

    def took(self, name: str, asked: list[Key], samples: list[Sample] | None) -> list[Sample] | Exception:
        """Those of the samples that were missing; the end of a stream (None) with some of its own missing is a failure."""
        owed = self.missing[name]
        if samples is None:
            count = sum(key in owed for key in asked)
            log = self.watch.logs / f"{name}.log"
            return WorkerFailed(f"generating: {name} ended {count} samples short. Its log: {log}") if count else []
        return [s for s in samples if owed.pop((s.uid, s.index), None)]
