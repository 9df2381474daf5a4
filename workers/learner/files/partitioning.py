"""Loads a model for ZeRO 3: each rank reads its own part of every parameter, and no rank ever holds the model."""

import contextlib
import gc
import mmap
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlsys.config.schema import PolicyConfig
from workers.learner.files.deepspeed_config import deepspeed_config
from workers.learner.files.model_files import DescribedTensor, ModelFiles

CHUNK = 1 << 24  # elements that are compared at a time
FILLED_ROWS = 64  # more than the tokens of a probe: see rlsys.forward.mixers


def is_partitioned(parameter: Any) -> bool:
    """True for a parameter of which each rank holds a part, as DeepSpeed marks it."""
    return hasattr(parameter, "ds_id")


def gathered(*tensors: Any) -> Any:
    """Returns a context in which tensors are whole. Buffers always are."""
    if not any(map(is_partitioned, tensors)):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(tensors)


def partition(lm: Any, stored: dict[str, DescribedTensor], settings: PolicyConfig) -> None:
    """Replaces the parameters of a model that was built from descriptions by partitioned ones, with their weights."""
    files, zero = ModelFiles(lm, stored), zero_init(settings)
    tie_equal_weights(lm, files)
    made: dict[int, Any] = {}  # by id of the description: tied weights are one parameter
    for name, parameter in lm.named_parameters(remove_duplicate=False):
        if id(parameter) not in made:
            made[id(parameter)] = read_part(zero, name, parameter, files)
    for name, buffer in lm.named_buffers():
        made[id(buffer)] = files.read_whole(name, buffer).to(zero.local_device, copy=True)
    for module in lm.modules():
        for tensors in (module._parameters, module._buffers):
            tensors |= {key: made[id(tensor)] for key, tensor in tensors.items() if tensor is not None}


def zero_init(settings: PolicyConfig, module: nn.Module | None = None) -> Any:
    """Returns DeepSpeed's maker of partitioned parameters. If a module is given, its linear layers keep no gathered weight."""
    import deepspeed

    dtype = getattr(torch, settings.dtype)
    return deepspeed.zero.Init(module=module, config_dict_or_path=deepspeed_config(settings), dtype=dtype)


def read_part(zero: Any, name: str, described: Tensor, files: ModelFiles) -> nn.Parameter:
    """Returns the partitioned parameter, of which this rank has read its part."""
    # DeepSpeed takes shape, format and place of the part from the whole tensor.
    whole = unfilled(described.shape, described.dtype, zero.local_device)
    parameter: Any = nn.Parameter(whole, requires_grad=described.requires_grad)
    del whole
    zero._convert_to_deepspeed_param(parameter)
    parameter.partition()
    fill_part(parameter, lambda first, count: files.read(name, described, first, count))
    return parameter  # type: ignore[no-any-return]


def fill_part(parameter: Any, read: Callable[[int, int], Tensor]) -> None:
    """Fills this rank's part of a parameter with what `read(first, count)` returns: elements [first, first + count)."""
    part = parameter.ds_tensor.view(-1)
    first = min(parameter.ds_zero_partition_rank * len(part), parameter.ds_numel)
    count = min(len(part), parameter.ds_numel - first)
    with torch.no_grad():
        part[:count].copy_(read(first, count))
        part[count:].zero_()


def unfilled(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor that is never filled. In host memory its pages do not exist, and leave no holes in the heap."""
    if device.type != "cpu" or not shape.numel():
        return torch.empty(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, shape.numel() * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def tie_equal_weights(lm: Any, files: ModelFiles) -> None:
    """Ties weights that the configuration ties, and that the files hold twice with equal values, as transformers does."""
    for target, source in list(lm.all_tied_weights_keys.items()):
        first, second = lm.get_parameter(source), lm.get_parameter(target)
        if first is second:
            continue
        if equal_in_files(files, (source, first), (target, second)):
            module, _, key = target.rpartition(".")
            setattr(lm.get_submodule(module), key, first)
        else:
            lm.all_tied_weights_keys.pop(target)


def equal_in_files(files: ModelFiles, *parameters: tuple[str, Tensor]) -> bool:
    (_, one), (_, other) = parameters
    for start in range(0, one.numel() if one.shape == other.shape else 0, CHUNK):
        count = min(CHUNK, one.numel() - start)
        parts = [files.read(name, p, start, count).to(p.dtype) for name, p in parameters]
        if not torch.equal(*parts):
            return False
    return one.shape == other.shape


@contextlib.contextmanager
def gathering_layers(decoder: Any, head: Any = None) -> Iterator[None]:
    """While it lasts, a forward pass of a partitioned decoder, and of its output layer, gathers one layer at a time.

    Embeddings, the largest tensors, are not gathered: the first tokens get random ones, the same on all ranks.
    """
    hooks = gather_in_forward(layers_of(decoder), embeddings=random_embeddings)
    hooks += gather_in_forward([head]) if head else []
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def layers_of(decoder: Any) -> list[nn.Module]:
    """Returns the decoder's layers, and what comes before and after them."""
    return [layer for child in decoder.children() for layer in (child if isinstance(child, nn.ModuleList) else [child])]


def gather_in_forward(layers: list[nn.Module], embeddings: Callable[..., Any] = gathered) -> list[Any]:
    """Makes each layer whole during its forward pass. Returns the hooks that do it."""
    hooks = []
    for layer in layers:
        if parameters := [p for p in layer.parameters() if is_partitioned(p)]:
            whole = embeddings if isinstance(layer, nn.Embedding) else gathered
            hooks += in_forward(layer, partial(whole, *parameters))
    return hooks


def in_forward(unit: nn.Module, context: Callable[[], Any]) -> list[Any]:
    """Hooks that run each forward pass of the unit in a new context."""
    entered: list[Any] = []

    def enter(*_: Any) -> None:
        entered.append(context())
        entered[-1].__enter__()

    def leave(*_: Any) -> None:
        entered.pop().__exit__(None, None, None)
        gc.collect(1)  # what was gathered may be in a cycle of references

    return [unit.register_forward_pre_hook(enter), unit.register_forward_hook(leave)]


@contextlib.contextmanager
def random_embeddings(parameter: Any) -> Iterator[None]:
    """Embeddings of the first tokens. The others are not filled, so they take no host memory."""
    partitioned, whole = parameter.data, unfilled(parameter.ds_shape, parameter.dtype, parameter.device)
    rows = torch.randn(FILLED_ROWS, whole.shape[1], generator=torch.Generator().manual_seed(0))
    whole[:FILLED_ROWS] = rows[: len(whole)].to(whole)
    parameter.data = whole
    try:
        yield
    finally:
        parameter.data = partitioned
