"""Whole runs through the command line, as a user starts them; and what is left of them afterwards."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pyarrow.parquet
import pytest

from rlsys import tiny as tiny_task
from rlsys.run_directory import read_lines

ROOT = Path(__file__).parent.parent.parent
SMALL = ["trainer.prompts_per_step=4", "trainer.samples_per_prompt=4", "eval.every=2", "checkpoint.every=2"]
LIGHT = [
    "rollout.engines=1",
    "policy.ranks=1",
    "reward.workers=1",
]  # starting processes is most of what these tests cost
ROLES = {"rlsys-rollout-0", "rlsys-rollout-1", "rlsys-reward-0", "rlsys-reward-1", "rlsys-reference"}
ROLES |= {"rlsys-policy-0", "rlsys-policy-1"}
Rlsys = Callable[..., "subprocess.CompletedProcess[str]"]
Begin = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def held_out(tmp_path: Path) -> str:
    """Eight held-out prompts in a file, source named by the file."""
    file = tmp_path / "few.jsonl"
    file.write_text("".join(json.dumps({"prompt": r["prompt"]}) + "\n" for r in tiny_task.rows("zigzag_heldout")[:8]))
    return f"eval.datasets={file}"


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """The environment of a run, with a temporary directory of its own. When the test ends, nothing of the run may be left:
    no process (they all inherit the variable), no shared memory, no temporary file."""
    temporary = Path(tempfile.mkdtemp(prefix="t-"))
    shared_before = set(Path("/dev/shm").iterdir())
    yield os.environ | {"TMPDIR": str(temporary), "HF_HUB_OFFLINE": "1"}

    def left() -> list[str]:
        files = [*temporary.iterdir(), *(set(Path("/dev/shm").iterdir()) - shared_before)]
        return [f"process {p.pid} {p.name()}" for p in psutil.process_iter() if belongs(p, temporary)] + [
            *map(str, files)
        ]

    for _ in range(50):
        if not left():
            break
        time.sleep(0.1)
    assert left() == []
    temporary.rmdir()


def belongs(process: psutil.Process, temporary: Path) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get("TMPDIR", "").startswith(
            str(temporary)
        )
    except psutil.Error:
        return False


@pytest.fixture
def rlsys(environment: dict[str, str]) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    return lambda *words: subprocess.run(
        [sys.executable, "-m", "launch", *words], capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment
    )


@pytest.fixture
def begin(environment: dict[str, str]) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts a run that is to be disturbed, in a process group of its own as a terminal would."""
    started = []

    def start(*words: str) -> "subprocess.Popen[str]":
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "launch", *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()


