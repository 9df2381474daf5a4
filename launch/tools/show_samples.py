"""Prints samples in full: single answers as prompt and completion, episodes as conversations."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Column

from launch.printing import make_table, print_line
from rlsys.episodes.figures import model_messages
from rlsys.episodes.tools.tool import cut_middle
from rlsys.text import escape_control_chars
from rlsys.types import Batch, Episode, Prompt, Sample, Verdict

MAX_CHARS = 2000  # of one text
Part = tuple[str, str]  # who, and what it said


def print_samples(batch: Batch, count: int, console: Console) -> None:
    """Prints the first sample of each of the first prompts."""
    rewards = zip(batch.samples, batch.rewards, strict=True)
    judged = [*((sample, Verdict(float(reward))) for sample, reward in rewards), *batch.failed]
    for prompt in batch.prompts[:count]:
        own = [(sample, verdict) for sample, verdict in judged if sample.uid == prompt.uid]
        print_sample(prompt, *min(own, key=lambda pair: pair[0].index), console)


def print_sample(prompt: Prompt, sample: Sample, verdict: Verdict, console: Console) -> None:
    console.print()
    print_line(console, describe_sample(sample, verdict), "bold")
    messages = sample.episode and sample.episode.messages
    parts = conversation_parts(sample.episode) if sample.episode and messages else answer_parts(prompt, sample)
    table = make_table(Column("", no_wrap=True, style="dim"), Column("", overflow="fold"), show_header=False)
    for who, text in parts:
        table.add_row(escape_control_chars(who), escape_control_chars(cut_middle(text, MAX_CHARS)))
    console.print(table)


def describe_sample(sample: Sample, verdict: Verdict) -> str:
    outcome = f"failed: {verdict.failure}" if verdict.score is None else f"reward {verdict.score:.3g}"
    turns = f", {len(sample.turns)} turns" if sample.episode else ""
    cut = f", cut by {sample.finish}" if sample.truncated else ""
    return f"{sample.uid}/{sample.index}: {outcome}{turns}, {len(sample.tokens)} tokens{cut}"


def answer_parts(prompt: Prompt, sample: Sample) -> list[Part]:
    return [("prompt", prompt.text), ("completion", sample.text)]


def conversation_parts(episode: Episode) -> Iterator[Part]:
    turns = {id(message): turn for turn, message in enumerate(model_messages(episode))}
    for message in episode.messages:
        who = " ".join(filter(None, (message["role"], message.get("name"))))
        turn = turns.get(id(message))
        if turn is not None:
            score = episode.turn_scores[turn]
            who = f"turn {turn + 1}" + (f" ({score:g})" if score else "")
        yield who, message_text(message)


def message_text(message: dict[str, Any]) -> str:
    """What a message says: its reasoning, its text, and a line for each call."""
    calls = [describe_call(call) for call in message.get("tool_calls") or ()]
    return "\n".join(filter(None, (message.get("reasoning_content"), message.get("content"), *calls)))


def describe_call(call: dict[str, Any]) -> str:
    """ "→ add(a=1, b=2)", and why it cannot be read, if so"""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    values = ", ".join(f"{k}={v!r}" for k, v in arguments.items()) if isinstance(arguments, dict) else arguments
    made = f"→ {name}({values})" if name else "→"
    return f"{made} {call['error']}" if call.get("error") else made
