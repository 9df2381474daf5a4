"""A judged batch on disk: numbers as safetensors, texts as JSON. A batch that is read back trains exactly as before.

Only the rows of prompts may change, as JSON does not know dates and the like. The rewards are computed already, so only
the file of samples uses the rows, and it stores them in the same way.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rlsys.runs.disk import write_synced
from rlsys.runs.samples import to_json
from rlsys.types import Batch, Episode, Observation, Prompt, Sample, Verdict


def write_batch(target: Path, batch: Batch) -> None:
    """Writes two files, `target.safetensors` and `target.json`, and flushes them to disk."""
    from safetensors.numpy import save

    failed = [sample for sample, _ in batch.failed]
    samples = [*batch.samples, *failed]
    numbers = {
        "tokens": concat([s.tokens for s in samples], np.int32),
        "logprobs": concat([s.logprobs for s in samples], np.float32),
        "lengths": np.array([len(s.tokens) for s in samples], dtype=np.int64),
        "prompt_tokens": concat([np.asarray(p.tokens) for p in batch.prompts], np.int64),
        "prompt_lengths": np.array([len(p.tokens) for p in batch.prompts], dtype=np.int64),
        "groups": batch.groups,
        "rewards": batch.rewards,
    }
    if batch.greedy is not None:
        numbers["greedy"] = batch.greedy
    texts = {
        "prompts": [
            {"uid": p.uid, "source": p.source, "text": p.text, "messages": p.messages, "rewards": p.rewards}
            | {"row": to_json(p.row), "max_new_tokens": p.max_new_tokens, "play": p.play}
            for p in batch.prompts
        ],
        "samples": [
            [s.uid, s.index, s.text, s.finish, s.version, s.changes, answers(s), transcript(s)] for s in samples
        ],
        "components": batch.components,
        "answers": batch.answers,
        "failed": [asdict(verdict) for _, verdict in batch.failed],
        "requested": batch.requested,
        "failures": batch.failures,
        "first_failure": batch.first_failure,
        "reward_s": batch.reward_s,
        "dropped_groups": batch.dropped_groups,
        "position": batch.position,
        "deferred": batch.deferred,
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    write_synced(target.with_suffix(".safetensors"), save(numbers))
    write_synced(target.with_suffix(".json"), json.dumps(texts, default=str).encode())


def read_batch(target: Path) -> Batch:
    from safetensors.numpy import load_file

    numbers = load_file(target.with_suffix(".safetensors"))
    texts: dict[str, Any] = json.loads(target.with_suffix(".json").read_bytes())
    ends = np.cumsum(numbers["lengths"])
    columns = (np.split(numbers[name], ends)[:-1] for name in ("tokens", "logprobs"))
    samples = [
        Sample(
            uid,
            index,
            text,
            tokens,
            logprobs,
            finish,
            version,
            tuple((token, to) for token, to in changes),
            tuple(Observation(at, np.array(observed, dtype=np.int32), after) for at, observed, after in observations),
            episode and Episode(None, *episode),  # its verdict is among the batch's
        )
        for (uid, index, text, finish, version, changes, observations, episode), tokens, logprobs in zip(
            texts["samples"], *columns, strict=True
        )
    ]
    asked = np.split(numbers["prompt_tokens"], np.cumsum(numbers["prompt_lengths"]))[:-1]
    count = len(numbers["rewards"])
    return Batch(
        prompts=[
            Prompt(**p | {"tokens": tokens.tolist(), "row": json.loads(p["row"])})
            for p, tokens in zip(texts["prompts"], asked, strict=True)
        ],
        samples=samples[:count],
        groups=numbers["groups"],
        rewards=numbers["rewards"],
        components=texts["components"],
        answers=texts["answers"],
        failed=[(s, Verdict(**v)) for s, v in zip(samples[count:], texts["failed"], strict=True)],
        greedy=numbers.get("greedy"),
        deferred=tuple(texts["deferred"]),
        **{k: texts[k] for k in ("requested", "failures", "first_failure", "reward_s", "dropped_groups", "position")},
    )


def answers(sample: Sample) -> list[tuple[int, list[int], int | None]]:
    """Returns what the environment said, in JSON's form."""
    return [(o.at, o.tokens.tolist(), o.after) for o in sample.observations]


def transcript(sample: Sample) -> tuple[list[Any], list[float]] | None:
    return (sample.episode.messages, sample.episode.turn_scores) if sample.episode else None


def concat(parts: list[Any], kind: Any) -> Any:
    return np.concatenate([np.zeros(0, dtype=kind), *parts]).astype(kind)
