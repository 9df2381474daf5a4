"""Arguments and option types that several commands share."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

CONFIG = click.argument("config", type=click.Path())
OPTIONAL_CONFIG = click.argument("config", type=click.Path(), required=False)
OVERRIDES = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
POSITIVE = click.IntRange(1)
Command = TypeVar("Command", bound=Callable[..., Any])


def json_option(help: str = "Write the figures to this file.") -> Callable[[Command], Command]:
    return click.option("--json", type=click.Path(), help=help)


class Names(click.ParamType[list[str]]):
    """`a,b`: names, with commas between them."""

    name = "names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        names = value if isinstance(value, list) else [name.strip() for name in value.split(",")]
        if not all(names):
            self.fail(f"{value} has an empty name. Give names such as A,B.", param, ctx)
        return list(dict.fromkeys(names))


class MeanAndMaximum(click.ParamType[tuple[float, int]]):
    """`60,128`: the mean and the maximum length of completions, in tokens."""

    name = "mean,max"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, int]:
        if isinstance(value, tuple):
            return value
        mean, _, maximum = value.partition(",")
        try:
            return float(mean), int(maximum)
        except ValueError:
            self.fail(f"{value} is not a mean and a maximum, as in --ragged 60,128.", param, ctx)


class GpuCount(click.IntRange):
    """A number of GPUs. For a value with a kind, such as 8xH100, it names the option to use for the kind."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        count, separator, kind = str(value).partition("x")
        if separator and count.isdecimal():
            self.fail(f"{value} includes the kind of GPU. Use --gpus {count} --gpu {kind}.", param, ctx)
        return super().convert(value, param, ctx)
