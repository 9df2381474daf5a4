"""A pass over a pack and an optimizer step on a pretended GPU: no device is mixed with another, and nothing waits."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlsys.config.derived import SEQUENCE_LOSSES
from rlsys.config.methods import CORRECTIONS, KL_ESTIMATORS, LOSSES

pytestmark = pytest.mark.long

METHODS = {*LOSSES, *CORRECTIONS, *KL_ESTIMATORS, "rollout", "bonus"}
OF_SEQUENCES = {*SEQUENCE_LOSSES, "sequence_tis", "sequence_mis"}  # they ask the device how many sequences there are
HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pretended device, compiled for this version of PyTorch."""
    if not shutil.which("g++"):
        pytest.skip("there is no g++ to compile the pretended device with")
    library, torch_folder = tmp_path_factory.mktemp("device") / "device.so", Path(torch.__file__).parent
    command = ["g++", "-std=c++20", "-shared", "-fPIC", "-O0", f"-I{torch_folder}/include"]
    command += [str(HERE / "fake_cuda_device.cpp"), f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu", "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"it does not compile for PyTorch {torch.__version__}: {done.stderr[-300:]}")
    return library


@pytest.fixture(scope="module")
def cases(device: Path) -> dict[str, dict[str, Any]]:
    paths = [HERE, ROOT / "tests" / "rlsys", ROOT]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "LD_PRELOAD": str(device)}
    environment["LD_LIBRARY_PATH"] = f"{Path(torch.__file__).parent}/lib"
    command = [sys.executable, str(HERE / "fake_cuda.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("CASE"))


def test_every_family_dtype_and_method_has_its_gradients_on_the_gpu(cases: dict[str, dict[str, Any]]) -> None:
    assert cases.keys() >= {"qwen3 bfloat16 True", "llama float32 False", *METHODS}
    assert {name: case["wrong"] for name, case in cases.items() if case["wrong"]} == {}


def test_in_bfloat16_shared_prompts_take_flash_attention(cases: dict[str, dict[str, Any]]) -> None:
    assert cases["qwen2 bfloat16 False"]["flash"] == 2 * 2, "forward and backward of two layers"
    assert cases["qwen2 float32 False"]["flash"] == 0


def test_masks_are_made_only_where_attention_runs_on_blocks(cases: dict[str, dict[str, Any]]) -> None:
    assert {name: case["masks"] for name, case in cases.items() if case["flash"] and case["masks"]} == {}
    assert "aten.tril in causal_mask" in cases["qwen2 float32 False"]["masks"]


def test_the_host_does_not_wait_for_the_gpu_within_a_pack(cases: dict[str, dict[str, Any]]) -> None:
    waiting = {name: case["waits"] for name, case in cases.items() if case["waits"]}
    assert sorted(waiting.pop("control").values()) == [1, 1], "what waits is seen"
    assert set(waiting) == OF_SEQUENCES, waiting
