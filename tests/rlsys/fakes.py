"""Small machines with real behaviour: a rollout that samples, a policy that has one weight and learns, a rule that judges."""

import hashlib
import json
import math
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlsys.checks import load_checked
from rlsys.config.schema import Config, RewardFunction
from rlsys.data import Dataset
from rlsys.errors import WorkerFailed
from rlsys.rewards import Judge
from rlsys.tasks import zigzag
from rlsys.types import Batch, Floats, Metrics, Pack, Prompt, Request, Sample, Verdict, join_partial

EMPTY = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
CODE = {symbol: i for i, symbol in enumerate(zigzag.SYMBOLS)}


def make_prompt(uid: str = "p", text: str = "864152>", source: str = "zigzag", **row: Any) -> Prompt:
    return Prompt(uid, source, text, [CODE[c] for c in text], row)


def make_sample(uid: str = "p", index: int = 0, text: str = "481625", finish: str = "stop", version: int = 1) -> Sample:
    tokens = [CODE[c] for c in text] + [CODE["<eos>"]] * (finish == "stop")
    logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32) / 8
    return Sample(uid, index, text, np.array(tokens, dtype=np.int32), logprobs, finish, version)


def make_batch(
    rewards: list[float], groups: list[int], lengths: list[int] | None = None, prompt_lengths: list[int] | None = None
) -> Batch:
    """A batch with given rewards, groups and completion lengths; its tokens are random but always the same."""
    rng = np.random.default_rng(0)
    lengths = lengths or [3] * len(rewards)
    prompt_lengths = prompt_lengths or [4] * (max(groups) + 1)
    prompts = [Prompt(f"p{g}", "zigzag", "", rng.integers(2, 13, n).tolist(), {}) for g, n in enumerate(prompt_lengths)]
    samples = [
        Sample(
            f"p{g}",
            i,
            "",
            rng.integers(1, 13, n).astype(np.int32),
            -rng.random(n, dtype=np.float32),
            "stop",
            1,
        )
        for i, (g, n) in enumerate(zip(groups, lengths, strict=True))
    ]
    return Batch(
        prompts,
        samples,
        np.array(groups, dtype=np.int64),
        np.array(rewards, dtype=np.float32),
        [{} for _ in rewards],
    )


def make_dataset(count: int = 12, *, source: str = "zigzag", seed: int = 0, shuffle: bool = True) -> Dataset:
    rows = zigzag.rows("zigzag")[:count]
    prompts = [make_prompt(f"{source}:{i + 1}", row["prompt"], source) for i, row in enumerate(rows)]
    return Dataset(prompts, seed=seed, shuffle=shuffle)


def make_config(folder: Path, *overrides: str) -> Config:
    """A small run in `folder / "run"`: 3 steps of 4 prompts with 4 samples each, two updates a step."""
    file = folder / "small.yaml"
    file.write_text(
        "trainer: {steps: 3, prompts_per_step: 4, samples_per_prompt: 4, updates_per_step: 2}\n"
        "rollout: {max_prompt_tokens: 7, max_new_tokens: 7}\n"
        "policy: {ranks: 2, tokens_per_pack: 40, lr: 0.125}\n"
        "eval: {every: 2}\n"
        "checkpoint: {every: 2}\n"
    )
    return load_checked(file, [f"run.dir={folder / 'run'}", *overrides])


def tell_once(events: list[str], name: str) -> None:
    """A batch is scored in several calls."""
    since = next((i for i in range(len(events) - 1, -1, -1) if events[i] in ("generate", "update")), 0)
    if name not in events[since:]:
        events.append(name)


def token_counts(pack: Pack) -> tuple[int, int]:
    """All tokens, and those with an advantage."""
    return len(pack.targets), np.count_nonzero(pack.columns.advantages)


class FakeRollout:
    """Samples orders of the prompt's digits. The seed, and the weight it was given last, decide which."""

    in_flight = False  # whether weights may change under a batch

    def __init__(self, events: list[str]):
        self.events, self.version, self.weight = events, 0, 0.0
        self.requests: list[list[Request]] = []
        self.busy = threading.Event()

    def generate(self, requests: list[Request]) -> Iterator[list[Sample]]:
        self.events.append("generate")
        self.requests.append(requests)
        self.busy.set()
        version = self.version
        for uid in reversed(list(dict.fromkeys(r.uid for r in requests))):  # any order
            yield [self.one(r, version) for r in requests if r.uid == uid]
        assert self.in_flight or self.version == version, "weights changed under a batch"
        self.busy.clear()

    def one(self, request: Request, version: int) -> Sample:
        digits = request.tokens[:-1]
        rng = random.Random(f"{request.seed if request.temperature else 'greedy'} {self.weight!r}")
        tokens = [*rng.sample(digits, len(digits)), CODE["<eos>"]]
        text = "".join(zigzag.SYMBOLS[t] for t in tokens[:-1])
        logprobs = np.array([-rng.random() for _ in tokens], dtype=np.float32)
        return Sample(request.uid, request.index, text, np.array(tokens, dtype=np.int32), logprobs, "stop", version)

    def stop_early(self) -> None:
        raise AssertionError("all of it is wanted")

    def wake(self) -> None:
        self.events.append("generating")

    def sleep(self) -> None:
        self.events.append("resting")


