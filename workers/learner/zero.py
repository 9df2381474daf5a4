"""A model under DeepSpeed ZeRO: scored and minimised. The policy and the critic are such models.

Every method holds a collective: all ranks call it at the same time, with the same number of packs.
"""

import contextlib
import math
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rlsys.config.schema import Config, PolicyConfig
from rlsys.types import Pack
from workers.supervision.imports import hide_modules
from workers.supervision.worker_setup import cpu_threads

MUON_MODULE, MUON_CLASS = "deepspeed.runtime.zero.muon.muon_optimizer", "MuonWithAuxAdam"


class ZeroEngine:
    def __init__(self, model: Any, settings: PolicyConfig, lr: float):
        import deepspeed

        from workers.learner.guarded_adamw import GuardedAdamW
        from workers.learner.zero_state import ZeroState

        betas, decay = (settings.beta1, settings.beta2), settings.weight_decay
        self.deepspeed, self.settings = deepspeed, settings
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            optimizer=lambda parameters: GuardedAdamW(parameters, lr=lr, betas=betas, weight_decay=decay),
            config=deepspeed_config(settings),
        )
        self.adam = self.engine.basic_optimizer
        self.state = ZeroState(self.engine, settings.zero_stage, deepspeed.comm)

    def forward_all(self, packs: list[Pack]) -> list[Any]:
        """The model's answer to each pack under the present weights."""
        import torch

        self.engine.eval()
        with torch.no_grad():
            return [self.engine(pack) for pack in packs]

    def minimize(self, packs: list[Pack], loss_of: Callable[[Pack, Any], Any], lr: float) -> dict[str, float]:
        """One optimizer update, or none at all where the loss or its gradient is not finite on any rank.

        `loss_of(pack, answer)` is this pack's share of the loss. Returns the norm of the gradient, and whether it was `skipped`.
        """
        import torch

        self.engine.train()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        bad = torch.zeros((), dtype=torch.int32, device=self.engine.device)
        for i, pack in enumerate(packs):
            last = i == len(packs) - 1
            self.engine.set_gradient_accumulation_boundary(last)
            loss = loss_of(pack, self.engine(pack))
            bad += ~loss.detach().isfinite()
            # DeepSpeed averages over ranks; our weights are already global.
            self.engine.backward(loss * self.deepspeed.comm.get_world_size())
            if last:
                norm = self.allow_or_skip_step(bad)
            self.engine.step()
        if self.settings.zero_stage:
            norm = float(self.engine.get_global_grad_norm())
        return {"grad_norm": norm, "skipped": float(not self.adam.stepped)}

    def allow_or_skip_step(self, bad: Any) -> float:
        """Tells Adam whether to step. A loss may be infinite and its gradient not; the other way round DeepSpeed itself sees
        with ZeRO 1 to 3, and clears up. ZeRO 0 looks at no norm: there it is computed here, and returned."""
        self.deepspeed.comm.all_reduce(bad)
        norm = 0.0 if self.settings.zero_stage else self.gradient_norm()
        self.adam.allow_step(good=not bad.item() and math.isfinite(norm))
        return norm

    def gradient_norm(self) -> float:
        """ZeRO 0 keeps whole gradients and reports no norm."""
        import torch

        gradients = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients).item()

    def gathered(self, *parameters: Any) -> Any:
        """A context in which parameters are whole; ZeRO 3 keeps parts of them on each rank."""
        whole = not hasattr(parameters[0], "ds_id")
        return contextlib.nullcontext() if whole else self.deepspeed.zero.GatheredParameters(parameters)

    def local_shard(self, parameter: Any) -> tuple[int, Any]:
        """Of a parameter that ZeRO 3 keeps in parts: the number of this rank's first element, and its elements."""
        part = parameter.ds_tensor.detach().view(-1)
        first = min(self.deepspeed.comm.get_rank() * len(part), parameter.ds_numel)
        return first, part[: parameter.ds_numel - first]

    def shard_file(self) -> str:
        """The name of the file with this rank's share of the state."""
        return f"part-{self.deepspeed.comm.get_rank():05}-of-{self.deepspeed.comm.get_world_size():05}.safetensors"


def import_deepspeed(config: Config, ranks: int) -> None:
    """Before anything touches DeepSpeed. Its imports are slow; they run while the driver does other things."""
    cpu = config.cluster.device == "cpu"
    if cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    import torch
    import transformers  # noqa: F401

    with hide_modules("mlflow"):  # it takes a second, and DeepSpeed only tunes itself with it
        import deepspeed

    torch.set_num_threads(cpu_threads(config, ranks))
    # DeepSpeed asks whether an optimizer is its own Muon, and to import that takes torch's compiler along: half of what a rank has to do to come up.
    # None of ours is an instance of this one either.
    sys.modules.setdefault(MUON_MODULE, SimpleNamespace(**{MUON_CLASS: type(MUON_CLASS, (), {})}))  # type: ignore[arg-type]
    if cpu:
        # Only inference would use any: compiling one made the first start about twice as long, and to ask compilers for which they could takes a second.
        deepspeed.ops.__compatible_ops__ = {}


def join_process_group(device: str, rank: int, ranks: int, address: str, port: int, seed: int) -> None:
    """Meets the other ranks."""
    import deepspeed
    import ray
    import torch
    from deepspeed.constants import default_pg_timeout

    from workers.learner.rendezvous import bind_gloo, create_store

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    bind_gloo(ray.util.get_node_ip_address())
    store = create_store(address, port, rank, ranks, default_pg_timeout)
    backend = "gloo" if device == "cpu" else "nccl"
    own = torch.device("cuda", 0) if device == "gpu" and ranks > 1 else None  # as DeepSpeed would
    torch.distributed.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=default_pg_timeout, device_id=own
    )
    deepspeed.init_distributed(dist_backend=backend, verbose=False)  # finds the ranks together
    torch.manual_seed(seed)


def deepspeed_config(p: PolicyConfig) -> dict[str, Any]:
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
        "bf16": {"enabled": p.dtype == "bfloat16", "check_grad_overflow": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
