"""Turns weighted reward functions into verdicts. Nothing a function does raises through it.

A function is one of three kinds, which its signature tells:

    def f(completion, …)           judges one sample at a time
    async def f(completion, …)     judges many at the same time, each on its own
    def f(completions, …)          batched, async or not: judges a list at once, and returns as many scores
"""

import asyncio
import inspect
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlsys.config.plugins import load_function, short_name
from rlsys.config.schema import ConfigError, RewardFunction
from rlsys.config.secrets import redact, referenced_variables, resolve_env
from rlsys.rewards.answer_score import AnswerScore
from rlsys.rewards.functions import CHECKS, REWARDS
from rlsys.rewards.settings import function_deadline
from rlsys.rewards.start import PREPARE
from rlsys.types import Prompt, Sample, Verdict

RewardInputs = dict[str, Any]  # of one sample, by the names that functions ask for
MAX_DETAIL_CHARS = 30_000  # characters of a traceback's beginning, and of its end
PLURAL = {"prompts": "prompt", "completions": "completion", "answers": "answer"}


@dataclass
class WeightedReward:
    """One function of the sum. Calls it, and reads what it returned."""

    name: str
    function: Callable[..., Any]
    weight: float
    options: dict[str, Any]
    deadline_s: float  # 0: none
    secret_variables: list[str] = field(default_factory=list)  # environment variables whose values nobody is to read
    batched: bool = field(init=False)
    is_async: bool = field(init=False)  # whether it is async
    parameters: dict[str, inspect.Parameter] = field(init=False)
    config_only: set[str] = field(init=False)  # what the configuration alone may say

    def __post_init__(self) -> None:
        self.parameters = dict(inspect.signature(self.function).parameters)
        self.accepts_all = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())
        self.batched = "completions" in self.parameters
        # Rows come from anywhere: one with a column `isolation` must not choose the sandbox of its program.
        built_in = self.function in REWARDS.values()
        self.config_only = {n for n, p in self.parameters.items() if built_in and p.kind is p.KEYWORD_ONLY}
        call = getattr(self.function, "__call__", None)  # noqa: B004  an object may be the function
        self.is_async = inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)
        if not self.accepts_all and (unheard := sorted(set(self.options) - set(self.parameters))):
            raise ConfigError(
                f"reward.functions.{self.name} has no argument `{unheard[0]}`; it has {', '.join(self.parameters) or 'none'}."
            )

    def call(self, facts: Sequence[RewardInputs]) -> Any:
        """What the function returns for one sample, or for all of them if it is batched."""
        together = self.as_columns(facts) if self.batched else facts[0]
        wanted = set(together if self.accepts_all else self.parameters) - self.config_only
        given = {name: fact for name, fact in together.items() if name in wanted} | self.options
        for name in {"answer", "answers"} & {n for n, p in self.parameters.items() if p.default is p.empty} - set(
            given
        ):
            given[name] = [None] * len(facts) if name == "answers" else None  # the row has none
        missing = [
            n
            for n, p in self.parameters.items()
            if n not in given and p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if missing:
            raise ConfigError(
                f"it asks for {', '.join(missing)}, but a sample has only {', '.join(sorted(together))}. "
                "data.answer_key names the field that is `answer`."
            )
        unnamed = [n for n, p in self.parameters.items() if p.kind is p.POSITIONAL_ONLY and n in given]
        return self.function(*[given.pop(n) for n in unnamed], **given)

    @staticmethod
    def as_columns(facts: Sequence[RewardInputs]) -> RewardInputs:
        """A list of each fact, by its plural name where it has one; None where a sample has no such fact."""
        names = dict.fromkeys(name for f in facts for name in f)
        plural = {one: many for many, one in PLURAL.items()}
        return {plural.get(name, name): [f.get(name) for f in facts] for name in names}

    def to_verdicts(self, returned: Any, count: int) -> list[Verdict]:
        """Verdicts from what the function returned for so many samples."""
        if not self.batched:
            return [self.to_verdict(returned)]
        try:
            found = list(returned)
        except TypeError:
            return [
                self.invalid_verdict(f"{self.name} returned {returned!r:.80}; a batched function returns a list.")
            ] * count
        if len(found) != count:
            return [self.invalid_verdict(f"{self.name} returned {len(found)} rewards for {count} samples.")] * count
        return [self.to_verdict(value) for value in found]

    def to_verdict(self, result: Any) -> Verdict:
        parts, answer = {self.name: result}, result.answer if isinstance(result, AnswerScore) else None
        if isinstance(result, dict):
            result = dict(result)
            answer = result.pop("answer", None)
            bare = list(result) == ["score"]
            parts = {self.name: result["score"]} if bare else {_clean(f"{self.name}/{k}"): v for k, v in result.items()}
            if not parts:
                return self.invalid_verdict(f"{self.name} returned a dict without numbers.")
        components: dict[str, float] = {}
        for part, value in parts.items():
            try:
                score = float(value)
            except Exception:  # whatever the value's own __float__ raises
                return self.invalid_verdict(f"{part} returned {_shown(value)}; a reward is a number.")
            if isinstance(value, str | bytes | bytearray) or not math.isfinite(score):
                return self.invalid_verdict(f"{part} returned {_shown(value)}; a reward must be a finite number.")
            components[part] = score
        return Verdict(
            self.weight * sum(components.values()), components, answer=None if answer is None else _clean(str(answer))
        )

    @staticmethod
    def invalid_verdict(sentence: str) -> Verdict:
        return Verdict(None, failure="invalid", detail=_clean(sentence))

    def error_verdict(self, error: BaseException) -> Verdict:
        if isinstance(error, MemoryError):
            traceback.clear_frames(error.__traceback__)  # what filled the memory goes, or no word could be said of it
        reason = "memory" if isinstance(error, MemoryError) else "exception"
        trace = "".join(traceback.format_exception(error))
        detail = f"{self.name}: {type(error).__name__}: {_said(error)[:MAX_DETAIL_CHARS]}\n{trace}"
        if len(detail) > 2 * MAX_DETAIL_CHARS:
            detail = f"{detail[:MAX_DETAIL_CHARS]}\n…\n{detail[-MAX_DETAIL_CHARS:]}"
        return Verdict(None, failure=reason, detail=_clean(redact(detail, self.secret_variables)))


# Which samples are being judged from now on, and for how many seconds at most
OnStart = Callable[[Sequence[int], float], None]


class Judge:
    """`Judge({"exact": Function(function="exact")})`; it loads what its functions need."""

    def __init__(self, functions: dict[str, RewardFunction], *, timeout_s: float = 0.0):
        self.rewards = []
        for name, f in functions.items():
            options = resolve_env(f.options)
            if f.function in CHECKS:
                CHECKS[f.function](options)
            function = load_function(f.function, REWARDS, "reward.functions")
            secret = referenced_variables(f.options)
            self.rewards.append(
                WeightedReward(short_name(name), function, f.weight, options, function_deadline(f, timeout_s), secret)
            )
            if f.function in PREPARE:
                PREPARE[f.function](options)
        self.sync_rewards = [t for t in self.rewards if not t.is_async]
        self.async_rewards = [t for t in self.rewards if t.is_async]
        self.batched = any(t.batched for t in self.rewards)

    def __call__(self, facts: RewardInputs) -> Verdict:
        """The verdict on one sample, here and now."""
        [parts] = self.judge_sync([facts])
        if self.async_rewards and not has_failure(parts):
            [parts] = asyncio.run(self.judge_async([facts], [parts]))
        return self.combine(parts)

    def judge_sync(self, facts: Sequence[RewardInputs], now: OnStart = lambda *_: None) -> list[dict[str, Verdict]]:
        """What every function that is not async says of each sample, by name."""
        parts: list[dict[str, Verdict]] = [{} for _ in facts]
        for term in self.sync_rewards:
            rest = [i for i, p in enumerate(parts) if not has_failure(p)]
            for share in [rest] if term.batched and rest else [[i] for i in rest]:
                now(share, term.deadline_s)
                verdicts = _called(term, [facts[i] for i in share])
                if len(share) > 1 and any(v.failure for v in verdicts):  # one must not take the others down
                    verdicts = [self.judge_alone(term, facts[i], i, now) for i in share]
                for i, verdict in zip(share, verdicts, strict=True):
                    parts[i][term.name] = verdict
        return parts

    @staticmethod
    def judge_alone(term: WeightedReward, facts: RewardInputs, i: int, now: OnStart) -> Verdict:
        now([i], term.deadline_s)
        return _called(term, [facts])[0]

    async def judge_async(
        self, facts: Sequence[RewardInputs], parts: list[dict[str, Verdict]]
    ) -> list[dict[str, Verdict]]:
        """The same with what every async function says, each under its own deadline."""
        for term in self.async_rewards:
            rest = [i for i, p in enumerate(parts) if not has_failure(p)]
            shares = [rest] if term.batched and rest else [[i] for i in rest]
            found = await asyncio.gather(*(self._awaited(term, [facts[i] for i in share]) for share in shares))
            for share, verdicts in zip(shares, found, strict=True):
                for i, verdict in zip(share, verdicts, strict=True):
                    parts[i][term.name] = verdict
        return parts

    async def _awaited(self, term: WeightedReward, facts: Sequence[RewardInputs]) -> list[Verdict]:
        verdicts = await self._once(term, facts)
        if len(facts) > 1 and any(v.failure for v in verdicts):
            verdicts = [v for f in facts for v in await self._once(term, [f])]
        return verdicts

    @staticmethod
    async def _once(term: WeightedReward, facts: Sequence[RewardInputs]) -> list[Verdict]:
        deadline = asyncio.timeout(term.deadline_s or None)
        try:
            async with deadline:
                return term.to_verdicts(await term.call(facts), len(facts))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return [
                timeout_verdict(term.name, term.deadline_s) if deadline.expired() else term.error_verdict(error)
            ] * len(facts)

    @property
    def async_limit_s(self) -> float:
        """Seconds that `finish` takes at most: a batch that failed is judged again, one by one."""
        return sum(t.deadline_s * (2 if t.batched else 1) for t in self.async_rewards)

    def combine(self, parts: dict[str, Verdict]) -> Verdict:
        """One verdict of all functions' verdicts: their sum, or the first failure."""
        return combine_verdicts([parts[t.name] for t in self.rewards if t.name in parts])


def reward_inputs(prompt: Prompt, sample: Sample) -> RewardInputs:
    """What a reward function may ask for."""
    return prompt.row | {
        "prompt": prompt.text,
        "completion": sample.text,
        "finish": sample.finish,
        "tokens": len(sample.tokens),
        "messages": prompt.messages,
        "source": prompt.source,
    }


def combine_verdicts(verdicts: Sequence[Verdict]) -> Verdict:
    """The sum of several verdicts on one sample, or the first failure. The first answer that one names is the sample's."""
    if failure := next((v for v in verdicts if v.failure), None):
        return failure
    components = {name: score for v in verdicts for name, score in v.components.items()}
    score = sum(v.score for v in verdicts if v.score is not None)
    if not math.isfinite(score):
        return WeightedReward.invalid_verdict(f"the weighted sum of {', '.join(components)} is {score}.")
    return Verdict(score, components, answer=next((v.answer for v in verdicts if v.answer is not None), None))


def has_failure(parts: dict[str, Verdict]) -> bool:
    return any(v.failure for v in parts.values())


def timeout_verdict(what: str, timeout_s: float) -> Verdict:
    return Verdict(
        None,
        failure="timeout",
        detail=f"{what}: no verdict after {timeout_s:g} s (reward.timeout_s, or its deadline_s)",
    )


def _called(term: WeightedReward, facts: Sequence[RewardInputs]) -> list[Verdict]:
    try:
        returned = term.call(facts)
        if inspect.isawaitable(returned):  # a plain function that returns a coroutine
            returned = asyncio.run(_await(returned))
        return term.to_verdicts(returned, len(facts))
    except BaseException as error:  # SystemExit too: a user's function must not end the process unseen
        return [term.error_verdict(error)] * len(facts)


async def _await(awaitable: Any) -> Any:
    return await awaitable


def _shown(value: Any) -> str:
    try:
        return repr(value)[:200]
    except Exception:
        return f"a {type(value).__name__}"


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:
        return "(it cannot be shown)"


def _clean(text: str) -> str:
    """Without the halves of characters that no file can hold."""
    return text.encode(errors="replace").decode()
