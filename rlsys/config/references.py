"""References to the environment, `${oc.env:NAME}`: kept as text while OmegaConf resolves everything else.

api_key: "${oc.env:KEY}" ──resolved──▶ "\\0oc.env:KEY\\0" ──restored──▶ EnvReference("${oc.env:KEY}")
"""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from rlsys.config.secrets import EnvReference, environment_closed, resolve_env

MARK = re.compile("\0oc\\.env:([^\0]+)\0")  # stands for a reference in a resolved text


@contextlib.contextmanager
def keep_references() -> Iterator[None]:
    """Replaces OmegaConf's resolvers: what it resolves meanwhile has marks in place of the environment's values."""
    from omegaconf.resolvers import oc

    def replace_marks(text: Any) -> Any:
        if not isinstance(text, str) or environment_closed():
            return text
        return MARK.sub(lambda mark: oc.env(mark[1]), text)

    def env(name: str, *default: Any) -> Any:
        name = replace_marks(name)
        uses_default = default and not environment_closed() and name not in os.environ
        return oc.env(name, *default) if uses_default else f"\0oc.env:{name}\0"

    def decode(text: str | None, _parent_: Any, _node_: Any) -> Any:
        return text if environment_closed() else oc.decode(replace_marks(text), _parent_, _node_)

    OmegaConf.register_resolver("oc.env", env, replace=True)
    OmegaConf.register_resolver("oc.decode", decode, replace=True, annotation_validation="off")
    try:
        yield
    finally:
        OmegaConf.register_resolver("oc.env", oc.env, replace=True, annotation_validation="off")
        OmegaConf.register_resolver("oc.decode", oc.decode, replace=True, annotation_validation="off")


def restore_references(value: Any) -> Any:
    """Turns marks into references again.  "Bearer \\0oc.env:KEY\\0" -> EnvReference("Bearer ${oc.env:KEY}")"""
    if isinstance(value, dict):
        return {resolve_env(restore_references(k)): restore_references(v) for k, v in value.items()}
    if isinstance(value, list):
        return [restore_references(v) for v in value]
    if not isinstance(value, str) or not MARK.search(value):
        return value
    parts = MARK.split(value)  # text, name, text, name, …, text
    # Before a reference, OmegaConf reads two backslashes as one.
    texts = [re.sub(r"(\\+)$", r"\1\1", escape_references(text)) for text in parts[:-1:2]]
    references = [f"{text}${{oc.env:{name}}}" for text, name in zip(texts, parts[1::2], strict=True)]
    return EnvReference("".join(references) + escape_references(parts[-1]))


def escape_references(value: Any) -> Any:
    """Returns what OmegaConf reads as this value: `${` in a text then refers to nothing.  "${x}" -> "\\${x}" """
    if isinstance(value, dict):
        return {k: escape_references(v) for k, v in value.items()}
    if isinstance(value, list):
        return [escape_references(v) for v in value]
    if isinstance(value, EnvReference):
        return str(value)
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