class TickingRollout(FakeRollout):
    """Writes a token of every sample in each tick. How long a sample becomes follows from its uid and index alone."""

    def __init__(self, events: list[str], tick_s: float = 0.0):
        super().__init__(events)
        self.tick_s = tick_s
        self.enough = False
        self.ticks = 0

    def length(self, uid: str, index: int) -> int:
        return random.Random(f"{uid} {index}").choice([1, 1, 2, 2, 2, 3, 3, 7])

    def generate(self, requests: list[Request]) -> Iterator[list[Sample]]:
        self.requests.append(requests)
        self.enough = False
        running = {
            (r.uid, r.index): r.partial or Sample(r.uid, r.index, "", *EMPTY, "cut", self.version) for r in requests
        }
        while running and not self.enough:
            self.ticks += 1
            time.sleep(self.tick_s)
            running = {key: self.longer(s) for key, s in running.items()}
            if done := [s for s in running.values() if s.finish != "cut"]:
                running = {key: s for key, s in running.items() if s.finish == "cut"}
                yield done
        if running:
            yield list(running.values())

    def longer(self, s: Sample) -> Sample:
        done, length = len(s.tokens), self.length(s.uid, s.index)
        token = CODE["<eos>"] if done + 1 == length else 2 + done % 8
        tokens, logprobs = np.array([token], dtype=np.int32), np.array([-0.5 - done], dtype=np.float32)
        new = Sample(s.uid, s.index, "", tokens, logprobs, "stop" if done + 1 == length else "cut", self.version)
        whole = join_partial(s, new) if done else new
        return replace(whole, text="".join(zigzag.SYMBOLS[t] for t in whole.tokens if t != CODE["<eos>"]))

    def stop_early(self) -> None:
        self.enough = True


class FakeRewards:
    """Judges at once, with real reward functions. Completions in `broken` fail."""

    def __init__(self, functions: dict[str, float] | None = None):
        chosen = {name: RewardFunction(weight, name) for name, weight in (functions or {"zigzag": 1.0}).items()}
        self.judge_one, self.broken = Judge(chosen), set[tuple[str, int]]()
        self.seen: list[Sample] = []

    def judge(self, samples: list[Sample], prompts: dict[str, Prompt]) -> Future[list[Verdict]]:
        self.seen += samples
        done: Future[list[Verdict]] = Future()
        done.set_result([self.verdict(s, prompts[s.uid]) for s in samples])
        return done

    def verdict(self, sample: Sample, prompt: Prompt) -> Verdict:
        if (sample.uid, sample.index) in self.broken:
            return Verdict(None, failure="timeout", detail="no verdict after 10 s")
        return self.judge_one(prompt.row | {"prompt": prompt.text, "completion": sample.text, "finish": sample.finish})


