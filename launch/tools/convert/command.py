"""`rlsys convert`: one command for each public data set that is known."""

from pathlib import Path
from typing import Any

import click

from launch.tools.convert.converters import CONVERTERS, Converter


@click.group()
def convert() -> None:
    """Writes a public data set as a file for training.

    data.train or eval.datasets can name the file.
    """


def make_command(name: str, converter: Converter) -> click.Command:
    """`rlsys convert NAME [SOURCE] OUT`"""

    @click.argument("paths", nargs=-1, required=True, metavar="[SOURCE] OUT")
    @click.option("--split", default="train", show_default=True, help="Split of a data set that has several.")
    @click.option(
        "--subset", default=None, help=f"Subset of a hub data set. For {converter.hub}: {converter.subset or 'none'}."
    )
    @click.option(
        "--instruction",
        default=converter.instruction,
        help=f"Text after every question. By default: {converter.instruction}",
    )
    @click.option(
        "--chat/--text", default=True, help="Prompts as chat messages (default), or as plain text for base models."
    )
    @click.option(
        "--name",
        default=name,
        show_default=True,
        help="The field `source` of each row, which names the data in metrics.",
    )
    @click.option("--start", default=0, type=click.IntRange(0), help="Leave out this many questions at the beginning.")
    @click.option("--count", default=None, type=click.IntRange(1), help="Write at most this many questions.")
    @click.option("--force", is_flag=True, help="Replace OUT if it exists.")
    def run(paths: tuple[str, ...], split: str, subset: str | None, force: bool, **options: Any) -> None:
        if len(paths) > 2:
            raise click.UsageError(f"[SOURCE] OUT are at most two; these are {', '.join(paths)}.")
        source, out = paths if len(paths) == 2 else (converter.hub, paths[0])
        if subset is None:
            subset = converter.subset if source == converter.hub else ""
        from launch.tools.convert.conversion import ConvertOptions, convert_to_file

        wanted = ConvertOptions(**options)
        click.echo(convert_to_file(converter, source, Path(out), wanted, split=split, subset=subset, force=force))

    run.__doc__ = (
        f"{converter.about[0].upper()}{converter.about[1:]}.\n\nSOURCE is a hub name, a folder or a file of the same form; "
        f"by default {converter.hub}. OUT ends in .jsonl or .parquet."
    )
    if name == "math":
        run = click.option(
            "--level", "levels", multiple=True, type=int, help="Only of this level, 1 to 5. May be given several times."
        )(run)
    return click.command(name)(run)


for name, converter in CONVERTERS.items():
    convert.add_command(make_command(name, converter))
