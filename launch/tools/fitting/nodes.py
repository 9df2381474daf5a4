"""A node of a Ray cluster as the estimates see it."""

from collections.abc import Mapping

from launch.tools.estimates.devices import NodeSpec, matching_gpus
from rlsys.errors import ConfigError

KIND = "accelerator_type:"  # prefix of the resource that names the GPUs of a node


def make_node(address: str, total: Mapping[str, float], free: Mapping[str, float]) -> NodeSpec:
    kinds = [name.removeprefix(KIND) for name in total if name.startswith(KIND)]
    gpus_of_kind = matching_gpus(kinds[0]) if kinds else []
    gpus = int(free.get("GPU", 0))
    if gpus and not gpus_of_kind:
        raise ConfigError(
            f"node {address} has GPUs of a kind that is not known ({', '.join(kinds) or 'none is named'}); give --cluster instead."
        )
    # Ray's figure for memory is a part of the node's memory. So the memory is not known, which 0 stands for.
    kind = kinds[0] if len(gpus_of_kind) > 1 else ""
    return NodeSpec(
        gpus, gpus_of_kind[0] if gpus_of_kind else None, free.get("CPU", 0.0), 0, address, kind, bool(total.get("CPU"))
    )
