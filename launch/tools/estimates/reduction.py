"""What a rank holds only while DeepSpeed reduces gradients over ranks: copies of them, and activations that are left.

It is the most that can come together. A few layers may be done when the first bucket is full; they count as if they were not.
"""

from launch.tools.estimates.activations import PassMemory
from launch.tools.estimates.adapters import largest_trained, trained_parameters
from launch.tools.estimates.memory import WIDTH, Parts
from launch.tools.estimates.zero import REDUCE_BUCKET, bucket_elements, gathered_bytes
from rlsys.config.schema import Config
from rlsys.models.shapes import ModelShape


def reduction_parts(c: Config, model: ModelShape, ranks: int, work: PassMemory) -> list[Parts]:
    """Returns what is held during a pass, if a bucket is full before its end, and after it. `work`: the pass."""
    p, width, trained = c.policy, WIDTH[c.policy.dtype], trained_parameters(c, model)
    if c.cluster.device == "cpu":
        return [{"weights": gathered_bytes(c, model), "buckets": copied_bytes_on_cpu(c, model, ranks)}]
    size, embedding = bucket_elements(c, trained), float(model.embedding_parameters)
    if p.zero_stage == 0:  # a bucket ends with the tensor that exceeds it
        size = min(trained, size + largest_trained(c, model) * (trained > size))
    if p.zero_stage < 2 or trained <= size:
        return [{"buckets": copied_bytes(c, ranks, alone=False) * min(trained, size)}]
    # A tensor larger than the bucket is reduced alone. The output layer's gradient comes first; that of a tied one last,
    # and until then autograd keeps a part of it.
    alone = {"buckets": copied_bytes(c, ranks, alone=True) * embedding, "gradients": width * embedding}
    full = {"buckets": copied_bytes(c, ranks, alone=False) * size, "gradients": width * embedding * model.tied}
    last = alone if embedding > size else full | {"gradients": 0.0}
    during = full if model.tied else last
    layer = work.layer / 2 * (model.tied or embedding <= size)  # the output layer's alone comes before any layer
    return [during | {"weights": gathered_bytes(c, model), "activations": work.saved + layer}, last]


def copied_bytes(c: Config, ranks: int, alone: bool) -> float:
    """Returns bytes per element. ZeRO 0 to 2 copy gradients as they are, and then to the type that is sent.

    The bucket of ZeRO 3 has that type, and is copied. A tensor that is reduced alone is converted only.
    """
    p, width = c.policy, WIDTH[c.policy.dtype]
    sent = 4 if p.grad_dtype == "float32" else width
    converted = sent * (sent > width)
    if p.zero_stage == 3:
        return float(converted if alone else sent * (ranks > 1 or sent > width))
    return float((width + converted) * (ranks > 1 or sent > width))


def copied_bytes_on_cpu(c: Config, model: ModelShape, ranks: int) -> float:
    p, width = c.policy, WIDTH[c.policy.dtype]
    bucket = min(trained_parameters(c, model), REDUCE_BUCKET)
    copied = 4 if width == 2 and p.grad_dtype == "float32" else width * (ranks > 1)
    return copied * bucket * (2 if p.zero_stage == 3 and ranks > 1 else 1)  # with ZeRO 3, gloo makes one more copy
