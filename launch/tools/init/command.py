"""`rlsys init`: writes a commented configuration for a model, a data set and a number of GPUs."""

import re
import shlex
from pathlib import Path

from rich.console import Console

from launch.printing import print_line
from launch.tools.init.choose import choose_settings, format_parameters
from launch.tools.init.dataset_presets import find_preset
from launch.tools.init.options import InitOptions, find_gpu
from launch.tools.init.render import render
from rlsys.checks import load_checked
from rlsys.data.origin import strip_extension
from rlsys.errors import ConfigError
from rlsys.models.lookup import model_shape
from rlsys.runs.directory import write_user_file


def init(options: InitOptions, console: Console) -> None:
    out = Path(options.out or default_name(options))
    if out.exists() and not options.force:
        raise ConfigError(f"{out} exists. Give another name with -o, or --force to replace it.")
    model, source = model_shape(options.model, options.model_config)
    preset = find_preset(options.data, options.reward, model)
    choice = choose_settings(options, model, preset)
    write_checked(out, render(options, model, preset, choice))
    shape = f"{format_parameters(model)} parameters, from {source}"
    print_line(console, f"✓ {out}: {model.name} ({shape}), {options.hardware}", "green")
    file = shlex.quote(str(out))
    cluster = f" --cluster {options.gpus}x{find_gpu(options.gpu).name}" if options.gpus else ""
    print_line(console, f"next: rlsys plan {file}{cluster}, then rlsys train {file}")


def default_name(options: InitOptions) -> str:
    """`qwen3-8b-gsm8k.yaml`"""

    def short(name: str) -> str:
        last_part = name.rstrip("/").rpartition("/")[2].rpartition(":")[2].lower()
        return re.sub(r"[^a-z0-9.]+", "-", strip_extension(Path(last_part))).strip("-")

    return f"{short(options.model)}-{short(options.data)}.yaml"


def write_checked(out: Path, text: str) -> None:
    """Writes the file, and restores what was there before if the new configuration is not valid."""
    before = out.read_text() if out.is_file() else None
    write_user_file(out, text)
    try:
        load_checked(out)
    except ConfigError:
        if before is None:
            out.unlink()
        else:
            write_user_file(out, before)
        raise
