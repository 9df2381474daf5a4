"""A model under DeepSpeed ZeRO, such as the policy or the critic: its outputs and its optimizer updates.

Every method takes part in a collective: all ranks call it at the same time, with the same number of packs.
"""

import math
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rlsys.config.derived import reduce_bucket
from rlsys.config.schema import Config, PolicyConfig
from rlsys.types import Pack
from workers.learner.files.deepspeed_config import deepspeed_config
from workers.start.imports import hide_modules
from workers.start.worker_setup import cpu_threads
from workers.sync.layout import shard_range

MUON_MODULE, MUON_CLASS = "deepspeed.runtime.zero.muon.muon_optimizer", "MuonWithAuxAdam"


class ZeroEngine:
    def __init__(self, model: Any, settings: PolicyConfig, lr: float, timeout_s: float = 0):
        """`timeout_s`: how long ranks that share packs wait for each other, at least DeepSpeed's limit."""
        import deepspeed
        import torch
        from deepspeed.accelerator import get_accelerator

        from rlsys.forward.context import pack_context, split_sequences
        from workers.learner.files.partitioning import is_partitioned, zero_init
        from workers.learner.files.zero_state import ZeroState
        from workers.learner.guarded_adamw import GuardedAdamW
        from workers.learner.rendezvous import limit_of_waiting
        from workers.learner.sequence_groups import create_sequence_group

        if any(map(is_partitioned, model.parameters())):
            # When DeepSpeed partitions a model itself, it also replaces the function of linear layers.
            zero_init(settings, torch.nn.Module())
        trained = [p for p in model.parameters() if p.requires_grad]
        elements = sum(getattr(p, "ds_numel", p.numel()) for p in trained)
        betas, decay = (settings.betas[0], settings.betas[1]), settings.weight_decay
        on_gpu = not get_accelerator().is_synchronized_device()
        bucket = elements if settings.lora.rank else reduce_bucket(elements) if on_gpu else None
        self.deepspeed, self.settings = deepspeed, settings
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=model,
            model_parameters=trained,
            optimizer=lambda parameters: GuardedAdamW(parameters, lr=lr, betas=betas, weight_decay=decay, fused=on_gpu),
            config=deepspeed_config(settings, bucket, on_gpu),
        )
        self.rank, self.ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
        # A single rank with whole gradients has nothing to add up. DeepSpeed would copy them all, and copy them back.
        self.engine.enable_backward_allreduce = self.ranks > 1 or settings.zero_stage > 0
        self.adam = self.engine.basic_optimizer
        self.state = ZeroState(self.engine, settings.zero_stage, deepspeed.comm)
        if settings.zero_stage == 3 and self.ranks > 1:
            # A mixer gathers weights as often as it runs, and all ranks take part.
            pack_context(model.decoder).largest_on_ranks = self.largest
        if settings.sequence_parallel > 1:
            group = create_sequence_group(settings.sequence_parallel, limit_of_waiting(timeout_s))
            split_sequences(model.decoder, group)

    def largest(self, number: int) -> int:
        """Returns the largest number of all ranks."""
        import torch

        largest = torch.tensor(number, device=self.engine.device)
        self.deepspeed.comm.all_reduce(largest, op=self.deepspeed.comm.ReduceOp.MAX)
        return int(largest)

    def forward_all(self, packs: list[Pack], **options: bool) -> list[Any]:
        """Returns the model's output for each pack, without gradients."""
        import torch

        self.engine.eval()
        with torch.no_grad():
            return [self.engine(pack, **options) for pack in packs]

    def minimize(
        self,
        packs: list[Pack],
        pack_loss: Callable[[Pack, Any], Any],
        lr: float,
        slopes: Callable[[Pack, int], Any] | None = None,
    ) -> dict[str, float]:
        """Makes one optimizer update, or none if on any rank a loss or its gradient is not finite.

        `pack_loss(pack, output)` is this pack's share of the loss. `slopes(pack, factor)` tells a model that asks for it the
        gradient of `factor` times that loss by its output. Returns the gradient's norm as `grad_norm`, and 1 as `skipped`
        if there was no update.
        """
        import torch

        self.engine.train()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        bad = torch.zeros((), dtype=torch.int32, device=self.engine.device)
        for i, pack in enumerate(packs):
            last = i == len(packs) - 1
            self.engine.set_gradient_accumulation_boundary(last)
            more = {"slopes": slopes(pack, self.ranks)} if slopes else {}
            loss = pack_loss(pack, self.engine(pack, **more))
            bad += ~loss.detach().isfinite()
            # DeepSpeed averages over ranks; our weights are already global. Ranks that share a sequence have a part of
            # its gradient each.
            self.engine.backward(loss * self.ranks)
            if last:
                norm = self.allow_or_skip_step(bad)
            self.engine.step()
        if self.settings.zero_stage:
            norm = float(self.engine.get_global_grad_norm())
        return {"grad_norm": norm, "skipped": float(not self.adam.stepped)}

    def allow_or_skip_step(self, bad: Any) -> float:
        """Allows Adam's step only if every loss and the gradient are finite. `bad`: bad losses on this rank.

        With ZeRO 1 to 3, DeepSpeed itself skips the step if the gradient is not finite, and computes the norm later.
        The result is 0 then. ZeRO 0 does neither, so the norm is computed and returned here.
        """
        self.deepspeed.comm.all_reduce(bad)
        norm = 0.0 if self.settings.zero_stage else self.gradient_norm()
        self.adam.allow_step(not bad.item() and math.isfinite(norm))
        return norm

    def gradient_norm(self) -> float:
        """Returns the norm of the whole gradient, which with ZeRO 0 is on every rank."""
        import torch

        gradients = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients).item()

    def gathered(self, *tensors: Any) -> Any:
        """Returns a context in which tensors are whole. ZeRO 3 keeps a shard of each parameter on each rank."""
        from workers.learner.files.partitioning import gathered

        return gathered(*tensors)

    def local_shard(self, tensor: Any) -> tuple[int, Any]:
        """Returns this rank's shard of a tensor: index of the first element, and elements without padding.

        ZeRO 3 keeps only that shard of a parameter. A buffer is whole on every rank, and is divided in the same way.
        """
        from workers.learner.files.partitioning import is_partitioned

        if is_partitioned(tensor):
            shard = tensor.ds_tensor.detach().view(-1)
            first = min(self.rank * len(shard), tensor.ds_numel)
            return first, shard[: tensor.ds_numel - first]
        flat = tensor.detach().reshape(-1)
        first, count = shard_range(len(flat), self.rank, self.ranks)
        return first, flat[first : first + count]


def import_deepspeed(config: Config, ranks: int) -> None:
    """Imports DeepSpeed. An actor's constructor calls it, so slow imports run while the driver does other things.

    workers/PATCHES.md lists what is replaced in DeepSpeed.
    """
    cpu = config.cluster.device == "cpu"
    if cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    import torch
    import transformers  # noqa: F401

    with hide_modules("mlflow"):  # its import takes a second, and DeepSpeed uses it only for autotuning
        import deepspeed

    torch.set_num_threads(cpu_threads(config, ranks))
    # Replaces a module of DeepSpeed by an empty class. DeepSpeed only asks whether an optimizer is an instance of it,
    # and ours never is. The real module imports torch's compiler, which takes half of a rank's start time.
    muon: Any = SimpleNamespace(**{MUON_CLASS: type(MUON_CLASS, (), {})})
    sys.modules.setdefault(MUON_MODULE, muon)
    if cpu:
        # Replaces DeepSpeed's list of the C++ kernels that can be compiled here by an empty list. Only inference would
        # use any. Compiling one about doubled the first start, and asking the compiler about all takes a second.
        deepspeed.ops.__compatible_ops__ = {}
