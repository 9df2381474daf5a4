"""The run directory: whose it is, what may change, what is written."""

import fcntl
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from fakes import make_batch, make_config, make_sample
from machines import Machines
from omegaconf import OmegaConf

from rlsys.checks import load_checked
from rlsys.errors import ConfigError
from rlsys.runs.directory import (
    RunDirectory,
    read_lines,
    read_samples,
    require_writable,
    write_user_file,
)
from rlsys.runs.disk import write_atomically
from rlsys.types import Columns, Verdict


def opened(tmp_path, *overrides: str) -> RunDirectory:
    return RunDirectory(make_config(tmp_path, *overrides))


def test_a_new_directory_is_made_with_its_parents_and_the_configuration(tmp_path):
    config = make_config(tmp_path, f"run.dir={tmp_path}/deep/er/run")
    run = RunDirectory(config)
    assert sorted(p.name for p in run.path.iterdir()) == [".lock", "checkpoints", "config.yaml", "logs", "samples"]
    assert load_checked(run.path / "config.yaml") == config


def test_an_empty_directory_may_be_taken(tmp_path):
    (tmp_path / "run").mkdir()
    assert (opened(tmp_path).path / "config.yaml").is_file()


# --- taken, strange or unusable --------------------------------------------------------------------------------------------


NO_LOCKS = "import fcntl, os\ndef flock(*_): raise OSError(37, 'No locks available')\nfcntl.flock = flock\n"


@pytest.fixture(params=["locks", "no locks"])
def with_locks(request, monkeypatch):
    """A file system with locks, or one without, such as Lustre mounted without `-o flock`."""
    if request.param == "locks":
        return True
    monkeypatch.setattr(fcntl, "flock", fcntl.flock)
    exec(NO_LOCKS, {})
    return False


def test_a_directory_is_refused_while_another_run_holds_it(tmp_path, with_locks):
    run = opened(tmp_path)
    with pytest.raises(ConfigError, match="in use by another run"):
        opened(tmp_path)
    run.close()
    opened(tmp_path).close()


