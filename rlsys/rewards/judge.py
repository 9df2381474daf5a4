"""Judges samples with several weighted reward functions. No exception of a function leaves this file.

A function is one of three kinds, which its signature tells:

    def f(completion, …)           judges one sample at a time
    async def f(completion, …)     judges many samples at the same time, each in its own call
    def f(completions, …)          batched, async or not: judges a list in one call, and returns as many scores
"""

import asyncio
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

from rlsys.config.plugins import load_function, short_name
from rlsys.config.schema import RewardFunction
from rlsys.config.secrets import referenced_variables, resolve_env
from rlsys.rewards.asking import Ask, restart_deadline
from rlsys.rewards.functions import CHECKS, PREPARE, REWARDS
from rlsys.rewards.settings import function_deadline
from rlsys.rewards.weighted_reward import RewardInputs, WeightedReward, invalid_verdict, timeout_verdict
from rlsys.types import Prompt, Sample, Verdict

# Called when samples begin to be judged: their indices, and the seconds that this may take (0: no limit).
OnStart = Callable[[Sequence[int], float], None]
MAX_REWARD = 1e18  # the loop works in float32, which must hold its square
VerdictsByName = dict[str, Verdict]  # of one sample, by the name of the function


class Judge:
    """`Judge({"exact": RewardFunction(function="exact")})`; it loads what its functions need."""

    def __init__(self, functions: dict[str, RewardFunction], *, timeout_s: float = 0.0, ask: Ask | None = None):
        self.rewards = []
        for name, f in functions.items():
            options = resolve_env(f.options)
            if f.function in CHECKS:
                CHECKS[f.function](options)
            function = load_function(f.function, REWARDS, "reward.functions")
            secret_variables = referenced_variables(f.options)
            deadline_s = function_deadline(
                f, timeout_s, asks=ask is not None and "ask" in signature(function).parameters
            )
            reward = WeightedReward(short_name(name), function, f.weight, options, deadline_s, ask, secret_variables)
            self.rewards.append(reward)
            if f.function in PREPARE:
                PREPARE[f.function](options)
        self.sync_rewards = [r for r in self.rewards if not r.is_async]
        self.async_rewards = [r for r in self.rewards if r.is_async]
        self.batched = any(r.batched for r in self.rewards)

    def __call__(self, inputs: RewardInputs) -> Verdict:
        """Judges one sample and waits for its verdict."""
        [verdicts] = self.judge_sync([inputs])
        if self.async_rewards and not has_failure(verdicts):
            [verdicts] = asyncio.run(self.judge_async([inputs], [verdicts]))
        return self.combine(verdicts)

    def judge_sync(self, inputs: Sequence[RewardInputs], on_start: OnStart = lambda *_: None) -> list[VerdictsByName]:
        """Runs the functions that are not async, each on the samples that none before has failed on."""
        verdicts: list[VerdictsByName] = [{} for _ in inputs]
        for reward in self.sync_rewards:
            for indices in _calls(reward, verdicts):
                results = _call_together(reward, inputs, indices, on_start)
                if len(indices) > 1 and any(v.failure for v in results):  # one sample must not fail the others
                    results = [_call_together(reward, inputs, [i], on_start)[0] for i in indices]
                for i, verdict in zip(indices, results, strict=True):
                    verdicts[i][reward.name] = verdict
        return verdicts

    async def judge_async(
        self, inputs: Sequence[RewardInputs], verdicts: list[VerdictsByName], restart: Callable[[], None] = lambda: None
    ) -> list[VerdictsByName]:
        """Adds the verdicts of the async functions, each under its own deadline.

        `restart` is called when a deadline begins anew.
        """
        for reward in self.async_rewards:
            calls = _calls(reward, verdicts)
            results = await asyncio.gather(
                *(_await_reward(reward, [inputs[i] for i in indices], restart) for indices in calls)
            )
            for indices, of_call in zip(calls, results, strict=True):
                for i, verdict in zip(indices, of_call, strict=True):
                    verdicts[i][reward.name] = verdict
        return verdicts

    @property
    def async_limit_s(self) -> float:
        """Seconds that `judge_async` takes at most: a batch that failed is judged again, one by one."""
        return sum(r.deadline_s * (2 if r.batched else 1) for r in self.async_rewards)

    def combine(self, verdicts: VerdictsByName) -> Verdict:
        """Combines the verdicts of all functions on one sample."""
        return combine_verdicts([verdicts[r.name] for r in self.rewards if r.name in verdicts])


