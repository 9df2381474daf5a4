"""The run directory, which every tool reads.

config.yaml     the resolved configuration        samples/      every sample of every step, parquet
metrics.jsonl   one line per step                 checkpoints/  step-000040/, see `checkpoint`; damaged-step-000040/
events.jsonl    starts, syncs, faults, stops      logs/         per process: .log, .spans (timeline), .pid, .stacks
inputs.json, rows.npz   what files and rows the run is made of, see `inputs`
"""

import contextlib
import io
import json
import os
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlsys.config import loading
from rlsys.config.derived import last_schedule_step
from rlsys.config.schema import Config, DataSource
from rlsys.config.secrets import redact_nested
from rlsys.data import Dataset
from rlsys.errors import ConfigError
from rlsys.runs import inputs, timeline
from rlsys.runs.disk import sync_file, sync_folder, write_atomically, write_synced
from rlsys.runs.run_lock import lock_run
from rlsys.runs.samples import warm_up_pyarrow, write_samples
from rlsys.threads import REAL, Threads
from rlsys.types import Batch, Columns, Floats, Prompt

FILES_BEFORE_CONFIG = (
    ".lock",
    ".config.yaml.tmp",
    "inputs.json",
    ".inputs.json.tmp",
)  # may exist in the directory of a run that was killed before it wrote config.yaml
CHANGEABLE_OPTIONS = (  # may differ when a run is continued
    "run.dir",
    "run.max_restarts",
    "watchdog.",
    "cluster.",
    "data.continue_final_message",  # what it changes are rows, which are compared
    "eval.",
    "checkpoint.",
    "sync.",
    "tracking.",
    "trainer.steps",
    "trainer.max_mismatch",
    "reward.workers",
    "reward.timeout_s",
    "reward.memory_mb",
    "reward.max_failure_share",
    "dynamic_sampling.",
    "rollout.engines",
    "rollout.gpu_memory",
    "rollout.kv_cache_mb",
    "rollout.max_sequences",
    "policy.lr_schedule_steps",
    "policy.ranks",
    "policy.sequence_parallel",
    "policy.zero_stage",
    "policy.offload",
    "critic.ranks",
    "policy.tokens_per_pack",
    "policy.gradient_checkpointing",
)
MOVABLE_OPTIONS = ("model.path", "reference.path", "model.adapter")  # may lead elsewhere, to the same files