def test_a_run_from_start_to_export(rlsys: Rlsys, held_out: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = ["train", "configs/tiny_cpu.yaml", f"run.dir={run}", held_out, *SMALL]
    first = rlsys(*command, "trainer.steps=3")
    assert first.returncode == 0, first.stderr
    assert str(run) in first.stdout
    assert "held-out accuracy" in first.stdout
    for chatter in ("Warning", "INFO", "DeepSpeed", "Loading"):
        assert chatter not in first.stdout + first.stderr

    lines = read_lines(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    names = "reward/mean reward/std loss kl entropy grad_norm clip_fraction mismatch/mean_abs mismatch/max_abs tokens "
    names += "tokens_per_second time/step time/rollout time/reward time/score time/update time/sync sync/version"
    assert set(names.split()) <= set(lines[1])
    assert [("eval/few/accuracy" in line) for line in lines] == [True, False, True, True]
    assert all(line["mismatch/max_abs"] < 1e-4 and line["lag"] == 0 for line in lines[1:])
    assert [p.name for p in sorted((run / "checkpoints").iterdir())] == ["step-000002", "step-000003"]
    samples = pyarrow.parquet.read_table(run / "samples" / "step-000002.parquet").to_pylist()
    assert len(samples) == 16
    assert {"uid", "completion", "reward", "advantage", "version"} <= set(samples[0])
    assert (run / "config.yaml").is_file()
    assert {"start", "begin", "agreement", "sync", "checkpoint", "done"} == {
        e["event"] for e in read_lines(run / "events.jsonl")
    }
    assert {"rollout-0.log", "policy-1.log", "reference.log", "reward-0.log"} <= {
        p.name for p in (run / "logs").iterdir()
    }

    again = rlsys(*command, "trainer.steps=5")
    assert again.returncode == 0, again.stderr
    assert "resumed from" in again.stdout
    lines = read_lines(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert [line["sync/version"] for line in lines[1:]] == [1, 2, 3, 4, 5]

    other = rlsys(*command, "trainer.steps=5", "policy.lr=1")
    assert other.returncode == 2
    assert "policy.lr: 0.0004 → 1.0" in other.stderr

    model = tmp_path / "model"
    assert rlsys("export", str(run), str(model)).returncode == 0
    out = tmp_path / "samples.parquet"
    evaluated = rlsys("eval", str(run), "--out", str(out))
    assert evaluated.returncode == 0, evaluated.stderr
    assert f"few: accuracy {lines[-1]['eval/few/accuracy']:.1%} of 8 prompts" in evaluated.stdout
    told = {r["prompt"]: r["completion"] for r in pyarrow.parquet.read_table(out).to_pylist()}
    assert told == {p: greedy(model, p) for p in told}, "transformers reads the export as the engines do"


def test_ppo_with_a_critic_runs_and_resumes(rlsys: Rlsys, held_out: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    small = ["trainer.prompts_per_step=16", "checkpoint.every=2", "critic.alone_steps=1", "critic.ranks=2", *LIGHT]
    command = ["train", "configs/ppo.yaml", f"run.dir={run}", held_out, *small]
    first = rlsys(*command, "trainer.steps=2")
    assert first.returncode == 0, first.stdout + first.stderr
    second = rlsys(*command, "trainer.steps=3")
    assert second.returncode == 0, second.stdout + second.stderr
    lines = read_lines(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert [("loss" in line, "critic/loss" in line) for line in lines[1:]] == [
        (False, True),
        (True, True),
        (True, True),
    ]
    assert lines[1]["critic/value_mean"] == 0, "nothing is expected at first"
    assert lines[3]["critic/value_mean"] != 0, "what was learned before the restart is still known"
    assert (run / "checkpoints" / "step-000002" / "critic").is_dir()


def test_many_methods_in_one_run(rlsys: Rlsys, held_out: str, tmp_path: Path) -> None:
    """A greedy baseline, dynamic sampling one step ahead, a correction, an adapted KL, entropy and length control."""
    run = tmp_path / "run"
    options = "algorithm.advantage=remax algorithm.loss=gmpo algorithm.normalize=decoupled algorithm.kl=k3_unbiased "
    options += "correction.method=icepop reference.kl_coef=0.01 reference.kl_target=0.001 entropy.coef=0.001 "
    options += "entropy.control=kl_cov entropy.share=0.1 overlong.mask=true overlong.buffer=4 pipeline.max_lag=1 "
    options += "dynamic_sampling.enabled=true policy.zero_stage=3"
    done = rlsys(
        *["train", "configs/tiny_cpu.yaml", f"run.dir={run}", held_out, *SMALL, *LIGHT],
        *["trainer.steps=3", *options.split()],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = read_lines(run / "metrics.jsonl")[1:]
    assert all(line["groups/equal"] == 0 for line in lines)
    assert all(line["correction/effective_share"] > 0.5 for line in lines)
    assert all(line["reward/overlong"] <= 0 for line in lines)
    assert lines[-1]["kl_coef"] != 0.01
    assert [line["lag"] for line in lines] == [0, 1, 1]
    for step in (1, 2, 3):
        samples = pyarrow.parquet.read_table(run / "samples" / f"step-{step:06d}.parquet").to_pylist()
        assert len(samples) == 16
        assert len({s["uid"] for s in samples}) == 4


def greedy(model: Path, prompt: str) -> str:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = torch.tensor([tokenizer.encode(prompt)])
    out = AutoModelForCausalLM.from_pretrained(model).generate(ids, max_new_tokens=10, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def test_an_interrupted_run_ends_with_130_and_leaves_nothing_running(
    begin: Begin, environment: dict[str, str], held_out: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = ["train", "configs/tiny_cpu.yaml", f"run.dir={run}", held_out, *SMALL]
    process = begin(*command, "trainer.steps=100000")
    wait_for(lambda: len(read_lines(run / "metrics.jsonl")) > 4)
    listed = subprocess.run(
        [str(Path(sys.executable).parent / "ray"), "list", "actors", "--format", "json"],
        capture_output=True,
        text=True,
        env=environment | {"RAY_AUTH_MODE": "token", "RAY_ADDRESS": address(run)},
        check=True,
    )
    assert {a["name"] for a in json.loads(listed.stdout[listed.stdout.index("[") :]) if a["state"] == "ALIVE"} == ROLES
    os.killpg(process.pid, signal.SIGINT)  # every process of the group gets it, as on Ctrl-C in a terminal
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Run the same command again" in output


def test_less_usual_settings_go_together(rlsys: Rlsys, held_out: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = rlsys(
        *["train", "configs/tiny_cpu.yaml", f"run.dir={run}", held_out, *SMALL, "trainer.steps=3"],
        *["trainer.epochs_per_step=2", "trainer.updates_per_step=4", "pipeline.max_lag=1", "rollout.temperature=0.8"],
        *["policy.zero_stage=3", "policy.gradient_checkpointing=true", "policy.tokens_per_pack=20", "policy.threads=2"],
        *["policy.dtype=bfloat16", "rollout.dtype=bfloat16", "sync.transport=object_store", "rollout.engines=1"],
        *["algorithm.normalize=sequence_mean", "algorithm.kl=k1", "algorithm.std=none", "reference.kl_coef=0"],
        "reward.functions={tests/system/own_reward.py:closeness: 0.5, zigzag: 1.0}",
    )
    assert done.returncode == 0, done.stderr
    lines = read_lines(run / "metrics.jsonl")
    assert [line["lag"] for line in lines[1:]] == [0, 1, 1]
    assert all(line["kl"] == 0 for line in lines[1:])
    assert lines[1]["mismatch/mean_abs"] < 0.1, "bf16 on both sides"
    assert all("reward/component/closeness" in line for line in lines[1:])
    assert not (run / "logs" / "reference.log").exists()


def address(run: Path) -> str:
    """The run's own Ray, as its log says."""
    return str(next(e["ray"] for e in read_lines(run / "events.jsonl") if e["event"] == "start"))


def wait_for(condition: Callable[[], bool], seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)


def test_a_rank_that_dies_ends_a_run_that_may_not_restart_with_its_name_and_last_words(
    begin: Begin, held_out: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = begin("train", "configs/tiny_cpu.yaml", f"run.dir={run}", held_out, *SMALL, "run.max_restarts=0")
    wait_for(lambda: (run / "logs" / "policy-1.pid").is_file())
    psutil.Process(json.loads((run / "logs" / "policy-1.pid").read_text())["pid"]).kill()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "starting the policy: policy-1 died" in output
    assert "Last lines of" in output
    assert "run.max_restarts is 0: the same command goes on" in output


@pytest.mark.parametrize(
    ("rows", "overrides", "sentence"),
    [
        ("", [], "holds no prompts; it is empty"),
        ('{"question": "123456>"}\n', [], "data.jsonl:1: the row has no field `prompt`; it has question"),
        (
            '{"prompt": "123456>"}\n{"prompt": "%s>"}\n' % ("1" * 60),
            [],
            "data.jsonl:2: the prompt has 61 tokens; at most 54 fit",
        ),
        ('{"prompt": "123456>"}\n', ["reward.functions=no_such_module:f"], "No module named 'no_such_module'"),
        ('{"prompt": "123456>"}\n', ["model.path=nobody/no-such-model"], "model.path"),
    ],
    ids=["empty", "no prompt field", "overlong", "reward import", "no model"],
)
def test_bad_input_ends_with_2_and_a_sentence(
    rlsys: Rlsys, tmp_path: Path, rows: str, overrides: list[str], sentence: str
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(rows)
    command = ["train", "configs/tiny_cpu.yaml", f"run.dir={tmp_path}/run", f"data.train={data}", "eval.datasets=[]"]
    found = rlsys(*command, *LIGHT, "reference.kl_coef=0", *overrides)
    assert found.returncode == 2, found.stdout + found.stderr
    assert sentence in found.stderr
    assert "Traceback" not in found.stderr


def test_a_taken_port_or_directory_is_refused(rlsys: Rlsys, tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        for option in ("policy.port", "cluster.dashboard_port"):
            found = rlsys("train", "configs/tiny_cpu.yaml", f"run.dir={tmp_path}/run", f"{option}={port}")
            assert found.returncode == 2
            assert f"{option}: port {port} is taken" in found.stderr
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("precious")
    found = rlsys("train", "configs/tiny_cpu.yaml", f"run.dir={tmp_path}/other")
    assert found.returncode == 2
    assert "not a run" in found.stderr
    assert (tmp_path / "other" / "thesis.tex").read_text() == "precious"
