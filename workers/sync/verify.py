"""Each engine proves after a sync, tensor by tensor, that what it computes with is what the policy has.

vLLM fuses q, k and v into one matrix, gate and up into another, pads vocabularies, and may split all of them over devices.
A `Chart` finds every tensor of the policy's manifest again in the engine's own parameters, so that both sides say the same
number for the same name:

    connect    manifest ──▶  every worker of the engine: Chart(model, manifest)
    send       policy: {name: fingerprint of the tensor}
    prove      every worker: Answer of its own parameters  ──▶  together([…]): {name: fingerprint}
               differences(expected, answered): '' or which tensors are wrong, in words

What an architecture stores in a way of its own has no such place. It is fingerprinted as it arrives, and all of it together
must have the same bits as all parameters that have no name, in whatever order.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from workers.sync import fingerprint

Manifest = list[tuple[str, str, list[int]]]  # name, dtype, shape
TURNED = re.compile(r"\.(?:c_attn|c_fc|c_proj)\.weight$")  # of GPT-2, which vLLM stores the other way round


@dataclass(frozen=True)
class Region:
    """Rows of one of the engine's parameters. k_proj [128, 896] in qkv_proj: Region("….qkv_proj.weight", 896, 128, [128, 896])."""

    parameter: str
    first_row: int
    rows: int
    shape: list[int]  # shape of the tensor that this is, or is a share of
    origin: tuple[int, int] = (0, 0)  # row and column of the whole where this device's share begins
    counted: bool = True  # false: a copy of another device's share


@dataclass(frozen=True)
class DeviceFingerprints:
    """One device's. The last three are of what has no region: Answer({"model.norm.weight": 123}, {}, 0, 0)."""

    by_name: dict[str, int]  # of this device's shares; those of all devices add up
    arrived: dict[str, int]
    arrived_bits: int
    loaded_bits: int


