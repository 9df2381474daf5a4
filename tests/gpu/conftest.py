"""Everything here needs a GPU, the `gpu` profile, and is skipped with the reason where there is none."""

from pathlib import Path

import pytest


def missing() -> str:
    import torch

    if not torch.cuda.is_available():
        return "no GPU: torch.cuda.is_available() is false"
    import vllm

    if not vllm.platforms.current_platform.is_cuda():
        return f"vLLM {vllm.__version__} is not a CUDA build; install with `make install PROFILE=gpu`"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    if gpu_tests and (reason := missing()):
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason=reason))
