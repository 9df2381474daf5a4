"""Every command and every configuration in the READMEs is one that works."""

import os
import re
from pathlib import Path

import click
import docs
import pytest
import torch
import yaml
from click.testing import CliRunner
from docs import PAGES, ROOT, Block, blocks, commands, lay_out, words

from launch.tools.cli import commands as rlsys
from rlsys.checks import load_checked
from rlsys.config import loading
from rlsys.config.loading import flatten
from rlsys.config.plugins import load_function
from rlsys.config.schema import Config
from rlsys.errors import ConfigError

ALL = [(where, text) for page in PAGES for where, text in commands(page)]
OURS = [(where, words(text[text.index("rlsys ") :])) for where, text in ALL if "rlsys " in text]
SECTIONS = {*Config.__dataclass_fields__, "base"}
PLACEHOLDER = re.compile(r"\[|\.\.\.|…|^[A-Z_]+(=[A-Z]+)?$")  # CONFIG, RUN, [KEY=VALUE]..., …


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lay_out(tmp_path_factory.mktemp("docs"))


@pytest.fixture(autouse=True)
def inside(place, monkeypatch):
    monkeypatch.chdir(place)


def test_commands_are_found_on_the_pages():
    commands = [" ".join(w) for _, w in OURS]
    assert "rlsys compare A B" in commands, "what is said behind it in a table is left out"
    assert "rlsys trace RUN FILE" in commands
    assert any(f.startswith("rlsys train configs/tiny_cpu.yaml trainer.steps=20") for f in commands)
    assert len(OURS) > 40


@pytest.mark.parametrize(("where", "words"), OURS, ids=[f"{where} {' '.join(w[:3])}" for where, w in OURS])
def test_a_command_of_ours_has_the_options_and_values_it_is_given(where, words):
    name, *rest = words[1:]
    command = rlsys.commands.get(name)
    if name.startswith("-") or name.isupper():  # rlsys --help, rlsys COMMAND
        return
    assert command is not None, f"{where}: there is no command `{name}`"
    given = re.sub(r"(?<!\S)\[([^\]=]+)\]", r"\1", "\n".join(rest)).split("\n")  # what may be left out
    given = [word for word in given if not word.startswith("[") and word not in ("", "...", "…")]
    if "--help" in given or not given:
        return
    try:
        context = command.make_context(name, given)
    except click.UsageError as error:
        if len(given) < len(rest) or given == []:
            return  # what was left out is what is asked for
        raise AssertionError(f"{where}: {' '.join(words)}: {error.format_message()}") from None
    overrides = [o for o in context.params.get("overrides", ()) if not PLACEHOLDER.search(o)]
    config = context.params.get("config")
    if overrides or (config and not PLACEHOLDER.search(str(config))):
        base = config if config and not PLACEHOLDER.search(str(config)) else "configs/tiny_cpu.yaml"
        loaded(where, Path(str(base)), overrides)


@pytest.mark.parametrize("name", sorted(rlsys.commands))
def test_every_command_says_what_it_is_for(name):
    result = CliRunner().invoke(rlsys, [name, "--help"])
    assert result.exit_code == 0
    assert rlsys.commands[name].get_short_help_str(200)


MAKE = [(where, text.split()[1]) for where, text in ALL if re.fullmatch(r"make \w+( \w+=\S+)*(\s+#.*)?", text)]


@pytest.mark.parametrize(("where", "target"), MAKE, ids=[f"{where} {target}" for where, target in MAKE])
def test_a_target_of_make_is_one(where, target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), where


FOREIGN = [(where, text) for page in PAGES for where, text in commands(page, docs.FOREIGN)]


def test_commands_of_other_programs_are_found_on_the_pages():
    assert {text.split()[0] for _, text in FOREIGN} == {"docker", "sbatch", "kubectl", "sky"}


@pytest.mark.parametrize(("where", "command"), FOREIGN, ids=[f"{where} {text[:30]}" for where, text in FOREIGN])
def test_a_command_of_another_program_names_files_and_targets_there_are(where, command):
    for path in re.findall(r"(?:launch|configs|docker)/[\w./]+", command):
        assert (ROOT / path).is_file(), f"{where}: {path}"
    for target in re.findall(r"--target (\w+)|rlsys:(\w+)", command):
        assert re.search(rf"^FROM .* AS {''.join(target)}$", (ROOT / "docker" / "Dockerfile").read_text(), re.M), where
    if " rlsys " in command:
        assert words(command[command.index(" rlsys ") :])[1] in rlsys.commands, where


