"""The lengths that a plan assumes: from the options, a run, the data, or else the limits of the configuration."""

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from launch.tools.estimates.step_time import MEAN_OVER_MAX_LENGTH
from launch.tools.local_data import PromptLengths, measure_prompts
from launch.tools.synthetic import CompletionLengths
from rlsys.config.derived import is_supervised
from rlsys.config.schema import Config, OverlongConfig
from rlsys.models.shapes import ModelShape
from rlsys.runs.directory import read_lines

PROMPT = 256  # tokens, if nothing sets a length
SAMPLES_READ = 256  # of a run, to estimate the length of its prompts
SAMPLE_FILES = "step-*.parquet"


@dataclass(frozen=True)
class LengthRequest:
    """Lengths that the options set."""

    prompt_tokens: int | None = None
    ragged: tuple[float, int] | None = None  # mean and maximum of completions


@dataclass(frozen=True)
class LengthAssumption:
    """Lengths in tokens. `LengthAssumption(1024, mean=1536.0, longest=3072, description="prompts of 1,024 …")`"""

    prompt: int  # the longest
    mean: float  # of completions
    longest: int
    description: str
    mean_prompt: int = 0  # 0: all are as long as the longest

    @property
    def typical_prompt(self) -> int:
        return self.mean_prompt or self.prompt


@dataclass(frozen=True)
class RunLengths:
    """Lengths of a run, in tokens. `prompt` is an estimate from the length of texts; 0: the run has no samples."""

    prompt: int
    mean: float  # of completions
    longest: int


def with_length_limits(config: Config, request: LengthRequest) -> Config:
    """Makes the requested lengths the limits of the configuration, so that its checks apply to them."""
    rollout = config.rollout
    if request.prompt_tokens:
        rollout = replace(rollout, max_prompt_tokens=request.prompt_tokens)
    if request.ragged:
        mean, longest = request.ragged
        CompletionLengths(mean, longest)  # refuses impossible lengths
        config = replace(config, overlong=OverlongConfig())  # every completion ends at its given length
        rollout = replace(rollout, max_new_tokens=longest)
    return replace(config, rollout=rollout)


def assume_lengths(
    config: Config, model: ModelShape | None, request: LengthRequest, run: Path | None = None
) -> LengthAssumption:
    """`config` comes from `with_length_limits`. `run` is the source of the costs, and may also be a JSON file."""
    measured = read_run_lengths(run) if run and run.is_dir() else None
    mean, longest, completion_source = assume_completions(config, request, measured, run)
    room = max(model.context - longest, 1) if model and model.context else 1 << 30
    prompt, mean_prompt, prompt_source = assume_prompt(config, request, measured, run, room)
    at_most = f" at most and {format_mean(mean_prompt)} on average" if mean_prompt else ""
    prompts = f"prompts of {prompt:,} tokens{at_most} ({prompt_source})"
    completions = f"completions of {format_mean(mean)} on average and {longest:,} at most ({completion_source})"
    return LengthAssumption(prompt, mean, longest, f"{prompts}, {completions}", round(mean_prompt))


def format_mean(mean: float) -> str:
    return f"{mean:,.1f}" if mean < 100 else f"{mean:,.0f}"


def assume_completions(
    config: Config, request: LengthRequest, measured: RunLengths | None, run: Path | None
) -> tuple[float, int, str]:
    """Mean, maximum, and where they come from."""
    limit = config.rollout.max_new_tokens
    if request.ragged:
        return *request.ragged, "--ragged"
    if measured:
        longest = min(measured.longest, limit)
        return min(measured.mean, longest), longest, f"as in {run}"
    if is_supervised(config) and isinstance(prompts := measure_prompts(config), PromptLengths) and prompts.answers:
        return *prompts.answers, "as in the data"
    mean = max(MEAN_OVER_MAX_LENGTH * limit, 1.0)
    return mean, limit, "half of rollout.max_new_tokens, and all of it"


def assume_prompt(
    config: Config, request: LengthRequest, measured: RunLengths | None, run: Path | None, room: int
) -> tuple[int, float, str]:
    """The longest, the mean (0: not known), and where they come from.

    `room` is what completions leave of the model's window.
    """
    limit = config.rollout.max_prompt_tokens
    if request.prompt_tokens:
        return request.prompt_tokens, 0.0, "--prompt-tokens"
    if measured and measured.prompt:
        return min(measured.prompt, limit or room), 0.0, f"about as in {run}"
    prompts = measure_prompts(config)
    if isinstance(prompts, PromptLengths):
        return prompts.longest, prompts.mean, "as in the data"
    if limit:
        return limit, 0.0, f"rollout.max_prompt_tokens; {prompts}"
    prompt = min(PROMPT, room)
    source = "what the model's window leaves" if prompt == room else "assumed; --prompt-tokens sets another length"
    return prompt, 0.0, f"{source}; {prompts}"


def read_run_lengths(run: Path) -> RunLengths | None:
    """Reads completions from the metrics of a run, and prompts from its newest samples."""
    lines = [line for line in read_lines(run / "metrics.jsonl") if line.get("length/mean")]
    if not lines:
        return None
    mean, longest = fmean(line["length/mean"] for line in lines), max(line["length/max"] for line in lines)
    return RunLengths(estimate_prompt_tokens(run), max(mean, 1.0), max(round(longest), 1))


def estimate_prompt_tokens(run: Path) -> int:
    """The mean length of prompts. A run keeps no tokens of prompts.

    A token of a prompt is taken to have the letters of a token of a completion.
    """
    files = sorted((run / "samples").glob(SAMPLE_FILES))
    if not files:
        return 0
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(files[-1]) as file:
        first = next(file.iter_batches(SAMPLES_READ, columns=["prompt", "completion", "tokens"]), None)
    if first is None:
        return 0
    rows = first.to_pylist()
    letters, tokens = sum(len(row["completion"]) for row in rows), sum(len(row["tokens"]) for row in rows)
    return max(round(fmean(len(row["prompt"]) for row in rows) * tokens / letters), 1) if letters else 0
