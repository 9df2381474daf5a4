"""After a sync, each engine verifies, tensor by tensor, that it computes with the policy's weights.

    connect   manifest ──▶ every worker of the engine: ParameterMap(model, manifest)
    send      every rank: {tensor: fingerprints of the parts it sent} ──▶ combine_ranks([…]):   {tensor: fingerprint}
    verify    every worker: DeviceFingerprints of its parameters      ──▶ combine_devices([…]): {tensor: fingerprint}
              describe_differences(expected, actual): "", or which tensors differ

The fingerprints are of the weights that the engine computes with, not of the bytes that arrived.
"""

from dataclasses import dataclass
from typing import Any

from workers.sync import fingerprint


@dataclass(frozen=True)
class DeviceFingerprints:
    """What one device of an engine holds. `DeviceFingerprints({"model.norm.weight": 123}, {}, 0, 0)`

    The last three fields describe the tensors that have no region in the engine's parameters, see `ParameterMap`.
    """

    by_name: dict[str, int]  # of this device's shards; those of all devices add up to the whole tensor's
    arrived: dict[str, int]  # of tensors without a region, as they arrived
    arrived_bits: int  # `hash_unordered` of those tensors
    loaded_bits: int  # `hash_unordered` of the parameters that no region covers


def tensor_fingerprint(tensor: Any, by_position: bool, shards: int = 1) -> int:
    """Fingerprints a whole tensor, as the policy sends it."""
    if by_position:
        return fingerprint.hash_with_positions(tensor, tensor.shape)
    return fingerprint.hash_bytes(tensor, shards)


def combine_ranks(fingerprints: list[dict[str, list[int]]], by_position: bool = False) -> dict[str, str]:
    """Returns the policy's fingerprint of each tensor, given each rank's fingerprints of the parts that it sent."""
    combine = sum if by_position else fingerprint.combine_hashes
    return {
        name: to_hex(combine([part for rank in fingerprints for part in rank.get(name, [])]))
        for name in fingerprints[0]
    }


def combine_devices(devices: list[DeviceFingerprints]) -> dict[str, str]:
    """Returns an engine's fingerprint of each tensor.

    Tensors without a region are in the result if all of them together have the same bits as the uncovered parameters.
    """
    first = devices[0]
    fingerprints = {name: to_hex(sum(device.by_name[name] for device in devices)) for name in first.by_name}
    loaded_bits = sum(device.loaded_bits for device in devices)
    if loaded_bits % fingerprint.MODULUS == first.arrived_bits % fingerprint.MODULUS:
        fingerprints |= {name: to_hex(number) for name, number in first.arrived.items()}
    return fingerprints


def to_hex(number: int) -> str:
    return f"{number % fingerprint.MODULUS:016x}"


def describe_differences(expected: dict[str, str], actual: dict[str, str]) -> str:
    """Says which tensors an engine does not hold as they were sent. Empty if it holds all of them."""
    owner = {number: name for name, number in expected.items()}
    missing = [name for name in expected if name not in actual]
    unknown = [name for name in actual if name not in expected]
    wrong = []
    for name in expected:
        if name in actual and actual[name] != expected[name]:
            other = owner.get(actual[name])
            wrong.append(f"{name} (it holds {other})" if other else name)
    sentences = []
    if wrong:
        sentences.append(f"{len(wrong)} of {len(expected)} tensors differ: {list_names(wrong)}")
    if missing:
        sentences.append(f"{len(missing)} of {len(expected)} tensors are missing: {list_names(missing)}")
    if unknown:
        sentences.append(f"{len(unknown)} were never sent: {list_names(unknown)}")
    return "; ".join(sentences)


def list_names(names: list[str], limit: int = 4) -> str:
    """Joins names for a sentence.  ["a", "b", "c", "d", "e"] -> "a, b, c, d and 1 more" """
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
