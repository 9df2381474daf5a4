"""A first look at a data set: what is wrong with every row is said before anything is started."""

from itertools import islice

from rlsys.config.schema import ConfigError
from rlsys.data.origin import Origin, locate_data
from rlsys.data.readers import DataRow, read_rows
from rlsys.data.render import PromptFormat, UnusableRow, compile_template, find_prompt

LOOKED_AT = 100  # rows, where bad ones may be left out


def peek(origin: Origin, form: PromptFormat, on_bad_row: str = "error") -> None:
    """Reads until a row has a prompt. The first that has none is an error, or with `skip` that all of the first have none."""
    if form.template:
        compile_template(form.template, {})
    problems: list[str] = []
    for row in islice(read_rows(origin, locate_data(origin)), LOOKED_AT):
        try:
            if isinstance(row, DataRow):
                find_prompt(row.fields, form.prompt_key)
                return
            problems.append(str(row))
        except UnusableRow as error:
            problems.append(f"{row.location}: {error.detail}")
        if on_bad_row == "error":
            raise ConfigError(problems)
    if len(problems) < LOOKED_AT:  # that was all of it
        raise ConfigError(
            [
                *problems[:10],
                f"{origin.path} holds no prompts; {'none of its rows can be used' if problems else 'it is empty'}.",
            ]
        )
