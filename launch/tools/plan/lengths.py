"""How long prompts and completions are taken to be: as the command line says, else as a run had them, else as the configuration allows."""

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from launch.tools.synthetic import CompletionLengths
from rlsys.config.schema import Config, OverlongConfig
from rlsys.estimates.step_time import MEAN_OVER_MAX_LENGTH
from rlsys.models.shapes import ModelShape
from rlsys.runs.directory import read_lines

PROMPT = 256  # tokens, where nothing says how many
LOOKED_AT = 256  # samples of a run, for its prompts
SAMPLES = "step-*.parquet"


@dataclass(frozen=True)
class LengthRequest:
    """What the command line says of lengths."""

    prompt_tokens: int | None = None
    ragged: tuple[float, int] | None = None  # mean and maximum of completions


@dataclass(frozen=True)
class LengthAssumption:
    """In tokens: `Taken(prompt=1024, mean=1536.0, longest=3072, said="prompts of 1,024 tokens (rollout.max_prompt_tokens); …")`"""

    prompt: int
    mean: float  # of completions
    longest: int
    description: str


@dataclass(frozen=True)
class RunLengths:
    """Lengths of a run. `prompt` is about as many tokens as its prompts have letters for; 0: it has kept no samples."""

    prompt: int
    mean: float
    longest: int


def with_length_limits(config: Config, asked: LengthRequest) -> Config:
    """The configuration with the lengths that were asked for as its limits, so that its own checks are theirs too."""
    rollout = config.rollout
    if asked.prompt_tokens:
        rollout = replace(rollout, max_prompt_tokens=asked.prompt_tokens)
    if asked.ragged:
        mean, longest = asked.ragged
        CompletionLengths(mean, longest)  # refuses what cannot be
        config = replace(config, overlong=OverlongConfig())  # every completion is as long as it is told to be
        rollout = replace(rollout, max_new_tokens=longest)
    return replace(config, rollout=rollout)


def assume_lengths(
    config: Config, model: ModelShape | None, asked: LengthRequest, run: Path | None = None
) -> LengthAssumption:
    """`config` is `allowing` what was asked for; `run` is what costs are from, if that is a run."""
    r, had = config.rollout, read_run_lengths(run) if run and run.is_dir() else None
    if asked.ragged:
        mean, longest, of_completions = *asked.ragged, "--ragged"
    elif had:
        longest = min(had.longest, r.max_new_tokens)
        mean, of_completions = min(had.mean, longest), f"as in {run}"
    else:
        longest = r.max_new_tokens
        mean, of_completions = max(MEAN_OVER_MAX_LENGTH * longest, 1.0), "half of rollout.max_new_tokens, and all of it"
    room = max(model.context - longest, 1) if model and model.context else 1 << 30
    if asked.prompt_tokens:
        prompt, of_prompts = asked.prompt_tokens, "--prompt-tokens"
    elif had and had.prompt:
        prompt, of_prompts = min(had.prompt, r.max_prompt_tokens or room), f"about as in {run}"
    elif r.max_prompt_tokens:
        prompt, of_prompts = r.max_prompt_tokens, "rollout.max_prompt_tokens"
    else:
        prompt = min(PROMPT, room)
        of_prompts = "what the model's window leaves" if prompt == room else "--prompt-tokens says otherwise"
    average = f"{mean:,.1f}" if mean < 100 else f"{mean:,.0f}"
    said = f"prompts of {prompt:,} tokens ({of_prompts}), completions of {average} on average and {longest:,} at most ({of_completions})"
    return LengthAssumption(prompt, mean, longest, said)


def read_run_lengths(run: Path) -> RunLengths | None:
    """What the figures of a run say of its completions, and its newest samples of its prompts."""
    lines = [line for line in read_lines(run / "metrics.jsonl") if line.get("length/mean")]
    if not lines:
        return None
    mean, longest = fmean(line["length/mean"] for line in lines), max(line["length/max"] for line in lines)
    return RunLengths(estimate_prompt_tokens(run), max(mean, 1.0), max(round(longest), 1))


def estimate_prompt_tokens(run: Path) -> int:
    """On average; a prompt's tokens are not kept, so its letters are reckoned as long as those of completions."""
    files = sorted((run / "samples").glob(SAMPLES))
    if not files:
        return 0
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(files[-1]) as file:
        first = next(file.iter_batches(LOOKED_AT, columns=["prompt", "completion", "tokens"]), None)
    if first is None:
        return 0
    rows = first.to_pylist()
    letters, tokens = sum(len(row["completion"]) for row in rows), sum(len(row["tokens"]) for row in rows)
    return max(round(fmean(len(row["prompt"]) for row in rows) * tokens / letters), 1) if letters else 0
