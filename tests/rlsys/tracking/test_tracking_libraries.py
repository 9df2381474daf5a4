"""TensorBoard, Weights & Biases and MLflow, the real libraries without a network; what they wrote is read back."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsys.config.schema import Config, TrackerConfig
from rlsys.config.schema import TrackingConfig as Settings
from rlsys.tracking.mlflow import mlflow_name
from rlsys.tracking.sent_steps import SentSteps
from rlsys.tracking.tracker import RunInfo
from rlsys.tracking.tracking import Tracking

FIGURES = {
    "reward/mean": 0.5,
    "lag": 0.0,
    "lag/mean": 0.25,
    "eval/aime/pass@4": 0.125,
    "eval/aime/pass@4/low": 0.0625,
}
ROWS = [{"uid": "p1", "prompt": "1 | 2>", "completion": "`12`", "reward": 1.0}]


class Run:
    """A run directory, filled by hand."""

    def __init__(self, path: Path, name: str, **options):
        self.path, self.said, self.name = path, [], name
        (path / "samples").mkdir(parents=True, exist_ok=True)
        to = {name: TrackerConfig(name, options)}
        trainer = dataclasses.replace(Config().trainer, steps=3)
        self.config = dataclasses.replace(Config(), trainer=trainer, tracking=Settings(to=to))

    def lines(self, *steps: int) -> None:
        with (self.path / "metrics.jsonl").open("a") as file:
            for step in steps:
                evaluated = step in (0, 3)
                figures = {k: v + step for k, v in FIGURES.items() if evaluated or not k.startswith("eval")}
                file.write(json.dumps({"step": step} | figures) + "\n")
                if evaluated:
                    write_samples(self.path / "samples" / f"eval-{step:06d}.parquet")

    def start(self, *steps: int, kept: int = -1) -> "Run":
        with Tracking(
            self.config, self.path, self.said.append, lambda *_, **facts: self.said.append(facts)
        ) as tracking:
            tracking.start(kept)
            self.lines(*steps)
        assert not self.said, self.said
        return self


def write_samples(file: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)


# --- TensorBoard -----------------------------------------------------------------------------------------------------------


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return [(e.step, e.value) for e in events.Scalars(name)]


def test_tensorboard_has_every_figure_the_options_and_samples(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Run(tmp_path / "sums", "tensorboard").start(0, 1, 2, 3)
    folder = tmp_path / "sums" / "tensorboard"
    assert scalars(folder, "reward/mean") == [(0, 0.5), (1, 1.5), (2, 2.5), (3, 3.5)]
    assert scalars(folder, "eval/aime/pass@4") == [(0, 0.125), (3, 3.125)]
    events = EventAccumulator(str(folder)).Reload()
    (text,) = events.Tensors("config/text_summary")
    assert b"policy.lr: 1e-06" in text.tensor_proto.string_val[0]
    samples = events.Tensors("samples/text_summary")
    assert [e.step for e in samples] == [0, 3]
    assert "| `1 ¦ 2>` | `'12'` | `1.0` |" in samples[0].tensor_proto.string_val[0].decode()


def test_tensorboard_shows_steps_that_were_done_again_once(tmp_path):
    """The first start came to step 2; the second goes on behind step 0."""
    pytest.importorskip("tensorboard")
    run = Run(tmp_path / "sums", "tensorboard").start(0, 1, 2)
    (run.path / "metrics.jsonl").write_text((run.path / "metrics.jsonl").read_text().splitlines()[0] + "\n")
    run.start(1, 2, 3, kept=0)
    assert [step for step, _ in scalars(run.path / "tensorboard", "reward/mean")] == [0, 1, 2, 3]


def test_runs_may_share_a_folder(tmp_path):
    pytest.importorskip("tensorboard")
    Run(tmp_path / "sums", "tensorboard", dir=str(tmp_path / "all")).start(0)
    assert scalars(tmp_path / "all" / "sums", "reward/mean") == [(0, 0.5)]


def test_tensorboard_survives_a_kill(tmp_path):
    """A process that follows a run is killed by SIGKILL between two steps, and another one goes on."""
    pytest.importorskip("tensorboard")
    run = Run(tmp_path / "sums", "tensorboard")
    run.lines(0, 1)
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path; import time\n"
        "from test_tracking_libraries import Run, Tracking\n"
        "run = Run(Path(sys.argv[1]), 'tensorboard')\n"
        "Tracking(run.config, run.path, print, print).start(-1); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(run.path), str(Path(__file__).parent)])
    try:
        deadline = time.monotonic() + 60
        while SentSteps(run.path).last_step("tensorboard") != 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    time.sleep(1.0)  # TensorBoard orders files by the second they are of; no start of a run is faster
    run.start(2, 3, kept=1)
    assert [step for step, _ in scalars(run.path / "tensorboard", "reward/mean")] == [0, 1, 2, 3]


# --- Weights & Biases ------------------------------------------------------------------------------------------------------


def records(folder: Path) -> Iterator:
    """What an offline run holds. Its file is a log of records in blocks of 32 KiB, each with checksum, length and kind of its parts."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("*.wandb")
    data, position, parts = file.read_bytes(), 7, b""  # after the file's own head
    while position + 7 <= len(data):
        if (room := 32768 - position % 32768) < 7:  # no head fits into the rest of a block
            position += room
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or its last part
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def history(folder: Path, name: str) -> list[tuple[int, float]]:
    """(step, figure) of an offline run."""
    points = []
    for record in records(folder):
        if record.WhichOneof("record_type") == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if name in row:
                points.append((record.history.step.num, row[name]))
    return points


