"""Engines that write what a test tells them to, turn by turn, behind the real driver's side of episodes."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from byte_model import END, byte_tokenizer
from loop_rollout import LoopRollout
from test_played_again import RunnerPool
from test_runner import runner, settings

from rlsys.types import Prompt, Request, Sample

TOKENIZER = byte_tokenizer()


@dataclass
class WrittenEngines:
    """`writes` is given all text before a turn, and returns the turn's. Token n of it has the log-prob -n / 8."""

    writes: Callable[[str], str]
    delay_s: float = 0.0
    requests: list[Request] = field(default_factory=list)  # all

    def begin(self, requests: list[Request], more: Callable[[], float]) -> "WrittenEngines":
        assert not requests
        self.more, self.running = more, list[tuple[float, Request]]()
        return self

    def run(self) -> Iterator[list[Sample]]:
        while self.running or self.more():
            time.sleep(0.002)
            ready = [r for since, r in self.running if time.monotonic() - since >= self.delay_s]
            done = {r.key for r in ready}
            self.running = [(since, r) for since, r in self.running if r.key not in done]
            yield [self.write(r) for r in ready]

    def write(self, request: Request) -> Sample:
        text = self.writes(TOKENIZER.decode(request.tokens))
        tokens, finish = [*TOKENIZER(text, add_special_tokens=False).input_ids, END], "stop"
        for string in request.stop:
            if string in text:
                tokens = TOKENIZER(text[: text.index(string) + len(string)], add_special_tokens=False).input_ids
        if len(tokens) > request.max_new_tokens:
            tokens, finish = tokens[: request.max_new_tokens], "length"
        logprobs = -np.arange(len(tokens), dtype=np.float32) / 8
        own = np.array(tokens, dtype=np.int32)
        return Sample(request.uid, request.index, text, own, logprobs, finish, 0, turn=request.turn)

    def add(self, request: Request) -> None:
        self.requests.append(request)
        self.running.append((time.monotonic(), request))

    def stop_early(self) -> None: ...


def play_all(
    folder: Path,
    model: Path,
    code: str,
    writes: Callable[[str], str],
    rows: list[dict[str, Any]],
    delay_s: float = 0.0,
    **changes: Any,
) -> tuple[list[Sample], WrittenEngines]:
    """Plays the function `play` of `code` once for each row. Returns the episodes in order."""
    (folder / "agent.py").write_text(code)
    given = {"plays": (f"{folder}/agent.py:play",), "window": 4096, "max_turns": 8, "step_timeout_s": 20.0}
    s = replace(settings(folder, str(model)), **given | changes)
    engines = WrittenEngines(writes, delay_s)
    prompts = [Prompt(f"p{i}", "x", "", [], row, play=s.plays[0]) for i, row in enumerate(rows)]
    requests = [Request(p.uid, 0, [], 5, 1.0, 200, prompt=p) for p in prompts]
    with runner(s) as episodes:
        rollout = LoopRollout(engines, RunnerPool(episodes))
        samples = [sample for some in rollout.generate(requests) for sample in some]
    return sorted(samples, key=lambda sample: sample.uid), engines


def texts(sample: Sample) -> list[tuple[str, int, str]]:
    """What was said before each turn, the turn that it continues, and what the model wrote."""
    turns = zip(sample.turns, sample.continued_turns, strict=True)
    return [(TOKENIZER.decode(observation), after, TOKENIZER.decode(own)) for (observation, own), after in turns]
