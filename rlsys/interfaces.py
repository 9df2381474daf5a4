"""The protocols through which the loop reaches machines. `workers` implements them on Ray, unit tests with fakes."""

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
    attention: str = ""  # own: as transformers computes the model, one sequence at a time
    positions: str = ""  # left: as with padding before the prompt; right: as with padding after it
    longest_prompt: int = 0  # tokens to which `positions` pads prompts


@dataclass(frozen=True)
class ModelFacts:
    """Facts from the model's files.

    ModelFacts(bos=1, eos=2, pad=0, model_eos=[2, 7], tokenizer_vocab=32000, model_vocab=32000,
               generation={"top_p": 0.8}, with_special_tokens=[[1, 5, 9]], without_special_tokens=[[5, 9]])
    """

    bos: int | None  # the tokenizer's
    eos: int | None
    pad: int | None
    model_eos: list[int]  # end-of-sequence tokens of generation_config.json or config.json
    tokenizer_vocab: int  # number of token ids that the tokenizer can give
    model_vocab: int  # rows of the embedding
    generation: dict[str, float]  # temperature, top_p and top_k of generation_config.json, as far as it has them
    with_special_tokens: list[list[int]]  # the tokens of the given texts
    without_special_tokens: list[list[int]]


# --- machines -------------------------------------------------------------------------------------------------------------


class Rollout(Protocol):
    """All engines together."""

    def generate(self, requests: list[Request]) -> Iterator[list[Sample]]:
        """Yields samples as they finish, in any order. Requests of one uid are adjacent; earlier ones start first."""
        ...

    def stop_early(self) -> None:
        """Stops the running `generate` early. It returns unfinished samples with finish="cut", and no unstarted ones."""
        ...

    def wake(self) -> None:
        """Prepares the engines for use. Colocated engines wake up."""
        ...

    def sleep(self) -> None:
        """Tells the engines that they are not needed for a while. Colocated engines sleep."""
        ...


class Rewards(Protocol):
    def judge(self, samples: list[Sample], prompts: dict[str, Prompt]) -> Future[list[Verdict]]:
        """Returns one verdict per sample, in order. A failure is a verdict too.

        The future fails only if the whole pool does.
        """
        ...


class Scorer(Protocol):
    """Computes one number for each sampled token: log-probs, or the critic's values."""

    ranks: int

    def score(self, packs: list[list[Pack]]) -> list[list[Floats]]:
        """Returns the numbers of each pack in the same nesting: `packs[rank][i]` → [K]."""
        ...


class Diagnosable(Scorer, Protocol):
    """A policy that can score with a changed forward pass, to find out why it disagrees with the engines."""

    def rescore(self, packs: list[list[Pack]], what_if: WhatIf) -> list[list[Floats]]:
        """`packs[rank][i]` → log-probs [K, samplings]."""
        ...

    def model_facts(self, texts: list[str]) -> ModelFacts:
        """Returns what the model's files say, and how they tokenize these texts."""
        ...


class Learner(Scorer, Protocol):
    """A model whose weights change, and belong to checkpoints."""

    def save(self, folder: str) -> None:
        """Copies the state and starts to write it into `folder`. `saved_files` tells when it is complete."""
        ...

    def saved_files(self, wait: bool) -> dict[str, str] | None:
        """Returns the SHA-256 of each file of the last `save`, by path; None while they are still being written."""
        ...

    def load(self, folder: str) -> None:
        """Loads what any number of ranks with any ZeRO stage have saved."""
        ...


class Reference(Learner, Protocol):
    """The model that KL is measured against."""

    def refresh(self) -> None:
        """Takes the policy's weights."""
        ...


class Critic(Learner, Protocol):
    """All ranks of the critic together."""

    def update(self, packs: list[list[Pack]], lr: float) -> dict[str, float]:
        """Makes one optimizer update on one mini-batch. Returns its loss and gradient norm."""
        ...


class Policy(Learner, Protocol):
    """All ranks of the policy together."""

    def update(self, packs: list[list[Pack]], lr: float, kl_coef: float) -> dict[str, float]:
        """Makes one optimizer update on one mini-batch. Returns sums over its tokens.

        `metrics.update_metrics` turns them into means.
        """
        ...

    def sync(self, version: int) -> None:
        """Sends the weights to every engine as `version`, and verifies that each engine computes with them."""
        ...
