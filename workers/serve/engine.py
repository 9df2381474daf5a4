"""An engine of vLLM that serves a checkpoint of a run."""

from collections.abc import AsyncIterator
from typing import Any

from rlsys.config.schema import Config
from workers.rollout.architecture import keeps_state
from workers.rollout.engine_settings import STATE_ARGUMENTS, engine_arguments, engine_environment
from workers.rollout.refusal import refusing_model

# What engines have for training: weights that arrive, outputs in blocks, whole groups, log-probs of sampled tokens alone.
FOR_TRAINING = {
    *("weight_transfer_config", "worker_extension_cls", "enable_sleep_mode", "scheduler_cls", "kv_transfer_config"),
    *("kernel_config", "logprobs_mode", "skip_tokenizer_init"),
}
LONGEST = -1  # as many tokens as the model's window, or less if the cache has no room for them


def serving_environment(config: Config) -> dict[str, str]:
    """Set before vLLM is imported."""
    return engine_environment(config) | {"VLLM_LOGGING_LEVEL": "ERROR"}


def serving_arguments(config: Config, model: str) -> dict[str, Any]:
    """Returns arguments of vLLM's `EngineArgs`: the run's, but vLLM's defaults where training needs something else."""
    arguments = engine_arguments(config, model, "", LONGEST)
    kept = {name: value for name, value in arguments.items() if name not in FOR_TRAINING}
    return kept | {
        "reasoning_parser": config.episode.reasoning_parser
    }  # a JSON schema holds for what follows reasoning


class ServingEngine:
    """A `Model`. Completions end at the run's stop tokens, too."""

    def __init__(self, config: Config, model: str):
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        trust, arguments = config.model.trust_remote_code, serving_arguments(config, model)
        if config.cluster.device == "cpu" and keeps_state(model, trust):
            arguments |= STATE_ARGUMENTS
        with refusing_model(model):
            self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        self.stop_token_ids = config.rollout.stop_token_ids

    def generate(self, tokens: list[int], params: Any, request_id: str, **reasoning: Any) -> AsyncIterator[Any]:
        from vllm.inputs import tokens_input

        params.update_from_generation_config({"eos_token_id": self.stop_token_ids})
        return self.engine.generate(tokens_input(tokens), params, request_id, **reasoning)

    def requests(self) -> int | None:
        """Returns how many are not finished; None: the engine has died."""
        return None if self.engine.errored else int(self.engine.output_processor.get_num_unfinished_requests())

    def close(self) -> None:
        self.engine.shutdown()
