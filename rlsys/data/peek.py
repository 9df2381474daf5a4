"""A first look at a data set: a problem that all rows share is reported before anything starts."""

from itertools import islice

from rlsys.data.origin import Origin, locate_data
from rlsys.data.readers import read_rows
from rlsys.data.readers.rows import DataRow
from rlsys.data.render import (
    PromptFormat,
    UnusableRow,
    compile_template,
    find_prompt,
    require_no_answer,
    split_conversation,
)
from rlsys.errors import ConfigError

MAX_ROWS = 100  # that are looked at, where bad ones may be skipped


def peek(origin: Origin, form: PromptFormat, on_bad_row: str = "error") -> None:
    """Reads until a row has a prompt.

    Raises `ConfigError` for the first row without one, or with `on_bad_row` skip if none of the first rows has one.
    """
    if form.template:
        compile_template(form, {})
    problems: list[str] = []
    for row in islice(read_rows(origin, locate_data(origin)), MAX_ROWS):
        try:
            if isinstance(row, DataRow):
                if form.required and isinstance(prompt := find_prompt(row.fields, form.prompt_key), list):
                    require_no_answer(split_conversation(prompt)[0] if form.supervised else prompt, form)
                return
            problems.append(str(row))
        except UnusableRow as error:
            problems.append(f"{row.location}: {error.detail}")
        if on_bad_row == "error":
            raise ConfigError(problems)
    if len(problems) < MAX_ROWS:  # the data set has no more rows
        reason = "none of its rows can be used" if problems else "it is empty"
        raise ConfigError([*problems[:10], f"{origin.path} holds no prompts; {reason}."])