class ParameterMap:
    def __init__(
        self, model: Any, manifest: Manifest, rank: int = 0, ranks: int = 1, by_place: bool = False, cut: int = 1
    ):
        """`by_place`: print elements with their places, which shares of several devices need, rather than bytes in order.
        `cut`: of how many policy ranks each prints a share of every tensor."""
        self.model, self.rank, self.ranks, self.by_place, self.cut = model, rank, ranks, by_place, cut
        self.regions: dict[str, Region] = {}
        for name, _, shape in manifest:
            if region := self.find_region(name, shape):
                self.regions[name] = region
        self.unmapped_params = self.params_without_region()
        hidden = [name for name, r in self.regions.items() if r.parameter in self.unmapped_params]
        self.unmapped_tensors = [name for name, _, _ in manifest if name not in self.regions]
        if self.unmapped_params and not self.unmapped_tensors:
            raise ValueError(
                f"the engine computes with {list_names(self.unmapped_params)}, which no tensor of the policy fills; "
                "its weights cannot be proved. Is it another model? sync.verify false goes on without a proof."
            )
        self.unmapped_tensors += hidden
        for name in hidden:
            del self.regions[name]
        if self.unmapped_tensors and not self.unmapped_params:
            raise ValueError(
                f"the engine has no place for {list_names(self.unmapped_tensors)} of the policy; its weights cannot be proved. "
                "Is it another model? sync.verify false goes on without a proof."
            )
        self.arrived: dict[str, int] = {}
        self.arrived_bits: dict[str, int] = {}  # by name: several threads may be at it
        if self.unmapped_tensors:
            self.load_weights, model.load_weights = model.load_weights, self.load_and_observe

    def parameters(self) -> dict[str, Any]:
        """Each once, also where two names share it, as a tied head's do."""
        found = {p.data_ptr(): (name, p) for name, p in reversed(list(self.model.named_parameters()))}
        return dict(reversed(found.values()))

    def find_region(self, name: str, shape: list[int]) -> Region | None:
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        mapper = getattr(self.model, "hf_to_vllm_mapper", None)
        mapped = mapper.map_name(name) if mapper else name
        turned = TURNED.search(name) and any(hasattr(m, "_transpose_conv1d") for m in self.model.children())
        if mapped is None or turned:
            return None
        for fused, parts in getattr(self.model, "packed_modules_mapping", {}).items():
            for i, part in enumerate(parts):
                if len(parts) > 1 and f".{part}." in name:
                    target = mapped.replace(f".{part}.", f".{fused}.")
                    return self.fused_region(target, i, shape) if target in parameters else None
        return self.plain_region(mapped, list(parameters[mapped].shape), shape) if mapped in parameters else None

    def fused_region(self, parameter: str, part: int, shape: list[int]) -> Region | None:
        sizes = getattr(self.module(parameter), "output_partition_sizes", [])
        if part >= len(sizes) or shape[0] % sizes[part]:
            return None
        share, counts = self.share(shape[0] // sizes[part])
        return Region(parameter, sum(sizes[:part]), sizes[part], shape, (share * sizes[part], 0), counts)

    def plain_region(self, parameter: str, here: list[int], shape: list[int]) -> Region | None:
        vocabulary = getattr(self.module(parameter), "shard_indices", None)
        if vocabulary and here[1:] == shape[1:]:
            first, end = vocabulary.org_vocab_start_index, vocabulary.org_vocab_end_index
            return Region(parameter, 0, end - first, shape, (first, 0))
        split = [i for i, (a, b) in enumerate(zip(here, shape, strict=False)) if a != b]
        if len(here) != len(shape) or len(split) > 1 or (split and (split[0] > 1 or shape[split[0]] % here[split[0]])):
            return None
        if not split:
            return Region(parameter, 0, here[0], shape, counted=self.rank == 0)
        if split[0] == 0 and len(getattr(self.module(parameter), "output_partition_sizes", [])) > 1:
            return None  # one tensor of q, k and v: a device has its share of each, not rows that follow each other
        share, counts = self.share(shape[split[0]] // here[split[0]])
        begins = share * here[split[0]]
        return Region(parameter, 0, here[0], shape, (0, begins) if split[0] else (begins, 0), counts)

    def share(self, shares: int) -> tuple[int, bool]:
        """Which of so many shares this device has, and whether it is the first to have it: there may be fewer than devices."""
        return self.rank * shares // self.ranks, self.rank % max(1, self.ranks // shares) == 0

    def module(self, parameter: str) -> Any:
        return self.model.get_submodule(parameter.rpartition(".")[0])

    def params_without_region(self) -> list[str]:
        """Parameters not all of which a region names. Padding after a vocabulary needs no name."""
        rows: dict[int, int] = {}
        everywhere = dict(self.model.named_parameters(remove_duplicate=False))
        for region in self.regions.values():
            key = everywhere[region.parameter].data_ptr()
            rows[key] = rows.get(key, 0) + region.rows
        return [
            name
            for name, p in self.parameters().items()
            if rows.get(p.data_ptr(), 0) < len(p)
            and not (p.data_ptr() in rows and hasattr(self.module(name), "shard_indices"))
        ]

    def load_and_observe(self, weights: Iterable[tuple[str, Any]]) -> Any:
        """The model's `load_weights`, looking at what passes by that has no region."""

        def passing() -> Iterator[tuple[str, Any]]:
            for name, tensor in weights:
                if name in self.unmapped_tensors:
                    self.arrived[name] = self.print(tensor)
                    self.arrived_bits[name] = fingerprint.hash_unordered([tensor])
                yield name, tensor

        return self.load_weights(passing())

    def print(self, tensor: Any) -> int:
        return tensor_fingerprint(tensor, self.by_place, self.cut)

    def fingerprints(self) -> DeviceFingerprints:
        """Of what the engine now computes with."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))

        def here(region: Region) -> Any:
            return parameters[region.parameter].detach().narrow(0, region.first_row, region.rows)

        def print(region: Region) -> int:
            if not self.by_place:
                return fingerprint.hash_bytes(here(region), self.cut)
            return fingerprint.hash_with_positions(here(region), region.shape, region.origin) if region.counted else 0

        prints = {name: print(region) for name, region in self.regions.items()}
        loaded = [
            p
            for name, p in self.parameters().items()
            if name in self.unmapped_params and (self.rank == 0 or hasattr(p, "output_dim") or hasattr(p, "input_dim"))
        ]
        bits = sum(self.arrived_bits.values()) % fingerprint.MODULUS  # no more than a message may hold
        answer = DeviceFingerprints(prints, self.arrived, bits, fingerprint.hash_unordered(loaded))
        self.arrived, self.arrived_bits = {}, {}
        return answer


def tensor_fingerprint(tensor: Any, by_place: bool, cut: int = 1) -> int:
    """Of a whole tensor, as the policy sends it."""
    return fingerprint.hash_with_positions(tensor, tensor.shape) if by_place else fingerprint.hash_bytes(tensor, cut)


def combine_ranks(found: list[dict[str, list[int]]]) -> dict[str, str]:
    """The policy's fingerprint of each tensor, from what each rank says of the parts that it sent."""
    return {
        name: to_hex(fingerprint.combine_hashes([n for of_rank in found for n in of_rank.get(name, [])]))
        for name in found[0]
    }


def to_hex(number: int) -> str:
    return f"{number % fingerprint.MODULUS:016x}"


def combine_devices(answers: list[DeviceFingerprints]) -> dict[str, str]:
    """What all devices of an engine say. A tensor without a region counts as there if the bits of all such are."""
    first = answers[0]
    prints = {name: to_hex(sum(a.by_name[name] for a in answers)) for name in first.by_name}
    if sum(a.loaded_bits for a in answers) % fingerprint.MODULUS == first.arrived_bits % fingerprint.MODULUS:
        prints |= {name: to_hex(number) for name, number in first.arrived.items()}
    return prints


def describe_differences(expected: dict[str, str], answered: dict[str, str]) -> str:
    """In words, which tensors an engine does not have as they were sent; '' if it has them all."""
    owner = {number: name for name, number in expected.items()}
    missing = [name for name in expected if name not in answered]
    unknown = [name for name in answered if name not in expected]
    wrong = []
    for name in expected:
        if name in answered and answered[name] != expected[name]:
            other = owner.get(answered[name])
            wrong.append(f"{name} (it holds {other})" if other else name)
    said = []
    if wrong:
        said.append(f"{len(wrong)} of {len(expected)} tensors differ: {list_names(wrong)}")
    if missing:
        said.append(f"{len(missing)} of {len(expected)} tensors are missing: {list_names(missing)}")
    if unknown:
        said.append(f"{len(unknown)} were never sent: {list_names(unknown)}")
    return "; ".join(said)


def list_names(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
