"""A model under DeepSpeed ZeRO: scored, minimised, saved. The policy and the critic are such models.

Every method holds a collective: all ranks call it at the same time, with the same number of packs.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlsys.config import Policy
from rlsys.types import Pack


class ZeroEngine:
    def __init__(self, model: Any, settings: Policy, lr: float):
        import deepspeed

        self.deepspeed, self.settings = deepspeed, settings
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=deepspeed_config(settings, lr)
        )

    def scored(self, packs: list[Pack]) -> list[Any]:
        """The model's answer to each pack under the present weights."""
        import torch

        self.engine.eval()
        with torch.no_grad():
            return [self.engine(pack) for pack in packs]

    def minimise(self, packs: list[Pack], loss_of: Callable[[Pack, Any], Any], lr: float) -> float:
        """One optimizer update; returns the norm of the gradient. `loss_of(pack, answer)` is this pack's share of the loss."""
        self.engine.train()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        norm = 0.0
        for i, pack in enumerate(packs):
            last = i == len(packs) - 1
            self.engine.set_gradient_accumulation_boundary(last)
            # DeepSpeed averages over ranks; our weights are already global.
            self.engine.backward(loss_of(pack, self.engine(pack)) * self.deepspeed.comm.get_world_size())
            if last and self.settings.zero_stage == 0:
                norm = self.gradient_norm()
            self.engine.step()
        return norm if self.settings.zero_stage == 0 else float(self.engine.get_global_grad_norm())

    def gradient_norm(self) -> float:
        """ZeRO 0 keeps whole gradients and reports no norm."""
        import torch

        gradients = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients).item()

    def gathered(self, parameter: Any) -> Any:
        """A context in which a parameter is whole; ZeRO 3 keeps parts of it on each rank."""
        whole = not hasattr(parameter, "ds_id")
        return contextlib.nullcontext() if whole else self.deepspeed.zero.GatheredParameters([parameter])

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder), tag="state")

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(str(folder), tag="state")


def prepare(device: str, threads: int) -> None:
    """Before anything touches DeepSpeed. Its imports are slow; they run while the driver does other things."""
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import torch
    import transformers  # noqa: F401

    if device == "cpu":
        torch.set_num_threads(threads)
        # Only inference would use it, and compiling it made the first start about twice as long.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def join(device: str, rank: int, ranks: int, address: str, port: int, seed: int) -> None:
    """Meets the other ranks."""
    import deepspeed
    import torch

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    deepspeed.init_distributed(dist_backend="gloo" if device == "cpu" else "nccl", verbose=False)
    torch.manual_seed(seed)


def deepspeed_config(p: Policy, lr: float) -> dict[str, Any]:
    """The DeepSpeed configuration, from ours."""
    zero: dict[str, Any] = {"stage": p.zero_stage}
    if p.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if p.offload_params:
        zero["offload_param"] = {"device": "cpu"}
    if p.zero_stage == 3:
        # Gather just in time. Prefetching has not been tried.
        zero |= {"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # the boundary is set by hand: the number of packs varies
        "gradient_clipping": p.clip_grad,
        "zero_optimization": zero,
        "bf16": {"enabled": p.dtype == "bfloat16"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": lr, "betas": [p.beta1, p.beta2], "weight_decay": p.weight_decay, "torch_adam": True},
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
