"""A rollout engine as a Ray actor."""

import asyncio
import contextlib
import itertools
import pickle
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlsys.config.schema import Config
from rlsys.errors import WrongWeights
from rlsys.models.end_ids import read_end_ids
from rlsys.runs.timeline import recorded, request_facts
from rlsys.types import Request, Sample, join_partial, stop_at
from workers.fleet.process_registry import register_process
from workers.fleet.ray_cluster import AnswerLost
from workers.rollout.architecture import keeps_state
from workers.rollout.async_engine import AsyncEngine
from workers.rollout.engine import Engine
from workers.rollout.engine_settings import STATE_ARGUMENTS, engine_arguments, runs_in_process
from workers.rollout.episode_plays import EpisodePlays
from workers.rollout.in_process_engine import InProcessEngine
from workers.rollout.read_write_lock import ReadWriteLock
from workers.rollout.refusal import refusing_model
from workers.rollout.stopping import stop_length
from workers.rollout.vllm_requests import Stops, request_id
from workers.start.worker_setup import setup_worker_process
from workers.sync import RECEIVERS, Message
from workers.sync.transport import PartRefs
from workers.sync.verify import combine_devices, describe_differences, list_names
from workers.turns.pool import Life

GRACE_S = 10.0  # after a rank has failed, the driver has this long to see it and to end this engine with the run


