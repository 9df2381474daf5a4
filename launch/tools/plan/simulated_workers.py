"""Engines and rewards that only let simulated time pass, and what each piece of their work costs."""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from launch.tools.estimates.virtual_time import VirtualTime
from rlsys.config.schema import Config
from rlsys.types import Prompt, Request, Sample, Verdict
from workers.rollout.request_scheduler import RequestScheduler


@dataclass(frozen=True)
class Costs:
    """Seconds of each piece of work."""

    step_s: float  # a decoding step of an engine, without any sequence
    sequence_s: float  # additional, for each sequence in a step
    prompt_s: float  # additional, for each prompt token that is prefilled
    score_s: float  # scoring a token on a rank, in units of `rlsys.batching.balance.pack_cost`
    update_s: float  # updating a token, in the same units
    pack_s: float = 0.0  # additional, for each pack that is scored or updated
    optimizer_s: float = 0.0  # an optimizer update, in addition to its packs
    sync_s: float = 0.0  # loading new weights into all engines
    reward_s: float = 0.0  # from a sample to its verdict
    other_s: float = 0.0  # of the driver in each step


class SimulatedEngines:
    """All engines, in virtual time. Implements `rlsys.interfaces.Rollout`. Every completion has its maximum length."""

    def __init__(self, config: Config, costs: Costs, time: VirtualTime):
        self.config, self.costs, self.time = config, costs, time
        self.version, self.paused = 0, 0.0  # paused: seconds of weight loading so far
        self.before = (0.0, 0.0)  # `decoding` of earlier calls of `generate`
        self.engines: dict[str, SimulatedEngine] = {}
        self.stop_requested = False

    @property
    def decoding(self) -> tuple[float, float]:
        """Decoding seconds so far, summed over engines, and summed over sequences."""
        engines = self.engines.values()
        return self.before[0] + sum(e.busy for e in engines), self.before[1] + sum(e.decoded for e in engines)

    def generate(self, requests: list[Request]) -> Iterator[list[Sample]]:
        at_once = self.config.rollout.max_sequences
        names = [f"rollout-{i}" for i in range(self.config.rollout.engines)]
        scheduler = RequestScheduler(requests, at_once)
        self.engines = engines = {n: SimulatedEngine(self.costs, at_once, lambda: self.version) for n in names}
        self.stop_requested = False
        began, paused = self.time.now(), self.paused
        events: list[tuple[float, int, str]] = []  # when an engine finishes something, on a clock that stops in pauses
        unassigned = len(requests)

        def assign(now: float, *names: str) -> None:
            """Assigns requests to engines that have room."""
            nonlocal unassigned
            rooms = {n: engines[n].queued for n in names}
            for name, share in scheduler.assign(rooms).items() if unassigned else ():
                unassigned -= len(share)
                engines[name].add(share, now)
                plan(name)

        def plan(name: str) -> None:
            engine = engines[name]
            engine.plans += 1
            if engine.running:
                heapq.heappush(events, (engine.due, engine.plans, name))

        assign(0.0, *engines)
        while events:
            due, plan_number, name = heapq.heappop(events)
            engine = engines[name]
            if plan_number != engine.plans:
                continue  # it has received more requests since
            while (wait := began + due + self.paused - paused - self.time.now()) > 0:
                self.time.sleep(wait)
            finished = engine.finish(due)
            plan(name)
            assign(due, name)
            yield [self.sample(r, version, r.max_new_tokens, "stop") for r, version in finished]
            if self.stop_requested:
                yield from self.cut_samples(due)
                break
        self.before, self.engines = self.decoding, {}

    def cut_samples(self, now: float) -> Iterator[list[Sample]]:
        for engine in self.engines.values():
            engine.advance(now)
            if cut := [self.sample(r, version, n, "cut") for r, version, n in engine.unfinished()]:
                yield cut

    def sample(self, request: Request, version: int, length: int, finish: str) -> Sample:
        tokens = np.broadcast_to(np.int32(0), length)
        logprobs = np.broadcast_to(np.float32(0), length)
        return Sample(request.uid, request.index, "", tokens, logprobs, finish, version)

    def stop_early(self) -> None:
        self.stop_requested = True

    def load_weights(self, version: int) -> None:
        """Loads new weights. Decoding pauses meanwhile."""
        self.time.sleep(self.costs.sync_s)
        self.paused += self.costs.sync_s
        self.version = version

    def wake(self) -> None: ...

    def sleep(self) -> None: ...


