"""vLLM's worker with a fake GPU: it imports this module before it loads the model."""

import os
from typing import Any

import fake_gpu

from workers.rollout.vllm_extension import WorkerExtension


def uuid() -> str:
    from vllm.distributed import get_tensor_model_parallel_rank

    return os.environ["FAKE_GPUS"].split(",")[get_tensor_model_parallel_rank()]


fake_gpu.install(uuid)


class Extension(WorkerExtension):
    def rehearsal_rows(self, parameter: str, first: int, count: int) -> Any:
        """Rows of a parameter as the engine computes with it."""
        weight = self.model_runner.get_model().get_parameter(parameter)  # type: ignore[attr-defined]
        return weight.detach()[first : first + count].float().numpy().copy()

    def rehearsal_addresses(self) -> dict[str, int]:
        """Where each parameter lies."""
        return {n: p.data_ptr() for n, p in self.model_runner.get_model().named_parameters()}  # type: ignore[attr-defined]

    def rehearsal_plant(self, fault: str, device: int | None = None) -> None:
        """`device` of the engine; None: all."""
        from vllm.distributed import get_tensor_model_parallel_rank

        if device in (None, get_tensor_model_parallel_rank()):
            fake_gpu.PLANTED.append(fault)

    def rehearsal_lose(self, name: str) -> None:
        """From now on this tensor does not arrive at the model."""
        model: Any = self.model_runner.get_model()  # type: ignore[attr-defined]
        load = model.load_weights
        model.load_weights = lambda weights: load((n, w) for n, w in weights if n != name)
