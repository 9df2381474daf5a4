"""The options of `rlsys bench`, and the run that they make of a configuration."""

from dataclasses import dataclass, replace
from typing import Any

from launch import datasets
from launch.tools import synthetic
from rlsys.checks import check
from rlsys.config.schema import CheckpointConfig, Config, DataConfig, EvalConfig, OverlongConfig, RewardFunction
from rlsys.errors import ConfigError
from rlsys.runs.progress import Progress
from rlsys.types import Prompt

PROMPT, COMPLETION = 256, 64  # tokens, if the model's window allows them


@dataclass(frozen=True)
class BenchOptions:
    """The options of `rlsys bench`."""

    steps: int
    warmup: int
    prompt_tokens: int | None
    completion_tokens: int | None
    ragged: tuple[float, int] | None  # mean and maximum length of completions
    rewards: bool  # use the configuration's own functions, on its own rows
    json: str | None
    trace: str | None


@dataclass(frozen=True)
class BenchSetup:
    """What is run: the changed configuration, and the lengths of prompts and completions."""

    config: Config
    prompt_tokens: int
    lengths: synthetic.CompletionLengths


def make_setup(config: Config, options: BenchOptions, folder: str, window: int) -> BenchSetup:
    """Keeps the method of the configuration, without evaluation and checkpoints."""
    prompt, longest, mean = choose_lengths(options, window)
    reward = replace(config.reward, max_failure_share=1.0)
    if not options.rewards:
        reward = replace(reward, functions={"random": RewardFunction(function="launch.tools.synthetic:random_reward")})
    ahead = config.pipeline.max_lag + 1  # the last steps of a run have nothing more to generate: they are not run
    changed = replace(
        config,
        run=replace(config.run, dir=folder),
        trainer=replace(config.trainer, steps=options.warmup + options.steps + ahead),
        rollout=replace(config.rollout, max_prompt_tokens=prompt, max_new_tokens=longest),
        data=config.data if options.rewards else DataConfig(),
        reward=reward,
        critic=replace(config.critic, alone_steps=0),  # policy and critic learn in every measured step
        overlong=OverlongConfig(),  # every completion ends at its given length
        eval=EvalConfig(every=0),
        checkpoint=CheckpointConfig(every=0),
    )
    if problems := check(changed):
        raise ConfigError(problems)
    return BenchSetup(changed, prompt, synthetic.CompletionLengths(mean, longest, config.run.seed))


def choose_lengths(options: BenchOptions, window: int) -> tuple[int, int, float]:
    """Tokens of a prompt, of the longest completion, and of a completion on average, within the model's window."""
    if options.ragged and options.completion_tokens:
        raise ConfigError("--ragged and --completion-tokens say the same thing; give one of them.")
    room = window or 1 << 30
    mean, longest = options.ragged or (options.completion_tokens, options.completion_tokens)
    longest = longest or min(COMPLETION, max(1, (room - (options.prompt_tokens or 0)) // 2))
    prompt = options.prompt_tokens or min(PROMPT, max(1, room - longest))
    if prompt + longest > room:
        raise ConfigError(
            f"prompts of {prompt} tokens and completions of {longest} do not fit into the model's window of {window}. "
            "Use a smaller --prompt-tokens, --completion-tokens or --ragged."
        )
    return prompt, longest, mean or longest


def make_prompts(
    setup: BenchSetup, options: BenchOptions, vocabulary: int, cluster: Any, progress: Progress
) -> list[Prompt]:
    """Random prompts for all steps. With --rewards, each has a row of the configuration's own data."""
    config = setup.config
    count = config.trainer.steps * config.trainer.prompts_per_step
    prompts = synthetic.random_prompts(count, setup.prompt_tokens, vocabulary, config.run.seed)
    if not options.rewards:
        return prompts
    # The lengths of the rows do not matter: a random prompt replaces each of them.
    unlimited = replace(config, rollout=replace(config.rollout, max_prompt_tokens=0))
    rows = datasets.load(unlimited, cluster.tokenizer, cluster.limits, progress.note).train.take(0, count)
    return [replace(row, uid=random.uid, tokens=random.tokens) for row, random in zip(rows, prompts, strict=True)]


def load_model_settings(config: Config) -> Any:
    from transformers import AutoConfig

    from launch.models import find_model

    model = find_model(config.model.path, config, lambda _: None)
    return AutoConfig.from_pretrained(model, trust_remote_code=config.model.trust_remote_code)
