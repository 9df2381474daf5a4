"""What is sent with a job: the configuration and the files it names by relative paths, and nothing else.

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
from rlsys.config.schema import Config, DataSource, RewardFunction
from rlsys.config.secrets import referenced_variables
from rlsys.episodes.environments import is_environment
from rlsys.errors import ConfigError

MAX_BYTES = 200 << 20  # Ray keeps all of it in the memory of the head node
SKIPPED_FOLDERS = ("runs", "__pycache__", "node_modules")  # besides names that begin with a dot: .git, .venv, .env
PLACEHOLDER = "rlsys:f"  # for a function or tracker that cannot be looked up on this machine
INSTALLED_PACKAGES = ("rlsys", "workers", "launch")  # the cluster has its own


@dataclass(frozen=True)
class NamedPath:
    """A path, and the option that names it. NamedPath("data.train", "data/sums.jsonl")"""

    option: str
    path: str

    @property
    def is_absolute(self) -> bool:
        """True for a path that means the same on every machine, and is looked for where the job runs."""
        return self.path.startswith(("/", "~"))

    def __str__(self) -> str:
        return f"{self.option} {self.path}"


@dataclass(frozen=True)
class JobPackage:
    """JobPackage("configs/mine.yaml", config, {"my.py": Path("/home/me/my.py"), …})"""

    config_path: str  # in the job's working directory
    config: Config
    files: dict[str, Path]  # path in the job's working directory → path on this machine
    not_sent: list[NamedPath]
    variables: list[str]  # names of environment variables that the job reads

    @property
    def size(self) -> int:
        return sum(file.stat().st_size for file in self.files.values())

    def copy_to(self, folder: Path) -> None:
        """Copies the files to the places where the job will find them."""
        for path, file in self.files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target)


def build_package(path: str, overrides: tuple[str, ...], extra_paths: tuple[str, ...] = ()) -> JobPackage:
    """Reads and checks the configuration, and collects its files. Raises `ConfigError` with all problems."""
    config = loading.load_config(path, overrides)
    named = [NamedPath("the configuration", relative_path(file)) for file in loading.config_files(path)]
    named += config_paths(config)
    named += [NamedPath("--with", relative_path(extra)) for extra in extra_paths]
    variables = sorted(set(required_variables(config)))
    problems = check_for_cluster(config, variables)
    if not config.run.dir.startswith(("/", "~")):
        problems.append(
            f"run.dir is {config.run.dir}, which on a cluster lies in the job's working directory and is deleted with "
            "it. Give an absolute path, on storage that all nodes see: "
            f"run.dir=/shared/{config.run.dir.removeprefix('./')}"
        )
    files, file_problems = collect_files([n for n in named if not n.is_absolute])
    if problems or file_problems:
        raise ConfigError(problems + file_problems)
    not_sent = [n for n in named if n.is_absolute]
    return JobPackage(relative_path(path), config, dict(sorted(files.items())), not_sent, variables)


def collect_files(named: list[NamedPath]) -> tuple[dict[str, Path], list[str]]:
    """Returns the files behind relative paths, and a sentence per problem."""
    files: dict[str, Path] = {}
    sizes: dict[str, int] = {}
    problems = []
    for n in named:
        path = Path(os.path.normpath(n.path))
        if path.is_absolute() or ".." in path.parts:
            problems.append(
                f"{n} is outside of {Path.cwd()}, and files keep their place relative to this folder. Submit from a "
                "folder above it, or give an absolute path that the cluster sees."
            )
        elif not path.exists():
            problems.append(f"{n} does not exist (from {Path.cwd()}).")
        else:
            below = dict(files_in(path))
            sizes[str(n)] = sum(file.stat().st_size for file in below.values())
            files |= below
    total = sum(file.stat().st_size for file in files.values())
    if total > MAX_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        problems.append(
            f"{format_size(total)} would be sent with the job, most of it {largest} ({format_size(sizes[largest])}); "
            f"at most {format_size(MAX_BYTES)} may. Put it on storage that all nodes see, and give its absolute path."
        )
    return files, problems


def relative_path(path: str) -> str:
    """Returns the path relative to the current folder."""
    return os.path.relpath(Path(path).expanduser())


def files_in(path: Path) -> Iterator[tuple[str, Path]]:
    """Yields a file, or the files in a folder without hidden ones and `SKIPPED_FOLDERS`."""
    if path.is_file():
        yield str(path), path.resolve()
        return
    for entry in sorted(path.iterdir()):
        if not entry.name.startswith(".") and entry.name not in SKIPPED_FOLDERS and (entry.is_file() or entry.is_dir()):
            yield from files_in(entry)


# --- what a configuration names ---------------------------------------------------------------------------------------


def config_paths(config: Config) -> Iterator[NamedPath]:
    """Yields the paths of models, data, templates and the user's code. Hub names and built-in names are not paths."""
    values = [("model.path", config.model.path), ("model.adapter", config.model.adapter)]
    values.append(("data.template", config.data.template))
    for key, source in config_sources(config):
        values += [(key, source.path), (f"{key}.template", source.template or "")]
    for key, spec, options in user_plugins(config):
        paths = [(f"{key} {name}", value) for name, value in options.items() if is_existing_path(name, value)]
        values += [(key, user_code_path(spec)), *paths]
    for option, value in values:
        if value and (value.startswith(("/", "~")) or Path(value).exists()):
            yield NamedPath(option, value)


