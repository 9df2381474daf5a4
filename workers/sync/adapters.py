"""Adapter-only sync: engines keep the model's own weights, get A and B of each layer with LoRA, and merge as the policy does.

    connect   every rank: names of A and B, and how to merge     every worker of an engine: AdapterMerger
    send      A and B in the policy's dtype, by any transport ──▶ takes them in place of weights, and
                                                                  loads round(W + s B A), with W from the model's files
    verify    the weights that ranks compute with, against those that engines compute with, as after a full sync

A new adapter is zero, so the first sync could not show that an engine leaves it out. Before that sync, engines merge
random adapters, and are verified.
"""

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rlsys.errors import ConfigError
from workers.sync.layout import ManifestEntry, NamedTensors, split_into_buckets
from workers.sync.outgoing import OutgoingBucket
from workers.sync.sending import PolicyWeights, WeightSender, lies_as_sent
from workers.sync.transport import Message, Sender
from workers.sync.verify import list_names


def matrix_names(weight: str) -> tuple[str, str]:
    """ "model.layers.0.mlp.up_proj.weight" -> ("model.layers.0.mlp.up_proj.lora_A", "model.layers.0.mlp.up_proj.lora_B")"""
    layer = weight.removesuffix(".weight")
    return f"{layer}.lora_A", f"{layer}.lora_B"


class AdapterMatrices(PolicyWeights):
    """A and B of every adapted layer, in place of weights."""

    def __init__(self, merged: PolicyWeights):
        layers = {sent: merged.adapted_layer(parameter) for sent, parameter in merged.parameter_of.items()}
        self.layers = {sent: layer for sent, layer in layers.items() if layer}
        self.matrices = {
            name: matrix
            for sent, layer in self.layers.items()
            for name, matrix in zip(matrix_names(sent), (layer.lora_A, layer.lora_B), strict=True)
        }
        dtype = next(iter(self.matrices.values())).dtype
        super().__init__(merged.model, merged.engine, dtype, merged.rank, shards=1)

    def manifest(self) -> list[ManifestEntry]:
        dtype = str(self.dtype).removeprefix("torch.")
        return [(name, dtype, list(getattr(m, "ds_shape", m.shape))) for name, m in self.matrices.items()]

    def lie_as_sent(self) -> bool:
        return all(
            lies_as_sent(matrix, dtype)
            for matrix, (_, dtype, _) in zip(self.matrices.values(), self.manifest(), strict=True)
        )

    @contextmanager
    def whole(self, entries: list[ManifestEntry]) -> Iterator[NamedTensors]:
        matrices = {name: self.matrices[name] for name, *_ in entries}
        with self.engine.gathered(*matrices.values()):
            yield list(matrices.items())


class AdapterSender(WeightSender):
    """One policy rank's half."""

    def __init__(self, merged: PolicyWeights, transport: Sender, by_position: bool):
        self.matrices = AdapterMatrices(merged)
        super().__init__(self.matrices, transport, by_position)
        self.merged, self.unread = merged, merged.manifest()  # `unread`: what the next sync fingerprints
        self.base_fingerprints: dict[str, list[int]] = {}

    def connection_info(self) -> Message:
        layers = self.matrices.layers
        merging = {
            "layers": list(layers),
            "scale": next(iter(layers.values())).scale,
            "dtype": str(self.matrices.dtype).removeprefix("torch."),
            "uncast": sorted(self.merged.uncast),
        }
        return super().connection_info() | {"manifest": self.merged.manifest(), "merging": merging}

    def fingerprints(self) -> dict[str, list[int]]:
        """Returns the fingerprints of all weights that the policy computes with. Those of the base stay as they are."""
        super().fingerprints()
        if not self.verify:
            return {}
        layers, current = self.matrices.layers, dict[str, list[int]]()
        for number, entries in enumerate(split_into_buckets(self.unread)):
            with self.merged.own(entries, whole_of_all_ranks=False) as shards:  # on all ranks, because ZeRO 3 gathers
                bucket = OutgoingBucket(number, entries, shards, by_position=self.by_position)
                bucket.cast()
            current |= bucket.fingerprints
        self.unread = [entry for entry in self.unread if entry[0] in layers]
        self.base_fingerprints |= {name: f for name, f in current.items() if name not in layers}
        return self.base_fingerprints | current


class AdapterMerger:
    """One worker's half in an engine: loads merged weights into the model.

    `files` are the model's own tensors. `uncast`: those that the policy has in the dtype of the manifest, and not in
    its `dtype`. `in_place`: weights that do not change need not be loaded again.
    """

    def __init__(
        self,
        model: Any,
        files: Iterable[tuple[str, Any]],
        manifest: list[ManifestEntry],
        layers: list[str],
        *,
        scale: float,
        dtype: str,
        in_place: bool,
        uncast: Container[str] = (),
    ):
        import torch

        self.formats = {name: getattr(torch, format) for name, format, _ in manifest}
        self.base = {name: tensor for name, tensor in files if name in self.formats}  # mapped, not read
        if missing := sorted(self.formats.keys() - self.base.keys()):
            raise ConfigError(
                f"sync.what adapter: the model's files have no {list_names(missing)}, which the policy has; engines could "
                "not merge adapters into them. Use sync.what all."
            )
        self.layers, self.scale, self.dtype, self.uncast = layers, scale, getattr(torch, dtype), uncast
        self.device, self.in_place, self.loaded = next(model.parameters()).device, in_place, False
        self.matrices: dict[str, Any] = {}
        # Replaces the model's own method, which every transport calls with what has arrived.
        self.load_weights, model.load_weights = model.load_weights, self.receive

    def receive(self, matrices: Iterable[tuple[str, Any]]) -> None:
        """Stands in for the model's `load_weights`. Transports use their memory again, so it copies."""
        self.matrices.update({name: matrix.clone() for name, matrix in matrices})

    def merge(self) -> None:
        """Loads the weights with the adapters that have arrived."""
        names = self.layers if self.in_place and self.loaded else list(self.base)
        self.load_weights((name, self.weight(name)) for name in names)
        self.loaded = True
        self.matrices.clear()

    def weight(self, name: str) -> Any:
        from rlsys.forward.lora import merge

        sent = self.formats[name]
        base = self.base[name].to(self.device, sent if name in self.uncast else self.dtype)
        if name not in self.layers:
            return base.to(sent)  # an engine may keep it in a wider dtype
        a, b = (self.matrices[matrix].to(self.device) for matrix in matrix_names(name))
        return merge(base, a, b, self.scale, sent)
