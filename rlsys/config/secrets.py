"""Secrets come from the environment and go nowhere: what refers to one stays a reference, what looks like one is refused or hidden.

    judge: {api_key: "${oc.env:JUDGE_KEY}"}      the configuration, config.yaml and Ray hold this text
                       │ `given`, in the process that runs the function
                       ▼
    judge(…, api_key="…the value…")              what it raises is `hidden` before it is written anywhere

Values that refer to the environment elsewhere are settled at once: a path or a number is no secret.
"""

import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlsys.config.schema import ConfigError

SHORTEST = 6  # characters: a shorter value would be hidden in half of all words
NAME = re.compile(
    r"api_?key|access_?key|private_?key|secret|passw(or)?d|passphrase|credential|authorization|bearer", re.IGNORECASE
)
TOKEN = re.compile(r"(^|_)token$", re.IGNORECASE)  # also what a text ends with, so its value decides
VARIABLE = re.compile(rf"{NAME.pattern}|{TOKEN.pattern}|_(key|pwd|pass)$", re.IGNORECASE)  # PWD itself is a folder
WHERE = ("_env", "_file")  # ends of names that say where a secret is
RANDOM = re.compile(r"(?=.*\d)[A-Za-z0-9_\-./+=:~]{16,}")
VALUES = {
    "a well-known kind of key": re.compile(
        r"\b(sk-|hf_|gh[opsur]_|github_pat_|glpat-|xox[abprs]-|AIza)[A-Za-z0-9_\-]{16,}|\b(AKIA|ASIA)[A-Z0-9]{16}\b"
        r"|\beyJ[\w\-]{10,}\.eyJ[\w\-]{10,}\.|-----BEGIN [A-Z ]*PRIVATE KEY"
    ),
    "a bearer token": re.compile(r"\b(bearer|basic)\s+[A-Za-z0-9_\-./+=~]{12,}", re.IGNORECASE),
    "a password in an address": re.compile(r"(?<=//)[^/\s:@\"']*:[^/\s@\"']+(?=@)"),
    "a key in an address": re.compile(
        r"(?<=[?&])(api_?key|key|token|access_token|secret|password|sig|signature)=[^&\s\"'<>]{6,}", re.IGNORECASE
    ),
    "an address that is a key itself": re.compile(
        r"\bhooks\.slack\.com/(services|workflows|triggers)/[^\s\"'<>]+|\bdiscord(app)?\.com/api/webhooks/[^\s\"'<>]+"
        r"|\bwebhook\.office\.com/[^\s\"'<>]+",
        re.IGNORECASE,
    ),
}
REFERENCE = re.compile(r"(?<!\\)\$\{oc\.env:\s*([^,}\s]+)")


class EnvReference(str):
    """A text that refers to environment variables, as YAML has it. FromEnvironment("Bearer ${oc.env:JUDGE_KEY}")"""

    __slots__ = ()

    @property
    def value(self) -> str:
        try:
            return str(OmegaConf.create({"value": str(self)})["value"])
        except OmegaConfBaseException:
            missing = next(name for name in self.variables if name not in os.environ)
            raise ConfigError(
                f"the environment variable {missing} is not set; the configuration says {self}."
            ) from None

    @property
    def variables(self) -> list[str]:
        return REFERENCE.findall(self)


def resolve_env(value: Any) -> Any:
    """With the values of what it refers to: only for the process that needs them."""
    if isinstance(value, dict):
        return {k: resolve_env(v) for k, v in value.items()}
    if isinstance(value, list):
        return [resolve_env(v) for v in value]
    return value.value if isinstance(value, EnvReference) else value


def find_secrets(key: str, value: Any) -> list[str]:
    """Sentences about texts that look like secrets, and are none that the environment holds. They do not show them."""
    return [
        f"{redact(place)} holds {what}. What is secret does not belong in a file or on a command line, where others can read it: put it "
        f"into an environment variable, and {_way_out(place)}. Change it where others may have seen it."
        for place, text in _texts(key, value)
        if (what := _looks_like(place, text))
    ]


def is_secret_variable(name: str, value: str) -> bool:
    """Whether a variable's name tells of a secret, whatever its value, or its value looks like one."""
    told = VARIABLE.search(name) and not name.lower().endswith(WHERE)
    return bool(told or _looks_like(name, value))


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield key, str(name)
            yield from _texts(f"{key}.{name}", inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(key, inner)
    elif isinstance(value, str) and not isinstance(value, EnvReference):
        yield key, value


def _looks_like(place: str, text: str) -> str | None:
    name = place.rpartition(".")[2].replace("-", "_")
    if text and not name.lower().endswith(WHERE):
        if NAME.search(name):
            return "what its name calls a secret"
        if TOKEN.search(name) and RANDOM.fullmatch(text):
            return "what looks like a token"
    return next((what for what, pattern in VALUES.items() if pattern.search(text)), None)


def _way_out(place: str) -> str:
    if place.startswith("tracking.to."):
        return "write ${oc.env:ITS_NAME} here (wandb reads WANDB_API_KEY itself, mlflow MLFLOW_TRACKING_TOKEN)"
    if re.match(r"reward\.functions\.|data\.train\..*\.reward\.|eval\.datasets\..*\.reward\.", place):
        return "write ${oc.env:ITS_NAME} here (functions `http` and `judge` also take its name as token_env)"
    return "have the tool that needs it read it there (Hugging Face reads HF_TOKEN)"


def redact(text: str, variables: Iterable[str] = ()) -> str:
    """With *** for the values of these variables, of all others whose names tell of secrets, and for well-known kinds of keys."""
    named = (name for name in os.environ if VARIABLE.search(name))
    for value in sorted({os.environ.get(name, "") for name in (*variables, *named)}, key=len, reverse=True):
        if len(value) >= SHORTEST:
            text = text.replace(value, "***")
    for pattern in VALUES.values():
        text = pattern.sub("***", text)
    return text


def redact_nested(fact: Any) -> Any:
    """`hidden`, for every text in lists and mappings."""
    if isinstance(fact, dict):
        return {k: redact_nested(v) for k, v in fact.items()}
    if isinstance(fact, list | tuple):
        return [redact_nested(v) for v in fact]
    return redact(fact) if isinstance(fact, str) else fact


def referenced_variables(options: Any) -> list[str]:
    """The environment variables that options refer to, or name."""
    if isinstance(options, dict):
        said = [v for k, v in options.items() if str(k).endswith("_env") and isinstance(v, str) and v]
        return said + [name for v in options.values() for name in referenced_variables(v)]
    if isinstance(options, list):
        return [name for v in options for name in referenced_variables(v)]
    return options.variables if isinstance(options, EnvReference) else []
