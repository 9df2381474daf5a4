"""Figures of episodes: their turns, how they ended, what the environment said, and the calls of tools."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rlsys.types import TRUNCATIONS, Episode, Metrics, Sample


def episode_figures(samples: Sequence[Sample], failed: Sequence[Sample] = ()) -> Metrics:
    """Returns means and shares over the episodes among the samples. Empty if all are single answers.

    Of those whose verdict failed, the ones that ended at the limit of time are among the shares.
    """
    episodes = [(sample, sample.episode) for sample in samples if sample.episode]
    if not episodes:
        return {}
    scored = {(s.uid, s.index) for s in samples}
    ends = Counter(sample.finish for sample, _ in episodes)
    ends["time"] += sum(s.finish == "time" and (s.uid, s.index) not in scored for s in failed)
    return {
        "episode/turns": fmean([sample.turn_count for sample, _ in episodes]),
        "episode/observed_tokens": fmean([sample.observed_tokens for sample, _ in episodes]),
        **{f"episode/finish/{reason}": ends[reason] / ends.total() for reason in ("stop", *TRUNCATIONS)},
        **cut_figures([episode for _, episode in episodes]),
        **unknown_figures([episode for _, episode in episodes]),
        **call_figures([episode for _, episode in episodes]),
    }


def cut_figures(episodes: Sequence[Episode]) -> Metrics:
    """Returns the share of turns that the limit cut, of those after which the episode went on. Empty without any."""
    turns = [message for episode in episodes for message in model_messages(episode)[:-1]]
    return {"episode/turns_cut": fmean([m.get("finish") == "length" for m in turns])} if turns else {}


def unknown_figures(episodes: Sequence[Episode]) -> Metrics:
    """Replies in programs' requests that the model has not written so, per episode. Empty without any."""
    count = len(unknown_replies(episodes))
    return {"episode/unknown_replies": count / len(episodes)} if count else {}


def describe_unknown(samples: Sequence[Sample]) -> str:
    """Says what programs have changed in conversations, and what is trained all the same. Empty if nothing."""
    unknown = unknown_replies([sample.episode for sample in samples if sample.episode])
    turns, tokens = sum(s.turn_count for s in samples), sum(len(s.tokens) for s in samples)
    if not unknown:
        return ""
    return (
        f"{len(unknown)} replies in what programs say are not as the model has written them: it saw these conversations from the "
        f"last turn that is unchanged, or anew. All {tokens:,} tokens of its {turns} turns are trained, each once."
    )


def unknown_replies(episodes: Sequence[Episode]) -> list[dict[str, Any]]:
    return [message for episode in episodes for message in episode.messages if message.get("unknown")]


def call_figures(episodes: Sequence[Episode]) -> Metrics:
    """Calls per episode, in all and by tool, and the share of calls that could not be read. Empty without any."""
    messages = [message for episode in episodes for message in model_messages(episode)]
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    if not calls:
        return {}
    readable = [call for call in calls if not call.get("error")]
    by_tool = Counter(call["function"]["name"] for call in readable)
    return {
        "episode/tool_calls": len(calls) / len(episodes),
        "episode/unreadable_calls": 1 - len(readable) / len(calls),
        **{f"episode/tool_calls/{name}": count / len(episodes) for name, count in sorted(by_tool.items())},
    }


def model_messages(episode: Episode) -> list[dict[str, Any]]:
    """Returns the messages of the model's turns. An environment may write answers too, as examples before the first."""
    answers = [m for m in episode.messages if m["role"] == "assistant" and not m.get("unknown")]
    return answers[max(0, len(answers) - len(episode.turn_scores)) :]
