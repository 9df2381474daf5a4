"""What of this machine goes with a job: the configuration and the files it names by relative paths, and nothing else.

rlsys submit configs/mine.yaml              the job's working directory, the same paths
    base: base.yaml                    ──▶  configs/mine.yaml  configs/base.yaml
    data.train: data/sums.jsonl        ──▶  data/sums.jsonl
    reward.functions: my.py:brevity    ──▶  my.py
    tracking.to: board.py:Board        ──▶  board.py
    model.path: /shared/models/qwen         stays; the job looks for it where it runs
    api_key: ${oc.env:JUDGE_KEY}            the job reads it where it runs; the value is not sent
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlsys.checks import check
from rlsys.config import loading
from rlsys.config.plugins import is_importable
from rlsys.config.schema import Config, ConfigError, DataSource, RewardFunction
from rlsys.config.secrets import referenced_variables

MAX_BYTES = 200 << 20  # bytes; Ray keeps all of it in the memory of the head node
SKIPPED_FOLDERS = ("runs", "__pycache__", "node_modules")  # and what begins with a dot: .git, .venv, .env
PLACEHOLDER = "rlsys:f"  # stands for a function or tracker that cannot be looked for on this machine
INSTALLED_PACKAGES = ("rlsys", "workers", "launch")  # on the cluster too, in its own version


@dataclass(frozen=True)
class NamedPath:
    """A path, and who names it. Named("data.train", "data/sums.jsonl")"""

    option: str
    path: str

    @property
    def is_absolute(self) -> bool:
        """An absolute path means the same on every machine, and is looked for where the job runs."""
        return self.path.startswith(("/", "~"))

    @property
    def local_path(self) -> Path:
        return Path(self.path).expanduser()

    def __str__(self) -> str:
        return f"{self.option} {self.path}"


@dataclass(frozen=True)
class JobPackage:
    """Parcel("configs/mine.yaml", config, {"my.py": Path("/home/me/my.py"), …})"""

    config_path: str  # of the configuration, as the job names it
    config: Config
    files: dict[str, Path]  # the place in the job's working directory, and where it is here
    not_sent: list[NamedPath]  # not sent
    variables: list[str]  # names of variables that the job reads

    @property
    def size(self) -> int:
        return sum(file.stat().st_size for file in self.files.values())

    def copy_to(self, folder: Path) -> None:
        """Copies the files to where a job will find them."""
        for place, file in self.files.items():
            target = folder / place
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target)


def build_package(path: str, overrides: tuple[str, ...], more: tuple[str, ...] = ()) -> JobPackage:
    """Reads and checks the configuration, and finds what it needs. Raises `ConfigError` with all that is in the way."""
    config = loading.load_config(path, overrides)
    named = [NamedPath("the configuration", place) for place in loading.config_files(path)]
    named = [NamedPath(n.option, relative_path(n.path)) for n in named] + [*config_paths(config)]
    named += [NamedPath("--with", relative_path(place)) for place in more]
    elsewhere = [n for n in named if n.is_absolute]
    environment = sorted(set(required_variables(config)))
    problems = check_for_cluster(config, environment)
    if not config.run.dir.startswith(("/", "~")):
        problems.append(
            f"run.dir is {config.run.dir}, which on a cluster lies in the job's working directory and goes with it. Give an "
            f"absolute path, on storage that all nodes see: run.dir=/shared/{config.run.dir.removeprefix('./')}"
        )
    files: dict[str, Path] = {}
    sizes: dict[str, int] = {}
    for n in (n for n in named if not n.is_absolute):
        place = Path(os.path.normpath(n.path))
        if place.is_absolute() or ".." in place.parts:
            problems.append(
                f"{n} is outside of {Path.cwd()}, and what goes with a job keeps its place relative to this folder. Submit from "
                "a folder above it, or give an absolute path that the cluster sees."
            )
        elif not place.exists():
            problems.append(f"{n} does not exist (from {Path.cwd()}).")
        else:
            found = dict(files_in(place))
            sizes[str(n)] = sum(file.stat().st_size for file in found.values())
            files |= found
    total = sum(file.stat().st_size for file in files.values())
    if total > MAX_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        problems.append(
            f"{format_size(total)} would go with the job, most of it {largest} ({format_size(sizes[largest])}); at most "
            f"{format_size(MAX_BYTES)} may. Put it on storage that all nodes see, and give its absolute path."
        )
    if problems:
        raise ConfigError(problems)
    return JobPackage(relative_path(path), config, dict(sorted(files.items())), elsewhere, environment)


def relative_path(path: str) -> str:
    """As seen from the folder that one submits from."""
    return os.path.relpath(Path(path).expanduser())


def files_in(place: Path) -> Iterator[tuple[str, Path]]:
    """A file, or those in a folder but for what nobody means to send."""
    if place.is_file():
        yield str(place), place.resolve()
        return
    for entry in sorted(place.iterdir()):
        if not entry.name.startswith(".") and entry.name not in SKIPPED_FOLDERS and (entry.is_file() or entry.is_dir()):
            yield from files_in(entry)


def config_paths(config: Config) -> Iterator[NamedPath]:
    """Models, data, templates and code of the user's. Hub names and what is built in are no paths."""
    texts = [("model.path", config.model.path), ("data.template", config.data.template)]
    for key, source in config_sources(config):
        texts += [(key, source.path), (f"{key}.template", source.template or "")]
    for key, spec, options in user_plugins(config):
        texts += [(key, user_code_path(spec))] + [
            (f"{key} {n}", value) for n, value in options.items() if is_existing_path(n, value)
        ]
    for option, text in texts:
        if text and (text.startswith(("/", "~")) or Path(text).exists()):
            yield NamedPath(option, text)