def config_sources(config: Config) -> Iterator[tuple[str, DataSource]]:
    yield from (("data.train", source) for source in config.data.train.values())
    yield from (("eval.datasets", source) for source in config.eval.datasets.values())


def user_plugins(config: Config) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields what may be the user's own code: ("reward.functions", "my.py:brevity", its options)"""
    of_sources = [(f"{key}.reward", source.reward) for key, source in config_sources(config)]
    for key, functions in [("reward.functions", config.reward.functions), *of_sources]:
        yield from ((key, f.function, f.options) for f in functions.values())
    yield from ((key, spec, {}) for key, spec in algorithm_options(config))
    yield from (("tracking.to", t.tracker, t.options) for t in config.tracking.to.values())
    yield ("episode.play", config.episode.play, config.episode.options)
    yield from (("episode.tools", spec, {}) for spec in config.episode.tools if isinstance(spec, str) and ":" in spec)
    yield from ((f"{key}.episode", source.episode, {}) for key, source in config_sources(config))


def algorithm_options(config: Config) -> list[tuple[str, str]]:
    return [("algorithm.advantage", config.algorithm.advantage), ("algorithm.loss", config.algorithm.loss)]


def is_existing_path(name: str, value: Any) -> bool:
    """True for a file, such as a judge's template, and for a folder named by `path`, such as a reward model's."""
    with contextlib.suppress(OSError, ValueError):  # a text as long as a prompt
        path = Path(value).expanduser() if isinstance(value, str) else Path()
        return bool(path.name) and (path.is_file() or (name == "path" and path.is_dir()))
    return False


def user_code_path(spec: str) -> str:
    """Returns the file or folder of a user's code, or nothing.  "my.py:f" -> "my.py"; "mine.rewards:f" -> "mine" """
    module, colon, _ = spec.rpartition(":")
    if not colon or module.endswith(".py"):
        return module
    top = module.partition(".")[0]
    paths = [] if top in INSTALLED_PACKAGES else [f"{top}.py", top]
    return next((path for path in paths if Path(path).exists()), "")


def required_variables(config: Config) -> list[str]:
    """Returns the environment variables that reward functions and trackers refer to."""
    return [name for _, _, options in user_plugins(config) for name in referenced_variables(options)]


# --- checks of a configuration that runs elsewhere --------------------------------------------------------------------


def check_for_cluster(config: Config, variables: list[str]) -> list[str]:
    """Runs all checks, except for files and environment variables that only the cluster needs to have."""
    missing = [name for name in variables if name not in os.environ]
    os.environ |= dict.fromkeys(missing, "read on the cluster")
    try:
        return check(replace_remote_names(config))
    finally:
        for name in missing:
            del os.environ[name]


def replace_remote_names(config: Config) -> Config:
    """Replaces what is not on this machine, and may be on the cluster, by names that the checks do not look up."""
    template = "" if _is_remote_path(config.data.template) else config.data.template
    trackers = {
        n: replace(t, tracker=PLACEHOLDER) if _is_remote_code(t.tracker) else t for n, t in config.tracking.to.items()
    }
    methods = {key.rpartition(".")[2]: PLACEHOLDER for key, spec in algorithm_options(config) if _is_remote_code(spec)}
    path = "owner/name" if _is_remote_path(config.model.path) else config.model.path
    adapter = "" if _is_remote_path(config.model.adapter) else config.model.adapter
    play = PLACEHOLDER if _is_remote_play(config.episode.play) else config.episode.play
    tools = [t for t in config.episode.tools if not (isinstance(t, str) and _is_remote_code(t))]
    return replace(
        config,
        model=replace(config.model, path=path, adapter=adapter),
        data=replace(config.data, train=_replace_in_sources(config.data.train), template=template),
        eval=replace(config.eval, datasets=_replace_in_sources(config.eval.datasets)),
        reward=replace(config.reward, functions=_replace_in_functions(config.reward.functions)),
        episode=replace(config.episode, play=play, tools=tools),
        algorithm=replace(config.algorithm, **methods),  # type: ignore[arg-type]
        tracking=replace(config.tracking, to=trackers),
    )


def _is_remote_path(path: str | None) -> bool:
    return bool(path) and NamedPath("", str(path)).is_absolute and not Path(str(path)).expanduser().exists()


def _is_remote_code(spec: str) -> bool:
    """True for an absolute file that is missing here, or a module, which may be installed on the cluster only."""
    module = spec.rpartition(":")[0]
    if module.endswith(".py"):
        return _is_remote_path(user_code_path(spec))
    return bool(module) and not is_importable(module)


def _is_remote_play(play: str) -> bool:
    return not is_environment(play) and _is_remote_code(play)


def _replace_in_functions(functions: dict[str, RewardFunction]) -> dict[str, RewardFunction]:
    return {n: replace(f, function=PLACEHOLDER) if _is_remote_code(f.function) else f for n, f in functions.items()}


def _replace_in_sources(sources: dict[str, Any]) -> dict[str, Any]:
    return {name: _replace_in_source(source) for name, source in sources.items()}


def _replace_in_source(source: DataSource) -> DataSource:
    path = "owner/name" if _is_remote_path(source.path) else source.path
    template = None if _is_remote_path(source.template) else source.template
    episode = PLACEHOLDER if _is_remote_play(source.episode) else source.episode
    reward = _replace_in_functions(source.reward)
    return replace(source, path=path, template=template, reward=reward, episode=episode)


def format_size(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB" if size >= 100_000 else f"{size / 1000:.1f} kB"
