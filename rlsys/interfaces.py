"""How the loop reaches machines. `workers` implements these on Ray; unit tests with small fakes."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from rlsys.types import Floats, Pack, Prompt, Request, Sample, Verdict

# --- what a diagnosis asks a policy rank for ------------------------------------------------------------------------------

STEP_0 = "step 0"  # as `WhatIf.weights`: those that the policy started with


@dataclass(frozen=True)
class Sampling:
    """How logits become the distribution that is sampled. `Sampling(0.7, top_p=0.9)`"""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0  # 0: all


@dataclass(frozen=True)
class WhatIf:
    """A changed forward pass. Empty fields change nothing. `WhatIf((Sampling(0.7), Sampling(0.8)))`"""

    samplings: tuple[Sampling, ...]
    weights: str = ""  # a model directory, or STEP_0
    dtype: str = ""  # bfloat16 | float32
    attention: str = ""  # plain: softmax(q kᵀ) v, written out, one sequence at a time
    positions: str = ""  # left: as with padding before the prompt; right: as with padding after it
    longest_prompt: int = 0  # tokens to which `positions` pads prompts


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


# --- machines -------------------------------------------------------------------------------------------------------------


class Rollout(Protocol):
    """The engines, as one."""

    def generate(self, requests: list[Request]) -> Iterator[list[Sample]]:
        """Samples as they finish, in any order. Requests of one uid stand together, those to be begun first in front."""
        ...

    def stop_early(self) -> None:
        """No more is wanted of what `generate` is at: it ends with what is half-written, whose `finish` is cut.

        What was not begun does not come.
        """
        ...

    def wake(self) -> None:
        """The engines are about to be used (colocated ones wake)."""
        ...

    def sleep(self) -> None:
        """The engines will not be used for a while (colocated ones sleep)."""
        ...


class Rewards(Protocol):
    def judge(self, samples: list[Sample], prompts: dict[str, Prompt]) -> Future[list[Verdict]]:
        """One verdict per sample, in order. A failure is a verdict too: the future itself only fails with the pool."""
        ...


class Scorer(Protocol):
    """Computes a number for each token of what is already sampled: log-probs, or the critic's values."""

    ranks: int

    def score(self, packs: list[list[Pack]]) -> list[list[Floats]]:
        """`packs[rank][i]` → its numbers [K], same shape."""
        ...


class Diagnosable(Scorer, Protocol):
    """A policy that can score with a changed forward pass, to find out why it disagrees with the engines."""

    def rescore(self, packs: list[list[Pack]], what_if: WhatIf) -> list[list[Floats]]:
        """`packs[rank][i]` → log-probs [K, samplings]."""
        ...

    def model_facts(self, texts: list[str]) -> ModelFacts:
        """Returns what the model's files say, and how they tokenize these texts."""
        ...


class Critic(Scorer, Protocol):
    """The critic's ranks, as one."""

    def update(self, packs: list[list[Pack]], lr: float) -> dict[str, float]:
        """One optimizer update on one mini-batch. Returns its loss and gradient norm."""
        ...

    def save(self, folder: str) -> None:
        """Sets its state aside and begins to write it; `saved` says when it is there."""
        ...

    def saved(self, wait: bool) -> dict[str, str] | None:
        """What the last `save` wrote: file, by its path in the folder → SHA-256. None: it is still being written."""
        ...

    def load(self, folder: str) -> None: ...


class Policy(Scorer, Protocol):
    """The policy ranks, as one."""

    def update(self, packs: list[list[Pack]], lr: float, kl_coef: float) -> dict[str, float]:
        """One optimizer update on one mini-batch. Returns sums over its tokens; `metrics.of_updates` reads them."""
        ...

    def sync(self, version: int) -> None:
        """Brings every engine to the policy's weights, which are called `version` from now on, and proves it."""
        ...

    def save(self, folder: str) -> None:
        """Sets its state aside and begins to write it; `saved` says when it is there."""
        ...

    def saved(self, wait: bool) -> dict[str, str] | None:
        """What the last `save` wrote: file, by its path in the folder → SHA-256. None: it is still being written."""
        ...

    def load(self, folder: str) -> None:
        """From what any number of ranks and any ZeRO stage wrote."""
        ...