class RunDirectory:
    """Opens a run directory for writing and locks it: two runs in one directory are refused."""

    def __init__(self, config: Config, *, trains: bool = True, threads: Threads = REAL):
        """Without `trains`, the run's data and models are not looked at."""
        self.path = Path(config.run.dir).expanduser().resolve()
        known = self.path / "config.yaml"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not known.is_file() and any(p.name not in FILES_BEFORE_CONFIG for p in self.path.iterdir()):
                raise ConfigError(
                    f"run.dir: {self.path} holds something that is not a run (no config.yaml). "
                    "Choose another directory."
                )
            self._lock = lock_run(self.path)
        except (NotADirectoryError, FileExistsError):
            raise ConfigError(f"run.dir: {self.path} is a file, or lies below one. Choose another directory.") from None
        except OSError as error:
            raise ConfigError(f"run.dir: cannot write to {self.path}: {error.strerror}.") from None
        self.begun = known.is_file() and (self.path / "metrics.jsonl").is_file()
        self.notes: list[str] = []  # for the user, once there is a place to show them
        checked = self._checked_inputs(config) if trains else inputs.InputFiles({}, set())
        if self.begun:
            self._refuse_changes(config, known, checked)
        try:
            if trains:
                self._write_inputs(checked)
            write_atomically(known, loading.to_yaml(config))
            for name in ("samples", "checkpoints", "logs"):
                (self.path / name).mkdir(exist_ok=True)
            terminate_last_line(self.path / "events.jsonl")
            timeline.open_timeline("driver", self.logs)
            self._writer = threads.executor("samples")
            self._writing: Future[None] | None = None
            self._unsynced: list[Path] = []  # samples that are written, and perhaps not on disk
        except PermissionError as error:  # another user's directory, in which anyone may open the lock
            raise ConfigError(f"run.dir: cannot write to {self.path}: {error.strerror}.") from None

    def _refuse_changes(self, config: Config, known: Path, checked: inputs.InputFiles) -> None:
        """Raises `ConfigError` if a run with other settings stands here, but for `CHANGEABLE_OPTIONS`."""
        from omegaconf import OmegaConf

        tree = OmegaConf.load(known)
        old = loading.build_config(tree, [], str(known))  # type: ignore[arg-type]
        before, now = loading.flatten(old), loading.flatten(config)
        moved = [option for option in MOVABLE_OPTIONS if option in checked.matching]
        if (self.path / "rows.npz").is_file() and without_paths(old) == without_paths(config):
            moved.append("data.train")  # its rows are compared when they are prepared
        changed = [
            f"{k}: {before[k]} → {now[k]}"
            for k in now
            if before[k] != now[k] and k not in moved and not k.startswith(CHANGEABLE_OPTIONS)
        ]
        if changed:
            raise ConfigError(
                f"run.dir: {self.path} is a run with other settings ({'; '.join(changed)}). "
                "Use the old ones, or choose another run.dir for a new run."
            )
        refuse_rate_jump(old, config)

    def _known_inputs(self) -> dict[str, inputs.Files]:
        file = self.path / "inputs.json"
        if not self.begun or not file.is_file():
            return {}
        try:
            return dict(json.loads(file.read_text()))
        except ValueError as error:
            raise ConfigError(unreadable(file, error)) from None

    def _checked_inputs(self, config: Config) -> inputs.InputFiles:
        """Hashes the files. Raises `ConfigError` if one is not what it was when the run began."""
        known, now = self._known_inputs(), inputs.hash_inputs(config, CHANGEABLE_OPTIONS)
        if changed := inputs.describe_changed_files(known, now):
            raise ConfigError(self._explain_inputs(changed))
        if self.begun and not known and now:
            self.notes.append(
                f"the run has no record of {', '.join(now)}: whether they changed since it began is not known. It has one now"
            )
        merged = {option: known.get(option, {}) | now.get(option, {}) for option in [*known, *now]}
        return inputs.InputFiles(merged, known.keys() & now.keys())

    def record_inputs(self, config: Config) -> None:
        """Checks and records files once more: those of a hub name may have been downloaded only now."""
        self._write_inputs(self._checked_inputs(config))

    def _write_inputs(self, checked: inputs.InputFiles) -> None:
        if checked.files or (self.path / "inputs.json").is_file():
            write_atomically(self.path / "inputs.json", json.dumps(checked.files, indent=1))

    def check_rows(self, config: Config, train: Dataset, held_out: Mapping[str, Sequence[Prompt]]) -> list[str]:
        """Compares the prepared rows with those that the run began with, and records them if it begins.

        Raises `ConfigError` for other training rows, in which a position means another row. Returns notes.
        """
        file, rows = self.path / "rows.npz", inputs.hash_training_rows(config, train)
        evaluated = {f"eval.datasets.{name}": inputs.hash_rows(prompts) for name, prompts in held_out.items()}
        notes: list[str] = []
        if self.begun and not file.is_file():
            notes.append(
                "the run has no record of its rows: whether they changed since it began is not known. It has one now."
            )
        elif self.begun:
            known = read_rows(file)
            trained = [known[name] for name in known if not name.startswith("eval.")]
            pairs = zip(rows.items(), trained, strict=False)
            changed = [text for (name, now), old in pairs if (text := inputs.describe_changed_rows(name, old, now))]
            if changed:
                raise ConfigError(self._explain_inputs(changed))
            changes = [inputs.describe_changed_rows(n, known[n], now) for n, now in evaluated.items() if n in known]
            notes += [f"{text}. Its figures before and after are not of the same prompts." for text in changes if text]
        unfinished, data = self.path / ".rows.tmp", io.BytesIO()
        np.savez(data, **rows, **evaluated)  # type: ignore[arg-type]
        write_synced(unfinished, data.getvalue())
        unfinished.rename(file)
        return notes

    def _explain_inputs(self, changed: list[str]) -> str:
        return (
            f"run.dir: {self.path} began with other data or files ({'; '.join(changed)}). Restore them, or choose another "
            "run.dir for a new run."
        )

    def close(self) -> None:
        self._writer.shutdown()
        timeline.close_timeline()
        if not self._lock.closed:
            with contextlib.suppress(OSError):  # a full disk
                self._lock.truncate(0)  # for file systems without locks
            self._lock.close()

    def warm_up_writer(self) -> None:
        """Loads what the first samples need, while the workers start."""
        self._writer.submit(warm_up_pyarrow)

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def record_event(self, kind: str, **facts: Any) -> None:
        with (self.path / "events.jsonl").open("a") as file:
            file.write(json.dumps({"time": round(time.time(), 3), "event": kind, **redact_nested(facts)}) + "\n")

    def record_metrics(self, line: dict[str, float]) -> None:
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def rewind_metrics(self, step: int) -> None:
        """Removes the lines of steps that will be repeated, and a last line that a crash cut off."""
        file = self.path / "metrics.jsonl"
        if file.is_file():
            lines = [json.dumps(line) + "\n" for line in read_lines(file) if line["step"] <= step]
            write_atomically(file, "".join(lines))

    def save_samples(
        self, name: str, batch: Batch, advantages: Floats | None = None, per_token: Columns | None = None
    ) -> None:
        """Writes samples in the background; `wait_for_samples` waits for them. A file is complete or does not exist."""
        self._finish_writing()  # one file at a time
        target = self.path / "samples" / f"{name}.parquet"
        self._writing = self._writer.submit(write_samples, target, batch, advantages, per_token)
        self._unsynced.append(target)

    def _finish_writing(self) -> None:
        """Waits until the samples are written, and raises the error of writing them."""
        writing, self._writing = self._writing, None
        if writing:
            writing.result()

    def wait_for_samples(self) -> None:
        """Returns when samples, metrics and events are on disk, where they outlast a power failure."""
        self._finish_writing()
        jsonl_files = [self.path / name for name in ("metrics.jsonl", "events.jsonl")]
        for file in [*self._unsynced, *jsonl_files]:
            if file.is_file():
                sync_file(file)
        for folder in (self.path / "samples", self.path):
            sync_folder(folder)
        self._unsynced.clear()


