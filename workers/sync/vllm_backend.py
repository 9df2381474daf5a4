"""The backend by which vLLM loads weights from a mapped block of host memory.

It is registered with vLLM's weight-transfer interface. The transports `shared_memory` and `object_store` use it. `nccl`
has `nccl_engine.py`, and `cuda_ipc` uses vLLM's own backend.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from workers.sync import nccl
from workers.sync.host_memory import CachedMapping, readonly_tensor
from workers.sync.layout import Slot, tensor_views
from workers.sync.parallel import parallel_map

BACKEND = "rlsys_host_memory"
LOAD_PIECES = 16  # lists of tensors that an engine loads in parallel


def register_backends() -> None:
    """Registers our backends with vLLM. Called in the process of vLLM's worker, before the engine is built."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class InitInfo(WeightTransferInitInfo):
        pass

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):
        path: str = ""
        array: Any = None  # read-only bytes in this process, instead of a path
        layout: list[Slot] = field(default_factory=list)

    class HostMemoryEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
        init_info_cls, update_info_cls = InitInfo, UpdateInfo

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            self.mapping, self.in_place = CachedMapping(), can_load_in_place(self.model)

        def start_weight_update(self) -> None:
            if not self.in_place:
                initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: UpdateInfo) -> None:
            array = update_info.array
            memory = self.mapping.open(update_info.path) if array is None else readonly_tensor(array)
            tensors = tensor_views(memory, update_info.layout)
            if self.in_place:
                parallel_map(self.model.load_weights, [tensors[i::LOAD_PIECES] for i in range(LOAD_PIECES)])
            else:
                # vLLM keeps tensors until a layer is complete. Then this memory may hold another bucket, so copy them.
                self.model.load_weights((name, tensor.clone()) for name, tensor in tensors)

        def finish_weight_update(self) -> None:
            if not self.in_place:
                finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            pass

        @staticmethod
        def trainer_send_weights(*_: Any, **__: Any) -> None:
            """vLLM 0.26 requires it; ranks send by `workers.sync.shared_memory`."""
            raise NotImplementedError

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, HostMemoryEngine)
        WeightTransferEngineFactory.register_engine(nccl.BACKEND, "workers.sync.nccl_engine", "ShardedNcclEngine")


def name_partial_loaders() -> None:
    """Patch: when vLLM reloads weights, it asks every loader for a name, and a `partial` has none.

    Such are the loaders of some norms, as in MiniMax M2.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    get_weight_loader = layerwise._get_weight_loader

    def get_named_loader(tensor: Any) -> Any:
        loader = get_weight_loader(tensor)
        if isinstance(loader, partial):
            loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]
        return loader

    layerwise._get_weight_loader = get_named_loader


def can_load_in_place(model: Any) -> bool:
    """Returns whether weights can be written straight into the engine's parameters: no layer converts a copy of them.

    On CPU this holds (`vllm_extension.keep_weights_plain`), except for quantized weights, experts and latent attention.
    """
    from vllm.model_executor.layers.attention import Attention, MMEncoderAttention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.platforms import current_platform

    attention = (AttentionLayerBase, MMEncoderAttention)
    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, type(None))
    return current_platform.is_cpu() and all(
        isinstance(getattr(layer, "quant_method", None), plain)
        and (type(layer) is Attention or not isinstance(layer, attention))
        for layer in model.modules()
    )