YAML = [b for page in PAGES for b in blocks(page) if not b.file.endswith((".py", ".jsonl"))]


def configurations() -> list[Block]:
    yaml_blocks = []
    for block in YAML:
        try:
            tree = yaml.safe_load(block.text)
        except yaml.YAMLError:
            continue
        if isinstance(tree, dict) and set(tree) & SECTIONS and all(isinstance(k, str) and " " not in k for k in tree):
            yaml_blocks.append(block)
    return yaml_blocks


CONFIGURATIONS = configurations()


def test_configurations_are_found_on_the_pages():
    assert {"two_rewards.yaml", "tracked.yaml"} <= {b.file for b in CONFIGURATIONS}


@pytest.mark.parametrize("block", CONFIGURATIONS, ids=[b.where for b in CONFIGURATIONS])
def test_a_configuration_has_only_options_there_are(block, place) -> None:
    assert set(yaml.safe_load(block.text)) <= SECTIONS, block.where
    if block.file:
        loaded(block.where, place / block.file, [])
        return
    for text in alternatives(block.text):
        (place / "shown.yaml").write_text(text)
        loaded(block.where, place / "shown.yaml", [])


def alternatives(text: str) -> list[str]:
    """Several ways to say the same, a blank line between them, stand below one section."""
    section, *_ = text.splitlines()
    first, *others = text.split("\n\n")
    keys = re.findall(r"^(  \w+):", text, re.M)
    return [first, *(f"{section}\n{other}" for other in others)] if len(keys) > len(set(keys)) else [text]


def test_functions_that_the_pages_show_are_found_and_compute(place):
    """Those of configurations: advantages, losses, rewards, trackers."""
    functions = {}
    for block in (b for b in CONFIGURATIONS if b.file):
        config = loading.load_config(place / block.file)
        named = [config.algorithm.advantage, config.algorithm.loss]
        named += [f.function for f in config.reward.functions.values()]
        named += [t.tracker for t in config.tracking.to.values()]
        functions |= {name: load_function(name, {}, block.where) for name in named if ".py:" in name}
    assert {"my_method.py:quantile", "my_method.py:soft_clip", "my_rewards.py:brevity", "my_tracker.py:ToText"} <= set(
        functions
    )
    rewards, groups = torch.tensor([0.0, 1.0, 2.0, 5.0, 5.0]), torch.tensor([0, 0, 0, 1, 1])
    assert functions["my_method.py:quantile"](rewards, groups).round(decimals=3).tolist() == [-1, 0, 1, 0, 0]
    zero, one = torch.zeros(2), torch.ones(2)
    assert functions["my_method.py:soft_clip"](zero, zero, one, zero).tolist() == [-1, -1]


def loaded(where: str, file: Path, overrides: list[str]) -> Config:
    """The configuration, or why not. Data and models that only a page knows need not be here."""
    for name in re.findall(r"oc\.env:([A-Z_]+)", " ".join(overrides) + (file.read_text() if file.is_file() else "")):
        os.environ.setdefault(name, "1")
    try:
        config = loading.load_config(file, overrides)
        load_checked(file, overrides)
    except ConfigError as error:
        serious = [p for p in error.problems if "does not exist" not in p and "no such file" not in p.lower()]
        assert not serious, f"{where}: {serious}"
        return loading.load_config(file, overrides)
    return config


def test_options_that_are_named_in_the_text_are_there():
    """`policy.lr` and the like, between backticks."""
    known, wrong = set(flatten(Config())), []
    known |= {key.rpartition(".")[0] for key in known}  # sections within sections, such as policy.lora
    sections = {key.partition(".")[0] for key in known}
    for page in (p for p in PAGES if p.name != "MIGRATING.md"):  # it names options of other libraries
        for name in re.findall(r"`([a-z_]+\.[a-z_]+)(?:[=:][^`]*)?`", page.read_text()):
            section, _, option = name.partition(".")
            if section in sections and name not in known and option not in ("py", "json"):
                wrong.append(f"{page.relative_to(ROOT)}: {name}")
    assert not wrong