class SimulatedEngine:
    """One engine. In each step, every running sequence gets a token. Times are of the caller's clock."""

    def __init__(self, costs: Costs, at_once: int, version: Callable[[], int]):
        self.costs, self.at_once, self.version = costs, at_once, version
        self.waiting: deque[Request] = deque()
        self.running: list[tuple[int, int, Request, int]] = []  # heap: last step, order, request, weight version
        self.known: set[str] = set()  # prompts in the prefix cache
        self.step, self.at, self.order = 0, 0.0, 0  # steps so far, and when the last one ended
        self.plans = 0
        self.busy = self.decoded = 0.0  # seconds, and seconds summed over sequences
        self.extra_seconds = 0.0  # of the current step, for prompts; negative: a part of the step is done

    @property
    def queued(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def step_seconds(self) -> float:
        return self.costs.step_s + self.costs.sequence_s * len(self.running)

    @property
    def due(self) -> float:
        """When the next sequence finishes, if no request is added."""
        return self.at + self.extra_seconds + (self.running[0][0] - self.step) * self.step_seconds

    def add(self, requests: list[Request], now: float) -> None:
        self.advance(now)
        self.waiting.extend(requests)
        self.admit()

    def advance(self, now: float) -> None:
        """Advances to the last step that has ended by now."""
        if not self.running:
            self.at = now
            return
        decoding = now - self.at - self.extra_seconds
        steps = min(max(int(decoding / self.step_seconds + 1e-9), 0), self.running[0][0] - self.step)
        self.extra_seconds = steps * self.step_seconds - decoding
        self.step += steps
        self.decode(now)

    def decode(self, now: float) -> None:
        self.busy += now - self.at
        self.decoded += (now - self.at) * len(self.running)
        self.at = now

    def admit(self) -> None:
        while self.waiting and len(self.running) < self.at_once:
            r = self.waiting.popleft()
            continued = len(r.partial.tokens) if r.partial else 0
            if r.uid not in self.known or continued:
                self.extra_seconds += (len(r.tokens) + continued) * self.costs.prompt_s
                self.known.add(r.uid)
            self.order += 1
            version = r.partial.version if r.partial else self.version()
            heapq.heappush(self.running, (self.step + max(r.max_new_tokens - continued, 1), self.order, r, version))

    def finish(self, now: float) -> list[tuple[Request, int]]:
        """Returns the requests that finish now, with their versions. Waiting requests take their places."""
        self.decode(now)
        self.extra_seconds, self.step = 0.0, self.running[0][0]
        done: list[tuple[Request, int]] = []
        while self.running and self.running[0][0] == self.step:
            done.append(heapq.heappop(self.running)[2:])
        self.admit()
        return done

    def unfinished(self) -> list[tuple[Request, int, int]]:
        """Running requests with their versions and their tokens so far."""
        lengths = ((r, version, r.max_new_tokens - (end - self.step)) for end, _, r, version in self.running)
        return [request for request in lengths if request[2] > 0]


class SimulatedRewards:
    """Rewards that take a fixed time. Implements `rlsys.interfaces.Rewards`."""

    def __init__(self, costs: Costs, time: VirtualTime):
        self.costs, self.time = costs, time

    def judge(self, samples: list[Sample], prompts: dict[str, Prompt]) -> "Future[list[Verdict]]":
        return DelayedVerdicts(
            self.time, self.time.now() + self.costs.reward_s, [Verdict(s.index % 2) for s in samples]
        )


class DelayedVerdicts(Future[list[Verdict]]):
    """Verdicts that are available from a given time on."""

    def __init__(self, time: VirtualTime, at: float, verdicts: list[Verdict]):
        super().__init__()
        self.time, self.at = time, at
        self.set_result(verdicts)

    def result(self, timeout: float | None = None) -> list[Verdict]:
        if self.at > self.time.now():
            self.time.sleep(self.at - self.time.now())
        return super().result()