def read_rows(file: Path) -> dict[str, inputs.Rows]:
    try:
        with np.load(file) as rows:
            return dict(rows)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(unreadable(file, error)) from None


def unreadable(file: Path, error: Exception) -> str:
    return (
        f"{file} is damaged ({type(error).__name__}). Remove it, and whether data and models changed since the run began is "
        "not checked; or restore it."
    )


def without_paths(config: Config) -> list[DataSource]:
    return [replace(source, path="") for source in config.data.train.values()]


def refuse_rate_jump(old: Config, new: Config) -> None:
    """Raises `ConfigError` if other `trainer.steps` alone would move the end of a falling learning rate."""
    before, now, schedule = last_schedule_step(old), last_schedule_step(new), new.policy.lr_schedule
    if schedule == "constant" or before == now or new.policy.lr_schedule_steps:
        return
    keep = f", or {before} to keep its course" if before > now else ""
    raise ConfigError(
        f"policy.lr_schedule {schedule} lets this run's learning rate fall to 0 at step {before}. With trainer.steps "
        f"{now} it would end there, and the rate would jump on resume. Set policy.lr_schedule_steps to {now} to accept "
        f"the jump{keep}."
    )


def terminate_last_line(file: Path) -> None:
    """Ends a line that a crash cut off, so that what is appended starts a line of its own."""
    if file.is_file() and not file.read_bytes().endswith(b"\n"):
        with file.open("a") as out:
            out.write("\n")


def read_lines(file: Path, newest: int | None = None) -> list[dict[str, Any]]:
    """Returns the complete lines of a .jsonl file, or of its `newest` bytes, without one that a crash cut off."""
    lines = []
    if file.is_file():
        for text in _read_end(file, newest).decode(errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                if isinstance(line := json.loads(text), dict):
                    lines.append(line)
    return lines


def _read_end(file: Path, newest: int | None) -> bytes:
    with file.open("rb") as data:
        size = data.seek(0, os.SEEK_END)
        first = max(0, size - newest) if newest else 0
        data.seek(first)
        return data.read().partition(b"\n")[2] if first else data.read()


def read_samples(run: Path, name: str) -> list[dict[str, Any]]:
    """Returns the prompts, completions and rewards saved under a name, such as `eval-000000`, if there are any."""
    file = run / "samples" / f"{name}.parquet"
    if not file.is_file():
        return []
    import pyarrow.parquet

    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(
        file, columns=["uid", "prompt", "completion", "reward"]
    ).to_pylist()
    return rows


def write_user_file(file: Path, text: str) -> None:
    """Writes a file that the user named, and makes its folder. Raises `ConfigError` if it cannot be written."""
    with writable_place(file):
        write_atomically(file, text)


def require_writable(file: Path) -> None:
    """Raises what `write_user_file` would raise, before long work begins."""
    with writable_place(file), tempfile.TemporaryFile(dir=file.parent):
        pass


@contextlib.contextmanager
def writable_place(file: Path) -> Iterator[None]:
    """Makes the folder of a file that the user named. Raises `ConfigError` if the block cannot write there."""
    if file.is_dir():
        raise ConfigError(f"{file} is a folder. Give the name of a file.")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}. Give another place.") from None
