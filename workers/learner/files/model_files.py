"""A model's weights in its safetensors files: described without being read, then read in parts.

`from_pretrained` builds the model from descriptions, so transformers itself decides on names, conversions, tied weights,
buffers and number formats, and no weight takes memory. `ModelFiles.read` then reads any part of a parameter.
Of a model without safetensors files nothing is described: it is loaded whole, and reading returns what was loaded.
"""

import contextlib
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import core_model_loading, modeling_utils
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming


class DescribedTensor:
    """What transformers asks of a slice of a safetensors file. It gives a tensor without memory."""

    def __init__(self, file: str, tensor: Any):
        self.file, self.shape, self.code = file, tensor.get_shape(), tensor.get_dtype()

    def get_shape(self) -> list[int]:
        return self.shape

    def get_dtype(self) -> str:
        return self.code

    def __getitem__(self, _: Any) -> "DescribedTensor":
        return self

    def to(self, *, dtype: torch.dtype, device: Any = None) -> Tensor:
        return torch.empty(self.shape, dtype=dtype, device="meta")


@contextlib.contextmanager
def describing_files(described: dict[str, DescribedTensor]) -> Iterator[None]:
    """Patch: `from_pretrained` gets descriptions of tensors in safetensors files, which go to `described` by name."""

    class DescribedFile:
        def __init__(self, file: str, **_: Any):
            self.file = file

        def keys(self) -> list[str]:
            with safe_open(self.file, framework="pt") as opened:
                names = list(opened.keys())
                described.update({name: DescribedTensor(self.file, opened.get_slice(name)) for name in names})
            return names

        def get_slice(self, name: str) -> DescribedTensor:
            return described[name]

        def __exit__(self, *_: Any) -> None:
            pass

    original = modeling_utils.safe_open
    modeling_utils.safe_open = DescribedFile
    try:
        yield
    finally:
        modeling_utils.safe_open = original


@dataclass(frozen=True)
class Source:
    """The tensors of files that one or several parameters are made of, each with the pattern that its name matches."""

    names: list[tuple[str, str]]
    converter: WeightConverter | None  # None: the parameter is stored as it is
    first: str  # the parameter by which the converter is called

    @property
    def merges_rows(self) -> bool:
        """True if row i of the parameter is made of the i-th tensor of each pattern, as of the experts of a mixture."""
        merge, *others = self.converter.operations if self.converter else (None,)
        rows = isinstance(merge, MergeModulelist) and merge.dim == 0
        return rows and all(isinstance(op, Concatenate) and op.dim > 0 for op in others)


class ModelFiles:
    """The files behind a model that was built from descriptions, the tensors in `stored`."""

    def __init__(self, lm: Any, stored: dict[str, DescribedTensor]):
        self.lm, self.stored = lm, stored
        self.sources: dict[str, Source] = {}  # by parameter
        for source in find_sources(lm, list(stored)):
            for name in self.convert(source, described=True) if source.converter else [source.first]:
                self.sources[name] = source
        parameters = list(lm.named_parameters(remove_duplicate=False))
        held = {id(parameter): self.sources[name] for name, parameter in parameters if name in self.sources}
        # Files may hold tied weights under one name only.
        self.sources = {
            name: held[id(parameter)] for name, parameter in parameters if id(parameter) in held
        } | self.sources

    def read_whole(self, name: str, parameter: Tensor) -> Tensor:
        return self.read(name, parameter, 0, parameter.numel()).view(parameter.shape).to(parameter.dtype)

    def read(self, name: str, parameter: Tensor, first: int, count: int) -> Tensor:
        """Returns elements [first, first + count) of a parameter. If possible, only their part of the files is read."""
        if not parameter.is_meta:
            return parameter.detach().reshape(-1)[first : first + count]
        source, shape, dtype = self.sources[name], parameter.shape, parameter.dtype
        if source.converter is None:
            return self.open(source.names[0][0]).view(-1)[first : first + count]
        if source.merges_rows and count:
            size = prod(shape[1:])
            begin, end = first // size, -(-(first + count) // size)
            rows = self.convert(source, dtype=dtype, rows=slice(begin, end))[name]
            return rows.reshape(-1)[first - begin * size :][:count]
        return self.convert(source, dtype=dtype)[name].reshape(-1)[first : first + count]

    def open(self, name: str) -> Tensor:
        """Returns a tensor whose bytes are read when they are used. Dropping it drops them from this process's memory."""
        with safe_open(self.stored[name].file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    def convert(
        self,
        source: Source,
        *,
        dtype: torch.dtype = torch.float32,
        rows: slice = slice(None),
        described: bool = False,
    ) -> dict[str, Tensor]:
        """Returns the parameters that transformers makes of tensors, by name."""
        converter = deepcopy(source.converter)
        assert converter is not None
        names_by_pattern: dict[str, list[str]] = {}
        for name, pattern in source.names:
            names_by_pattern.setdefault(pattern, []).append(name)
        for pattern, names in names_by_pattern.items():
            for name in names[rows]:
                tensor = self.stored[name].to(dtype=dtype) if described else self.open(name).to(dtype)
                converter.add_tensor(source.first, name, pattern, tensor)
        made = converter.convert(source.first, model=self.lm, config=self.lm.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


def find_sources(lm: Any, names: list[str]) -> list[Source]:
    """Returns which tensors of the files become which parameters, as `from_pretrained` decides it."""
    expected, used = lm.state_dict(), lm._weight_conversions
    renamings = [entry for entry in used if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in used if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    sources: dict[str, Source] = {}
    for name in sorted(names, key=core_model_loading.dot_natural_key):
        target, pattern = rename(name, renamings, converters, lm.base_model_prefix, expected)
        if target not in expected and name in expected:
            target, pattern = rename(name, [], [], lm.base_model_prefix, expected)
        if target in expected:
            source = sources.setdefault(target, Source([], by_pattern[pattern] if pattern else None, target))
            source.names.append((name, pattern or name))
    return list(sources.values())


def rename(name: str, renamings: Any, converters: Any, prefix: str, expected: dict[str, Any]) -> tuple[str, str | None]:
    renamed: tuple[str, str | None] = core_model_loading.rename_source_key(
        name, renamings, converters, base_model_prefix=prefix, meta_state_dict=expected
    )
    return renamed
