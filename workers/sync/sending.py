"""A policy rank's half of a sync: its weights, whole or as the shards that it holds, and how it sends them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from rlsys.errors import ConfigError
from workers.sync.disk_format import is_converted, to_disk_format
from workers.sync.layout import ManifestEntry, NamedTensors, Shard, split_into_buckets
from workers.sync.outgoing import OutgoingBucket
from workers.sync.transport import Message, Sender

# Routers choose experts by them. transformers keeps most of them as buffers, in float32, and vLLM as parameters. Other
# buffers in a model's files, such as decays, follow from its configuration.
ROUTER_BIASES = ("e_score_correction_bias", "expert_bias")


class Partitioned(Protocol):
    """What is needed of a `ZeroEngine`."""

    def gathered(self, *tensors: Any) -> AbstractContextManager[Any]: ...
    def local_shard(self, tensor: Any) -> tuple[int, Any]: ...


class PolicyWeights:
    """`shards`: the number of ranks that each send their own shard of every tensor. 1: rank 0 sends all of them."""

    def __init__(self, model: Any, engine: Partitioned, dtype: Any, rank: int, shards: int):
        import torch

        self.model, self.engine, self.dtype, self.rank, self.shards = model, engine, dtype, rank, shards

        self.sent_as: dict[str, list[ManifestEntry]] = {}  # by tensor of the model: what is sent
        self.parameter_of: dict[str, str] = {}  # by name of a tensor that is sent
        biases = self.router_biases()
        for name, tensor in self.base_tensors().items():
            sent_dtype = tensor.dtype if name in biases else dtype
            cast = torch.empty(getattr(tensor, "ds_shape", tensor.shape), dtype=sent_dtype, device="meta")
            self.sent_as[name] = [(sent, dtype_name(t), list(t.shape)) for sent, t in to_disk_format(model, name, cast)]
            names = [sent for sent, *_ in self.sent_as[name]]
            refuse_fused(model, name, names, self.parameter_of)
            self.parameter_of |= dict.fromkeys(names, name)

    def router_biases(self) -> dict[str, Any]:
        tensors = dict(self.model.named_buffers()) | dict(self.model.named_parameters())
        return {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] in ROUTER_BIASES}

    def base_tensors(self) -> dict[str, Any]:
        """Returns the model's own tensors by name, without adapters, which are sent as a part of the weights."""
        from rlsys.forward.lora import is_adapter

        # Biases come first: vLLM unpacks tensors where they lie, so none in float32 may follow an odd number of bfloat16.
        return self.router_biases() | {name: p for name, p in self.model.named_parameters() if not is_adapter(name)}

    def manifest(self) -> list[ManifestEntry]:
        """Returns name, dtype and shape of every tensor that the engines get, in order."""
        return [entry for entries in self.sent_as.values() for entry in entries]

    def lie_as_sent(self) -> bool:
        """Returns whether all weights lie in this rank's memory whole, and in the dtype and the form that are sent."""
        return not is_converted(self.model) and all(
            lies_as_sent(tensor, self.sent_as[name][0][1]) and not self.adapted_layer(name)
            for name, tensor in self.base_tensors().items()
        )

    @contextmanager
    def whole(self, entries: list[ManifestEntry]) -> Iterator[NamedTensors]:
        """While it is open, these tensors of the manifest are whole. With ZeRO 3 all ranks take part."""
        parameters = self.base_tensors()
        names = dict.fromkeys(self.parameter_of[name] for name, _, _ in entries)
        layers = {name: self.adapted_layer(name) for name in names}
        adapters = [matrix for layer in layers.values() if layer for matrix in (layer.lora_A, layer.lora_B)]
        with self.engine.gathered(*(parameters[name] for name in names), *adapters):
            weights = {name: layer.merged() if layer else parameters[name] for name, layer in layers.items()}
            tensors = dict(t for name in names for t in to_disk_format(self.model, name, weights[name]))
            yield [(name, tensors[name]) for name, _, _ in entries]

    @contextmanager
    def own(self, entries: list[ManifestEntry], whole_of_all_ranks: bool) -> Iterator[list[Shard]]:
        """What this rank sends of a bucket: its shards; or whole tensors, on rank 0 or on all ranks."""
        if self.shards == 1:
            with self.whole(entries) as tensors:
                sends = whole_of_all_ranks or self.rank == 0
                yield [(name, 0, tensor) for name, tensor in tensors if sends]
            return
        parameters = self.base_tensors()
        local = [(name, *self.engine.local_shard(parameters[name])) for name, _, _ in entries]
        yield [(name, first, elements) for name, first, elements in local if len(elements)]

    def adapted_layer(self, parameter: str) -> Any:
        """Returns the layer whose weight the parameter is if it has an adapter, else None."""
        from rlsys.forward.lora import LoraLinear

        module, _, kind = parameter.rpartition(".")
        layer = self.model.get_submodule(module)
        return layer if kind == "weight" and isinstance(layer, LoraLinear) else None


class WeightSender:
    """One policy rank's half of every sync: it hands the weights to the transport, bucket by bucket."""

    def __init__(self, weights: PolicyWeights, transport: Sender, by_position: bool):
        self.weights, self.transport, self.by_position = weights, transport, by_position
        self.failure: Exception | None = None
        self.sent: dict[str, list[int]] = {}  # fingerprints of the present sync's buckets

    def connection_info(self) -> Message:
        """Plans the buckets. Returns what the engines need to know once, when they connect."""
        manifest, in_place = self.weights.manifest(), self.transport.reads_in_place and self.weights.lie_as_sent()
        # Weights that engines read in place need no memory for a copy, so they are one bucket.
        self.buckets = [manifest] if in_place else split_into_buckets(manifest)
        shared = {"manifest": manifest, "shards": self.weights.shards, "by_position": self.by_position}
        return self.transport.connection_info(self.buckets, in_place) | shared | {"parts": len(self.buckets)}

    def send(self, number: int, verify: bool) -> Any:
        """Sends a bucket. Returns what the engines need to load it. Once a bucket fails, all later ones fail."""
        if number == 0:
            self.sent, self.failure, self.verify = {}, None, verify
        if self.failure:
            raise self.failure
        entries = self.buckets[number]
        try:
            with self.weights.own(entries, whole_of_all_ranks=not self.transport.sends_shards) as shards:
                bucket = OutgoingBucket(number, entries, shards, verify, self.by_position)
                answer = self.transport.send(bucket)
            self.sent |= bucket.fingerprints
            return answer
        except Exception as error:
            self.failure = error
            raise

    def fingerprints(self) -> dict[str, list[int]]:
        """Returns the fingerprints of all that this rank has sent since bucket 0."""
        if self.failure:
            raise self.failure
        return self.sent if self.weights.rank == 0 or self.weights.shards > 1 else {}


def refuse_fused(model: Any, parameter: str, names: list[str], parameter_of: dict[str, str]) -> None:
    """Raises if a tensor of the files holds more than this parameter: each is sent and saved by itself."""
    for name in names:
        if other := parameter_of.get(name):
            raise ConfigError(
                f"model.path: the files of a {type(model).__name__} hold {other} and {parameter} in one tensor, {name}. "
                "rlsys neither sends nor saves such tensors, so it cannot train this architecture."
            )


def lies_as_sent(tensor: Any, dtype: str) -> bool:
    return not hasattr(tensor, "ds_id") and dtype_name(tensor) == dtype and tensor.is_contiguous()


def dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
