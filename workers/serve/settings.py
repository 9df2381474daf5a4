"""How a model is asked, from a run's configuration."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Settings("demo", sampling={"temperature": 1.0, "max_tokens": 10})"""

    name: str  # of the model, as clients give it
    template: str = ""  # Jinja text; empty: the tokenizer's own
    template_options: dict[str, Any] = field(default_factory=dict)
    tool_parser: str = ""  # vLLM's; empty: the model is given no tools
    reasoning_parser: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)  # for what a request leaves open
    stop: list[str] = field(default_factory=list)  # for a request without stop strings