class RolloutWorker:
    """One engine. It samples with one version of the weights: `load_weights` waits until every `generate` has ended.

    With `pipeline.in_flight` it loads them between two tokens instead, and unfinished samples go on. It samples with
    new weights at once, but holds finished samples back until `verify_weights` has compared the weights with the
    policy's.
    """

    def __init__(self, config: Config, index: int, logs: str):
        setup_worker_process(f"rollout-{index}", logs)
        self.config, self.index, self.version, self.logs = config, index, 0, Path(logs)
        self.lock = ReadWriteLock()  # generation is shared, changes of the engine are exclusive
        self.weights_lock = asyncio.Lock()  # held while weights are changed or read
        self.loaded_parts: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self.verified = asyncio.Event()  # once it is set, samples leave if there is no error
        self.weights_error = ""
        self.verified.set()
        self.episodes = EpisodePlays(f"rollout-{index}", self.logs, config.watchdog.stall_s, self.sample)
        import torch
        import vllm  # noqa: F401  the slow import, while the driver does other things

        if config.cluster.device == "cpu":
            torch.set_num_threads(config.rollout.threads)

    @recorded()
    async def start(self, model: str, transport: str, longest_sequence: int) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=self.config.model.trust_remote_code)
        r = self.config.rollout
        self.stops = Stops(read_end_ids(model, self.tokenizer, self.config), r.stop, r.min_new_tokens)
        self.receiver = RECEIVERS[transport]()
        settings = engine_arguments(self.config, model, self.receiver.backend, longest_sequence)
        in_process = runs_in_process(self.config)
        exact = self.config.rollout.exact
        with refusing_model(model):
            if self.config.cluster.device == "cpu" and keeps_state(model, self.config.model.trust_remote_code):
                settings |= STATE_ARGUMENTS
            self.engine: Engine = InProcessEngine(settings, exact) if in_process else AsyncEngine(settings)
            if in_process:  # the others are tried by vLLM
                await self.sample_two_tokens()
        if not in_process:
            register_process(f"rollout-{self.index}", self.logs)  # again, with the shared memory of vLLM's processes
        await self.engine.set_weight_version(self.version)
        if self.config.cluster.device == "cpu":
            await self.log_determinism_limits(settings["max_model_len"])

    async def sample_two_tokens(self) -> None:
        """Raises what some models raise that vLLM builds: at their first tokens."""
        request = Request("first tokens", 0, [0], seed=0, temperature=1.0, max_new_tokens=2, ignore_end=True)
        async for _ in self.engine.generate([request], self.stops):
            pass

    async def log_determinism_limits(self, longest: int) -> None:
        """Logs where a retried sample, after an engine was lost, may differ from the first in its last bits."""
        may_differ = (
            "a sample that is drawn again, after an engine was lost, "
            "may differ from the first in the last bit of its log-probs."
        )
        [names, *_] = await self.engine.call_workers("rlsys_batch_dependent_matrices")
        if names:
            print(
                f"On this machine products with {list_names(names)} depend on what else is in the batch: {may_differ}"
            )
        if self.config.rollout.exact:
            return
        [tokens, *_] = await self.engine.call_workers("rlsys_deterministic_up_to", longest=longest)
        if tokens < longest:
            print(
                f"On this machine attention over more than {tokens} tokens depends on how many of them were computed "
                f"before: {may_differ} rollout.exact=true uses an attention that does not."
            )

    async def generate(self, requests: bytes) -> AsyncIterator[bytes]:
        """Takes a pickled list of requests, and yields pickled lists of samples: Ray would pickle each by itself.

        The driver receives a stream of object references.
        """
        async with contextlib.aclosing(self.sample(pickle.loads(requests))) as stream:
            async for samples in stream:
                yield pickle.dumps(samples, pickle.HIGHEST_PROTOCOL)

    @recorded(request_facts, name="generate")
    async def sample(self, requests: list[Request]) -> AsyncGenerator[list[Sample], None]:
        """Yields samples as they finish."""
        by_id = {request_id(r): r for r in requests}
        async with self.lock.shared():
            async for outputs in self.engine.generate(requests, self.stops):
                await self.verified.wait()
                self.raise_if_wrong_weights()
                yield [self.to_sample(by_id[output.request_id], output.outputs[0]) for output in outputs]

    async def use_episode_workers(self, lives: dict[str, Life]) -> None:
        self.episodes.use(lives)

    async def play(self, requests: bytes) -> AsyncIterator[bytes]:
        """Plays the episodes of a pickled list of requests, and yields a pickled `Progress` now and then."""
        async with self.lock.shared(), contextlib.aclosing(self.episodes.play(pickle.loads(requests))) as stream:
            async for progress in stream:
                yield pickle.dumps(progress, pickle.HIGHEST_PROTOCOL)

    async def stop_early(self) -> None:
        """Ends every running `generate` and `play`; unfinished samples are yielded as they are."""
        self.episodes.stop_early()
        await self.engine.abort_all()

    def to_sample(self, request: Request, completion: Any) -> Sample:
        aborted = completion.finish_reason == "abort"
        spans = getattr(completion, "weight_versions", None) or []
        logprobs = np.array(completion.logprobs.logprobs, dtype=np.float32)
        tokens = np.array(completion.token_ids, dtype=np.int32)
        if aborted:  # what has not arrived (`output_blocks.py`) is sampled again
            tokens = tokens[: len(logprobs)]
        assert len(tokens) == len(logprobs), "vLLM returns a log-prob for each token"
        new = Sample(
            uid=request.uid,
            index=request.index,
            text="",
            tokens=tokens,
            logprobs=logprobs,
            finish="cut" if aborted else completion.finish_reason,
            version=int(spans[0].version) if spans else self.version,
            changes=tuple((span.start, int(span.version)) for span in spans[1:] if span.start < len(tokens)),
            turn=request.turn,
        )
        sample = self.continue_partial(request, new) if request.partial else new
        return replace(sample, text=self.tokenizer.decode(sample.tokens.tolist(), skip_special_tokens=True))

    def continue_partial(self, request: Request, rest: Sample) -> Sample:
        """Joins a completion that was begun before with its rest. vLLM looks for stop strings in the rest alone."""
        assert request.partial
        sample = join_partial(request.partial, rest)
        length = stop_length(self.tokenizer, request, sample.tokens.tolist(), self.stops)
        return stop_at(sample, length) if length else sample

    async def connect(self, info: Message) -> None:
        """Prepares the engine to receive the policy's weights."""
        self.loaded_parts.clear()
        tensor_parallel, in_process = self.config.rollout.tensor_parallel, runs_in_process(self.config)
        init_info = self.receiver.init_info(info, self.index, tensor_parallel, in_process)
        await self.engine.call_workers("init_weight_transfer_engine", init_info=init_info)
        if self.config.sync.verify:
            await self.map_parameters(info)

    async def map_parameters(self, info: Message) -> None:
        """Has the engine find the policy's tensors in its own. Names those that it stores in another form."""
        policy = {key: info[key] for key in ("manifest", "shards", "by_position")}
        [unmapped, *_] = await self.engine.call_workers("rlsys_map_parameters", **policy)
        if unmapped:
            print(
                f"sync.verify: this architecture stores {list_names(unmapped)} in a form of its own. "
                "Their bits are compared together, in any order: two tensors that changed places would not be noticed."
            )

    @recorded(lambda _, parts, version: {"version": version}, name="take")
    async def load_weights(self, parts: list[PartRefs], version: int) -> None:
        """Replaces the weights with those the ranks send. After a failure no sample leaves this engine."""
        self.raise_if_wrong_weights()
        in_flight = self.config.pipeline.in_flight
        async with self.engine.paused() if in_flight else self.lock.exclusive(), self.weights_lock:
            self.verified.clear()
            await self.engine.wake("weights")
            await self.engine.call_workers("start_weight_update")
            await self.load_parts(parts)
            await self.engine.call_workers("finish_weight_update")
            if not in_flight:  # else `fresh_prefixes.py` keeps prompts of different weights apart
                await self.engine.reset_prefix_cache()
            await self.engine.set_weight_version(version)
            self.version = version
            if not self.config.sync.verify:
                self.verified.set()

    async def load_parts(self, parts: list[PartRefs]) -> None:
        numbers = itertools.count()
        try:
            async for update in self.receiver.update_infos(parts):
                await self.engine.call_workers("update_weights", update_info=update)
                self.loaded_parts[next(numbers)].set()
        except AnswerLost:
            for loaded in self.loaded_parts.values():
                loaded.set()  # ranks that wait for this engine go on, and report what happened
            # The driver should name the rank as the root cause, not the engines that waited for it.
            await asyncio.sleep(GRACE_S)
            raise

    async def wait_until_loaded(self, part: int) -> None:
        """Called once for each part of a sync whose memory is used again for the next part."""
        await self.loaded_parts[part].wait()
        del self.loaded_parts[part]

    @recorded(lambda _, version, expected: {"version": version})
    async def verify_weights(self, version: int, expected: dict[str, str]) -> str:
        """Compares the engine's weights with the policy's fingerprints.

        Returns the difference; then no sample leaves this engine.
        """
        async with self.weights_lock:
            try:
                fingerprints = combine_devices(await self.engine.inspect("rlsys_fingerprints"))
                stale = "" if self.version == version else f"it has version {self.version}"
                self.weights_error = stale or describe_differences(expected, fingerprints)
            except Exception as error:
                self.weights_error = f"they cannot be read, {type(error).__name__}: {error}"
            self.verified.set()
        return self.weights_error

    def raise_if_wrong_weights(self) -> None:
        if self.weights_error:
            raise WrongWeights(f"has weights that are not version {self.version} of the policy's: {self.weights_error}")

    @recorded()
    async def sleep(self) -> None:
        async with self.lock.exclusive():
            await self.engine.sleep()

    @recorded()
    async def wake(self) -> None:
        await self.engine.wake("kv_cache")