def test_a_directory_is_refused_until_the_process_that_holds_it_is_killed(tmp_path, with_locks):
    config = make_config(tmp_path)
    hold = ("" if with_locks else NO_LOCKS) + (
        "import sys, time; from rlsys.checks import load_checked; from rlsys.runs.directory import RunDirectory; "
        f"run = RunDirectory(load_checked({str(tmp_path / 'small.yaml')!r}, ['run.dir={config.run.dir}'])); "
        "print('held', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="in use by another run"):
            RunDirectory(config)
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
    RunDirectory(config).close()


def test_a_directory_with_something_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match=r"not a run \(no config\.yaml\)"):
        opened(tmp_path)
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_a_run_killed_before_it_wrote_its_configuration_can_start_again(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    (tmp_path / "run" / ".config.yaml.tmp").write_text("trainer: {st")
    assert (opened(tmp_path).path / "config.yaml").is_file()


@pytest.mark.parametrize("below", ["", "/below/it"])
def test_a_file_is_refused(tmp_path, below):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file, or lies below one"):
        opened(tmp_path, f"run.dir={tmp_path}/file{below}")


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot write to /proc/"):
        opened(tmp_path, "run.dir=/proc/no_such_process/run")


# --- going on with a run ---------------------------------------------------------------------------------------------------


def begun(tmp_path, *overrides):
    """A run that has done something."""
    run = opened(tmp_path, *overrides)
    run.record_metrics({"step": 0})
    run.close()


def test_a_run_that_did_nothing_yet_may_be_started_with_other_settings(tmp_path):
    opened(tmp_path).close()
    opened(tmp_path, "policy.lr=0.5").close()
    assert load_checked(tmp_path / "run" / "config.yaml").policy.lr == 0.5


def test_other_settings_are_refused_with_both_values(tmp_path):
    begun(tmp_path)
    with pytest.raises(ConfigError) as error:
        opened(tmp_path, "policy.lr=0.5", "trainer.samples_per_prompt=8", "eval.every=7")
    message = str(error.value)
    assert "policy.lr: 0.125 → 0.5" in message
    assert "trainer.samples_per_prompt: 4 → 8" in message
    assert "eval.every" not in message
    assert "choose another run.dir" in message


@pytest.mark.parametrize(
    "override",
    [
        "run.seed=1",
        "model.path=hub/name",
        "data.shuffle=false",
        "reward.functions=exact",
        "reward.shuffle=true",
        "rollout.temperature=0.5",
        "rollout.max_new_tokens=6",
        "algorithm.std=none",
        "algorithm.normalize=constant",
        "reference.kl_coef=0.1",
        "pipeline.max_lag=1",
        "trainer.updates_per_step=4",
        "policy.weight_decay=0.1",
    ],
)
def test_what_changes_the_learning_may_not_change(tmp_path, override):
    begun(tmp_path)
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        opened(tmp_path, override)


@pytest.mark.parametrize(
    "override",
    [
        "trainer.steps=9",
        "eval.every=1",
        "eval.datasets=builtin:zigzag_heldout",
        "checkpoint.keep_last=5",
        "watchdog.stall_s=50",
        "sync.verify=false",
        "reward.workers=7",
        "reward.timeout_s=1",
        "rollout.engines=1",
        "rollout.max_sequences=2",
        "policy.tokens_per_pack=99",
    ],
)
def test_what_leaves_the_learning_alone_may_change_and_is_written_down(tmp_path, override):
    begun(tmp_path)
    run = opened(tmp_path, override)
    assert load_checked(run.path / "config.yaml") == make_config(tmp_path, override)


def test_a_run_of_an_earlier_version_goes_on_without_options_that_are_gone(tmp_path):
    begun(tmp_path)
    file = tmp_path / "run" / "config.yaml"
    tree = OmegaConf.load(file)
    for option, value in (("run.grace_s", 5.0), ("policy.offload_optimizer", True), ("rollout.top_p", 1.0)):
        OmegaConf.update(tree, option, value, force_add=True)
    OmegaConf.save(tree, file)
    opened(tmp_path, "policy.offload=optimizer").close()
    assert "grace_s" not in file.read_text()
    OmegaConf.update(tree, "entropy.kl_coef", 3.0, force_add=True)
    OmegaConf.save(tree, file)
    with pytest.raises(ConfigError, match=r"config.yaml: `entropy.kl_coef` is no longer an option"):
        opened(tmp_path)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_other_steps_need_a_word_about_a_falling_learning_rate(tmp_path, schedule):
    falling = f"policy.lr_schedule={schedule}"
    begun(tmp_path, falling, "trainer.steps=8")
    with pytest.raises(
        ConfigError, match=r"fall to 0 at step 8\. .*Set policy.lr_schedule_steps to 20 to accept the jump\.$"
    ):
        opened(tmp_path, falling, "trainer.steps=20")
    with pytest.raises(ConfigError, match=r"steps to 6 to accept the jump, or 8 to keep its course\.$"):
        opened(tmp_path, falling, "trainer.steps=6")
    for steps, last in ((6, 8), (8, 8), (20, 20), (20, 30)):
        opened(tmp_path, falling, f"trainer.steps={steps}", f"policy.lr_schedule_steps={last}").close()


def test_a_constant_learning_rate_lets_a_run_have_other_steps(tmp_path):
    begun(tmp_path, "trainer.steps=8")
    opened(tmp_path, "trainer.steps=20").close()


def test_a_refused_change_leaves_the_old_configuration(tmp_path):
    begun(tmp_path)
    with pytest.raises(ConfigError):
        opened(tmp_path, "policy.lr=0.5")
    assert load_checked(tmp_path / "run" / "config.yaml").policy.lr == 0.125


def test_a_directory_that_was_moved_is_still_the_run(tmp_path):
    begun(tmp_path)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert opened(tmp_path, f"run.dir={tmp_path}/moved").path == tmp_path / "moved"


# --- what is written -------------------------------------------------------------------------------------------------------


def test_metrics_are_one_line_per_step(tmp_path):
    run = opened(tmp_path)
    run.record_metrics({"step": 0, "loss": 0.5})
    run.record_metrics({"step": 1, "loss": 0.25})
    text = (run.path / "metrics.jsonl").read_text()
    assert [json.loads(line) for line in text.splitlines()] == [{"step": 0, "loss": 0.5}, {"step": 1, "loss": 0.25}]


def test_lines_of_steps_that_will_be_repeated_are_removed(tmp_path):
    run = opened(tmp_path)
    for step in range(4):
        run.record_metrics({"step": step})
    run.rewind_metrics(2)
    assert [line["step"] for line in read_lines(run.path / "metrics.jsonl")] == [0, 1, 2]
    run.rewind_metrics(-1)
    assert read_lines(run.path / "metrics.jsonl") == []


def test_a_line_cut_off_by_a_crash_does_not_spoil_the_next(tmp_path):
    run = opened(tmp_path)
    run.record_metrics({"step": 1})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "los')
    assert read_lines(run.path / "metrics.jsonl") == [{"step": 1}]
    run.rewind_metrics(1)
    run.record_metrics({"step": 2})
    assert read_lines(run.path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]


def test_events_carry_their_time_and_facts(tmp_path):
    run = opened(tmp_path)
    run.record_event("start", step=0)
    run.record_event("stop", cause="RuntimeError: a\nb")
    first, second = read_lines(run.path / "events.jsonl")
    assert (first["event"], first["step"]) == ("start", 0)
    assert second["cause"] == "RuntimeError: a\nb"
    assert second["time"] >= first["time"] > 1e9


def test_old_log_probs_are_saved_and_token_advantages_if_they_differ(tmp_path):
    run = opened(tmp_path)
    batch = make_batch([1, 0, 0], [0, 0, 1], lengths=[2, 0, 1])
    batch = replace(batch, failed=[(make_sample("p1", 7), Verdict(None, failure="timeout"))])
    old, alike, apart = (np.array(x, dtype=np.float32) for x in ([-1, -2, -4], [0.5, 0.5, -1], [0.5, 0.25, -1]))
    for name, advantages in (("step-000001", alike), ("step-000002", apart)):
        run.save_samples(name, batch, np.zeros(3, np.float32), Columns(old=old, advantages=advantages))
    run.wait_for_samples()
    even, uneven = (
        pyarrow.parquet.read_table(run.path / "samples" / f"step-00000{n}.parquet").to_pydict() for n in (1, 2)
    )
    assert even["old_logprobs"] == uneven["old_logprobs"] == [[-1, -2], [], [-4], None]
    assert even["token_advantages"] == [None] * 4
    assert uneven["token_advantages"] == [[0.5, 0.25], [], [-1], None]


def test_the_newest_bytes_of_a_file_are_read_from_their_first_whole_line_on(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"a": 1}\n{"a": 2}\n{"a": 3}\n7\n{"a": ')
    assert read_lines(file) == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert read_lines(file, newest=20) == [{"a": 3}]
    assert read_lines(file, newest=10_000) == read_lines(file)


def test_samples_can_be_read_back_with_all_columns(tmp_path):
    run = opened(tmp_path)
    batch = make_batch([1, 0], [0, 1])
    batch = replace(batch, samples=[make_sample("p0", 0), make_sample("p1", 3, "48", "length", version=2)])
    run.save_samples("step-000001", batch, np.array([0.5, -0.5], dtype=np.float32))
    run.wait_for_samples()
    table = pyarrow.parquet.read_table(run.path / "samples" / "step-000001.parquet").to_pylist()
    assert table[1] == {
        "uid": "p1",
        "index": 3,
        "source": "zigzag",
        "prompt": "",
        "completion": "48",
        "reward": 0.0,
        "advantage": -0.5,
        "answer": None,
        "components": "{}",
        "failure": None,
        "detail": None,
        "finish": "length",
        "version": 2,
        "changes": [],
        "tokens": [6, 10],
        "rollout_logprobs": [-0.125, -0.25],
        "old_logprobs": None,
        "token_advantages": None,
        "rewards": "",
        "row": "{}",
        "messages": None,
        "observations": [],
        "after": [],
        "transcript": None,
        "turn_scores": None,
    }
    assert read_samples(run.path, "step-000001")[0] == {
        "uid": "p0",
        "prompt": "",
        "completion": "481625",
        "reward": 1.0,
    }
    assert [p.name for p in (run.path / "samples").iterdir()] == ["step-000001.parquet"]


def test_samples_are_whole_once_the_run_is_closed(tmp_path):
    run = opened(tmp_path)
    run.save_samples("step-000001", make_batch([1, 0], [0, 1]))
    run.close()
    assert len(read_samples(run.path, "step-000001")) == 2


def test_an_error_of_writing_samples_is_raised(tmp_path):
    run = opened(tmp_path)
    run.save_samples("nowhere/step-000001", make_batch([1, 0], [0, 1]))
    with pytest.raises(FileNotFoundError):
        run.save_samples("step-000002", make_batch([1, 0], [0, 1]))
    run.save_samples("nowhere/step-000003", make_batch([1, 0], [0, 1]))
    with pytest.raises(FileNotFoundError):
        run.wait_for_samples()
    run.wait_for_samples()  # it is told once


def test_samples_that_were_never_saved_are_none(tmp_path):
    assert read_samples(tmp_path, "eval-000000") == []
    assert read_lines(tmp_path / "metrics.jsonl") == []


def test_a_file_is_replaced_whole(tmp_path):
    file = tmp_path / "state.json"
    write_atomically(file, "old")
    with file.open() as still_open:
        write_atomically(file, "new")
        assert still_open.read() == "old"
    assert file.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_an_event_behind_a_line_that_was_cut_off_is_a_line_of_its_own(tmp_path):
    config = make_config(tmp_path)
    run = RunDirectory(config)
    run.record_event("first")
    run.close()
    with (run.path / "events.jsonl").open("a") as file:
        file.write('{"time": 1, "eve')
    again = RunDirectory(config)
    again.record_event("second")
    again.close()
    assert [e["event"] for e in read_lines(run.path / "events.jsonl")] == ["first", "second"]


def test_a_file_that_a_user_names_gets_its_folder_or_a_sentence(tmp_path):
    write_user_file(tmp_path / "deep" / "er" / "figures.json", "{}")
    assert (tmp_path / "deep" / "er" / "figures.json").read_text() == "{}"
    (tmp_path / "file").write_text("precious")
    for file, message in {
        tmp_path / "file" / "figures.json": "cannot be written: .* Give another place",
        tmp_path / "deep": "is a folder",
        Path("/proc/figures.json"): "cannot be written: No such file",
    }.items():
        with pytest.raises(ConfigError, match=f"{file} {message}"):
            write_user_file(file, "{}")
        with pytest.raises(ConfigError, match=f"{file} {message}"):
            require_writable(file)
    require_writable(tmp_path / "deep" / "er" / "figures.json")
    assert (tmp_path / "deep" / "er" / "figures.json").read_text() == "{}"
    require_writable(tmp_path / "deep" / "new.json")
    assert not (tmp_path / "deep" / "new.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "file"]


def test_samples_metrics_and_events_are_on_disk_before_the_checkpoint_that_stands_for_them(tmp_path, monkeypatch):
    """A checkpoint has its name once it is renamed; a power failure loses what was not synced before."""
    synced: list[str] = []
    real_sync, real_rename = os.fsync, Path.rename
    written: dict[str, int] = {}
    lost = []

    def fsync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append(path.name)
        if path.is_file():
            written[path.name] = path.stat().st_size
        real_sync(descriptor)

    def rename(path, target):
        if target.name.startswith("step-") and target.parent.name == "checkpoints":
            run, step = target.parents[1], int(target.name[-6:])
            lines = (run / "metrics.jsonl").read_bytes()[: written.get("metrics.jsonl", 0)].splitlines()
            lost.extend({f"line {n}" for n in range(step + 1)} - {f"line {json.loads(line)['step']}" for line in lines})
            lost.extend({p.name for p in (run / "samples").glob("step-*.parquet")} - written.keys())
            lost.extend({"samples", "events.jsonl"} - set(synced))
            synced.clear()
        return real_rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    Machines(tmp_path, "trainer.steps=5", "checkpoint.every=2").run()
    assert lost == []
    assert {"metrics.jsonl", "step-000001.parquet", "step-000005.parquet"} <= written.keys()
