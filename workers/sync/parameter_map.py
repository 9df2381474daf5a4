"""Finds every tensor of the policy in the engine's own parameters, so that both sides can fingerprint it by name.

vLLM fuses q, k and v into one matrix and gate and up into another, pads vocabularies, and may split all of them over
devices. The place of a tensor is a `Region`:

    policy   q_proj [896, 896]   k_proj [128, 896]   v_proj [128, 896]
    engine   qkv_proj [1152, 896]   rows 0 … 895       896 … 1023          1024 … 1151

Some architectures store a tensor in another form, and then it has no region. Such tensors are fingerprinted as they
arrive. All of them together must have the same numbers as the parameters that no region covers, in any order.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from workers.sync import fingerprint
from workers.sync.layout import DTYPE_BYTES, ManifestEntry
from workers.sync.verify import DeviceFingerprints, list_names, tensor_fingerprint

DERIVED = re.compile(r"\.W_(?:UV|UK_T)$")  # what latent attention computes with: parts of kv_b_proj
TRANSPOSED = re.compile(r"\.(?:c_attn|c_fc|c_proj)\.weight$")  # GPT-2's matrices, which vLLM stores transposed


@dataclass(frozen=True)
class Region:
    """Rows of one of the engine's parameters.

    k_proj [128, 896] in qkv_proj [1152, 896]: Region("….qkv_proj.weight", 896, 128, [128, 896])
    """

    parameter: str
    first_row: int
    rows: int
    shape: list[int]  # of the whole tensor that this region holds, or holds a shard of
    origin: tuple[int, int] = (0, 0)  # row and column of the whole tensor where this device's shard begins
    counted: bool = True  # false if this shard is a copy of another device's


class RegionFinder:
    """Finds where this device of an engine keeps the policy's tensors."""

    def __init__(self, model: Any, rank: int, ranks: int):
        self.model, self.rank, self.ranks = model, rank, ranks
        self.parameters = dict(model.named_parameters(remove_duplicate=False))

    def find(self, name: str, shape: list[int]) -> Region | None:
        """Returns where a tensor of the policy lies on this device. None if it is stored in another form."""
        parameters = self.parameters
        mapper = getattr(self.model, "hf_to_vllm_mapper", None)
        [mapped] = (mapper.apply_list([name]) or [None]) if mapper else [name]
        transposed = TRANSPOSED.search(name) and any(hasattr(m, "_transpose_conv1d") for m in self.model.children())
        if mapped is None or transposed:
            return None
        for fused, parts in getattr(self.model, "packed_modules_mapping", {}).items():
            for i, part in enumerate(parts):
                if len(parts) > 1 and f".{part}." in name:
                    target = mapped.replace(f".{part}.", f".{fused}.")
                    return self.fused_region(target, i, shape) if target in parameters else None
        return self.plain_region(mapped, list(parameters[mapped].shape), shape) if mapped in parameters else None

    def fused_region(self, parameter: str, part: int, shape: list[int]) -> Region | None:
        """Returns the region of the tensor that is number `part` in a fused parameter."""
        sizes = getattr(module_of(self.model, parameter), "output_partition_sizes", [])
        if part >= len(sizes) or shape[0] % sizes[part]:
            return None
        shard, counted = self.shard_of_device(shape[0] // sizes[part])
        return Region(parameter, sum(sizes[:part]), sizes[part], shape, (shard * sizes[part], 0), counted)

    def plain_region(self, parameter: str, local: list[int], shape: list[int]) -> Region | None:
        """Returns the region of a tensor that has a parameter of its own, of shape `local` on this device."""
        vocabulary = getattr(module_of(self.model, parameter), "shard_indices", None)
        if vocabulary and local[1:] == shape[1:]:
            first, end = vocabulary.org_vocab_start_index, vocabulary.org_vocab_end_index
            return Region(parameter, 0, end - first, shape, (first, 0))
        if len(local) != len(shape):
            return None
        split = [dim for dim, (a, b) in enumerate(zip(local, shape, strict=True)) if a != b]
        if not split:
            return Region(parameter, 0, local[0], shape, counted=self.rank == 0)
        [dim, *others] = split
        if others or dim > 1 or shape[dim] % local[dim]:
            return None
        if dim == 0 and len(getattr(module_of(self.model, parameter), "output_partition_sizes", [])) > 1:
            return (
                None  # q, k and v in one tensor: a device has a shard of each, and these are not adjacent in the whole
            )
        shard, counted = self.shard_of_device(shape[dim] // local[dim])
        begin = shard * local[dim]
        return Region(parameter, 0, local[0], shape, (0, begin) if dim else (begin, 0), counted)

    def shard_of_device(self, shards: int) -> tuple[int, bool]:
        """Returns which shard this device holds, and whether it counts: if several devices hold it, the first does."""
        return self.rank * shards // self.ranks, self.rank % max(1, self.ranks // shards) == 0


class ParameterMap:
    """The regions of one device of an engine.

    `by_position`: hash elements with their positions, as shards on several devices need, instead of bytes in order.
    `shards`: the number of policy ranks that each hash their own shard of every tensor.
    """

    def __init__(
        self,
        model: Any,
        manifest: list[ManifestEntry],
        rank: int = 0,
        ranks: int = 1,
        by_position: bool = False,
        shards: int = 1,
    ):
        self.model, self.rank, self.ranks, self.by_position, self.shards = model, rank, ranks, by_position, shards
        finder = RegionFinder(model, rank, ranks)
        self.sent_dtypes = {name: dtype for name, dtype, _ in manifest}
        regions = {name: finder.find(name, shape) for name, _, shape in manifest}
        self.regions = {name: region for name, region in regions.items() if region}
        self.unmapped_params = self.params_without_region()
        self.unmapped_tensors = [name for name, region in regions.items() if not region]
        self.require_same_model()
        hidden = [name for name, region in self.regions.items() if region.parameter in self.unmapped_params]
        for name in hidden:
            del self.regions[name]
        self.unmapped_tensors += hidden
        self.hashed_dtype = widest_dtype(
            [self.sent_dtypes[name] for name in self.unmapped_tensors],
            [finder.parameters[name] for name in self.unmapped_params],
        )
        self.arrived: dict[str, int] = {}
        self.arrived_bits: dict[str, int] = {}  # by name, because several threads load at the same time
        if self.unmapped_tensors:
            # Replaces the model's own method, the only place where tensors pass by name before they are converted.
            self.load_weights, model.load_weights = model.load_weights, self.load_and_observe

    def require_same_model(self) -> None:
        """Raises if only one side has something that the other one does not: then no conversion can explain it."""
        if self.unmapped_params and not self.unmapped_tensors:
            raise ValueError(
                f"the engine computes with {list_names(self.unmapped_params)}, which no tensor of the policy fills; "
                "its weights cannot be verified. Is it another model? sync.verify=false skips the check."
            )
        if self.unmapped_tensors and not self.unmapped_params:
            raise ValueError(
                f"the engine has no place for {list_names(self.unmapped_tensors)} of the policy; its weights cannot be "
                "verified. Is it another model? sync.verify=false skips the check."
            )

    def params_without_region(self) -> list[str]:
        """Returns the parameters that regions do not cover. The padding after a vocabulary need not be covered."""
        rows: dict[int, int] = {}
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for region in self.regions.values():
            key = parameters[region.parameter].data_ptr()
            rows[key] = rows.get(key, 0) + region.rows
        return [
            name
            for name, p in self.distinct_parameters().items()
            if rows.get(p.data_ptr(), 0) < len(p)
            and not DERIVED.search(name)
            and not (p.data_ptr() in rows and hasattr(module_of(self.model, name), "shard_indices"))
        ]

    def distinct_parameters(self) -> dict[str, Any]:
        """Returns each parameter once, even if two names share it, as with a tied head."""
        by_address = {p.data_ptr(): (name, p) for name, p in reversed(list(self.model.named_parameters()))}
        return dict(reversed(by_address.values()))

    # --- fingerprints -------------------------------------------------------------------------------------------------

    def load_and_observe(self, weights: Iterable[tuple[str, Any]]) -> Any:
        """Stands in for the model's `load_weights`. Fingerprints the tensors without a region on their way in."""

        def observe() -> Iterator[tuple[str, Any]]:
            for name, tensor in weights:
                if name in self.unmapped_tensors:
                    self.arrived[name] = tensor_fingerprint(tensor, self.by_position, self.shards)
                    self.arrived_bits[name] = fingerprint.hash_unordered([tensor], self.hashed_dtype)
                yield name, tensor

        return self.load_weights(observe())

    def fingerprints(self) -> DeviceFingerprints:
        """Fingerprints the weights that the engine computes with now."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        by_name = {
            name: self.region_fingerprint(parameters[region.parameter], region, self.sent_dtypes[name])
            for name, region in self.regions.items()
        }
        for name in filter(DERIVED.search, parameters):
            if not is_part_of_source(module_of(self.model, name), parameters[name], name):
                by_name[self.source_of(name)] = 0
        loaded = [
            p
            for name, p in self.distinct_parameters().items()
            if name in self.unmapped_params and (self.rank == 0 or hasattr(p, "output_dim") or hasattr(p, "input_dim"))
        ]
        arrived_bits = sum(self.arrived_bits.values()) % fingerprint.MODULUS  # vLLM's messages hold at most 64 bits
        loaded_bits = fingerprint.hash_unordered(loaded, self.hashed_dtype)
        result = DeviceFingerprints(by_name, self.arrived, arrived_bits, loaded_bits)
        self.arrived, self.arrived_bits = {}, {}
        return result

    def source_of(self, derived: str) -> str:
        """Returns the tensor of the policy that a parameter was made of."""
        weight = module_of(self.model, derived).kv_b_proj.weight
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        [name] = [name for name, region in self.regions.items() if parameters[region.parameter] is weight]
        return name

    def region_fingerprint(self, parameter: Any, region: Region, dtype: str) -> int:
        rows = in_sent_dtype(parameter.detach().narrow(0, region.first_row, region.rows), dtype)
        if not self.by_position:
            return fingerprint.hash_bytes(rows, self.shards)
        return fingerprint.hash_with_positions(rows, region.shape, region.origin) if region.counted else 0


def is_part_of_source(attention: Any, derived: Any, name: str) -> bool:
    """Returns whether latent attention computes with numbers of the kv_b_proj that is verified."""
    import torch

    sizes = [attention.qk_nope_head_dim, attention.v_head_dim]
    keys, values = attention.kv_b_proj.weight.T.unflatten(1, (-1, sum(sizes))).split(sizes, dim=-1)
    return torch.equal(derived, keys.permute(1, 2, 0) if name.endswith("_T") else values.transpose(0, 1))


def widest_dtype(sent: list[str], parameters: list[Any]) -> Any:
    """Returns the dtype that holds the numbers of all tensors that were sent, and of all parameters. None: of none."""
    import torch

    dtypes = [*(getattr(torch, dtype) for dtype in sent), *(p.dtype for p in parameters)]
    return max(dtypes, key=lambda dtype: dtype.itemsize, default=None)


def in_sent_dtype(rows: Any, dtype: str) -> Any:
    """Returns the same numbers in the dtype that was sent, if the engine's is wider and no number needs it.

    vLLM keeps the weights of some routers in float32 in a bfloat16 model.
    """
    import torch

    if rows.element_size() <= DTYPE_BYTES[dtype]:
        return rows
    sent = rows.to(getattr(torch, dtype))
    return sent if torch.equal(sent.to(rows.dtype), rows) else rows


def module_of(model: Any, parameter: str) -> Any:
    """Returns the module that a parameter belongs to."""
    return model.get_submodule(parameter.rpartition(".")[0])
