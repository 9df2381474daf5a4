"""A policy rank's half of a sync: its weights, whole or as the shards that it holds, and how it sends them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from rlsys.errors import ConfigError
from workers.sync.disk_format import is_converted, to_disk_format
from workers.sync.layout import ManifestEntry, NamedTensors, Shard, split_into_buckets
from workers.sync.outgoing import OutgoingWeights
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
        self.uncast: set[str] = set()  # names of tensors that are sent in their own dtype
        biases = self.router_biases()
        for name, tensor in self.base_tensors().items():
            sent_dtype = tensor.dtype if name in biases else dtype
            cast = torch.empty(getattr(tensor, "ds_shape", tensor.shape), dtype=sent_dtype, device="meta")
            self.sent_as[name] = [(sent, dtype_name(t), list(t.shape)) for sent, t in to_disk_format(model, name, cast)]
            names = [sent for sent, *_ in self.sent_as[name]]
            refuse_fused(model, name, names, self.parameter_of)
            self.parameter_of |= dict.fromkeys(names, name)
            self.uncast |= set(names if name in biases else ())

    def router_biases(self) -> dict[str, Any]:
        tensors = dict(self.model.named_buffers()) | dict(self.model.named_parameters())
        return {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] in ROUTER_BIASES}

    def base_tensors(self) -> dict[str, Any]:
        """The model's own tensors by name, without adapters, which are sent as a part of the weights."""
        from rlsys.forward.lora import is_adapter

        # Biases come first: vLLM unpacks tensors where they lie, so none in float32 may follow an odd number of bfloat16.
        return self.router_biases() | {name: p for name, p in self.model.named_parameters() if not is_adapter(name)}

    def manifest(self) -> list[ManifestEntry]:
        """Returns name, dtype and shape of every tensor that the engines get, in order."""
        return [entry for entries in self.sent_as.values() for entry in entries]

    def lie_as_sent(self) -> bool:
        """True if all weights lie in this rank's memory whole, and in the dtype and the form that are sent."""
        return not is_converted(self.model) and all(
            lies_as_sent(tensor, self.sent_as[name][0][1]) and not self.adapted_layer(name)
            for name, tensor in self.base_tensors().items()
        )

    def full_buckets(self, entries: list[ManifestEntry] | None = None) -> Iterator[NamedTensors]:
        """Yields whole tensors by bucket. With ZeRO 3, a bucket is valid until the next one. A tied head comes once.

        `entries`: a part of the manifest. None: all of it.
        """
        parameters = self.base_tensors()
        for bucket in split_into_buckets(self.manifest() if entries is None else entries):
            names = dict.fromkeys(self.parameter_of[name] for name, _, _ in bucket)
            layers = {name: self.adapted_layer(name) for name in names}
            adapters = [matrix for layer in layers.values() if layer for matrix in (layer.lora_A, layer.lora_B)]
            with self.engine.gathered(*(parameters[name] for name in names), *adapters):
                weights = {name: layer.merged() if layer else parameters[name] for name, layer in layers.items()}
                tensors = dict(t for name in names for t in to_disk_format(self.model, name, weights[name]))
                yield [(name, tensors[name]) for name, _, _ in bucket]

    def adapted_layer(self, parameter: str) -> Any:
        """The layer whose weight the parameter is if it has an adapter, else None."""
        from rlsys.forward.lora import LoraLinear

        module, _, kind = parameter.rpartition(".")
        layer = self.model.get_submodule(module)
        return layer if kind == "weight" and isinstance(layer, LoraLinear) else None

    def shard_buckets(self) -> Iterator[list[Shard]]:
        """Yields what this rank sends of each bucket: its shards; or on rank 0 whole tensors, on the others nothing."""
        if self.shards == 1:
            for bucket in self.full_buckets():
                yield [(name, 0, tensor) for name, tensor in bucket if self.rank == 0]
            return
        parameters = self.base_tensors()
        for entries in split_into_buckets(self.manifest()):
            local = [(name, *self.engine.local_shard(parameters[name])) for name, _, _ in entries]
            yield [(name, first, elements) for name, first, elements in local if len(elements)]


class WeightSender:
    """One policy rank's half of every sync: it hands the weights to the transport, part by part."""

    def __init__(self, weights: PolicyWeights, transport: Sender, by_position: bool):
        self.weights, self.transport, self.by_position = weights, transport, by_position
        self.failure: Exception | None = None

    def connection_info(self) -> Message:
        """Returns what the engines need to know once, when they connect."""
        manifest = self.weights.manifest()
        shared = {"manifest": manifest, "shards": self.weights.shards, "by_position": self.by_position}
        return self.transport.connection_info(manifest, self.weights.lie_as_sent()) | shared

    def send(self, part: int, verify: bool) -> Any:
        """Sends the next part. Returns what the engines need to load it. Once a part fails, all later parts fail."""
        if part == 0:
            weights = self.weights
            buckets = weights.full_buckets(), weights.shard_buckets()
            self.outgoing = OutgoingWeights(*buckets, weights.dtype, verify, self.by_position, weights.uncast)
            self.failure = None
        if self.failure:
            raise self.failure
        try:
            return self.transport.send(self.outgoing, part)
        except Exception as error:
            self.failure = error
            raise

    def fingerprints(self) -> dict[str, list[int]]:
        """Returns the fingerprints of all that this rank has sent since part 0."""
        if self.failure:
            raise self.failure
        sends = self.weights.rank == 0 or self.weights.shards > 1
        fingerprints = self.outgoing.fingerprints if sends else {}
        del self.outgoing  # releases the bucket that ZeRO 3 has gathered
        return fingerprints


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
