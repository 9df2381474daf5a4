"""What a rank holds only while DeepSpeed reduces gradients over ranks: copies of them, and activations that are left."""

from dataclasses import dataclass

from launch.tools.estimates.activations import PassMemory
from launch.tools.estimates.adapters import largest_trained, trained_parameters
from launch.tools.estimates.memory import WIDTH, Parts
from launch.tools.estimates.zero import MAX_GATHERED, REDUCE_BUCKET, bucket_elements, gathered_bytes
from rlsys.config.schema import Config
from rlsys.models.shapes import ModelShape


@dataclass(frozen=True)
class Reduction:
    """Gradients that are reduced at once, in elements, and what is there beside the bucket then."""

    reduced: float
    beside: float = 0.0  # elements of a gradient outside the bucket
    layers_done: float = 1.0  # share of the layers whose gradients are computed


def reduction_parts(c: Config, model: ModelShape, ranks: int, work: PassMemory, has_logits: bool) -> list[Parts]:
    """What is held at each time that can be the peak, the last one last. `has_logits`: True with an output layer."""
    if c.cluster.device == "cpu":  # once the pass is over
        return [{"weights": gathered_bytes(c, model), "buckets": copied_bytes_on_cpu(c, model, ranks)}]
    width, moments = WIDTH[c.policy.dtype], []
    for r in full_buckets(c, model, has_logits):
        # ZeRO 3 has released the weights of these gradients.
        gathered = width * max(min(model.parameters - r.reduced, MAX_GATHERED), 0) * (c.policy.zero_stage == 3)
        layer = work.layer / 2 if 0 < r.layers_done < 1 else 0  # in the middle of a layer
        moments.append(
            {
                "weights": gathered,
                "gradients": width * r.beside,
                "buckets": copied_bytes(c, ranks, r.reduced > bucket_elements(c, trained_parameters(c, model)))
                * r.reduced,
                "activations": work.saved * (1 - r.layers_done) + layer,
            }
        )
    return moments


def full_buckets(c: Config, model: ModelShape, has_logits: bool) -> list[Reduction]:
    """ZeRO 0 and 1 reduce after the pass. ZeRO 2 and 3 do so when the next gradient does not fit the bucket, and at the end.

    The output layer's gradient comes first, then the layers', and the embeddings' last. A tensor that is both has its
    gradient at the end; until then autograd keeps the output layer's part. A tensor larger than the bucket is reduced
    alone.
    """
    trained = trained_parameters(c, model)
    size = bucket_elements(c, trained)
    if c.policy.zero_stage == 0:  # a bucket ends with the tensor that exceeds it
        return [Reduction(min(trained, size + largest_trained(c, model) * (trained > size)))]
    if c.policy.zero_stage == 1 or trained <= size:
        return [Reduction(min(trained, size))]
    embedding, layers = float(model.embedding_parameters), float(model.parameters_of_layers)
    most = max(min(trained, size), embedding)
    beside = embedding * (embedding > size)
    if not model.tied:
        return [Reduction(most, beside, min((most - embedding) / layers, 1)), Reduction(most, beside)]
    in_bucket = min(layers, size)
    return [Reduction(in_bucket, embedding * has_logits, in_bucket / layers), Reduction(most, beside)]


def copied_bytes(c: Config, ranks: int, alone: bool) -> float:
    """Per element. ZeRO 0 to 2 copy gradients as they are, and then to the type that is sent.

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
