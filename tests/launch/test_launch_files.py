"""launch/*.sh, slurm.sbatch, rayjob.yaml and skypilot.yaml use options, fields and files that exist."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import jsonschema
import kubernetes_validate
import pytest
import yaml

from launch.tools.cli import commands
from rlsys.config.loading import load_config
from rlsys.runs.stopping import GRACE_S

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = ["local.sh", "slurm.sbatch"]

# What `sbatch --help` and `srun --help` of Slurm 22.05 list, of which we use some.
SLURM = {
    "sbatch": "job-name nodes ntasks-per-node gpus-per-node exclusive requeue open-mode signal output time partition",
    "srun": "overlap nodes ntasks exclude nodelist",
    "scontrol": "",
}
ENVIRONMENT = {  # set by Slurm, SkyPilot and Ray for a job, or read by Ray
    "SLURM_SUBMIT_DIR",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_ID",
    "SKYPILOT_NODE_IPS",
    "SKYPILOT_NODE_RANK",
    "SKYPILOT_NUM_GPUS_PER_NODE",
    "SKYPILOT_NUM_NODES",
    "RAY_ADDRESS",
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    "RAY_JOB_STOP_WAIT_TIME_S",
}


def text(name: str) -> str:
    return (LAUNCH / name).read_text()


def shell(name: str) -> str:
    """The part that a shell runs."""
    if name == "skypilot.yaml":
        task = yaml.safe_load(text(name))
        return str(task["setup"] + task["run"])
    return str(yaml.safe_load(text(name))["spec"]["entrypoint"]) if name == "rayjob.yaml" else text(name)


def calls(script: str, program: str) -> Iterator[list[str]]:
    """The words after each call of a program, to the end of its command."""
    script = re.sub(r"<< '(\w+)'[ &]*\n.*?\n\s*\1\n", "\n", script, flags=re.S)  # what is another language
    for line in script.replace("\\\n", " ").splitlines():
        if line.lstrip().startswith(("#", "[")):
            continue
        line = re.sub(r"\s#.*", "", line)
        tokens = shlex.split(line.replace("$(", " ").replace(")", " ").replace("<(", " "))
        for i, word in enumerate(tokens):
            if word.rpartition("/")[2] == program and (i == 0 or not tokens[i - 1].endswith("echo")):
                rest = tokens[i + 1 :]
                end = next((n for n, w in enumerate(rest) if w in ("|", "||", "&", "&&", ";", ">", "<<")), len(rest))
                yield rest[:end]


def options(command: click.Command) -> set[str]:
    return {name for p in command.params for name in (*p.opts, *p.secondary_opts)}


@pytest.mark.parametrize("name", [*SCRIPTS, "skypilot.yaml", "rayjob.yaml"])
def test_every_shell_script_is_one(name: str) -> None:
    done = subprocess.run(["bash", "-n"], input=shell(name), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    linter = [Path(sys.executable).parent / "shellcheck", "--shell=bash", "--severity=warning", "-"]
    done = subprocess.run(linter, input=shell(name), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def ray_commands() -> click.Group:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Ray imports speaks of the future
        from ray.scripts.scripts import cli
    group: click.Group = cli
    return group


@pytest.mark.parametrize("name", ["slurm.sbatch", "skypilot.yaml", "rayjob.yaml"])
def test_every_option_of_ray_and_rlsys_exists(name: str, ray_commands: click.Group) -> None:
    count = 0
    for program, group in (("ray", ray_commands), ("rlsys", commands)):
        for words in calls(shell(name), program):
            command = group.commands[words[0]]
            for word in words[1:]:
                if word.startswith("--"):
                    assert word.partition("=")[0] in options(command), f"{program} {words[0]} {word}"
            count += 1
    assert count


def test_the_local_script_trains_with_the_arguments_it_is_given() -> None:
    command = [str(LAUNCH / "local.sh"), str(ROOT / "configs" / "tiny_cpu.yaml"), "trainer.stesp=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "Did you mean `trainer.steps`?" in " ".join(done.stderr.split())


@pytest.mark.parametrize("stage", ["starts", "joins"])
@pytest.mark.parametrize(("number", "queued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_slurm_job_that_is_stopped_before_its_driver_starts_ends_cleanly(
    stage: str, number: int, queued: bool, tmp_path: Path
) -> None:
    listen = f"{sys.executable} -m http.server --bind 127.0.0.2 6379" if stage == "joins" else "sleep 60"
    programs = {
        "ray": f'[ "$1" = start ] || exit 0; echo $$ > head; touch starts; exec {listen}',
        "python": "touch joins; exec sleep 60",
        "hostname": "echo 127.0.0.2",
        "scontrol": '[ "$1" = show ] && echo here || echo "$*" > queued',
    }
    job = slurm_job(tmp_path, programs)
    with subprocess.Popen(["bash", str(LAUNCH / "slurm.sbatch"), "CONFIG"], env=job) as script:
        deadline = time.monotonic() + 20
        while not (tmp_path / stage).exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        script.send_signal(number)
        assert script.wait(20) == 0
    assert (tmp_path / "queued").exists() == queued
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "head").read_text()), 0)


@pytest.mark.parametrize("token_exists", [False, True])
def test_only_the_user_can_read_the_token_of_a_slurm_job(token_exists: bool, tmp_path: Path) -> None:
    token = tmp_path / ".ray" / "auth_token"
    if token_exists:
        token.parent.mkdir()
        token.write_text("old")
        token.chmod(0o644)
    programs = {
        "ray": '[ "$1" != start ] || exit 1; mkdir -p ~/.ray; [ -f ~/.ray/auth_token ] || echo new > ~/.ray/auth_token',
        "python": "exit 1",
        "hostname": "echo 127.0.0.2",
        "scontrol": "echo here",
    }
    done = subprocess.run(
        ["bash", str(LAUNCH / "slurm.sbatch"), "CONFIG"], env=slurm_job(tmp_path, programs), timeout=60
    )
    assert done.returncode == 1, "Ray's head did not start"
    assert token.stat().st_mode & 0o777 == 0o600


def slurm_job(folder: Path, programs: dict[str, str]) -> dict[str, str]:
    """The environment of a job whose home is that folder, with shell scripts in place of programs."""
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name, script in programs.items():
        (folder / ".venv" / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / ".venv" / "bin" / name).chmod(0o755)
    mine = {"HOME": str(folder), "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NODELIST": "here", "SLURM_JOB_ID": "7"}
    return dict(os.environ) | mine


@pytest.mark.parametrize("program", ["srun", "scontrol"])
def test_every_option_of_slurm_exists(program: str) -> None:
    commands = list(calls(text("slurm.sbatch"), program))
    assert commands
    known = {f"--{name}" for name in SLURM[program].split()}
    for words in commands:
        mine = words[: next((i for i, w in enumerate(words) if not w.startswith("--")), len(words))]
        assert {word.partition("=")[0] for word in mine} <= known


def test_every_sbatch_line_is_an_option_of_sbatch() -> None:
    lines = re.findall(r"^#SBATCH (--[\w-]+)(?:=\S+)?$", text("slurm.sbatch"), re.M)
    assert len(lines) == text("slurm.sbatch").count("#SBATCH ")
    assert {line.removeprefix("--") for line in lines} <= set(SLURM["sbatch"].split())


@pytest.mark.parametrize("name", [*SCRIPTS, "rayjob.yaml", "skypilot.yaml"])
def test_every_environment_variable_exists(name: str) -> None:
    variables = set(re.findall(r"\b(?:SLURM|SKYPILOT|RAY)_[A-Z_]+\b", text(name)))
    assert variables <= ENVIRONMENT


@pytest.mark.parametrize("name", ["slurm.sbatch", "rayjob.yaml", "skypilot.yaml"])
def test_every_configuration_exists_and_has_these_options(name: str) -> None:
    configs = re.findall(r"configs/[\w.]+\.yaml", text(name))
    assert configs
    overrides = [
        w for words in calls(shell(name), "rlsys") for w in words if re.match(r"[a-z_]+\.[a-z_.]+=", w) and "$" not in w
    ]
    for config in configs:
        load_config(ROOT / config, overrides)
    assert overrides


def test_our_clusters_always_require_a_token() -> None:
    for name in ("slurm.sbatch", "skypilot.yaml"):
        assert "RAY_AUTH_MODE=token" in text(name)
    assert yaml.safe_load(text("rayjob.yaml"))["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    started = [line for line in (ROOT / "docker" / "README.md").read_text().splitlines() if " ray start " in line]
    assert len(started) == 2
    assert all("--env RAY_AUTH_MODE=token --env RAY_AUTH_TOKEN " in line for line in started)
    [step] = [line for line in text("README.md").splitlines() if "`ray start --address=HEAD:6379`" in line]
    assert "`export RAY_AUTH_MODE=token`" in step, "a node that joins does not do so by itself"


# --- Kubernetes ------------------------------------------------------------------------------------------------------------


def strict(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}
KUBERNETES = "1.32"  # whose own schema a pod has to meet
PARAMETERS = {"type": "object", "additionalProperties": {"type": "string"}}
GROUP = {"rayStartParams": PARAMETERS, "template": {"type": "object"}}
COUNT = {"type": "integer", "minimum": 1}
RAYJOB = strict(  # the fields of KubeRay's RayJob, ray.io/v1, that we use
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=strict(["name"], name=NAME),
    spec=strict(
        ["entrypoint", "rayClusterSpec"],
        entrypoint={"type": "string"},
        runtimeEnvYAML={"type": "string"},
        backoffLimit={"type": "integer"},
        shutdownAfterJobFinishes={"type": "boolean"},
        rayClusterSpec=strict(
            ["rayVersion", "headGroupSpec", "workerGroupSpecs"],
            rayVersion={"type": "string"},
            authOptions=strict(["mode"], mode={"enum": ["token", "disabled"]}),
            headGroupSpec=strict(["template"], **GROUP),
            workerGroupSpecs={
                "type": "array",
                "items": strict(
                    ["groupName", "template"],
                    groupName=NAME,
                    replicas=COUNT,
                    minReplicas=COUNT,
                    maxReplicas=COUNT,
                    **GROUP,
                ),
            },
        ),
    ),
)


@pytest.fixture
def rayjob() -> dict[str, Any]:
    manifest: dict[str, Any] = yaml.safe_load(text("rayjob.yaml"))
    return manifest


def templates(rayjob: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = rayjob["spec"]["rayClusterSpec"]
    return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def pods(rayjob: dict[str, Any]) -> list[dict[str, Any]]:
    return [template["spec"] for template in templates(rayjob)]


def test_the_rayjob_has_valid_fields(rayjob: dict[str, Any]) -> None:
    jsonschema.validate(rayjob, RAYJOB)
    for template in templates(rayjob):
        resource = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template}
        kubernetes_validate.validate(resource, KUBERNETES, strict=True)


def test_the_rayjob_names_our_ray_our_image_and_its_user(rayjob: dict[str, Any]) -> None:
    pinned = re.search(r"ray\[default\]==([\d.]+)", (ROOT / "pyproject.toml").read_text())
    assert pinned
    assert rayjob["spec"]["rayClusterSpec"]["rayVersion"] == pinned[1]
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    gpu = dockerfile[dockerfile.index(" AS gpu\n") :]
    for pod in pods(rayjob):
        assert pod["containers"][0]["image"] == "rlsys:gpu"
        assert f"--uid {pod['securityContext']['runAsUser']} " in gpu


def test_every_path_of_the_rayjob_lies_on_a_mounted_volume(rayjob: dict[str, Any]) -> None:
    for pod in pods(rayjob):
        mounts = {m["name"]: m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}
        assert set(mounts) == {v["name"] for v in pod["volumes"]}
        for path in re.findall(r"(?<=[ =\[])(/\w+)/", rayjob["spec"]["entrypoint"]):
            assert path in mounts.values()
        assert mounts["shm"] == "/dev/shm"


def test_the_rayjob_leaves_a_stopped_run_time_to_save(rayjob: dict[str, Any]) -> None:
    patience = int(yaml.safe_load(rayjob["spec"]["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"])
    assert patience > 2 * GRACE_S
    assert all(pod["terminationGracePeriodSeconds"] >= patience for pod in pods(rayjob))


# --- SkyPilot --------------------------------------------------------------------------------------------------------------


def test_the_skypilot_task_has_valid_fields_and_no_token() -> None:
    task = yaml.safe_load(text("skypilot.yaml"))
    jsonschema.validate(
        task,
        strict(
            ["run"],
            name=NAME,
            workdir={"const": "."},
            num_nodes=COUNT,
            resources=strict(["accelerators"], accelerators={"type": "string"}, disk_size={"type": "integer"}),
            volumes={"type": "object"},
            envs={"type": "object", "additionalProperties": {"type": "string"}},
            secrets={"type": "object", "additionalProperties": {"const": None}},  # asked for on the command line
            setup={"type": "string"},
            run={"type": "string"},
        ),
    )
    assert (ROOT / task["envs"]["CONFIG"]).is_file()
    assert any(task["envs"]["RUN"].startswith(f"{volume}/") for volume in task["volumes"])