class FakePolicy:
    """One weight, moved by every update. Its log-probs are the engine's plus the weight."""

    def __init__(self, events: list[str], rollout: FakeRollout, ranks: int = 2):
        self.events, self.rollout, self.ranks = events, rollout, ranks
        self.weight = self.synced = 0.0
        self.updates: list[tuple[list[list[Pack]], float]] = []
        self.kl_coefs: list[float] = []
        self.bad: dict[int, int] = {}  # number of an update → the sample that spoils it

    def score(self, packs: list[list[Pack]]) -> list[list[Floats]]:
        tell_once(self.events, "score")
        assert len(packs) == self.ranks
        return [[p.rollout + np.float32(self.weight - self.synced) for p in own] for own in packs]

    def rescore(self, packs: list[list[Pack]], variant: Any) -> list[list[Floats]]:
        raise WorkerFailed("a fake has one way to compute")

    def model_facts(self, texts: list[str]) -> Any:
        raise WorkerFailed("a fake has no files")

    def update(self, packs: list[list[Pack]], lr: float, kl_coef: float) -> Metrics:
        self.events.append("update")
        self.updates.append((packs, lr))
        self.kl_coefs.append(kl_coef)
        mine = [p for own in packs for p in own]
        gradient = sum(float((p.weights * p.columns.advantages * p.rollout).sum()) for p in mine)
        gaps = [
            0 * p.rollout + abs(self.weight - self.synced)
            if p.columns.old is None
            else np.abs(p.columns.old - p.rollout)
            for p in mine
        ]
        refs = [
            0 * p.rollout
            if p.columns.ref is None
            else p.rollout + np.float32(self.weight - self.synced) - p.columns.ref
            for p in mine
        ]
        tokens, teaching = (sum(int(n) for n in counts) for counts in zip(*map(token_counts, mine), strict=True))
        bad_sample = self.bad.get(len(self.updates), math.inf)
        if bad_sample < math.inf:
            gradient = math.nan
        else:
            self.weight += lr * gradient
        return {
            "skipped": float(bad_sample < math.inf),
            "first_bad_sample": bad_sample,
            "loss": -gradient,
            "grad_norm": abs(gradient),
            "kl": sum(float(r.sum()) for r in refs),
            "clip_low": 0.125 * teaching,
            "clip_high": 0.125 * teaching,
            "mismatch": sum(float(g.sum()) for g in gaps),
            "mismatch_max": max(float(g.max(initial=0.0)) for g in gaps),
            "computed": float(tokens),
        }

    def sync(self, version: int) -> None:
        self.events.append("sync")
        self.rollout.version, self.rollout.weight, self.synced = version, self.weight, self.weight

    def save(self, folder: str) -> None:
        self.events.append("save")
        self.file = Path(folder) / "weight.json"
        self.file.write_text(json.dumps(self.weight))

    def saved_files(self, wait: bool) -> dict[str, str]:
        return {self.file.name: hashlib.sha256(self.file.read_bytes()).hexdigest()}

    def load(self, folder: str) -> None:
        self.events.append("load")
        self.weight = json.loads((Path(folder) / "weight.json").read_text())


class FakeCritic:
    """Values every token alike; each update moves the value towards the mean return."""

    ranks = 1

    def __init__(self, events: list[str]):
        self.events, self.value = events, 0.0
        self.updates: list[tuple[list[list[Pack]], float]] = []

    def score(self, packs: list[list[Pack]]) -> list[list[Floats]]:
        self.events.append("values")
        return [[0 * p.rollout + np.float32(self.value) for p in own] for own in packs]

    def update(self, packs: list[list[Pack]], lr: float) -> Metrics:
        self.events.append("criticise")
        self.updates.append((packs, lr))
        gap = sum(float((p.weights * (p.columns.returns - self.value)).sum()) for own in packs for p in own)
        self.value += lr * gap
        return {"loss": gap * gap / 2, "grad_norm": abs(gap), "skipped": 0.0, "first_bad_sample": math.inf}

    def save(self, folder: str) -> None:
        self.file = Path(folder) / "value.json"
        self.file.write_text(json.dumps(self.value))

    def saved_files(self, wait: bool) -> dict[str, str]:
        return {self.file.name: hashlib.sha256(self.file.read_bytes()).hexdigest()}

    def load(self, folder: str) -> None:
        self.value = json.loads((Path(folder) / "value.json").read_text())


class FakeReference:
    ranks = 1

    def __init__(self, events: list[str], policy: "FakePolicy"):
        self.events, self.policy, self.weight = events, policy, 0.0
        self.refreshes: list[float] = []

    def score(self, packs: list[list[Pack]]) -> list[list[Floats]]:
        tell_once(self.events, "reference")
        assert len(packs) == 1
        return [[p.rollout + np.float32(self.weight - 0.5) for p in own] for own in packs]

    def refresh(self) -> None:
        self.weight = self.policy.weight
        self.refreshes.append(self.weight)

    def save(self, folder: str) -> None:
        self.file = Path(folder) / "reference.json"
        self.file.write_text(json.dumps(self.weight))

    def saved_files(self, wait: bool) -> dict[str, str]:
        return {self.file.name: hashlib.sha256(self.file.read_bytes()).hexdigest()}

    def load(self, folder: str) -> None:
        self.weight = json.loads((Path(folder) / "reference.json").read_text())


class FakeProgress:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.notes: list[str] = []

    def step(self, step: int, found: Metrics) -> None:
        self.steps.append(step)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def show_phase(self, phase: str) -> None:
        pass
