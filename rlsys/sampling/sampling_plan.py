"""How each prompt of a batch is sampled."""

from collections.abc import Iterable
from dataclasses import dataclass

from rlsys.config.schema import Config
from rlsys.seeds import derive_seed
from rlsys.types import Prompt, Request


@dataclass(frozen=True)
class SamplingPlan:
    """`SamplingPlan(8, temperature=1.0, max_new_tokens=512)`: eight completions of each prompt."""

    samples: int
    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int = -1  # -1: from all tokens
    greedy: bool = False  # one more completion at temperature 0, of which only the reward is kept

    @classmethod
    def from_config(cls, config: Config) -> "SamplingPlan":
        r, greedy = config.rollout, config.algorithm.advantage == "remax"
        return cls(config.trainer.samples_per_prompt, r.temperature, r.max_new_tokens, greedy=greedy)

    @property
    def completions_per_prompt(self) -> int:
        return self.samples + self.greedy

    @property
    def greedy_index(self) -> int | None:
        """The index of the greedy completion, if there is one."""
        return self.samples if self.greedy else None

    def requests(self, seed: int, step: int | str, prompts: Iterable[Prompt]) -> list[Request]:
        temperatures = [self.temperature] * self.samples + [0.0] * self.greedy
        return [
            Request(
                p.uid,
                i,
                p.tokens,
                derive_seed(seed, step, p.uid, i),
                t,
                p.max_new_tokens or self.max_new_tokens,
                self.top_p,
                self.top_k,
                prompt=p if p.play else None,
            )
            for p in prompts
            for i, t in enumerate(temperatures)
        ]
