"""A forward pass as it might have been, and what a model's files say: what a diagnosis asks a policy rank for."""

from dataclasses import dataclass

STEP_0 = "step 0"  # as `Variant.weights`: those the policy was made with


@dataclass(frozen=True)
class Sampling:
    """How logits become the distribution that is sampled. `Sampling(0.7, top_p=0.9)`"""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0  # 0: all


@dataclass(frozen=True)
class Variant:
    """A forward pass as it might have been; what is empty is as it is. `Variant((Sampling(0.7), Sampling(0.8)))`"""

    samplings: tuple[Sampling, ...]
    weights: str = ""  # model directory whose weights are used, or STEP_0
    dtype: str = ""  # bfloat16 | float32
    attention: str = ""  # plain: softmax(q kᵀ) v, written out, one sequence at a time
    positions: str = (
        ""  # left: a prompt begins where padding in front of it ends; right: a completion, where it does behind
    )
    longest: int = 0  # tokens of the longest prompt, which is what `positions` pads to


@dataclass(frozen=True)
class ModelFacts:
    """What the model's files say.

    ModelFacts(bos=1, eos=2, pad=0, ends=[2, 7], symbols=32000, embeddings=32000, generation={"top_p": 0.8}, encoded=[…], bare=[…])
    """

    bos: int | None  # the tokenizer's
    eos: int | None
    pad: int | None
    ends: list[int]  # what the model's own files give as end of sequence
    symbols: int  # ids the tokenizer can give
    embeddings: int  # rows of the embedding
    generation: dict[str, float]  # temperature, top_p and top_k of generation_config.json, as far as it has them
    encoded: list[list[int]]  # the texts asked about, with special tokens
    bare: list[list[int]]  # and without