def config_sources(config: Config) -> Iterator[tuple[str, DataSource]]:
    yield from (("data.train", source) for source in config.data.train.values())
    yield from (("eval.datasets", source) for source in config.eval.datasets.values())


def user_plugins(config: Config) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """What may be the user's own: ("reward.functions", "my.py:brevity", its options)"""
    own = [(f"{key}.reward", source.reward) for key, source in config_sources(config)]
    for key, functions in [("reward.functions", config.reward.functions), *own]:
        yield from ((key, f.function, f.options) for f in functions.values())
    yield from ((key, spec, {}) for key, spec in algorithm_options(config))
    yield from (("tracking.to", t.tracker, t.options) for t in config.tracking.to.values())


def is_existing_path(name: str, value: Any) -> bool:
    """A file, such as a judge's template; a folder only under the name `path`, such as a reward model's."""
    with contextlib.suppress(OSError, ValueError):  # a text as long as a prompt
        place = Path(value).expanduser() if isinstance(value, str) else Path()
        return bool(place.name) and (place.is_file() or (name == "path" and place.is_dir()))
    return False


def user_code_path(spec: str) -> str:
    """The file or folder of the user's that a function is in, if it is the user's.  "my.py:f" -> "my.py"; "mine.rewards:f" -> "mine" """
    home, colon, _ = spec.rpartition(":")
    if not colon or home.endswith(".py"):
        return home
    top = home.partition(".")[0]
    places = [] if top in INSTALLED_PACKAGES else [f"{top}.py", top]
    return next((place for place in places if Path(place).exists()), "")


def algorithm_options(config: Config) -> list[tuple[str, str]]:
    return [("algorithm.advantage", config.algorithm.advantage), ("algorithm.loss", config.algorithm.loss)]


def required_variables(config: Config) -> list[str]:
    """Environment variables that reward functions and trackers refer to."""
    return [name for _, _, options in user_plugins(config) for name in referenced_variables(options)]


def check_for_cluster(config: Config, environment: list[str]) -> list[str]:
    """What does not fit together, but for files and variables that only the cluster has to have."""
    missing = [name for name in environment if name not in os.environ]
    os.environ |= dict.fromkeys(missing, "read on the cluster")
    try:
        return check(replace_remote_names(config))
    finally:
        for name in missing:
            del os.environ[name]


def replace_remote_names(config: Config) -> Config:
    """Names that need not be looked up, for absolute paths that are not on this machine."""

    def absent(path: str | None) -> bool:
        return bool(path) and NamedPath("", str(path)).is_absolute and not Path(str(path)).expanduser().exists()

    def unseen(spec: str) -> bool:
        """A file that is there only, or a module, which may be installed there only."""
        home = spec.rpartition(":")[0]
        return absent(user_code_path(spec)) if home.endswith(".py") else bool(home) and not is_importable(home)

    def functions(found: dict[str, RewardFunction]) -> dict[str, RewardFunction]:
        return {n: replace(f, function=PLACEHOLDER) if unseen(f.function) else f for n, f in found.items()}

    def sources(found: dict[str, Any]) -> dict[str, Any]:
        return {name: settled(source) for name, source in found.items()}

    def settled(source: DataSource) -> DataSource:
        path = "owner/name" if absent(source.path) else source.path
        template = None if absent(source.template) else source.template
        return replace(source, path=path, template=template, reward=functions(source.reward))

    template = "" if absent(config.data.template) else config.data.template
    trackers = {n: replace(t, tracker=PLACEHOLDER) if unseen(t.tracker) else t for n, t in config.tracking.to.items()}
    methods = {key.rpartition(".")[2]: PLACEHOLDER for key, spec in algorithm_options(config) if unseen(spec)}
    return replace(
        config,
        model=replace(config.model, path="owner/name" if absent(config.model.path) else config.model.path),
        data=replace(config.data, train=sources(config.data.train), template=template),
        eval=replace(config.eval, datasets=sources(config.eval.datasets)),
        reward=replace(config.reward, functions=functions(config.reward.functions)),
        algorithm=replace(config.algorithm, **methods),  # type: ignore[arg-type]
        tracking=replace(config.tracking, to=trackers),
    )


def format_size(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB" if size >= 100_000 else f"{size / 1000:.1f} kB"