@pytest.fixture
def no_network(tmp_path, monkeypatch):
    """Nothing of ours is written to, or read from, the user's home."""
    for variable in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(variable, raising=False)
    for variable in ("HOME", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / "home"))
    (tmp_path / "home").mkdir()


def test_wandb_writes_an_offline_run_that_goes_on_under_the_same_name(tmp_path, no_network):
    pytest.importorskip("wandb")
    run = Run(tmp_path / "sums", "wandb", mode="offline", project="adding", tags=["a"]).start(0, 1)
    time.sleep(1.0)  # it names a folder by the second it is of; no start of a run is faster
    run.start(2, 3, kept=1)
    first, second = sorted((run.path / "wandb").glob("offline-run-*"))
    assert history(first, "reward/mean") == [(0, 0.5), (1, 1.5)]
    assert history(second, "reward/mean") == [(2, 2.5), (3, 3.5)]
    assert [step for step, _ in history(first, "samples/_type")] == [0]
    started = [r.run for folder in (first, second) for r in records(folder) if r.WhichOneof("record_type") == "run"]
    assert {r.run_id for r in started} == {SentSteps(run.path).run_id}
    assert {(r.project, r.display_name) for r in started} == {("adding", "sums")}
    config = {item.key: json.loads(item.value_json) for item in started[0].config.update}
    assert config["policy.lr"] == 1e-6


def test_wandb_without_a_key_does_not_ask_for_one(tmp_path, no_network):
    pytest.importorskip("wandb")
    run = Run(tmp_path / "sums", "wandb", mode="online")
    with Tracking(run.config, run.path, run.said.append, lambda *_, **facts: None) as tracking:
        tracking.start(-1)
        run.lines(0)
    (message,) = run.said
    assert message == (
        "tracking: wandb failed at its start: there is no API key. `wandb login` asks for one, WANDB_API_KEY holds one, and "
        "`mode: offline` needs none. The run goes on. This time it is left out."
    )


# --- MLflow ----------------------------------------------------------------------------------------------------------------


def test_mlflow_has_one_run_with_every_figure_once(tmp_path, monkeypatch):
    """The first start came to step 2; the second goes on behind step 0, and MLflow keeps what it has of steps 1 and 2."""
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    from mlflow import MlflowClient

    run = Run(tmp_path / "sums", "mlflow", experiment="adding", tags={"who": "us"}).start(0, 1, 2)
    (run.path / "metrics.jsonl").write_text((run.path / "metrics.jsonl").read_text().splitlines()[0] + "\n")
    run.said.append("nothing yet")
    with Tracking(run.config, run.path, run.said.append, lambda *_, **facts: None) as tracking:
        tracking.start(0)
        run.lines(1, 2, 3)
    assert run.said[1:] == ["tracking: mlflow keeps what it has of steps 1 to 2, which are done again"]

    client = MlflowClient((run.path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("adding")
    (mlflow_run,) = client.search_runs([experiment.experiment_id])
    assert mlflow_run.info.status == "FINISHED"
    assert mlflow_run.info.run_name == "sums"
    assert mlflow_run.data.tags["who"] == "us"
    assert mlflow_run.data.params["policy.lr"] == "1e-06"
    of = {
        name: client.get_metric_history(mlflow_run.info.run_id, name)
        for name in ("reward/mean", "step/lag", "lag/mean")
    }
    assert [(m.step, m.value) for m in of["reward/mean"]] == [(0, 0.5), (1, 1.5), (2, 2.5), (3, 3.5)]
    assert [m.step for m in of["step/lag"]] == [m.step for m in of["lag/mean"]] == [0, 1, 2, 3]
    assert [m.step for m in client.get_metric_history(mlflow_run.info.run_id, "eval/aime.pass_at_4")] == [0, 3]
    assert [a.path for a in client.list_artifacts(mlflow_run.info.run_id, "samples")] == [
        "samples/eval-000000.md",
        "samples/eval-000003.md",
    ]


def test_a_server_that_is_not_there_does_not_hold_the_run(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    from rlsys.tracking import tracking as module

    monkeypatch.setattr(module, "END_S", 1.0)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run = Run(tmp_path / "sums", "mlflow", uri="http://127.0.0.1:9")
    began = time.monotonic()
    with Tracking(run.config, run.path, run.said.append, lambda *_, **facts: None) as tracking:
        tracking.start(-1)
        run.lines(0, 1, 2, 3)
    assert time.monotonic() - began < 10
    assert run.said


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lag", "step/lag"),
        ("lag/mean", "lag/mean"),
        ("eval/aime/maj@4", "eval/aime.maj_at_4"),
        ("eval/aime/maj@4/low", "eval/aime.maj_at_4.low"),
        ("failure/a(b)", "failure/a_b_"),
    ],
)
def test_mlflow_takes_our_names(name, expected):
    assert mlflow_name(name) == expected


def test_a_runs_name_may_be_anything(tmp_path):
    folder = tmp_path / "a run: of mine"
    folder.mkdir()
    assert SentSteps(folder).run_id.startswith("a-run--of-mine-")


def test_the_options_of_trackers_are_those_that_the_libraries_have():
    assert set(RunInfo.__dataclass_fields__) == {"id", "name", "path", "config", "first_step", "resumed"}
    assert os.environ.get("WANDB_API_KEY", "") == "", "no test may reach a real account"
