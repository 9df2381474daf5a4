"""One reward function with its weight: calls it with what it asks for, and turns what it returns into verdicts."""

import inspect
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlsys.config.secrets import redact
from rlsys.errors import ConfigError
from rlsys.rewards.answer_score import AnswerScore
from rlsys.rewards.asking import Ask
from rlsys.rewards.functions import REWARDS
from rlsys.types import Verdict

RewardInputs = dict[str, Any]  # of one sample, by the names that functions ask for
MAX_COMPONENTS = 100  # of a sample
MAX_DETAIL_CHARS = 30_000  # of a traceback's beginning, and of its end
PLURAL = {"prompt": "prompts", "completion": "completions", "answer": "answers"}


@dataclass
class WeightedReward:
    """WeightedReward("exact", text.exact, weight=1.0, options={"ignore_case": True}, deadline_s=10.0)"""

    name: str
    function: Callable[..., Any]
    weight: float
    options: dict[str, Any]
    deadline_s: float  # 0: none
    ask: Ask | None = None  # for functions with an argument of this name; None: there is no model to ask
    secret_variables: list[str] = field(default_factory=list)  # environment variables whose values no message may show
    batched: bool = field(init=False)
    is_async: bool = field(init=False)
    parameters: dict[str, inspect.Parameter] = field(init=False)
    config_only: set[str] = field(init=False)  # parameters that a data row cannot set

    def __post_init__(self) -> None:
        self.parameters = dict(inspect.signature(self.function).parameters)
        self.accepts_all = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())
        self.batched = "completions" in self.parameters
        # Rows come from anywhere: one with a column `isolation` must not choose the sandbox of its program.
        built_in = self.function in REWARDS.values()
        self.config_only = {n for n, p in self.parameters.items() if built_in and p.kind is p.KEYWORD_ONLY}
        call = getattr(self.function, "__call__", None)  # noqa: B004  an object may be the function
        self.is_async = inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)
        if not self.accepts_all and (unknown := sorted(set(self.options) - set(self.parameters))):
            raise ConfigError(
                f"reward.functions.{self.name} has no argument `{unknown[0]}`; it has "
                f"{', '.join(self.parameters) or 'none'}."
            )

    def call(self, inputs: Sequence[RewardInputs]) -> Any:
        """Returns what the function returns for one sample, or for all of them if it is batched."""
        available = as_columns(inputs) if self.batched else inputs[0]
        wanted = set(available if self.accepts_all else self.parameters) - self.config_only
        arguments = {name: value for name, value in available.items() if name in wanted} | self.options
        if self.ask and "ask" in self.parameters:
            arguments["ask"] = self.ask
        required = {n for n, p in self.parameters.items() if p.default is p.empty}
        for name in {"answer", "answers"} & required - set(arguments):
            arguments[name] = [None] * len(inputs) if name == "answers" else None  # the row has none
        self.require_arguments(required - set(arguments), sorted(available))
        positional = [n for n, p in self.parameters.items() if p.kind is p.POSITIONAL_ONLY and n in arguments]
        return self.function(*[arguments.pop(n) for n in positional], **arguments)

    def require_arguments(self, missing: set[str], available: list[str]) -> None:
        """Raises `ConfigError` if an argument is missing, other than `*args` and `**kwargs`."""
        names = [
            n for n, p in self.parameters.items() if n in missing and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if "ask" in names:
            raise ConfigError("it has an argument `ask`, and the configuration names no model in `models` to be asked.")
        if names:
            raise ConfigError(
                f"it asks for {', '.join(names)}, but a sample has only {', '.join(available)}. "
                "data.answer_key names the field that is `answer`."
            )

    def to_verdicts(self, returned: Any, count: int) -> list[Verdict]:
        """Reads what the function returned for `count` samples."""
        if not self.batched:
            return [self.to_verdict(returned)]
        try:
            scores = list(returned)
        except TypeError:
            problem = f"{self.name} returned {returned!r:.80}; a batched function returns a list."
            return [invalid_verdict(problem)] * count
        if len(scores) != count:
            return [invalid_verdict(f"{self.name} returned {len(scores)} rewards for {count} samples.")] * count
        return [self.to_verdict(score) for score in scores]

    def to_verdict(self, returned: Any) -> Verdict:
        return read_verdict(self.name, self.weight, returned)

    def error_verdict(self, error: BaseException) -> Verdict:
        """The verdict on a sample for which the function raised."""
        return exception_verdict(self.name, error, self.secret_variables)


def read_verdict(name: str, weight: float, returned: Any) -> Verdict:
    """Reads a number, or a dict of named numbers, perhaps with the `answer` that the function saw."""
    values, answer = {name: returned}, returned.answer if isinstance(returned, AnswerScore) else None
    if isinstance(returned, dict):
        named = dict(returned)
        answer = named.pop("answer", None)
        only_score = list(named) == ["score"]
        values = {name: named["score"]} if only_score else {storable_text(f"{name}/{k}"): v for k, v in named.items()}
        if not values:
            return invalid_verdict(f"{name} returned a dict without numbers.")
        if len(values) > MAX_COMPONENTS:
            return invalid_verdict(
                f"{name} returned a dict of {len(values):,} numbers. Each becomes a metric: return at most {MAX_COMPONENTS}."
            )
    components: dict[str, float] = {}
    for component, value in values.items():
        try:
            number = float(value)
        except Exception:  # whatever the value's own __float__ raises
            return invalid_verdict(f"{component} returned {show(value)}; a reward is a number.")
        if isinstance(value, str | bytes | bytearray) or not math.isfinite(number):
            return invalid_verdict(f"{component} returned {show(value)}; a reward must be a finite number.")
        components[component] = number
    score = weight * sum(components.values())
    return Verdict(score, components, answer=None if answer is None else storable_text(str(answer)))


def exception_verdict(name: str, error: BaseException, secret_variables: Sequence[str]) -> Verdict:
    """The verdict where the function `name` raised."""
    out_of_memory = isinstance(error, MemoryError)
    if out_of_memory:
        traceback.clear_frames(error.__traceback__)  # frees what filled the memory, to make room for the text
    trace = "".join(traceback.format_exception(error))
    detail = f"{name}: {type(error).__name__}: {_message(error)[:MAX_DETAIL_CHARS]}\n{trace}"
    if len(detail) > 2 * MAX_DETAIL_CHARS:
        detail = f"{detail[:MAX_DETAIL_CHARS]}\n…\n{detail[-MAX_DETAIL_CHARS:]}"
    failure = "memory" if out_of_memory else "exception"
    return Verdict(None, failure=failure, detail=storable_text(redact(detail, secret_variables)))


def as_columns(inputs: Sequence[RewardInputs]) -> RewardInputs:
    """Returns a list per field, under its plural name where it has one; None where a sample lacks the field."""
    names = dict.fromkeys(name for i in inputs for name in i)
    return {PLURAL.get(name, name): [i.get(name) for i in inputs] for name in names}


def invalid_verdict(sentence: str) -> Verdict:
    return Verdict(None, failure="invalid", detail=storable_text(sentence))


def timeout_verdict(name: str, timeout_s: float) -> Verdict:
    return Verdict(
        None,
        failure="timeout",
        detail=f"{name}: no verdict after {timeout_s:g} s (reward.timeout_s, or its deadline_s)",
    )


def storable_text(text: str) -> str:
    """Replaces halves of surrogate pairs, which no file can hold."""
    return text.encode(errors="replace").decode()


def show(value: Any) -> str:
    try:
        return repr(value)[:200]
    except Exception:
        return f"a {type(value).__name__}"


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:
        return "(it cannot be shown)"
