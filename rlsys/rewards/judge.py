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

from rlsys.config.plugins import find, title
from rlsys.config.schema import ConfigError, Function
from rlsys.config.secrets import given, hidden, variables
from rlsys.rewards.functions import CHECKS, REWARDS
from rlsys.rewards.scored import Scored
from rlsys.rewards.settings import deadline
from rlsys.rewards.start import PREPARE
from rlsys.types import Prompt, Sample, Verdict

Facts = dict[str, Any]  # of one sample, by the names that functions ask for
LONGEST = 30_000  # characters of a traceback's beginning, and of its end
PLURAL = {"prompts": "prompt", "completions": "completion", "answers": "answer"}


@dataclass
class Term:
    """One function of the sum. Calls it, and reads what it returned."""

    name: str
    function: Callable[..., Any]
    weight: float
    options: dict[str, Any]
    deadline_s: float  # 0: none
    secret: list[str] = field(default_factory=list)  # environment variables whose values nobody is to read
    batched: bool = field(init=False)
    waits: bool = field(init=False)  # whether it is async
    wanted: dict[str, inspect.Parameter] = field(init=False)
    settled: set[str] = field(init=False)  # what the configuration alone may say

    def __post_init__(self) -> None:
        self.wanted = dict(inspect.signature(self.function).parameters)
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in self.wanted.values())
        self.batched = "completions" in self.wanted
        # Rows come from anywhere: one with a column `isolation` must not choose the sandbox of its program.
        built_in = self.function in REWARDS.values()
        self.settled = {n for n, p in self.wanted.items() if built_in and p.kind is p.KEYWORD_ONLY}
        call = getattr(self.function, "__call__", None)  # noqa: B004  an object may be the function
        self.waits = inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)
        if not self.takes_all and (unheard := sorted(set(self.options) - set(self.wanted))):
            raise ConfigError(
                f"reward.functions.{self.name} has no argument `{unheard[0]}`; it has {', '.join(self.wanted) or 'none'}."
            )

    def call(self, facts: Sequence[Facts]) -> Any:
        """What the function returns for one sample, or for all of them if it is batched."""
        together = self.listed(facts) if self.batched else facts[0]
        wanted = set(together if self.takes_all else self.wanted) - self.settled
        given = {name: fact for name, fact in together.items() if name in wanted} | self.options
        for name in {"answer", "answers"} & {n for n, p in self.wanted.items() if p.default is p.empty} - set(given):
            given[name] = [None] * len(facts) if name == "answers" else None  # the row has none
        missing = [
            n
            for n, p in self.wanted.items()
            if n not in given and p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if missing:
            raise ConfigError(
                f"it asks for {', '.join(missing)}, but a sample has only {', '.join(sorted(together))}. "
                "data.answer_key names the field that is `answer`."
            )
        unnamed = [n for n, p in self.wanted.items() if p.kind is p.POSITIONAL_ONLY and n in given]
        return self.function(*[given.pop(n) for n in unnamed], **given)

    @staticmethod
    def listed(facts: Sequence[Facts]) -> Facts:
        """A list of each fact, by its plural name where it has one; None where a sample has no such fact."""
        names = dict.fromkeys(name for f in facts for name in f)
        plural = {one: many for many, one in PLURAL.items()}
        return {plural.get(name, name): [f.get(name) for f in facts] for name in names}

    def read(self, returned: Any, count: int) -> list[Verdict]:
        """Verdicts from what the function returned for so many samples."""
        if not self.batched:
            return [self.verdict(returned)]
        try:
            found = list(returned)
        except TypeError:
            return [self.invalid(f"{self.name} returned {returned!r:.80}; a batched function returns a list.")] * count
        if len(found) != count:
            return [self.invalid(f"{self.name} returned {len(found)} rewards for {count} samples.")] * count
        return [self.verdict(value) for value in found]

    def verdict(self, result: Any) -> Verdict:
        parts, answer = {self.name: result}, result.answer if isinstance(result, Scored) else None
        if isinstance(result, dict):
            result = dict(result)
            answer = result.pop("answer", None)
            bare = list(result) == ["score"]
            parts = {self.name: result["score"]} if bare else {_clean(f"{self.name}/{k}"): v for k, v in result.items()}
            if not parts:
                return self.invalid(f"{self.name} returned a dict without numbers.")
        components: dict[str, float] = {}
        for part, value in parts.items():
            try:
                score = float(value)
            except Exception:  # whatever the value's own __float__ raises
                return self.invalid(f"{part} returned {_shown(value)}; a reward is a number.")
            if isinstance(value, str | bytes | bytearray) or not math.isfinite(score):
                return self.invalid(f"{part} returned {_shown(value)}; a reward must be a finite number.")
            components[part] = score
        return Verdict(
            self.weight * sum(components.values()), components, answer=None if answer is None else _clean(str(answer))
        )

    @staticmethod
    def invalid(sentence: str) -> Verdict:
        return Verdict(None, failure="invalid", detail=_clean(sentence))

    def failed(self, error: BaseException) -> Verdict:
        if isinstance(error, MemoryError):
            traceback.clear_frames(error.__traceback__)  # what filled the memory goes, or no word could be said of it
        reason = "memory" if isinstance(error, MemoryError) else "exception"
        trace = "".join(traceback.format_exception(error))
        detail = f"{self.name}: {type(error).__name__}: {_said(error)[:LONGEST]}\n{trace}"
        if len(detail) > 2 * LONGEST:
            detail = f"{detail[:LONGEST]}\n…\n{detail[-LONGEST:]}"
        return Verdict(None, failure=reason, detail=_clean(hidden(detail, self.secret)))


# Which samples are being judged from now on, and for how many seconds at most
Now = Callable[[Sequence[int], float], None]


class Judge:
    """`Judge({"exact": Function(function="exact")})`; it loads what its functions need."""

    def __init__(self, functions: dict[str, Function], *, timeout_s: float = 0.0):
        self.terms = []
        for name, f in functions.items():
            options = given(f.options)
            if f.function in CHECKS:
                CHECKS[f.function](options)
            function = find(f.function, REWARDS, "reward.functions")
            secret = variables(f.options)
            self.terms.append(Term(title(name), function, f.weight, options, deadline(f, timeout_s), secret))
            if f.function in PREPARE:
                PREPARE[f.function](options)
        self.at_once = [t for t in self.terms if not t.waits]
        self.later = [t for t in self.terms if t.waits]
        self.batched = any(t.batched for t in self.terms)

    def __call__(self, facts: Facts) -> Verdict:
        """The verdict on one sample, here and now."""
        [parts] = self.judge([facts])
        if self.later and not failed(parts):
            [parts] = asyncio.run(self.finish([facts], [parts]))
        return self.total(parts)

    def judge(self, facts: Sequence[Facts], now: Now = lambda *_: None) -> list[dict[str, Verdict]]:
        """What every function that is not async says of each sample, by name."""
        parts: list[dict[str, Verdict]] = [{} for _ in facts]
        for term in self.at_once:
            rest = [i for i, p in enumerate(parts) if not failed(p)]
            for share in [rest] if term.batched and rest else [[i] for i in rest]:
                now(share, term.deadline_s)
                verdicts = _called(term, [facts[i] for i in share])
                if len(share) > 1 and any(v.failure for v in verdicts):  # one must not take the others down
                    verdicts = [self.alone(term, facts[i], i, now) for i in share]
                for i, verdict in zip(share, verdicts, strict=True):
                    parts[i][term.name] = verdict
        return parts

    @staticmethod
    def alone(term: Term, facts: Facts, i: int, now: Now) -> Verdict:
        now([i], term.deadline_s)
        return _called(term, [facts])[0]

    async def finish(self, facts: Sequence[Facts], parts: list[dict[str, Verdict]]) -> list[dict[str, Verdict]]:
        """The same with what every async function says, each under its own deadline."""
        for term in self.later:
            rest = [i for i, p in enumerate(parts) if not failed(p)]
            shares = [rest] if term.batched and rest else [[i] for i in rest]
            found = await asyncio.gather(*(self._awaited(term, [facts[i] for i in share]) for share in shares))
            for share, verdicts in zip(shares, found, strict=True):
                for i, verdict in zip(share, verdicts, strict=True):
                    parts[i][term.name] = verdict
        return parts

    async def _awaited(self, term: Term, facts: Sequence[Facts]) -> list[Verdict]:
        verdicts = await self._once(term, facts)
        if len(facts) > 1 and any(v.failure for v in verdicts):
            verdicts = [v for f in facts for v in await self._once(term, [f])]
        return verdicts

    @staticmethod
    async def _once(term: Term, facts: Sequence[Facts]) -> list[Verdict]:
        deadline = asyncio.timeout(term.deadline_s or None)
        try:
            async with deadline:
                return term.read(await term.call(facts), len(facts))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return [late(term.name, term.deadline_s) if deadline.expired() else term.failed(error)] * len(facts)

    @property
    def patience(self) -> float:
        """Seconds that `finish` takes at most: a batch that failed is judged again, one by one."""
        return sum(t.deadline_s * (2 if t.batched else 1) for t in self.later)

    def total(self, parts: dict[str, Verdict]) -> Verdict:
        """One verdict of all functions' verdicts: their sum, or the first failure."""
        return combined([parts[t.name] for t in self.terms if t.name in parts])


def facts(prompt: Prompt, sample: Sample) -> Facts:
    """What a reward function may ask for."""
    return prompt.row | {
        "prompt": prompt.text,
        "completion": sample.text,
        "finish": sample.finish,
        "tokens": len(sample.tokens),
        "messages": prompt.messages,
        "source": prompt.source,
    }


def combined(verdicts: Sequence[Verdict]) -> Verdict:
    """The sum of several verdicts on one sample, or the first failure. The first answer that one names is the sample's."""
    if failure := next((v for v in verdicts if v.failure), None):
        return failure
    components = {name: score for v in verdicts for name, score in v.components.items()}
    score = sum(v.score for v in verdicts if v.score is not None)
    if not math.isfinite(score):
        return Term.invalid(f"the weighted sum of {', '.join(components)} is {score}.")
    return Verdict(score, components, answer=next((v.answer for v in verdicts if v.answer is not None), None))


def failed(parts: dict[str, Verdict]) -> bool:
    return any(v.failure for v in parts.values())


def late(what: str, timeout_s: float) -> Verdict:
    return Verdict(
        None,
        failure="timeout",
        detail=f"{what}: no verdict after {timeout_s:g} s (reward.timeout_s, or its deadline_s)",
    )


def _called(term: Term, facts: Sequence[Facts]) -> list[Verdict]:
    try:
        returned = term.call(facts)
        if inspect.isawaitable(returned):  # a plain function that returns a coroutine
            returned = asyncio.run(_await(returned))
        return term.read(returned, len(facts))
    except BaseException as error:  # SystemExit too: a user's function must not end the process unseen
        return [term.failed(error)] * len(facts)


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
