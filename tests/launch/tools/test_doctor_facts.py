"""`rlsys doctor`: the facts that it collects about a machine."""

import os
import socket
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from launch.ray_session import leftovers
from launch.tools.doctor import facts, system_checks
from rlsys.checks import load_checked


def test_facts_are_those_of_this_machine(monkeypatch, tmp_path):
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o640)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    collected = facts.collect_facts()
    assert collected.pins["ray"] == f"=={collected.versions['ray']}"
    assert collected.loopback
    assert 0 < collected.available <= collected.memory
    assert (collected.token, collected.token_mode) == (str(token), 0o640)
    assert {f.purpose for f in collected.folders} == {"runs", "temporary files", "models of the hub", "prepared data"}
    assert "secret" not in repr(collected)


@pytest.mark.parametrize(
    ("variables", "path", "variable"),
    [
        ({}, "home/.cache/huggingface/hub", "XDG_CACHE_HOME"),
        ({"XDG_CACHE_HOME": "x"}, "x/huggingface/hub", "XDG_CACHE_HOME"),
        ({"XDG_CACHE_HOME": "x", "HF_HOME": "h"}, "h/hub", "HF_HOME"),
        ({"XDG_CACHE_HOME": "x", "HF_HOME": "h", "HF_HUB_CACHE": "c"}, "c", "HF_HUB_CACHE"),
    ],
)
def test_the_environment_sets_the_folder_of_models(variables, path, variable, tmp_path, monkeypatch):
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    [folder] = [f for f in facts.writable_folders(None) if f.purpose == "models of the hub"]
    assert (folder.path, folder.variable) == (str(tmp_path / path), variable)
    [result] = system_checks.disk(facts.MachineFacts(folders=(replace(folder, writable=False),)))
    assert result.fix == f"export {variable}=/with/room"


def test_a_folder_that_does_not_exist_is_judged_by_its_parent(tmp_path):
    folder = facts.writable_folder("runs", tmp_path / "a" / "b")
    assert folder.writable == os.access(tmp_path, os.W_OK)
    assert folder.free > 0
    (tmp_path / "file").touch()
    assert not facts.writable_folder("runs", tmp_path / "file" / "b").writable


def test_a_tmpdir_that_does_not_exist_differs_from_the_one_in_use(monkeypatch):
    monkeypatch.setenv("TMPDIR", "/scratch/no/such/job.7")
    monkeypatch.setattr(facts, "SYSTEM_TEMP_DIR", "/tmp")
    monkeypatch.setattr(leftovers, "SYSTEM_TEMP_DIR", "/tmp")
    collected = facts.collect_facts()
    assert (collected.tmpdir, collected.system_temp_dir) == ("/scratch/no/such/job.7", "/tmp")
    assert [f.path for f in collected.folders if f.purpose == "temporary files"] == ["/tmp"]
    [finding] = system_checks.temp_dir(collected)
    assert "TMPDIR is /scratch/no/such/job.7, which does not exist" in finding.message


def test_a_port_that_is_taken_has_its_owner(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        use = (port, f"{psutil.Process().name()}, process {os.getpid()}")
        monkeypatch.setattr(facts, "RAY_PORTS", {"--port": port})
        assert facts.needed_ports(None) == {"--port": use}
    assert facts.needed_ports(None) == {"--port": (port, "")}
    assert facts.needed_ports(load_checked("configs/tiny_cpu.yaml")) == {}


def test_options_that_need_a_compiler_are_known():
    wanted = ["policy.compile=true", "rollout.enforce_eager=false"]
    assert facts.collect_facts(load_checked("configs/tiny_cpu.yaml")).needs_compiler == ()
    options = facts.collect_facts(load_checked("configs/tiny_cpu.yaml", wanted)).needs_compiler
    assert options == ("policy.compile true", "rollout.enforce_eager false")
    assert facts.collect_facts(load_checked("configs/tiny_cpu.yaml", wanted[:1])).needs_compiler == options[:1]


def test_a_hub_model_counts_as_downloaded_once_the_cache_has_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert facts.model_not_downloaded("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    (tmp_path / "models--Qwen--Qwen2.5-0.5B").mkdir()
    assert facts.model_not_downloaded("Qwen/Qwen2.5-0.5B") == ""
    assert facts.model_not_downloaded("builtin:tiny") == ""
    assert facts.model_not_downloaded(str(tmp_path)) == ""


def test_the_cuda_version_of_torch_is_read_without_importing_it():
    import torch

    assert facts.torch_cuda() == (torch.version.cuda or "")


def test_facts_are_collected_without_heavy_imports():
    code = "from launch.tools.doctor.command import run_checks, collect_facts; run_checks(collect_facts()); "
    code += "import sys; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "vllm", "deepspeed", "transformers"} & set(modules)
