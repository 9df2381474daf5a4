"""Secrets come from the environment. A reference to one stays a reference; what looks like one is refused or redacted.

    judge: {api_key: "${oc.env:JUDGE_KEY}"}      the configuration, config.yaml and Ray hold this text
                       │ `resolve_env`, in the process that runs the function
                       ▼
    judge(…, api_key="…the value…")              `redact` cleans what it raises before that is written anywhere

References in other options are resolved when the configuration is read: a path or a number is no secret.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlsys.errors import ConfigError

MIN_SECRET_CHARS = 6  # a shorter value would be redacted within ordinary words
SECRET_NAME = re.compile(
    r"api_?key|access_?key|private_?key|secret|passw(or)?d|passphrase|credential|authorization|bearer", re.IGNORECASE
)
TOKEN_NAME = re.compile(r"(^|_)token$", re.IGNORECASE)  # may name an end-of-text token too: the value decides
SECRET_VARIABLE = re.compile(rf"{SECRET_NAME.pattern}|{TOKEN_NAME.pattern}|_(key|pwd|pass)$", re.IGNORECASE)
POINTER_ENDINGS = ("_env", "_file")  # such names say where a secret is
RANDOM_TEXT = re.compile(r"(?=.*\d)[A-Za-z0-9_\-./+=:~]{16,}")
SECRET_VALUES = {
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
    """A text that refers to environment variables, as YAML has it. EnvReference("Bearer ${oc.env:JUDGE_KEY}")"""

    __slots__ = ()

    @property
    def value(self) -> str:
        """The text with the environment's values. Raises `ConfigError` if a variable is not set."""
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


_closed = False


@contextlib.contextmanager
def closed_environment() -> Iterator[None]:
    """Keeps every reference as text: whoever wrote this configuration must not learn the reader's environment."""
    global _closed
    before, _closed = _closed, True
    try:
        yield
    finally:
        _closed = before


def environment_closed() -> bool:
    return _closed


def resolve_env(value: Any) -> Any:
    """Replaces references with the values of the environment: only for the process that needs them."""
    if isinstance(value, dict):
        return {k: resolve_env(v) for k, v in value.items()}
    if isinstance(value, list):
        return [resolve_env(v) for v in value]
    if isinstance(value, EnvReference):
        return str(value) if _closed else value.value
    return value


def find_secrets(key: str, value: Any) -> list[str]:
    """Returns a sentence for each text that looks like a secret and is not a reference. None of them shows the text."""
    return [
        f"{redact(option)} holds {kind}. A secret does not belong in a file or on a command line, where others can "
        f"read it: put it into an environment variable, and {_way_out(option)}. "
        "Change it where others may have seen it."
        for option, text in _texts(key, value)
        if (kind := _secret_kind(option, text))
    ]


def is_secret_variable(name: str, value: str) -> bool:
    """True if an environment variable has the name of a secret, or a value that looks like one."""
    is_named = SECRET_VARIABLE.search(name) and not name.lower().endswith(POINTER_ENDINGS)
    return bool(is_named or _secret_kind(name, value))


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields every text in a value, with the option it stands in."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield key, str(name)
            yield from _texts(f"{key}.{name}", inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(key, inner)
    elif isinstance(value, str) and not isinstance(value, EnvReference):
        yield key, value


def _secret_kind(option: str, text: str) -> str | None:
    """Returns in words what kind of secret the text seems to be, or None."""
    name = option.rpartition(".")[2].replace("-", "_")
    if text and not name.lower().endswith(POINTER_ENDINGS):
        if SECRET_NAME.search(name):
            return "what its name calls a secret"
        if TOKEN_NAME.search(name) and RANDOM_TEXT.fullmatch(text):
            return "what looks like a token"
    return next((kind for kind, pattern in SECRET_VALUES.items() if pattern.search(text)), None)


def _way_out(option: str) -> str:
    if option.startswith("tracking.to."):
        return "write ${oc.env:ITS_NAME} here (wandb reads WANDB_API_KEY itself, mlflow MLFLOW_TRACKING_TOKEN)"
    if re.match(r"reward\.functions\.|data\.train\..*\.reward\.|eval\.datasets\..*\.reward\.", option):
        return "write ${oc.env:ITS_NAME} here (functions `http` and `judge` also take its name as token_env)"
    return "have the tool that needs it read it there (Hugging Face reads HF_TOKEN)"


def redact(text: str, variables: Iterable[str] = ()) -> str:
    """Replaces secrets with ***.

    They are the values of `variables` and of all variables with the name of a secret, and well-known kinds of keys.
    """
    named = (name for name in os.environ if SECRET_VARIABLE.search(name))
    for value in sorted({os.environ.get(name, "") for name in (*variables, *named)}, key=len, reverse=True):
        if len(value) >= MIN_SECRET_CHARS:
            text = text.replace(value, "***")
    for pattern in SECRET_VALUES.values():
        text = pattern.sub("***", text)
    return text


def redact_nested(value: Any) -> Any:
    """Applies `redact` to every text in lists and mappings."""
    if isinstance(value, dict):
        return {k: redact_nested(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redact_nested(v) for v in value]
    return redact(value) if isinstance(value, str) else value


def referenced_variables(options: Any) -> list[str]:
    """Returns the environment variables that options refer to (`${oc.env:NAME}`) or name (`token_env: NAME`)."""
    if isinstance(options, dict):
        named = [v for k, v in options.items() if str(k).endswith("_env") and isinstance(v, str) and v]
        return named + [name for v in options.values() for name in referenced_variables(v)]
    if isinstance(options, list):
        return [name for v in options for name in referenced_variables(v)]
    return options.variables if isinstance(options, EnvReference) else []