def reward_inputs(prompt: Prompt, sample: Sample) -> RewardInputs:
    """Collects what a reward function may ask for."""
    inputs = prompt.row | {
        "prompt": prompt.text,
        "completion": sample.text,
        "finish": sample.finish,
        "tokens": len(sample.tokens),
        "messages": prompt.messages,
        "source": prompt.source,
    }
    if sample.episode:
        inputs["messages"] = inputs["transcript"] = sample.episode.messages
    return inputs


def combine_verdicts(verdicts: Sequence[Verdict]) -> Verdict:
    """Returns the sum of several verdicts on one sample, with the first answer, or else the first failure."""
    if failure := next((v for v in verdicts if v.failure), None):
        return failure
    components = {name: score for v in verdicts for name, score in v.components.items()}
    score = sum(v.score for v in verdicts if v.score is not None)
    if not abs(score) <= MAX_REWARD:
        return invalid_verdict(
            f"the weighted sum of {', '.join(components)} is {score}; it must lie within ±{MAX_REWARD:g}."
        )
    return Verdict(score, components, answer=next((v.answer for v in verdicts if v.answer is not None), None))


def has_failure(verdicts: VerdictsByName) -> bool:
    return any(v.failure for v in verdicts.values())


def _calls(reward: WeightedReward, verdicts: list[VerdictsByName]) -> list[list[int]]:
    """The samples of each call of a function, by index: those without a failure, all in one call if it is batched."""
    indices = [i for i, v in enumerate(verdicts) if not has_failure(v)]
    return [indices] if reward.batched and indices else [[i] for i in indices]


def _call_together(
    reward: WeightedReward, inputs: Sequence[RewardInputs], indices: Sequence[int], on_start: OnStart
) -> list[Verdict]:
    def start() -> None:
        on_start(indices, reward.deadline_s)

    start()
    with _restarting(start):
        return _call_reward(reward, [inputs[i] for i in indices])


@contextmanager
def _restarting(restart: Callable[[], None]) -> Iterator[None]:
    """Within it, a function that waits for a lost engine starts its deadline again."""
    before = restart_deadline.set(restart)
    try:
        yield
    finally:
        restart_deadline.reset(before)


def _call_reward(reward: WeightedReward, inputs: Sequence[RewardInputs]) -> list[Verdict]:
    try:
        returned = reward.call(inputs)
        if inspect.isawaitable(returned):  # a plain function that returns a coroutine
            returned = asyncio.run(_as_coroutine(returned))
        return reward.to_verdicts(returned, len(inputs))
    except BaseException as error:  # SystemExit too: a user's function must not end the process unnoticed
        return [reward.error_verdict(error)] * len(inputs)


async def _as_coroutine(awaitable: Any) -> Any:
    return await awaitable


async def _await_reward(
    reward: WeightedReward, inputs: Sequence[RewardInputs], restart: Callable[[], None]
) -> list[Verdict]:
    verdicts = await _await_call(reward, inputs, restart)
    if len(inputs) > 1 and any(v.failure for v in verdicts):  # one sample must not fail the others
        verdicts = [v for i in inputs for v in await _await_call(reward, [i], restart)]
    return verdicts


async def _await_call(
    reward: WeightedReward, inputs: Sequence[RewardInputs], restart: Callable[[], None]
) -> list[Verdict]:
    deadline = asyncio.timeout(reward.deadline_s or None)

    def start_again() -> None:
        if reward.deadline_s and not deadline.expired():
            deadline.reschedule(asyncio.get_running_loop().time() + reward.deadline_s)
        restart()

    try:
        async with deadline:
            with _restarting(start_again):
                return reward.to_verdicts(await reward.call(inputs), len(inputs))
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        timed_out = deadline.expired()
        verdict = timeout_verdict(reward.name, reward.deadline_s) if timed_out else reward.error_verdict(error)
        return [verdict] * len(inputs)
