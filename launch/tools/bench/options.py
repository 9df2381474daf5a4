"""What `rlsys bench` was asked for, and the run that it makes of a configuration."""

from dataclasses import dataclass, replace
from typing import Any

from launch import datasets
from launch.tools import synthetic
from rlsys.checks import check
from rlsys.config.schema import (
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    EvalConfig,
    OverlongConfig,
    RewardFunction,
)
from rlsys.runs.progress import Progress
from rlsys.types import Prompt

PROMPT, COMPLETION = 256, 64  # tokens, where the model's window allows it


@dataclass(frozen=True)
class BenchOptions:
    """`rlsys bench` as it was asked for."""

    steps: int
    warmup: int
    prompt_tokens: int | None
    completion_tokens: int | None
    ragged: tuple[float, int] | None  # mean and maximum of completions
    rewards: bool  # whether the configuration's own functions judge its own rows
    json: str | None
    trace: str | None


def make_bench_config(
    config: Config, wanted: BenchOptions, folder: str, window: int
) -> tuple[Config, int, synthetic.CompletionLengths]:
    """The configuration that is run, tokens of a prompt, and lengths of completions."""
    prompt, longest, mean = choose_lengths(wanted, window)
    r = replace(config.reward, max_failure_share=1.0)
    if not wanted.rewards:
        r = replace(r, functions={"coin": RewardFunction(function="launch.tools.synthetic:coin")})
    ahead = config.pipeline.max_lag + 1  # the last steps of a run have nothing more to generate: they are not run
    changed = replace(
        config,
        run=replace(config.run, dir=folder),
        trainer=replace(config.trainer, steps=wanted.warmup + wanted.steps + ahead),
        rollout=replace(config.rollout, max_prompt_tokens=prompt, max_new_tokens=longest),
        data=config.data if wanted.rewards else DataConfig(),
        reward=r,
        critic=replace(config.critic, alone_steps=0),  # a step is one in which all learn
        overlong=OverlongConfig(),  # every completion is cut where it is told to be
        eval=EvalConfig(every=0),
        checkpoint=CheckpointConfig(every=0),
    )
    if problems := check(changed):
        raise ConfigError(problems)
    return changed, prompt, synthetic.CompletionLengths(mean, longest, config.run.seed)


def choose_lengths(wanted: BenchOptions, window: int) -> tuple[int, int, float]:
    """Tokens of a prompt, of the longest completion, and of completions on average, within the model's window."""
    if wanted.ragged and wanted.completion_tokens:
        raise ConfigError("--ragged and --completion-tokens say the same thing; give one of them.")
    room = window or 1 << 30
    mean, longest = wanted.ragged or (wanted.completion_tokens, wanted.completion_tokens)
    longest = longest or min(COMPLETION, max(1, (room - (wanted.prompt_tokens or 0)) // 2))
    prompt = wanted.prompt_tokens or min(PROMPT, max(1, room - longest))
    if prompt + longest > room:
        raise ConfigError(
            f"prompts of {prompt} tokens and completions of {longest} do not fit into the model's window of {window}. "
            "Use a smaller --prompt-tokens, --completion-tokens or --ragged."
        )
    return prompt, longest, mean or longest


def make_prompts(
    config: Config, wanted: BenchOptions, length: int, symbols: int, cluster: Any, progress: Progress
) -> list[Prompt]:
    """As many as all steps take; with --rewards, behind each is a row of the configuration's own data."""
    found = synthetic.random_prompts(
        config.trainer.steps * config.trainer.prompts_per_step, length, symbols, config.run.seed
    )
    if not wanted.rewards:
        return found
    # Their own lengths do not matter: another prompt takes their place.
    unbound = replace(config, rollout=replace(config.rollout, max_prompt_tokens=0))
    rows = datasets.load(unbound, cluster.tokenizer, cluster.window, progress.note).train.take(0, len(found))
    return [replace(row, uid=made.uid, tokens=made.tokens) for row, made in zip(rows, found, strict=True)]


def load_model_settings(config: Config) -> Any:
    from transformers import AutoConfig

    from launch.cluster import find_model

    return AutoConfig.from_pretrained(
        find_model(config, lambda _: None), trust_remote_code=config.model.trust_remote_code
    )
