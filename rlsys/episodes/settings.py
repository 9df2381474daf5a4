"""The settings of episode processes: what they play, and within which limits."""

from dataclasses import dataclass, field, replace
from typing import Any

from rlsys.config.schema import Config, DataSource

TOOL_PLAY = "tools"  # the built-in function that lets the model call tools


@dataclass(frozen=True)
class EpisodeSettings:
    """Sent to an episode process when it starts."""

    plays: tuple[str, ...]  # the functions that play episodes, as module:function or file.py:function
    options: dict[str, Any]  # their keyword arguments
    tools: list[Any]
    tool_parser: str
    reasoning_parser: str
    on_bad_call: str
    max_turns: int
    max_tokens: int
    window: int
    step_timeout_s: float
    timeout_s: float
    concurrency: int
    memory_mb: int
    start_timeout_s: float
    template: str  # a Jinja file; empty: the tokenizer's own
    template_options: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    stop_token_ids: tuple[int, ...] = ()  # besides those that the model has
    temperature: float = 1.0  # in training
    model: str = ""  # where the tokenizer is
    keep_spare: bool = True

    @property
    def description(self) -> str:
        return f"episode ({', '.join(self.plays)})"

    @classmethod
    def from_config(cls, config: Config) -> "EpisodeSettings":
        e = config.episode
        return cls(
            plays=tuple(plays(config)),
            options=e.options,
            tools=e.tools,
            tool_parser=e.tool_parser,
            reasoning_parser=e.reasoning_parser,
            on_bad_call=e.on_bad_call,
            max_turns=e.max_turns,
            max_tokens=e.max_tokens,
            window=e.window,
            step_timeout_s=e.step_timeout_s,
            timeout_s=e.timeout_s,
            concurrency=e.concurrency,
            memory_mb=e.memory_mb,
            start_timeout_s=config.cluster.start_timeout_s,
            template=config.data.template,
            template_options=config.data.template_options,
            trust_remote_code=config.model.trust_remote_code,
            stop_token_ids=tuple(config.rollout.stop_token_ids),
            temperature=config.rollout.temperature,
        )

    def for_model(self, model: str, window: int) -> "EpisodeSettings":
        """With the model's directory, and a window that the model has."""
        return replace(self, model=model, window=min(self.window, window or self.window))


def play_of(config: Config, source: DataSource) -> str:
    """Returns the function that plays the rows of a data set; empty: they ask for single answers."""
    return source.episode or config.episode.play or (TOOL_PLAY if config.episode.tools else "")


def plays(config: Config) -> list[str]:
    """All functions that play episodes. None: every row asks for a single answer."""
    return [play for play in dict.fromkeys(play_of(config, source) for source in sources(config)) if play]


def sources(config: Config) -> list[DataSource]:
    """All data sets, those of evaluations included."""
    return [*config.data.train.values(), *config.eval.datasets.values()]
