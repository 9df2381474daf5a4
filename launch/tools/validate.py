"""`rlsys validate`: what is wrong with a configuration, or its arithmetic; and the list of all options."""

from rich.console import Console
from rich.table import Table

from launch.printing import make_table, print_line, print_unwrapped, text_column
from launch.tools.estimates.batch_math import batch_rows, dataset_rows, method_rows, process_rows
from launch.tools.local_data import find_missing_bos, find_missing_end, first_prompts
from rlsys.checks import check
from rlsys.checks.notes import find_notes
from rlsys.checks.unused import find_unused_options
from rlsys.config.loading import defaults, gpu_defaults, load_config
from rlsys.config.option_comments import option_comments
from rlsys.config.schema import Config
from rlsys.config.shorthand import ENTRY_TYPES
from rlsys.config.threads import AUTO_OPTIONS
from rlsys.errors import ConfigError
from rlsys.models.lookup import known_model_shape
from rlsys.tracking.builtin import missing_libraries


def validate(path: str, overrides: tuple[str, ...], console: Console, *, show: int = 0) -> None:
    """Prints the arithmetic of a valid configuration. Raises `ConfigError` otherwise. `show`: so many prompts too."""
    config = load_config(path, overrides)
    if problems := check(config, known_model_shape(config.model.path)):
        raise ConfigError(problems)
    if problems := missing_libraries(config.tracking):
        raise ConfigError(problems)
    print_overview(config, path, console)
    warnings = [find_unused_options, find_notes, find_missing_bos, find_missing_end]
    for warning in [text for find in warnings for text in find(config)]:
        print_line(console, f"warning: {warning}", "yellow")
    if show:
        print_prompts(config, console, show)


def print_prompts(config: Config, console: Console, count: int) -> None:
    """The first prompts of each data set: text, tokens one by one, which of them are learned, and what is odd about them."""
    for prompt in first_prompts(config, count):
        print_line(console, f"\n{prompt.name}, {len(prompt.tokens)} tokens", "bold")
        print_line(console, prompt.text)
        print_line(console, " ".join(map(repr, prompt.tokens)), "dim")
        for read, learned in prompt.turns:
            if read:
                print_line(console, f"read, {len(read)} tokens: {' '.join(map(repr, read))}", "dim")
            print_line(console, f"learned, {len(learned)} tokens: {' '.join(map(repr, learned))}", "green")
        for note in prompt.notes:
            print_line(console, f"warning: {note}", "yellow")


def print_overview(config: Config, path: str, console: Console) -> None:
    batch = batch_table(config, title="Batch arithmetic")
    methods = make_table("", text_column(""), title="\nMethod", show_header=False)
    for part, choice in method_rows(config):
        methods.add_row(part, choice)
    data = make_table("for", text_column("set"), text_column("how", "dim"), text_column("reward"), title="\nData")
    for row in dataset_rows(config):
        data.add_row(*row)
    roles = make_table("role", "number", text_column("what", "dim"), title="\nProcesses")
    for role, count, description in process_rows(config):
        roles.add_row(role, str(count), description)
    for table in (batch, methods, data, roles):
        console.print(table)
    print_line(console, f"\n✓ {path} is valid. It runs in {config.run.dir}.", "green")


def batch_table(config: Config, title: str = "") -> Table:
    table = make_table("what", "number", text_column("from", "dim"), title=title)
    for quantity, formula, number in batch_rows(config):
        table.add_row(quantity, f"{number:,}", formula)
    return table


def print_options(console: Console) -> None:
    """Every option with its default and the comment next to it in rlsys/config/."""
    table = make_table("option", text_column("default"), text_column("meaning"))
    comments, on_gpus = option_comments(), gpu_defaults()
    for key, default in defaults().items():
        meaning = comments[key] + (f"; on GPUs {on_gpus[key]} by default" if key in on_gpus else "")
        table.add_row(key, "auto" if key in AUTO_OPTIONS else repr(default), meaning)
    for section_key, kind in ENTRY_TYPES.items():
        default = kind()
        for name in kind.__annotations__:  # not inherited ones: a held-out set has the options of a training set too
            key = f"{section_key}.NAME.{name}"
            table.add_row(key, repr(getattr(default, name)), comments[key])
    print_unwrapped(console, table)
