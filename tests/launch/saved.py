"""Files of samples, as runs and `rlsys eval --out` leave them."""

from pathlib import Path
from typing import Any

import numpy as np

from rlsys.runs.samples import write_samples
from rlsys.types import Batch, Prompt, Sample, Verdict

Texts = list[str]
Scores = list[float | None]


def save(
    file: Path,
    scores: dict[str, Scores],
    texts: dict[str, Texts] | None = None,
    prompts: dict[str, str] | None = None,
    version: int = 0,
    training: bool = False,
    **more: Any,
) -> Path:
    """`save(file, {"a:1": [1, 0], "b:1": [None]})`: the source stands before the colon; None is a failed verdict.

    A prompt's answer is the digit of its uid.
    """
    prompt_list = [
        Prompt(
            uid,
            uid.partition(":")[0],
            (prompts or {}).get(uid, f"what is {uid}?"),
            [1],
            {"answer": uid.partition("#")[0][-1]},
            **more,
        )
        for uid in scores
    ]
    judged, failed = [], []
    for g, (uid, own) in enumerate(scores.items()):
        for i, score in enumerate(own):
            text = texts[uid][i] if texts else f"{score} it is"
            one = Sample(uid, i, text, np.array([1, 2], np.int32), np.zeros(2, np.float32), "stop", version)
            if score is None:
                failed.append((one, Verdict(None, failure="timeout", detail="no verdict after 10 s")))
            else:
                judged.append((g, one, score))
    batch = Batch(
        prompt_list,
        [one for _, one, _ in judged],
        np.array([g for g, _, _ in judged], dtype=np.int64),
        np.array([score for _, _, score in judged], dtype=np.float32),
        [{} for _ in judged],
        failed=failed,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    write_samples(file, batch, np.zeros(len(judged), np.float32) if training else None)
    return file
