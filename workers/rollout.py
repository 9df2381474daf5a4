"""Rollout: vLLM engines as Ray actors, and the driver's one handle to them."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from rlsys.config import Config
from rlsys.types import Request, Sample
from workers.engines import AsyncEngine, Engine, InProcessEngine, arguments
from workers.process import WorkerFailed, explain, gather, settle
from workers.sync import RECEIVERS, Message


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
        kind = InProcessEngine if self.config.cluster.device == "cpu" else AsyncEngine
        self.engine: Engine = kind(arguments(self.config, model, self.receiver.backend, longest_prompt))

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

    async def take(self, messages: list[Message], version: int) -> int:
        """Replaces the weights and returns the fingerprint of what the engine now computes with."""
        async with self.busy:
            await self.engine.wake("weights")
            await self.engine.call("start_weight_update")
            await self.engine.call("update_weights", update_info=self.receiver.update_info(messages))
            await self.engine.call("finish_weight_update")
            await self.engine.forget_prefixes()
            self.version = version
            return sum(await self.engine.call("rlsys_fingerprint")) % (1 << 64) if self.config.sync.verify else 0

    async def sleep(self) -> None:
        async with self.busy:
            await self.engine.sleep()

    async def wake(self) -> None:
        await self.engine.wake("kv_cache")


class RolloutGroup:
    """All engines as one, for the driver. Implements `rlsys.interfaces.Rollout`."""

    def __init__(self, config: Config, actors: list[Any], logs: Path):
        self.config, self.actors, self.logs = config, actors, logs
        self.sleeps = config.cluster.placement == "colocated"
        self.awake = True

    def calls(self, method: str, *arguments: Any) -> dict[str, Any]:
        """The same call on every engine, not waited for."""
        return {f"rollout-{i}": getattr(a, method).remote(*arguments) for i, a in enumerate(self.actors)}

    def start(self, model: str, transport: str, longest_prompt: int) -> None:
        gather(
            self.calls("start", model, transport, longest_prompt),
            "starting the engines",
            self.config.cluster.start_timeout_s,
            self.logs,
        )

    def generating(self) -> None:
        if self.sleeps and not self.awake:
            gather(self.calls("wake"), "waking the engines", self.config.cluster.call_timeout_s, self.logs)
        self.awake = True

    def resting(self) -> None:
        if self.sleeps and self.awake:
            gather(self.calls("sleep"), "putting the engines to sleep", self.config.cluster.call_timeout_s, self.logs)
            self.awake = False

    def generate(self, requests: list[Request]) -> Iterator[list[Sample]]:
        """Deals whole groups round the engines, so that a group's prompt is computed once, and merges the streams."""
        uids = list(dict.fromkeys(r.uid for r in requests))
        engine_of = {uid: i % len(self.actors) for i, uid in enumerate(uids)}
        shares: list[list[Request]] = [[] for _ in self.actors]
        for r in requests:
            shares[engine_of[r.uid]].append(r)
        arrived: queue.SimpleQueue[tuple[str, list[Sample] | Exception | None]] = queue.SimpleQueue()

        def follow(name: str, stream: Any) -> None:
            try:
                for ref in stream:
                    arrived.put((name, ray.get(ref)))
                arrived.put((name, None))
            except RayError as error:
                arrived.put((name, explain(error, name, "generate", self.logs)))
            except Exception as error:
                arrived.put((name, error))

        generating = set()
        for i, (actor, share) in enumerate(zip(self.actors, shares, strict=True)):
            if share:
                stream = actor.generate.options(num_returns="streaming").remote(share)
                threading.Thread(target=follow, args=(f"rollout-{i}", stream), daemon=True).start()
                generating.add(f"rollout-{i}")
        while generating:
            try:
                name, item = arrived.get(timeout=self.config.cluster.call_timeout_s)
            except queue.Empty:
                late, limit = ", ".join(sorted(generating)), self.config.cluster.call_timeout_s
                raise WorkerFailed(
                    f"generate: no sample from {late} for {limit:g} s (cluster.call_timeout_s). Logs: {self.logs}"
                ) from None
            if item is None:
                generating.remove(name)
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
