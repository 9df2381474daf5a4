"""launch/rayjob.yaml and launch/skypilot.yaml, read by KubeRay's own schema and SkyPilot's own parser: `make schemas`.

`RLSYS_KUBERAY` names another git repository than GitHub's, such as file:///mirrors/kuberay.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

pytestmark = pytest.mark.skipif(
    not os.environ.get("RLSYS_SCHEMAS"), reason="downloads SkyPilot and KubeRay's schema; run make schemas"
)
ROOT = Path(__file__).parents[2]
RAYJOB, SKYPILOT = ((ROOT / "launch" / name).read_text() for name in ("rayjob.yaml", "skypilot.yaml"))
KUBERAY = os.environ.get("RLSYS_KUBERAY", "https://github.com/ray-project/kuberay")
READ_TASK = """
import os, sys
os.environ["HOME"] = sys.argv[2]  # for the files that it writes
import sky
task = sky.Task.from_yaml(sys.argv[1])
print(task.num_nodes, *task.resources, *task.volumes)
"""


def versions(text: str) -> list[str]:
    """Those that a file says it is valid for, in its first line."""
    return re.findall(r"\b\d+\.\d+\.\d+\b", text.partition("\n")[0])


# --- KubeRay ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=versions(RAYJOB))
def schema(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The schema of a RayJob, in which a field that it does not list is an error."""
    clone = tmp_path_factory.mktemp("kuberay")
    options = ["--quiet", "--depth=1", "--no-checkout", "--filter=blob:none", f"--branch=v{request.param}"]
    done = subprocess.run(["git", "clone", *options, KUBERAY, clone], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{KUBERAY} cannot be cloned: {done.stderr.splitlines()[0]}")
    file = "HEAD:helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml"
    text = subprocess.run(["git", "-C", clone, "show", file], capture_output=True, text=True, check=True).stdout
    definition = yaml.load(text, yaml.CSafeLoader)
    [v1] = [version for version in definition["spec"]["versions"] if version["name"] == "v1"]
    return refuse_unknown_fields(v1["schema"]["openAPIV3Schema"])


def refuse_unknown_fields(schema: Any) -> Any:
    if isinstance(schema, list):
        return [refuse_unknown_fields(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: refuse_unknown_fields(value) for key, value in schema.items() if key != "properties"}
    if fields := schema.get("properties"):
        closed["properties"] = {name: refuse_unknown_fields(field) for name, field in fields.items()}
        closed.setdefault("additionalProperties", bool(schema.get("x-kubernetes-preserve-unknown-fields")))
    return closed


def test_the_rayjob_is_valid_for_kuberay(schema: Any) -> None:
    job = yaml.safe_load(RAYJOB)
    jsonschema.validate(job, schema)
    [worker] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    for place in (job["spec"], worker, worker["template"]["spec"]["containers"][0]):
        place["imagePullPolice"] = "Always"
        with pytest.raises(jsonschema.ValidationError, match="'imagePullPolice' was unexpected"):
            jsonschema.validate(job, schema)
        del place["imagePullPolice"]


# --- SkyPilot --------------------------------------------------------------------------------------------------------------


def read_task(text: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Has SkyPilot read a task, in an environment of its own."""
    (folder / "task.yaml").write_text(text)
    [version] = versions(SKYPILOT)
    uv = [str(Path(sys.executable).parent / "uv"), "run", "--quiet", "--no-project", "--isolated"]
    command = [*uv, "--python", sys.executable, "--with", f"skypilot=={version}", "python", "-c", READ_TASK]
    return subprocess.run([*command, folder / "task.yaml", folder], capture_output=True, text=True, cwd=ROOT)


def test_skypilot_reads_the_task(tmp_path: Path) -> None:
    done = read_task(SKYPILOT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "H100" in done.stdout
    assert done.stdout.split()[0] == "1"
    assert done.stdout.split()[-1] == "/shared"


def test_skypilot_would_refuse_a_misspelt_field(tmp_path: Path) -> None:
    done = read_task(SKYPILOT.replace("num_nodes:", "num_node:"), tmp_path)
    assert done.returncode != 0
    assert "num_node" in done.stderr
