"""An engine with frozen weights, as a Ray actor. It answers the questions of reward functions itself."""

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlsys.config.schema import Config
from rlsys.models.config_json import limits_from_config
from rlsys.models.end_ids import model_end_ids
from rlsys.models.lookup import known_model_shape
from rlsys.rewards.asking import engine_name, serve
from rlsys.runs.timeline import recorded
from rlsys.types import Request
from workers.fleet.process_registry import register_process
from workers.fleet.ray_cluster import node_address
from workers.rollout.architecture import keeps_state
from workers.rollout.async_engine import AsyncEngine
from workers.rollout.engine import Engine
from workers.rollout.engine_settings import BLOCK_SIZE, STATE_ARGUMENTS, engine_arguments, runs_in_process
from workers.rollout.in_process_engine import InProcessEngine
from workers.rollout.refusal import refusing_model
from workers.rollout.vllm_requests import Stops
from workers.start.worker_setup import setup_worker_process

HEARTBEAT_S = 2.0
LONGEST = 8192  # tokens of a question and its answer, if the model's window and, on CPU, the cache have room for them


class FrozenEngine:
    """One engine of a model of `models`. It computes with the settings of `rollout`, on one GPU or on CPU."""

    def __init__(self, config: Config, model: str, index: int, logs: str):
        self.name, self.model, self.logs = engine_name(model, index), model, Path(logs)
        setup_worker_process(self.name, logs)
        self.config, self.numbers = frozen_config(config), itertools.count()
        import torch
        import vllm  # noqa: F401  the slow import, while the driver does other things

        if config.cluster.device == "cpu":
            torch.set_num_threads(config.rollout.threads)

    @recorded()
    async def start(self, paths: dict[str, str]) -> None:
        """Loads the model, and answers from then on. `paths`: the directory or hub name of each model."""
        from transformers import AutoTokenizer

        path, trust = paths[self.model], self.config.model.trust_remote_code
        self.tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust)
        self.stops = Stops(sorted(model_end_ids(path, self.tokenizer, trust)))
        self.longest = longest_sequence(self.config, path)
        settings = frozen_arguments(self.config, path, self.longest)
        in_process = runs_in_process(self.config)
        with refusing_model(path):
            if in_process and keeps_state(path, trust):
                settings |= STATE_ARGUMENTS
            exact = self.config.rollout.exact
            self.engine: Engine = InProcessEngine(settings, exact) if in_process else AsyncEngine(settings)
        if not in_process:
            register_process(self.name, self.logs)  # again, with the shared memory of vLLM's processes
        self.server = await serve(node_address(), self.logs / f"{self.name}.address", self.answer)

    async def heartbeat(self) -> None:
        """Returns after a moment. An engine that does not return is lost."""
        await asyncio.sleep(HEARTBEAT_S)

    @recorded()
    async def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answers one question; vLLM computes those of a moment together."""
        tokens = self.read_prompt(question["prompt"])
        room = self.longest - len(tokens)
        if not tokens or room < 1:
            return {"error": f"the prompt has {len(tokens)} tokens; 1 to {self.longest - 1} have room in an engine."}
        request = Request(
            uid=str(next(self.numbers)),
            index=0,
            tokens=tokens,
            seed=question["seed"],
            temperature=question["temperature"],
            max_new_tokens=min(question["max_tokens"], room),
        )
        async for [output] in self.engine.generate([request], self.stops):
            completion = output.outputs[0]
        return {"text": self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)}

    def read_prompt(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt).input_ids)
        chat = self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(chat, add_special_tokens=False).input_ids)


def frozen_config(c: Config) -> Config:
    """Returns the run's configuration, with what is the policy's engines' alone left out."""
    rollout = replace(c.rollout, tensor_parallel=1, stop=[], stop_token_ids=[], min_new_tokens=0)
    return replace(
        c,
        rollout=rollout,
        cluster=replace(c.cluster, placement="separate"),
        pipeline=replace(c.pipeline, in_flight=False),
    )


def frozen_arguments(c: Config, path: str, longest: int) -> dict[str, Any]:
    """Returns keyword arguments of vLLM's `EngineArgs`. The engine never gets other weights."""
    arguments = engine_arguments(c, path, "", longest)
    return {n: v for n, v in arguments.items() if n not in ("weight_transfer_config", "worker_extension_cls")}


def longest_sequence(c: Config, path: str) -> int:
    from transformers import AutoConfig

    settings = AutoConfig.from_pretrained(path, trust_remote_code=c.model.trust_remote_code).to_dict()
    longest = min(limits_from_config(settings).window or LONGEST, LONGEST)
    shape = known_model_shape(path)
    if c.cluster.device == "gpu" or shape is None:
        return longest
    tokens = (c.rollout.kv_cache_mb << 20) // shape.kv_bytes_per_token(4 if c.rollout.dtype == "float32" else 2)
    return int(min(longest, tokens // BLOCK_SIZE * BLOCK_SIZE))
